"""An offload device that is simulated: results of another one, times and joules of a model, on a clock of its own.

Implements `kvstrata_native.offload.Device`. Descriptors wait in their queues and are served by the first free channel,
the highest priority first; a fenced one waits for all earlier ones of its queue. Nothing here sleeps: the clock stands
still until somebody polls or advances it, so what is simulated may be faster than this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata_native.offload import (
    Capability,
    Completion,
    Description,
    Descriptor,
    Device,
    DeviceCounters,
    Flag,
    OffloadError,
    Queue,
    Status,
)

NAME: Final = b"simulated-accelerator"


@dataclass(frozen=True, slots=True)
class Model:
    """What the device is like. All of it is assumed; docs/offload.md has the sources."""

    channels: int = 4
    """Descriptors that are served at once."""
    fixed_s: float = 1e-6
    """Of one descriptor: a doorbell, a fetch of the descriptor and a completion over PCIe take 0.5 to 1 us (Neugebauer
    et al., Understanding PCIe performance for end host networking, SIGCOMM 2018)."""
    bytes_per_s: float = 15.75e9
    """Of one channel: four of them fill PCIe 5.0 x16, 32 GT/s on 16 lanes in 128b/130b, 63 GB/s each way."""
    fixed_j: float = 100e-9
    """Of one descriptor: argued, some hundred bytes over the link and some thousand cycles of a small controller."""
    logic_j_per_byte: float = 10e-12
    """Of digests and codecs in fixed logic: argued, ten operations of 1 pJ (Horowitz, Computing's energy problem,
    ISSCC 2014: 0.1 pJ for an addition and some pJ for its registers)."""
    link_j_per_byte: float = 80e-12
    """In and out over PCIe: argued, 5 pJ a bit each way."""
    memory_j_per_byte: float = 488e-12
    """Read and written once: 1.3 to 2.6 nJ for 64 bits of DRAM (Horowitz, ISSCC 2014), 1.95 taken."""

    def service_s(self, size_bytes: int) -> float:
        """Seconds of one descriptor on a channel."""
        return self.fixed_s + size_bytes / self.bytes_per_s

    def energy_j(self, size_bytes: int) -> float:
        """Joules of one descriptor."""
        return self.fixed_j + size_bytes * (self.logic_j_per_byte + self.link_j_per_byte + self.memory_j_per_byte)


@dataclass(slots=True)
class _Waiting:
    asked: Descriptor
    submitted_s: float


@dataclass(slots=True)
class _Served:
    done: Completion
    ends_s: float


class SimulatedDevice:
    """A `Device`; `real` gives the results and is closed with it."""

    def __init__(self, real: Device, model: Model) -> None:
        """Begin at second 0 with all channels free."""
        self.model, self._real = model, real
        self.now_s = 0.0
        """Seconds of the simulated clock."""
        self.busy_s = 0.0
        """Of all channels together."""
        self.energy_j = 0.0
        self._free_s = [0.0] * model.channels
        self._queues: list[SimulatedQueue] = []

    @property
    def description(self) -> Description:
        """That of the real one, which says that it is played."""
        made = self._real.description
        made.name, made.capabilities = NAME, made.capabilities | Capability.EMULATED
        return made

    @property
    def utilisation(self) -> float:
        """Share of the channels' time that was work, so far."""
        return self.busy_s / (self.now_s * self.model.channels) if self.now_s else 0.0

    def counters(self) -> DeviceCounters:
        """Counters of the real one, with simulated time and energy."""
        made = self._real.counters()
        made.busy_ns, made.energy_nj = round(self.busy_s * 1e9), round(self.energy_j * 1e9)
        return made

    def register(self, address: int, size_bytes: int) -> int:
        """Make memory known. Raises `OffloadError`."""
        return self._real.register(address, size_bytes)

    def unregister(self, memory: int) -> Status:
        """Undo it."""
        return self._real.unregister(memory)

    def queue(self, depth: int) -> "SimulatedQueue":
        """Return a new queue. Raises `OffloadError`."""
        made = SimulatedQueue(self, self._real.queue(1), depth)
        self._queues.append(made)
        return made

    def close(self) -> None:
        """Close it. Raises `OffloadError` while it has queues."""
        if self._queues:
            raise OffloadError(f"close: {len(self._queues)} queues", Status.BUSY)
        self._real.close()

    def advance(self, to_s: float) -> None:
        """Let the clock run: whatever can begin by then does."""
        while (begun := self._next(to_s)) is not None:
            queue, waiting, starts_s = begun
            queue.begin(waiting, starts_s)
        self.now_s = max(self.now_s, to_s)

    def next_end_s(self) -> float | None:
        """When the first descriptor that is under way, or can begin now, ends; None without one."""
        self.advance(self.now_s)
        ends = [served.ends_s for queue in self._queues for served in queue.served]
        return min(ends, default=None)

    def occupy(self, starts_s: float, size_bytes: int) -> float:
        """Take a channel; returns when it is free again."""
        channel = min(range(len(self._free_s)), key=self._free_s.__getitem__)
        service_s = self.model.service_s(size_bytes)
        self.busy_s += service_s
        self.energy_j += self.model.energy_j(size_bytes)
        self._free_s[channel] = starts_s + service_s
        return starts_s + service_s

    def forget(self, queue: "SimulatedQueue") -> None:
        """Let go of a queue that was closed."""
        self._queues.remove(queue)

    def _next(self, to_s: float) -> "tuple[SimulatedQueue, _Waiting, float] | None":
        """What begins next, by `to_s` at the latest: of all that wait then, the highest priority, then the oldest."""
        ready = [one for queue in self._queues if (one := queue.first_ready()) is not None]
        if not ready:
            return None
        starts_s = max(min(self._free_s), min(from_s for _, _, from_s in ready))
        if starts_s > to_s:
            return None
        able = [one for one in ready if one[2] <= starts_s]
        queue, waiting, _ = min(able, key=lambda one: (-one[1].asked.priority, one[1].submitted_s))
        return queue, waiting, starts_s


@dataclass(slots=True, eq=False)
class SimulatedQueue:
    """A `Queue` of it."""

    device: SimulatedDevice
    real: Queue
    depth: int
    waiting: list[_Waiting] = field(default_factory=list)
    served: list[_Served] = field(default_factory=list)
    """Begun, and not polled."""
    _is_open: bool = True

    def submit(self, batch: Sequence[Descriptor]) -> int:
        """Take as many as there is room for."""
        taken = batch[: max(0, self.depth - len(self.waiting) - len(self.served))]
        self.waiting += [_Waiting(asked, self.device.now_s) for asked in taken]
        return len(taken)

    def poll(self, most: int, timeout_s: float = 0.0) -> list[Completion]:
        """Return what has ended by now, or by the first end within `timeout_s`, up to which the clock runs."""
        until_s = self.device.now_s + timeout_s
        self.device.advance(self.device.now_s)
        while not self._ended():
            first_s = min((s.ends_s for s in self.served), default=self.device.next_end_s())
            if first_s is None or first_s > until_s:
                self.device.advance(until_s)
                break
            self.device.advance(first_s)
        ended = self._ended()[:most]
        self.served = [s for s in self.served if s not in ended]
        return [s.done for s in ended]

    def cancel(self, tag: int) -> Status:
        """Stop what has not begun."""
        self.device.advance(self.device.now_s)
        for waiting in self.waiting:
            if waiting.asked.tag == tag:
                self.waiting.remove(waiting)
                done = Completion(tag=tag, status=Status.CANCELLED)
                done.waited_ns = round((self.device.now_s - waiting.submitted_s) * 1e9)
                self.served.append(_Served(done, self.device.now_s))
                return Status.OK
        is_begun = any(s.done.tag == tag and s.ends_s > self.device.now_s for s in self.served)
        return Status.BUSY if is_begun else Status.NOT_FOUND

    def close(self) -> None:
        """End it; what has not begun never will. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.real.close()
            self.device.forget(self)

    def first_ready(self) -> tuple["SimulatedQueue", _Waiting, float] | None:
        """What of this queue begins next, and from when on it can; None with nothing or a fence in the way."""
        best: tuple[SimulatedQueue, _Waiting, float] | None = None
        for place, waiting in enumerate(self.waiting):
            if not waiting.asked.flags & Flag.FENCE:
                found = (self, waiting, waiting.submitted_s)
            elif place == 0:
                found = (self, waiting, max([waiting.submitted_s, *(s.ends_s for s in self.served)]))
            else:
                break
            if best is None or waiting.asked.priority > best[1].asked.priority:
                best = found
            if waiting.asked.flags & Flag.FENCE:
                break
        return best

    def begin(self, waiting: _Waiting, starts_s: float) -> None:
        """Do the work, and note when it ends."""
        self.waiting.remove(waiting)
        self.real.submit([waiting.asked])
        done = self.real.poll(1, 1.0)[0]
        asked = waiting.asked
        size_bytes = max(
            sum(asked.sources[i].size_bytes for i in range(asked.source_count)),
            sum(asked.targets[i].size_bytes for i in range(asked.target_count)),
        )
        before_j = self.device.energy_j
        ends_s = self.device.occupy(starts_s, size_bytes)
        done.waited_ns = round((starts_s - waiting.submitted_s) * 1e9)
        done.served_ns = round((ends_s - starts_s) * 1e9)
        done.energy_nj = round((self.device.energy_j - before_j) * 1e9)
        self.served.append(_Served(done, ends_s))

    def _ended(self) -> list[_Served]:
        ended = [s for s in self.served if s.ends_s <= self.device.now_s]
        return sorted(ended, key=lambda s: s.ends_s)

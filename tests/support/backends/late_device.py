"""A device that does everything as late as it may: what nobody waits for has not happened."""

import threading
from collections.abc import Callable

import torch

from kvstrata_agent.backends.device.hbm import Wait
from kvstrata_native.devices import Allocation, allocate_host

JUNK = 0xEE


class LateQueue:
    """Work is done when somebody waits for it, or for work behind it (`DeviceQueue`). New memory is full of junk."""

    def __init__(self, name: str = "late:0", memory_bytes: int | None = None) -> None:
        self.name = name
        self.memory_bytes = memory_bytes
        self.fails_at: frozenset[int] = frozenset()
        """Numbers of the works, from 0, that the device fails at."""
        self.started = 0
        self.done = 0
        self.most_under_way = 0
        self.stagings: list[int] = []
        self.trims = 0
        self._allocated_bytes = 0
        self._works: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Raises `torch.OutOfMemoryError` for more than there is."""
        self._allocated_bytes += size_bytes
        if self.memory_bytes is not None and self._allocated_bytes > self.memory_bytes:
            self._allocated_bytes -= size_bytes
            raise torch.OutOfMemoryError(f"out of memory: {self._allocated_bytes} B of {self.memory_bytes} in use")
        return torch.full((size_bytes,), JUNK, dtype=torch.uint8)

    def allocate_shared(self, size_bytes: int) -> Allocation:
        """As `allocate`, in host memory that others can open."""
        self.allocate(size_bytes)
        made = allocate_host(size_bytes)
        made.memory.fill_(JUNK)
        return made

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Counted."""
        self.stagings.append(size_bytes)
        return torch.full((size_bytes,), JUNK, dtype=torch.uint8)

    def start(self, work: Callable[[], object]) -> Wait:
        """Do nothing yet."""
        with self._lock:
            self._works.append(work)
            number, self.started = self.started, self.started + 1
            self.most_under_way = max(self.most_under_way, self.started - self.done)
        return lambda: self._wait(number)

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Nothing yet, too."""
        return self.start(lambda: target.copy_(source))

    def _wait(self, number: int) -> None:
        with self._lock:
            while self.done <= number:
                work, self.done = self._works.pop(0), self.done + 1
                if self.done - 1 not in self.fails_at:
                    work()
        if number in self.fails_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def trim(self) -> None:
        """Counted."""
        self.trims += 1

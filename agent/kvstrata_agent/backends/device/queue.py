"""Work that a torch device does in the order in which it was started, beside whatever else the device does.

Everything that touches a tier's memory goes through the queue of its device, allocation included: torch's default
stream knows nothing of others, and zeroes of an allocation there could arrive after the first block.
"""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from kvstrata_api.errors import UnsupportedError

Wait = Callable[[], None]
"""Returns when the work is done; raises `RuntimeError` when the device failed at it or before it."""

DOUBLE: Final = "cpu"


class DeviceQueue(Protocol):
    """One device. Any thread may start work; what one thread starts is done in its order."""

    @property
    def name(self) -> str:
        """The device, as torch calls it."""

    @property
    def memory_bytes(self) -> int | None:
        """All memory of the device; None where it has no limit of its own."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device with anything in it. Raises `torch.OutOfMemoryError`."""

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Memory of the host that the device reaches by itself."""

    def start(self, work: Callable[[], object]) -> Wait:
        """Let the device do `work` after all that was started before. Raises `RuntimeError`."""

    def trim(self) -> None:
        """Let others on the device have what was freed."""


class CudaQueue:
    """A CUDA stream of our own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self.name = str(self._device)
        self.memory_bytes: int | None = torch.cuda.get_device_properties(self._device).total_memory

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`. The memory belongs to our stream, so it is used again only behind our work."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`: pinned, without which copies would go through the driver's buffers and block."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceQueue`. Whoever waits sleeps: engines want the cores."""
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        wait: Wait = done.synchronize
        return wait

    def trim(self) -> None:
        """See `DeviceQueue`: torch keeps freed memory, and engines are other processes."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


class HostQueue:
    """A double on the host, for tests: everything is done at once."""

    name = DOUBLE
    memory_bytes: int | None = None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceQueue`."""
        work()
        return _done

    def trim(self) -> None:
        """See `DeviceQueue`."""


def _done() -> None:
    pass


def open_queues(device: str) -> tuple[DeviceQueue, ...]:
    """Queues of all CUDA devices for `cuda`, or of the double for `cpu`.

    Raises `UnsupportedError` where torch sees no device, and for any other name.
    """
    if device == DOUBLE:
        return (HostQueue(),)
    if device != "cuda":
        raise UnsupportedError(f"HBM tier: device {device!r}: must be 'cuda', or {DOUBLE!r} as a double")
    if not torch.cuda.is_available():
        raise UnsupportedError("HBM tier: torch sees no CUDA device; install the driver and the `cuda` extra")
    return tuple(CudaQueue(index) for index in range(torch.cuda.device_count()))

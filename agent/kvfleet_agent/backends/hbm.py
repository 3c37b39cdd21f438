"""GPU memory as a tier, on torch. The CPU device is a double for tests and has to be asked for by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kvfleet_agent.backends.base import Capabilities
from kvfleet_agent.backends.device import DeviceTier
from kvfleet_api.errors import BackendFailedError, TierFullError, UnsupportedError

_ALIGNMENT_BYTES: Final = 512
"""What the CUDA allocator aligns to, and enough for any vector load."""


def open_hbm(device: str, capacity_bytes: int) -> DeviceTier:
    """Tier in the memory of a torch device. Raises `UnsupportedError` when torch sees no such device."""
    memory = HbmMemory(device)
    capabilities = Capabilities(
        medium=f"torch-{memory.device.type}",
        is_memory=True,
        survives_restart=False,
        is_emulated=memory.device.type != "cuda",
        alignment_bytes=_ALIGNMENT_BYTES,
    )
    return DeviceTier(capabilities, memory, capacity_bytes, page_bytes=_ALIGNMENT_BYTES)


class HbmMemory:
    """Tensors of one device (`DeviceMemory`). Copies run on a stream of their own."""

    def __init__(self, device: str) -> None:
        """Raises `UnsupportedError` when torch sees no such device."""
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError("HBM tier: torch sees no CUDA device; install the driver and the `cuda` extra")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.tensors: dict[int, torch.Tensor] = {}

    def make(self, extent: int, size_bytes: int) -> None:
        """Allocate zeroed memory. See `DeviceMemory`."""
        try:
            self.tensors[extent] = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as e:
            raise TierFullError(f"{size_bytes} B of {self.device}: {e}") from e

    def release(self, extent: int) -> None:
        """Clear and free: torch keeps freed memory for itself, and what was a prompt does not wait there."""
        self.tensors.pop(extent).zero_()

    def copy_in(self, extent: int, offset: int, source: memoryview) -> None:
        """Copy to the device. See `DeviceMemory`."""
        host = torch.frombuffer(bytearray(source) if source.readonly else source, dtype=torch.uint8)
        self._copy(self.tensors[extent][offset : offset + len(source)], host)

    def copy_out(self, extent: int, offset: int, into: memoryview) -> None:
        """Copy to the host. See `DeviceMemory`."""
        self._copy(torch.frombuffer(into, dtype=torch.uint8), self.tensors[extent][offset : offset + len(into)])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._errors():
            if self._stream is None:
                target.copy_(source)
                return
            with torch.cuda.stream(self._stream):
                target.copy_(source)
            self._stream.synchronize()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # torch's device errors share no closer base.
            raise BackendFailedError(f"{self.device}: {e}") from e

    def broken(self) -> frozenset[int]:
        """A device that failed once is asked again."""
        return frozenset()

    def close(self) -> None:
        """Clear everything."""
        for extent in tuple(self.tensors):
            self.release(extent)

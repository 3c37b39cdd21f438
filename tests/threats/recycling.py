"""A device that gives freed memory out again as it is, like torch's allocator on a GPU."""

import weakref

import torch

from kvstrata_agent.backends.device.hbm import HostQueue


class RecyclingQueue(HostQueue):
    """Memory that was freed comes again, with what it held."""

    def __init__(self) -> None:
        self._freed: list[torch.Tensor] = []

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory of this size that nobody has any more; new memory where there is none."""
        fitting = next((t for t in self._freed if len(t) == size_bytes), None)
        whole = torch.empty(size_bytes, dtype=torch.uint8) if fitting is None else fitting
        self._freed = [t for t in self._freed if t is not whole]
        made = whole[:]
        weakref.finalize(made, self._take_back, whole)
        return made

    def _take_back(self, whole: torch.Tensor) -> None:
        self._freed.append(whole)

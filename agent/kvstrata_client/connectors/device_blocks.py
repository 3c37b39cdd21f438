"""Blocks that lie in the memory of a device are read there: opened once an extent, and copied on the device.

What is copied is held against the agent's sum of the block, on the device and in the copy: whatever happens to the
agent, or to its memory, meanwhile is a miss. The leases are ended after that, and only an agent that confirms that they
lived makes the copies good. `names` of the double is `emulated`: host memory that both processes have mapped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import DeviceGrant
from kvstrata_client.cache import PrefixCache
from kvstrata_client.verbs.copying import copy_verified_each
from kvstrata_client.verbs.results import Lease
from kvstrata_native.devices import EMULATED, Opened, block_sums, open_cuda, open_host, packed, uuid_of


class CudaDevices:
    """CUDA devices of this process (`target.Devices`)."""

    def __init__(self, indices: Sequence[int] | None = None) -> None:
        """Open memory of these devices, by torch's number; None: of all that torch sees."""
        self._indices = {uuid_of(i): i for i in (range(torch.cuda.device_count()) if indices is None else indices)}
        self.error = ""
        """See `target.Devices`."""

    @property
    def names(self) -> tuple[str, ...]:
        """See `target.Devices`."""
        return tuple(self._indices)

    def covers(self, device: torch.device) -> bool:
        """See `target.Devices`."""
        return not self.error and bool(device.type == "cuda")

    def open(self, grant: DeviceGrant, fd: int) -> Opened:
        """See `target.Devices`."""
        try:
            return open_cuda(self._indices[grant.device], fd, grant.size_bytes)
        except (OSError, RuntimeError) as e:
            self.error = f"extent {grant.extent} of device {grant.device}: {e}"
            raise InvalidInputError(self.error) from e


class HostDevices:
    """The double of agents whose device is emulated in host memory (`target.Devices`)."""

    names = (EMULATED,)

    def __init__(self) -> None:
        """Open nothing yet."""
        self.error = ""

    def covers(self, device: torch.device) -> bool:
        """See `target.Devices`."""
        return not self.error and bool(device.type == "cpu")

    def open(self, grant: DeviceGrant, fd: int) -> Opened:
        """See `target.Devices`."""
        try:
            return open_host(fd, grant.size_bytes)
        except RuntimeError as e:
            self.error = f"extent {grant.extent} of device {grant.device}: {e}"
            raise InvalidInputError(self.error) from e


Room = Callable[[int, int], Any]
"""Memory of the device for so many blocks from a first place on: (blocks, block bytes) uint8."""
Put = Callable[[int, Any], object]
"""Takes blocks that were verified there, for the places from a first one on."""


class Rows:
    """Places on a device that blocks are loaded into (`prompt.load.DeviceRows`). One thread at a time.

    Blocks are copied to memory of the engine's own process and verified there, so that nobody else writes what counts.
    """

    def __init__(self, room: Room, put: Put | None, blocks: int, device: torch.device) -> None:
        """Make room for `blocks`; `put` works on the current stream, None where `room` is their place."""
        self._room = room
        self._put = put
        self._blocks = blocks
        self._device = device
        self.in_place_blocks = 0
        """Verified blocks that were copied on the device alone."""

    def __len__(self) -> int:
        return self._blocks

    def copy(self, first: int, leases: Sequence[Lease]) -> Sequence[bool]:
        """See `DeviceRows`."""
        room = self._room(first, len(leases))
        try:
            sound = self._copied(room, leases)
        except RuntimeError:  # Of the device: torch's errors share no closer base. Nothing was verified.
            return [False] * len(leases)
        right = sound.index(False) if False in sound else len(sound)
        if self._put is not None:
            self._put(first, room[:right])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # The leases end behind this.
        self.in_place_blocks += sum(lease.tensor is not None for lease in leases[:right])
        return sound

    def _copied(self, room: torch.Tensor, leases: Sequence[Lease]) -> list[bool]:
        there = [i for i, lease in enumerate(leases) if lease.tensor is not None]
        here = [i for i, lease in enumerate(leases) if lease.tensor is None]
        sound = [False] * len(leases)
        for i in there:
            room[i].copy_(leases[i].tensor, non_blocking=True)
        if there:
            sums = block_sums(room if not here else room[there]).tolist()
            for i, total in zip(there, sums, strict=True):
                sound[i] = packed(total) == leases[i].device_sum
        if here:
            host = torch.empty((len(here), room.shape[1]), dtype=torch.uint8)
            rows = [(memoryview(row),) for row in host.numpy()]
            for i, row, is_right in zip(here, host, copy_verified_each([leases[i] for i in here], rows), strict=True):
                sound[i] = is_right
                if is_right:
                    room[i].copy_(row)
        return sound


def reads_in_place(cache: PrefixCache, device: torch.device) -> bool:
    """Whether a client's loads to a device are to be copied there from where they lie."""
    devices = cache.devices
    return devices is not None and devices.covers(device)


def rows_of(tensor: torch.Tensor) -> Rows:
    """Places that are the rows of a tensor: (blocks, block bytes) uint8. Raises `InvalidInputError` for any other."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 2:
        raise InvalidInputError(f"rows of {tensor.dtype} {tuple(tensor.shape)}: uint8 (blocks, block bytes) wanted")
    return Rows(lambda first, count: tensor[first : first + count], None, len(tensor), tensor.device)


def put_rows(put: Put, blocks: int, block_bytes: int, device: torch.device) -> Rows:
    """Places that `put` brings blocks to, such as pages; a batch of them takes memory of the device besides."""
    kept = torch.empty((0, block_bytes), dtype=torch.uint8, device=device)

    def room(_first: int, count: int) -> torch.Tensor:
        nonlocal kept
        if len(kept) < count:
            kept = torch.empty((count, block_bytes), dtype=torch.uint8, device=device)
        return kept[:count]

    return Rows(room, put, blocks, device)

"""Engines that keep KV in pages on a device: a prompt's blocks are saved from their pages and loaded into pages.

Everything goes to the device on the stream that is current, so it is in order with what the engine computes there; an
engine that wants both side by side makes another stream current. Only what was verified in host memory goes up, and
what lies on a device that the client opens is copied and verified there.

Pages are gathered into blocks of a layout, and blocks scattered to pages: bits are moved and nothing else. No page is
written but those that a caller names, and of them no row behind its tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import torch

from kvstrata_api.blocks import Layout, token_ids
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.units import MIB
from kvstrata_client.cache import PrefixCache
from kvstrata_client.connectors.device_blocks import put_rows, reads_in_place
from kvstrata_client.prompt.streaming import LayerStream
from kvstrata_client.verbs.leases import lost
from kvstrata_client.verbs.results import Bytes2D, Stored

ORDER: Final = "kv,page,token,head,dim"
"""Memory order of vLLM's FlashAttention layers; FlashInfer's is `page,kv,token,head,dim`, or with head before token."""
_OURS: Final = ("page", "token", "kv", "head", "dim")
BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BATCH_BYTES: Final = 64 * MIB
"""Of blocks that are offloaded together: a few milliseconds of a link, and twice that is pinned."""
_PIECES: Final = 2


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Where the tokens of whole blocks lie: for each of them a page and a row of it, on the device."""

    pages: Any
    rows: Any
    blocks: range
    """Which blocks of the prompt."""

    def part(self, blocks: range) -> "TokenRows":
        """The rows of some of these blocks."""
        size = len(self.pages) // max(1, len(self.blocks))
        tokens = slice((blocks.start - self.blocks.start) * size, (blocks.stop - self.blocks.start) * size)
        return TokenRows(self.pages[tokens], self.rows[tokens], blocks)


class PagedKv:
    """The KV tensors of an engine, one for each layer. They stay the engine's, and so does the device they are on."""

    def __init__(self, tensors: Sequence[Any], layout: Layout, order: str = ORDER) -> None:
        """Bind tensors of five dimensions, named slowest first by `order`.

        Raises `InvalidInputError` where they are not those of `layout`, or not alike.
        """
        names = order.split(",")
        if sorted(names) != sorted(_OURS):
            raise InvalidInputError(f"order {order!r}: each of {','.join(_OURS)} wanted once")
        if len(tensors) != layout.layers:
            raise InvalidInputError(f"tensors of {len(tensors)} layers, the layout has {layout.layers}")
        self._layers = [_checked(t, layout, names, number) for number, t in enumerate(tensors)]
        self.layout = layout
        self.device = tensors[0].device
        self.pages, self.page_tokens = self._layers[0].shape[:2]
        if any(t.shape != self._layers[0].shape or t.device != self.device for t in self._layers):
            raise InvalidInputError("tensors of layers differ in pages, tokens of a page, or device")

    def rows(self, table: Sequence[int], blocks: range) -> TokenRows:
        """Where blocks of a prompt lie whose page `n` has number `table[n]`.

        Pages of other blocks are not looked at. Raises `InvalidInputError` for pages that there are not, that come
        twice, and for a table that is too short.
        """
        pages = np.asarray(table)
        if pages.ndim != 1 or (len(pages) and pages.dtype.kind not in "iu"):
            raise InvalidInputError(f"a table of {pages.dtype} {pages.shape}: one row of whole numbers wanted")
        pages = pages.astype(np.int64)
        size = self.layout.block_tokens
        tokens = np.arange(blocks.start * size, blocks.stop * size)
        if blocks.stop * size > len(pages) * self.page_tokens:
            raise InvalidInputError(
                f"a table of {len(pages)} pages of {self.page_tokens} tokens, {blocks.stop * size} tokens wanted"
            )
        used = pages[blocks.start * size // self.page_tokens : -(-blocks.stop * size // self.page_tokens)]
        if len(used) and not 0 <= used.min() <= used.max() < self.pages:
            raise InvalidInputError(f"pages {used.min()} to {used.max()} in a table: 0 to {self.pages - 1} are there")
        if len(np.unique(used)) < len(used):
            raise InvalidInputError("a page stands in a table twice")
        where = torch.from_numpy(pages[tokens // self.page_tokens]), torch.from_numpy(tokens % self.page_tokens)
        return TokenRows(where[0].to(self.device), where[1].to(self.device), blocks)

    def gather(self, layer: int, rows: TokenRows, into: Any) -> None:
        """Fill `into`, (blocks, bytes of a layer) uint8 on the same device, with a layer of blocks."""
        found = self.read_tokens(layer, rows).unflatten(0, (len(rows.blocks), -1))
        self._shaped(into, rows).copy_(found.permute(0, 2, 3, 1, 4))

    def gatherer(self, rows: TokenRows) -> "Gather":
        """What `offloaded` gathers blocks by of which `rows` says where they lie."""
        return partial(self._gather_blocks, rows)

    def _gather_blocks(self, rows: TokenRows, blocks: range, into: Any) -> None:
        layers, part = into.view(len(into), self.layout.layers, -1), rows.part(blocks)
        for layer in range(self.layout.layers):
            self.gather(layer, part, layers[:, layer])

    def scatter(self, layer: int, rows: TokenRows, source: Any) -> None:
        """Put a layer of blocks, as `gather` gives it, where their tokens lie."""
        self.write_tokens(layer, rows, self._shaped(source, rows).permute(0, 3, 1, 2, 4).flatten(0, 1))

    def read_tokens(self, layer: int, rows: TokenRows) -> Any:
        """A layer of tokens: (tokens, parts, heads, dim) bits. For engines with another order of a page, as below."""
        return self._layers[layer][rows.pages, rows.rows]

    def write_tokens(self, layer: int, rows: TokenRows, tokens: Any) -> None:
        """Put a layer of tokens, as `read_tokens` gives it, into its pages."""
        self._layers[layer][rows.pages, rows.rows] = tokens

    def _shaped(self, layer: Any, rows: TokenRows) -> Any:
        """View of a layer of blocks as (blocks, parts, heads, tokens, dim) bits."""
        layout = self.layout
        shape = (len(rows.blocks), layout.kv_parts, layout.kv_heads, layout.block_tokens, layout.head_dim)
        return layer.view(BITS[layout.element_bytes]).view(shape)


def _checked(tensor: Any, layout: Layout, names: Sequence[str], number: int) -> Any:
    """View of a layer's tensor as (pages, tokens, parts, heads, dim) bits."""
    if tensor.dim() != len(names) or tensor.element_size() != layout.element_bytes:
        raise InvalidInputError(
            f"layer {number}: {tensor.dim()} dimensions of {tensor.element_size()} B, {len(names)} dimensions of "
            f"{layout.element_bytes} B wanted"
        )
    ours = tensor.permute([names.index(name) for name in _OURS])
    found, wanted = tuple(ours.shape[2:]), (layout.kv_parts, layout.kv_heads, layout.head_dim)
    if found != wanted:
        raise InvalidInputError(f"layer {number}: (kv, heads, dim) {found}, the layout has {wanted}")
    return ours.view(BITS[layout.element_bytes])


Wait = Callable[[], None]


class DeviceWork(Protocol):
    """What a device is given to do, in order."""

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Memory of the host that the device reaches by itself."""

    def allocate(self, size_bytes: int) -> torch.Tensor | None:
        """Memory of the device; None where that is the host's own. Raises `RuntimeError` as torch does."""

    def start(self, work: Callable[[], object]) -> Wait:
        """Let the device do `work`; what is returned waits for it. Raises `RuntimeError` as torch does."""


class CudaWork:
    """On the stream of a device that is current, or on one of its own: then beside what the engine computes."""

    def __init__(self, device: Any = None, stream: Any = None) -> None:
        """Use a device, or the one that is current when work is started; so for its `torch.cuda.Stream`."""
        self._device = device
        self._stream = stream

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceWork`: pinned."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, size_bytes: int) -> torch.Tensor | None:
        """See `DeviceWork`."""
        with torch.cuda.device(self._device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceWork`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record()
        wait: Wait = done.synchronize
        return wait


class HostWork:
    """Of engines whose KV is in host memory: done at once."""

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceWork`."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def allocate(self, size_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """See `DeviceWork`."""
        return None

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceWork`."""
        work()
        return _done


def _done() -> None:
    pass


def work_of(device: Any, *, is_beside: bool = False) -> DeviceWork:
    """What carries out work of a device that an engine's KV is on; `is_beside` what the engine computes there."""
    if device.type != "cuda":
        return HostWork()
    return CudaWork(device, torch.cuda.Stream(device) if is_beside else None)


def batch_blocks(block_bytes: int, most_bytes: int = 0) -> int:
    """How long the runs are that `batches_of` makes."""
    return max(1, (most_bytes or BATCH_BYTES) // block_bytes)


def batches_of(blocks: range, block_bytes: int, most_bytes: int = 0) -> list[range]:
    """Blocks in runs of `most_bytes`, `BATCH_BYTES` unless said otherwise, or of one block."""
    step = batch_blocks(block_bytes, most_bytes)
    return [range(at, min(at + step, blocks.stop)) for at in range(blocks.start, blocks.stop, step)]


class PagedConnector:
    """Saves and loads prompts of one engine. Blocking; one thread at a time."""

    def __init__(self, cache: PrefixCache, kv: PagedKv, work: DeviceWork | None = None) -> None:
        """Bind a prefix cache to an engine's pages; `work` is the device's, which is found out when it is None."""
        self._cache = cache
        self._kv = kv
        self._work = work or work_of(kv.device)

    def save(self, tokens: Sequence[int], table: Sequence[int], *, first_block: int = 0, session: str = "") -> Stored:
        """Store the full blocks of `tokens` from `first_block` on; `table` has the page of each run of tokens.

        Comes back when the pages may be written again. Raises `InvalidInputError` for a table that does not fit.
        """
        layout, ids = self._kv.layout, token_ids(tokens)
        stop = len(ids) // layout.block_tokens
        rows = self._kv.rows(table, range(min(first_block, stop), stop))
        batches = batches_of(range(first_block, stop), layout.block_bytes)
        stored = Stored()
        gather, device = self._kv.gatherer(rows), self._kv.device
        for blocks, copied in offloaded(gather, self._work, layout.block_bytes, batches, device):
            made = self._cache.store(ids, copied, first_block=blocks.start, session=session)
            stored = added(stored, made)
        return stored

    def load(
        self, tokens: Sequence[int], table: Sequence[int], *, session: str = "", blocks_max: int | None = None
    ) -> "PagedLoad | LoadedPages":
        """Lease the longest prefix that can be had at a time, to be brought into the pages of `table` layer by layer.

        `blocks_max` bounds it: the last token of a prompt has to be computed for its logits. Raises
        `InvalidInputError` for a table that does not fit.
        """
        ids = token_ids(tokens)
        most = len(ids) // self._kv.layout.block_tokens
        most = most if blocks_max is None else min(most, blocks_max)
        self._kv.rows(table, range(most))
        if reads_in_place(self._cache, self._kv.device):
            return self._load_in_place(ids, table, session, most)
        stream = self._cache.stream(ids, session=session, blocks_max=most)
        try:
            return PagedLoad(stream, self._kv, table, self._work)
        except BaseException:
            stream.close()
            raise

    def _load_in_place(self, ids: Any, table: Sequence[int], session: str, blocks_max: int) -> "LoadedPages":
        layout = self._kv.layout
        rows = put_rows(partial(self._put, table), blocks_max, layout.block_bytes, self._kv.device)
        loaded = self._cache.load_rows(ids, rows, session=session, blocks_max=blocks_max)
        return LoadedPages(loaded.blocks * layout.block_tokens, layout.layers, rows.in_place_blocks)

    def _put(self, table: Sequence[int], first: int, blocks: Any) -> None:
        """Scatter verified blocks of the prompt, the first of which is `first`, to their pages."""
        layers = blocks.view(len(blocks), self._kv.layout.layers, -1)
        rows = self._kv.rows(table, range(first, first + len(blocks)))
        for layer in range(self._kv.layout.layers):
            self._kv.scatter(layer, rows, layers[:, layer].contiguous())


class LoadedPages:
    """A prefix that lies in its pages: what `PagedLoad` is once it has finished. Whole blocks come by one sum each."""

    def __init__(self, tokens: int, layers: int, in_place_blocks: int) -> None:
        self._layers = layers
        self.in_place_blocks = in_place_blocks
        """Blocks that were copied on the device alone."""
        self.tokens = tokens
        """Leading tokens that are loaded; 0 when nothing was found."""

    def layer(self, number: int) -> None:
        """Raise `InvalidInputError` for a layer that the layout has not; the others are there."""
        if not 0 <= number < self._layers:
            raise InvalidInputError(f"layer {number}: 0 to {self._layers - 1} are there")

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> bool:
        """See `PagedLoad.close`: the leases lived until what is counted in `tokens` had been verified."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to do."""


class PagedLoad:
    """A prefix on its way into pages. Use it in a `with` block, or `finish` it: only then what was loaded counts.

    Where that raises, or `layer` does, the pages of the prefix hold nothing of use and the prompt is to be computed.
    """

    def __init__(self, stream: LayerStream, kv: PagedKv, table: Sequence[int], work: DeviceWork) -> None:
        self._stream = stream
        self._kv = kv
        self._work = work
        self._rows = kv.rows(table, range(stream.blocks))
        self._next = 0
        layer_bytes = kv.layout.block_bytes // kv.layout.layers
        self._rooms = [
            work.staging(stream.blocks * layer_bytes).view(stream.blocks, layer_bytes) for _ in range(_PIECES)
        ]
        self._waits: list[Wait] = [_done] * _PIECES
        self.tokens = stream.blocks * kv.layout.block_tokens
        """Leading tokens that are loaded; 0 when nothing was found."""

    def layer(self, number: int) -> None:
        """Verify layers up to `number` and put them on their way: what the device does after this finds them there.

        Raises `InvalidInputError` for a layer that the layout has not, and the `KvStrataError` that kept one away.
        """
        if not 0 <= number < self._kv.layout.layers:
            raise InvalidInputError(f"layer {number}: 0 to {self._kv.layout.layers - 1} are there")
        while self.tokens and self._next <= number:
            self._bring(self._next)
            self._next += 1

    def _bring(self, layer: int) -> None:
        piece = layer % _PIECES
        room = self._rooms[piece]
        self._waits[piece]()
        self._stream.read(range(layer, layer + 1), room.numpy())
        self._waits[piece] = self._work.start(partial(self._scatter, layer, room))

    def _scatter(self, layer: int, room: Any) -> None:
        self._kv.scatter(layer, self._rows, room.to(self._kv.device, non_blocking=True))

    def finish(self) -> None:
        """Bring what is left, wait for the device, and end the leases.

        Raises `LeaseLostError` when they did not live until now, and the `KvStrataError` that kept a layer away.
        """
        try:
            self.layer(self._kv.layout.layers - 1)
        finally:
            is_valid = self.close()
        if not is_valid:
            raise lost(self._stream.blocks)

    def close(self) -> bool:
        """Wait for the device and end the leases; true when all of them lived until now. Idempotent."""
        try:
            for wait in self._waits:
                wait()
        finally:
            is_valid = self._stream.close()
        return is_valid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.close()


Gather = Callable[[range, Any], None]
"""Fills (blocks, block bytes) uint8 on an engine's device with blocks of a prompt."""


def offloaded(
    gather: Gather, work: DeviceWork, block_bytes: int, batches: Sequence[range], device: Any
) -> Iterator[tuple[range, Bytes2D]]:
    """Batches of blocks in host memory, one after the other; the next one is in flight meanwhile.

    What is yielded is good until the next one is asked for.
    """
    most_bytes = max((len(blocks) for blocks in batches), default=0) * block_bytes
    rooms = [work.staging(most_bytes) for _ in batches[:_PIECES]]
    in_flight: deque[tuple[range, Bytes2D, Wait]] = deque()
    for number, blocks in enumerate(batches):
        room = rooms[number % _PIECES][: len(blocks) * block_bytes].view(len(blocks), block_bytes)
        in_flight.append((blocks, room.numpy(), work.start(partial(bring_down, gather, blocks, room, device))))
        if len(in_flight) == _PIECES:
            yield _when_done(*in_flight.popleft())
    for one in in_flight:
        yield _when_done(*one)


def bring_down(gather: Gather, blocks: range, into: Any, device: Any) -> None:
    """Bring blocks into host memory: gathered on the device, they come in one copy."""
    whole = into if device.type == "cpu" else torch.empty(into.shape, dtype=torch.uint8, device=device)
    gather(blocks, whole)
    if whole is not into:
        into.copy_(whole, non_blocking=True)


def _when_done(blocks: range, rows: Bytes2D, wait: Wait) -> tuple[range, Bytes2D]:
    wait()
    return blocks, rows


def added(one: Stored, other: Stored) -> Stored:
    """What two stores of one prompt came to."""
    return Stored(
        one.published + other.published,
        one.existed + other.existed,
        one.copied + other.copied,
        one.refused + other.refused,
        one.error or other.error,
        max(one.busy_s, other.busy_s),
        max(one.reached_blocks, other.reached_blocks),
    )

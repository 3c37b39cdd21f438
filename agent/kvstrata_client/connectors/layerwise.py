"""A transformers cache whose layers arrive while the model computes with those that are there.

A thread copies and verifies layer after layer; the attention of a layer waits for its own and no other. What cannot be
had is raised in the forward pass as a `KvStrataError`: the engine computes the prompt without it then.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Final

from transformers.cache_utils import DynamicLayer

from kvstrata_api.errors import KvStrataError, LeaseLostError
from kvstrata_client.prompt.streaming import LayerStream
from kvstrata_client.verbs.leases import lost
from kvstrata_client.verbs.results import Bytes2D

ARRIVE_S: Final = 30.0
"""A layer that is not copied by then never will be: copying takes milliseconds, and the blocks are in memory."""

States = Callable[[Bytes2D], tuple[Any, Any]]
"""Makes the keys and values of a layer, (1, heads, tokens, dim), from its bytes of all blocks."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a restore and the computing went on side by side."""

    first_layer_s: float
    """From the start until the first layer was there."""
    all_layers_s: float
    """From the start until the last one was."""
    waited_s: float
    """What the computing spent waiting for layers; the rest of `all_layers_s` was hidden behind it."""


class ArrivingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed here.
    """A layer that knows how long it is before its bytes are there."""

    def __init__(self, arrival: "Future[tuple[Any, Any]]", tokens: int, note_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._arrival: Future[tuple[Any, Any]] | None = arrival
        self._tokens = tokens
        self._note_wait = note_wait

    def settle(self) -> None:
        """Wait for the bytes. Raises the `KvStrataError` that kept them away."""
        if self._arrival is None:
            return
        begin_s = time.perf_counter()
        try:
            keys, values = self._arrival.result(ARRIVE_S)
        except FutureTimeoutError as e:
            raise LeaseLostError(f"a layer was not there after {ARRIVE_S:.0f} s") from e
        self._note_wait(time.perf_counter() - begin_s)
        self._arrival = None
        super().update(keys, values)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `DynamicLayer.update`; waits for what comes before."""
        self.settle()
        updated: tuple[Any, Any] = super().update(key_states, value_states, *args, **kwargs)
        return updated

    def get_seq_length(self) -> int:
        """Tokens that the layer holds, or will when it has arrived."""
        return self._tokens if self._arrival is not None else int(super().get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """See `DynamicLayer.crop`; waits for what is to be cut."""
        self.settle()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, also what has not arrived."""
        self._arrival = None
        super().reset()


class Arrivals:
    """Reads a stream to its end in a thread, and ends it. One for each restore."""

    def __init__(self, stream: LayerStream, layers: int, states: States) -> None:
        """Start to read."""
        self._stream = stream
        self._states = states
        self.layers: tuple[Future[tuple[Any, Any]], ...] = tuple(Future() for _ in range(layers))
        self._ended: Future[bool] = Future()
        self._begin_s = time.perf_counter()
        self._times_s: list[float] = []
        self._waited_s = 0.0
        threading.Thread(target=self._read, name="kvstrata-layers", daemon=True).start()

    def note_wait(self, waited_s: float) -> None:
        """Add what the engine has waited for a layer."""
        self._waited_s += waited_s

    def finish(self) -> Overlap:
        """Confirm what was read, when the engine has computed with it.

        Raises `LeaseLostError` when the leases did not live until the last copy, and what kept a layer away: whatever
        was computed is void then.
        """
        if not self._ended.result(ARRIVE_S):
            raise lost(self._stream.blocks)
        for layer in self.layers:
            layer.result(0)
        first_s, last_s = (self._times_s[0], self._times_s[-1]) if self._times_s else (0.0, 0.0)
        return Overlap(first_s, last_s, self._waited_s)

    def _read(self) -> None:
        is_valid = False
        try:
            for number, layer in enumerate(self.layers):
                layer.set_result(self._states(self._stream.read(range(number, number + 1))))
                self._times_s.append(time.perf_counter() - self._begin_s)
        except KvStrataError as e:
            self._fail(e)
        finally:
            self._fail(LeaseLostError("the stream broke off"))
            try:
                is_valid = self._stream.close()
            finally:
                self._ended.set_result(is_valid)

    def _fail(self, error: KvStrataError) -> None:
        for layer in self.layers:
            if not layer.done():
                layer.set_exception(error)


def arrived(stream: LayerStream) -> Arrivals:
    """Arrivals of a cache that is whole already; `stream` was closed."""
    return Arrivals(stream, 0, lambda _: (None, None))

"""Hears engines' KV events over ZMQ in a thread of its own: what is missing is asked for, nobody waits.

The one module that imports pyzmq, which every engine that publishes events brings along.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.engine_events import BATCH_BYTES_MAX, UNREADABLE, EventStream
from kvstrata_client.connectors.route_index import CHECK_S, Costs, PageFeed, Route, RouteIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

QUEUED_MAX: Final = 10_000
"""Batches that wait to be heard, as many as vLLM keeps for a replay; a publisher drops more."""
TICK_S: Final = 0.1
"""Between two calls of `tick` while nothing is published."""
TICK_BATCHES: Final = 256
"""Batches heard between two calls of `tick`."""
REPLAY_S: Final = 2.0
"""What a replay may take. vLLM's publisher looks for questions every 0.1 s."""
REPLAY_PAUSE_S: Final = 30.0
"""After a replay that did not come to its end."""
NUMBER_BYTES: Final = 8

_log: Final = logging.getLogger("vllm.kvstrata")


class EventListener:
    """A subscriber of one publisher, which replays to it what it has missed, where `replayed` says where to ask."""

    def __init__(self, published: str, replayed: str, stream: EventStream, tick: Callable[[], None]) -> None:
        """Start to hear; `tick` is called in the same thread, `TICK_S` apart or sooner, and may wait.

        Raises `InvalidInputError` where pyzmq is missing or refuses an endpoint.
        """
        self._zmq = zmq = _zmq(published)
        self._replayed = replayed
        self._stream = stream
        self._tick = tick
        self._ends = threading.Event()
        self._asks_from_s = 0.0
        """No replay is asked for before."""
        self._heard = _socket(zmq, zmq.SUB)
        self._heard.subscribe(b"")
        try:
            self._heard.connect(published)
            _socket(zmq, zmq.DEALER, replayed).close()
        except zmq.ZMQError as e:
            self._heard.close()
            raise InvalidInputError(f"events: {published!r}, events_replay: {replayed!r}: {e}") from e
        self._thread = threading.Thread(target=self._run, name="kvstrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when nothing is called any more. Idempotent."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with self._heard:
            while not self._ends.is_set():
                try:
                    self._hear_some()
                    self._tick()
                except Exception:  # noqa: BLE001  The root of the thread: what one batch does must not make us deaf.
                    _log.exception("KV events were not taken in")
                    self._ends.wait(TICK_S)

    def _hear_some(self) -> None:
        for waits_ms in (int(TICK_S * 1000), *[0] * TICK_BATCHES):
            if not self._heard.poll(waits_ms):
                return
            number, payload = _numbered(self._heard.recv_multipart())
            if len(number) == NUMBER_BYTES:
                self._stream.hear(int.from_bytes(number, "big"), payload, self._replay)
            else:
                self._stream.counts[UNREADABLE] += 1

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Ask for batches from a number on; nothing where nobody answers, or did not a moment ago."""
        started_s = time.monotonic()
        if not self._replayed or started_s < self._asks_from_s:
            return
        self._asks_from_s = started_s + REPLAY_PAUSE_S
        with _socket(self._zmq, self._zmq.DEALER, self._replayed) as asking:
            asking.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
            while (left_s := started_s + REPLAY_S - time.monotonic()) > 0 and not self._ends.is_set():
                if not asking.poll(int(left_s * 1000)):
                    return
                number, payload = _numbered(asking.recv_multipart())
                if not payload:  # The end.
                    self._asks_from_s = 0.0
                    return
                yield int.from_bytes(number, "big"), payload


class _Heard:
    """One engine of a `RouteListener`: its two sockets, and the question that waits for an answer."""

    def __init__(self, zmq: Any, feed: PageFeed, published: str, replayed: str) -> None:
        self._zmq = zmq
        self._feed = feed
        self._replayed = replayed
        self._answered: dict[int, bytes] | None = None
        """What has come of the answer that is waited for."""
        self._asked_s = self._due_s = 0.0
        self.heard = _socket(zmq, zmq.SUB)
        self.heard.subscribe(b"")
        self.asking = _socket(zmq, zmq.DEALER)
        try:
            self.heard.connect(published)
            self.asking.connect(replayed)
        except zmq.ZMQError as e:
            self.close()
            raise InvalidInputError(f"events: {published!r}, events_replay: {replayed!r}: {e}") from e

    def close(self) -> None:
        """Let both sockets go."""
        self.heard.close()
        self.asking.close()

    def hear(self) -> None:
        """Take what was published."""
        for _ in range(TICK_BATCHES):
            if not self.heard.poll(0):
                return
            number, payload = _numbered(self.heard.recv_multipart())
            if len(number) == NUMBER_BYTES:
                self._feed.hear(int.from_bytes(number, "big"), payload)

    def take_answer(self, now_s: float) -> None:
        """Take what has come of an answer; at its end it settles the check."""
        while self.asking.poll(0):
            number, payload = _numbered(self.asking.recv_multipart())
            if self._answered is None:
                continue
            if payload:
                self._answered[int.from_bytes(number, "big")] = payload
                continue
            answered, self._answered = self._answered, None
            if self._feed.settle(answered, now_s):
                self._due_s = now_s + CHECK_S
            else:
                self._due_s = 0.0
            return

    def tick(self, now_s: float) -> None:
        """Ask where that is due; a question without an answer in time is asked anew, on another connection."""
        if self._answered is not None and now_s - self._asked_s >= CHECK_S:
            self._answered = None
            self._feed.settle(None, now_s)
            self.asking.close()
            self.asking = _socket(self._zmq, self._zmq.DEALER, self._replayed)
            self._due_s = 0.0
        if self._answered is None and (now_s >= self._due_s or self._feed.is_behind):
            first = self._feed.begin_check()
            self._answered, self._asked_s = {}, now_s
            self.asking.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))


class RouteListener:
    """Keeps a `RouteIndex` of engines that publish KV events and replay them; answers from any thread."""

    def __init__(self, page_tokens: int, engines: Mapping[str, tuple[str, str]]) -> None:
        """Start to hear; for each engine where it publishes and where it replays, and the block size of all of them.

        Raises `InvalidInputError` where pyzmq is missing or refuses an endpoint.
        """
        self._zmq = _zmq(", ".join(engines))
        self._index = RouteIndex(page_tokens)
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._heard: list[_Heard] = []
        try:
            for engine, (published, replayed) in engines.items():
                self._heard.append(_Heard(self._zmq, PageFeed(self._index, engine), published, replayed))
        except InvalidInputError:
            for heard in self._heard:
                heard.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvstrata-routes", daemon=True)
        self._thread.start()

    def route(
        self, tokens: "NDArray[np.uint32]", costs: Costs, *, adapter: str = "", most: int = 3
    ) -> tuple[Route, ...]:
        """See `RouteIndex.route`."""
        with self._lock:
            return self._index.route(tokens, costs, adapter=adapter, most=most)

    def wait(self, engine: str, waiting_s: float) -> None:
        """See `RouteIndex.wait`."""
        with self._lock:
            self._index.wait(engine, waiting_s)

    def counts(self) -> dict[str, int]:
        """What was counted so far, see `route_index`."""
        with self._lock:
            return dict(self._index.counts)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for heard in self._heard:
            poller.register(heard.heard, self._zmq.POLLIN)
        while not self._ends.is_set():
            poller.poll(int(1000 * TICK_S / 4))  # Answers to questions are looked for as often.
            now_s = time.monotonic()
            for heard in self._heard:
                try:
                    with self._lock:
                        heard.hear()
                        heard.take_answer(now_s)
                        heard.tick(now_s)
                except Exception:  # noqa: BLE001  The root of the thread: what one engine does must not make us deaf.
                    _log.exception("KV events were not taken in")
        for heard in self._heard:
            heard.close()


def _zmq(published: str) -> Any:
    """The package. Raises `InvalidInputError` without it."""
    try:
        import zmq
    except ImportError as e:
        raise InvalidInputError(f"events: {published!r}: pyzmq is wanted to hear them, and is not installed") from e
    return zmq


def _socket(zmq: Any, kind: int, connects_to: str = "") -> Any:
    """Make a socket in the context that vLLM's publisher has too, so that `inproc` works; nobody ends that."""
    made = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
    made.set_hwm(QUEUED_MAX)
    if connects_to:
        made.connect(connects_to)
    return made


def _numbered(frames: list[bytes]) -> tuple[bytes, bytes]:
    """The last two of a message, number and payload: how many there are before them depends on the publisher."""
    return (frames[-2], frames[-1]) if len(frames) > 1 else (b"", b"")

"""Hears an engine's KV events over ZMQ in a thread of its own: what is missing is asked for, nobody waits.

The one module that imports pyzmq, which every engine that publishes events brings along.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.engine_events import BATCH_BYTES_MAX, UNREADABLE, EventStream

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
        try:
            import zmq
        except ImportError as e:
            raise InvalidInputError(f"events: {published!r}: pyzmq is wanted to hear them, and is not installed") from e
        self._zmq: Any = zmq
        self._replayed = replayed
        self._stream = stream
        self._tick = tick
        self._ends = threading.Event()
        self._asks_from_s = 0.0
        """No replay is asked for before."""
        self._heard = self._socket(zmq.SUB)
        self._heard.subscribe(b"")
        try:
            self._heard.connect(published)
            self._socket(zmq.DEALER, replayed).close()
        except zmq.ZMQError as e:
            self._heard.close()
            raise InvalidInputError(f"events: {published!r}, events_replay: {replayed!r}: {e}") from e
        self._thread = threading.Thread(target=self._run, name="kvstrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when nothing is called any more. Idempotent."""
        self._ends.set()
        self._thread.join()

    def _socket(self, kind: int, connects_to: str = "") -> Any:
        """Make a socket in the context that vLLM's publisher has too, so that `inproc` works; nobody ends that."""
        made = self._zmq.Context.instance().socket(kind)
        made.setsockopt(self._zmq.LINGER, 0)
        made.setsockopt(self._zmq.IPV6, 1)
        made.setsockopt(self._zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        made.set_hwm(QUEUED_MAX)
        if connects_to:
            made.connect(connects_to)
        return made

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
        with self._socket(self._zmq.DEALER, self._replayed) as asking:
            asking.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
            while (left_s := started_s + REPLAY_S - time.monotonic()) > 0 and not self._ends.is_set():
                if not asking.poll(int(left_s * 1000)):
                    return
                number, payload = _numbered(asking.recv_multipart())
                if not payload:  # The end.
                    self._asks_from_s = 0.0
                    return
                yield int.from_bytes(number, "big"), payload


def _numbered(frames: list[bytes]) -> tuple[bytes, bytes]:
    """The last two of a message, number and payload: how many there are before them depends on the publisher."""
    return (frames[-2], frames[-1]) if len(frames) > 1 else (b"", b"")

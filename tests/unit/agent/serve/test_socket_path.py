"""A socket path that somebody serves is refused, whatever state he is in; what a dead process left is replaced."""

import asyncio
import socket
from pathlib import Path

import pytest

from kvstrata_agent.serve.server import Server, check_free
from kvstrata_api.errors import UnsupportedError
from support.agent.doubles import FakeAuthenticator, caller, dram_tier, make_core
from support.agent.thread import make_verbs


def listen(path: Path, backlog: int = 1) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


def test_a_path_that_is_served_is_refused_by_name_and_with_advice_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listen(path):
        with pytest.raises(UnsupportedError, match=f"socket {path}: another process serves it; stop that one, or give"):
            check_free(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(path))


def test_one_who_accepts_nothing_serves_it_all_the_same_and_nobody_waits_for_him(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listen(path, 0), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.connect(str(path))  # The backlog is full now.
        with pytest.raises(UnsupportedError, match="another process serves it"):
            check_free(path)


def test_no_path_a_dead_socket_and_a_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    check_free(path)
    listen(path).close()
    check_free(path)
    assert path.is_socket(), "nothing is removed before the place is taken"
    (tmp_path / "file").write_text("of somebody")
    with pytest.raises(UnsupportedError, match="exists and is no socket"):
        check_free(tmp_path / "file")


async def test_a_server_takes_the_place_of_a_dead_socket_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listen(path).close()
    verbs = make_verbs(make_core([dram_tier(1 << 20)]), FakeAuthenticator(a=caller("a")))
    first, second = Server(path, verbs), Server(path, verbs)
    first.start()
    try:
        with pytest.raises(UnsupportedError, match="another process serves it"):
            second.start()
        await second.close()
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
    finally:
        await first.close()
    assert not path.exists()

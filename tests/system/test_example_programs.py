"""The programs of examples/, run as their readers run them, against real agents."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agent.doubles import FakeAuthenticator, caller, dram_tier
from support.agent.handover_nodes import two_nodes
from support.agent.thread import AgentThread
from support.client.attached import PATIENT_S
from support.runner.alone import environment

pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAT = EXAMPLES / "08-transformers" / "chat.py"
SIDES = EXAMPLES / "09-prefill-decode" / "prefill_decode.py"
LIMIT_S = 240.0


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a")
    return file


def run(program: Path, *args: object) -> str:
    done = subprocess.run(
        (sys.executable, program, *map(str, args)),
        env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_chat_restores_more_with_each_turn_and_everything_the_second_time(tmp_path: Path, token: Path) -> None:
    party = FakeAuthenticator(a=caller("a"))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 24)], party) as agent:
        flags = ("--socket", agent.socket, "--pool", "pool", "--token-file", token, "--timeout-s", PATIENT_S)
        first, second = (run(CHAT, *flags) for _ in range(2))

    assert re.findall(r"restored (\w+)", first) == ["none", "688", "784"]
    assert re.findall(r"restored (\w+)", second) == ["624", "736", "832"]
    for said in (first, second):
        assert "the same tokens as without kvstrata" in said


def test_a_chat_goes_on_without_an_agent(tmp_path: Path, token: Path) -> None:
    said = run(CHAT, "--socket", tmp_path / "none.sock", "--pool", "pool", "--token-file", token)

    assert "all is computed" in said
    assert "the same tokens" in said


@contextmanager
def side(role: str, *args: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """One side of a program, which serves; killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, SIDES, role, "--port", port, *args)
    with subprocess.Popen(
        tuple(map(str, command)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"serving on {port}\n"
            yield process, port
        finally:
            process.kill()


def test_a_prompt_computed_on_one_node_is_decoded_on_another_and_computed_there_when_that_one_dies(
    tmp_path: Path, token: Path
) -> None:
    with two_nodes(tmp_path, 1 << 24) as (writer, reader):
        flags = ("--pool", "pool", "--token-file", token, "--timeout-s", PATIENT_S)
        with side("prefill", "--socket", writer.socket, *flags) as (prefill, prefill_port):
            at = f"127.0.0.1:{prefill_port}"
            with side("decode", "--socket", reader.socket, "--prefill", at, *flags) as (_, port):
                asked = ("ask", "--decode", f"127.0.0.1:{port}", "--count", 8)
                assert run(SIDES, *asked) == "496 of 500 tokens came from the prefill node; the answer is right\n"
                prefill.kill()
                prefill.wait()
                assert run(SIDES, *asked, "--prompt", 300).startswith("0 of 300 tokens")

"""T13: malformed frames at an agent's two sockets are refused, harm nobody else, and cost no memory.

Engine and peer protocol of a real process get mutated frames, raw noise, wrong lengths and right frames in the wrong
order. What may be answered is told by rules of our own (`frames`). Meanwhile another tenant is served. The control is
an agent that takes whatever it gets for a request.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstrata_agent.fleet.peers import wire as peer
from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError
from support.client.hostile import Hostile, digests_of
from support.runner.outcome import Outcome, Scale
from threats.frames import ENGINE, ENGINE_VALID, HEADER, KEYS, OTHERS, PEER, Mutator, peer_valid
from threats.fuzzed import TOKEN

GROWTH_BYTES_MAX: Final = 16 << 20
"""What a process may gain between two thirds of a run that treat it alike: arenas of malloc, no leak of frames."""
SILENCE_S: Final = 60.0
OTHERS_CONTENT: Final = b"secret of b " * 341 + b"...."


@dataclass(frozen=True, slots=True)
class Target:
    """A running agent."""

    path: Path
    peers: tuple[str, int]
    pid: int

    @property
    def resident_bytes(self) -> int:
        """Memory of the process. Raises `OSError` when it is gone."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def engine(self) -> socket.socket:
        """A connection as an engine has it."""
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(SILENCE_S)
        made.connect(os.fspath(self.path))
        return made

    def peer(self) -> socket.socket:
        """A connection as another agent has it."""
        return socket.create_connection(self.peers, SILENCE_S)


@contextmanager
def running(*how: str) -> Iterator[Target]:
    """A process that serves engines and peers."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t13-") as directory:
        path = Path(directory) / "agent.sock"
        command = (sys.executable, "-m", "threats.fuzzed", os.fspath(path), *how)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            host, _, port = process.stdout.readline().strip().rpartition(":")
            yield Target(path, (host, int(port)), process.pid)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _conversation(connected: socket.socket, sent: bytes) -> bytes:
    """Send, say that nothing more comes, and return all that is answered before the other side closes."""
    received = bytearray()
    with connected, suppress(BrokenPipeError, ConnectionResetError):
        connected.sendall(sent)
        connected.shutdown(socket.SHUT_WR)
        while chunk := connected.recv(1 << 16):
            received += chunk
    return bytes(received)


def _engine_answers(received: bytes) -> Iterator[wire.AnyReply]:
    """Raises `InvalidInputError` for an answer that is none."""
    while len(received) >= HEADER.size:
        (size,) = HEADER.unpack_from(received)
        if len(received) < HEADER.size + size:
            return
        yield wire.decode_reply(received[HEADER.size : HEADER.size + size])
        received = received[HEADER.size + size :]


def _peer_answers(received: bytes) -> Iterator[peer.Answer]:
    """Raises `InvalidInputError` for an answer that is none."""
    while len(received) >= HEADER.size:
        (size,) = HEADER.unpack_from(received)
        if len(received) < HEADER.size + size:
            return
        answer = peer.decode_answer(received[HEADER.size : HEADER.size + size])
        received = received[HEADER.size + size + (answer.size_bytes if isinstance(answer, peer.Chunk) else 0) :]
        yield answer


def _engine_fault(sent: bytes, received: bytes, *, is_attached: bool) -> str:
    """What is wrong with the answers of an engine's connection; empty when nothing is."""
    answers = list(_engine_answers(received))
    taken = [a for a in answers if not isinstance(a, wire.Failed)]
    if any(isinstance(a, wire.Failed) and "internal error" in a.message for a in answers):
        return "internal error"
    if len(taken) > ENGINE.count_requests(sent):
        return f"{len(taken)} answers to {ENGINE.count_requests(sent)} requests"
    if not is_attached and not all(isinstance(a, wire.Welcome | wire.Granted) for a in taken):
        is_attach_sent = b"Attach" in sent
        return "" if is_attach_sent else f"{type(taken[-1]).__name__} without a caller"
    return "bytes of another tenant" if OTHERS_CONTENT[:32] in received else ""


def _peer_fault(sent: bytes, received: bytes) -> str:
    answers = list(_peer_answers(received))
    taken = [a for a in answers if not isinstance(a, peer.Refused | peer.Chunk)]
    if len(taken) > PEER.count_requests(sent):
        return f"{len(taken)} answers to {PEER.count_requests(sent)} questions"
    if taken and not isinstance(taken[0], peer.Welcome):
        return f"{type(taken[0]).__name__} before a welcome"
    return ""


@dataclass
class Bystander:
    """Another tenant that goes on with its work."""

    target: Target
    asked: int = 0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    def run(self) -> None:
        """Read what was stored, until told to stop; any failure is one of the agent's."""
        keys = digests_of(0, 3)
        try:
            with Hostile(self.target.path, "b") as client:
                client.store(OTHERS, keys, OTHERS_CONTENT)
                while not self.is_over:
                    began_s = time.monotonic()
                    if client.load(OTHERS, keys) != [OTHERS_CONTENT] * 3:
                        self.failures.append("a bystander's blocks are gone")
                        return
                    self.asked += 1
                    self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                    time.sleep(0.02)
        except OSError as e:
            self.failures.append(f"a bystander was cut off: {type(e).__name__}: {e}")


@dataclass
class Run:
    """Frames sent so far, and what came of them."""

    target: Target
    seed: int
    frames: int = 0
    conversations: int = 0
    faults: list[str] = field(default_factory=list)

    def engine(self, frames: int) -> None:
        """Send so many frames to the engines' socket, each conversation until the first that ends it."""
        mutator = Mutator(ENGINE_VALID, self.seed)
        stop = self.frames + frames
        while self.frames < stop and len(self.faults) < 20:
            is_attached = self.conversations % 2 == 0
            prefix = ENGINE_VALID[1] if is_attached else b""
            fuzz = self._group(mutator, ENGINE.count_requests, 8)
            received = _conversation(self.target.engine(), prefix + fuzz)
            self._judge(lambda s=prefix + fuzz, r=received, a=is_attached: _engine_fault(s, r, is_attached=a), fuzz)

    def peers(self, frames: int) -> None:
        """The same at the port for other agents."""
        valid = peer_valid(TOKEN)
        mutator = Mutator(valid, self.seed + 1)
        stop = self.frames + frames
        while self.frames < stop and len(self.faults) < 20:
            prefix = valid[0] if self.conversations % 4 else b""
            fuzz = self._group(mutator, PEER.count_requests, 8)
            received = _conversation(self.target.peer(), prefix + fuzz)
            self._judge(lambda s=prefix + fuzz, r=received: _peer_fault(s, r), fuzz)

    def _group(self, mutator: Mutator, count: "object", most: int) -> bytes:
        assert callable(count)
        sent = b""
        for number in range(most):
            frame = mutator.frame()
            sent += frame
            self.frames += 1
            if count(frame) == 0 or number == most - 1:
                break
        self.conversations += 1
        return sent

    def _judge(self, fault_of: "object", fuzz: bytes) -> None:
        assert callable(fault_of)
        try:
            fault = fault_of()
        except InvalidInputError as e:
            fault = f"an answer that is none: {e}"
        if fault:
            self.faults.append(f"seed {self.seed}, conversation {self.conversations}: {fault}: {fuzz[:60].hex()}")


def _attack(target: Target, frames: int, seed: int) -> tuple[Run, Bystander, int]:
    """Three equal parts; growth of memory is that between the ends of the first and of the last."""
    bystander = Bystander(target)
    thread = threading.Thread(target=bystander.run)
    thread.start()
    run = Run(target, seed)
    sizes = []
    try:
        for part in range(3):
            run.seed = seed + 2 * part
            run.engine(-(-frames // 6))
            run.peers(-(-frames // 6))
            sizes.append(target.resident_bytes)
            sys.stderr.write(f"T13 {run.frames} frames, {sizes[-1] >> 20} MiB\n")
    except (OSError, TimeoutError) as e:
        run.faults.append(f"the agent is gone or silent: {type(e).__name__}: {e}")
    finally:
        bystander.is_over = True
        thread.join()
    return run, bystander, sizes[-1] - sizes[0] if sizes else 0


def _is_control_caught(seed: int) -> bool:
    with running("careless") as target:
        engine, peers = Run(target, seed), Run(target, seed)
        engine.engine(500)
        peers.peers(500)
        return bool(engine.faults) and bool(peers.faults)


def run(scale: Scale) -> Outcome:
    """Send frames to both protocols."""
    with running() as target:
        attack, bystander, growth_bytes = _attack(target, scale.of(1_000_000, 4_000), scale.first_seed)
    violations = [*attack.faults, *bystander.failures]
    if growth_bytes > GROWTH_BYTES_MAX:
        violations.append(f"memory grew by {growth_bytes} B over {attack.frames} frames")
    values = {
        "conversations": float(attack.conversations),
        "growth_bytes": float(growth_bytes),
        "bystander_requests": float(bystander.asked),
        "bystander_longest_s": bystander.longest_s,
    }
    is_caught = _is_control_caught(scale.first_seed)
    return Outcome(attack.frames, "frames", tuple(violations), is_caught, values)


assert len(KEYS) == 60, "three keys, as many as the bystander stores"

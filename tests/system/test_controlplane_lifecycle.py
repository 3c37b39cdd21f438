"""Begin and end of the embedded control plane: whatever is killed, nothing stays behind."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ApiUnreachableError, StartError, StateDirError, attach, run, start
from controlplane.components import Setup
from controlplane.layout import Layout, Ports
from controlplane.supervision import Supervision, start_supervisor
from controlplane.waiting import wait_until

pytestmark = pytest.mark.system

HACK = Path(run.__file__).parents[1]
CLEAN_S_MAX = 10.0

STARTER = """
import sys, time
from controlplane import start
plane = start(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


def processes_of(state_dir: Path) -> set[int]:
    """Return the processes whose command line names a state folder."""
    found = set()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(state_dir) in cmdline.read_text():
                found.add(int(cmdline.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # Ended between listing and reading.
    return found - {os.getpid()}


def is_clean(state_dir: Path) -> bool:
    """Whether neither a process nor a file is left of a plane."""
    return not processes_of(state_dir) and not state_dir.exists()


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the package's command line."""
    env = {**os.environ, "PYTHONPATH": str(HACK)}
    argv = (sys.executable, "-m", "controlplane", *args)
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=120)


Supervised = tuple[Layout, subprocess.Popen[bytes], subprocess.Popen[bytes]]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A marked state folder without a plane."""
    at = Layout(tmp_path / "plane")
    at.make_folders()
    at.marker.write_text("{}")
    return at


@pytest.fixture
def supervised(layout: Layout) -> Iterator[Supervised]:
    """A supervisor of two processes that do nothing, owned by a third; yields (layout, owner, supervisor)."""
    owner = subprocess.Popen(("sleep", "600"))
    supervisor = start_supervisor(layout, owner.pid)
    for name in ("one", "two"):
        idle = ["tail", "-F", str(layout.root / "nothing")]
        Supervision(layout).call("spawn", name=name, argv=idle, log=str(layout.log(name)))
    yield layout, owner, supervisor
    owner.kill()
    owner.wait()
    supervisor.wait(CLEAN_S_MAX)


def test_killing_the_parent_leaves_neither_process_nor_state(tmp_path: Path) -> None:
    state_dir = tmp_path / "plane"
    env = {**os.environ, "PYTHONPATH": str(HACK)}
    parent = subprocess.Popen((sys.executable, "-c", STARTER, str(state_dir)), stdout=subprocess.PIPE, env=env)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert len(processes_of(state_dir) - {parent.pid}) == 6  # Five components and the supervisor.

        parent.kill()

    began_s = time.monotonic()
    assert wait_until(lambda: is_clean(state_dir), CLEAN_S_MAX), processes_of(state_dir)
    sys.stdout.write(f"clean {time.monotonic() - began_s:.2f} s after SIGKILL of the parent\n")


def test_killing_the_parent_during_the_start_leaves_neither_process_nor_state(tmp_path: Path) -> None:
    state_dir = tmp_path / "plane"
    env = {**os.environ, "PYTHONPATH": str(HACK)}
    with subprocess.Popen((sys.executable, "-c", STARTER, str(state_dir)), env=env) as parent:
        assert wait_until(lambda: Layout(state_dir).log("kube-apiserver").exists(), 60)

        parent.kill()

    assert wait_until(lambda: is_clean(state_dir), CLEAN_S_MAX), processes_of(state_dir)


def test_the_end_of_the_owner_ends_all_process_groups_and_the_folder(supervised: Supervised) -> None:
    layout, owner, supervisor = supervised
    assert [c.state for c in Supervision(layout).status().values()] == ["running", "running"]

    owner.kill()
    owner.wait()

    assert supervisor.wait(CLEAN_S_MAX) == 0
    assert is_clean(layout.root)


def test_what_components_changed_is_undone_when_they_have_ended(supervised: Supervised, tmp_path: Path) -> None:
    layout, owner, supervisor = supervised
    pids = [c.pid for c in Supervision(layout).status().values()]
    said = tmp_path / "said"
    for name in ("first", "second"):
        script = f"! kill -0 {pids[0]} 2>/dev/null && test -d {layout.root} && echo {name} >>{said}"
        Supervision(layout).call("at_end", argv=["/bin/sh", "-c", script])
    Supervision(layout).call("at_end", argv=["/nonexistent"])

    owner.kill()
    owner.wait()

    assert supervisor.wait(CLEAN_S_MAX) == 0
    assert said.read_text().split() == ["second", "first"]
    assert is_clean(layout.root)


def test_children_of_a_component_end_with_it(supervised: Supervised) -> None:
    layout, owner, supervisor = supervised
    forking = ["/bin/sh", "-c", f"tail -F {layout.root}/nothing & echo started; wait"]
    Supervision(layout).call("spawn", name="three", argv=forking, log=str(layout.log("three")))
    assert wait_until(lambda: "started" in layout.log("three").read_text(), 60)

    owner.kill()
    owner.wait()

    assert supervisor.wait(CLEAN_S_MAX) == 0
    assert wait_until(lambda: is_clean(layout.root), CLEAN_S_MAX)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_is_a_stop(supervised: Supervised, signum: signal.Signals) -> None:
    layout, _, supervisor = supervised

    supervisor.send_signal(signum)

    assert supervisor.wait(CLEAN_S_MAX) == 0
    assert is_clean(layout.root)


def test_killing_the_supervisor_kills_its_components(supervised: Supervised) -> None:
    layout, _, supervisor = supervised
    pids = [c.pid for c in Supervision(layout).status().values()]

    supervisor.kill()
    supervisor.wait()

    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), CLEAN_S_MAX)


def test_a_detached_supervisor_outlives_its_owner_and_stops_on_request(supervised: Supervised) -> None:
    layout, owner, supervisor = supervised
    Supervision(layout).call("detach")

    owner.kill()
    owner.wait()

    assert set(Supervision(layout).status()) == {"one", "two"}
    Supervision(layout).call("stop")
    assert supervisor.wait(CLEAN_S_MAX) == 0
    assert is_clean(layout.root)


def test_an_ended_component_is_reported_and_stays_ended_until_it_is_respawned(supervised: Supervised) -> None:
    layout, _, _ = supervised
    supervision = Supervision(layout)

    supervision.call("signal", name="one", signum=signal.SIGKILL)

    assert wait_until(lambda: supervision.status()["one"].state == "exited", 60)
    assert supervision.status()["one"].exit_code == -signal.SIGKILL
    assert supervision.status()["two"].state == "running"
    supervision.call("respawn", name="one")
    assert supervision.status()["one"].state == "running"
    assert supervision.status()["one"].starts == 2


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("spawn", {"name": "one", "argv": ["true"], "log": "/dev/null"}),
        ("spawn", {"name": "three", "argv": ["/no/such/program"], "log": "/dev/null"}),
        ("respawn", {"name": "two"}),
        ("signal", {"name": "nobody", "signum": 9}),
        ("pause", {"name": "one"}),
        ("explode", {}),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_changes_nothing(
    supervised: Supervised, op: str, arguments: dict[str, Any]
) -> None:
    layout, _, _ = supervised
    supervision = Supervision(layout)
    before = supervision.status()

    with pytest.raises(ValueError, match=op):
        supervision.call(op, **arguments)

    assert supervision.status() == before


def test_a_socket_path_longer_than_the_kernel_allows_works(tmp_path: Path) -> None:
    at = Layout(tmp_path / ("long-" * 30))
    at.make_folders()
    at.marker.write_text("{}")

    supervisor = start_supervisor(at, os.getpid())

    assert Supervision(at).status() == {}
    Supervision(at).call("stop")
    assert supervisor.wait(CLEAN_S_MAX) == 0


def test_a_folder_that_is_not_ours_is_refused_and_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("do not touch")

    with pytest.raises(StateDirError, match="not empty"):
        start(tmp_path)
    with pytest.raises(StateDirError, match="holds no control plane"):
        attach(tmp_path)

    assert precious.read_text() == "do not touch"


def test_the_remains_of_a_killed_supervisor_are_refused_until_taken_down(tmp_path: Path) -> None:
    plane = start(tmp_path / "plane", kwok=False, controllers=False)
    plane.supervision.call("detach")
    supervisor = processes_of(plane.state_dir) - {c.pid for c in plane.status().values()}
    for pid in supervisor:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not plane.is_ready(), CLEAN_S_MAX)

    with pytest.raises(StateDirError, match="already"):
        start(plane.state_dir)
    assert command("status", "--state", str(plane.state_dir)).returncode == 1
    plane.stop()

    assert is_clean(plane.state_dir)


def test_a_port_taken_between_choosing_and_listening_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path / "first", kwok=False, controllers=False) as first:
        taken = int(first.server.rsplit(":", 1)[1])
        good = Ports.choose()
        offers = iter([dataclasses.replace(good, api=taken), good])
        monkeypatch.setattr(Ports, "choose", lambda: next(offers))

        with start(tmp_path / "second", kwok=False, controllers=False) as second:
            assert second.is_ready()
            assert second.server != first.server


def test_a_component_that_cannot_start_is_told_with_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Setup) -> list[str]:
        return [str(setup.binaries["etcd"]), "--no-such-flag"]

    monkeypatch.setitem(run._STORE, "etcd", broken)

    with pytest.raises(StartError, match="no-such-flag"):
        start(tmp_path / "plane", kwok=False, controllers=False)

    assert is_clean(tmp_path / "plane")


def test_the_command_line_starts_describes_and_stops_a_plane(tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "plane"))

    up = command("up", "--no-kwok", "--no-controllers", *state)
    assert up.returncode == 0, up.stderr
    assert Path(up.stdout.strip()).is_file()
    assert command("kubeconfig", *state).stdout == up.stdout
    status = command("status", *state)
    assert status.returncode == 0
    assert "kube-apiserver" in status.stdout
    again = command("up", *state)
    assert again.returncode == 1
    assert "already" in again.stderr
    down = command("down", *state)

    assert down.returncode == 0, down.stderr
    # The supervisor answers when all else is gone, and ends after that.
    assert wait_until(lambda: is_clean(tmp_path / "plane"), CLEAN_S_MAX)
    assert command("status", *state).returncode == 1


def test_a_plane_tied_to_a_process_ends_with_it(tmp_path: Path) -> None:
    state_dir = tmp_path / "plane"
    with subprocess.Popen(("sleep", "600")) as owner:
        tie = ("--tied-to", str(owner.pid))
        up = command("up", "--no-kwok", "--no-controllers", "--state", str(state_dir), *tie)
        assert up.returncode == 0, up.stderr
        assert attach(state_dir).is_ready()

        owner.kill()

    assert wait_until(lambda: is_clean(state_dir), CLEAN_S_MAX)


def test_a_stopped_plane_stops_twice_and_answers_no_more(tmp_path: Path) -> None:
    plane = start(tmp_path / "plane", kwok=False, controllers=False)
    api = plane.api

    plane.stop()
    plane.stop()

    with pytest.raises(ApiUnreachableError):
        api.get("/readyz")
    with pytest.raises(StateDirError):
        plane.status()


def test_the_help_names_every_command() -> None:
    said = command("--help").stdout

    assert all(name in said for name in ("up", "down", "kubeconfig", "status", "build"))

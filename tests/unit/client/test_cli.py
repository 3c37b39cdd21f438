"""Laws of the `kvstrata` command that need no agent."""

import argparse
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import reference
from kvstrata_api.errors import UnsupportedError
from kvstrata_client.cli import COMMANDS, main, parser
from kvstrata_client.commands import of_agent
from kvstrata_client.commands.top import samples

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize("command", [*COMMANDS, *of_agent.COMMANDS, "version"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")

    assert code == 0
    assert f"kvstrata {command}" in out
    assert "%%" not in out
    assert command in parser().format_help()


@pytest.mark.parametrize("command", [*COMMANDS, *of_agent.COMMANDS, "completion"])
def test_every_command_has_an_example_that_its_parser_takes(command: str) -> None:
    process = reference.process_parsers().get(f"kvstrata {command}")
    found = process or reference.command_parsers()[command]
    _, _, examples = (found.epilog or "").rpartition("example")
    words = [shlex.split(one) for one in examples.removeprefix("s").removeprefix(": ").split("; ")]

    for program, name, *rest in words:
        assert (program, name) in (("kvstrata", command), ("eval", f"$(kvstrata {command} bash)"))
        if program == "kvstrata":
            found.parse_args(rest)


def test_every_argument_says_what_it_is_for() -> None:
    (commands,) = (a for a in parser(is_whole=True)._actions if isinstance(a, argparse._SubParsersAction))
    silent = [
        (name, action.dest)
        for name, command in commands.choices.items()
        for action in command._actions
        if not action.help
    ]

    assert silent == []


@pytest.mark.parametrize("arguments", [("version",), ("--version",), ("--help",)])
def test_what_no_command_is_needed_for_imports_none(arguments: tuple[str, ...]) -> None:
    """Nor numpy, pydantic or the client: it answers in a tenth of a second."""
    call = f"try:\n    main({arguments})\nfinally:\n    print(*sys.modules)"
    code = f"import sys\nfrom kvstrata_client.cli import main\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kvstrata_client.cli" in loaded
    assert not loaded & {"numpy", "pydantic", "msgspec", "yaml", "asyncio", "kvstrata_client.client"}


@pytest.mark.parametrize("folder", ["01-quickstart", "02-trust-domain"])
def test_examples_are_valid_manifests(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    code, out, _ = run(capsys, "validate", "-f", str(EXAMPLES / folder))

    assert (code, out.rstrip().endswith("0 with problems")) == (0, True), out


def test_a_bad_manifest_is_named_with_its_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (EXAMPLES / "01-quickstart" / "10-pool.yaml").read_text()
    (tmp_path / "pool.yaml").write_text(text.replace("lowWatermarkPercent: 85", "lowWatermarkPercent: 99"))
    code, out, _ = run(capsys, "validate", "-f", str(tmp_path))

    assert code == 1
    assert "KVPool/demo" in out
    assert "WatermarkPercent" in out


@pytest.mark.parametrize("text", ["a: [", "- 1", "text"])
def test_what_is_no_manifest_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    code, out, err = run(capsys, "validate", "-f", str(tmp_path / "x.yaml"))

    assert (code, err, out.startswith(f"{tmp_path}/x.yaml:1: ")) == (1, "", True), out


def test_files_without_our_objects_are_no_success(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n")

    assert run(capsys, "validate", "-f", str(tmp_path / "x.yaml"))[0] == 1


LAYOUT = "--layout FILE (or --model and --revision, as in the pool)"
KEYS_LAYOUT = "--layout FILE (of the engine: --model names no block)"
POOL = "--pool (or KVSTRATA_POOL)"
REQUIRED = {
    "stats": (POOL, LAYOUT),
    "explain": ("one of --session --digest --tree", POOL, LAYOUT),
    "session": ("name", POOL, LAYOUT),
    "lookup": ("tokens", POOL, KEYS_LAYOUT),
    "route-hint": ("tokens", POOL, KEYS_LAYOUT),
    "why-miss": ("tokens", POOL, KEYS_LAYOUT),
    "probe": (POOL, LAYOUT),
    "validate": ("-f/--filename",),
    "who-can-read": ("one of digest --tenant --domain --share",),
    "install": ("--check",),
    "capacity": ("config",),
    "digest": ("give token ids, --tokens, --text or --text-file",),
    "calibrate": ("file",),
}
"""What each command needs, in the words of its error; every other one can do something without options."""
NEED_NOTHING = {"status", "top", "tenants", "models", "support-bundle", "fleet", "doctor", "conformance", "docs"}


def test_every_command_says_whether_it_needs_options() -> None:
    assert REQUIRED.keys() | NEED_NOTHING == COMMANDS.keys()


@pytest.mark.parametrize("command", REQUIRED)
def test_a_command_without_options_names_all_that_are_missing_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("KVSTRATA_POOL", "KVSTRATA_SOCKET", "KVSTRATA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = run(capsys, command)

    assert (code, out) == (2, "")
    assert [what for what in REQUIRED[command] if what not in err] == []
    assert "Traceback" not in err


def test_a_model_and_revision_name_a_pool_and_no_block(capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--pool", "p", "--model", "m", "--revision", "r")
    for command in ("lookup", "why-miss", "route-hint"):
        code, _, err = run(capsys, command, *named, "tokens.json")
        assert (code, KEYS_LAYOUT in err, POOL in err) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stats", "--pool", "p", "--layout", "/nowhere.json"), "/nowhere.json"),
        (("lookup", "--pool", "p", "--layout", "l.json", "/nowhere.json"), "a JSON list of token ids wanted"),
    ],
)
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, _, err = run(capsys, *arguments)

    assert (code, said in err) == (1, True), err


def test_an_absent_agent_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--pool", "p", "--model", "m", "--revision", "r", "--socket", str(tmp_path / "no.sock"))
    (tmp_path / "token").write_text("t")
    code, _, err = run(capsys, "stats", *options, "--token-file", str(tmp_path / "token"))

    assert (code, "Error" in err, "no.sock" in err) == (1, False, True)


def test_an_absent_metadata_service_is_said_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "fleet", "--address", "127.0.0.1:1")

    assert code == 1
    assert "http://127.0.0.1:1/v1/fleet" in err


@pytest.mark.parametrize("answer", [b"-ERR unknown command\r\n", b""])
def test_what_does_not_speak_http_is_said_to_be_no_metadata_service(
    capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_answer_once, args=(server, answer), daemon=True).start()
        code, _, err = run(capsys, "fleet", "--address", address)

    assert code == 1
    assert "is it a metadata service?" in err


def _answer_once(server: socket.socket, answer: bytes) -> None:
    with server.accept()[0] as caller:
        caller.recv(1000)
        caller.sendall(answer)


@pytest.mark.parametrize("address", ["localhost:abc", "a b:1"])
def test_what_is_no_address_is_said_with_it(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, _, err = run(capsys, "fleet", "--address", address)

    assert (code, f"http://{address}/v1/fleet" in err) == (1, True)


def test_a_prometheus_that_does_not_speak_http_is_said() -> None:
    with pytest.raises(UnsupportedError, match="is it a Prometheus"):
        samples("http://localhost:abc", "up")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Namespace", ("who-can-read", "--tenant", "a", "-f")),
        ("KVPool", ("install", "--check", "--pool")),
        ("Node", ("validate", "-f", str(EXAMPLES), "--nodes")),
    ],
)
@pytest.mark.parametrize("metadata", ["null", "{}", "[]", "{name: 7}"])
def test_an_object_without_a_name_is_refused_with_its_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, arguments: tuple[str, ...], metadata: str
) -> None:
    path = tmp_path / "nameless.yaml"
    path.write_text(f"apiVersion: v1\nkind: {kind}\nmetadata: {metadata}\n")
    code, _, err = run(capsys, *arguments, str(path))

    assert code != 0
    assert f"{path}:" in err
    assert f"{kind}: metadata.name" in err


@pytest.mark.parametrize("text", ["[[1, 2]]", "[1.9]", '"12"', "7", "[true]", "[4294967296]", "[-1]", "{}", "[1"])
def test_what_is_no_list_of_token_ids_is_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    for command in ("lookup", "route-hint", "why-miss"):
        code, _, err = run(capsys, command, "--pool", "p", "--layout", "l.json", str(path))
        assert (code, f"tokens {path}: " in err, "token ids" in err) == (1, True, True), err


def test_a_shell_completes_commands_and_their_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, script, _ = run(capsys, "completion", "bash")
    (tmp_path / "complete.bash").write_text(script)

    def completed(*words: str) -> list[str]:
        ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_kvstrata; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", f"source {tmp_path}/complete.bash; {ask}"], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert {"status", "stats"} <= set(completed("kvstrata", "st"))
    assert completed("kvstrata", "status", "--out") == ["--output"]


def test_without_its_package_completion_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert run(capsys, "completion", "zsh")[::2] == (
        1,
        "kvstrata: it needs the package shtab: pip install 'kvstrata[cli]'\n",
    )


def test_as_a_plugin_of_kubectl_it_has_kubectl_s_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-kvstrata"])

    assert run(capsys, "status", "--help")[1].startswith("usage: kubectl kvstrata status ")


def test_top_without_its_package_says_what_to_install_and_what_does_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("textual", "kvstrata_client.commands.screen"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run(capsys, "top")

    assert code == 1
    assert "pip install 'kvstrata[cli]'; `kvstrata status` prints the same once" in err


@pytest.mark.parametrize(
    ("option", "value"), [("--interval-s", "0.1"), ("--interval-s", "4000"), ("--prometheus", "127.0.0.1:9090")]
)
def test_top_names_what_is_wrong(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    code, _, err = run(capsys, "top", option, value)

    assert code == 2
    assert err.startswith(f"kvstrata top: {option} ")
    assert "wanted" in err

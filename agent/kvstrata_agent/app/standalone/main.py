"""The command line of `kvstrata up`, and what it prints once engines are served."""

import argparse
import grp
import json
import os
import re
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes
from typing import Any, Final

from kvstrata_agent.app.config import Config, add_offload
from kvstrata_agent.app.main import run_until_signal
from kvstrata_agent.app.process import AgentProcess
from kvstrata_agent.app.standalone import defaults, keys
from kvstrata_agent.app.standalone.authenticator import USERS, Tokens, parse_token, user_account
from kvstrata_agent.app.standalone.fleet import (
    URL_VARIABLE,
    FleetMembership,
    RedisSource,
    check_address,
    default_node,
    environment_url,
)
from kvstrata_agent.app.standalone.manifests import NODE, Manifest
from kvstrata_agent.app.standalone.world import KEYS_FILE, Source, StandaloneWorld
from kvstrata_agent.serve.server import check_free
from kvstrata_api import arguments, names
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.models.base import NAME_PATTERN
from kvstrata_api.models.pool import ANY, BLOCK_TOKENS
from kvstrata_api.models.poolnode import KVPoolNodeStatus
from kvstrata_api.trust import Identity
from kvstrata_api.units import format_rounded
from kvstrata_api.wrapping import keks_of_text
from kvstrata_kube.certified import CertificateFiles
from kvstrata_node import directories
from kvstrata_telemetry import logs, tracing
from kvstrata_telemetry.tracing import Sending

PROGRAM: Final = "kvstrata up"
POOL: Final = "local"
"""Name of the pool where no manifest names one."""
SOCKET_CHARS_MAX: Final = 107
"""sockaddr_un has 108 bytes, one of which ends the path (man 7 unix)."""
_PRIVATE: Final = 0o700
_GROUP_READS: Final = 0o2750
"""The set-group-ID bit gives the socket the directory's group."""
_GROUP_PASSES: Final = 0o710


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status: 1 for a failure, 2 for wrong usage."""
    given = _parser().parse_args(arguments)
    logs.configure(given.log_level, "agent")
    tracing.configure("agent", Sending.given(given))
    try:
        wanted = _wanted(given)
        if given.print:
            sys.stdout.write(wanted.manifest.written())
            return 0
        return _serve(wanted, given)
    except (KvStrataError, OSError) as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)  # noqa: T201  The reason, for whoever reads no logs.
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="An agent on this machine, without Kubernetes. Engines of the user who starts it may connect; "
        "--token and manifests let others in. With --connect it is one of a fleet, whose members find each other's "
        "blocks through a shared Redis.",
        epilog="example: kvstrata up -f pool.yaml --metrics-port 9100",
    )
    add = parser.add_argument
    add(
        "-f",
        "--filename",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="manifests as for kubectl apply, a file or a directory; read again when they change. Default: tiers from "
        "what the machine has",
    )
    add("--print", action="store_true", help="print the manifest that would be used, and end")
    add("--pool", default="", help=f"KVPool to serve, where several are declared; default: the one, or {POOL!r}")
    compatibility = parser.add_argument_group("pool without -f")
    model = compatibility.add_argument
    model("--model", default=ANY, help="model to serve; default: any, each engine has blocks of its own model alone")
    model("--revision", default=ANY, help="revision of the weights; default: any")
    model("--dtype", default="bf16", help="element type of the KV cache; default: %(default)s")
    model("--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens in a block; default: %(default)s")
    add("--state-dir", type=Path, help="keys, status and the NVMe tier; default: kvstrata/POOL in $XDG_STATE_HOME")
    add("--socket", type=Path, help="unix socket for engines; default: run/agent.sock in the state directory")
    add("--group", help="unix group whose users may reach the socket; tenants are checked all the same")
    add(
        "--token",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="let in whoever presents the token in FILE, as ServiceAccount token/NAME; NAMESPACE/NAME=FILE as that one",
    )
    add(
        "--kek-file", type=Path, help="key-encryption keys of encrypted tiers; default: one made in the state directory"
    )
    _add_fleet(parser)
    add("--memory-dir", type=Path, help="directory on a tmpfs, where memory tiers outlive the agent; default: none")
    add_offload(parser)
    add("--metrics-port", type=arguments.port, default=0, help="of 127.0.0.1; default: any free one")
    add("--ready-file", type=Path, help="written, as JSON, once engines are served")
    tracing.add_arguments(parser)
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="default: %(default)s")
    return parser


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add what joins a fleet."""
    add = parser.add_argument_group("fleet").add_argument
    add(
        "--connect",
        metavar="URL|FILE",
        help="redis[s]://[user[:password]@]host[:port] of the fleet's directory, or a file that holds it; default: "
        f"${URL_VARIABLE}. Arguments are readable by every user: keep a password in the file or the variable",
    )
    add("--node", help="name of this member; default: the host's name")
    add("--peer-address", type=arguments.address, metavar="HOST:PORT", help="where other members reach this one")
    add("--keys-file", type=Path, help="base64 of 32 bytes, the same at each member: keys of scopes derive from it")
    add(
        "--tls-cert",
        type=Path,
        help="PEM certificate of this member, for URI:spiffe://kvstrata/NAMESPACE/agent/POOL.NODE",
    )
    add("--tls-key", type=Path, help="its private key")
    add("--tls-ca", type=Path, help="PEM certificates of the authority that certifies all members")
    add("--redis-ca", type=Path, help="PEM certificates that sign the server's of rediss://; default: the system's")
    add(
        "--peer-encryption",
        choices=("control", "required"),
        help="required: all bytes from and to members by TLS; control: block bytes by NIXL where that is there, which "
        "does not encrypt; default: control",
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the command line asks for, and the first manifest."""

    manifest: Manifest
    source: Source
    state_dir: Path
    socket: Path
    tokens: Tokens
    membership: FleetMembership | None = None


def _wanted(given: argparse.Namespace) -> _Wanted:
    """Read files and the machine. Changes nothing. Raises `InvalidInputError`, and `UnsupportedError`."""
    if given.kek_file is not None:
        _check_keks(given.kek_file)
    tokens: dict[Identity, Path] = {}
    for identity, file in map(parse_token, given.token):
        if identity in tokens:
            raise InvalidInputError(f"--token {identity.namespace}/{identity.service_account}: given twice")
        tokens[identity] = file
    identities = [Identity(USERS, user_account(os.geteuid())), *tokens]
    tenants = tuple(defaults.default_tenant(i.namespace, i.service_account) for i in identities)
    state_dir = given.state_dir and given.state_dir.absolute()
    fixed: tuple[Mapping[str, Any], ...] = ()
    if not given.filename:
        name = given.pool or POOL
        state_dir = state_dir or _state_dir(name)
        compatibility = {"model": given.model, "revision": given.revision, "dtype": given.dtype}
        machine = defaults.read_machine(state_dir)
        whole = {**compatibility, "blockTokens": given.block_tokens}
        fixed = (defaults.default_pool(machine, name, whole, state_dir),)
    source = Source(tuple(p.absolute() for p in given.filename), given.pool, fixed, tenants)
    manifest = source.read()
    state_dir = state_dir or _state_dir(manifest.pool.metadata.name)
    socket = given.socket.absolute() if given.socket else state_dir / "run" / "agent.sock"
    if len(os.fsencode(socket)) > SOCKET_CHARS_MAX:
        raise InvalidInputError(
            f"socket {socket}: {len(os.fsencode(socket))} bytes, limit {SOCKET_CHARS_MAX}; give --socket a shorter one"
        )
    return _Wanted(manifest, source, state_dir, socket, Tokens(tokens), _fleet(given, manifest.pool.metadata.name))


def _check_keks(file: Path) -> None:
    """Refuse at the start what would leave encrypted tiers without a key. Raises `InvalidInputError`."""
    try:
        keks_of_text(file.read_text())
    except OSError as e:
        raise InvalidInputError(f"--kek-file {file}: {e.strerror}") from e
    except (ValueError, InvalidInputError) as e:
        raise InvalidInputError(f"--kek-file {file}: {e}") from e


def _fleet(given: argparse.Namespace, pool: str) -> FleetMembership | None:
    """How this is one of a fleet; None without --connect. Raises `InvalidInputError` that names what is wrong."""
    needed = {flag: getattr(given, flag) for flag in ("peer_address", "keys_file", "tls_cert", "tls_key", "tls_ca")}
    others = {flag: getattr(given, flag) for flag in ("node", "redis_ca", "peer_encryption")}
    if given.connect is not None and not given.connect.strip():
        raise InvalidInputError("--connect: empty, a URL or the path of a file that holds one is wanted")
    url = given.connect or environment_url()
    if not url:
        extra = [_flag(name) for name, value in (needed | others).items() if value is not None]
        if extra:
            raise InvalidInputError(f"{', '.join(extra)}: --connect, or ${URL_VARIABLE}, is wanted with that")
        return None
    missing = [_flag(name) for name, value in needed.items() if value is None]
    if missing:
        how = f"; {keys.MAKE_KEYS.format('FILE')}" if "--keys-file" in missing else ""
        raise InvalidInputError(f"--connect needs {', '.join(missing)}{how}")
    node = given.node or default_node()
    if not re.fullmatch(NAME_PATTERN, node):
        raise InvalidInputError(f"--node {node!r}: 1 to 63 of a-z, 0-9 and - wanted, another one at each member")
    check_address(given.peer_address[0])
    files = CertificateFiles(given.tls_cert.absolute(), given.tls_key.absolute(), given.tls_ca.absolute())
    return FleetMembership(pool, node, RedisSource(url, given.redis_ca), files, keys.load_fleet(given.keys_file))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _state_dir(pool: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home).absolute() / "kvstrata" / pool


def _serve(wanted: _Wanted, given: argparse.Namespace) -> int:
    """Run the agent.

    Raises `UnsupportedError` when another process serves the socket, `InvalidInputError` when one has the state
    directory, and `OSError`.
    """
    began_s = time.monotonic()
    group = _group_id(given.group)
    check_free(wanted.socket)
    _prepare(wanted, group)
    lock = directories.lock(wanted.state_dir, f"another {PROGRAM} serves it")
    try:
        for tier in wanted.manifest.pool.spec.tiers:
            if tier.nvme is not None:
                _make_own(tier.nvme.directories, wanted.state_dir)
        kek_file = given.kek_file or wanted.state_dir / "kek"
        if given.kek_file is None and not kek_file.exists():
            keys.new_kek(kek_file, token_bytes)
        greeting = _Greeting(wanted, began_s)
        worlds: list[StandaloneWorld] = []

        async def connect(_: Config) -> StandaloneWorld:
            world = StandaloneWorld(
                wanted.source,
                wanted.manifest,
                wanted.state_dir,
                wanted.tokens,
                kek_file,
                wanted.membership,
            )
            world.status.on_first = greeting.reported
            worlds.append(world)
            return world

        async def drain() -> None:
            for world in worlds:
                await world.drain()

        config = _config(wanted, given)
        return run_until_signal(PROGRAM, lambda: AgentProcess(config, connect, greeting.serving), drain)
    finally:
        os.close(lock)


def _config(wanted: _Wanted, given: argparse.Namespace) -> Config:
    host, port = given.peer_address or ("127.0.0.1", 0)
    return Config(
        pool=wanted.manifest.pool.metadata.name,
        node=wanted.membership.node if wanted.membership is not None else NODE,
        socket=wanted.socket,
        state_dir=wanted.state_dir,
        memory_dir=given.memory_dir.absolute() if given.memory_dir else wanted.state_dir / "memory",
        memory_host_dir=None,
        namespace=names.SYSTEM_NAMESPACE,
        kubeconfig=None,
        metrics_host="127.0.0.1",
        metrics_port=given.metrics_port,
        peer_host=host,
        peer_port=port,
        peer_token=None,
        peer_encryption=given.peer_encryption or "control",
        requires_bound_tokens=False,
        kek_file=given.kek_file,
        offload=given.offload,
        ready_file=given.ready_file,
        sending=Sending.given(given),
        log_level=given.log_level,
    )


def _group_id(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as e:
        raise InvalidInputError(f"--group {name!r}: there is no such group") from e


def _prepare(wanted: _Wanted, group: int | None) -> None:
    """Make the directories of state and socket, for this user alone or for the group as well.

    Raises `InvalidInputError` for a state directory of another user, or one that others may write in; `OSError`.
    """
    state, run = wanted.state_dir, wanted.socket.parent
    is_ours = not state.exists() or (state / KEYS_FILE).exists()
    state.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    seen = state.stat()
    if seen.st_uid != os.geteuid() or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInputError(
            f"state directory {state}: of user {seen.st_uid}, mode {stat.S_IMODE(seen.st_mode):04o}; it holds keys, so "
            f"it has to be of user {os.geteuid()} and writable by nobody else"
        )
    is_new = not run.exists()
    run.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if group is not None:
        os.chown(run, -1, group)
        run.chmod(_GROUP_READS)
        if is_ours and run.is_relative_to(state):
            os.chown(state, -1, group)
            state.chmod(_GROUP_PASSES)
    elif is_new or run.is_relative_to(state):
        run.chmod(_PRIVATE)


def _make_own(paths: Sequence[str], state_dir: Path) -> None:
    """Make a tier's directories within the state directory; others are whoever mounts them's to make."""
    for path in map(Path, paths):
        if path.is_relative_to(state_dir):
            path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)


@dataclass(slots=True)
class _Greeting:
    """Prints once what is served and how to connect."""

    wanted: _Wanted
    began_s: float
    addresses: Mapping[str, str] = field(default_factory=dict)

    def serving(self, addresses: Mapping[str, str]) -> None:
        """Take note of where the agent answers."""
        self.addresses = addresses

    def reported(self, status: KVPoolNodeStatus) -> None:
        """Print, with the tiers as they are."""
        took_s = time.monotonic() - self.began_s
        lines = greeting(self.wanted.manifest, status, self.addresses)
        if (fleet := self.wanted.membership) is not None:
            lines.append(f"fleet     {fleet.agent} at {self.addresses['peer']}, directory {fleet.url}")
        print(f"{PROGRAM}: ready after {took_s:.1f} s", *lines, sep="\n", flush=True)  # noqa: T201  The command's output.
        for note in self.wanted.manifest.notes:
            print(f"note      {note}", flush=True)  # noqa: T201


def greeting(manifest: Manifest, status: KVPoolNodeStatus, addresses: Mapping[str, str]) -> list[str]:
    """Lines for people: socket, pool, tiers, tenants, metrics, and the lines of Python that connect."""
    pool, wanted = manifest.pool.metadata.name, manifest.pool.spec.compatibility
    tiers = [
        f"tier      {t.name}: {format_rounded(t.capacity_bytes)} of {t.medium or t.type}, {t.phase}"
        + (f" ({t.last_error})" if t.last_error else "")
        for t in status.tiers
    ]
    tenants = [f"tenant    {t.metadata.name}: {_identities(t.spec)}" for t in manifest.tenants]
    model = "MODEL" if wanted.model == ANY else wanted.model
    revision = "REVISION" if wanted.revision == ANY else wanted.revision
    socket = addresses.get("socket", "")
    fits = f"model {wanted.model}, revision {wanted.revision}, {wanted.dtype}, blocks of {wanted.block_tokens} tokens"
    named = f'"{model}", "{revision}", "{wanted.dtype}", {wanted.block_tokens}'
    return [
        f"socket    {socket}",
        f"pool      {pool}: {fits}",
        *tiers,
        *tenants,
        f"metrics   http://{addresses.get('metrics', '')}/metrics",
        f"look      kvstrata stats --socket {socket} --pool {pool} --model {model} --revision {revision}",
        f"connect   layout = Layout({named}, layers, kv_heads, head_dim, element_bytes)",
        f'          client = Client.attach(Target(Path("{socket}"), "{pool}", NO_TOKEN, layout))',
        f"vllm      vllm serve {model} --kv-transfer-config '{_vllm_config(socket, manifest)}'",
    ]


def _vllm_config(socket: str, manifest: Manifest) -> str:
    """What vLLM needs to connect (docs/engines.md)."""
    wanted = manifest.pool.spec.compatibility
    extra: dict[str, Any] = {"socket": socket, "pool": manifest.pool.metadata.name}
    named = {"model": wanted.model, "revision": wanted.revision}
    extra |= {key: value for key, value in named.items() if value != ANY}
    if wanted.block_tokens != BLOCK_TOKENS:
        extra["block_tokens"] = wanted.block_tokens
    connector = {
        "kv_connector": "KvstrataConnector",
        "kv_connector_module_path": "kvstrata_client.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return json.dumps(connector)


def _identities(spec: Any) -> str:
    named = [f"{a.namespace}/{a.name}" for a in spec.service_accounts]
    return ", ".join(named) or "by namespaceSelector"


if __name__ == "__main__":
    sys.exit(main())

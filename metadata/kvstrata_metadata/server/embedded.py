"""A real redis-server in a state directory, for clusters without a Redis of their own, demos and tests.

No persistence: the directory is rebuilt from the agents, and a stale copy would only have to be swept again.
`noeviction`: an evicted half of a pair is a bug that shows late (LMCache#426); a full Redis refuses announcements.
"""

import asyncio
import contextlib
import hashlib
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvstrata_api.errors import DirectoryAwayError, InvalidInputError, UnsupportedError
from kvstrata_api.units import MIB
from kvstrata_kube.tls import Contexts, Credential, client_context
from kvstrata_metadata.store.access import Grant, RedisAccess, Role, acl_file
from kvstrata_metadata.store.store import Store

START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02
_PASSWORD_BYTES: Final = 24
_RELOADER: Final = "reloader"
"""User that has certificates read again."""

_ATTEMPTS: Final = 5
"""A port that was free may be taken before the server binds it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the server, which are those of its client here, too: every client has to show a certificate."""

    certificate: Path
    key: Path
    ca: Path

    def credential(self) -> Credential:
        """Read what the files hold now."""
        return Credential(self.certificate.read_text(), self.key.read_text(), self.ca.read_text())

    def write(self, held: Credential) -> None:
        """Replace what the files hold; the key is for us alone."""
        for path, pem in (
            (self.certificate, held.certificate_pem),
            (self.key, held.key_pem),
            (self.ca, held.trust_pem),
        ):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(pem)


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """How to run the server."""

    state_dir: Path
    """Made if absent, mode 0700; holds configuration and log."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """0 chooses a free one."""
    advertised_host: str = ""
    """What clients connect to; the bound address when empty."""
    memory_bytes: int = 1024 * MIB
    """Where Redis starts to refuse announcements; about ten million locations."""
    tls: TlsFiles | None = None
    agent_password: str = ""
    """Chosen when empty."""
    metadata_password: str = ""
    """Chosen when empty."""
    other_users: tuple[str, ...] = ()
    """Further lines of the ACL file, for an exporter or a backup."""
    other_settings: tuple[str, ...] = ()
    """Further lines of the configuration, after ours."""


class EmbeddedRedis:
    """A running server and the access of each role. Dies with this process, even when that is killed."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", port: int, access: dict[Role, RedisAccess], reloader: RedisAccess
    ) -> None:
        """`reloader` is the access of the user that may do nothing but change settings; it is never published.

        Its context stays the one that the server knows, whatever the files hold meanwhile.
        """
        self._process = process
        self.port = port
        self._access = access
        self._reloader = reloader

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once the server has ended."""
        return self._process.poll() is None

    def access(self, role: Role) -> RedisAccess:
        """How `role` reaches the server."""
        return self._access[role]

    async def reload(self, tls: TlsFiles) -> None:
        """Use what the files hold now for new connections; those that exist go on. Raises `DirectoryAwayError`."""
        store, held = Store(self._reloader), tls.credential()
        names = {"tls-cert-file": tls.certificate, "tls-key-file": tls.key, "tls-ca-cert-file": tls.ca}
        settings = [word for name, path in names.items() for word in (name, str(path.absolute()))]
        try:
            # One command: the server refuses a certificate whose key it does not have yet.
            for reply in await store.ask([("CONFIG SET", *settings)]):
                if isinstance(reply, DirectoryAwayError):
                    raise reply
            self._reloader = replace(self._reloader, contexts=_contexts_of(held))
        finally:
            await store.close()

    async def stop(self) -> None:
        """End the server. Idempotent."""
        self._process.terminate()
        await asyncio.to_thread(_reap, self._process)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    process.kill()
    process.wait()


async def start(config: EmbeddedConfig) -> EmbeddedRedis:
    """Start a server and load the transitions. The server lives no longer than the calling thread.

    Raises `UnsupportedError` naming the Debian package that is missing, `InvalidInputError` when the server does not
    accept its configuration or state directory.
    """
    command = _command()
    grants = (
        Grant(Role.AGENT, config.agent_password or secrets.token_urlsafe(_PASSWORD_BYTES)),
        Grant(Role.METADATA, config.metadata_password or secrets.token_urlsafe(_PASSWORD_BYTES)),
    )
    reload_password = secrets.token_urlsafe(_PASSWORD_BYTES)
    for _ in range(_ATTEMPTS):
        port = config.port or _free_port(config.host)
        file = await asyncio.to_thread(_write_files, config, port, grants, reload_password)
        # In this thread, not in a worker: the kernel sends the death signal when the forking thread ends.
        process = subprocess.Popen([*command, str(file)], stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        reloader = _access(config, port, _RELOADER, reload_password)
        if config.tls:
            reloader = replace(reloader, contexts=_contexts_of(config.tls.credential()))
        server = EmbeddedRedis(
            process, port, {g.role: _access(config, port, g.role, g.password) for g in grants}, reloader
        )
        if await _is_ready(server):
            return server
        await server.stop()
    raise InvalidInputError(f"redis-server did not start: {_last_words(config.state_dir)}")


def _command() -> list[str]:
    """Command that makes the server die with its parent: PR_SET_PDEATHSIG outlives exec, and nothing else does."""
    redis, setpriv = shutil.which("redis-server"), shutil.which("setpriv")
    if redis is None:
        raise UnsupportedError("redis-server is not installed: `apt-get install redis-server` (7.0 or newer)")
    if setpriv is None:
        raise UnsupportedError("setpriv is not installed: `apt-get install util-linux`")
    return [setpriv, "--pdeathsig", "KILL", redis]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _write_files(config: EmbeddedConfig, port: int, grants: tuple[Grant, ...], reload_password: str) -> Path:
    # Can change settings and nothing else: certificates are read again by a setting, and no role of ours may set any.
    digest = hashlib.sha256(reload_password.encode()).hexdigest()
    reloader = f"user {_RELOADER} on #{digest} resetkeys resetchannels -@all +hello +auth +config|set"

    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in (
            ("users.acl", acl_file(grants, (reloader, *config.other_users))),
            ("redis.conf", _config_file(config, port)),
        ):
            path = config.state_dir / name
            path.touch(mode=0o600)
            path.write_text(content)
    except OSError as e:
        raise InvalidInputError(f"redis state directory {config.state_dir}: {e.strerror}") from e
    return config.state_dir / "redis.conf"


def _config_file(config: EmbeddedConfig, port: int) -> str:
    here = config.state_dir.absolute()
    lines = [
        f"bind {config.host}", "protected-mode no", f'dir "{here}"', f'aclfile "{here / "users.acl"}"',
        f'logfile "{here / "redis.log"}"', 'save ""', "appendonly no", "maxmemory-policy noeviction",
        f"maxmemory {config.memory_bytes}", "lazyfree-lazy-user-del yes", "enable-debug-command no",
        "enable-module-command no", "hash-max-listpack-entries 512", "hash-max-listpack-value 64",
    ]  # fmt: skip
    if config.tls is None:
        lines.append(f"port {port}")
    else:
        tls = config.tls
        lines += ["port 0", f"tls-port {port}", "tls-auth-clients yes", 'tls-protocols "TLSv1.3"']
        lines += ["tls-session-caching no", f'tls-cert-file "{tls.certificate.absolute()}"']
        lines += [f'tls-key-file "{tls.key.absolute()}"', f'tls-ca-cert-file "{tls.ca.absolute()}"']
    return "\n".join([*lines, *config.other_settings]) + "\n"


def _access(config: EmbeddedConfig, port: int, user: str, password: str) -> RedisAccess:
    where = f"{config.advertised_host or config.host}:{port}"
    if config.tls is None:
        return RedisAccess(f"redis://{where}", user, password)
    tls = config.tls
    contexts = lambda: client_context(tls.credential(), checks_host=True)  # noqa: E731  As the files are then.
    return RedisAccess(f"rediss://{where}", user, password, is_fleet=True, contexts=contexts)


def _contexts_of(held: Credential) -> Contexts:
    return lambda: client_context(held, checks_host=True)


async def _is_ready(server: EmbeddedRedis) -> bool:
    """Wait until the server answers and has the transitions; false when it ended."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    store = Store(server.access(Role.METADATA))
    try:
        while server.is_running and time.monotonic() < deadline_s:
            with contextlib.suppress(DirectoryAwayError):
                await store.install()
                return True
            await asyncio.sleep(_POLL_S)
    finally:
        await store.close()
    return False


def _last_words(state_dir: Path) -> str:
    try:
        return " | ".join((state_dir / "redis.log").read_text(errors="replace").splitlines()[-3:])
    except OSError:
        return "it left no log"

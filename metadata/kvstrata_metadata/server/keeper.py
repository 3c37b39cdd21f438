"""Keeps an embedded Redis running and the Secret that leads agents to it true."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from kvstrata_api import names
from kvstrata_api.errors import DirectoryAwayError, InvalidInputError, RetryableError
from kvstrata_kube.tls import Credential
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis, TlsFiles
from kvstrata_metadata.store.access import RedisAccess, Role, format_access, parse_access

POLL_S: Final = 0.5
"""Polling interval of the server; it is back within this and its start, 30 ms."""

PUBLISH_EVERY_POLLS: Final = 120
"""Polls between two writes of the Secret, in case somebody has changed it."""

_log = logging.getLogger(__name__)


class Secrets(Protocol):
    """Where the Secret is (`cluster.Cluster`)."""

    async def read_secret(self, name: str) -> Mapping[str, bytes] | None:
        """Content, or None. Raises `RetryableError` or `ForbiddenError`."""

    async def write_secret(self, name: str, content: Mapping[str, str]) -> None:
        """Make it hold exactly `content`. Raises like `read_secret`."""


class RedisKeeper:
    """One embedded server after the other, on the port and with the passwords of the first."""

    def __init__(self, config: EmbeddedConfig, secrets: Secrets | None) -> None:
        """`secrets` is None where there is no Kubernetes: nothing is published then."""
        self._config = config
        self._secrets = secrets
        self._server: EmbeddedRedis | None = None
        self._is_reload_due = False
        self.restarts_total = 0
        self.is_published = secrets is None
        """True once the Secret is known to be right."""

    @property
    def is_running(self) -> bool:
        """True while the server runs."""
        return self._server is not None and self._server.is_running

    async def start(self) -> RedisAccess:
        """Start the first server and return our own access. Raises what `embedded.start` raises."""
        if self._secrets:
            self._config = replace(self._config, agent_password=await self._earlier_password(self._secrets))
        self._server = server = await embedded.start(self._config)
        ours, agents = server.access(Role.METADATA), server.access(Role.AGENT)
        self._config = replace(
            self._config, port=server.port, agent_password=agents.password, metadata_password=ours.password
        )
        _log.info("listening", extra={"what": "redis", "address": ours.url})
        return ours

    def agent_access(self) -> RedisAccess:
        """Return how agents reach the server."""
        assert self._server is not None, "started first"
        return self._server.access(Role.AGENT)

    async def run(self) -> None:
        """Watch until cancelled. Raises what `embedded.start` raises when the server cannot be started again."""
        polls = 0
        while True:
            if not self.is_running:
                _log.error("redis ended", extra={"restarts": self.restarts_total})
                self._server = await embedded.start(self._config)
                self.restarts_total += 1
            if not self.is_published or polls % PUBLISH_EVERY_POLLS == 0:
                await self._publish()
            if self._is_reload_due:
                await self._reload()
            polls += 1
            await asyncio.sleep(POLL_S)

    def certify(self, held: Credential) -> None:
        """Use a certificate: for the server that is to be started, or for new connections of the one that runs."""
        tls = self._config.tls or _files(self._config.state_dir)
        tls.write(held)
        self._config = replace(self._config, tls=tls)
        self._is_reload_due = self._server is not None

    async def _reload(self) -> None:
        assert self._server is not None, "there is something to reload"
        assert self._config.tls is not None, "a certificate came"
        try:
            await self._server.reload(self._config.tls)
            self._is_reload_due = False
            _log.info("redis has read its certificates anew")
        except DirectoryAwayError as e:
            _log.warning("redis keeps its old certificates", extra={"error": str(e)})

    async def stop(self) -> None:
        """End the server. Idempotent."""
        if self._server is not None:
            await self._server.stop()

    async def _publish(self) -> None:
        if self._secrets is None:
            return
        try:
            await self._secrets.write_secret(names.REDIS_SECRET_AGENT, format_access(self.agent_access()))
            self.is_published = True
        except RetryableError as e:
            self.is_published = False
            _log.warning("secret not written", extra={"error": str(e)})

    @staticmethod
    async def _earlier_password(secrets: Secrets) -> str:
        """Password that agents know from a run before ours; empty when there is none to be had."""
        try:
            content = await secrets.read_secret(names.REDIS_SECRET_AGENT)
            return parse_access(content).password if content else ""
        except (RetryableError, InvalidInputError) as e:
            _log.warning("earlier secret unknown", extra={"error": str(e)})
            return ""


def _files(folder: Path) -> TlsFiles:
    return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")

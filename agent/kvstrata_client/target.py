"""What a client attaches to, and its token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kvstrata_api import __version__
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import AgentAwayError, UnauthenticatedError
from kvstrata_api.wire import DeviceGrant

NO_TOKEN: Final = ""
"""Presented to an agent of `kvstrata up`, which goes by the unix user of the connection then."""
TOKEN_BYTES_MAX = 64 << 10
"""A projected token has 1 to 2 KiB; the limit bounds what a wrong path can cost."""


def pool_layout(model: str, revision: str, dtype: str, block_tokens: int) -> Layout:
    """A layout that only fits a pool's `compatibility`: enough to be let in, for what names no block."""
    element_bytes = {"fp32": 4, "bf16": 2, "fp16": 2}.get(dtype, 1)
    return Layout(model, revision, dtype, block_tokens, 1, 1, 1, element_bytes)


def configured_token(token_file: str) -> str | Path:
    """Token of a configuration that names its file, or `NO_TOKEN` where it names none."""
    return Path(token_file) if token_file else NO_TOKEN


class OpenExtent(Protocol):
    """Memory of a device that is open here until the last tensor of it has gone (`kvstrata_native.devices.Opened`)."""

    @property
    def memory(self) -> Any:
        """Tensor of all of it, (bytes,) uint8."""

    @property
    def anchor(self) -> Callable[[], object | None]:
        """Returns None once it is closed."""


class Devices(Protocol):
    """What this process can open of the memory of devices (`connectors.device_blocks`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """UUIDs of these devices, or `emulated`, as the agent is told when the client attaches."""

    @property
    def error(self) -> str:
        """Why an extent could not be opened; nothing is asked for in place from then on. Empty while all could be."""

    def covers(self, device: Any) -> bool:
        """True where blocks are to be copied to this torch device without a pass over host memory."""

    def open(self, grant: DeviceGrant, fd: int) -> OpenExtent:
        """Open an extent; `fd` stays the caller's.

        Raises `InvalidInputError` where it cannot be opened, and sets `error`.
        """


@dataclass(frozen=True, slots=True)
class Target:
    """One agent, one pool, one identity, one layout."""

    socket: Path
    """Unix socket of the node's agent of the pool."""
    pool: str
    token: str | Path = field(repr=False)
    """A token, or the file that holds it: read again at every attach, because kubelets rotate projected tokens. Or
    `NO_TOKEN`."""
    layout: Layout
    client: str = f"kvstrata_client/{__version__}"
    """Name and version for the agent's logs."""
    timeout_s: float = 0.5
    """How long a verb that moves no bytes may take before it answers as if the agent were away."""
    move_timeout_s: float = 5.0
    """The same for verbs that make room or check bytes (reserve, publish)."""
    silence_s: float = 2.0
    """An agent that owes an answer and sends nothing for this long is given up and reconnected."""
    devices: Devices | None = field(default=None, repr=False, compare=False)
    """What opens blocks in the memory of devices, to read them in place; None: they are copied to host memory first."""

    def read_token(self) -> str:
        """Return the token. Raises `AgentAwayError` for a file that cannot be read now, else `UnauthenticatedError`."""
        if isinstance(self.token, str):
            return self.token
        try:
            with self.token.open() as file:
                token = file.read(TOKEN_BYTES_MAX).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise AgentAwayError(f"token file {self.token}: {e}") from e
        if not token:
            raise UnauthenticatedError(f"token file {self.token} is empty")
        return token

"""The agent's command line as one value. Pure."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from kvstrata_api import __version__, arguments, names
from kvstrata_native.offload import KERNELS, REFERENCE
from kvstrata_telemetry import tracing
from kvstrata_telemetry.tracing import Sending


@dataclass(frozen=True, slots=True)
class Config:
    """What one agent process was started with."""

    pool: str
    node: str
    socket: Path
    state_dir: Path
    memory_dir: Path
    memory_host_dir: Path | None
    """`memory_dir` as the host names it, where that is another path."""
    namespace: str
    kubeconfig: Path | None
    metrics_host: str
    metrics_port: int
    peer_host: str
    peer_port: int
    peer_token: Path | None
    peer_encryption: str
    """`control`: leases, addresses and whatever NIXL cannot move go by TLS; `required`: all bytes do."""
    requires_bound_tokens: bool
    kek_file: Path | None
    offload: str
    """Engine that does the work of the kernels: `reference`, `none`, or the path of a library."""
    ready_file: Path | None
    sending: Sending
    """Of spans."""
    log_level: str

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """Folders with what nobody but the agent may read."""
        files = (self.peer_token, self.kek_file, self.kubeconfig)
        return (self.socket.parent, self.state_dir, self.memory_dir, *(f.parent for f in files if f is not None))


def parse(argv: list[str] | None = None) -> Config:
    """Read the command line; leaves the process with a message and status 2 when it is wrong."""
    given = _parser().parse_args(argv)
    host, port = given.peer_address
    return Config(
        pool=given.pool,
        node=given.node,
        socket=given.socket,
        state_dir=given.state_dir,
        memory_dir=given.memory_dir or given.state_dir / "memory",
        memory_host_dir=given.memory_host_dir,
        namespace=given.namespace,
        kubeconfig=given.kubeconfig,
        metrics_host=given.metrics_host,
        metrics_port=given.metrics_port,
        peer_host=host,
        peer_port=port,
        peer_token=given.peer_token_file,
        peer_encryption=given.peer_encryption,
        requires_bound_tokens=given.require_bound_tokens,
        kek_file=given.kek_file,
        offload=given.offload,
        ready_file=given.ready_file,
        sending=Sending.given(given),
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstrata-agent", description="Holds the KV blocks of one pool on one node and serves them to engines."
    )
    add = parser.add_argument
    add("--version", action="version", version=__version__)
    add("--pool", required=True, help="name of the KVPool")
    add("--node", default=os.environ.get("NODE_NAME"), help="name of the Node; default: $NODE_NAME")
    add("--socket", type=Path, required=True, help="unix socket for engines; its directory is made with mode 0770")
    add("--state-dir", type=Path, required=True, help="keeps the agent's epoch across restarts")
    add(
        "--memory-dir",
        type=Path,
        help="directory on a tmpfs of the host, where memory tiers outlive the agent; default: memory in the state "
        "directory, which serves where that is on a tmpfs",
    )
    add(
        "--memory-host-dir",
        type=Path,
        help="the same directory as the host names it, for pods that mount weights of models from it; default: the "
        "same path",
    )
    add(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", names.SYSTEM_NAMESPACE),
        help="of Leases and Secrets; default: $POD_NAMESPACE or %(default)s",
    )
    add("--kubeconfig", type=Path, help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    add("--metrics-host", default="127.0.0.1", help="default: %(default)s")
    add("--metrics-port", type=arguments.port, default=9100, help="0: any free one; default: %(default)s")
    add(
        "--peer-address",
        type=arguments.address,
        default=("127.0.0.1", 0),
        help="HOST:PORT where other agents reach this one, port 0 for any free one; default: 127.0.0.1:0",
    )
    add(
        "--peer-token-file",
        type=Path,
        help="projected token of audience kvstrata, shown to other agents; default: asked of the API server",
    )
    add(
        "--peer-encryption",
        choices=("control", "required"),
        default="control",
        help="required: all bytes from and to other agents by TLS; control: block bytes by NIXL where that is there, "
        "which does not encrypt; default: %(default)s",
    )
    add(
        "--require-bound-tokens",
        action="store_true",
        help="serve engines alone that present the token of a pod on this node",
    )
    add(
        "--kek-file",
        type=Path,
        help="key-encryption keys, one line k<n>:<base64 of 32 bytes> each; default: those of Secret "
        f"{names.KEK_SECRET}",
    )
    add_offload(parser)
    add("--ready-file", type=Path, help="written, as JSON, once engines are served")
    tracing.add_arguments(parser)
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def add_offload(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses the offload engine."""
    parser.add_argument(
        "--offload",
        default=os.environ.get("KVSTRATA_OFFLOAD") or REFERENCE,
        metavar="ENGINE",
        help=f"what codes, copies and digests blocks: {REFERENCE} (this processor, by the offload interface), "
        f"{KERNELS} (this processor), or the path of a library with that interface; default: $KVSTRATA_OFFLOAD or "
        f"{REFERENCE}",
    )

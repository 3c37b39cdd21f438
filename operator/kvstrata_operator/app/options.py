"""The command line of the operator."""

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from kvstrata_api import __version__, arguments, names
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_operator.observe.world import Setting
from kvstrata_telemetry import tracing
from kvstrata_telemetry.tracing import Sending

_SECONDS: Final = arguments.seconds(1, 100 * 365 * 86_400)
"""Dates of certificates that end later cannot be written."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, parsed."""

    kubeconfig: Path | None
    setting: Setting
    metrics_host: str
    metrics_port: int
    ready_file: Path | None
    lease_duration_s: float
    resync_s: float
    heartbeat_s: float
    identity: str
    issuance: Issuance
    log_level: str
    sending: Sending
    """Of spans."""
    kek_file: Path | None = None
    """Where KEKs come from; without one from their Secret."""


def parse(arguments: Sequence[str] | None) -> Options:
    """Read arguments, those of the process when None. Ends the process for `--help` and for what cannot be read."""
    given = _parser().parse_args(arguments)
    return Options(
        kubeconfig=given.kubeconfig,
        setting=Setting(
            given.namespace, given.socket_template, given.agent_template, given.redis_template, given.redis_mode
        ),
        metrics_host=given.metrics_host,
        metrics_port=given.metrics_port,
        ready_file=given.ready_file,
        lease_duration_s=given.lease_duration_s,
        resync_s=given.resync_s,
        heartbeat_s=given.heartbeat_s,
        identity=given.identity,
        issuance=_issuance(given),
        log_level=given.log_level,
        sending=Sending.given(given),
        kek_file=given.kek_file,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstrata-operator", description="Turns KVPools into KVPoolNodes and statuses."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--kubeconfig", type=Path, help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    parser.add_argument(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", names.SYSTEM_NAMESPACE),
        help="of Secrets, Leases and ConfigMaps; default: $POD_NAMESPACE or %(default)s",
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--metrics-port", type=arguments.port, default=9101, help="0: any free one; default: %(default)s"
    )
    parser.add_argument("--ready-file", type=Path, help="written, as JSON, once the process listens")
    parser.add_argument(
        "--lease-duration-s", type=_SECONDS, default=10.0, help="a silent leader is replaced after this; %(default)s"
    )
    parser.add_argument("--resync-s", type=_SECONDS, default=60.0, help="between complete lists; %(default)s")
    parser.add_argument(
        "--heartbeat-s", type=_SECONDS, default=5.0, help="polling interval of agents' Leases; %(default)s"
    )
    parser.add_argument(
        "--socket-template",
        default=names.socket_path("{pool}"),
        help="where engine pods find an agent's socket on their node; default: %(default)s",
    )
    parser.add_argument(
        "--agent-template",
        default="",
        metavar="CONFIGMAP",
        help=f"run agents from the pod template in its entry {names.AGENT_TEMPLATE_ENTRY}; default: others run them",
    )
    parser.add_argument(
        "--redis-template",
        default="",
        metavar="CONFIGMAP",
        help=f"run Redis from the StatefulSet in its entry {names.REDIS_TEMPLATE_ENTRY}; default: others run it",
    )
    parser.add_argument(
        "--redis-mode",
        default="",
        choices=("", "Embedded", "External"),
        help="how this release runs Redis; pools that ask for another mode get a fault; default: not declared",
    )
    parser.add_argument(
        "--identity", default=_identity(), help="names this replica; default: $POD_NAME or host and pid"
    )
    _add_certificates(parser)
    parser.add_argument(
        "--kek-file",
        type=Path,
        help="key-encryption keys, one line k<n>:<base64 of 32 bytes> each; default: those of Secret "
        f"{names.KEK_SECRET}, which is made when it is absent",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    tracing.add_arguments(parser)
    return parser


def _add_certificates(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("certificates")
    group.add_argument(
        "--authority",
        choices=("own", "external"),
        default="own",
        help=f"own: make and replace Secret {names.CA_NAMESPACE}/{names.CA_SECRET}; external: somebody else does, "
        "such as cert-manager; default: %(default)s",
    )
    group.add_argument("--authority-life-s", type=_SECONDS, default=365 * 86_400.0, help="of our own; %(default)s")
    group.add_argument(
        "--authority-settle-s",
        type=_SECONDS,
        default=120.0,
        help="a new authority is trusted for so long before it signs; %(default)s",
    )
    group.add_argument(
        "--certificate-life-s", type=_SECONDS, default=86_400.0, help="of what it signs; default: %(default)s"
    )
    group.add_argument(
        "--require-bound-tokens", action="store_true", help="sign for agents that run as pods on their node alone"
    )
    group.add_argument(
        "--redis-host",
        action="append",
        default=[],
        help=f"DNS name of a Redis that the chart runs, for Secret {names.REDIS_SECRET_TLS}; may be repeated",
    )


def _issuance(given: argparse.Namespace) -> Issuance:
    return Issuance(
        namespace=given.namespace,
        leaf_life=timedelta(seconds=given.certificate_life_s),
        authority_life=timedelta(seconds=given.authority_life_s),
        settle=timedelta(seconds=given.authority_settle_s),
        needs_bound_tokens=given.require_bound_tokens,
        makes_authority=given.authority == "own",
        redis_hosts=tuple(given.redis_host),
    )


def _identity() -> str:
    """Name this process among all replicas."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}_{os.getpid()}"

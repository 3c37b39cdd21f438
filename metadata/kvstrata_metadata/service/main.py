"""The command line of the metadata service."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstrata_api import __version__, arguments, names
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.units import MIB
from kvstrata_metadata.duties.sweeper import SWEEP_S
from kvstrata_metadata.server.embedded import EmbeddedConfig
from kvstrata_metadata.service.service import Options, serve
from kvstrata_metadata.store.access import parse_access
from kvstrata_telemetry import logs, tracing
from kvstrata_telemetry.tracing import Sending

_log = logging.getLogger(__name__)

SECONDS_MAX: Final = 1_000_000
MEMORY_MIB_MAX: Final = 1 << 24
EXTERNAL_VARIABLES = {
    "url": "KVSTRATA_REDIS_URL",
    "username": "KVSTRATA_REDIS_USERNAME",
    "password": "KVSTRATA_REDIS_PASSWORD",
    "ca.crt": "KVSTRATA_REDIS_CA",
    "tls.crt": "KVSTRATA_REDIS_CERTIFICATE",
    "tls.key": "KVSTRATA_REDIS_KEY",
    "certificates": "KVSTRATA_REDIS_CERTIFICATES",
}
"""Environment variables that stand for the keys of a Secret, for `--redis external`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT; return the exit status."""
    given = _parser().parse_args(argv)
    logs.configure(given.log_level, "metadata")
    tracing.configure("metadata", Sending.given(given))
    try:
        asyncio.run(_until_signalled(options_of(given, os.environ)))
    except (KvStrataError, OSError, BaseExceptionGroup) as e:
        for error in _leaves(e):
            sys.stderr.write(f"kvstrata-metadata: {error}\n")
        return 1
    finally:
        tracing.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstrata-metadata", description="Keeps the directory of block locations clean and shows the fleet."
    )
    parser.add_argument("--version", action="version", version=__version__)
    redis = parser.add_argument_group("redis")
    redis.add_argument(
        "--redis",
        choices=("embedded", "external"),
        default="embedded",
        help=f"embedded: start a server and write Secret {names.REDIS_SECRET_AGENT}; external: use the one that "
        f"{', '.join(EXTERNAL_VARIABLES.values())} name",
    )
    redis.add_argument("--state-dir", type=Path, help="of the embedded server: configuration and log")
    redis.add_argument(
        "--redis-host", default="127.0.0.1", help="address that the embedded server binds; default: %(default)s"
    )
    redis.add_argument("--redis-port", type=arguments.port, default=0, help="0: any free one; default: %(default)s")
    redis.add_argument(
        "--redis-advertise",
        default=os.environ.get("POD_IP", ""),
        help="host in the agents' Secret; default: $POD_IP",
    )
    redis.add_argument(
        "--redis-memory-mib",
        type=arguments.whole(1, MEMORY_MIB_MAX),
        default=1024,
        help="where it refuses announcements; default: %(default)s",
    )
    kubernetes = parser.add_argument_group("kubernetes")
    kubernetes.add_argument("--kubeconfig", type=Path, help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    kubernetes.add_argument(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", names.SYSTEM_NAMESPACE),
        help="of Leases and the Secret; default: $POD_NAMESPACE or %(default)s",
    )
    kubernetes.add_argument(
        "--lease-duration-s",
        type=arguments.seconds(1, SECONDS_MAX),
        default=10.0,
        help="a silent leader is replaced after this; %(default)s",
    )
    kubernetes.add_argument(
        "--identity", default=_identity(), help="names this replica; default: $POD_NAME or host and pid"
    )
    kubernetes.add_argument("--without-kubernetes", action="store_true", help="no Leases, no Secret: heartbeats only")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--metrics-port", type=arguments.port, default=9102, help="0: any free one; default: %(default)s"
    )
    parser.add_argument("--ready-file", type=Path, help="written, as JSON, once agents can use the directory")
    parser.add_argument(
        "--sweep-s",
        type=arguments.seconds(0.001, SECONDS_MAX),
        default=SWEEP_S,
        help="seconds between sweeps; default: %(default)s",
    )
    parser.add_argument("--log-level", type=str.lower, default="info", choices=("debug", "info", "warning", "error"))
    tracing.add_arguments(parser)
    return parser


def options_of(given: argparse.Namespace, environment: Mapping[str, str]) -> Options:
    """Check the command line. Raises `InvalidInputError` that names the option."""
    is_embedded = given.redis == "embedded"
    if is_embedded and given.state_dir is None:
        raise InvalidInputError("--redis embedded needs --state-dir")
    values = {key: environment.get(variable, "") for key, variable in EXTERNAL_VARIABLES.items()}
    return Options(
        embedded=_embedded(given) if is_embedded else None,
        external=None if is_embedded else parse_access(values),
        kubeconfig=given.kubeconfig,
        namespace=given.namespace,
        has_kubernetes=not given.without_kubernetes,
        identity=given.identity,
        lease_duration_s=given.lease_duration_s,
        metrics_host=given.metrics_host,
        metrics_port=given.metrics_port,
        ready_file=given.ready_file,
        sweep_s=given.sweep_s,
    )


def _embedded(given: argparse.Namespace) -> EmbeddedConfig:
    return EmbeddedConfig(
        state_dir=given.state_dir,
        host=given.redis_host,
        port=given.redis_port,
        advertised_host=given.redis_advertise,
        memory_bytes=given.redis_memory_mib * MIB,
    )


def _identity() -> str:
    """Name this process among all replicas."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}_{os.getpid()}"


async def _until_signalled(options: Options) -> None:
    """Run until a signal asks for the end; a part that fails ends the process, which is then started again."""
    serving = asyncio.ensure_future(serve(options))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        _log.info("stopped")


def _leaves(error: BaseException) -> Iterable[BaseException]:
    """Expected errors behind one of a task group; anything else is a bug and goes on."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    expected, others = error.split((KvStrataError, OSError))
    if others or expected is None:
        raise error
    for leaf in expected.exceptions:
        yield from _leaves(leaf)


if __name__ == "__main__":
    sys.exit(main())

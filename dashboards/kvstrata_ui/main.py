"""The command line of `kvstrata ui`."""

import argparse
import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvstrata_api import arguments
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.target import pool_layout
from kvstrata_ui import boards
from kvstrata_ui.access import Access, check_token
from kvstrata_ui.prefixes import Agents, Prefixes, tenant_of
from kvstrata_ui.server import Sources, has_charts, serve

PROGRAM: Final = "kvstrata ui"
PROMETHEUS: Final = "http://127.0.0.1:9090"
LISTEN: Final = "127.0.0.1:9108"
_PACKED: Final = Path(__file__).parent / "dashboards"
"""Where a wheel has the dashboards; in the source tree they lie beside this package."""
_SOURCE: Final = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status: 1 for a failure, 2 for wrong usage."""
    given = _parser().parse_args(arguments)
    try:
        host, port = given.listen
        access = Access(_token(given.token_file, host), given.host, time.monotonic, lambda: secrets.token_urlsafe(32))
        _check_charts()
        dashboards, url = _dashboards(given.dashboards), _url(given.prometheus)
        sources = Sources(dashboards, url, given.metadata, given.scrape_interval_s, _prefixes(given))
    except InvalidInputError as e:
        sys.stderr.write(f"{PROGRAM}: {e}\n")
        return 2
    try:
        asyncio.run(_serve(host, port, sources, access))
    except OSError as e:
        sys.stderr.write(f"{PROGRAM}: cannot listen on {given.listen}: {e}\n")
        return 1
    return 0


async def _serve(host: str, port: int, sources: Sources, access: Access) -> None:
    """Say the address, and serve until a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    endpoint = await serve(host, port, sources, access)
    try:
        print(f"http://{endpoint.address}/" + (f"login?once={access.once}" if access.once else ""), flush=True)  # noqa: T201
        await stop.wait()
    finally:
        await endpoint.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="A page with the dashboards, drawn from Prometheus, and a map of the fleet. Read-only. Prints its "
        "address; with a token, that is a link which logs one browser in.",
        epilog="Whoever may see the page may see what the dashboards ask Prometheus, of all tenants. "
        "example: kvstrata ui --prometheus http://127.0.0.1:9090",
    )
    parser.add_argument("--prometheus", default=PROMETHEUS, metavar="URL", help="default: %(default)s")
    parser.add_argument(
        "--metadata", default="", metavar="HOST:PORT", help="a metadata service, for agents that no longer report"
    )
    parser.add_argument(
        "--listen",
        type=arguments.address,
        default=LISTEN,
        metavar="HOST:PORT",
        help="port 0: a free one; default: %(default)s",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="what a browser has to give; needed off the loopback address"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of this server besides addresses; repeatable",
    )
    parser.add_argument(
        "--scrape-interval-s",
        type=arguments.seconds(0.1, 3_600),
        default=15.0,
        metavar="S",
        help="of that Prometheus; default: %(default)g",
    )
    prefixes = parser.add_argument_group(
        "prefixes", "What tenants have cached, asked of agents of this machine with the tenants' own tokens."
    )
    add = prefixes.add_argument
    add("--agent", type=Path, action="append", default=[], metavar="SOCKET", help="of an agent of the pool; repeatable")
    add("--tenant", action="append", default=[], metavar="NAME[=TOKEN_FILE]", help="whom to show; repeatable")
    add("--pool", default="", help="that the agents serve")
    add("--model", default="*", help="as in the pool; default: %(default)s")
    add("--revision", default="*", help="as in the pool; default: %(default)s")
    add("--dtype", default="bf16", help="default: %(default)s")
    add("--block-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--dashboards", type=Path, metavar="FOLDER", help="other dashboards than those of this version")
    return parser


def _prefixes(given: argparse.Namespace) -> Prefixes | None:
    if not given.agent and not given.tenant:
        return None
    if not (given.agent and given.tenant and given.pool):
        raise InvalidInputError("--agent, --tenant and --pool belong together")
    layout = pool_layout(given.model, given.revision, given.dtype, given.block_tokens)
    return Prefixes(Agents(tuple(given.agent), given.pool, layout, tuple(map(tenant_of, given.tenant))))


def _check_charts() -> None:
    if not has_charts():
        raise InvalidInputError(
            "the chart library is missing: `python hack/page_build.py` in the source tree, which needs npm, fetches "
            "it; a wheel built there has it"
        )


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.query or parts.fragment:
        raise InvalidInputError(f"--prometheus {text!r}: a URL is wanted, as {PROMETHEUS}")
    return text.rstrip("/")


def _token(path: Path | None, host: str) -> str:
    try:
        text = path.read_text(encoding="utf-8") if path else ""
    except (OSError, ValueError) as e:
        raise InvalidInputError(f"--token-file {path}: {e}") from e
    if path and not text.strip():
        raise InvalidInputError(f"--token-file {path}: it is empty")
    return check_token(text, host)


def _dashboards(folder: Path | None) -> dict[str, dict[str, object]]:
    chosen = folder or (_PACKED if _PACKED.is_dir() else _SOURCE)
    try:
        found = boards.read_all(chosen)
    except (OSError, ValueError, KeyError) as e:
        raise InvalidInputError(f"--dashboards {chosen}: {e}") from e
    if not found:
        raise InvalidInputError(f"--dashboards {chosen}: no dashboard is there")
    return found


if __name__ == "__main__":
    sys.exit(main())

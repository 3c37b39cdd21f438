"""Command that asks the metadata service: fleet."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final
from urllib.parse import urlencode

from kvstrata_api.errors import DirectoryAwayError, InvalidInputError
from kvstrata_api.units import format_rounded
from kvstrata_client.commands import output
from kvstrata_client.commands.output import table

Json = dict[str, Any]

ADDRESS: Final = "127.0.0.1:9102"
"""Where `kubectl -n kvstrata-system port-forward deployment/kvstrata-metadata 9102` listens."""
TIMEOUT_S: Final = 10.0
PAGE_AGENTS: Final = 500


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata fleet --address 127.0.0.1:9102 --state silent"
    found.add_argument(
        "--address",
        default=os.environ.get("KVSTRATA_METADATA", ADDRESS),
        help="HOST:PORT of a metadata service; default: $KVSTRATA_METADATA or %(default)s",
    )
    found.add_argument("--pool", help="only agents of this pool")
    found.add_argument("--state", choices=("live", "silent", "fenced"), help="only agents in this state")
    output.add_option(found, names="agents")
    found.set_defaults(run=_fleet)


def _fleet(given: argparse.Namespace) -> int:
    """Print the summary and every agent that was asked for."""
    found = read(given.address, given.pool, given.state)
    agents = found["agents"]
    lines = chain(_summary_lines(found), ("",), _agent_lines(agents))
    output.show(given.output, found, lines, (a["agent"] or a["incarnation"] for a in agents))
    return 0


def read(address: str, pool: str | None = None, state: str | None = None) -> Json:
    """All of it, with agents of one pool or state. Raises `DirectoryAwayError` when nobody answers."""
    return {**_get(address, "/v1/fleet", {}), "agents": list(_agents(address, pool, state))}


def _agents(address: str, pool: str | None, state: str | None) -> Iterator[Json]:
    """Every agent, page by page."""
    query = {"limit": str(PAGE_AGENTS)} | ({"pool": pool} if pool else {}) | ({"state": state} if state else {})
    while True:
        page = _get(address, "/v1/agents", query)
        yield from page["agents"]
        if not page["next"]:
            return
        query["after"] = page["next"]


def _get(address: str, path: str, query: dict[str, str]) -> Json:
    """Read one page. Raises `DirectoryAwayError` when nobody answers, `InvalidInputError` when it is refused."""
    url = f"http://{address}{path}" + (f"?{urlencode(query)}" if query else "")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            found: Json = json.load(answer)
    except urllib.error.HTTPError as e:
        raise InvalidInputError(f"{url}: {e.code} {e.read()[:200].decode(errors='replace')}") from e
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise DirectoryAwayError(f"{url}: {e}: is it a metadata service?") from e
    return found


def _summary_lines(at: Json) -> Iterator[str]:
    redis, states = at["redis"], at["agents_by_state"]
    up = "full" if redis["is_full"] else "up" if redis["is_up"] else "away"
    yield f"leader     {at['leader'] or 'nobody'}{' (this replica)' if at['is_leader'] else ''}"
    servers = ", ".join(f"{s['role']} {s['version']}" for s in redis["servers"]) or "unknown"
    yield f"redis      {up}, {redis['fill_ratio']:.0%} of its memory, {servers}"
    yield f"agents     {states['live']} live, {states['silent']} silent, {states['fenced']} fenced"
    leases = "" if at["leases_known"] else "; the API server does not tell who holds a Lease"
    yield f"locations  {at['locations']:,}, {at['location_bytes']} B of Redis each{leases}"
    sessions = ", ".join(f"{count} {state}" for state, count in sorted(at["sessions"].items()) if count)
    yield f"sessions   {sessions or 'none'}"
    if at["erase_claims_waiting"] or at["backlog"]:
        yield f"waiting    {at['erase_claims_waiting']} scopes to erase, {at['backlog']} dead agents to remove"
    yield ""
    rows = [
        (pool["pool"], str(pool["agents"]), f"{t['locations']:,}", t["tier"], format_rounded(t["stored_bytes"]))
        for pool in at["pools"]
        for t in pool["tiers"] or [{"tier": "-", "locations": 0, "stored_bytes": 0}]
    ]
    yield from table(("POOL", "AGENTS", "LOCATIONS", "MEDIUM", "BYTES"), rows)


def _agent_lines(agents: Sequence[Json]) -> Iterator[str]:
    rows = [
        (
            agent["agent"] or agent["incarnation"],
            agent["state"],
            _seconds(agent["silence_s"]),
            _seconds(agent["lease_age_s"]),
            f"{agent['locations']:,}",
            format_rounded(agent["stored_bytes"]),
            agent["epoch"],
        )
        for agent in agents
    ]
    yield from table(("AGENT", "STATE", "SILENT", "LEASE", "LOCATIONS", "BYTES", "EPOCH"), rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}s"

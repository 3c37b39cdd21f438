"""T11: bad credentials are refused by every verb of engines, agents and Redis; a good one is served by each.

The shortened run believes what a real API server said of each class of token when it was recorded; the full run starts
one, makes the tokens anew, and compares. Certificates are real in both, signed by the operator's own code.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata_kube.api import KubeApi
from support.agent.peer_certificates import Fleet
from support.runner.outcome import Outcome, Scale
from threats import bad_engines, bad_peers, bad_redis_callers, credentials
from threats.credentials import Tokens


def run(scale: Scale) -> Outcome:
    """Try every class at every verb."""
    with tempfile.TemporaryDirectory(prefix="t11-") as folder, _tokens(scale, Path(folder)) as (tokens, drift):
        return asyncio.run(_run(tokens, drift, Path(folder)))


@contextmanager
def _tokens(scale: Scale, folder: Path) -> Iterator[tuple[Tokens, list[str]]]:
    """Tokens, and how what the API server says of them differs from what was recorded."""
    if not scale.is_full:
        yield credentials.recorded(), []
        return
    known = credentials.recorded_answers()
    with credentials.live(folder / "plane") as (plane, tokens):
        said = credentials.record(plane, tokens)
        drift = [
            f"{name}: the API server says {said.get(name)}, recorded {status}"
            for name, status in known.items()
            if bool(said.get(name, {}).get("authenticated")) != bool(status.get("authenticated"))
        ]
        yield Tokens(tokens, plane.kubeconfig), drift


async def _run(tokens: Tokens, drift: list[str], folder: Path) -> Outcome:
    if isinstance(tokens.api, Path):
        api = await KubeApi.connect("t11", tokens.api)
        try:
            return await _try(Tokens(tokens.by_class, api), drift, folder)
        finally:
            await api.close()
    return await _try(tokens, drift, folder)


async def _try(tokens: Tokens, drift: list[str], folder: Path) -> Outcome:
    fleet, verify = Fleet(), bad_engines.authenticator(tokens).verify_peer
    redis = await bad_redis_callers.start(fleet, folder)
    try:
        parts = {
            "engines": await bad_engines.attempts(tokens, folder, tokens.bad_for_engines()),
            "agents": await bad_peers.attempts(fleet, tokens, verify),
            "owners": await bad_peers.impostors(fleet),
            "redis": await bad_redis_callers.attempts(fleet, redis),
        }
        refused = {
            "engines": await bad_engines.control(tokens, folder),
            "agents": await bad_peers.control(fleet, tokens, verify),
            "redis": await bad_redis_callers.control(fleet, redis),
        }
    finally:
        await redis.stop()
    accepted = [f"{part}: {what}" for part, (_, found) in parts.items() for what in found]
    unserved = [f"{part}: {what} refuses the good credential" for part, found in refused.items() for what in found]
    return Outcome(
        n=sum(cases for cases, _ in parts.values()),
        unit="attempts",
        violations=tuple(accepted + drift + unserved),
        is_control_caught=not unserved,
        values={
            "token_classes": float(len(tokens.bad_for_engines())),
            "certificate_classes": float(len(bad_peers.bad_certificates(fleet))),
            "verbs": float(len(bad_engines.VERBS) + len(tuple(bad_peers.questions()))),
        },
    )

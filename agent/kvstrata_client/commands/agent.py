"""Commands that ask an agent: stats, explain, session, lookup, why-miss, route-hint."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, Layout, chain_keys, matching
from kvstrata_api.errors import AgentAwayError, InvalidInputError, UnsupportedError
from kvstrata_api.units import format_rounded
from kvstrata_api.wire import KEYS_MAX, Request, RouteHint, WhyMiss
from kvstrata_client.client import Client
from kvstrata_client.commands import output
from kvstrata_client.commands.output import UsageError, table
from kvstrata_client.commands.token_ids import read_ids
from kvstrata_client.target import NO_TOKEN, Target, pool_layout
from kvstrata_client.verbs.results import Scope

if TYPE_CHECKING:
    import numpy as np

WAIT_S = 5.0


def stats_options(found: argparse.ArgumentParser) -> None:
    """Options of `stats`."""
    found.epilog = "example: kvstrata stats --pool demo --model M --revision R -o json"
    target_options(found)
    output.add_option(found, names="tiers")
    found.set_defaults(run=_stats)


def explain_options(found: argparse.ArgumentParser) -> None:
    """Options of `explain`."""
    found.epilog = "example: kvstrata explain --session agent-17 --pool demo --model M --revision R"
    target_options(found)
    what = found.add_mutually_exclusive_group(required=True)
    what.add_argument("--session", default="", help="a session of the token's tenant")
    what.add_argument("--digest", default="", help="a block's digest in hex; needs --scope")
    what.add_argument(
        "--tree", action="store_true", help="what the tenant has in the scope, as runs of blocks that branch"
    )
    found.add_argument("--scope", default="", help="of the digest or the tree; default: the one new blocks go to")
    output.add_option(found, default="yaml")
    found.set_defaults(run=_explain)


def session_options(found: argparse.ArgumentParser) -> None:
    """Options of `session`."""
    found.epilog = "example: kvstrata session agent-17 --pool demo --model M --revision R"
    found.description = (
        "What the node's agent remembers: up to 64 events of a session, the earliest first. Regret is what the other "
        "choice between fetching and computing would have saved."
    )
    target_options(found)
    found.add_argument("name", help="a session of the token's tenant")
    output.add_option(found)
    found.set_defaults(run=_session)


def lookup_options(found: argparse.ArgumentParser) -> None:
    """Options of `lookup`."""
    found.epilog = "example: kvstrata lookup tokens.json --pool demo --layout layout.json"
    _prompt_options(found, names="scopes that have some of it")
    found.set_defaults(run=_lookup)


def route_hint_options(found: argparse.ArgumentParser) -> None:
    """Options of `route-hint`."""
    found.epilog = "example: kvstrata route-hint tokens.json --pool demo --layout layout.json -o name"
    found.description = (
        "From the node's agent and the directory. Seconds are for an idle node: what lies in slower tiers is fetched "
        "at the speed that this node measured of its own, the rest is computed."
    )
    _prompt_options(found, names="nodes, the soonest first")
    found.set_defaults(run=_route_hint)


def why_miss_options(found: argparse.ArgumentParser) -> None:
    """Options of `why-miss`."""
    found.epilog = "example: kvstrata why-miss tokens.json --pool demo --layout layout.json"
    found.description = (
        "Names the first block of a prompt that is missing, and the decision that took it away. What was never stored "
        "and what the token may not read have one answer."
    )
    _prompt_options(found)
    found.set_defaults(run=_why_miss)


def _prompt_options(found: argparse.ArgumentParser, names: str = "") -> None:
    """Options of commands that ask about a prompt, whose blocks they name by the engine's whole layout."""
    target_options(found)
    found.add_argument("tokens", help="file with token ids as a JSON list, or - for standard input")
    output.add_option(found, names=names)
    found.set_defaults(missing=_missing_for_keys)


def target_options(found: argparse.ArgumentParser) -> None:
    """Options that choose agent, pool, identity and layout."""
    found.add_argument(
        "--socket", default=os.environ.get("KVSTRATA_SOCKET"), help=f"default: {names.socket_path('POOL')}"
    )
    token_file = os.environ.get("KVSTRATA_TOKEN_FILE")
    found.add_argument(
        "--token-file",
        type=Path,
        default=Path(token_file) if token_file else None,
        help=f"default: {names.TOKEN_FILE} where it is; else the unix user counts, at an agent of kvstrata up",
    )
    found.add_argument("--pool", default=os.environ.get("KVSTRATA_POOL"), help="pool that the agent serves")
    found.add_argument("--layout", type=Path, help="JSON file with the fields of kvstrata_api.blocks.Layout")
    found.add_argument("--model", help="instead of --layout, for commands that name no block: as in the pool")
    found.add_argument("--revision", help="of the weights, with --model: as in the pool")
    found.add_argument("--dtype", default="bf16", help="of the KV, with --model: as in the pool; default: %(default)s")
    found.add_argument(
        "--block-tokens", type=int, default=16, help="of a block, with --model: as in the pool; default: %(default)s"
    )
    found.set_defaults(missing=missing)


def missing(given: argparse.Namespace) -> list[str]:
    """What is needed to attach and is not given."""
    layout = given.layout is not None or (given.model and given.revision)
    return [
        *([] if given.pool else ["--pool (or KVSTRATA_POOL)"]),
        *([] if layout else ["--layout FILE (or --model and --revision, as in the pool)"]),
    ]


def _missing_for_keys(given: argparse.Namespace) -> list[str]:
    """The same of commands that name blocks: their keys hold the whole layout, which no pool declares."""
    found = [one for one in missing(given) if not one.startswith("--layout")]
    return [*found, *([] if given.layout is not None else ["--layout FILE (of the engine: --model names no block)"])]


def attach(given: argparse.Namespace, layout: Layout | None = None) -> Client:
    """Attach with `layout`, or that of the options. Raises the `KvStrataError` that keeps the client away."""
    if not given.pool:
        raise UsageError("--pool (or KVSTRATA_POOL) is missing")
    socket = Path(given.socket or names.socket_path(given.pool))
    token = given.token_file or (Path(names.TOKEN_FILE) if Path(names.TOKEN_FILE).exists() else NO_TOKEN)
    client = Client(Target(socket, given.pool, token, layout or layout_of(given)), strict=True)
    if not client.wait_settled(WAIT_S):
        reason = client.reason
        client.close()
        raise reason
    return client


def layout_of(given: argparse.Namespace) -> Layout:
    """Layout from a file, or one that only fits the pool."""
    if given.layout is not None:
        return _read_layout(given.layout)
    if not (given.model and given.revision):
        raise UsageError("--layout FILE, or --model and --revision as in the pool, are missing")
    return pool_layout(given.model, given.revision, given.dtype, given.block_tokens)


def _read_layout(path: Path) -> Layout:
    try:
        return Layout(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise InvalidInputError(f"--layout {path}: {e}") from e


def _stats(given: argparse.Namespace) -> int:
    with attach(given) as client:
        found = json.loads(client.stats())
    output.show(given.output, found, _stats_lines(found), (tier["name"] for tier in found["tiers"]))
    return 0


def _stats_lines(found: dict[str, Any]) -> Iterator[str]:
    own = found["tenant"]
    used, limit = format_rounded(own["used_bytes"]), format_rounded(own["limit_bytes"])
    yield f"agent {found['agent']}: {found['leases']} leases, {found['reservations']} reservations"
    yield f"tenant: {used} of at most {limit}"
    yield ""
    rows = [
        (
            tier["name"],
            tier["type"],
            tier["medium"] + (" (emulated)" if tier["emulated"] else ""),
            format_rounded(tier["capacity_bytes"]),
            f"{tier['used_percent']} %",
            tier["last_error"] or "-",
        )
        for tier in found["tiers"]
    ]
    yield from table(("TIER", "TYPE", "MEDIUM", "CAPACITY", "USED", "LAST ERROR"), rows)


def _explain(given: argparse.Namespace) -> int:
    with attach(given) as client:
        key = _key(client, given) if given.digest else None
        granted = _scope(client, given) if given.tree else None
        found = json.loads(client.explain(key=key, session=given.session, granted=granted))
    output.show(given.output, found)
    return 0


def _session(given: argparse.Namespace) -> int:
    """Print a session's state and events; 1 when the agent does not know it."""
    with attach(given) as client:
        found = json.loads(client.explain(session=given.name))
    output.show(given.output, found, _session_lines(given.name, found))
    return 0 if "log" in found else 1


def _session_lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    if "log" not in found:
        yield f"session {name}: the agent of this node knows none of that name"
        return
    returns_s = found["expected_return_s"]
    expected = f", expected back in {returns_s:.0f} s" if returns_s is not None and returns_s > 0 else ""
    yield (
        f"session {found['session']}: {found['state']}{expected}, {found['turns']} turns, "
        f"{found['priority_class']}, blocks: {_counted(found['blocks'])}"
    )
    yield ""
    rows = [
        (
            f"{event['ago_s']:.1f} s",
            event["state"] or event["what"],
            _counted(event["blocks"]),
            str(event["lacking_blocks"] or "-"),
            f"{1e3 * event['waited_s']:.0f} ms" if event["waited_s"] else "-",
            f"{event['choice']}, regret {1e3 * event['regret_s']:.0f} ms" if event["choice"] else "-",
        )
        for event in found["log"]
    ]
    yield from table(("AGO", "WHAT", "BLOCKS", "LACKING", "WAITED", "CHOICE"), rows)


def _named(row: dict[str, Any]) -> str:
    """Kind and name of a row's scope: uids mean nothing to people."""
    kind, name, *_ = row["scope"].split("/")
    return f"{kind} {name}"


def _counted(blocks: Mapping[str, int]) -> str:
    """Blocks by place, the most first."""
    ordered = sorted(blocks.items(), key=lambda place: -place[1])
    return ", ".join(f"{count} {place or 'on the way'}" for place, count in ordered) or "-"


def _scope(client: Client, given: argparse.Namespace) -> Scope:
    grants = client.grants
    assert grants is not None, "an attached client has grants"
    scopes: dict[str, Scope] = {str(s.id): s for s in grants.scopes}
    scope = scopes.get(given.scope or str(grants.write_scope))
    if scope is None:
        raise InvalidInputError(f"--scope {given.scope}: granted are {', '.join(sorted(scopes))}")
    return scope


def _key(client: Client, given: argparse.Namespace) -> BlockKey:
    scope = _scope(client, given)
    try:
        return BlockKey(scope.id, bytes.fromhex(given.digest))
    except (ValueError, AssertionError) as e:
        raise InvalidInputError(f"--digest {given.digest!r}: {e}") from e


def _lookup(given: argparse.Namespace) -> int:
    tokens = read_ids(given.tokens)
    with attach(given) as client:
        grants = client.grants
        assert grants is not None, "an attached client has grants"
        found = [_found(client, scope, tokens) for scope in grants.scopes]
        if not any(row["hit_blocks"] for row in found):
            _check_layout(client)
    rows = ((_named(r), f"{r['hit_blocks']} of {r['blocks']}", _counted(Counter(r["places"]))) for r in found)
    names = (row["scope"] for row in found if row["hit_blocks"])
    output.show(given.output, found, table(("SCOPE", "BLOCKS", "PLACES"), rows), names)
    return 0


def _check_layout(client: Client) -> None:
    """Refuse a layout of which there is no block where there are others: to find none of it says nothing.

    Raises `InvalidInputError` with the layouts that there are. A node without any block of the caller has none, of
    whatever layout, and an agent of an earlier version tells nothing of its own.
    """
    known, ours = json.loads(client.stats())["tenant"].get("layouts", ()), client.target.layout.layout_id().hex()
    if known and ours not in known:
        raise InvalidInputError(
            f"--layout: no block here has its id {ours}; there are blocks of {', '.join(known)}. Its fields have to be "
            "those of the engine that stored them, shard and scaling included"
        )


def _why_miss(given: argparse.Namespace) -> int:
    """Print a line for each scope; 1 when the prompt would be computed, in part at least."""
    found = _answers(given, WhyMiss, _missed)
    output.show(given.output, found, (f"{_named(row)}: {row['said']}" for row in found))
    return 0 if any(row["reason"] == "hit" and row["blocks"] for row in found) else 1


def _route_hint(given: argparse.Namespace) -> int:
    """Print the nodes; 1 when none has any of the prompt."""
    found = _answers(given, RouteHint, _routed)
    rows = [
        (_named(row), node["node"], f"{node['blocks']} of {row['blocks']}", f"{node['seconds']:.3f}",
         _counted(node["media"]))
        for row in found
        for node in row["nodes"]
    ]  # fmt: skip
    nodes = dict.fromkeys(node["node"] for row in found for node in row["nodes"])
    output.show(given.output, found, table(("SCOPE", "NODE", "BLOCKS", "SECONDS", "MEDIA"), rows), nodes)
    return 0 if nodes else 1


def _answers(
    given: argparse.Namespace,
    verb: type[Request],
    ask: Callable[[Client, Scope, "np.typing.NDArray[np.uint32]"], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Ask about the given tokens in each scope. Raises `UnsupportedError` of an agent that lacks the verb."""
    tokens = read_ids(given.tokens)
    with attach(given) as client:
        grants = client.grants
        assert grants is not None, "an attached client has grants"
        if verb.__name__ not in grants.verbs:
            raise UnsupportedError("the agent is older than this command")
        found = [{"scope": s.id, **ask(client, s, tokens)} for s in grants.scopes]
        if not any(row.get("hit_blocks") or row.get("nodes") for row in found):
            _check_layout(client)
        return found


def _routed(client: Client, scope: Scope, tokens: "np.typing.NDArray[np.uint32]") -> dict[str, Any]:
    """The answer for one scope."""
    keys = _keys(client, scope, tokens)
    if not keys:
        return {"blocks": 0, "is_alone": False, "longest": "", "nodes": []}
    found: dict[str, Any] = json.loads(client.route_hint(keys[:KEYS_MAX]))
    if not found:
        raise AgentAwayError("the agent went away before it answered")
    return found


def _missed(client: Client, scope: Scope, tokens: "np.typing.NDArray[np.uint32]") -> dict[str, Any]:
    """The answer for one scope."""
    keys = _keys(client, scope, tokens)
    if not keys:
        said = "no share lists a prefix of it" if scope.kind == "share" else "it is shorter than a block"
        return {"blocks": 0, "hit_blocks": 0, "reason": "short", "said": said, "history": [], "inputs": {}}
    found: dict[str, Any] = json.loads(client.why_miss(keys[:KEYS_MAX]))
    if not found:
        raise AgentAwayError("the agent went away before it answered")
    return found


def _keys(client: Client, scope: Scope, tokens: "np.typing.NDArray[np.uint32]") -> list[BlockKey]:
    """Keys of a prompt in one scope; of a share only the prefix that it lists."""
    layout = client.target.layout
    if scope.kind == "share":
        tokens = tokens[: max((p.token_count for p in matching(tokens, scope.prefixes)), default=0)]
    return chain_keys(scope.secret, layout.layout_id(), tokens, layout.block_tokens)


def _found(client: Client, scope: Scope, tokens: "np.typing.NDArray[np.uint32]") -> dict[str, Any]:
    """How much of a prompt one scope has, and where."""
    keys = _keys(client, scope, tokens)
    if not keys:
        return {"scope": scope.id, "blocks": 0, "hit_blocks": 0, "places": []}
    prefix = client.lookup(keys)
    places = [prefix.place(i) for i in range(prefix.blocks)]
    named = [f"remote {tier}" if is_remote else tier for tier, is_remote in places]
    return {"scope": scope.id, "blocks": len(keys), "hit_blocks": prefix.blocks, "places": named}

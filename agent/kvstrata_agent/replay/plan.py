"""The command line of `kvstrata plan`: what a pool would do for recorded requests, at what cost, and a better one."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, Final

import yaml

from kvstrata_agent.app.standalone.manifests import Manifest, manifest_of, parse
from kvstrata_agent.replay import hardware, planning
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.hardware import METRICS, Hardware, Sample
from kvstrata_agent.replay.planning import Estimate, Fleet, Inversion, Plan, Tried
from kvstrata_agent.replay.reuse_aware import Hints
from kvstrata_agent.replay.traces import REQUESTS_MAX, read_traces
from kvstrata_api import arguments
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.models.pool import KVPoolStatus
from kvstrata_api.units import format_rounded
from kvstrata_api.validate import parse_as
from kvstrata_client.commands import output, top
from kvstrata_client.commands.output import Parser, table

PROGRAM: Final = "kvstrata plan"
REQUESTS: Final = 2000
SIZE_STEPS: Final = 5
"""Halvings of a search for the load, for each choice of sizes."""
_POSITIVE: Final = arguments.number(1e-9, 1e9)
"""A rate or a goal: beyond these bounds times of the simulation are no numbers any more."""
_SERVED_PART: Final = 0.95
"""Of the requests that come: where fewer are served the table says so. The ends of a recording make a few percent."""
_CHANGES: Final = 12
"""Choices of sizes that the table shows."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One manifest, and what came of it."""

    source: str
    manifest: Manifest
    fleet: Fleet
    plan: Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan and print; return the exit status: 1 for a failure, 2 for wrong usage."""
    given = _parser().parse_args(arguments)
    try:
        _run(given)
    except (KvStrataError, OSError) as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Simulates recorded requests on one engine with its share of a KVPool's tiers, by the pool's own "
        "policies: hit ratio, time to the first token, GPU time, wear, bytes and money for each GPU, with intervals of "
        "95 %; at which context each tier is faster than computing; and the cheapest sizes of the tiers within the "
        "room that the hardware file allows, as a change of the KVPool. Formats of recordings are those of "
        "`kvstrata replay`.",
        epilog="The load is the highest at which 99 % of the requests have their first token within --goal-s. "
        "Arrivals are the recording's, faster or slower. Requests find only what their GPU's share of a node holds. "
        "example: kvstrata plan trace.jsonl -f pool.yaml --hardware hardware.yaml",
    )
    add = parser.add_argument
    add("trace", type=Path, nargs="+", metavar="TRACE", help="recording, or a folder of recordings, of one workload")
    add("-f", "--filename", type=Path, required=True, metavar="FILE", help="KVPool to plan for")
    add("--hardware", type=Path, required=True, metavar="FILE", help="YAML: what GPUs and tiers can do, have and cost")
    add("--against", type=Path, metavar="FILE", help="another KVPool: both, and the difference")
    add("--pool", default="", help="KVPool of the files, where they declare several")
    add("--goal-s", type=_POSITIVE, default=2.0, metavar="S", help="99 %% of first tokens come within it; default: 2")
    add(
        "--rate",
        type=_POSITIVE,
        metavar="N",
        help="requests a second of one GPU, instead of the highest at the goal; where it can serve fewer, rates and "
        "costs are of those",
    )
    add("--fleet-rate", type=_POSITIVE, metavar="N", help="requests a second of all: also say how many GPUs they need")
    add(
        "--requests",
        type=arguments.whole(1, REQUESTS_MAX),
        default=REQUESTS,
        metavar="N",
        help="only the first N; default: %(default)s",
    )
    add(
        "--hints",
        choices=[hints.value for hints in Hints],
        default="trace",
        help="what the policy knows; default: %(default)s",
    )
    add(
        "--metrics",
        action="append",
        default=[],
        metavar="FILE",
        help="what an agent serves at /metrics: measured rates take the place of the file's; may be given again",
    )
    add("--prometheus", default="", metavar="URL", help="the same of all agents of the pool, from their Prometheus")
    add("--keep-sizes", action="store_true", help="do not look for better sizes")
    add("--write", type=Path, metavar="FILE", help="write the changed KVPool there")
    output.add_option(parser)
    return parser


def _run(given: argparse.Namespace) -> None:
    """All of it. Raises what is wrong with what was given."""
    described = hardware.read(given.hardware.read_text(), str(given.hardware))
    manifest = _manifest(given.filename, given.pool)
    described, notes = _measured(given, described, manifest)
    for note in notes:
        _tell(note)
    trace, left_out = _trace(given, described)
    if left_out:
        _tell(f"{trace.name}: {left_out} prompts of more than {described.engine.context_tokens} tokens are left out")
    if trace.models:
        _tell(f"{trace.name}: not recorded, so modelled: {trace.models}")
    first = _planned(given, str(given.filename), manifest, described, trace)
    other = None
    if given.against:
        other = _planned(given, str(given.against), _manifest(given.against, given.pool), described, trace)
    tried = [] if given.keep_sizes else _tried(given, first, trace)
    answer = _answer(given, first, other, tried, described)
    if given.write and "change" in answer:
        given.write.write_text(yaml.safe_dump(answer["change"]["manifest"], sort_keys=False))
    output.show(given.output, answer, _lines(given, answer, first, other, tried))


def _tell(said: str) -> None:
    print(f"{PROGRAM}: {said}", file=sys.stderr)  # noqa: T201  Answers alone go to standard output.


def _manifest(path: Path, name: str) -> Manifest:
    """What is declared, and, where the file is of a live pool, the sizes that its tiers have come to."""
    try:
        objects = parse(path.read_text(), str(path))
    except UnicodeDecodeError as e:
        raise InvalidInputError(f"{path}: {e}") from e
    pools = [o for o in objects if o.get("kind") == "KVPool"]
    manifest = manifest_of(pools, name)
    chosen = next(o for o in pools if o["metadata"]["name"] == manifest.pool.metadata.name)
    seen = chosen.get("status")
    scales = seen.get("autoscaling") if isinstance(seen, Mapping) else None
    status = parse_as(KVPoolStatus, {"autoscaling": scales or ()})
    return replace(manifest, pool=manifest.pool.model_copy(update={"status": status}))


def _measured(given: argparse.Namespace, described: Hardware, manifest: Manifest) -> tuple[Hardware, list[str]]:
    """Put what a live fleet measures in place of what the file says, where there is one."""
    samples: list[Sample] = []
    for source in given.metrics:
        samples += hardware.parse_samples(Path(source).read_text(), source)
    if given.prometheus:
        if not given.prometheus.startswith(("http://", "https://")):
            raise InvalidInputError(f"--prometheus {given.prometheus!r}: a URL is wanted, as http://127.0.0.1:9090")
        for name in METRICS:
            query = f'{name}{{pool="{manifest.pool.metadata.name}"}}'
            found = top.samples(given.prometheus.rstrip("/"), query)
            samples += [Sample(name, labels, value) for labels, value in found]
        if not samples:
            raise InvalidInputError(f"{given.prometheus}: has no samples of pool {manifest.pool.metadata.name}")
    return hardware.calibrated(described, manifest.pool, samples) if samples else (described, [])


def _trace(given: argparse.Namespace, described: Hardware) -> tuple[Trace, int]:
    """The one workload, and how many prompts are longer than a context. Raises `InvalidInputError`."""
    found = read_traces(given.trace).traces
    if len(found) != 1:
        names = ", ".join(trace.name for trace in found) or "none with content in a known format"
        raise InvalidInputError(f"TRACE: {len(found)} recordings ({names}): one workload at a time can be planned for")
    return planning.fitting(found[0], described.engine.context_tokens, given.requests)


def _planned(given: argparse.Namespace, source: str, manifest: Manifest, described: Hardware, trace: Trace) -> Planned:
    fleet, hints = planning.fleet_of(manifest.pool, described), Hints(given.hints)
    rate = given.rate or planning.rate_at(fleet, trace, given.goal_s, hints)
    if not rate:
        _tell(f"{source}: the goal of {given.goal_s:g} s is not met even by requests that meet no other")
        rate = planning.ALONE_PART * planning.saturated_per_s(fleet, trace, hints)
    return Planned(source, manifest, fleet, planning.plan(fleet, trace, rate, given.goal_s, hints))


def _tried(given: argparse.Namespace, first: Planned, trace: Trace) -> list[Tried]:
    """Sizes by what a million requests cost at the goal; the best is last."""
    hints = Hints(given.hints)

    def judge(fleet: Fleet) -> tuple[float, float]:
        rate = planning.rate_at(fleet, trace, given.goal_s, hints, SIZE_STEPS)
        money = planning.plan(fleet, trace, rate, given.goal_s, hints).money_per_million if rate else inf
        sizes = ", ".join(f"{p.name} {format_rounded(p.declared_bytes)}" for p in fleet.places)
        _tell(f"tried {sizes}: {rate:.3g} requests/s of a GPU")
        return rate, money

    ladders = {}
    for tier, place in zip(first.manifest.pool.spec.tiers, first.fleet.places, strict=True):
        if tier.autoscale is None:
            ladders[place.name] = planning.ladder(place)
        else:
            size = format_rounded(place.declared_bytes)
            _tell(
                f"tier {place.name} scales by itself: it is planned for as it is, {size}, and no other size of it is "
                "tried"
            )
    return planning.cheapest(first.fleet, ladders, judge)


def _answer(
    given: argparse.Namespace, first: Planned, other: Planned | None, tried: Sequence[Tried], described: Hardware
) -> dict[str, Any]:
    """Everything, as JSON."""
    pool = first.manifest.pool
    answer: dict[str, Any] = {
        "pool": pool.metadata.name,
        "currency": described.currency,
        "plan": asdict(first.plan),
        "inversion": [asdict(one) for one in planning.inversions(first.fleet)],
        "break_even_tokens": {
            place.name: planning.break_even_tokens(first.fleet.engine, place.memory) for place in first.fleet.places
        },
    }
    if given.fleet_rate:
        answer["fleet"] = _fleet(given.fleet_rate, first.plan, described)
    if other is not None:
        answer["against"] = asdict(other.plan)
        answer["difference"] = {name: b - a for name, a, b in _compared(first.plan, other.plan)}
    if tried:
        obj = next(o for o in first.manifest.objects if o.get("kind") == "KVPool")
        change = planning.change_of(obj, pool, tried[-1].sizes)
        answer["tried"] = [
            {**asdict(t), "money_per_million": None if t.money_per_million == inf else t.money_per_million}
            for t in tried
        ]
        answer["change"] = {
            "patch": list(change.patch),
            "command": change.command(pool.metadata.name) if change.patch else "",
            "manifest": change.manifest,
        }
    return answer


def _fleet(requests_per_s: float, plan: Plan, described: Hardware) -> dict[str, float]:
    """GPUs for a rate of all, in whole engines and nodes."""
    engines = ceil(requests_per_s / plan.served_per_s / described.engine.gpus)
    gpus = engines * described.engine.gpus
    return {
        "requests_per_s": requests_per_s,
        "gpus": gpus,
        "nodes": ceil(gpus / described.node_gpus),
        "money_per_month": gpus * plan.money_hour * planning.HOURS_PER_MONTH,
    }


def _compared(one: Plan, two: Plan) -> Iterator[tuple[str, float, float]]:
    """What can be subtracted."""
    yield "requests_per_s", one.requests_per_s, two.requests_per_s
    yield "served_per_s", one.served_per_s, two.served_per_s
    yield "hit_ratio", one.hit_ratio.value, two.hit_ratio.value
    for name, found in one.ttft_s.items():
        yield f"ttft_{name}_s", found.value, two.ttft_s[name].value
    yield "gpu_s_per_request", one.gpu_s_per_request, two.gpu_s_per_request
    yield "saved_gpu_s_per_request", one.saved_gpu_s_per_request, two.saved_gpu_s_per_request
    yield "busy", one.busy, two.busy
    yield "money_hour", one.money_hour, two.money_hour
    yield "money_per_million", one.money_per_million, two.money_per_million


def _lines(
    given: argparse.Namespace,
    answer: Mapping[str, Any],
    first: Planned,
    other: Planned | None,
    tried: Sequence[Tried],
) -> Iterator[str]:
    """The same for people."""
    currency = answer["currency"]
    if other is None:
        yield from table(("OF EACH GPU", "", "95 %"), _rows(first.plan, currency))
    else:
        rows = ((name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, a, b in _compared(first.plan, other.plan))
        yield from table(("OF EACH GPU", first.source, other.source, "DIFFERENCE"), rows)
    for planned in (first, other) if other else (first,):
        yield ""
        yield from table(
            (f"TIER OF {planned.source}", "SIZE", "HITS %", "READ/s", "WRITTEN/s", "READ BUSY %", "WRITES/DAY",
             "OF RATED %", f"{currency}/h"),
            map(_tier_row, planned.plan.tiers),
        )  # fmt: skip
    yield ""
    yield from _inversion_lines(answer["break_even_tokens"], planning.inversions(first.fleet))
    if given.fleet_rate:
        found = answer["fleet"]
        yield ""
        yield (
            f"{found['requests_per_s']:g} requests/s of all: {found['gpus']} GPUs on {found['nodes']} nodes, "
            f"{found['money_per_month']:,.0f} {currency} a month"
        )
    if tried:
        yield ""
        yield from _tried_lines(tried, currency, answer["change"]["command"])


def _rows(plan: Plan, currency: str) -> Iterator[tuple[str, str, str]]:
    said = "" if plan.meets_goal else ", which is NOT met"
    yield "requests/s", f"{plan.requests_per_s:.4g} at a goal of {plan.goal_s:g} s for 99 %{said}", ""
    if plan.served_per_s < _SERVED_PART * plan.requests_per_s:
        yield "  of which are served", f"{plan.served_per_s:.4g}: more is not possible, and all else is of these", ""
    if plan.sessions_per_h is not None:
        yield "sessions begun an hour", f"{plan.sessions_per_h:.4g}", ""
    yield "hit ratio", f"{plan.hit_ratio.value:.2%}", _range(plan.hit_ratio, "{:.2%}")
    for name, found in plan.ttft_s.items():
        yield f"first token, {name}", f"{found.value:.3f} s", _range(found, "{:.3f}")
    yield "GPU time of a request", f"{plan.gpu_s_per_request:.3f} s, {plan.saved_gpu_s_per_request:.3f} s saved", ""
    yield "GPU busy with prompts", f"{plan.busy:.0%}", ""
    if plan.fabric is not None:
        fabric = plan.fabric
        yield "hand-over to decoding GPUs", f"{format_rounded(round(fabric.bytes_per_s))}/s, {fabric.busy:.1%} busy", ""
        yield (
            "  of one request",
            f"{format_rounded(round(fabric.bytes_per_request))}, p99 {fabric.transfer_p99_s:.3f} s",
            "",
        )
    yield "cost", f"{plan.money_hour:.3f} {currency}/h, {plan.money_per_million:,.0f} for a million requests", ""


def _range(found: Estimate, form: str) -> str:
    return f"{form.format(found.low)} to {form.format(found.high)}"


def _tier_row(tier: planning.TierUse) -> tuple[str, ...]:
    return (
        tier.name,
        format_rounded(round(tier.size_bytes)),
        f"{100 * tier.hit_ratio:.2f}",
        format_rounded(round(tier.read_bytes_per_s)),
        format_rounded(round(tier.write_bytes_per_s)),
        f"{100 * tier.read_busy:.1f}",
        f"{tier.writes_per_day:.2f}",
        "-" if tier.wear is None else f"{100 * tier.wear:.0f}",
        f"{tier.money_hour:.3f}",
    )


def _inversion_lines(break_even: Mapping[str, float], found: Sequence[Inversion]) -> Iterator[str]:
    """Seconds by length of the context; what is fetched sooner than computed has a star."""
    names = list(break_even)

    def row(one: Inversion) -> tuple[str, ...]:
        fetched = (f"{one.fetch_s[n]:.3f}{'*' if one.fetch_s[n] < one.compute_s else ''}" for n in names)
        return (
            f"{one.tokens:,}", f"{one.flop:.2e}", format_rounded(one.kv_bytes), f"{one.compute_s:.3f}", *fetched
        )  # fmt: skip

    yield from table(
        ("CONTEXT", "OPERATIONS", "KV", "COMPUTED IN s", *(f"FROM {n} IN s" for n in names)), map(row, found)
    )
    said = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in break_even.items())
    yield f"fetching is sooner from so many tokens on: {said}"


def _tried_lines(tried: Sequence[Tried], currency: str, command: str) -> Iterator[str]:
    names = list(tried[-1].sizes)
    ranked = sorted(tried, key=lambda t: (t.money_per_million, t is not tried[-1]))[:_CHANGES]
    rows = (
        (
            *(format_rounded(t.sizes[name]) for name in names),
            f"{t.requests_per_s:.4g}",
            "goal not met" if t.money_per_million == inf else f"{t.money_per_million:,.0f}",
        )
        for t in ranked
    )
    yield from table((*(f"SIZE OF {n}" for n in names), "REQUESTS/s", f"{currency} A MILLION"), rows)
    if tried[-1].money_per_million == inf:
        yield f"none of {len(tried)} sizes meets the goal: there is nothing to apply"
    else:
        yield f"cheapest of {len(tried)} tried: {command or 'the sizes are right as they are'}"

"""Laws of the audit log: nothing decided is lost, and no caller decides how much is written."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.request import Caller, RequestContext
from kvstrata_agent.serve import audit
from kvstrata_agent.serve.audit import IDENTITIES_MAX, KINDS_MAX, Decided, Window
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import ForbiddenError
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind
from kvstrata_telemetry.logs import JsonFormatter
from support.agent.doubles import BLOCK_BYTES, LAYOUT, LAYOUT_ID, caller, digest, secret, store_chain
from support.agent.engine import Engine, close

pytestmark = pytest.mark.unit

DOMAIN = ScopeId("domain/d/uid-d/v1")
FIELDS = {
    "decision", "reason", "verb", "tenant", "namespace", "service_account", "pod_uid", "scope", "kind", "grant",
    "requests", "blocks", "window_s",
}  # fmt: skip

decided = st.builds(
    Decided,
    st.sampled_from(["allow", "deny"]),
    st.sampled_from(["DomainMember", "ScopeNotGranted"]),
    st.sampled_from(["lookup", "acquire"]),
    st.just("t"),
    st.just("ns"),
    st.sampled_from([f"sa-{i}" for i in range(4)]),
    st.just("uid"),
    st.sampled_from([f"tenant/{i}/u/v1" for i in range(60)]),
)


def told_and_held(window: Window, notes: list[tuple[Decided, int]]) -> tuple[int, int, int]:
    """Requests and blocks over all lines, and how many lines there were."""
    first = [blocks for kind, blocks in notes if window.add(kind, blocks) is not None]
    rest = [total for _, total in window.drain()]
    return (
        len(first) + sum(r.requests for r in rest),
        sum(first) + sum(r.blocks for r in rest),
        len(first) + len(rest),
    )


@given(st.lists(st.tuples(decided, st.integers(0, 4096)), max_size=300))
def test_the_lines_add_up_to_what_was_decided(notes: list[tuple[Decided, int]]) -> None:
    requests, blocks, _ = told_and_held(Window(), notes)

    assert (requests, blocks) == (len(notes), sum(count for _, count in notes))


def test_one_identity_cannot_write_more_lines_by_inventing_scopes() -> None:
    flood = [(Decided("deny", "r", "lookup", "t", "ns", "sa", "uid", f"tenant/{i}"), 1) for i in range(10_000)]

    requests, _, lines = told_and_held(Window(), flood)

    assert requests == 10_000
    assert lines <= 2 * (KINDS_MAX + 1)


def test_many_identities_cannot_fill_the_disk_either() -> None:
    flood = [(Decided("deny", "r", "lookup", "t", "ns", "sa", f"uid-{i}"), 1) for i in range(10_000)]
    window = Window()

    requests, _, lines = told_and_held(window, flood)

    assert requests == 10_000
    assert lines <= 2 * (IDENTITIES_MAX + 1)


def test_one_noisy_identity_does_not_hide_what_another_one_does() -> None:
    window = Window()
    for i in range(10_000):
        window.add(Decided("deny", "r", "lookup", "t", "ns", "noisy", "uid", f"tenant/{i}"), 1)
    quiet = Decided("deny", "r", "lookup", "t", "ns", "quiet", "uid", "tenant/a")

    assert window.add(quiet, 1) == quiet


def test_a_drained_window_begins_anew() -> None:
    window, kind = Window(), Decided("deny", "r", "lookup")
    window.add(kind, 1)
    window.add(kind, 2)

    assert [total for _, total in window.drain()] == [(1, 2)]
    assert window.drain() == []
    assert window.add(kind, 1) == kind


def member(tenant: str) -> Caller:
    """A reader of the domain that may not write there."""
    made = caller(tenant)
    shared = Access(DOMAIN, ScopeKind.DOMAIN, "d", can_write=False)
    grants = Grants(tenant, (shared, *made.grants.access), made.grants.write_scope)
    return Caller(Identity("ns", tenant, "pod-1"), grants, (secret(DOMAIN), *made.secrets), made.expires_s)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr(audit, "WINDOW_S", 3600.0)
    made = Engine()
    made.authenticator.callers["a"] = member("a")
    yield await made.attach()
    made.verbs._audit.close()
    await close(made)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [{f: getattr(r, f) for f in FIELDS} for r in caplog.records if r.name == "kvstrata.audit"]


def counted(engine: Engine, decision: str) -> tuple[float, float]:
    """Decisions and blocks in the metrics."""
    families = engine.core.node.counters._instruments.registry.collect()
    samples = [s for f in families for s in f.samples if s.labels.get("decision") == decision]
    names = ("kvstrata_audit_total", "kvstrata_audit_blocks_total")
    requests, blocks = (sum(s.value for s in samples if s.name == name) for name in names)
    return requests, blocks


async def test_a_scope_that_is_not_granted_is_told_and_counted_for_every_verb(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    foreign, two = ScopeId("tenant/b/uid-b/v1"), digest(1) + digest(2)

    await engine.ask(wire.Lookup(2, foreign, two))
    await engine.ask(wire.Acquire(3, foreign, two))
    await engine.ask(wire.Prefetch(4, foreign, two))
    await engine.ask(wire.Pin(5, foreign, two, 1.0))
    await engine.ask(wire.Unpin(6, foreign, two))
    await engine.ask(wire.Explain(7, digest=digest(1), scope=foreign))
    with pytest.raises(ForbiddenError):
        await engine.ask(wire.Reserve(8, foreign, b"", two))
    await engine.ask(wire.Touch(9, foreign, two))
    with pytest.raises(ForbiddenError):
        await engine.ask(wire.Drop(10, foreign, two))

    told = [line for line in lines(caplog) if line["decision"] == "deny"]
    verbs = ["lookup", "acquire", "prefetch", "pin", "unpin", "explain", "reserve", "touch", "drop"]
    assert [line["verb"] for line in told] == verbs
    assert {line["reason"] for line in told} == {"ScopeNotGranted", "WriteNotGranted"}
    assert {(line["tenant"], line["service_account"], line["pod_uid"]) for line in told} == {("a", "a", "pod-1")}
    assert {(line["scope"], line["kind"], line["grant"]) for line in told} == {(foreign, "tenant", "b")}
    assert [line["blocks"] for line in told] == [2, 2, 2, 2, 2, 1, 2, 2, 2]
    assert counted(engine, "deny") == (9, 17)


async def test_a_right_that_is_lost_while_a_request_waits_is_told(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.store(1)
    await engine.push_down()

    under_way = asyncio.create_task(engine.acquire(1))
    await asyncio.sleep(0)
    engine.at.expel()
    assert not (await under_way).blocks

    assert [(line["decision"], line["verb"], line["tenant"]) for line in lines(caplog)] == [("deny", "acquire", "")]


async def test_a_read_through_a_domain_is_told_once_and_the_rest_at_the_end(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await store_chain(engine.core, RequestContext(7, "b", secret(DOMAIN), LAYOUT_ID, BLOCK_BYTES), [1])

    for _ in range(5):
        await engine.ask(wire.Lookup(2, DOMAIN, digest(1)))
    assert [line["requests"] for line in lines(caplog) if line["verb"] == "lookup"] == [1]
    engine.verbs._audit.close()

    told = [line for line in lines(caplog) if line["verb"] == "lookup"]
    assert [(line["requests"], line["blocks"]) for line in told] == [(1, 1), (4, 4)]
    assert {(line["decision"], line["reason"], line["grant"]) for line in told} == {("allow", "DomainMember", "d")}


async def test_reads_of_the_own_scope_and_of_nothing_are_no_news(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.store(1)
    await engine.acquire(1)
    await engine.ask(wire.Lookup(2, DOMAIN, digest(9)))

    assert lines(caplog) == []


async def test_what_the_reader_wrote_itself_crosses_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await store_chain(engine.core, RequestContext(7, "b", secret(DOMAIN), LAYOUT_ID, BLOCK_BYTES), [1])
    await store_chain(engine.core, RequestContext(7, "a", secret(DOMAIN), LAYOUT_ID, BLOCK_BYTES), [2, 3], parent=1)

    await engine.ask(wire.Lookup(2, DOMAIN, digest(1) + digest(2) + digest(3)))
    await engine.ask(wire.Acquire(3, DOMAIN, digest(2)))

    assert [(line["verb"], line["blocks"]) for line in lines(caplog)] == [("lookup", 1)]


async def test_callers_that_get_no_grants_are_told(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Exception, match="refused"):
        await engine.ask(wire.Attach(2, "nonsense", "pool", LAYOUT))
    engine.authenticator.callers["other"] = caller("b")
    await engine.attach()
    with pytest.raises(ForbiddenError):
        await engine.ask(wire.Attach(3, "other", "pool", LAYOUT))

    reasons = [(line["decision"], line["reason"]) for line in lines(caplog)]
    assert reasons == [("deny", "TokenRefused"), ("deny", "OtherIdentity")]


async def test_the_words_of_a_caller_are_cut(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await engine.ask(wire.Lookup(2, ScopeId("x" * 300), digest(1)))

    (line,) = [line for line in lines(caplog) if line["decision"] == "deny"]
    assert line["scope"] == "x" * 160
    assert (line["kind"], line["grant"]) == ("", "")


async def test_a_line_is_one_object_of_json_whatever_a_caller_writes(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.ask(wire.Lookup(2, ScopeId('x"}\n{"decision": "allow'), digest(1)))

    written = JsonFormatter("agent").format(caplog.records[-1])
    line = json.loads(written)
    assert "\n" not in written
    assert line.keys() == {"ts", "level", "component", "event", "logger", *FIELDS}
    assert (line["decision"], line["logger"], line["level"]) == ("deny", "kvstrata.audit", "warning")


def test_the_log_does_not_depend_on_the_level_of_everything_else() -> None:
    logging.getLogger().setLevel(logging.ERROR)
    try:
        assert logging.getLogger("kvstrata.audit").isEnabledFor(logging.INFO)
    finally:
        logging.getLogger().setLevel(logging.WARNING)


def test_the_page_names_every_field_and_every_reason_and_no_other() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "audit.md").read_text()
    fields, reasons = (table.split("\n\n")[0] for table in page.split("|---|---|")[1:])

    assert set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in fields.splitlines()[1:]))) == FIELDS | {
        "ts"
    }
    assert {row.split("`")[1] for row in reasons.splitlines()[1:]} == {str(reason) for reason in audit.Reason}

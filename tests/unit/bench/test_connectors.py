"""What `bench.connectors` makes of its figures: everybody is in the table, and ratios say how much better we are."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench import connectors
from bench.connectors import FAMILIES, Figures, Outcome, Participant, Started
from bench.harness.drivers import FailedError

pytestmark = pytest.mark.unit

ROUNDS = 5


class Engine:
    """Answers as an engine does, in no time; `tokens` are its answer and `loads` what the second one loads."""

    def __init__(self, loads: int, tokens: int = 7) -> None:
        self.loads, self.tokens, self.seen = loads, tokens, set[str]()

    def ask(self, verb: str, **asked: Any) -> dict[str, Any]:
        assert verb == "run"
        prompt = json.dumps(asked["prompts"])
        external = self.loads if prompt in self.seen else 0
        self.seen.add(prompt)
        return {"tokens": [[self.tokens]], "external": external, "took_s": 1.0}


def measured(monkeypatch: pytest.MonkeyPatch, **everybody: Engine) -> Figures:
    monkeypatch.setattr(connectors, "SETTLE_S", 0.0)
    made: dict[str, Any] = {who: Participant(engine) for who, engine in everybody.items()}  # type: ignore[arg-type]
    return connectors.measure(made, replace(connectors.TINY, rounds=ROUNDS))


def figures(computed_s: dict[str, float], loaded_s: dict[str, float]) -> Figures:
    return Figures(
        {who: [s] * ROUNDS for who, s in computed_s.items()},
        {who: [s] * ROUNDS for who, s in loaded_s.items()},
        {who: [1000] * ROUNDS for who in loaded_s},
    )


def test_each_family_is_in_the_last_line_with_the_same_keys_whether_it_is_there_or_not() -> None:
    absent, present = Outcome(), Outcome()
    for name, family in FAMILIES.items():
        absent.leave_out(name, "no such package")
        everybody = dict.fromkeys(family.participants, 1.0)
        present.add(name, Started(), figures(everybody, everybody))

    assert absent.ratios.keys() == present.ratios.keys()
    assert set(absent.ratios.values()) == {None}
    assert {absent.versions[name] for name in FAMILIES} == {"absent: no such package"}
    for connector in ("vllm", "vllm_tier", "lmcache", "sglang"):
        assert {f"{connector}_{what}_vs_engine_tier" for what in ("load", "store", "ttft")} <= present.ratios.keys()
    rows = {row[0] for row in absent.rows}
    assert rows == {row[0] for row in present.rows} - {f"{name} compute" for name in FAMILIES}


def test_more_is_better_and_loads_are_what_is_beyond_the_limit() -> None:
    computed = {"device": 1.0, "file": 1.2, "kvstrata": 1.1}
    loaded = {"device": 0.1, "file": 0.5, "kvstrata": 0.3}
    outcome = Outcome()
    outcome.add("sglang", Started(), figures(computed, loaded))

    assert outcome.ratios == pytest.approx(
        {
            "sglang_load_vs_engine_tier": 2.0,
            "sglang_store_vs_engine_tier": 1.2 / 1.1,
            "sglang_ttft_vs_engine_tier": 5 / 3,
            "sglang_ttft_vs_compute": 10 / 3,
            "sglang_ttft_vs_device": 1 / 3,
        }
    )
    assert outcome.values["load_sglang_kvstrata_bytes_per_s"] == pytest.approx(1000 * connectors.TOKEN_BYTES / 0.2)
    assert outcome.values["save_overhead_sglang_file"] == pytest.approx(0.2)
    assert outcome.values["first_token_sglang_compute_s"] == 1.0


def test_a_load_that_is_as_fast_as_the_limit_has_no_rate_and_no_ratio() -> None:
    everybody = {"device": 0.1, "file": 0.1, "kvstrata": 0.05}
    outcome = Outcome()
    outcome.add("sglang", Started(), figures(everybody, everybody))

    assert outcome.ratios["sglang_load_vs_engine_tier"] is None
    assert not [key for key in outcome.values if key.startswith("load_")]


def test_one_participant_that_is_absent_is_named_and_the_others_are_compared() -> None:
    everybody = {"device": 0.1, "fs_native": 0.4, "kvstrata": 0.2}
    outcome = Outcome()
    outcome.add("lmcache", Started(absent={"redis": "no redis-server"}), figures(everybody, everybody))

    assert outcome.versions["lmcache redis"] == "absent: no redis-server"
    assert ("lmcache redis", "absent", "", "", "", "") in outcome.rows
    assert outcome.ratios["lmcache_ttft_vs_redis"] is None
    assert outcome.ratios["lmcache_ttft_vs_engine_tier"] == pytest.approx(2.0)


def test_everybody_has_a_turn_in_each_round_and_the_first_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, device=Engine(0), kvstrata=Engine(255))

    assert {who: len(values) for who, values in found.loaded_s.items()} == {"device": ROUNDS, "kvstrata": ROUNDS}
    assert found.loaded_tokens["kvstrata"] == [255] * ROUNDS


@pytest.mark.parametrize(
    ("ours", "said"), [(Engine(255, tokens=8), "answers differ"), (Engine(100), r"kvstrata: \[0, 100\] of 256")]
)
def test_another_answer_and_a_load_of_less_than_half_end_the_run(
    monkeypatch: pytest.MonkeyPatch, ours: Engine, said: str
) -> None:
    with pytest.raises(FailedError, match=said):
        measured(monkeypatch, device=Engine(0), kvstrata=ours)


def test_engines_that_nobody_knows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        connectors.choose(["--engines", "vllm,trt"])
    assert "--engines: trt unknown; there are vllm,lmcache,sglang and none" in capsys.readouterr().err

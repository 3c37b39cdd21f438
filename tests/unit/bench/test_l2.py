"""Figures of the benchmark of L2 adapters: nothing counts that was not verified whole."""

from typing import Any

import pytest

from bench.harness.common import REPEATS_MIN
from bench.harness.drivers import FailedError
from bench.harness.participants import MEMCPY, OURS
from bench.l2 import FS, QUICK, RESP, Figures, note, summary

pytestmark = pytest.mark.unit


def report(rate: float, success: int = 8, timed_out: int = 0) -> dict[str, Any]:
    said = {"total_keys": 8, "total_success": success, "rounds_timed_out": timed_out, "ops_per_sec_avg": rate}
    metrics = {f"op_{o}": {**said, "operation": o, "throughput_avg_mbps": rate} for o in ("Store", "Lookup", "Load")}
    return {"status": 0, "report": {"metrics": {"config": {"num_keys": 8}, **metrics}}}


def test_ratios_are_of_the_pairs_of_a_repeat() -> None:
    figures = Figures()
    for rate in range(1, REPEATS_MIN + 1):
        figures.add(MEMCPY, "copy", rate * 2**20)
        for who, factor in ((OURS, 3), (FS, 2), (RESP, 6)):
            note(figures, who, report(rate * factor))

    rows, ratios, values = summary(QUICK[0], figures)

    assert ratios["l2_store_vs_fs_native"] == ratios["l2_load_vs_fs_native"] == pytest.approx(1.5)
    assert ratios["l2_store_vs_resp"] == ratios["l2_lookup_vs_resp"] == pytest.approx(0.5)
    assert ratios["l2_store_vs_memcpy"] == pytest.approx(3)
    assert values["l2_lookup_per_s"] == 9
    assert len(rows) == 10


@pytest.mark.parametrize(
    "answer",
    [report(1, success=7), report(1, timed_out=1), {**report(1), "status": 1}, {"status": 0, "report": None}],
)
def test_a_run_that_is_not_verified_whole_ends_the_benchmark(answer: dict[str, Any]) -> None:
    with pytest.raises(FailedError, match="kvstrata"):
        note(Figures(), OURS, answer)

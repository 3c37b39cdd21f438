"""Laws of how an object store is asked, and of finding uploads that were left behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.object.client import uploads_of
from kvstrata_agent.backends.object.pacing import (
    BACKOFF_MAX_S,
    CALM_S,
    CUT_EVERY_S,
    REQUESTS_MAX,
    TOKENS_MAX,
    Pace,
    Verdict,
    backoff_s,
    judge,
)

pytestmark = pytest.mark.unit

ERROR = "Generic S3 error: Error performing GET http://x/y in 1ms - Server returned non-2xx status code: {}: <Error/>"


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        (ERROR.format("429 Too Many Requests"), Verdict.REFUSED),
        (ERROR.format("503 Service Unavailable"), Verdict.REFUSED),
        (ERROR.format("500 Internal Server Error"), Verdict.BROKEN),
        (ERROR.format("408 Request Timeout"), Verdict.BROKEN),
        (ERROR.format("403 Forbidden"), Verdict.FINAL),
        (ERROR.format("400 Bad Request"), Verdict.FINAL),
        ("Generic S3 error: HTTP error: request or response body error", Verdict.BROKEN),
        ("Generic LocalFileSystem error: Unable to open file: No space left on device", Verdict.FINAL),
    ],
)
def test_failures_are_judged_by_what_the_next_attempt_can_change(message: str, verdict: Verdict) -> None:
    assert judge(message) is verdict


@given(st.integers(0, 60), st.floats(0, 1, exclude_max=True))
def test_pauses_are_bounded_and_spread(attempt: int, chance: float) -> None:
    assert 0 <= backoff_s(attempt, chance) <= BACKOFF_MAX_S
    assert backoff_s(attempt, 0.9) > backoff_s(attempt, 0.1)


@given(st.lists(st.one_of(st.none(), st.floats(0, 5)), max_size=300))
def test_requests_at_once_stay_within_their_bounds(steps: list[float | None]) -> None:
    pace, now_s = Pace(), 0.0
    for step in steps:
        if step is None:
            pace.succeeded()
        else:
            now_s += step
            pace.was_refused(now_s)
        assert 1.0 <= pace.limit <= REQUESTS_MAX


def test_a_burst_of_refusals_halves_once() -> None:
    pace = Pace()
    for _ in range(20):
        pace.was_refused(100.0)
    assert pace.limit == REQUESTS_MAX / 2
    assert pace.refused == 20

    pace.was_refused(100.0 + CUT_EVERY_S)
    assert pace.limit == REQUESTS_MAX / 4


def test_a_round_of_answers_brings_one_request_more() -> None:
    pace = Pace(limit=4.0)
    for _ in range(4):
        pace.succeeded()
    assert 4.9 <= pace.limit <= 5.0


def test_refusals_that_last_are_told_from_ones_that_ended() -> None:
    pace = Pace()
    assert pace.refusing_s(0.0) == 0.0
    for second in range(40):
        pace.was_refused(100.0 + second)
    assert pace.refusing_s(139.0) == 39.0
    assert pace.refusing_s(139.0 + CALM_S) == 0.0

    pace.was_refused(500.0)
    assert pace.refusing_s(500.0) == 0.0


def test_retries_end_and_come_back_with_answers() -> None:
    pace = Pace()
    assert sum(pace.may_retry() for _ in range(1000)) == TOKENS_MAX
    for _ in range(5):
        pace.succeeded()
    assert pace.may_retry()
    assert not pace.may_retry()


KEYS = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}


def test_where_uploads_are_asked_for() -> None:
    near = uploads_of("s3://bucket/a/b", KEYS | {"aws_endpoint": "http://h:1", "aws_region": "r"})
    assert near is not None
    assert (near.endpoint, near.bucket_path, near.prefix, near.region) == ("http://h:1", "/bucket", "a/b/", "r")
    far = uploads_of("s3://bucket", KEYS | {"AWS_SESSION_TOKEN": "t"})
    assert far is not None
    assert (far.endpoint, far.bucket_path, far.prefix) == ("https://bucket.s3.us-east-1.amazonaws.com", "", "")
    assert far.token == "t"
    assert "'s'" not in repr(far)


@pytest.mark.parametrize("url", ["gs://bucket", "file:///tmp/x", "memory://"])
def test_other_stores_are_left_to_their_own_rules(url: str) -> None:
    assert uploads_of(url, KEYS) is None


def test_without_keys_of_our_own_nothing_is_asked() -> None:
    assert uploads_of("s3://bucket", {"aws_region": "r"}) is None

"""Laws of the JSON log lines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_telemetry import logs

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _own_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def logged(level: str = "INFO") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logs.configure(level, "agent", stream)
    return logging.getLogger("kvstrata.test"), stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_line_with_time_level_component_event_and_extras() -> None:
    log, stream = logged()

    log.info("listening", extra={"what": "metrics", "address": "127.0.0.1:1234"})

    (line,) = lines(stream)
    assert line.pop("ts", "").__str__().endswith("+00:00")
    assert line == {
        "level": "info",
        "component": "agent",
        "event": "listening",
        "logger": "kvstrata.test",
        "what": "metrics",
        "address": "127.0.0.1:1234",
    }


def test_an_extra_cannot_forge_level_or_component() -> None:
    log, stream = logged()

    log.warning("quota", extra={"level": "info", "component": "operator", "event": "nothing"})

    (line,) = lines(stream)
    assert (line["level"], line["component"], line["event"]) == ("warning", "agent", "quota")


@given(event=st.text(), extra=st.dictionaries(st.text(min_size=1).map("x_{}".format), st.text() | st.binary()))
def test_whatever_is_logged_stays_one_line_of_json(event: str, extra: dict[str, object]) -> None:
    log, stream = logged()

    log.info("%s", event, extra=extra)

    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue())["event"] == event


def test_configuring_twice_does_not_double_the_lines() -> None:
    log, stream = logged()
    logs.configure("INFO", "agent", stream)

    log.info("once")

    assert len(lines(stream)) == 1


def test_records_below_the_level_are_dropped() -> None:
    log, stream = logged("WARNING")

    log.info("quiet")
    log.error("loud")

    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_an_error_carries_its_traceback() -> None:
    log, stream = logged()

    try:
        memoryview(b"").cast("B", (1,))
    except TypeError:
        log.exception("failed")

    assert "TypeError" in str(lines(stream)[0]["error"])


def test_an_endless_event_is_cut() -> None:
    log, stream = logged()

    log.info("x" * 1_000_000)

    assert len(stream.getvalue()) < 20_000


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("loud", "agent", io.StringIO())

"""JSON lines on stderr, one object for each record, through the standard logging module.

`log.info("listening", extra={"what": "metrics", "address": address})` becomes
`{"ts": "...", "level": "info", "component": "agent", "event": "listening", "what": "metrics", "address": "..."}`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from kvstrata_telemetry import tracing

_EVENT_CHARS_MAX: Final = 16_384
"""A record stays one line that collectors accept: Docker and containerd split lines at 16 KiB."""

_OWN_FIELDS: Final = frozenset(
    [*logging.LogRecord("", 0, "", 0, "", (), None).__dict__, "message", "asctime", "taskName"]
)
"""What every record has; anything beyond these came through `extra`."""


class JsonFormatter(logging.Formatter):
    """One record as one line of JSON; never raises, whatever the extras hold."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """Give the record's line, without the newline."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "event": record.getMessage()[:_EVENT_CHARS_MAX],
            "logger": record.name,
        }
        line |= tracing.current_ids()
        # Our own fields win: an extra must not be able to forge a level or a component.
        line |= {k: v for k, v in record.__dict__.items() if k not in _OWN_FIELDS and k not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-_EVENT_CHARS_MAX:]
        return json.dumps(line, default=str, skipkeys=True, ensure_ascii=False)


def configure(level: str, component: str, stream: TextIO | None = None) -> None:
    """Send all records at or above `level` (a name such as `INFO`) to `stream`, stderr when absent.

    Replaces earlier handlers, so calling it twice does not double the lines. `ValueError` for an unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(component))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)

"""RFC 3339 times as Kubernetes writes them. Pure: the clock is read by the caller."""

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """Write whole seconds of UTC: `2026-01-31T12:00:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime | None:
    """Read a time; None for an empty or unreadable one. A time without a zone is taken for UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

"""Text from other machines, made safe for a terminal and a log line."""

from __future__ import annotations

from datetime import datetime, timezone


def plain(text: str, limit: int = 2000) -> str:
    """One line without control characters or half surrogates, at most ``limit`` characters."""
    shown = "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
        for letter in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def timestamp(unix: float) -> str:
    """ISO 8601 in UTC with milliseconds, or the number itself if it is no time that a calendar has."""
    try:
        at = datetime.fromtimestamp(unix, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{unix:g}"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

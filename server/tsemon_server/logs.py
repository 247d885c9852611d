"""What the service says of its work: a line for each request, run and alert, for programs or for people.

A line stays one line whatever a client wrote into a name, and shows no secret: what may be one is never put in, and what
came in with the text of an error is taken out again.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, get_args

LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered."""

_SECRETS = [
    (re.compile(pattern), rf"{kept}***")
    for pattern, kept in (
        (r"(tsm_[A-Za-z0-9]+_)[A-Za-z0-9_-]+", r"\1"),
        (r"((?i:\bbearer|\bbasic)\s+)[\w+/=.~-]{8,}", r"\1"),
        (r"((?i:password)['\"]?\s*[=:]\s*)[^\s&]+", r"\1"),
        (r"(://)[^\s/]*(?=@)", r"\1"),
        (r"(\bhttps?://[^\s/?#'\"]+)[/?#][^\s'\"]*", r"\1/"),  # a webhook's path is its password
    )
]


def without_secrets(text: str) -> str:
    """The text without tokens, passwords, and all of web addresses but the host."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class JsonFormatter(logging.Formatter):
    """A JSON object in ASCII, so that no character of a name ends the line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """Time, level and message, then `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        traceback = fields.pop("traceback", None)
        when, level, message = fields.pop("time"), fields.pop("level"), fields.pop("message")
        fields.pop("logger")
        pairs = [f"{name}={_word(value)}" for name, value in fields.items()]
        line = " ".join([when[:19].replace("T", " "), f"{level:<7}", _on_one_line(message), *pairs])
        # Indented: what stands at the beginning of a line is ours.
        return line if traceback is None else "\n    ".join([line, *map(_on_one_line, traceback.splitlines())])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "message": without_secrets(record.getMessage()),
        "logger": record.name,
    }
    known = request_id.get()
    if known is not None:
        found["request_id"] = known
    extra: Mapping[str, Any] = getattr(record, "fields", {})
    for name, value in extra.items():
        if value is not None:
            found[name] = without_secrets(value) if isinstance(value, str) else value
    if record.exc_info and record.exc_info[0] is not None:
        found["traceback"] = without_secrets(logging.Formatter().formatException(record.exc_info))
    return found


def _word(value: Any) -> str:
    """Quoted where it would not be told apart from what follows."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if re.fullmatch(r"[!#-<>-~]+", text) else json.dumps(text)


def _on_one_line(text: str) -> str:
    """The text with what could end a line, or move the cursor, written out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def set_up_logs(format: LogFormat = "auto", level: LogLevel = "info", stream: TextIO | None = None) -> None:
    """Let this process write its log to `stream`, or stderr: ours from `level` on, others' warnings."""
    stream = stream or sys.stderr
    is_json = format == "json" or (format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("tsemon", "tsemon_server"):
        logging.getLogger(name).setLevel(level.upper())

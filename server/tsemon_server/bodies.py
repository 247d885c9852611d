"""The bodies of requests: validated in one step. The errors tell what is wrong first."""

from __future__ import annotations

from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tsemon.errors import InvalidArgument

_NUMBERS = 'a finite number, null or "NaN", "Infinity", "-Infinity"'


class Body(BaseModel):
    """What is common to all bodies: no key that is not known, no value of a kind that is only close."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


SomeBody = TypeVar("SomeBody", bound=Body)


def read_body(model: type[SomeBody], raw: bytes | bytearray) -> SomeBody:
    """The body as `model`, or InvalidArgument."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidArgument(first_problem(error, prefix="body")) from None


def first_problem(error: ValidationError, prefix: str) -> str:
    """What is wrong first, and where."""
    problem = error.errors(include_url=False, include_context=False)[0]
    kind, where = problem["type"], [part for part in problem["loc"] if part not in ("packed", "plain")]
    if kind == "json_invalid":
        return f"{prefix}: expected JSON, got {problem['msg'].removeprefix('Invalid JSON: ')}"
    if where[-1:] in (["nullable"], ["float"]) or kind == "finite_number":
        return f"{prefix}: expected {_NUMBERS}, got {shown(problem['input'])}"
    if not prefix.startswith("frame ") and where:
        prefix = f"{prefix}, {'.'.join(str(part)[:80] for part in where[:8])}"
    elif len(where) == 3:
        prefix = f"{prefix}, {str(where[2])[:80]}"
    return f"{prefix}: {problem['msg']}, got {shown(problem['input'])}"


def shown(value: Any) -> str:
    """As much of a value as an error may repeat."""
    if isinstance(value, dict):
        value = dict(islice(value.items(), 80))
    text = repr(value[:80] if isinstance(value, list) else value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"

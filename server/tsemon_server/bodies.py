"""The bodies of requests: validated in one step. The errors tell what is wrong first."""

from __future__ import annotations

from itertools import islice
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tsemon.errors import InvalidArgument

_NUMBERS = 'a finite number, null or "NaN", "Infinity", "-Infinity"'


def count(raw: bytes | bytearray, sign: bytes) -> int:
    """The same as `raw.count`, in a fifth of the time."""
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == ord(sign)))


class Body(BaseModel):
    """What is common to all bodies: no key that is not known, no value of a kind that is only close."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


SomeBody = TypeVar("SomeBody", bound=Body)


class Whole:
    """Lets an integer be written as 531.0: an integer of JSON Schema is a number without a fraction.

    Put it behind the bounds: `Annotated[int, Field(ge=0), WHOLE]`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        exact = handler(source)
        number = core_schema.float_schema(strict=True, allow_inf_nan=False)
        rounded = core_schema.no_info_after_validator_function(_without_fraction, number)
        written = core_schema.chain_schema([rounded, exact])
        return core_schema.union_schema([(exact, "whole"), (written, "whole")], mode="left_to_right")

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema["choices"][0][0])


WHOLE = Whole()


def _without_fraction(number: float) -> float | int:
    return int(number) if number.is_integer() else number


class BodySchema(GenerateJsonSchema):
    """JSON Schema of bodies. Keys with a pattern are described such that no other keys are allowed, and that generators of
    clients see the type of the values."""

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        for pattern, values in found.pop("patternProperties", {}).items():
            found |= {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return found


def read_body(model: type[SomeBody], raw: bytes | bytearray) -> SomeBody:
    """The body as `model`, or InvalidArgument."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidArgument(first_problem(error, prefix="body")) from None


def first_problem(error: ValidationError, prefix: str) -> str:
    """What is wrong first, and where."""
    problem = error.errors(include_url=False, include_context=False)[0]
    kind, where = problem["type"], place_of(problem["loc"])
    if kind == "json_invalid":
        return f"{prefix}: expected JSON, got {problem['msg'].removeprefix('Invalid JSON: ')}"
    if where[-1:] in (["nullable"], ["float"]) or kind == "finite_number":
        return f"{prefix}: expected {_NUMBERS}, got {shown(problem['input'])}"
    if not prefix.startswith("frame ") and where:
        prefix = f"{prefix}, {'.'.join(str(part)[:80] for part in where[:8])}"
    elif len(where) == 3:
        prefix = f"{prefix}, {str(where[2])[:80]}"
    if kind == "string_too_short" and not problem["input"]:
        return f"{prefix}: expected at least one character, got an empty text"
    return f"{prefix}: {problem['msg']}, got {shown(problem['input'])}"


def place_of(loc: tuple[int | str, ...]) -> list[int | str]:
    """Where in a body something is, without the names of choices that pydantic puts there."""
    return [part for part in loc if part not in ("packed", "plain", "whole")]


def shown(value: Any) -> str:
    """As much of a value as an error may repeat."""
    if isinstance(value, dict):
        value = dict(islice(value.items(), 80))
    text = repr(value[:80] if isinstance(value, list) else value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"

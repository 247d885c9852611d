"""What all questions have in common, and what all answers do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Largest attempt, layer or head that can be asked for: what an integer column of the database holds."""
Index = Annotated[int | None, Field(ge=-LARGEST, le=LARGEST)]
LONG = 8
"""Maximum number of values of a list that are shown when a record is printed; longer lists show their length."""


class Record(BaseModel):
    """A value that the server responds with.

    It is frozen. Fields that a newer server adds are ignored; fields that an older one lacks have a default.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, value if not isinstance(value, list) or len(value) <= LONG else f"<{len(value)} values>"


def _as_sent(schema: dict[str, Any]) -> None:
    """Describe a field without the None that stands for it where an older server does not send it."""
    schema.pop("default")
    (sent,) = (one for one in schema.pop("anyOf") if one != {"type": "null"})
    schema.update(sent)


Newer = Annotated[T | None, Field(json_schema_extra=_as_sent)]
"""A field that every server of this version sends, and that is None in the response of an older one."""


class Query(BaseModel):
    """A question: the parameters of a query string, under their names there as aliases.

    A field with `kw_only=False` may be passed by position to the method of the client.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, populate_by_name=True)

    def params(self) -> dict[str, Any]:
        """Build the query string's parameters: those that were given, and are not None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


class Page(Query):
    """Which part of a list."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 50
    """Maximum number of entries."""
    cursor: Annotated[str | None, Field(max_length=1000)] = None
    """`next_cursor` of the previous page."""


class Span(Query):
    """Which steps."""

    from_step: Annotated[int | None, Field(ge=0, le=2**53)] = None
    """First step, inclusive."""
    to_step: Annotated[int | None, Field(ge=0, le=2**53)] = None
    """Last step, inclusive."""


class OfAttempt(Query):
    """Which attempt."""

    attempt: Index = None
    """Only this attempt, as it was recorded; if absent, every frame that no later attempt hides."""


class OfMetric(Query):
    """Which metric."""

    metric: Annotated[str, Field(max_length=128)] = Field(kw_only=False)
    """Name of the metric, as `GET /runs/{run_id}` lists it."""


class OfEntry(OfMetric):
    """Which metric, and where in the model."""

    layer: Index = None
    """Index of the layer, required for a metric with one value per layer; -1 is the last layer."""
    head: Index = None
    """Index of the head, for a metric that is recorded per head."""


class OfProject(Query):
    """Which project."""

    project: str | None = None
    """Only this project."""

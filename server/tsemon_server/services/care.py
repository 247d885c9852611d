"""What people do about alerts: acknowledging, resolving and silencing them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tsemon.errors import UnknownSilence
from tsemon.wire import NAME
from tsemon_answers.alerts import Alert, Silence
from tsemon_server.bodies import Body, read_body
from tsemon_server.store import Store

Name = Annotated[str, Field(pattern=f"^{NAME}$", max_length=128)]
Words = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]


def _in_utc(until: datetime) -> datetime:
    try:
        return datetime.fromtimestamp(until.timestamp(), UTC)
    except (OverflowError, ValueError):  # its zone, or rounding, takes it over the edge of the calendar
        raise PydanticCustomError("of_no_year", "The time should be in the years 1 to 9999 of UTC") from None


class Acknowledgement(Body):
    """An alert is acknowledged."""

    by: Name
    """Who says so."""
    note: Words | None = None
    """Anything worth saying."""


class NewSilence(Body):
    """Tell nobody of the alerts that fit all of `rule`, `run`, `project` and `family` that are given: one at least."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {"properties": {name: {"type": "null"} for name in ("rule", "run", "project", "family")}}
        }
    )

    rule: Name | None = None
    """The name of their rule."""
    run: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")] | None = None
    """The name of their run; * stands for any characters, ? for one."""
    project: Name | None = None
    """Their run's project."""
    family: Name | None = None
    """Their rule's family."""
    until: Annotated[AwareDatetime, AfterValidator(_in_utc)]
    """When it ends by itself, with its time zone, as in 2026-01-31T12:00:00Z."""
    created_by: Name
    """Who makes it."""
    reason: Words = ""
    """Why."""

    @model_validator(mode="after")
    def _says_of_what(self) -> Self:
        if (self.rule, self.run, self.project, self.family) == (None, None, None, None):
            raise PydanticCustomError("of_nothing", "At least one of rule, run, project and family should be given")
        return self


def acknowledge(store: Store, alert_id: str, raw: bytes | bytearray) -> Alert:
    """Acknowledge an alert. An alert that is acknowledged already stays as it is."""
    body = read_body(Acknowledgement, raw)
    with store.write() as writer:
        return writer.alerts.acknowledge(alert_id, body.by, body.note)


def resolve(store: Store, alert_id: str, raw: bytes | bytearray) -> Alert:
    """Resolve an alert that is firing."""
    body = read_body(Acknowledgement, raw)
    with store.write() as writer:
        writer.runs.hold(
            writer.alerts.get(alert_id).run_id
        )  # its incident depends on alerts that others may change now
        return writer.alerts.resolve(alert_id, body.by, body.note)


def silence(store: Store, raw: bytes | bytearray, check_project: Callable[[str | None], None]) -> Silence:
    """Silence some alerts. `check_project` raises Forbidden if whoever asks may not do it to the project."""
    body = read_body(NewSilence, raw)
    check_project(body.project)
    with store.write() as writer:
        return writer.silences.add(**body.model_dump(exclude={"until"}), until=body.until.timestamp())


def end_silence(store: Store, silence_id: str, may_see: Callable[[str | None], bool]) -> None:
    """End a silence now. Raises UnknownSilence if there is none of a project that whoever asks may see."""
    with store.write() as writer:
        for found in writer.silences.all():
            if found.silence_id == silence_id and not may_see(found.project):
                raise UnknownSilence(
                    f"no silence has the id {silence_id!r}; see the list of silences for the existing ones"
                )
        writer.silences.remove(silence_id)

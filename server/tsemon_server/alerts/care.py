"""The routes by which people see to alerts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Self

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, AwareDatetime, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from tsemon.errors import UnknownSilence
from tsemon.wire import NAME
from tsemon_server.access.gate import access_of
from tsemon_server.bodies import Body, read_body, read_raw, takes
from tsemon_server.store import Alert, Record, Silence, Store

AlertId = Annotated[str, Path(description="The alert's id, as GET /alerts answered it.", max_length=64)]
SilenceId = Annotated[str, Path(description="The silence's id, as GET /silences answered it.", max_length=64)]
Name = Annotated[str, Field(pattern=f"^{NAME}$", max_length=128)]
Words = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]


def _in_utc(until: datetime) -> datetime:
    try:
        return datetime.fromtimestamp(until.timestamp(), UTC)
    except (OverflowError, ValueError):  # its zone, or rounding, takes it over the edge of the calendar
        raise PydanticCustomError("of_no_year", "The time should be in the years 1 to 9999 of UTC") from None


class Acknowledgement(Body):
    """Somebody has seen to an alert."""

    by: Name
    """Who says so."""
    note: Words | None = None
    """Anything worth saying."""


class NewSilence(Body):
    """Tell nobody of the alerts that fit all of `rule`, `run`, `project` and `family` that are given: one at least."""

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


class Silences(Record):
    """What is silenced now."""

    silences: list[Silence]
    """Those that have not ended, the first to end first."""


BODIES: tuple[type[Body], ...] = (Acknowledgement, NewSilence)


def make_router(store: Store) -> APIRouter:
    """Routes that change what is told of alerts."""
    router = APIRouter(tags=["alerts"])

    @router.post("/alerts/{alert_id}/ack", openapi_extra=takes(Acknowledgement))
    async def acknowledge(alert_id: AlertId, request: Request) -> Alert:
        """Say that somebody has seen to an alert. One that somebody has seen to already stays as it is."""
        raw = await read_raw(request)

        def change() -> Alert:
            body = read_body(Acknowledgement, raw)
            with store.write() as writer:
                return writer.alerts.acknowledge(alert_id, body.by, body.note)

        return await run_in_threadpool(change)

    @router.delete("/alerts/{alert_id}/ack")
    def unacknowledge(alert_id: AlertId) -> Alert:
        """Take that back."""
        with store.write() as writer:
            return writer.alerts.unacknowledge(alert_id)

    @router.post("/alerts/{alert_id}/resolve", openapi_extra=takes(Acknowledgement))
    async def resolve(alert_id: AlertId, request: Request) -> Alert:
        """Call an alert over that fires. Its rule opens another one only after its condition was over."""
        raw = await read_raw(request)

        def change() -> Alert:
            body = read_body(Acknowledgement, raw)
            with store.write() as writer:
                return writer.alerts.resolve(alert_id, body.by, body.note)

        return await run_in_threadpool(change)

    @router.get("/silences")
    def list_silences(
        project: Annotated[str | None, Query(description="Only those of this project alone.")] = None,
    ) -> Silences:
        """What is silenced now."""
        with store.read() as reader:
            found = reader.silences.all()
        return Silences(silences=[silence for silence in found if project in (None, silence.project)])

    @router.post("/silences", openapi_extra=takes(NewSilence))
    async def add_silence(request: Request) -> Silence:
        """Tell nobody of some alerts until a certain time."""
        raw = await read_raw(request)

        def add() -> Silence:
            body = read_body(NewSilence, raw)
            access_of(request).check_project(body.project)
            with store.write() as writer:
                return writer.silences.add(**body.model_dump(exclude={"until"}), until=body.until.timestamp())

        return await run_in_threadpool(add)

    @router.delete("/silences/{silence_id}", status_code=204, response_class=Response)
    def remove_silence(silence_id: SilenceId, request: Request) -> None:
        """Let a silence end now."""
        with store.write() as writer:
            for silence in writer.silences.all():
                if silence.silence_id == silence_id and not access_of(request).is_for(silence.project):
                    raise UnknownSilence(
                        f"no silence has the id {silence_id!r}; the list of silences has those there are"
                    )
            writer.silences.remove(silence_id)

    return router

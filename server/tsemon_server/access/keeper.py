"""Telling whose token it is. What the database said of a token is believed for a few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from tsemon.errors import Forbidden, StoreError, Unauthorized, UnknownAlert, UnknownIncident, UnknownRun
from tsemon_server.access.needs import UNKNOWN, Need
from tsemon_server.access.tokens import is_secret_of, parts_of
from tsemon_server.store import Store
from tsemon_server.store.ledger.tokens import StoredToken

log = logging.getLogger(__name__)

BELIEVED_S = 5.0
"""For so long after it was revoked a token may still be of use."""
USE_EVERY_S = 60.0
"""How exactly it is kept when a token was last used."""
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Access:
    """What whoever asks may do."""

    scopes: frozenset[str]
    project: str | None = None
    """The only project that it may be done to; None for all."""
    token_id: str | None = None
    """None where the service needs no tokens."""
    name: str | None = None

    def is_for(self, project: str | None) -> bool:
        """Whether it is for this project; None is all of them."""
        return self.project in (None, project)

    def check_project(self, project: str | None) -> None:
        """Raises Forbidden where it is not for the project that whoever asks has named."""
        if not self.is_for(project):
            wanted = "all projects" if project is None else f"project {project!r}"
            raise Forbidden(f"expected something of project {self.project!r}, which the token is for, got {wanted}")


ANYONE = Access(frozenset({"admin"}))
"""Of a service that needs no tokens."""


class Keeper:
    """Knows the tokens of `store`."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._known: dict[str, tuple[StoredToken, float]] = {}
        self._used: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._projects: dict[str, str] = {}

    async def access_of(self, text: str) -> Access:
        """What the token allows. Raises Unauthorized where it allows nothing."""
        parts = parts_of(text)
        token = None if parts is None else await self._find(parts[0])
        if parts is None or token is None or not is_secret_of(parts[1], token.digest):
            raise Unauthorized(
                "expected a token that `tsemon token create` made for this service, got another; it is not repeated here"
            )
        if token.revoked_at is not None:
            raise Unauthorized(f"the token {token.token_id} ({token.name}) was revoked; make another")
        if token.expires_at is not None and token.expires_at.timestamp() <= self._clock():
            raise Unauthorized(f"the token {token.token_id} ({token.name}) has expired; make another")
        self._note_use(token.token_id)
        return Access(frozenset(token.scopes), token.project, token.token_id, token.name)

    async def check(self, access: Access, need: Need, named: dict[str, list[str]]) -> None:
        """Raises Forbidden or what the route would say of something that is not there, where it is not for this."""
        if need is UNKNOWN and "admin" not in access.scopes:
            raise Forbidden("expected a route that there is, or a token with the scope 'admin'; /docs lists the routes")
        if not access.scopes & {*need.scopes, "admin"}:
            has = ", ".join(sorted(access.scopes))
            raise Forbidden(f"expected a token with the scope {need.scopes[0]!r}, got one with {has}")
        if access.project is None:
            return
        if need.of == "all":
            raise Forbidden(f"expected a token for all projects, got one for {access.project!r} alone")
        for run_id in named.get("run_id", []):
            if not access.is_for(await self._project_of(run_id)):
                raise UnknownRun(f"project {access.project!r} has no run with the id {run_id!r:.80}")
        for alert_id in named.get("alert_id", []):
            if not access.is_for(await run_in_threadpool(self._project_of_alert, alert_id)):
                raise UnknownAlert(f"project {access.project!r} has no alert with the id {alert_id!r:.80}")
        for incident_id in named.get("incident_id", []):
            if not access.is_for(await run_in_threadpool(self._project_of_incident, incident_id)):
                raise UnknownIncident(f"project {access.project!r} has no incident with the id {incident_id!r:.80}")

    async def _find(self, token_id: str) -> StoredToken | None:
        token, until = self._known.get(token_id, (None, 0.0))
        if time.monotonic() < until:
            return token
        token = await run_in_threadpool(self._store.tokens.find, token_id)
        if token is not None:
            if len(self._known) > MAX_REMEMBERED:
                self._known.clear()
            self._known[token_id] = token, time.monotonic() + BELIEVED_S
        return token

    def _note_use(self, token_id: str) -> None:
        """Keep when it was used, while the request goes on: it does not wait for a database that is locked."""
        now = time.monotonic()
        if now < self._used.get(token_id, -USE_EVERY_S) + USE_EVERY_S:
            return
        self._used[token_id] = now
        task = asyncio.create_task(self._keep_use(token_id))
        self._tasks.add(task)  # or nothing would hold it
        task.add_done_callback(self._tasks.discard)

    async def _keep_use(self, token_id: str) -> None:
        try:
            await run_in_threadpool(self._store.tokens.mark_used, token_id)
        except StoreError as error:
            log.warning("when token %s was used is not kept: %s", token_id, error)

    async def _project_of(self, run_id: str) -> str | None:
        """None where there is no such run. A run never changes its project, and no other gets its id."""
        found = self._projects.get(run_id)
        if found is None:
            found = await run_in_threadpool(self._read_project, run_id)
            if found is not None:
                if len(self._projects) > MAX_REMEMBERED:
                    self._projects.clear()
                self._projects[run_id] = found
        return found

    def _read_project(self, run_id: str) -> str | None:
        try:
            with self._store.read() as reader:
                return reader.runs.get(run_id).project
        except UnknownRun:
            return None

    def _project_of_alert(self, alert_id: str) -> str | None:
        try:
            with self._store.read() as reader:
                return reader.alerts.get(alert_id).project
        except UnknownAlert:
            return None

    def _project_of_incident(self, incident_id: str) -> str | None:
        try:
            with self._store.read() as reader:
                return reader.incidents.get(incident_id).project
        except UnknownIncident:
            return None

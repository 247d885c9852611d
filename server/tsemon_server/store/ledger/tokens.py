"""What lets a program or a person in. The database holds no token, only what tells whether one is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update

from tsemon_server.store.engine import Database
from tsemon_server.store.ledger import tables
from tsemon_server.store.times import utc


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredToken:
    """One that was made."""

    token_id: str
    name: str
    """What for, in the words of whoever made it."""
    digest: str
    """SHA-256 of its secret, in hexadecimal digits."""
    scopes: tuple[str, ...]
    project: str | None
    """The only project that it is for; None for all."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To the minute."""


class Tokens:
    """The tokens of a database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock

    def add(
        self,
        token_id: str,
        *,
        name: str,
        digest: str,
        scopes: tuple[str, ...],
        project: str | None,
        expires_at: float | None,
    ) -> None:
        about = {"name": name, "digest": digest, "scopes": list(scopes), "project": project}
        times = {"created_at": self._clock(), "expires_at": expires_at}
        with self._database.writing() as connection:
            connection.execute(insert(tables.token).values(token_id=token_id, **about, **times))

    def find(self, token_id: str) -> StoredToken | None:
        """The token of this id, also one that was revoked or has expired."""
        with self._database.reading() as connection:
            row = connection.execute(select(tables.token).where(tables.token.c.token_id == token_id)).first()
        return None if row is None else _token(row)

    def ids(self) -> frozenset[str]:
        """Of all there are, revoked ones too."""
        with self._database.reading() as connection:
            return frozenset(connection.execute(select(tables.token.c.token_id)).scalars())

    def all(self) -> list[StoredToken]:
        """The newest first."""
        c = tables.token.c
        with self._database.reading() as connection:
            rows = connection.execute(select(tables.token).order_by(c.created_at.desc(), c.token_id)).all()
        return [_token(row) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """Let nobody in with it from now on. False where no token has this id."""
        c = tables.token.c
        with self._database.writing() as connection:
            if connection.execute(select(c.token_id).where(c.token_id == token_id)).first() is None:
                return False
            unrevoked = update(tables.token).where(c.token_id == token_id, c.revoked_at.is_(None))
            connection.execute(unrevoked.values(revoked_at=self._clock()))
        return True

    def mark_used(self, token_id: str) -> None:
        """Keep that it was used now."""
        with self._database.writing() as connection:
            used = update(tables.token).where(tables.token.c.token_id == token_id)
            connection.execute(used.values(last_used_at=self._clock()))


def _token(row: Any) -> StoredToken:
    values: dict[str, Any] = row._asdict()
    for name in ("created_at", "expires_at", "revoked_at", "last_used_at"):
        values[name] = None if values[name] is None else utc(values[name])
    return StoredToken(**values | {"scopes": tuple(row.scopes)})

"""Opening a database. What is peculiar to one engine is here and nowhere else."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, ProgrammingError
from sqlalchemy.pool import ConnectionPoolEntry

from tsemon.errors import StoreError

BUSY_TIMEOUT_S = 30
"""How long a writer waits for another process's transaction."""

_MAIN_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"

_HERE = Path(__file__).resolve()
_PACKAGED = _HERE.parents[1] / "migrations"
MIGRATIONS = _PACKAGED if _PACKAGED.is_dir() else _HERE.parents[3] / "migrations"  # the second: an editable install


class Database:
    """An engine that is migrated to head, with one way to read and one way to write."""

    def __init__(self, url: str) -> None:
        self.engine = _create_engine(url)
        self.where = self.engine.url.render_as_string(hide_password=True)
        self._one_writer = threading.Lock()
        self._file: tuple[str, tuple[int, int] | None] | None = None
        try:
            with self.writing() as connection:
                _migrate(connection)
                path = _sqlite_file(connection)
            if path:
                self._file = path, _identity(path)
        except BaseException:
            self.engine.dispose()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with self._explained():
            self._check_file()
            with self.engine.connect() as connection:
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits at the end of the block, or does nothing when the block raises."""
        # SQLite has one writer at a time. Threads of this process queue up here, in order and without polling.
        with self._one_writer, self._explained():
            self._check_file()
            with self.engine.execution_options(writes=True).begin() as connection:
                yield connection

    def _check_file(self) -> None:
        # SQLite goes on writing to a file that has no name any more: all is well until the process ends, then all is
        # lost. Refused, writers keep their frames and send them again.
        if self._file is not None and _identity(self._file[0]) != self._file[1]:
            raise StoreError(
                f"the database file {self._file[0]} was deleted, moved or replaced while the service ran; move it "
                "back, or restart the service to begin a new one"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, ProgrammingError):
            raise  # a slip of ours
        except DBAPIError as error:
            raise StoreError(
                f"the database {self.where} cannot be used: {error.orig}; it must be a database of tsemon in a folder "
                "that this process may write, with room left on the disk"
            ) from error


def insert_missing(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows whose key is not there yet."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(insert(table).on_conflict_do_nothing(), list(rows))


def _create_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise StoreError(
            f"expected a database URL like sqlite:///tsemon.db, got one that does not open: {error}"
        ) from error
    if parsed.database in (None, "", ":memory:"):
        raise StoreError(f"expected a database file, as in sqlite:///tsemon.db, got {url!r}")
    engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=8, max_overflow=40)
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _sqlite_file(connection: Connection) -> str:
    """The path of the file behind `connection`, empty for other engines."""
    if connection.dialect.name != "sqlite":
        return ""
    return str(connection.exec_driver_sql(_MAIN_FILE).scalar_one())


def _identity(path: str) -> tuple[int, int] | None:
    """What tells a file from another that has its name later; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _on_sqlite_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    _refuse_foreign(connection)  # before anything is changed, the journal mode too
    connection.isolation_level = None  # transactions begin when we say so, see below
    if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power cut


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    """Raise StoreError for a database whose tables are somebody else's, with or without migrations of their own."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables <= {"alembic_version"} or tables >= {"alembic_version", "run"}:
        return
    path = connection.execute(_MAIN_FILE).fetchone()[0]
    connection.close()
    raise StoreError(
        f"expected a database of tsemon or a new file, got {path} with tables of another program "
        f"({', '.join(sorted(tables)[:3])}); it is left as it is, choose another file"
    )


def _on_sqlite_begin(connection: Connection) -> None:
    # A transaction that reads first and writes later fails when another process wrote in between; one that takes the
    # lock at its start waits for its turn instead.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    """Bring the tables to head. The caller's transaction holds the write lock, so two processes can start at once."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"the database was written by a newer tsemon, install that version: {error}") from error

"""Opening a database. What is peculiar to one engine is here, and in `backups`, and nowhere else."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    CTE,
    URL,
    Boolean,
    Connection,
    Engine,
    Integer,
    Table,
    Text,
    bindparam,
    cast,
    create_engine,
    event,
    func,
    inspect,
    literal_column,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as OutOfConnections
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from tsemon.errors import InvalidArgument, MissingPackage, StoreError, reason

BUSY_TIMEOUT_S = 5
"""How long a writer waits for the transaction of another process: less than the 10 s after which a trainer gives up."""

POOL_SIZE = 10
"""Connections to PostgreSQL that one process opens at most; the server allows 100 where nobody changed it."""

SECRETS = ("password", "sslpassword")
"""Options in the query of a URL that nobody may see."""
POOL_TIMEOUT_S = 5
"""How long a request waits for one of them; a trainer waits 10 s for its answer."""

_NO_PRIVILEGE = "42501"  # which drivers count among the programming errors
_NEEDS = {
    "sqlite": "it must be a database of tsemon in a folder that this process may write, with room left on the disk",
    "postgresql": "it must be a running PostgreSQL where this user may create tables, with room left on the disk",
}

_MIGRATION = 0x7473656D6F6E
"""The number of the lock that processes of tsemon take while they migrate: their name as bytes."""

_MAIN_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"

_HERE = Path(__file__).resolve()
_PACKAGED = _HERE.parents[1] / "migrations"
MIGRATIONS = _PACKAGED if _PACKAGED.is_dir() else _HERE.parents[3] / "migrations"  # the second: an editable install


class Unit:
    """One transaction."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.after_commit: list[Callable[[], None]] = []
        """Functions to call after the commit, for what this process remembers."""


class Database:
    """An engine that is migrated to head, with one way to read and one way to write.

    Without `migrate` a database that is not there, or of another version, is refused and not changed.
    """

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        if not migrate:
            with connected(url, must_exist=True) as connection:
                _refuse_other_version(connection)
        self.engine = _create_engine(url)
        is_sqlite = self.engine.dialect.name == "sqlite"
        if is_sqlite and migrate:
            _hide_from_others(self.engine.url.database)
        self._writing_engine = self.engine.execution_options(writes=True)
        self._explained = partial(_explained, self.engine)
        self.where = without_password(self.engine.url)
        self.num_writers = 1 if is_sqlite else 2
        """So many threads that write are of use."""
        self._turn: AbstractContextManager[Any] = _Turn(_timeout_s(self.engine.url)) if is_sqlite else nullcontext()
        self._file: tuple[str, tuple[int, int] | None] | None = None
        self._idle_writers: list[Connection] = []
        try:
            with self.writing() if migrate else self.reading() as connection:
                if migrate and connection.dialect.name == "postgresql":
                    _take_turn_on_postgresql(connection)
                if migrate:
                    _migrate(connection)
                path = sqlite_file(connection)
            if path:
                self._file = path, _identity(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        for connection in self._idle_writers:
            connection.close()
        self._idle_writers.clear()
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with self._explained():
            self._check_file()
            with self.engine.connect() as connection, self._begun(connection):
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits at the end of the block, or does nothing when the block raises."""
        with self._turn, self._explained():
            self._check_file()
            with self._writer() as connection, self._begun(connection):
                yield connection
                connection.commit()

    @contextmanager
    def _writer(self) -> Iterator[Connection]:
        """A connection that writes. It is kept for the next transaction: to take it from the pool and to give it back
        costs as much as storing a frame."""
        try:
            connection = self._idle_writers.pop()
        except IndexError:
            connection = self._writing_engine.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._idle_writers) < self.num_writers:
            self._idle_writers.append(connection)
        else:
            connection.close()

    @contextmanager
    def _begun(self, connection: Connection) -> Iterator[None]:
        """A transaction on this connection."""
        try:
            connection.begin()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            # The server was restarted since this connection was used; nothing has been done on it, so another one
            # does as well. The pool has dropped all of its age.
            connection.rollback()
            connection.begin()
        try:
            yield
        except self.engine.dialect.loaded_dbapi.Error as error:
            if self.engine.dialect.is_disconnect(error, connection.connection.dbapi_connection, None):
                connection.invalidate()
            raise

    def give_back(self, num_pages: int) -> bool:
        """Make a SQLite file shorter by at most so many pages that hold nothing; False where there is none to give."""
        if self._file is None:
            return False  # PostgreSQL does it by itself
        with self._turn, self._explained(), self._without_transaction() as connection:
            ((is_able,),) = connection.execute("SELECT auto_vacuum = 2 FROM pragma_auto_vacuum")
            ((num_unused,),) = connection.execute("PRAGMA freelist_count")
            if is_able and num_unused:
                connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")  # `execute` frees a single page
        return bool(is_able and num_unused > num_pages)

    def checkpoint(self) -> None:
        """Let SQLite move its log into the file, as far as nobody reads the log: only then is the file shorter."""
        if self._file is not None:
            with self._explained(), self._without_transaction() as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextmanager
    def _without_transaction(self) -> Iterator[sqlite3.Connection]:
        self._check_file()
        with closing(self.engine.raw_connection()) as pooled:
            assert isinstance(pooled.driver_connection, sqlite3.Connection)
            yield pooled.driver_connection

    def _check_file(self) -> None:
        # SQLite goes on writing to a file that has no name any more: all is well until the process ends, then all is
        # lost. Refused, writers keep their frames and send them again.
        if self._file is not None and _identity(self._file[0]) != self._file[1]:
            raise StoreError(
                f"the database file {self._file[0]} was deleted, moved or replaced while the service ran; move it "
                "back, or restart the service to begin a new one"
            )

    def vacuum(self) -> None:
        """Give all space back that holds nothing. SQLite needs as much again meanwhile, and lets nobody write."""
        with self._turn, self._explained():
            self._check_file()
            if self._file is None:
                with closing(self.engine.raw_connection()) as pooled, closing(pooled.cursor()) as cursor:
                    cursor.execute("VACUUM (FULL, ANALYZE)")
                return
            with self._without_transaction() as raw:
                raw.executescript("PRAGMA auto_vacuum = INCREMENTAL; VACUUM")
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def gives_back(self) -> bool:
        """Whether space is given back as soon as it is free, without `vacuum`: not by a SQLite file of an old version."""
        if self._file is None:
            return True
        with self._explained(), self._without_transaction() as raw:
            return bool(raw.execute("PRAGMA auto_vacuum").fetchone()[0])

    def size_bytes(self) -> int:
        """Of all that it takes on the disk, logs of SQLite included."""
        if self._file is None:
            with self.reading() as connection:
                size = connection.exec_driver_sql("SELECT pg_database_size(current_database())")
                return int(size.scalar_one())
        return sum(
            Path(self._file[0] + end).stat().st_size for end in ("", "-wal") if os.path.exists(self._file[0] + end)
        )

    def problems(self) -> list[str]:
        """What the engine itself finds wrong with its pages and indexes."""
        if self._file is None:
            return []  # PostgreSQL has no such question; its own checksums speak up when a page is read
        try:
            with self._without_transaction() as raw:
                return [text for (text,) in raw.execute("PRAGMA integrity_check") if text != "ok"]
        except sqlite3.DatabaseError as error:  # so bad that it cannot go on
            return [str(error)]


@contextmanager
def connected(url: str, *, must_exist: bool = False) -> Iterator[Connection]:
    """A connection to a database as it is, of whichever version, to look at it. A file that is new goes where the block
    raises."""
    engine = _create_engine(url)
    path = engine.url.database if engine.dialect.name == "sqlite" else None
    is_to_go = not must_exist and _hide_from_others(path)
    try:
        if must_exist and path is not None and not os.path.exists(path):
            raise StoreError(f"expected a database, found no file {path}; `tsemon serve` makes a new one")
        with _explained(engine), engine.connect() as connection:
            if path is None:  # SQLite's were looked at when it was opened
                _refuse_foreign_tables(connection)
            if must_exist and not inspect(connection).has_table("alembic_version"):
                raise StoreError(f"expected a database of tsemon, {without_password(url)} has no tables")
            yield connection
            is_to_go = False
    finally:
        engine.dispose()
        if is_to_go and path is not None:
            os.unlink(path)


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    driver = engine.dialect.loaded_dbapi
    try:
        yield
    except OutOfConnections as error:
        where = without_password(engine.url)
        raise StoreError(f"all connections to the database {where} are in use; send it again") from error
    except (DBAPIError, driver.Error) as error:  # what goes past SQLAlchemy raises the driver's own
        original = getattr(error, "orig", None) or error
        if isinstance(original, driver.DataError):
            raise InvalidArgument(f"no database takes this value: {reason(original)}") from error
        is_connecting = isinstance(error, DBAPIError) and error.statement is None
        is_slip = isinstance(original, driver.IntegrityError | driver.ProgrammingError) and not is_connecting
        if is_slip and getattr(original, "sqlstate", None) != _NO_PRIVILEGE:
            raise
        needs = _NEEDS[engine.dialect.name]
        where = without_password(engine.url)
        raise StoreError(f"the database {where} cannot be used: {reason(original)}; {needs}") from error


_LOOK_EVERY_S = 0.002
"""How often a writer looks whether a SQLite file is free."""
_BUSY_S = 0.1
"""For how long at a stretch a process keeps it from others."""


class _Turn:
    """SQLite has one writer at a time. Threads of this process queue up here, in order and without polling.

    None waits for longer than it would for another process. If they waited for each other's waiting, a database that is
    locked from outside would soon have all threads of the service, and nobody could read. While they write without pause,
    they leave the file to other processes now and then, for long enough that those see it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._one_writer = threading.Lock()
        self._busy_since = self._released_at = 0.0

    def __enter__(self) -> None:
        if not self._one_writer.acquire(timeout=self._timeout_s):
            raise StoreError(f"others have been writing to the database for {self._timeout_s:g} s; send it again")
        if time.monotonic() - self._released_at > 2 * _LOOK_EVERY_S:
            self._busy_since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        try:
            if time.monotonic() - self._busy_since > _BUSY_S:
                time.sleep(2 * _LOOK_EVERY_S)
                self._busy_since = time.monotonic()
        finally:  # an interrupt passes
            self._released_at = time.monotonic()
            self._one_writer.release()


def without_password(url: str | URL) -> str:
    """The URL of a database as it may be shown, and as its user would write it."""
    shown = make_url(url)
    hidden = {name: "***" for name in SECRETS if name in shown.query}
    if shown.get_backend_name() == "postgresql":
        shown = shown.set(drivername="postgresql")
    return shown.update_query_dict(hidden).render_as_string(hide_password=True)


def insert_missing(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows whose key is not there yet."""
    connection.execute(_insert_missing(connection, table), list(rows))


def insert_if_missing(connection: Connection, table: Table, row: dict[str, Any]) -> bool:
    """Insert the row unless its key is there; whether it was not."""
    added = connection.execute(_insert_missing(connection, table).returning(*table.primary_key), row)
    return added.first() is not None


def _insert_missing(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing()


def _spelled(function: type[FunctionElement[Any]], **sql: str) -> None:
    """Tell how each engine spells the function, with its arguments as {0}, {1}."""
    for engine, template in sql.items():

        @compiles(function, engine)
        def _in_sql(element: FunctionElement[Any], compiler: Any, template: str = template, **options: Any) -> str:
            return template.format(*(compiler.process(clause, **options) for clause in element.clauses))


class num_items(FunctionElement[int]):
    """How many items a list has that is kept as JSON, without reading it into this process."""

    type = Integer()
    inherit_cache = True


_spelled(num_items, sqlite="json_array_length({0})", postgresql="json_array_length(({0})::json)")


class fits_pattern(FunctionElement[bool]):
    """Whether a text, the first argument, fits a pattern, the second: * is any characters, ? is one."""

    type = Boolean()
    inherit_cache = True


@compiles(fits_pattern, "sqlite")
def _as_glob(element: fits_pattern, compiler: Any, **options: Any) -> str:
    text, pattern = element.clauses
    return str(compiler.process(text.op("GLOB")(func.replace(pattern, "[", "[[]")), **options))


@compiles(fits_pattern, "postgresql")
def _as_like(element: fits_pattern, compiler: Any, **options: Any) -> str:
    text, pattern = element.clauses
    for sign, instead in (("\\", "\\\\"), ("%", "\\%"), ("_", "\\_"), ("*", "%"), ("?", "_")):
        pattern = func.replace(pattern, sign, instead)
    return str(compiler.process(text.op("LIKE")(pattern), **options))


class contains_text(FunctionElement[bool]):
    """Whether a text, the first argument, has another in it, which is in lower case; capitals are no others."""

    type = Boolean()
    inherit_cache = True


# SQLite's own LIKE knows the letters of ASCII.
_spelled(contains_text, sqlite="tsemon_contains({0}, {1})", postgresql="(strpos(lower({0}), {1}) > 0)")


def _contains(text: str, part: str) -> bool:
    return part in text.lower()


class items_of(FunctionElement[Any]):
    """The items of a list of texts that is kept as JSON, as a table with one column, `value`."""

    inherit_cache = True


_spelled(items_of, sqlite="json_each({0})", postgresql="json_array_elements_text(({0})::json)")


class item_at(FunctionElement[Any]):
    """The item at a place, the second argument, of a list that is kept as JSON, as text or as this number."""

    inherit_cache = True


_spelled(item_at, sqlite="json_extract({0}, '$[' || {1} || ']')", postgresql="(({0})::json ->> {1})")


class value_of(FunctionElement[Any]):
    """The value of a key, the second argument, of an object that is kept as JSON; null if it lacks the key."""

    inherit_cache = True


_spelled(value_of, sqlite="json_extract({0}, '$.' || {1})", postgresql="(({0})::json ->> {1})")


def table_of(name: str, **columns: type[TypeEngine[Any]]) -> CTE:
    """Rows that come as one parameter of this name, a JSON list of lists.

    So a statement is compiled once, however many rows it gets. Materialized, or SQLite would parse them once per row of
    the table that they are joined with.
    """
    row = items_of(bindparam(name, type_=Text)).table_valued("value").c.value
    items = (
        cast(item_at(row, literal_column(str(at))), of).label(column) for at, (column, of) in enumerate(columns.items())
    )
    return select(*items).cte(name).prefix_with("MATERIALIZED")


def _create_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgres":  # as many hosts hand it out
            parsed = parsed.set(drivername="postgresql")
        backend = parsed.get_backend_name()
        if backend == "postgresql":
            return _create_postgresql_engine(parsed)
        if backend == "sqlite":
            return _create_sqlite_engine(parsed)
        raise ArgumentError(f"expected postgresql or sqlite, got {backend}")
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise InvalidArgument(
            "expected a database URL like sqlite:///tsemon.db or postgresql://user@host/database, got one that does "
            f"not open: {error}"
        ) from error


def _create_postgresql_engine(url: URL) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    try:
        engine = create_engine(url, pool_size=POOL_SIZE, max_overflow=0, pool_timeout=POOL_TIMEOUT_S)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"PostgreSQL needs a driver ({error}); pip install 'tsemon[postgres]'") from error
    event.listen(engine, "connect", _on_postgresql_connect, insert=True)  # before SQLAlchemy looks at it
    event.listen(engine, "begin", _on_postgresql_begin)
    return engine


def _create_sqlite_engine(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise InvalidArgument(f"expected a database file, as in sqlite:///tsemon.db, got {str(url)!r}")
    engine = create_engine(url, connect_args={"timeout": _timeout_s(url)}, pool_size=8, max_overflow=40)
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _hide_from_others(path: str | None) -> bool:
    """A new file is for its owner alone: it says a good deal about what is trained. The files beside it follow it.

    Whether it is new.
    """
    if path is not None and not path.startswith("file:"):
        with suppress(OSError):  # it is there, or cannot be made, which is told later
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            return True
    return False


def _timeout_s(url: URL) -> float:
    """How long to wait for a locked SQLite database, which its URL may say."""
    return float(str(url.query.get("timeout", BUSY_TIMEOUT_S)))


def _on_postgresql_connect(connection: Any, _: ConnectionPoolEntry) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":  # SQL_ASCII, say, where it was set up without a locale
        connection.close()
        raise StoreError(
            f"expected a database with the encoding UTF8, got one with {encoding}; make another, with "
            "CREATE DATABASE tsemon ENCODING 'UTF8' TEMPLATE template0"
        )
    connection.autocommit = True  # transactions begin when we say so, see below
    # What was acknowledged survives a crash, whatever the server's setting. A lock that another process holds, and has
    # stopped with, keeps nobody for long.
    connection.execute(f"SET synchronous_commit = on; SET lock_timeout = '{POOL_TIMEOUT_S}s'")


def _on_postgresql_begin(connection: Connection) -> None:
    # The driver would wait with this for the first statement. Said here, it tells in time whether the server still
    # knows the connection. Writers see what others commit meanwhile, and lock the run that they write to.
    writes = connection.get_execution_options().get("writes", False)
    begin = _BEGIN_WRITING if writes else "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
    try:
        connection.connection.driver_connection.execute(begin)  # type: ignore[union-attr]
    except connection.dialect.loaded_dbapi.Error:
        connection.exec_driver_sql(begin)  # fails again, now so that SQLAlchemy knows of it


# The server gives up a transaction whose process has stopped, and with it the locks that others wait for.
_BEGIN_WRITING = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '30s'"


def _take_turn_on_postgresql(connection: Connection) -> None:
    """Wait for other processes that migrate; then refuse a database whose tables are somebody else's."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = 0")  # however long a migration takes
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION})")
    _refuse_foreign_tables(connection)


def _refuse_foreign_tables(connection: Connection) -> None:
    tables = connection.exec_driver_sql("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()").scalars()
    _refuse_foreign(set(tables), without_password(connection.engine.url))


def sqlite_file(connection: Connection) -> str:
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
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    try:
        # Before anything is changed, the journal mode too.
        _refuse_foreign(tables, connection.execute(_MAIN_FILE).fetchone()[0])
    except StoreError:
        connection.close()
        raise
    connection.isolation_level = None  # transactions begin when we say so, see below
    if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts in a new file only, and only before this:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.create_function("tsemon_contains", 2, _contains, deterministic=True)
    connection.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power cut


def _refuse_foreign(tables: Set[str], where: str) -> None:
    """Raise StoreError for a database whose tables are somebody else's, with or without migrations of their own."""
    if not (tables <= {"alembic_version"} or tables >= {"alembic_version", "run"}):
        raise StoreError(
            f"expected a database of tsemon or a new one, got {where} with tables of another program "
            f"({', '.join(sorted(tables)[:3])}); it is left as it is, choose another"
        )


def _on_sqlite_begin(connection: Connection) -> None:
    # A transaction that reads first and writes later fails when another process wrote in between; one that takes the
    # lock at its start waits for its turn instead.
    if connection.get_execution_options().get("writes", False):
        _begin_writing_on_sqlite(connection)
    else:
        connection.exec_driver_sql("BEGIN")


def _begin_writing_on_sqlite(connection: Connection) -> None:
    """Take the lock within the time that the URL allows.

    SQLite by itself looks every 100 ms. A process with much to write gives the lock up for a few milliseconds at a time, so
    that another, which settles frames or serves beside it, would seldom have its turn.
    """
    timeout_s = _timeout_s(connection.engine.url)
    deadline = time.monotonic() + timeout_s
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_EVERY_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {round(timeout_s * 1000)}")


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """Whether another process has a SQLite file. Above the low byte the code says why, such as a journal to be read."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _migrate(connection: Connection) -> None:
    """Bring the tables to head. The caller's transaction holds the write lock, so two processes can start at once."""
    if MigrationContext.configure(connection).get_current_revision() == _head():
        return  # without Alembic, which would load every migration again
    config = _migrations()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"the database was written by a newer tsemon, install that version: {error}") from error


def _migrations() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


@cache
def _head() -> str | None:
    """The revision of this version."""
    return ScriptDirectory.from_config(_migrations()).get_current_head()


def is_known_revision(revision: str) -> bool:
    """Whether `_migrate` knows how to go on from there."""
    return revision in {known.revision for known in ScriptDirectory.from_config(_migrations()).walk_revisions()}


def _refuse_other_version(connection: Connection) -> None:
    found = MigrationContext.configure(connection).get_current_revision()
    if found != _head():
        raise StoreError(
            f"expected a database of this version (revision {_head()}), got revision {found}; `tsemon serve` of this "
            "version brings an older one up to date"
        )

"""Copies of a whole database: by SQLite's online backup, or by PostgreSQL's own programs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL, Connection, func, inspect, make_url, select

from tsemon.errors import InvalidArgument, MissingPackage, StoreError
from tsemon_server.store import schema
from tsemon_server.store.engine import BUSY_TIMEOUT_S, SECRETS, Database, connected, is_known_revision, sqlite_file
from tsemon_server.store.ledger import tables as ledger
from tsemon_server.store.ledger.leases import SETTLING

_OURS = frozenset({"alembic_version", "run", "frame"})
"""Tables of every version, by which a backup of ours is known."""


def backup(url: str, path: Path) -> None:
    """Write what the database holds now to a new file. A service may go on meanwhile. Raises TsemonError."""
    if path.exists():
        raise InvalidArgument(f"expected the name of a new file, got {path}, which is there; choose another name")
    with connected(url, must_exist=True) as connection:
        source = sqlite_file(connection)
    partial = path.with_name(f"{path.name}.partial")
    try:
        if source:
            _copy(source, str(partial))
            _make_one_file(partial)
        else:
            _run("pg_dump", "--format=custom", f"--file={partial}", url=url)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        raise StoreError(f"the backup {path} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def restore(url: str, path: Path, now: float, *, force: bool) -> None:
    """Put a backup in place of all that the database holds, which are no runs unless `force`. Raises TsemonError.

    All of it is there afterwards, or nothing has changed.
    """
    if not path.is_file():
        raise InvalidArgument(f"expected a file that `tsemon admin backup` wrote, got {path}, which is none")
    with connected(url) as connection:
        target = sqlite_file(connection)
        tables = {*inspect(connection).get_table_names()}
        _refuse_overwriting(connection, tables, now, force)
        if target:
            _check_sqlite_backup(path)
        else:
            _check_postgresql_backup(path, tables)
    if target:
        _copy(str(path), target)
    else:
        _run(
            "pg_restore", "--clean", "--if-exists", "--no-owner", "--single-transaction", "--exit-on-error",
            str(path), url=url,
        )  # fmt: skip
    database = Database(url)  # brings a backup of an older version up to date
    with database.writing() as connection:
        connection.execute(ledger.lease.delete())  # those of the time of the backup
    database.close()


def _refuse_overwriting(connection: Connection, tables: set[str], now: float, force: bool) -> None:
    held_until = select(func.max(ledger.lease.c.until)).where(ledger.lease.c.work != SETTLING)
    in_use_until = connection.execute(held_until).scalar_one() if "lease" in tables else None
    if in_use_until is not None and in_use_until > now:
        raise StoreError(
            "a service uses the database now, or was killed less than a minute ago; stop it, and try again after a minute"
        )
    num_runs = connection.execute(select(func.count()).select_from(ledger.run)).scalar_one() if "run" in tables else 0
    if num_runs and not force:
        raise InvalidArgument(
            f"expected a database without runs, got one with {num_runs}; give another --database, or replace "
            "all that it holds with --force"
        )


# -- SQLite


def _copy(source: str, target: str) -> None:
    """All pages in one step, as they are at one moment, in one transaction of the target."""
    try:
        with closing(sqlite3.connect(source)) as reader, closing(_opened(target)) as writer:
            reader.backup(writer)
    except sqlite3.Error as error:
        raise StoreError(f"{source} cannot be copied to {target}: {error}") from error


def _opened(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)


def _make_one_file(path: Path) -> None:
    """Without a log beside it, and all of it on the disk."""
    with closing(_opened(str(path))) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()


def _check_sqlite_backup(path: Path) -> None:
    try:
        with closing(_opened(str(path))) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            problems = [text for (text,) in connection.execute("PRAGMA integrity_check(3)") if text != "ok"]
            revision = (
                connection.execute("SELECT version_num FROM alembic_version").fetchone() if tables >= _OURS else ()
            )
    except sqlite3.Error as error:
        raise StoreError(f"the backup {path} cannot be read: {error}") from error
    if problems:
        raise StoreError(f"the backup {path} is damaged: {problems[0]}")
    if not tables >= _OURS:
        raise StoreError(f"expected a backup of a tsemon database, got {path} with other tables")
    if not is_known_revision(revision[0] if revision else ""):
        raise StoreError(f"the backup {path} was written by a newer tsemon; install that version")


# -- PostgreSQL


def _check_postgresql_backup(path: Path, tables: set[str]) -> None:
    # A line of the list: 215; 1259 16386 TABLE public run owner
    listed = _run("pg_restore", "--list", str(path)).splitlines()
    held = {words[5] for line in listed if (words := line.split())[3:4] == ["TABLE"] and len(words) > 5}
    if not held >= _OURS:
        raise StoreError(f"expected a backup of a tsemon database, got {path} with other tables")
    if newer := (tables & {*schema.metadata.tables}) - held:
        raise StoreError(
            f"the backup {path} is of an older version, without {', '.join(sorted(newer))}; restore it to an empty "
            "database, which is then brought up to date"
        )


def _run(program: str, *arguments: str, url: str | None = None) -> str:
    """What the program prints. A password goes into its environment, where other users cannot see it."""
    environment = dict(os.environ)
    if url is not None:
        parsed = make_url(url)
        password = parsed.password or parsed.query.get("password")
        if password is not None:
            environment["PGPASSWORD"] = str(password)
        query = {name: value for name, value in parsed.query.items() if name not in SECRETS}
        where = URL.create("postgresql", parsed.username, None, parsed.host, parsed.port, parsed.database, query)
        arguments = (*arguments, f"--dbname={where.render_as_string()}")
    try:
        done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise MissingPackage(
            f"this needs the program {program}, which comes with PostgreSQL's client; install it, as with "
            "`apt install postgresql-client`, in a version no older than the server's"
        ) from error
    if done.returncode:
        raise StoreError(f"{program} failed: {(done.stderr.strip() or 'without a word').splitlines()[0]}")
    return done.stdout

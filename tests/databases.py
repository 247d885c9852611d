"""Real databases for tests: a new file, or a database of its own on a PostgreSQL that is started for the session."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psutil
from sqlalchemy import NullPool, create_engine, make_url, text

from tsemon_server.store import Store, schema
from tsemon_server.store import engine as store_engine

ENGINES = ("sqlite", "postgresql")

_DELETE_ALL = "; ".join(
    [
        *(f"DELETE FROM {table}" for table in schema.metadata.tables),
        *(f"ALTER SEQUENCE {table}_{table}_id_seq RESTART" for table in ("alert", "incident", "silence")),
    ]
)

_END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)

_CLEAN_UP = """
import os, shutil, signal, sys, time
from pathlib import Path
sys.stdin.read()  # ends with the tests, however they end
folder = Path(sys.argv[1])
try:
    pid = int((folder / "data/postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGQUIT)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
except (FileNotFoundError, ProcessLookupError):
    pass
shutil.rmtree(folder, ignore_errors=True)
"""


def share_compiled_statements():
    """Let all engines of a kind share what SQLAlchemy compiles: for a test of five requests that is a third of the time.

    SQLAlchemy keeps it per engine, and finds it by the engine's dialect.
    """
    create, first = store_engine._create_engine, {}

    def create_sharing(url):
        engine = create(url)
        shared = first.setdefault(engine.name, engine)
        engine.dialect = engine.pool._dialect = shared.dialect
        engine._compiled_cache = shared._compiled_cache
        return engine

    store_engine._create_engine = create_sharing


class Database:
    """One empty database. `url` is what users would write."""

    engine = "sqlite"

    def __init__(self, url):
        self.url = url

    def execute(self, statement, **values):
        """Run one statement past the store, and commit; its rows where it gives any."""
        engine = create_engine(with_driver(self.url), poolclass=NullPool)
        with engine.begin() as connection:
            result = connection.execute(text(statement), values)
            return result.all() if result.returns_rows else []


class SqliteFile(Database):
    def __init__(self, path):
        super().__init__(f"sqlite:///{path}")
        self.path = Path(path)

    def migrate(self):
        """Give it today's tables: the migrations take ten times as long as a copy of what they make."""
        self.path.write_bytes(_migrated_file())


@cache
def _migrated_file():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tsemon.db")
        Store(f"sqlite:///{path}").close()
        return path.read_bytes()


class PostgresDatabase(Database):
    """A database on `server`, which can be stopped, killed and started again."""

    engine = "postgresql"

    def __init__(self, server, name):
        super().__init__(server.url_of(name))
        self.server, self.name = server, name


class PostgresServer:
    """A PostgreSQL with a folder and a socket of its own, safe against power cuts as any other."""

    def __init__(self):
        self._programs = _find_programs()
        self._user = _harmless_user()
        self._numbers = count()
        self._clean = []
        self._process = None
        self._folder = Path(tempfile.mkdtemp(prefix="tsemon-postgresql-"))
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._log = (self._folder / "log").open("wb")
        command = [sys.executable, "-c", _CLEAN_UP, self._folder]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def create(self):
        # Text sorts as people sort it, not by bytes: what would go wrong on such a database goes wrong here.
        collation = ("--encoding=UTF8", "--locale=C", "--locale-provider=icu", "--icu-locale=en-US")
        access = ("--username=tsemon", "--auth=trust", "--no-sync")  # this one command need not survive a power cut
        assert self._spawn("initdb", "--pgdata=data", *collation, *access).wait() == 0, self.log()
        self.start()
        Store(self.url_of(self._create("migrated", "template1"))).close()

    @staticmethod
    def is_installed():
        return _find_programs() is not None

    def url_of(self, name):
        return f"postgresql://tsemon@/{name}?host={quote(str(self._folder), safe='')}"

    def log(self):
        return (self._folder / "log").read_text()

    def new_database(self):
        """One without tables."""
        return PostgresDatabase(self, self._create(f"empty{next(self._numbers)}", "template1"))

    @contextmanager
    def borrowed(self):
        """One with today's tables, all empty: migrations take most of a second, deleting all rows hardly any."""
        if not self._clean:
            self._clean.append(PostgresDatabase(self, self._create(f"test{next(self._numbers)}", "migrated")))
        database = self._clean.pop()
        yield database
        self.start()
        database.execute(_END_CONNECTIONS)
        database.execute(_DELETE_ALL)
        self._clean.append(database)

    def drop(self, database):
        self.maintain(f"DROP DATABASE {database.name} WITH (FORCE)")

    def start(self):
        """Start it where it does not run, and wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        options = ("-D", "data", "-k", str(self._folder), "-c", "listen_addresses=", "-c", "max_connections=200")
        self._process = self._spawn("postgres", *options)
        deadline = time.monotonic() + 60
        while self._spawn("pg_isready", "--quiet", f"--host={self._folder}").wait() != 0:
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def stop(self, number=signal.SIGINT):
        """Break off what runs, write everything down, end; with SIGQUIT, end at once."""
        self._process.send_signal(number)
        self._process.wait(60)

    def kill(self):
        """SIGKILL to all its processes: what it had not written to its log is lost."""
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        self._process.wait()
        psutil.wait_procs(processes, 60)

    def remove(self):
        if self._process is not None and self._process.poll() is None:
            self.stop()
        self._log.close()
        self._cleaner.communicate()

    def _create(self, name, template):
        self.maintain(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def maintain(self, statement):
        """What is no part of a transaction."""
        engine = create_engine(with_driver(self.url_of("postgres")), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))

    def _spawn(self, program, *arguments):
        as_user = {} if self._user is None else {"user": self._user.pw_uid, "group": self._user.pw_gid}
        return subprocess.Popen(
            [self._programs / program, *arguments],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            extra_groups=None if self._user is None else (),
            **as_user,
        )


def with_driver(url):
    parsed = make_url(url)
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


def _find_programs():
    """The folder of PostgreSQL's programs; Debian has the server's outside of the path, one folder a version."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = shutil.which("initdb") or (debian and debian[-1])
    return Path(found).resolve().parent if found else None


def _harmless_user():
    """Whom to run it as: root is refused."""
    if os.geteuid() != 0:
        return None
    known = {user.pw_name: user for user in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]

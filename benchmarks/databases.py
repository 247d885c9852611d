"""Databases on either engine, and the service in front of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
from sqlalchemy import create_engine, text


class Engine(Protocol):
    """A database engine with databases by name."""

    name: str
    version: str

    def url(self, database: str) -> str: ...

    def cpu_s(self) -> float:
        """What processes of its own have used so far."""

    def tidy(self, database: str) -> None:
        """Do at once what the engine does within minutes: bring all to its place, find the space that is free."""

    def size_bytes(self, database: str) -> int:
        """What the database takes on the disk."""

    def drop(self, database: str) -> None:
        """Forget it where it is there."""

    def close(self) -> None: ...


class SQLite:
    name = "SQLite"
    version = sqlite3.sqlite_version

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def url(self, database: str) -> str:
        return f"sqlite:///{self._path(database)}"

    def cpu_s(self) -> float:
        return 0.0  # it runs in its users' processes

    def tidy(self, database: str) -> None:
        _execute(self.url(database), "PRAGMA wal_checkpoint(TRUNCATE)")

    def size_bytes(self, database: str) -> int:
        return self._path(database).stat().st_size

    def drop(self, database: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path(database)}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _path(self, database: str) -> Path:
        return self._folder / f"{database}.db"


class PostgreSQL:
    """A server of its own with default settings, on a free port of this machine."""

    name = "PostgreSQL"

    def __init__(self, folder: Path) -> None:
        self._data = folder / "postgresql"
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.getuid() == 0 else None
        if not (self._data / "PG_VERSION").exists():
            self._data.mkdir(mode=0o700)
            if self._user is not None:
                folder.chmod(0o711)  # its user has to walk through
                subprocess.run(["chown", self._user, self._data], check=True)
            self._run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8")
        self._port = _free_port()
        options = f"-c listen_addresses=127.0.0.1 -c port={self._port} -c unix_socket_directories="
        self._run("pg_ctl", "start", "--wait", "--options", options, "--log", str(self._data / "log"))
        self.version = self._query("postgres", "SHOW server_version")[0].split()[0]
        self._server = psutil.Process(int((self._data / "postmaster.pid").read_text().split()[0]))

    def url(self, database: str) -> str:
        if database not in self._query("postgres", "SELECT datname FROM pg_database"):
            _execute(self._url("postgres"), f"CREATE DATABASE {database}")
        return self._url(database)

    def cpu_s(self) -> float:
        ended = self._server.cpu_times()
        return _cpu_s(self._server) + ended.children_user + ended.children_system

    def tidy(self, database: str) -> None:
        _execute(self._url(database), "VACUUM ANALYZE", "CHECKPOINT")

    def size_bytes(self, database: str) -> int:
        # Tables of ours, with their indexes.
        size = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND oid > 16383"
        (found,) = self._query(database, size)
        return int(found)

    def drop(self, database: str) -> None:
        _execute(self._url("postgres"), f"DROP DATABASE IF EXISTS {database}")

    def close(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "--mode", "fast")

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/{database}"

    def _query(self, database: str, question: str) -> list[Any]:
        """The first column of the answer."""
        engine = create_engine(self._url(database))
        with engine.connect() as connection:
            found = list(connection.execute(text(question)).scalars())
        engine.dispose()
        return found

    def _run(self, program: str, *arguments: str) -> None:
        command = [_found(program), "--pgdata", str(self._data), *arguments]
        subprocess.run(command, user=self._user, cwd="/", stdout=subprocess.DEVNULL, check=True)


class Service:
    """`tsemon serve` in a process of its own, and a client of it."""

    def __init__(self, engine: Engine, database: str) -> None:
        self._engine = engine
        command = [sys.executable, "-m", "tsemon", "serve", "--port", "0", "--database", engine.url(database)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()  # tsemon serves http://... from ...
        if not said:
            raise RuntimeError(f"the service did not start on {engine.name}; what it says of it stands above")
        self.url = said.split()[2]
        self._client = httpx.Client(base_url=f"{self.url}/api/v1", timeout=600, trust_env=False)
        self._server = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def get(self, path: str, **query: Any) -> Any:
        return self._client.get(path, params=query).raise_for_status().json()

    def post(self, path: str, body: bytes | None = None, **fields: Any) -> Any:
        content = json.dumps(fields).encode() if body is None else body
        return self._client.post(path, content=content).raise_for_status().json()

    def cpu_s(self) -> float:
        """What the service and its engine have used so far."""
        return self.own_cpu_s() + self.engine_cpu_s()

    def own_cpu_s(self) -> float:
        return _cpu_s(self._server)

    def engine_cpu_s(self) -> float:
        return self._engine.cpu_s()

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.communicate()


def _found(program: str) -> str:
    """Debian has the programs of the server in folders of their own, one per version."""
    folders = [os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        raise RuntimeError(f"expected PostgreSQL's {program}, found none; install postgresql or give --engines sqlite")
    return found


def _execute(url: str, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def _cpu_s(process: psutil.Process) -> float:
    """Of the process and its living children."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # its parent counts it from now on
            continue
        total += times.user + times.system
    return total


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


ENGINES: dict[str, Callable[[Path], Engine]] = {"sqlite": SQLite, "postgresql": PostgreSQL}

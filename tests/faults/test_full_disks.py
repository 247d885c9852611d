"""Disks that are full, of a trainer and of a service. Once there is room again, everything arrives."""

import contextlib
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from tests.databases import SqliteFile
from tests.faults.counting import assert_all_arrived, stored_frames
from tests.faults.disks import LimitedFiles, SmallDisk, mounted
from tests.faults.processes import await_true
from tsemon.transport import sync


@contextlib.contextmanager
def small_disk(kind, tmp_path):
    if kind == "limited":
        yield LimitedFiles(tmp_path)
        return
    with mounted(tmp_path / "disk", "16m") as folder:
        yield SmallDisk(folder)


@contextlib.contextmanager
def sqlite(kind, request):
    with small_disk(kind, request.getfixturevalue("tmp_path")) as disk:
        yield disk, SqliteFile(disk.folder / "tsemon.db")


@contextlib.contextmanager
def postgresql(_kind, request):
    """Tables in a place of their own. What the server writes ahead goes elsewhere."""
    server = request.getfixturevalue("postgresql_server")
    home = Path(make_url(server.url_of("postgres")).query["host"])
    with mounted(home / "small", f"32m,uid={home.stat().st_uid}") as folder:
        server.maintain(f"CREATE TABLESPACE small LOCATION '{folder}'")
        database = server.new_database()
        server.maintain(f"ALTER DATABASE {database.name} SET TABLESPACE small")
        yield SmallDisk(folder), database
        server.drop(database)
        server.maintain("DROP TABLESPACE small")


class TestATrainerWhoseDiskIsFull:
    @pytest.fixture(params=["small", pytest.param("limited", marks=pytest.mark.thorough)])
    def disk(self, request, tmp_path):
        with small_disk(request.param, tmp_path) as disk:
            yield disk

    @pytest.fixture
    def database(self, sqlite_file):
        return sqlite_file

    def test_writes_everything_down_once_there_is_room(self, disk, service, train, http):
        service.kill()
        trainer = train(service.url, spool_dir=disk.folder / "spool")
        trainer.await_made(20)
        disk.fill(trainer.pid)
        await_true(lambda: trainer.told.is_in_memory, "the disk is full")
        trainer.await_made(100)
        disk.free(trainer.pid)
        await_true(lambda: not trainer.told.is_in_memory, "the folder is used again")
        trainer.await_made(10)
        trainer.kill()
        service.start()
        sync(disk.folder / "spool", service.url)
        seqs = stored_frames(service.database, "rank0")
        assert seqs == list(range(len(seqs)))
        assert len(seqs) - trainer.told.num_made in (0, 1)

    def test_delivers_from_memory_meanwhile(self, disk, service, train):
        trainer = train(service.url, spool_dir=disk.folder / "spool")
        trainer.await_sent(20)
        disk.fill(trainer.pid)
        await_true(lambda: trainer.told.is_in_memory, "the disk is full")
        trainer.await_sent(100)
        disk.free(trainer.pid)
        assert_all_arrived(service, {"rank0": trainer.finish()})


class TestADatabaseWhoseDiskIsFull:
    @pytest.fixture(
        params=[(sqlite, "small"), (sqlite, "limited"), (postgresql, "small")],
        ids=["sqlite", "sqlite-limited", "postgresql"],
    )
    def place(self, request):
        engine, kind = request.param
        with engine(kind, request) as place:
            yield place

    @pytest.fixture
    def disk(self, place):
        return place[0]

    @pytest.fixture
    def database(self, place):
        return place[1]

    def test_takes_what_waited_once_there_is_room(self, disk, service, train, http):
        trainer = train(service.url)
        trainer.await_sent(20)
        confirmed = [http.send([0], "witness")]
        disk.fill(service.pid)

        def is_refused():
            try:
                confirmed.append(http.send([len(confirmed)], "witness"))
            except httpx.HTTPStatusError as error:
                return error.response.json()["error"] == "store_unavailable"
            return False

        await_true(is_refused, "the disk is full")
        trainer.await_made(100)
        disk.free(service.pid)
        num_frames = {"rank0": trainer.finish(), "witness": len(confirmed)}
        assert_all_arrived(service, num_frames)

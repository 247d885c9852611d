"""`tsemon admin`: what looks after a database."""

import shutil
import sqlite3
import threading
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool
from typer.testing import CliRunner

from tests.server.conftest import loss_frame
from tests.server.frames import frames_of_a_long_run
from tsemon.errors import InvalidArgument, MissingPackage, StoreError
from tsemon.tools.cli import app
from tsemon_answers.runs import RunFilter
from tsemon_server.durations import seconds_of, written_out
from tsemon_server.store import Store, schema
from tsemon_server.store.engine import MIGRATIONS
from tsemon_server.store.ledger.retention import Retention


def admin_of(path):
    return admin_of_url(f"sqlite:///{path}")


def admin_of_url(url):
    """Runs a command on this database: its exit code and what it prints. Errors are raised."""

    def run(*arguments, database=url):
        done = CliRunner().invoke(app, ["admin", *arguments, "--database", database])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return run


def fill(url):
    """Store two attempts of one run, the first long enough for a block."""
    store = Store(url)
    options = {"blocks": ["0", "1"], "config": None, "tags": None, "attempt_key": None}
    with store.write() as writer:
        run_id = writer.runs.register("p", "r", resume_step=None, **options).run_id
        writer.frames.add(run_id, 1, "w", [*frames_of_a_long_run()])
        writer.frames.add(run_id, 1, "long", [loss_frame(step) for step in range(17 * 512)])
        writer.runs.change(run_id, state="failed")
        writer.runs.register("p", "r", resume_step=3000, **options)
        writer.frames.add(run_id, 2, "w", [loss_frame(3000 + step, seq=step) for step in range(800)])
    store.settle()
    store.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("admin") / "tsemon.db"
    fill(f"sqlite:///{path}")
    return path


@pytest.fixture
def copied(template, tmp_path):
    """A copy that may be changed."""
    return Path(shutil.copy(template, tmp_path / "copy.db"))


@pytest.fixture
def admin(copied):
    return admin_of(copied)


@pytest.fixture
def store(copied):
    store = Store(f"sqlite:///{copied}")
    yield store
    store.close()


@contextmanager
def frames_coming(store):
    """Another thread stores one frame after the other; the block begins after the first."""
    stopped, started = threading.Event(), threading.Event()
    with store.write() as writer:
        run_id = writer.runs.register(
            "p", "busy", blocks=[], config=None, tags=None, resume_step=None, attempt_key=None
        ).run_id

    def write():
        for step in count():
            with store.write() as writer:
                writer.frames.add(run_id, 1, "w", [loss_frame(step)])
            started.set()
            if step > 600 and step % 100 == 0:
                store.settle()
            if stopped.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    started.wait()
    yield
    stopped.set()
    thread.join()


def contents(path):
    """All rows of all tables, but for who works there."""
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables if table != "lease"}
    connection.close()
    return rows


def change(path, statement):
    connection = sqlite3.connect(path)
    assert connection.execute(statement).rowcount != 0
    connection.commit()
    connection.close()


ONE = "(SELECT min(rowid) FROM chunk WHERE metric = 'loss' AND writer = 'w')"


def contents_of(database):
    """The same of a database of any engine, in an order of its own."""
    tables = [table for table in schema.metadata.tables if table != "lease"]
    return {
        table: sorted(str([bytes(v) if isinstance(v, memoryview) else v for v in row]) for row in rows)
        for table in tables
        if (rows := database.execute(f"SELECT * FROM {table}")) is not None
    }


DAMAGE = {
    "samples": (f"UPDATE chunk SET samples = zeroblob(length(samples)) WHERE rowid = {ONE}", "its samples are damaged"),
    "fine rollup": (f"UPDATE chunk SET fine = substr(fine, 1, 40) WHERE rowid = {ONE}", "its fine rollup is damaged"),
    "coarse rollup": (f"UPDATE chunk SET coarse_crc = 1 WHERE rowid = {ONE}", "its coarse rollup is damaged"),
    "number of samples": (f"UPDATE chunk SET num_samples = 511 WHERE rowid = {ONE}", "its samples are damaged"),
    "steps of a chunk": (f"UPDATE chunk SET first_step = first_step + 1 WHERE rowid = {ONE}", "its row does not"),
    "other's rollup": (
        f"UPDATE chunk SET fine = (SELECT fine FROM chunk WHERE metric = 'loss' AND attempt = 2) WHERE rowid = {ONE}",
        "its fine rollup does not go with its samples",
    ),
    "block": ("UPDATE block SET stats = zeroblob(length(stats))", "block 0: is damaged"),
    "extent of a block": ("UPDATE block SET last_step = 8190", "block 0: does not go with its chunks"),
    "missing chunk": (f"DELETE FROM chunk WHERE rowid = {ONE}", "chunks, expected"),
    "missing segment": (
        "DELETE FROM segment WHERE number = 0 AND attempt = 1 AND writer = 'w'",
        "its segment is missing",
    ),
    "dropped samples": (f"UPDATE chunk SET samples = NULL WHERE rowid = {ONE}", "its samples, which is not so"),
    "frames of a segment": ("UPDATE segment SET frames = zeroblob(9) WHERE number = 1", "its frames are damaged"),
    "steps of a segment": ("UPDATE segment SET last_step = last_step + 1 WHERE number = 1", "not from"),
    "settled page": ("UPDATE settled SET seqs = zeroblob(64) WHERE page = 0", "512 are not"),
    "doubled frame": (
        "INSERT INTO frame SELECT run_id, attempt, writer, 3, step, time, layout_id, blob, NULL FROM frame LIMIT 1",
        "1 frames are both settled and not, such as seq 3",
    ),
    "number of frames": ("UPDATE run SET num_frames = num_frames + 1", "counts 11005 frames, has"),
    "hot frame": (
        "UPDATE frame SET blob = zeroblob(length(blob)) WHERE seq = 600 AND attempt = 2",
        "frames of attempt 2, writer w: 1 are damaged, the first is seq 600",
    ),
    "size of a hot frame": ("UPDATE frame SET blob = zeroblob(7), crcs = NULL", "are damaged, the first is seq"),
    "step of a hot frame": ("UPDATE frame SET step = step + 1", "are damaged, the first is seq"),
    "layout": ("UPDATE layout SET num_rows = num_rows + 1 WHERE metric = 'param_norm'", "is not what its number says"),
    "orphan": ("INSERT INTO settled VALUES ('gone', 1, 'w', 0, x'00')", "gone: settled: rows of a run that is not"),
}


class TestCheck:
    def test_finds_nothing_where_all_is_whole(self, template):
        code, shown = admin_of(template)("check")
        assert code == 0
        assert "all is whole" in shown
        (row,) = [line.split() for line in shown.splitlines() if "," in line]
        # 17 segments of the first attempt's one writer, 3 of the other; all are over but for 288 frames of the second
        assert row[1:4] == ["11,004", "10,716", "21"]

    def test_finds_nothing_where_retention_has_dropped_something(self, admin, store):
        for ages in ({"samples_s": 0.0}, {"samples_s": 0.0, "rollups_s": 0.0}):
            with store.write() as writer:
                writer.retention.keep(Retention("p", **ages))
            store.expire()
            assert admin("check")[0] == 0

    def test_finds_nothing_in_a_deleted_run_that_is_still_being_removed(self, admin, store):
        with store.write() as writer:
            (run,) = writer.runs.find(RunFilter(), order="name", limit=2)
            writer.runs.delete(run.run_id)
        assert admin("check")[0] == 0

    @pytest.mark.parametrize("what", DAMAGE)
    def test_finds_damage(self, copied, what):
        statement, told = DAMAGE[what]
        change(copied, statement)
        code, shown = admin_of(copied)("check")
        assert code == 1
        assert told in shown, shown

    def test_finds_pages_that_sqlite_cannot_read(self, copied):
        connection = sqlite3.connect(copied)
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'segment'").fetchone()
        connection.close()
        with copied.open("r+b") as file:
            file.seek(4096 * (page - 1))
            file.write(b"\xff" * 4096)
        code, shown = admin_of(copied)("check")
        assert code == 1
        assert "damaged: database: " in shown

    def test_changes_nothing(self, copied):
        before = copied.read_bytes()
        admin_of(copied)("check")
        assert copied.read_bytes() == before

    def test_does_not_mind_a_service_that_writes(self, admin, store):
        with frames_coming(store):
            codes = [admin("check") for _ in range(3)]
        assert [code for code, _ in codes] == [0] * 3, codes


class TestVacuum:
    def test_gives_back_what_an_old_file_keeps(self, copied):
        connection = sqlite3.connect(copied)
        connection.executescript("PRAGMA journal_mode = DELETE; PRAGMA auto_vacuum = NONE; VACUUM")
        connection.executescript("PRAGMA journal_mode = WAL; DELETE FROM chunk; DELETE FROM frame")
        connection.close()
        before = copied.stat().st_size
        code, shown = admin_of(copied)("vacuum")
        assert code == 0
        assert "from now on it gives space back by itself" in shown
        assert copied.stat().st_size < before - 100_000
        assert "from now on" not in admin_of(copied)("vacuum")[1]


class TestABackup:
    def test_holds_what_the_database_held(self, copied, admin, store, tmp_path):
        before = contents(copied)
        assert admin("backup", str(tmp_path / "saved"))[0] == 0
        with store.write() as writer:
            writer.runs.delete(before["run"][0][0])
        store.close()
        admin("restore", str(tmp_path / "saved"), "--force")
        assert contents(copied) == before

    def test_is_of_one_moment_though_the_service_writes(self, admin, store, tmp_path):
        with frames_coming(store):
            for number in range(3):
                admin("backup", str(tmp_path / f"{number}.db"))
        for number in range(3):
            code, shown = admin("check", database=f"sqlite:///{tmp_path}/{number}.db")
            assert code == 0, shown

    def test_makes_a_new_database(self, copied, admin, tmp_path):
        admin("backup", str(tmp_path / "saved"))
        admin("restore", str(tmp_path / "saved"), database=f"sqlite:///{tmp_path}/new.db")
        assert contents(tmp_path / "new.db") == contents(copied)
        assert (tmp_path / "new.db").stat().st_mode & 0o777 == 0o600

    def test_of_an_older_version_is_brought_up_to_date(self, tmp_path, admin):
        connection = sqlite3.connect(tmp_path / "old")
        engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with engine.begin() as opened:
            config.attributes["connection"] = opened
            command.upgrade(config, "0001")
        engine.dispose()
        database = f"sqlite:///{tmp_path}/new.db"
        admin("restore", str(tmp_path / "old"), database=database)
        assert admin("check", database=database)[0] == 0

    def test_is_one_file_and_overwrites_none(self, admin, tmp_path):
        (tmp_path / "there").write_text("yesterday")
        with pytest.raises(InvalidArgument, match="which is there; choose another name"):
            admin("backup", str(tmp_path / "there"))
        admin("backup", str(tmp_path / "saved"))
        assert {path.name for path in tmp_path.iterdir() if "copy.db" not in path.name} == {"there", "saved"}

    def test_of_no_database_is_refused(self, admin, tmp_path):
        with pytest.raises(StoreError, match="found no file"):
            admin("backup", str(tmp_path / "saved"), database=f"sqlite:///{tmp_path}/nowhere.db")
        assert {path.name for path in tmp_path.iterdir()} == {"copy.db"}

    def test_does_not_replace_runs_unless_forced(self, admin, tmp_path):
        admin("backup", str(tmp_path / "saved"))
        with pytest.raises(InvalidArgument, match=r"without runs, got one with 1;.*--force"):
            admin("restore", str(tmp_path / "saved"))

    def test_does_not_replace_what_a_service_uses(self, admin, store, tmp_path):
        store.hold_lease("housekeeping", "another", 60.0)
        admin("backup", str(tmp_path / "saved"))
        with pytest.raises(StoreError, match="a service uses the database now"):
            admin("restore", str(tmp_path / "saved"), "--force")
        store.drop_lease("housekeeping", "another")
        store.note_settled(-3600.0)  # by a clock that was set back since
        for _ in range(2):  # the backup knows a lease of its own time, which means nothing
            assert admin("restore", str(tmp_path / "saved"), "--force")[0] == 0

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            ("cut", "damaged|cannot be read"),
            ("foreign", "other tables"),
            ("text", "cannot be read"),
            ("newer", "newer"),
        ],
    )
    def test_that_is_none_is_refused_and_changes_nothing(self, copied, admin, tmp_path, damage, told):
        path, before = tmp_path / "saved", contents(copied)
        admin("backup", str(path))
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-20_000])
        elif damage == "text":
            path.write_text("my diary, page one. " * 100)
        else:
            change(
                path, "DROP TABLE frame" if damage == "foreign" else "UPDATE alembic_version SET version_num = '9999'"
            )
        with pytest.raises(StoreError, match=told):
            admin("restore", str(path), "--force")
        assert contents(copied) == before
        with pytest.raises(StoreError, match=told):
            admin("restore", str(path), database=f"sqlite:///{tmp_path}/new.db")
        assert [*tmp_path.glob("new.db*")] == []


class TestRetentionOnTheCommandLine:
    def test_shows_what_it_sets(self, admin):
        assert admin("retention")[1] == "all projects keep everything for ever\n"
        told = admin("retention", "p", "--samples", "12h", "--rollups", "30d", "--runs", "52w")[1]
        assert told == "p: samples 12h, rollups 30d, runs 52w\n"
        assert admin("retention")[1] == told

    def test_of_a_project_that_has_no_runs_is_kept_and_that_is_told(self, admin):
        told = admin("retention", "typo", "--samples", "12h")[1]
        kept = "typo: samples 12h, rollups forever, runs forever"
        assert {*told.splitlines()} == {"the service has no runs of project 'typo'", kept}
        assert admin("retention")[1] == f"{kept}\n"

    def test_changes_what_is_given_only(self, admin):
        admin("retention", "p", "--samples", "12h", "--rollups", "30d")
        assert admin("retention", "p", "--samples", "2d")[1] == "p: samples 2d, rollups 30d, runs forever\n"
        assert admin("retention", "p", "--rollups", "forever")[1] == "p: samples 2d, rollups forever, runs forever\n"
        assert admin("retention", "p", "--forever")[1] == "p keeps everything for ever\n"

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--samples", "1d"], "expected a project"),
            (["p", "--samples", "30"], "such as 12h, 30d or 2w .*got '30'"),
            (["p", "--samples", "0d"], "got '0d'"),
            (["p", "--samples", "-1d"], "got '-1d'"),
            (["p", "--samples", "2y"], "got '2y'"),
            (["p", "--rollups", "30d"], "at least as long as samples, got p: samples forever, rollups 30d"),
            (["p", "--rollups", "30d", "--samples", "5w"], "at least as long as samples"),
        ],
    )
    def test_explains_what_is_wrong(self, admin, arguments, told):
        with pytest.raises(InvalidArgument, match=told):
            admin("retention", *arguments)
        assert admin("retention")[1] == "all projects keep everything for ever\n"

    @pytest.mark.parametrize("text", ["12h", "30d", "2w", "90m", "36h", "forever"])
    def test_writes_times_as_it_reads_them(self, text):
        assert written_out(seconds_of(text)) == text


class TestADatabaseOfAnotherVersion:
    @pytest.mark.parametrize("name", ["check", "vacuum", "retention"])
    def test_is_refused(self, copied, admin, name):
        change(copied, "UPDATE alembic_version SET version_num = '0001'")
        with pytest.raises(StoreError, match="revision 0001; `tsemon serve` of this version brings an older one"):
            admin(name)


class TestOnPostgresql:
    """What it does in another way than on SQLite."""

    @pytest.fixture
    def admin(self, postgresql):
        return admin_of_url(postgresql.url)

    @pytest.fixture
    def filled(self, postgresql):
        fill(postgresql.url)
        return postgresql

    @pytest.fixture
    def empty(self, postgresql_server):
        database = postgresql_server.new_database()
        yield database
        postgresql_server.drop(database)

    def test_check_finds_damage(self, admin, filled):
        code, shown = admin("check")
        assert (code, "all is whole" in shown) == (0, True), shown
        filled.execute("UPDATE chunk SET samples = 'x' WHERE metric = 'loss' AND writer = 'w' AND number = 1")
        code, shown = admin("check")
        assert (code, shown.count("its samples are damaged")) == (1, 1)

    def test_a_backup_holds_what_the_database_held(self, admin, filled, empty, tmp_path):
        admin("backup", str(tmp_path / "saved"))
        restore = ("restore", str(tmp_path / "saved"))
        with pytest.raises(InvalidArgument, match="without runs, got one with 1"):
            admin(*restore)
        before = contents_of(filled)
        filled.execute("DELETE FROM chunk")
        admin(*restore, "--force")
        admin(*restore, database=empty.url)
        assert contents_of(filled) == contents_of(empty) == before

    @pytest.mark.parametrize("table", ["chunk", "users"])
    def test_leaves_the_tables_of_another_program_alone(self, admin, filled, postgresql_server, tmp_path, table):
        admin("backup", str(tmp_path / "b"))
        foreign = postgresql_server.new_database()
        foreign.execute(f"CREATE TABLE {table} (a int); INSERT INTO {table} VALUES (7)")
        for arguments in (("restore", str(tmp_path / "b"), "--force"), ("backup", str(tmp_path / "c")), ("check",)):
            with pytest.raises(StoreError, match="tables of another program"):
                admin(*arguments, database=foreign.url)
        assert foreign.execute(f"SELECT a FROM {table}") == [(7,)]
        postgresql_server.drop(foreign)

    def test_a_file_that_is_no_backup_changes_nothing(self, admin, filled, tmp_path):
        before = contents_of(filled)
        (tmp_path / "saved").write_text("my diary, page one. " * 100)
        with pytest.raises(StoreError, match="pg_restore failed"):
            admin("restore", str(tmp_path / "saved"), "--force")
        assert contents_of(filled) == before

    def test_a_backup_tells_which_program_it_lacks(self, admin, filled, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingPackage, match="needs the program pg_dump"):
            admin("backup", str(tmp_path / "saved"))

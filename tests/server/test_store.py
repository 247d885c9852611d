import sqlite3
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tsemon.errors import InvalidArgument, MissingPackage, StoreError
from tsemon.wire import Array, Frame
from tsemon_answers.runs import RunFilter
from tsemon_server.store import Store, schema
from tsemon_server.store.engine import POOL_SIZE, Database, _is_busy


def register(writer, run="r"):
    return writer.runs.register("p", run, blocks=[], config=None, tags=None, resume_step=None, attempt_key=None)


def runs_of(reader):
    return reader.runs.find(RunFilter(), order="name", limit=9)


def snapshot(database):
    """What must stay as it is where a database is refused."""
    if database.engine == "sqlite":
        return {path.name: path.read_bytes() for path in database.path.parent.iterdir()}
    tables = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
    return sorted(tuple(row) for row in database.execute(tables))


def run_at_once(code, number):
    """Run `code` in several processes that start together; fails unless all of them succeed."""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(index)]) for index in range(number)]
    assert [process.wait(60) for process in processes] == [0] * number


class TestTheDatabase:
    def test_has_the_tables_that_the_code_expects(self, empty_database):
        Store(empty_database.url).close()
        engine = Database(empty_database.url).engine
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        engine.dispose()

    def test_is_in_files_for_their_owner_alone(self, tmp_path):
        store = Store(f"sqlite:///{tmp_path / 't.db'}")
        with store.write() as writer:
            register(writer)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        store.close()
        assert modes == {"t.db": 0o600, "t.db-wal": 0o600, "t.db-shm": 0o600}

    def test_is_kept_when_it_is_opened_again(self, database):
        for expected in (1, 2):
            store = Store(database.url)
            with store.write() as writer:
                registered = register(writer)
            store.close()
            assert registered.attempt == expected

    def test_can_be_opened_by_several_processes_at_once(self, empty_database):
        code = f"from tsemon_server.store import Store; Store('{empty_database.url}').close()"
        run_at_once(code, 4)

    def test_can_be_written_by_several_processes_at_once(self, database):
        store = Store(database.url)
        with store.write() as writer:
            run_id = register(writer).run_id
        run_at_once(
            "import sys\n"
            "from tsemon.wire import Frame\n"
            "from tsemon_server.store import Store\n"
            f"store = Store('{database.url}')\n"
            "for seq in range(50):\n"
            "    with store.write() as writer:\n"
            f"        writer.frames.add('{run_id}', 1, 'w' + sys.argv[1], [Frame(seq, seq, 0.0, {{'loss': 1.0}})])\n"
            "store.close()\n",
            2,
        )
        with store.read() as reader:
            assert reader.runs.get(run_id).num_frames == 100
            assert len(reader.frames.metric(run_id, "scalars", "loss").samples().steps) == 100
        store.close()

    @pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY])
    def test_is_busy_also_while_another_reads_the_journal_of_one_that_was_killed(self, code):
        reason = sqlite3.OperationalError("database is locked")
        reason.sqlite_errorcode = code
        assert _is_busy(reason)

    def test_is_left_to_other_processes_now_and_then_however_much_one_of_them_writes(self, tmp_path):
        database = Database(f"sqlite:///{tmp_path / 't.db'}")
        spans = []

        def keep_writing():
            for _ in range(30):
                with database.writing():
                    start = time.monotonic()
                    time.sleep(0.01)
                    spans.append((start, time.monotonic()))

        with ThreadPoolExecutor() as pool:
            writes = [pool.submit(keep_writing) for _ in range(2)]
        assert [write.result() for write in writes] == [None, None]
        seen_by_others = 0.004  # they look every 2 ms
        is_left = "".join("|" if start - end >= seen_by_others else "." for (_, end), (start, _) in pairwise(spans))
        assert max(map(len, is_left.split("|"))) <= 12, "ten writes take 0.1 s"
        database.engine.dispose()

    def test_shows_a_reader_one_state_however_much_is_written_meanwhile(self, database):
        store = Store(database.url)
        with store.read() as reader:
            assert runs_of(reader) == []
            with store.write() as writer:
                register(writer)
            assert runs_of(reader) == []
        with store.read() as reader:
            assert [run.run for run in runs_of(reader)] == ["r"]
        store.close()

    def test_keeps_nothing_of_a_transaction_that_fails(self, database):
        store = Store(database.url)

        def fail_halfway():
            with store.write() as writer:
                register(writer)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_halfway()
        with store.read() as reader:
            assert runs_of(reader) == []
        store.close()

    def test_in_a_folder_that_cannot_be_written_is_told(self):
        with pytest.raises(StoreError, match=r"sqlite:////proc/x\.db cannot be used: unable to open.*may write"):
            Store("sqlite:////proc/x.db")

    def test_in_a_folder_that_does_not_exist_is_told(self, tmp_path):
        with pytest.raises(StoreError, match="unable to open database file"):
            Store(f"sqlite:///{tmp_path}/nowhere/x.db")

    def test_that_is_none_is_told_and_left_alone(self, tmp_path):
        (tmp_path / "x.db").write_text("my diary, page one. " * 100)
        with pytest.raises(StoreError, match="file is not a database"):
            Store(f"sqlite:///{tmp_path}/x.db")
        assert (tmp_path / "x.db").read_text() == "my diary, page one. " * 100

    @pytest.mark.parametrize("tables", [["diary"], ["run"], ["alembic_version", "runs"]], ids="+".join)
    def test_of_another_program_is_told_and_left_alone(self, empty_database, tables):
        for table in tables:
            empty_database.execute(f"CREATE TABLE {table} (version_num TEXT)")
        before = snapshot(empty_database)
        with pytest.raises(StoreError, match=r"with tables of another program .*choose another"):
            Store(empty_database.url)
        assert snapshot(empty_database) == before

    def test_of_a_newer_version_is_told(self, empty_database):
        Store(empty_database.url).close()
        empty_database.execute("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(StoreError, match="written by a newer tsemon"):
            Store(empty_database.url)

    @pytest.mark.parametrize(
        "url", ["", "tsemon.db", "sqlite://", "sqlite:///:memory:", "oracle9://x/y", "sqlite:///x.db?timeout=soon"]
    )
    def test_needs_a_url_of_a_file(self, url):
        with pytest.raises(InvalidArgument, match="expected a database"):
            Store(url)

    def test_never_shows_its_password(self):
        with pytest.raises(InvalidArgument) as error:
            Store("postgresql+nope://user:secret@host/db")
        assert "secret" not in str(error.value)


class TestPostgresql:
    @pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg"])
    def test_is_reached_with_and_without_the_name_of_the_driver(self, postgresql, driver):
        store = Store(postgresql.url.replace("postgresql", driver, 1))
        assert store.where.startswith("postgresql://")  # as its user writes it
        store.close()

    def test_without_its_driver_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "psycopg", None)  # what an import of it finds where it is not installed
        with pytest.raises(MissingPackage, match=r"pip install 'tsemon\[postgres\]'"):
            Store("postgresql://tsemon@localhost/tsemon")

    def test_that_does_not_run_is_told(self, tmp_path):
        with pytest.raises(StoreError, match=r"cannot be used: connection .*must be a running PostgreSQL"):
            Store(f"postgresql://tsemon@/tsemon?host={tmp_path}")

    def test_may_be_named_as_many_hosts_name_it(self, postgresql):
        Store(postgresql.url.replace("postgresql", "postgres", 1)).close()

    def test_with_an_option_that_nobody_knows_is_told(self):
        with pytest.raises(StoreError, match='invalid connection option "foo"'):
            Store("postgresql://u@127.0.0.1:1/x?foo=1")

    def test_never_shows_a_password_in_its_options(self):
        with pytest.raises(StoreError) as error:
            Store("postgresql://u@127.0.0.1:1/x?password=hunter2&sslpassword=hunter3")
        assert "hunter" not in str(error.value)

    def test_takes_the_locks_of_a_process_that_has_stopped_after_a_while(self, postgresql):
        """What the server is told to do about it; the wait itself would take half a minute."""
        store = Store(postgresql.url)
        with store._database.writing() as connection:
            told = [
                connection.exec_driver_sql(f"SHOW {setting}").scalar_one()
                for setting in ("idle_in_transaction_session_timeout", "lock_timeout", "synchronous_commit")
            ]
        assert told == ["30s", "5s", "on"]
        store.close()

    def test_where_this_user_may_create_nothing_is_told(self, postgresql_server):
        database = postgresql_server.new_database()
        database.execute("DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN")
        with pytest.raises(StoreError, match=r"permission denied .*may create tables"):
            Store(database.url.replace("tsemon@", "guest@"))
        postgresql_server.drop(database)

    def test_with_another_encoding_is_told(self, postgresql_server):
        postgresql_server.maintain(
            "CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
        )
        with pytest.raises(StoreError, match="encoding UTF8, got one with SQL_ASCII; make another"):
            Store(postgresql_server.url_of("bytes"))
        postgresql_server.maintain("DROP DATABASE bytes WITH (FORCE)")

    @pytest.mark.parametrize("ending", ["stop", "kill"])
    def test_that_was_restarted_is_used_as_if_nothing_had_been(self, postgresql, ending):
        store = Store(postgresql.url)
        with store.write() as writer:
            run_id = register(writer).run_id
        getattr(postgresql.server, ending)()
        postgresql.server.start()
        with store.write() as writer:
            writer.frames.add(run_id, 1, "w", [Frame(0, 0, 0.0, {"loss": 1.0})])
        with store.read() as reader:
            assert reader.runs.get(run_id).num_frames == 1
        store.close()

    @pytest.mark.parametrize(
        "go_on",
        [
            lambda writer, run_id: writer.runs.change(run_id),
            lambda writer, run_id: writer.frames.add(run_id, 1, "w", [Frame(0, 0, 0.0, {"loss": 1.0})]),
        ],
        ids=["by way of SQLAlchemy", "past it"],
    )
    def test_that_ends_within_a_transaction_is_told_and_keeps_nothing_of_it(self, postgresql, caplog, go_on):
        store = Store(postgresql.url)

        def write_while_it_ends():
            with store.write() as writer:
                run_id = register(writer).run_id
                postgresql.server.stop()
                go_on(writer, run_id)

        with pytest.raises(StoreError, match="cannot be used"):
            write_while_it_ends()
        with pytest.raises(StoreError, match="cannot be used"), store.read():
            pass
        postgresql.server.start()
        with store.read() as reader:
            assert runs_of(reader) == []
        store.close()
        assert caplog.text == ""

    def test_lets_writers_of_different_runs_write_at_the_same_time(self, postgresql):
        store = Store(postgresql.url)
        with store.write() as writer:
            first, second = (register(writer, name).run_id for name in "ab")
        with store.write() as one, store.write() as other:
            for writer, run_id in ((one, first), (other, second)):
                writer.frames.add(run_id, 1, "w", [Frame(0, 0, 0.0, {"loss": 1.0})])
        with store.read() as reader:
            assert [run.num_frames for run in runs_of(reader)] == [1, 1]
        store.close()

    def test_out_of_connections_is_told(self, postgresql, monkeypatch):
        store = Store(postgresql.url)
        monkeypatch.setattr(store._database.engine.pool, "_timeout", 0.01)
        with ExitStack() as all_taken:
            for _ in range(POOL_SIZE - 1):  # one is kept for who writes
                all_taken.enter_context(store.read())
            with pytest.raises(StoreError, match=r"all connections .* are in use"), store.read():
                pass
        store.close()


class TestTheTables:
    def test_store_a_frame_in_one_row_of_four_bytes_a_value(self, tmp_path):
        """The figure that the layout was chosen for: at most 4.4 bytes a value at 960 values a frame."""
        store = Store(f"sqlite:///{tmp_path}/x.db")
        values = {f"metric_{number}": Array.of(range(48)) for number in range(20)}
        connection = sqlite3.connect(tmp_path / "x.db")

        def size_bytes():
            (pages,), (page_bytes,) = (
                connection.execute(f"PRAGMA page_{what}").fetchone() for what in ("count", "size")
            )
            return pages * page_bytes

        empty_bytes = size_bytes()
        with store.write() as writer:
            run_id = register(writer).run_id
            writer.frames.add(run_id, 1, "rank0-6f2c", [Frame(seq, seq, 0.0, {}, values) for seq in range(2000)])
        store.close()
        assert connection.execute("SELECT count(*) FROM frame").fetchone() == (2000,)
        assert connection.execute("SELECT count(*) FROM layout").fetchone() == (20,)
        assert size_bytes() - empty_bytes < 4.4 * 960 * 2000
        connection.close()

import sqlite3
import subprocess
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tsemon.errors import StoreError
from tsemon.wire import Array, Frame
from tsemon_server.store import Store, schema


def register(writer):
    return writer.register("p", "r", blocks=[], config=None, tags=None, resume_step=None, attempt_key=None)


def run_at_once(code, number):
    """Run `code` in several processes that start together; fails unless all of them succeed."""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(index)]) for index in range(number)]
    assert [process.wait(60) for process in processes] == [0] * number


class TestTheDatabase:
    def test_has_the_tables_that_the_code_expects(self, tmp_path):
        Store(f"sqlite:///{tmp_path}/x.db").close()
        engine = create_engine(f"sqlite:///{tmp_path}/x.db")
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        engine.dispose()

    def test_is_kept_when_it_is_opened_again(self, tmp_path):
        for expected in (1, 2):
            store = Store(f"sqlite:///{tmp_path}/x.db")
            with store.write() as writer:
                registered = register(writer)
            store.close()
            assert registered.attempt == expected

    def test_can_be_opened_by_several_processes_at_once(self, tmp_path):
        code = f"from tsemon_server.store import Store; Store('sqlite:///{tmp_path}/x.db').close()"
        run_at_once(code, 4)

    def test_can_be_written_by_several_processes_at_once(self, tmp_path):
        url = f"sqlite:///{tmp_path}/x.db"
        store = Store(url)
        with store.write() as writer:
            run_id = register(writer).run_id
        run_at_once(
            "import sys\n"
            "from tsemon.wire import Frame\n"
            "from tsemon_server.store import Store\n"
            f"store = Store('{url}')\n"
            "for seq in range(50):\n"
            "    with store.write() as writer:\n"
            f"        writer.add_frames('{run_id}', 1, 'w' + sys.argv[1], [Frame(seq, seq, 0.0, {{'loss': 1.0}})])\n"
            "store.close()\n",
            2,
        )
        with store.read() as reader:
            assert reader.run(run_id).num_frames == 100
            assert len(reader.metric(run_id, "scalars", "loss").samples().steps) == 100
        store.close()

    def test_keeps_nothing_of_a_transaction_that_fails(self, tmp_path):
        store = Store(f"sqlite:///{tmp_path}/x.db")

        def fail_halfway():
            with store.write() as writer:
                register(writer)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_halfway()
        with store.read() as reader:
            assert reader.runs(project=None, run=None, state=None, order="name", limit=9, after=None) == []
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
    def test_of_another_program_is_told_and_left_alone(self, tmp_path, tables):
        with sqlite3.connect(tmp_path / "x.db") as connection:
            for table in tables:
                connection.execute(f"CREATE TABLE {table} (version_num TEXT)")
        connection.close()
        before = (tmp_path / "x.db").read_bytes()
        with pytest.raises(StoreError, match=r"x\.db with tables of another program .*choose another file"):
            Store(f"sqlite:///{tmp_path}/x.db")
        assert (tmp_path / "x.db").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["x.db"]

    def test_of_a_newer_version_is_told(self, tmp_path):
        Store(f"sqlite:///{tmp_path}/x.db").close()
        with sqlite3.connect(tmp_path / "x.db") as connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.close()
        with pytest.raises(StoreError, match="written by a newer tsemon"):
            Store(f"sqlite:///{tmp_path}/x.db")

    @pytest.mark.parametrize("url", ["", "tsemon.db", "sqlite://", "sqlite:///:memory:", "oracle9://x/y"])
    def test_needs_a_url_of_a_file(self, url):
        with pytest.raises(StoreError, match="expected a database"):
            Store(url)

    def test_never_shows_its_password(self):
        with pytest.raises(StoreError) as error:
            Store("postgresql+nope://user:secret@host/db")
        assert "secret" not in str(error.value)


class TestTheTables:
    @pytest.mark.parametrize("table", schema.metadata.sorted_tables, ids=str)
    def test_can_be_made_on_postgresql(self, table):
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))

    def test_store_a_frame_in_one_row_of_four_bytes_a_value(self, tmp_path):
        """The figure that the layout was chosen for: at most 4.5 bytes a value at 960 values a frame."""
        store = Store(f"sqlite:///{tmp_path}/x.db")
        values = {f"metric_{number}": Array.of(range(48)) for number in range(20)}
        with store.write() as writer:
            run_id = register(writer).run_id
            writer.add_frames(run_id, 1, "rank0-6f2c", [Frame(seq, seq, 0.0, {}, values) for seq in range(2000)])
        store.close()
        with sqlite3.connect(tmp_path / "x.db") as connection:
            assert connection.execute("SELECT count(*) FROM frame").fetchone() == (2000,)
            assert connection.execute("SELECT count(*) FROM layout").fetchone() == (20,)
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            assert pages * connection.execute("PRAGMA page_size").fetchone()[0] < 4.5 * 960 * 2000
        connection.close()

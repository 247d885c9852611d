"""Bytes of SQL tables that have changed: what else there is answers, and what is lost is counted."""

import pytest

from tests.server.conftest import loss_frame
from tests.server.frames import frames_of_a_long_run
from tests.server.store.contract.test_settling import answers, close_to
from tsemon_server.store.series.settling import Sizes

pytestmark = pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)


class TestABlock:
    @pytest.mark.parametrize("column", ["cells", "stats"])
    def test_that_is_damaged_is_read_chunk_by_chunk(self, bench, column):
        run_id = bench.register()
        bench.fill(run_id, frames_of_a_long_run())
        bench.store.settle(sizes=Sizes(segment=8, kept=5))
        expected = answers(bench, run_id)
        # One byte of every block is another.
        flipped = f"CAST(substr({column}, 1, 9) || char(1) || substr({column}, 11) AS BLOB)"
        if bench.engine.name == "postgresql":
            flipped = f"overlay({column} PLACING bytea '\\x01' FROM 10 FOR 1)"
        changed = bench.engine.database.execute(f"UPDATE block SET {column} = {flipped} RETURNING number")
        assert len(changed) == 40
        assert answers(bench, run_id) == close_to(expected)


class TestARowOfAFrame:
    def test_that_is_damaged_stays_behind_when_others_settle(self, bench, caplog):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step, loss=float(step)) for step in range(700)])
        bench.engine.database.execute("UPDATE frame SET blob = substr(blob, 1, 5) WHERE seq = 17")
        assert bench.store.settle() == 1
        series = bench.series(run_id, "loss", points=1000)
        assert series["damaged"] == 1
        assert series["step"] == [step for step in range(700) if step != 17]
        assert f"1 frames of run {run_id} are damaged" in caplog.text


class TestAChunk:
    def test_that_is_damaged_or_was_dropped_is_missing_in_frames_which_tell_how_much(self, bench):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) for step in range(301)])
        bench.store.settle(sizes=Sizes(100, 0))
        for column, number in (("samples = NULL", 0), ("samples = substr(samples, 1, 9)", 1)):
            bench.engine.database.execute(f"UPDATE chunk SET {column} WHERE number = {number}")
        with bench.store.read() as reader:
            export = reader.frames.export(run_id)
            found = [frame.step for frame in export.frames() if "loss" in frame.scalars]
        assert found == [*range(200, 301)]
        assert (export.num_dropped, export.num_damaged) == (100, 100)

"""A run as a table for other programs."""

import csv
import io
import json
import math
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.server.conftest import loss_frame, problem
from tests.server.test_settling import frames_of_a_long_run
from tsemon.wire import Array, Frame
from tsemon_server.queries.export import PARTS
from tsemon_server.store import Store

COLUMNS = ["project", "run", "run_id", "attempt", "writer", "seq", "step", "time", "metric", "layer", "head", "value"]


@pytest.fixture
def store(api):
    store = Store(api.database.url)
    yield store
    store.close()


def ask(api, run_id, format="csv", **params):
    reply = api.http.get(f"/api/v1/runs/{run_id}/export", params={"format": format, **params})
    assert reply.status_code == 200, reply.text
    return reply


def rows_of_csv(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    numbers = {"attempt": int, "seq": int, "step": int, "time": float, "layer": int, "head": int, "value": float}
    return [{k: v if k not in numbers else numbers[k](v) if v else None for k, v in row.items()} for row in rows]


def rows_of_parquet(content):
    return pq.read_table(io.BytesIO(content)).to_pylist()


def rows(api, run_id, format="csv", **params):
    reply = ask(api, run_id, format, **params)
    return rows_of_csv(reply.text) if format == "csv" else rows_of_parquet(reply.content)


def in_order(rows):
    """Sorted, and with a NaN that equals itself."""
    keyed = [tuple("NaN" if v != v else v for v in (row[name] for name in COLUMNS)) for row in rows]
    return sorted(keyed, key=str)


def written_out(run_id, frames, attempt=1):
    """The rows that these frames are, one after the other."""
    for frame in frames:
        start = ["default", "gpt", run_id, attempt, "w", frame.seq, frame.step, frame.time]
        for metric, value in frame.scalars.items():
            yield dict(zip(COLUMNS, [*start, metric, None, None, value], strict=True))
        for metric, array in frame.layers.items():
            for layer, value in enumerate(memoryview(array.data).cast("f")):
                yield dict(zip(COLUMNS, [*start, metric, layer, None, value], strict=True))
        for metric, array in frame.heads.items():
            for index, value in enumerate(memoryview(array.data).cast("f")):
                place = divmod(index, array.shape[1])
                yield dict(zip(COLUMNS, [*start, metric, *place, value], strict=True))


def send(api, run_id, frames, **where):
    for start in range(0, len(frames), 200):
        api.send_ok(run_id, frames[start : start + 200], **where)


@pytest.mark.parametrize("format", ["csv", "parquet"])
class TestAnExport:
    def test_has_all_that_was_sent_whether_it_has_settled_or_not(self, api, store, format):
        run_id = api.register()
        frames = [*frames_of_a_long_run(1200)]
        send(api, run_id, frames)
        store.settle()
        assert api.database.execute("SELECT count(*) FROM frame")[0][0] == 1200 - 1024
        assert in_order(rows(api, run_id, format)) == in_order(written_out(run_id, frames))

    def test_has_the_frames_that_no_later_attempt_hides_or_those_of_one(self, api, store, format):
        run_id = api.register()
        send(api, run_id, [loss_frame(step, 1.0) for step in range(700)])
        api.register(resume_step=300)
        send(api, run_id, [loss_frame(step, 2.0, seq=step) for step in range(300, 310)], attempt=2)
        store.settle()
        found = [(row["attempt"], row["step"]) for row in rows(api, run_id, format)]
        assert found == [*((1, step) for step in range(300)), *((2, step) for step in range(300, 310))]
        assert [row["step"] for row in rows(api, run_id, format, attempt=1)] == [*range(700)]

    def test_is_cut_to_steps_and_metrics(self, api, store, format):
        run_id = api.register()
        frames = [*frames_of_a_long_run(1000)]
        send(api, run_id, frames)
        store.settle()
        some = rows(
            api, run_id, format, metric=["loss", "param_norm"], from_step=frames[300].step, to_step=frames[990].step
        )
        expected = [row for row in written_out(run_id, frames[300:991]) if row["metric"] in ("loss", "param_norm")]
        assert in_order(some) == in_order(expected)

    def test_of_a_run_without_frames_has_no_rows(self, api, format):
        assert rows(api, api.register(), format) == []

    def test_tells_what_retention_has_dropped_and_what_is_damaged(self, api, store, format):
        run_id = api.register()
        send(api, run_id, [Frame(step, step, 0.0, {"a": 1.0, "b": 2.0}) for step in range(1100)])
        store.settle()
        api.database.execute("UPDATE chunk SET samples = coarse WHERE metric = 'a' AND number = 0")
        api.database.execute("UPDATE chunk SET samples = NULL WHERE metric = 'b'")
        reply = ask(api, run_id, format)
        if format == "csv":
            assert reply.text.endswith("\n# missing: 1024 samples dropped by retention, 512 damaged\n")
        else:
            told = json.loads(pq.read_metadata(io.BytesIO(reply.content)).metadata[b"tsemon"])
            assert told == {"missing_samples": {"dropped": 1024, "damaged": 512}}

    def test_does_not_grow_in_memory_with_the_run(self, tmp_path, format, monkeypatch):
        monkeypatch.setattr("tsemon_server.queries.export.ROWS_PER_GROUP", 10_000)
        peaks = []
        for num_frames in (4096, 4 * 4096):
            store = Store(f"sqlite:///{tmp_path}/{num_frames}.db")
            with store.write() as writer:
                options = {"blocks": [], "config": None, "tags": None, "resume_step": None, "attempt_key": None}
                run_id = writer.register("p", "r", **options).run_id
                layers = {"token_similarity": Array.of([0.5] * 8)}
                writer.add_frames(run_id, 1, "w", [Frame(n, n, 0.0, {"loss": 1.0}, layers) for n in range(num_frames)])
            store.settle()
            tracemalloc.start()
            before = pa.total_allocated_bytes()
            most = 0
            with store.read() as reader:
                for _ in PARTS[format](reader.run(run_id), reader.export(run_id)):
                    most = max(most, pa.total_allocated_bytes() - before)
            peaks.append(tracemalloc.get_traced_memory()[1] + most)
            tracemalloc.stop()
            store.close()
        # The longer one is 10 MB of text. What may grow are the lists of segments and of row groups.
        assert peaks[1] < peaks[0] + 1_000_000, peaks


class TestAnExportAsCsv:
    def test_spells_what_is_not_finite(self, api):
        run_id = api.register()
        values = (math.nan, math.inf, -math.inf, 0.1)
        api.send_ok(run_id, [loss_frame(step, value) for step, value in enumerate(values)])
        assert [line.split(",")[-1] for line in ask(api, run_id).text.splitlines()[1:]] == ["NaN", "inf", "-inf", "0.1"]

    def test_quotes_names(self, api):
        run_id = api.register('a "b", c', project="p,q")
        api.send_ok(run_id, [loss_frame(0)])
        (row,) = rows(api, run_id)
        assert (row["project"], row["run"]) == ("p,q", 'a "b", c')

    def test_comes_with_a_safe_name(self, api):
        run_id = api.register('../a "b"; c', project="naïve")
        assert ask(api, run_id).headers["content-disposition"] == 'attachment; filename="na-ve-..-a-b-c.csv"'
        assert ask(api, run_id).headers["content-type"] == "text/csv; charset=utf-8"


class TestAnExportAsParquet:
    def test_has_row_groups_of_a_size_that_suits_readers(self, api, store):
        run_id = api.register(num_blocks=99)
        frames = [Frame(step, step, 0.0, {}, {"token_similarity": Array.of([0.5] * 100)}) for step in range(2100)]
        send(api, run_id, frames)
        store.settle()
        found = pq.read_metadata(io.BytesIO(ask(api, run_id, "parquet").content))
        sizes = [found.row_group(number).num_rows for number in range(found.num_row_groups)]
        assert sizes == [102_400, 102_400, 5200]

    def test_needs_a_package(self, api, monkeypatch):
        run_id = api.register()
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        status, error, detail = problem(api.http.get(f"/api/v1/runs/{run_id}/export?format=parquet"))
        assert (status, error) == (501, "missing_package")
        assert "pip install 'tsemon[export]'" in detail


class TestAnExportThatCannotBe:
    @pytest.mark.parametrize(
        ("params", "status", "error"),
        [
            ({"metric": "los"}, 404, "unknown_metric"),
            ({"attempt": 2}, 404, "unknown_attempt"),
            ({"from_step": 2, "to_step": 1}, 422, "invalid_range"),
            ({"format": "xls"}, 422, "invalid_argument"),
        ],
    )
    def test_is_told_before_anything_is_sent(self, api, params, status, error):
        run_id = api.register()
        assert problem(api.http.get(f"/api/v1/runs/{run_id}/export", params=params))[:2] == (status, error)


class TestACellOfText:
    @pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1+cmd", "@SUM(1)", "＝1", '=1,"2"'])
    def test_is_no_formula_for_a_spreadsheet(self, api, name):
        run_id = api.register(name, project=name)
        api.send_ok(run_id, [loss_frame(1, -2.5)])
        (row,) = rows(api, run_id)
        assert (row["project"], row["run"], row["value"]) == (f"'{name}", f"'{name}", -2.5)

    def test_is_as_it_is_in_parquet_and_where_it_begins_otherwise(self, api):
        run_id = api.register("a=1", project="=1")
        api.send_ok(run_id, [loss_frame(1)])
        assert rows(api, run_id)[0]["run"] == "a=1"
        assert rows(api, run_id, "parquet")[0]["project"] == "=1"

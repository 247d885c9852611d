import gzip
import json
import math
import struct
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tsemon.tools.importing.sources import MLFLOW, MlflowStore, write_events, write_wandb
from tsemon.tools.importing import command, mlflow_store, neptune, tables, tfevents, wandb_files
from tsemon.tools.importing.source import Notes


def read(run, notes=None):
    """{step: {name: value}} of all logs of a run, NaN as text."""
    found = {}
    for log in run.logs:
        for row in log.rows(notes or Notes()):
            found.setdefault(row.step, {}).update(
                (name, "nan" if math.isnan(value) else value) for name, value in row.values
            )
    return found


class TestEventFiles:
    def test_give_scalars_by_step_with_nan_and_the_infinities(self, tmp_path):
        write_events(tmp_path / "exp", range(5))
        (run,) = tfevents.find_runs(tmp_path).runs
        found = read(run)
        assert sorted(found) == [0, 1, 2, 3, 4]
        assert (found[2]["train/loss"], found[3]["train/loss"]) == ("nan", math.inf)
        assert found[4]["layers.1.attn.entropy"] == pytest.approx(1.04)

    def test_are_a_run_for_each_folder_named_as_tensorboard_names_them(self, tmp_path):
        for folder in ("exp", "exp/eval", "exp/lr=0.1/fold 1"):
            write_events(tmp_path / folder, [0])
        names = [run.name for run in tfevents.find_runs(tmp_path / "exp").runs]
        assert names == ["exp", "exp/eval", "exp/lr=0.1/fold 1"]

    def test_are_the_same_run_wherever_they_lie(self, tmp_path):
        write_events(tmp_path / "a", [0])
        (before,) = tfevents.find_runs(tmp_path / "a").runs
        (tmp_path / "a").rename(tmp_path / "b")
        write_events(tmp_path / "b", [1])  # and when there is more
        (after,) = tfevents.find_runs(tmp_path / "b").runs
        assert after.key == before.key

    def test_have_scalars_in_the_form_of_tensors_too(self, tmp_path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(tmp_path))
        for step in range(3):
            summary = scalar_pb("loss", step / 2)
            if step:  # TensorFlow says of a tag once what it is
                summary.value[0].ClearField("metadata")
            writer.add_event(Event(wall_time=1e9, step=step, summary=summary))
        writer.close()
        (run,) = tfevents.find_runs(tmp_path).runs
        assert read(run) == {0: {"loss": 0.0}, 1: {"loss": 0.5}, 2: {"loss": 1.0}}

    def test_tell_what_is_left_out(self, tmp_path):
        import numpy as np
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_histogram("weights", np.zeros(9), 0)
            writer.add_image("sample", np.zeros((3, 2, 2)), 0)
            writer.add_text("note", "hello", 0)
            writer.add_scalar("loss", 1.0, -1)
        (run,) = tfevents.find_runs(tmp_path).runs
        notes = Notes()
        assert read(run, notes) == {}
        assert notes.left_out() == [
            "left out, histograms: weights",
            "left out, images: sample",
            "left out, steps that are no whole numbers from 0 to 2^53 - 1: loss",
            "left out, text: note/text_summary",
        ]

    def test_that_are_torn_give_what_is_before(self, tmp_path, monkeypatch):
        write_events(tmp_path, range(5))
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        (run,) = tfevents.find_runs(tmp_path).runs
        known = read(run)
        for length in range(len(whole) - 70, len(whole), 7):
            file.write_bytes(whole[:length])
            (run,) = tfevents.find_runs(tmp_path).runs
            notes = Notes()
            found = read(run, notes)
            assert {step: known[step] for step in range(4)}.items() <= found.items()
            assert notes.damages == []
            assert "is being written" in notes.remarks[0]
            monkeypatch.setattr("tsemon.tools.importing.source.GROWING_S", 0)
            assert read(run, notes) == found
            assert notes.damages == [f"{file} ends in the middle of a record; what is before it is imported"]
            monkeypatch.undo()

    def test_that_are_damaged_give_the_rest(self, tmp_path):
        write_events(tmp_path, range(5))
        (file,) = tmp_path.iterdir()
        data = bytearray(file.read_bytes())
        data[data.index(b"layers.1.attn.entropy") + 3] ^= 1
        file.write_bytes(data)
        (run,) = tfevents.find_runs(tmp_path).runs
        notes = Notes()
        found = read(run, notes)
        assert sorted(found[0]) == ["layers.0.attn.entropy", "layers.2.attn.entropy", "train/loss"]
        assert "is damaged, and is left out" in notes.damages[0]

    def test_that_claim_an_enormous_record_are_not_believed(self, tmp_path):
        from tsemon.tools.importing.tfevents import _masked_crc

        length = struct.pack("<Q", 2**62)
        (tmp_path / "events.out.tfevents.1").write_bytes(length + struct.pack("<I", _masked_crc(length)) + b"x" * 20)
        (run,) = tfevents.find_runs(tmp_path).runs
        notes = Notes()
        assert read(run, notes) == {}
        assert "does not begin as an event file does; nothing of it is imported" in notes.damages[0]


class TestOfflineRunsOfWandb:
    ROWS = (
        {"loss": 1.0, "layers.0.attn.entropy": 0.5, "eval": {"acc": 0.25, "nll": math.inf}},
        {"loss": math.nan, "flag": True, "note": "abc"},
    )

    def test_give_rows_names_config_and_state(self, tmp_path):
        write_wandb(tmp_path, self.ROWS, config={"lr": 0.1, "net": {"depth": 3}}, tags=["first"])
        (run,) = wandb_files.find_runs(tmp_path).runs
        notes = Notes()
        assert read(run, notes) == {
            0: {"loss": 1.0, "layers.0.attn.entropy": 0.5, "eval.acc": 0.25, "eval.nll": math.inf},
            1: {"loss": "nan", "flag": 1.0},
        }
        assert (run.project, run.name, list(run.tags), run.state) == ("pretrain", "my run", ["first"], "finished")
        assert run.config == {"lr": 0.1, "net": {"depth": 3}}
        assert notes.left_out() == ["left out, text: note"]

    def test_have_times(self, tmp_path):
        write_wandb(tmp_path, self.ROWS[:1])
        (run,) = wandb_files.find_runs(tmp_path).runs
        (row,) = run.logs[0].rows(Notes())
        assert abs(row.time - datetime.now().timestamp()) < 60

    def test_that_failed_are_failed_and_those_of_one_id_are_one_run(self, tmp_path):
        write_wandb(tmp_path / "1", self.ROWS, run_id="abc", exit_code=1)
        write_wandb(tmp_path / "2", [{"loss": 0.5, "step": 7}], run_id="abc", exit_code=1)
        (run,) = wandb_files.find_runs(tmp_path).runs
        assert (len(run.logs), run.state, sorted(read(run))) == (2, "failed", [0, 1, 7])

    def test_span_blocks_and_survive_a_damaged_one(self, tmp_path):
        write_wandb(tmp_path, [{"loss": float(step), "text": "x" * 5000} for step in range(40)])
        (file,) = tmp_path.rglob("run-*.wandb")
        (run,) = wandb_files.find_runs(tmp_path).runs
        assert sorted(read(run)) == list(range(40))
        data = bytearray(file.read_bytes())
        data[2**15 + 100] ^= 1
        file.write_bytes(data)
        notes = Notes()
        kept = set(read(run, notes))
        assert {0, 1, 2, 38, 39} <= kept < set(range(40))
        assert "is damaged at byte" in notes.damages[0]

    def test_that_are_something_else_are_told(self, tmp_path):
        (tmp_path / "run-x.wandb").write_bytes(b"not a file of wandb's")
        found = wandb_files.find_runs(tmp_path)
        assert (found.runs, len(found.damages)) == ([], 1)


class TestStoresOfMlflow:
    @pytest.fixture
    def store(self, tmp_path):
        return MlflowStore(tmp_path / "mlflow.db")

    def test_of_a_real_one_give_all_that_was_logged(self, tmp_path):
        (tmp_path / "mlflow.db").write_bytes(gzip.decompress(MLFLOW.read_bytes()))
        found = mlflow_store.find_runs(tmp_path / "mlflow.db")
        (run,) = found.runs  # the other was deleted
        assert (run.project, run.name, run.state, found.damages) == ("pretrain", "gpt", "failed", [])
        assert (run.config, run.tags) == ({"lr": "0.1"}, ["team=x"])
        entropies = [{f"layers.{layer}.attn.entropy": layer + step / 2 for layer in range(3)} for step in range(2)]
        assert read(run) == {
            0: {"loss": 2.5, "accuracy": 0.25, **entropies[0]},
            1: {"loss": "nan", "accuracy": 0.5, **entropies[1]},
            2: {"loss": math.inf},
            3: {"loss": -math.inf},
        }

    def test_give_metrics_params_and_tags(self, store):
        store.add_run("a" * 32, "gpt", params={"lr": "0.1"}, tags={"team": "x", "mlflow.user": "me"}, status="KILLED")
        for step, loss in enumerate((1.0, math.nan, math.inf, -math.inf)):
            store.log("a" * 32, "loss", loss, step)
        store.log("a" * 32, "loss", 9.0, -1)
        (run,) = mlflow_store.find_runs(store.path).runs
        notes = Notes()
        assert [found["loss"] for found in read(run, notes).values()] == [1.0, "nan", math.inf, -math.inf]
        assert (run.project, run.name, run.state) == ("pretrain", "gpt", "failed")
        assert (run.config, run.tags) == ({"lr": "0.1"}, ["team=x"])
        assert notes.left_out() == ["left out, steps that are no whole numbers from 0 to 2^53 - 1: loss"]

    def test_leave_deleted_runs_out_and_tell_runs_of_one_name_apart(self, store):
        store.add_run("a" * 32, "gpt", start_ms=5)
        store.add_run("b" * 32, "gpt", start_ms=9)
        store.add_run("c" * 32, "gpt", stage="deleted")
        names = {run.name for run in mlflow_store.find_runs(store.path).runs}
        assert names == {"gpt", "gpt bbbbbbbb"}

    def test_are_not_written_to(self, store):
        store.add_run("a" * 32, "gpt")
        store.path.chmod(0o444)
        before = store.path.read_bytes()
        (run,) = mlflow_store.find_runs(store.path).runs
        read(run)
        assert store.path.read_bytes() == before
        assert [file.name for file in store.path.parent.iterdir()] == ["mlflow.db"]

    def test_that_are_none_are_told(self, tmp_path):
        import sqlite3

        path = tmp_path / "other.db"
        sqlite3.connect(path).execute("CREATE TABLE x (y)").connection.close()
        found = mlflow_store.find_runs(path)
        assert found.runs == []
        assert "no such table" in found.damages[0]


class TestTables:
    def test_give_a_row_for_each_step_whatever_their_form(self, tmp_path):
        rows = [
            {"_step": 0, "_timestamp": 1.7e9, "loss": 1.5, "note": "x"},
            {"_step": 5, "_timestamp": 1.8e9, "loss": 0.5},
        ]
        (tmp_path / "a.csv").write_text("_step,_timestamp,loss,note\n0,1.7e9,1.5,x\n5,1.8e9,0.5,\n")
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "c.json").write_text(json.dumps(rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
        runs = tables.find_runs(tmp_path).runs
        assert [run.name for run in runs] == ["a", "b", "c", "d"]
        for run in runs:
            notes = Notes()
            assert read(run, notes) == {0: {"loss": 1.5}, 5: {"loss": 0.5}}
            assert notes.left_out() == ["left out, values that are no numbers: note"]
            assert [row.time for row in run.logs[0].rows(Notes())] == [1.7e9, 1.8e9]

    def test_keep_nan_and_the_infinities_and_leave_empty_cells_out(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,a,b,c\n0,nan,inf,\n1,,-Infinity,1e400\n")
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        assert read(run) == {0: {"a": "nan", "b": math.inf}, 1: {"b": -math.inf, "c": math.inf}}

    def test_of_tensorboards_download_have_the_name_of_the_file(self, tmp_path):
        (tmp_path / "loss.csv").write_text("Wall time,Step,Value\n1700000000.5,3,0.25\n")
        (run,) = tables.find_runs(tmp_path / "loss.csv").runs
        assert read(run) == {3: {"loss": 0.25}}

    def test_of_a_chart_that_wandbs_page_downloads_are_a_run_for_each_of_its_runs(self, tmp_path):
        runs = ("calm-sun-3", "gpt - big")
        columns = [f"{run} - train/loss{end}" for run in runs for end in ("", "__MIN", "__MAX")]
        (tmp_path / "chart.csv").write_text(f"Step,{','.join(columns)}\n0,1,0,2,3,3,3\n5,,,,4,4,4\n")
        found = tables.find_runs(tmp_path / "chart.csv").runs
        assert [run.name for run in found] == list(runs)
        assert [read(run) for run in found] == [
            {0: {"train/loss": 1.0}},
            {0: {"train/loss": 3.0}, 5: {"train/loss": 4.0}},
        ]
        assert found[0].key != found[1].key

    def test_without_a_step_are_told_what_they_have(self, tmp_path):
        (tmp_path / "a.csv").write_text("tick,a\n1,2\n")
        found = tables.find_runs(tmp_path / "a.csv")
        assert "no column for the step" in found.damages[0]
        assert "It has a, tick" in found.damages[0]
        assert read(tables.find_runs(tmp_path / "a.csv", "tick").runs[0]) == {1: {"a": 2.0}}
        assert "no column 'tock', which" in tables.find_runs(tmp_path / "a.csv", "tock").damages[0]

    def test_tell_the_lines_without_a_step_and_of_another_length(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,a,b\n1e3,1,2\n1_000,1,2\n٤,1,2\n9007199254740992,1,2\n2,1\n3,1,2,3\n")
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        notes = Notes()
        assert read(run, notes) == {1000: {"a": 1.0, "b": 2.0}, 2: {"a": 1.0}, 3: {"a": 1.0, "b": 2.0}}
        assert notes.left_out() == [
            "left out, cells of rows with more or fewer of them than there are columns: line 6, line 7",
            "left out, rows without a step that is a whole number from 0 to 2^53 - 1: line 3, line 4, line 5",
        ]

    def test_tell_columns_of_one_name(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,loss,acc,loss\n0,1,2,3\n")
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        notes = Notes()
        assert read(run, notes) == {0: {"loss": 3.0, "acc": 2.0}}
        assert notes.left_out() == ["left out, all but the last column of a name that several have: loss"]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
    @pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
    def test_that_are_not_utf_8_are_told_what_to_do(self, tmp_path, name, encoding):
        (tmp_path / name).write_text("step,loss\n0,1\n" if name == "a.csv" else '{"step": 0, "loss": 1}\n', encoding)
        found = tables.find_runs(tmp_path)
        assert found.runs == []
        assert "UTF-16; save it as UTF-8" in found.damages[0]

    def test_have_their_columns_from_the_first_row_with_a_step_where_they_are_json(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"config": {"lr": 1}}\n{"step": 0, "loss": 1}\n{"step": 1, "loss": 2}\n')
        (run,) = tables.find_runs(tmp_path).runs
        notes = Notes()
        assert read(run, notes) == {0: {"loss": 1.0}, 1: {"loss": 2.0}}
        assert notes.left_out()[0].endswith("2^53 - 1: line 1")

    def test_may_have_a_column_without_a_name(self, tmp_path):
        (tmp_path / "a.csv").write_text(",step,a\n0,5,1\n")
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        notes = Notes()
        assert (read(run, notes), notes.left_out()) == ({5: {"a": 1.0}}, [])

    def test_have_no_step_where_json_says_true(self, tmp_path):
        (tmp_path / "a.json").write_text('[{"step": 0, "a": 1}, {"step": true, "a": 2}]')
        (run,) = tables.find_runs(tmp_path / "a.json").runs
        notes = Notes()
        assert read(run, notes) == {0: {"a": 1.0}}
        assert notes.left_out()[0].endswith(": row 2")

    def test_tell_broken_lines_and_give_the_rest(self, tmp_path):
        (tmp_path / "a.jsonl").write_text(
            '{"step": 0, "a": 1}\nnot json\n{"step": 1.5, "a": 1}\n{"step": 2, "a": NaN}\n'
        )
        (run,) = tables.find_runs(tmp_path / "a.jsonl").runs
        notes = Notes()
        assert read(run, notes) == {0: {"a": 1.0}, 2: {"a": "nan"}}
        assert notes.damages == [f"{tmp_path / 'a.jsonl'}, line 2 is no JSON, and is left out"]

    def test_with_other_columns_are_another_export(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,a\n0,1\n")
        (before,) = tables.find_runs(tmp_path / "a.csv").runs
        (tmp_path / "a.csv").write_text("step,a,b\n0,1.0,\n9,2,2\n")
        (after,) = tables.find_runs(tmp_path / "a.csv").runs
        assert (before.key == after.key, before.columns == after.columns) == (True, False)

    def test_of_a_training_that_wrote_over_another_are_not_those_of_the_first(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,a\n0,1\n")
        (before,) = tables.find_runs(tmp_path / "a.csv").runs
        (tmp_path / "a.csv").write_text("step,a\n0,1.5\n")
        (after,) = tables.find_runs(tmp_path / "a.csv").runs
        assert before.key != after.key

    def test_that_are_being_written_give_whole_lines(self, tmp_path, monkeypatch):
        (tmp_path / "a.csv").write_text("step,a\n0,1\n1,0.2")  # 0.25, in a moment
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        notes = Notes()
        assert read(run, notes) == {0: {"a": 1.0}}
        assert "is being written" in notes.remarks[0]
        monkeypatch.setattr("tsemon.tools.importing.source.GROWING_S", 0)
        assert read(run) == {0: {"a": 1.0}, 1: {"a": 0.2}}

    def test_below_a_folder_are_called_after_what_is_between(self, tmp_path):
        for version in range(2):
            (tmp_path / f"version_{version}").mkdir()
            (tmp_path / f"version_{version}/metrics.csv").write_text("step,a\n0,1\n")
        assert [run.name for run in tables.find_runs(tmp_path).runs] == ["version_0/metrics", "version_1/metrics"]


class TestNeptunesExports:
    # The columns of neptune-exporter, typed in: the service that it asks has ended.
    SCHEMA = pa.schema(
        [
            *((name, pa.string()) for name in ("project_id", "run_id", "attribute_path", "attribute_type")),
            ("step", pa.decimal128(18, 6)),
            ("timestamp", pa.timestamp("ms", "UTC")),
            ("int_value", pa.int64()),
            ("float_value", pa.float64()),
            ("string_value", pa.string()),
            ("bool_value", pa.bool_()),
            ("datetime_value", pa.timestamp("ms", "UTC")),
            ("string_set_value", pa.list_(pa.string())),
        ]
    )

    def write(self, path, *rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = [{"project_id": "team/pretrain", "run_id": "GPT-1", **row} for row in rows]
        pq.write_table(pa.Table.from_pylist(whole, self.SCHEMA), path)

    def test_give_series_config_and_tags(self, tmp_path):
        when = datetime(2025, 1, 1, tzinfo=UTC)
        self.write(
            tmp_path / "team_pretrain/GPT-1_part_0.parquet",
            {"attribute_path": "params/lr", "attribute_type": "float", "float_value": 0.1},
            {"attribute_path": "sys/tags", "attribute_type": "string_set", "string_set_value": ["a", "b"]},
            *(
                {
                    "attribute_path": f"layers.{layer}.loss",
                    "attribute_type": "float_series",
                    "step": Decimal(step),
                    "timestamp": when,
                    "float_value": float(layer),
                }
                for step in (0, 10)
                for layer in (0, 1)
            ),
            {"attribute_path": "half", "attribute_type": "float_series", "step": Decimal("0.5"), "float_value": 1.0},
            {"attribute_path": "log", "attribute_type": "string_series", "step": Decimal(0), "string_value": "x"},
        )
        assert command.guess(tmp_path) == "neptune"
        (run,) = neptune.find_runs(tmp_path).runs
        notes = Notes()
        assert read(run, notes) == {step: {"layers.0.loss": 0.0, "layers.1.loss": 1.0} for step in (0, 10)}
        assert (run.project, run.name, run.config, run.tags) == (
            "team/pretrain",
            "GPT-1",
            {"params/lr": 0.1},
            ["a", "b"],
        )
        assert notes.left_out() == [
            "left out, steps that are no whole numbers from 0 to 2^53 - 1: half",
            "left out, string_series: log",
        ]
        assert next(run.logs[0].rows(Notes())).time == when.timestamp()

import json
import math
import re
from contextlib import suppress
from itertools import islice

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.tensorboard import SummaryWriter

from tests import commands
from tests.clients.command_line import HOSTILE, Terminal
from tests.service import ServiceProcess
from tests.tsemon.tools.importing.sources import MlflowStore, write_events, write_wandb
from tests.unreadable import unreadable
from tsemon.errors import InvalidArgument, MissingData, ServerUnreachable
from tsemon.terminal import printable
from tsemon.tools.importing import command, tables, work
from tsemon.tools.importing.naming import Naming
from tsemon.tools.importing.source import Notes
from tsemon.transport import Spool, find_spools, sync
from tsemon_client import Client


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


@pytest.fixture
def project(request):
    return request.node.name


class Stored:
    """What the service has of a project's runs."""

    def __init__(self, service, project):
        self._api = f"{service.url}/api/v1/runs"
        self.project = project

    def run(self, name):
        runs = httpx.get(self._api, params={"project": self.project, "run": name}).json()["runs"]
        return httpx.get(f"{self._api}/{runs[0]['run_id']}").json() if runs else None

    def series(self, run, metric, layer=None, **options):
        asked = {"metric": metric, **({} if layer is None else {"layer": layer}), **options}
        found = httpx.get(f"{self._api}/{self.run(run)['run_id']}/series", params=asked).json()
        return dict(zip(found["step"], found["mean"], strict=True))

    def alerts(self):
        return httpx.get(f"{self._api.removesuffix('runs')}alerts", params={"project": self.project}).json()["alerts"]

    def heatmap(self, run, metric):
        found = httpx.get(f"{self._api}/{self.run(run)['run_id']}/heatmap", params={"metric": metric}).json()
        return dict(zip(found["step"], found["values"], strict=True))


@pytest.fixture
def stored(service, project):
    return Stored(service, project)


@pytest.fixture
def bring(service, project, capsys):
    """Import into the service; what was printed, and of an import that lost something what was told."""

    def bring(*sources, is_whole=True, **options):
        options = {"server": service.url, "project": project} | options
        assert command.run([str(source) for source in sources], **options) is is_whole
        out, err = capsys.readouterr()
        assert ("tsemon: " in err) is not is_whole
        return out if is_whole else err

    return bring


def near(values):
    """Of float32."""
    return {step: value if value is None else pytest.approx(value, rel=1e-6) for step, value in values.items()}


class TestAnImportOfEventFiles:
    def test_folds_layers_and_keeps_nan_and_the_infinities(self, tmp_path, bring, stored, service):
        write_events(tmp_path / "exp", range(5))
        shown = bring(tmp_path / "exp")
        assert shown.splitlines()[0].endswith(
            "/exp: 5 new frames, 0 were there already; 2 metrics, 1 of them over 3 layers, steps 0 to 4; "
            f"now at {service.url}"
        )
        run = stored.run("exp")
        assert (run["state"], run["num_frames"], run["num_blocks"]) == ("finished", 5, 3)
        assert run["config"]["imported"]["from"] == "tfevents"
        assert stored.series("exp", "attn.entropy", layer=1) == near({step: 1 + step / 100 for step in range(5)})
        assert stored.heatmap("exp", "attn.entropy")[4] == pytest.approx([0.04, 1.04, 2.04])
        assert stored.series("exp", "loss") == near({0: 1.0, 1: 0.5, 2: None, 3: None, 4: 0.2})

    def test_done_again_changes_nothing(self, tmp_path, bring, stored):
        write_events(tmp_path / "exp", range(4))  # at the end the loss is not finite
        bring(tmp_path / "exp")
        before, alerts = stored.run("exp"), stored.alerts()
        assert [alert["rule"] for alert in alerts] == ["loss-not-finite"]
        assert "0 new frames, 4 were there already" in bring(tmp_path / "exp")
        assert stored.run("exp") | {"updated_at": before["updated_at"]} == before
        assert stored.alerts() == alerts, "none was open again meanwhile"

    def test_that_grew_brings_what_is_new(self, tmp_path, bring, stored):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path / "exp"))
        for step in range(4):
            writer.add_scalar("loss", step, step)
        writer.flush()
        assert ": 4 new frames" in bring(tmp_path / "exp")
        writer.add_scalar("eval", 30.0, 3)
        writer.add_scalar("eval", 10.0, 1)  # late
        writer.add_scalar("loss", 4.0, 4)
        writer.close()
        assert ": 3 new frames, 2 were there already" in bring(tmp_path / "exp")
        assert stored.series("exp", "loss") == {step: step for step in range(5)}
        assert stored.series("exp", "eval") == {1: 10.0, 3: 30.0}
        assert stored.run("exp")["attempt"] == 1

    def test_with_layers_that_came_later_is_an_attempt_that_has_all(self, tmp_path, bring, stored):
        from torch.utils.tensorboard import SummaryWriter

        write_events(tmp_path / "exp", range(3), num_layers=2)
        bring(tmp_path / "exp")
        with SummaryWriter(str(tmp_path / "exp"), filename_suffix=".b") as writer:
            writer.add_scalar("layers.5.attn.entropy", 7.0, 9)
        bring(tmp_path / "exp")
        assert (stored.run("exp")["attempt"], stored.run("exp")["num_blocks"]) == (2, 6)
        assert stored.series("exp", "attn.entropy", layer=5, from_step=9) == {9: 7.0}
        assert stored.series("exp", "attn.entropy", layer=1)[2] == pytest.approx(1.02)

    def test_of_a_training_that_went_back_to_a_checkpoint_hides_what_it_did_again(self, tmp_path, bring, stored):
        write_events(tmp_path / "exp", range(10), num_layers=1, filename_suffix=".a")
        write_events(tmp_path / "exp", range(6, 9), num_layers=2, filename_suffix=".b")
        assert "in 2 attempts" in bring(tmp_path / "exp")
        run = stored.run("exp")
        assert [attempt["resume_step"] for attempt in run["attempts"]] == [None, 6]
        assert sorted(stored.series("exp", "loss")) == list(range(9))
        assert sorted(stored.series("exp", "loss", attempt=1)) == list(range(10))
        assert "0 new frames in 2 attempts, 13 were there already" in bring(tmp_path / "exp")

    def test_of_a_training_and_its_evaluation_at_the_end_is_one_attempt(self, tmp_path, bring, stored):
        """Hugging Face's Trainer: `train()` with evaluations, then `evaluate()`, which begins another file."""
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path / "exp"), filename_suffix=".0") as writer:
            for step in range(10, 101, 10):
                writer.add_scalar("train/loss", 1 / step, step)
            writer.add_scalar("eval/loss", 0.25, 100)
        with SummaryWriter(str(tmp_path / "exp"), filename_suffix=".1") as writer:
            writer.add_scalar("eval/loss", 0.25, 100)
            writer.add_scalar("eval/f1", 0.5, 100)
        bring(tmp_path / "exp")
        assert stored.run("exp")["attempt"] == 1
        assert stored.series("exp", "loss")[100] == pytest.approx(0.01)
        assert stored.series("exp", "eval/f1") == {100: 0.5}

    def test_of_two_writers_at_once_is_one_attempt(self, tmp_path, bring, stored):
        from torch.utils.tensorboard import SummaryWriter

        writers = [SummaryWriter(str(tmp_path / "exp"), filename_suffix=f".{number}") for number in range(2)]
        for step in range(4):
            for number, writer in enumerate(writers):
                writer.add_scalar(f"metric{number}", step, step)
                writer.add_scalar("shared", step, step)
        for writer in writers:
            writer.close()
        bring(tmp_path / "exp")
        assert stored.run("exp")["attempt"] == 1
        assert stored.series("exp", "metric1") == stored.series("exp", "metric0") == {step: step for step in range(4)}

    def test_that_is_torn_is_told_and_brings_the_rest(self, tmp_path, bring, stored, monkeypatch):
        monkeypatch.setattr("tsemon.tools.importing.source.GROWING_S", 0)
        write_events(tmp_path / "exp", range(5))
        write_events(tmp_path / "other", range(2))
        (file,) = (tmp_path / "exp").iterdir()
        file.write_bytes(file.read_bytes()[:-5])
        err = bring(tmp_path, is_whole=False)
        assert "ends in the middle of a record" in err
        name = tmp_path.name
        assert (stored.run(f"{name}/exp")["num_frames"], stored.run(f"{name}/other")["num_frames"]) == (5, 2)
        assert stored.series(f"{name}/exp", "attn.entropy", layer=2)[4] == pytest.approx(2.04)

    def test_under_other_names_is_an_attempt_that_has_all(self, tmp_path, bring, stored):
        write_events(tmp_path / "exp", range(3))
        bring(tmp_path / "exp")
        assert "3 new frames" in bring(tmp_path / "exp", naming=Naming(same=(("attn.entropy", "attention_entropy"),)))
        assert stored.series("exp", "attention_entropy", layer=0)[2] == pytest.approx(0.02)
        assert stored.run("exp")["attempt"] == 2

    def test_under_other_names_and_back_again_shows_what_came_last(self, tmp_path, bring, stored):
        """With two attempts at each import, of which the first is hidden in part."""
        write_events(tmp_path / "exp", range(10), filename_suffix=".a")
        write_events(tmp_path / "exp", range(6, 9), filename_suffix=".b")
        other = Naming(same=(("attn.entropy", "entropy"),))
        for naming, attempt in ((None, 2), (other, 4), (None, 6), (None, 6), (other, 8), (other, 8)):
            bring(tmp_path / "exp", naming=naming)
            assert stored.run("exp")["attempt"] == attempt
            metric = "attn.entropy" if naming is None else "entropy"
            assert sorted(stored.series("exp", metric, layer=0)) == list(range(9))
            assert [found["resume_step"] for found in stored.run("exp")["attempts"]] == [None, 6] * (attempt // 2)

    def test_that_grew_into_two_attempts_after_another_came_between_has_both(self, tmp_path, bring, stored):
        write_events(tmp_path / "exp", range(10), filename_suffix=".a")
        bring(tmp_path / "exp")
        bring(tmp_path / "exp", naming=Naming(same=(("attn.entropy", "entropy"),)))
        write_events(tmp_path / "exp", range(6, 9), filename_suffix=".b")
        bring(tmp_path / "exp")
        assert sorted(stored.series("exp", "attn.entropy", layer=0)) == list(range(9))

    def test_with_more_scalars_than_a_frame_holds_has_all_of_them(self, tmp_path, bring, stored):
        row = {"step": 3} | {f"m{number}": number for number in range(1500)}
        (tmp_path / "wide.jsonl").write_text(json.dumps(row))
        bring(tmp_path / "wide.jsonl")
        assert stored.run("wide")["num_frames"] == 2
        assert stored.series("wide", "m0") == {3: 0.0}
        assert stored.series("wide", "m1499") == {3: 1499.0}


class TestAnImportOfOtherTools:
    def test_brings_offline_runs_of_wandb(self, tmp_path, bring, stored):
        rows = [{"loss": 2.0, "layers.0.x": 1.0, "layers.1.x": math.nan}, {"loss": math.nan, "layers.0.x": math.inf}]
        write_wandb(tmp_path, rows, tags=["<b>"], config={"lr": 0.1, "bad": math.nan}, exit_code=3)
        bring(tmp_path)
        run = stored.run("my run")
        assert (run["state"], run["tags"], run["config"]["lr"]) == ("failed", ["<b>"], 0.1)
        assert stored.series("my run", "loss") == {0: 2.0, 1: None}
        assert stored.series("my run", "x", layer=0) == {0: 1.0, 1: None}
        assert "0 new frames, 2 were there already" in bring(tmp_path)

    def test_brings_stores_of_mlflow_that_go_on(self, tmp_path, bring, stored):
        store = MlflowStore(tmp_path / "mlflow.db")
        store.add_run("a" * 32, "gpt", status="RUNNING", params={"lr": "0.1"})
        for step in range(3):
            for layer in range(2):
                store.log("a" * 32, f"layers.{layer}.norm", layer + step, step)
        bring(store.path)
        assert stored.heatmap("gpt", "norm") == {step: [step, 1 + step] for step in range(3)}
        store.log("a" * 32, "val_loss", 0.5, 1)
        store.log("a" * 32, "val_loss", 0.25, 3)
        assert ": 2 new frames, 2 were there already" in bring(store.path)
        assert stored.series("gpt", "val_loss") == {1: 0.5, 3: 0.25}
        assert stored.heatmap("gpt", "norm")[1] == [1.0, 2.0]
        assert stored.run("gpt")["state"] == "finished"


class TestStepsThatComeAgain:
    def test_are_told_with_how_many_values_they_cost(self, tmp_path, bring, stored):
        rows = "".join(f"{epoch},{step},{epoch * 10 + step},7,nan\n" for epoch in range(3) for step in range(4))
        (tmp_path / "a.csv").write_text("epoch,step,loss,same,void\n" + rows)
        told = (
            "16 values, 8 of epoch and of 1 more, gave way to a later one of the same step; where steps begin again, "
        )
        assert told + "--step-column names a column that goes on" in bring(tmp_path / "a.csv", dry_run=True)
        assert told in bring(tmp_path / "a.csv")
        assert stored.series("a", "loss") == {0: 20.0, 1: 21.0, 2: 22.0, 3: 23.0}

    def test_are_told_of_no_source_whose_steps_go_on(self, tmp_path, bring):
        write_events(tmp_path / "exp", range(5))
        assert "gave way" not in bring(tmp_path / "exp")

    def test_are_the_order_where_mlflow_was_given_no_step(self, tmp_path, bring, stored):
        store = MlflowStore(tmp_path / "mlflow.db")
        store.add_run("a" * 32, "gpt")
        for number in range(5):
            store.log("a" * 32, "loss", 1.0 / (number + 1), 0)
        assert "logged without a step, so their order is the step: loss" in bring(store.path)
        assert stored.series("gpt", "loss") == near({number: 1 / (number + 1) for number in range(5)})
        store.log("a" * 32, "loss", 0.125, 0)
        store.log("a" * 32, "test", 0.5, 0)
        assert ": 2 new frames, 4 were there already" in bring(store.path)  # step 0 has a further metric
        assert stored.series("gpt", "loss")[5] == 0.125
        assert stored.series("gpt", "test") == {0: 0.5}


class TestHostileSources:
    def test_are_runs_like_any_other(self, tmp_path, bring, stored):
        name = "<script>alert(1)</script>\u202e" + "x" * 300
        write_wandb(
            tmp_path,
            [{"<img src=x>": 1.0, "потери": 2.0, "layers.1000000000.x": 3.0, "layers.77777.x": 4.0}],
            name=name,
            config={"a" * 5000: "b" * 10_000},
        )
        shown = bring(tmp_path)
        assert "left out, layers beyond the 10000 that a run may have: layers.1000000000.x, layers.77777.x" in shown
        (called,) = [line.split("/", 1)[1] for line in shown.splitlines() if ": 1 new frame" in line]
        run = stored.run(called.split(": 1 new")[0].replace(r"\u202e", "\u202e"))
        assert (run["num_blocks"], len(run["run"]), run["num_frames"]) == (0, 128, 1)

    def test_with_a_config_beyond_what_is_kept_are_imported_without_it(self, tmp_path, bring, stored):
        write_wandb(tmp_path, [{"loss": 1.0}], config={"blob": "x" * 2_000_000})
        bring(tmp_path)
        assert "larger than the 1 MiB" in stored.run("my run")["config"]["note"]


class TestWhereThereIsARunOfThatName:
    def test_it_is_not_hidden_unless_that_is_wanted(self, tmp_path, bring, stored, service, project):
        registered = httpx.post(f"{service.url}/api/v1/runs", json={"project": project, "run": "exp"}).json()
        frame = {"seq": 0, "step": 0, "time": 1.0, "scalars": {"loss": 9.0}}
        body = {"writer": "w", "attempt": 1, "frames": [frame]}
        httpx.post(f"{service.url}/api/v1/runs/{registered['run_id']}/frames", json=body).raise_for_status()
        write_events(tmp_path / "exp", range(3))
        err = bring(tmp_path / "exp", is_whole=False)
        assert "that is not from this source; --run or --project gives another name" in err
        assert stored.series("exp", "loss") == {0: 9.0}
        bring(tmp_path / "exp", name="exp-tb")
        assert stored.run("exp-tb")["num_frames"] == 3
        bring(tmp_path / "exp", replace=True)
        assert stored.run("exp")["attempt"] == 2
        assert stored.series("exp", "loss", attempt=1) == {0: 9.0}

    def test_the_others_are_imported(self, tmp_path, bring, stored):
        (tmp_path / "a.csv").write_text("step,x\n0,1\n")
        (tmp_path / "a.jsonl").write_text('{"step": 0, "x": 2}')
        (tmp_path / "b.csv").write_text("step,x\n0,3\n")
        bring(tmp_path, is_whole=False)
        assert stored.series("a", "x") == {0: 1.0}
        assert stored.series("b", "x") == {0: 3.0}


class TestTwoTrainingsInFilesOfOneName:
    """As Lightning's CSVLogger writes them."""

    @pytest.fixture
    def versions(self, tmp_path):
        for version in range(2):
            folder = tmp_path / "ll" / f"version_{version}"
            folder.mkdir(parents=True)
            rows = "".join(f"{step},{100 * version + step}\n" for step in range(3))
            (folder / "metrics.csv").write_text("step,train_loss\n" + rows)
        return sorted((tmp_path / "ll").iterdir())

    def test_are_not_mixed_by_one_import_after_the_other(self, versions, bring, stored):
        bring(versions[0])
        err = bring(versions[1], is_whole=False)
        assert "that is not from this source" in err
        assert stored.series("metrics", "loss") == {0: 0.0, 1: 1.0, 2: 2.0}
        bring(versions[1], replace=True)
        assert stored.series("metrics", "loss") == {0: 100.0, 1: 101.0, 2: 102.0}

    def test_are_two_runs_in_one_import(self, versions, tmp_path, bring, stored):
        for sources in (versions, [tmp_path / "ll"], [version / "metrics.csv" for version in versions]):
            bring(*sources)
            for number, name in enumerate(("version_0/metrics", "version_1/metrics")):
                assert stored.series(name, "loss") == {step: 100 * number + step for step in range(3)}

    def test_of_one_name_all_the_same_are_not_mixed(self, versions, tmp_path, bring, stored):
        (tmp_path / "x.csv").write_text("step,a\n0,1\n")
        (tmp_path / "x.jsonl").write_text('{"step": 0, "a": 2}\n')
        for options in ({"dry_run": True}, {"replace": True}):
            err = bring("table", tmp_path, is_whole=False, **options)
            told = (
                f"x.jsonl is left out: its run would be called {stored.project}/x, as is that of {tmp_path / 'x.csv'};"
            )
            assert told in err
        assert stored.series("x", "a") == {0: 1.0}


class TestAnImportThatIsInterrupted:
    def test_goes_on_where_it_was(self, tmp_path, bring, stored, service, project, monkeypatch):
        from tsemon.transport import recorded, run_writer

        monkeypatch.setattr(recorded, "BATCH", 10)
        (tmp_path / "a.csv").write_text("step,x\n" + "".join(f"{step},{step}\n" for step in range(100)))
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        found = work.survey(run, Naming(), lambda size: None)
        (part,) = work.parts_of(found)
        key = work.attempt_key(found, Naming(), 0, part)
        body = work.registration(found, project, "a", part, key)
        frames = work.frames(run.logs[0], found.surveys[0], found.plan, lambda size: None, found.notes)
        with suppress(KeyboardInterrupt), run_writer(body, server=service.url, check=lambda there: None) as attempt:
            for writer, frame in islice(frames, 45):
                attempt.put(writer, frame)
            raise KeyboardInterrupt
        assert (stored.run("a")["num_frames"], stored.run("a")["state"]) == (40, "failed")
        assert ": 60 new frames, 40 were there already" in bring(tmp_path / "a.csv")
        assert stored.series("a", "x", points=200) == {step: step for step in range(100)}
        assert (stored.run("a")["num_frames"], stored.run("a")["state"]) == (100, "finished")


class TestALogThatCannotBeRead:
    def test_costs_no_other_run(self, tmp_path, bring, stored):
        (tmp_path / "a.csv").write_text("step,x,note\n0,1,\n1,2," + "y" * 300_000 + "\n2,3,\n")
        (tmp_path / "b.csv").write_text("step,x\n0,3\n")
        rows = [{"step": step, "x": float(step * 7919 % 1000)} for step in range(20_000)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=5000, compression="gzip")
        data = bytearray((tmp_path / "c.parquet").read_bytes())
        data[len(data) // 2 : len(data) // 2 + 500] = bytes(500)
        (tmp_path / "c.parquet").write_bytes(data)
        err = bring("table", tmp_path, is_whole=False)
        assert "c.parquet cannot be read: " in err
        assert err.count("what is before it is imported") == 1
        assert stored.series("a", "x") == {0: 1.0, 1: 2.0, 2: 3.0}
        assert stored.series("b", "x") == {0: 3.0}
        assert 0 < stored.run("c")["num_frames"] < 20_000

    def test_when_its_values_are_wanted_is_told_as_when_its_names_were(self, tmp_path):
        (tmp_path / "a.csv").write_text("step,x\n0,1\n")
        (run,) = tables.find_runs(tmp_path / "a.csv").runs
        found = work.survey(run, Naming(), lambda size: None)
        (tmp_path / "a.csv").unlink()
        notes = Notes()
        assert [*work.frames(run.logs[0], found.surveys[0], found.plan, lambda size: None, notes)] == []
        assert notes.damages == ["a.csv cannot be read: No such file or directory; what is before it is imported"]


class TestASpoolFolder:
    def test_takes_an_import_and_sync_brings_it_once(self, tmp_path, bring, stored, service):
        write_events(tmp_path / "exp", range(5))
        for _ in range(2):
            shown = bring(tmp_path / "exp", spool=tmp_path / "spool")
        assert "0 new frames, 5 were there already" in shown
        assert f"; now at {tmp_path / 'spool'}\n" in shown
        for _ in range(2):
            sync(tmp_path / "spool", service.url)
            bring(tmp_path / "exp", spool=tmp_path / "spool")  # after what was there is delivered and deleted
        sync(tmp_path / "spool", service.url)
        run = stored.run("exp")
        assert (run["num_frames"], run["state"], run["attempt"]) == (5, "finished", 1)
        assert "0 new frames, 5 were there already" in bring(tmp_path / "exp")

    def test_does_not_hide_a_training_that_waits_there(self, tmp_path, bring, project):
        (tmp_path / "exp.csv").write_text("step,x\n0,1\n")
        training = {"project": project, "run": "exp", "attempt_key": "k", "config": {}, "tags": [], "resume_step": None}
        Spool.create(tmp_path / "spool", training, "trainer").close()
        err = bring(tmp_path / "exp.csv", spool=tmp_path / "spool", is_whole=False)
        assert "that is not from this source" in err
        assert len(find_spools(tmp_path / "spool")) == 1
        bring(tmp_path / "exp.csv", spool=tmp_path / "spool", replace=True)
        assert len(find_spools(tmp_path / "spool")) == 2


class TestJson:
    def test_has_what_became_of_each_run_and_what_is_lost(self, tmp_path, bring, stored, service, project, capsys):
        (tmp_path / "a.csv").write_text("step,x\n0,1\n")
        (tmp_path / "b.csv").write_text("x,y\n0,1\n")
        options = {"server": service.url, "project": project, "as_json": True}
        assert command.run([str(tmp_path)], **options) is False
        document = json.loads(capsys.readouterr().out)
        assert [(run["run"], run["run_id"], run["num_new"]) for run in document["runs"]] == [
            ("a", stored.run("a")["run_id"], 1)
        ]
        assert document["runs"][0]["into"] == service.url
        assert "b.csv has no column for the step" in document["damages"][0]


class TestAnExportOfTsemon:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_is_refused_because_it_has_a_row_for_each_value(self, tmp_path, bring, stored, service, project, ending):
        (tmp_path / "a.csv").write_text("step,loss\n0,1\n1,2\n")
        bring(tmp_path / "a.csv")
        with Client(service.url) as client:
            export = client.export(stored.run("a")["run_id"], tmp_path / f"b.{ending}")
        err = bring(export, is_whole=False)
        assert f"b.{ending} is an export of tsemon with a row for each value" in err
        assert "tsemon admin backup" in err


class TestASourceWithoutRuns:
    def test_is_told_as_lost(self, tmp_path, bring):
        err = bring(MlflowStore(tmp_path / "mlflow.db").path, is_whole=False)
        assert f"no runs with numbers in {tmp_path / 'mlflow.db'}: nothing to import" in err

    def test_is_told_where_its_runs_have_no_numbers(self, tmp_path, bring, stored):
        with SummaryWriter(str(tmp_path / "exp")) as writer:
            writer.add_text("note", "hello", 0)
        assert "no runs with numbers in" in bring(tmp_path, is_whole=False)
        write_events(tmp_path / "other", [0])
        bring(tmp_path)
        assert stored.run(f"{tmp_path.name}/other")["num_frames"] == 1

    def test_is_not_said_to_be_anywhere(self, tmp_path, project, service, capsys):
        (tmp_path / "text.csv").write_text("step,note\n0,hello\n")
        command.run([str(tmp_path / "text.csv")], server=service.url, project=project)
        shown, _ = capsys.readouterr()
        where = tmp_path / "text.csv"
        assert shown.splitlines()[0] == f"{project}/text: nothing to import from {where}: 0 metrics, no steps"


class TestTablesBesideRunsOfAnotherTool:
    def test_are_left_alone_and_told(self, tmp_path, bring, stored, capsys):
        write_events(tmp_path / "exp", [0])
        (tmp_path / "exp/scores.csv").write_text("step,score\n0,1\n")
        told = f"left alone, 1 file that may be a table: exp/scores.csv; tsemon import table {tmp_path} imports tables"
        assert bring(tmp_path).splitlines()[-1] == told
        assert json.loads(bring(tmp_path, as_json=True))["left_alone"] == [told]
        assert "left alone" not in bring("tfevents", tmp_path)
        bring("table", tmp_path)
        assert stored.series("exp/scores", "score") == {0: 1.0}


class TestAFolderThatCannotBeRead:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("open", "closed"):
            (tmp_path / "exports" / name).mkdir(parents=True)
            (tmp_path / "exports" / name / f"{name}.csv").write_text("step,x\n0,1\n")
        with unreadable(tmp_path / "exports/closed"):
            yield tmp_path / "exports"

    def test_is_told_and_the_rest_is_imported(self, folder, capsys):
        assert command.run([str(folder)], server="", dry_run=True) is False
        out, err = capsys.readouterr()
        assert "default/open/open: would be imported" in out
        assert err == f"tsemon: {folder / 'closed'} cannot be read: Permission denied\n"

    def test_is_told_where_nothing_else_is_there(self, folder):
        with pytest.raises(MissingData, match="closed cannot be read: Permission denied"):
            command.run([str(folder / "closed")], server="", dry_run=True)


class TestWhatCannotBeMeant:
    def test_is_told_before_anything_is_sent(self, tmp_path, bring):
        write_events(tmp_path / "a", [0])
        write_events(tmp_path / "b", [0])
        with pytest.raises(InvalidArgument, match="--run names one run, and there are 2"):
            bring(tmp_path, name="x")
        with pytest.raises(InvalidArgument, match="is not there"):
            bring(tmp_path / "nothing")
        with pytest.raises(InvalidArgument, match="--only fits none of 2 runs"):
            bring(tmp_path, only=["x*"])
        write_wandb(tmp_path, [{"a": 1}])
        with pytest.raises(InvalidArgument, match="holds tfevents and wandb; say which"):
            bring(tmp_path)
        assert "2 new frames" not in bring("wandb", tmp_path)

    def test_a_service_that_is_not_there_is_told_at_once(self, tmp_path, bring):
        write_events(tmp_path, [0])
        with pytest.raises(ServerUnreachable):
            bring(tmp_path, server="http://127.0.0.1:9")


class TestTheCommand:
    def run(self, *arguments, cwd):
        return commands.tsemon("import", *arguments, folder=cwd)

    def test_says_what_it_would_do(self, tmp_path):
        write_events(tmp_path / "exp", range(3))
        options = ("--dry-run", "--map", "attn.entropy=attention_entropy")
        done = self.run("exp", *options, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads(self.run("exp", *options, "--json", cwd=tmp_path).stdout)
        assert document["damages"] == []
        (run,) = document["runs"]
        assert (run["project"], run["run"], run["run_id"], run["num_new"]) == ("default", "exp", None, None)
        assert (run["num_layers"], run["first_step"], run["last_step"]) == (3, 0, 2)
        assert run["metrics"][1] == {"metric": "loss", "is_layered": False, "names": ["train/loss"]}
        assert done.stdout.splitlines() == [
            "default/exp: would be imported from exp: 2 metrics, 1 of them over 3 layers, steps 0 to 2",
            "  attention_entropy: 3 layers, from layers.0.attn.entropy to layers.2.attn.entropy",
            "  loss: from train/loss",
        ]

    def test_shows_on_a_terminal_how_far_it_is(self, tmp_path):
        write_events(tmp_path / HOSTILE, range(3))
        terminal = Terminal(None, "import", tmp_path / HOSTILE, "--dry-run")
        assert terminal.wait() == 0
        bar = re.escape(printable(HOSTILE)[:40]) + " ━+ +"
        assert re.match(rf"{bar}0% .*{bar}100% ", terminal.shown)
        assert b"\x1b]0;" not in terminal.output

    def test_ends_with_1_where_something_is_lost_and_with_2_where_it_is_asked_wrongly(self, tmp_path):
        (tmp_path / "x.wandb").write_bytes(b"junk")
        assert self.run("x.wandb", "--dry-run", cwd=tmp_path).returncode == 1
        assert self.run("x.wandb", "--pattern", "nothing", cwd=tmp_path).returncode == 2
        (tmp_path / "a.csv").write_text("step,a\n0,1\n")
        assert self.run("a.csv", "--run", "", cwd=tmp_path).returncode == 2
        both = self.run("a.csv", "--spool", "s", "--server", "http://a", cwd=tmp_path)
        assert (both.returncode, both.stderr) == (2, "tsemon: expected --server or --spool, got both\n")
        missing = self.run("nothing", cwd=tmp_path)
        assert (missing.returncode, missing.stderr) == (2, "tsemon: nothing is not there\n")

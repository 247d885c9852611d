import logging
import math
import shutil
import threading
import time

import pytest
import torch

import tsemon
import tsemon.mirrors
from tests import zoo
from tests.frames import frames_in
from tests.tsemon.tools.importing.sources import end_of
from tsemon.errors import InvalidArgument, MissingPackage, SpoolError
from tsemon.mirrors import Mirrored, TensorBoard, WandB, as_mirrors
from tsemon.mirrors.numbers import numbers_of
from tsemon.tools.importing import tfevents, wandb_files, work
from tsemon.tools.importing.naming import Naming
from tsemon.tools.importing.source import Notes
from tsemon.wire import Array, Frame


def frame_of(step, seq=None, **scalars):
    arrays = {"token_similarity": Array.of([0.25, 0.5, math.nan, 1.0])}
    return Frame(step if seq is None else seq, step, 1.7e9 + step, {"loss": step / 2, **scalars}, arrays)


def rows_in(found):
    """{step: {name: value}} of the one run that a reader found, NaN as text."""
    (run,) = found.runs
    rows = [row for log in run.logs for row in log.rows(Notes())]
    together = {}
    for row in rows:
        together.setdefault(row.step, {}).update((n, "nan" if math.isnan(v) else v) for n, v in row.values)
    return together


def train(tmp_path, num_steps=4, **options):
    """A small encoder, sampled every step; its monitor, closed, and the frames that it spooled."""
    torch.manual_seed(0)
    model, forward = zoo.torch_encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path / "spool", **options) as monitor:
        for _ in range(num_steps):
            loss = forward().square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    return monitor, frames_in(tmp_path / "spool")


class Collecting:
    """A mirror of the user's own."""

    def __init__(self):
        self.frames, self.threads, self.is_closed = [], set(), False

    def write(self, frame):
        self.threads.add(threading.current_thread().name)
        self.frames.append(frame)

    def close(self):
        self.is_closed = True


class Failing(Collecting):
    def write(self, frame):
        raise OSError("the disk of the other tool is full")


class Hanging(Collecting):
    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def write(self, frame):
        super().write(frame)
        self.released.wait(60)


class TestNumbersOfAFrame:
    def test_are_its_scalars_and_aggregates_over_layers_that_are_measured(self):
        assert numbers_of(frame_of(4), "aggregates") == {
            "tsemon/loss": 2.0,
            "tsemon/token_similarity/min": 0.25,
            "tsemon/token_similarity/mean": pytest.approx(1.75 / 3),
            "tsemon/token_similarity/max": 1.0,
            "tsemon/token_similarity/last": 1.0,
        }

    def test_are_every_layer_where_that_is_wanted(self):
        found = numbers_of(frame_of(4), "each")
        assert [name for name in found if "similarity" in name] == [f"tsemon/token_similarity/0{n}" for n in range(4)]
        assert numbers_of(frame_of(4), "none") == {"tsemon/loss": 2.0}

    def test_are_nan_where_no_layer_is_known(self):
        frame = Frame(0, 0, 0.0, {}, {"x": Array.of([math.nan, math.nan])})
        assert all(math.isnan(value) for value in numbers_of(frame, "aggregates").values())


class TestAMirror:
    def test_gets_every_frame_on_a_thread_of_its_own_and_is_closed(self, tmp_path):
        mirror = Collecting()
        monitor, frames = train(tmp_path, also=[mirror])
        assert [frame.step for frame in mirror.frames] == [frame["step"] for frame in frames] == [0, 1, 2, 3]
        assert mirror.threads == {"tsemon-mirror"}
        assert mirror.is_closed
        assert monitor.status.delivery.mirrors[0].endswith(": 4 frames")

    def test_that_fails_is_told_once_and_harms_nothing(self, tmp_path, caplog):
        caplog.set_level(logging.WARNING, "tsemon")
        other = Collecting()
        monitor, frames = train(tmp_path, also=[Failing(), other])
        assert len(frames) == len(other.frames) == 4
        told = [record for record in caplog.records if "mirror" in record.message]
        assert len(told) == 1
        assert "the disk of the other tool is full" in told[0].message
        shown = str(monitor.status)
        assert "0 frames, 4 failed: OSError: the disk of the other tool is full" in shown
        assert "mirror " in shown

    def test_gives_the_terminal_no_orders(self):
        class Hostile(Failing):
            def write(self, frame):
                raise ValueError("boom\x1b[2J")

            def __str__(self):
                return "mine\x1b]0;owned\x07"

        told = []
        mirrored = Mirrored(Hostile(), told.append)
        mirrored.put(frame_of(0))
        mirrored.end()
        mirrored.join(10)
        for text in (*told, str(mirrored)):
            assert text.isprintable()
            assert "mine\\x1b]0;owned\\x07" in text
            assert "ValueError: boom\\x1b[2J" in text
        assert len(told) == 1

    def test_that_hangs_holds_up_neither_the_training_nor_the_spool(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tsemon.mirrors.mirrored.MIN_JOIN_S", 0.05)
        mirror = Hanging()
        model, forward = zoo.torch_encoder()
        monitor = tsemon.attach(model, run="r", every=1, spool_dir=tmp_path, also=mirror)
        start = time.monotonic()
        for _ in range(3):
            forward()
            monitor.step(loss=1.0)
        monitor.close(timeout_s=0.05)
        assert time.monotonic() - start < 30
        assert len(frames_in(tmp_path)) == 3
        assert len(mirror.frames) == 1
        assert "did not take all frames in time" in str(monitor.status)
        mirror.released.set()

    def test_that_takes_long_to_end_is_not_said_to_lack_frames(self, monkeypatch):
        monkeypatch.setattr("tsemon.mirrors.mirrored.MIN_JOIN_S", 0.05)
        released, told = threading.Event(), []

        class EndsSlowly(Collecting):
            def close(self):
                released.wait(60)

        mirrored = Mirrored(EndsSlowly(), told.append)
        mirrored.put(frame_of(0))
        mirrored.end()
        while str(mirrored).endswith(": 0 frames"):
            time.sleep(0.001)
        mirrored.join(0.0)
        released.set()
        (text,) = told
        assert text.endswith("was given all frames, and is still being closed")

    def test_that_is_slow_loses_its_oldest_frames_and_counts_them(self):
        mirror = Hanging()
        mirrored = Mirrored(mirror, print, max_waiting=3)
        mirrored.put(frame_of(0))
        while not mirror.frames:
            time.sleep(0.001)
        for step in range(1, 7):
            mirrored.put(frame_of(step))
        mirror.released.set()
        mirrored.end()
        mirrored.join(30)
        assert [frame.step for frame in mirror.frames] == [0, 4, 5, 6]
        assert str(mirrored).endswith(": 4 frames, 3 dropped")

    def test_changes_no_bit_of_the_training(self, tmp_path):
        def losses(folder, **options):
            torch.manual_seed(0)
            model, forward = zoo.torch_encoder()
            with tsemon.attach(model, run="r", every=1, spool_dir=folder, **options) as monitor:
                found = []
                for _ in range(3):
                    loss = forward().square().mean()
                    monitor.step(loss=loss)
                    found.append(loss.item())
                return [*found, torch.rand(1).item()]

        assert losses(tmp_path / "a") == losses(tmp_path / "b", also=[TensorBoard(tmp_path / "tb")])


class TestWhatAlsoTakes:
    def test_is_one_or_several_or_texts(self, tmp_path):
        mirror = Collecting()
        with as_mirrors(mirror) as one, as_mirrors([mirror]) as several:
            assert one == several == [mirror]
        with as_mirrors(f"tensorboard:{tmp_path / 'x:y'}") as (named,):
            pass
        named.close()
        assert str(named) == f"TensorBoard({tmp_path / 'x:y'})"

    @pytest.mark.parametrize("wrong", ["tensorboard", "mlflow:x", 3, object(), Collecting, ["wandb:x"]])
    def test_is_nothing_else(self, wrong, tmp_path):
        model, _ = zoo.torch_encoder()
        with pytest.raises(InvalidArgument, match="also= takes"):
            tsemon.attach(model, run="r", spool_dir=tmp_path, also=wrong)

    @pytest.mark.parametrize(("folder", "more"), [("file", []), ("spool", [3])], ids=["no spool", "no mirror"])
    def test_is_not_left_open_where_attach_raises(self, tmp_path, monkeypatch, folder, more):
        monkeypatch.delenv("TSEMON_SERVER", raising=False)
        (tmp_path / "file").write_text("")
        model, _ = zoo.torch_encoder()
        also = [f"tensorboard:{tmp_path / 'tb'}", *more]
        before = set(threading.enumerate())
        with pytest.raises((SpoolError, InvalidArgument)):
            tsemon.attach(model, run="r", spool_dir=tmp_path / folder, also=also)
        assert set(threading.enumerate()) <= before, "a writer of TensorBoard has a thread"

    def test_needs_the_package_of_the_other_tool(self, monkeypatch, tmp_path):
        monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
        with pytest.raises(MissingPackage, match="pip install tensorboard"):
            TensorBoard(tmp_path)
        monkeypatch.setitem(__import__("sys").modules, "wandb", None)
        with pytest.raises(MissingPackage, match="pip install wandb"):
            WandB()

    def test_is_a_folder_that_can_be_written_to(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidArgument, match="TensorBoard"):
            TensorBoard(tmp_path / "file")


class TestTensorBoard:
    def test_has_the_numbers_of_the_frames(self, tmp_path):
        _, frames = train(tmp_path, also=TensorBoard(tmp_path / "tb", layers="each"))
        found = rows_in(tfevents.find_runs(tmp_path / "tb"))
        assert sorted(found) == [0, 1, 2, 3]
        for frame in frames:
            assert found[frame["step"]]["tsemon/loss"] == pytest.approx(frame["scalars"]["loss"], rel=1e-6)

    def test_is_readable_while_the_training_goes_on(self, tmp_path):
        mirror = TensorBoard(tmp_path)
        mirror.write(frame_of(0))
        assert rows_in(tfevents.find_runs(tmp_path))[0]["tsemon/loss"] == 0.0
        mirror.close()

    def test_is_told_in_one_line_where_its_folder_is_deleted(self, tmp_path, capfd):
        told = []
        mirrored = Mirrored(TensorBoard(tmp_path / "runs"), told.append)
        shutil.rmtree(tmp_path / "runs")
        for step in range(3):
            mirrored.put(frame_of(step))
        mirrored.end()
        mirrored.join(10)
        assert len(told) == 1
        assert f"No such file or directory: '{tmp_path / 'runs'}'" in told[0]
        assert "0 frames, 3 failed" in str(mirrored)
        assert capfd.readouterr().err == "", "no traceback of a thread"

    def test_comes_back_by_an_import_as_it_was(self, tmp_path):
        mirror = TensorBoard(tmp_path, layers="each")
        for step in range(3):
            mirror.write(frame_of(step))
        mirror.close()
        (run,) = tfevents.find_runs(tmp_path).runs
        found = work.survey(run, Naming(), lambda size: None)
        (back, *_) = [
            frame for _, frame in work.frames(run.logs[0], found.surveys[0], found.plan, lambda size: None, found.notes)
        ]
        before = frame_of(0)
        assert (back.step, back.time, back.scalars) == (0, before.time, before.scalars)
        assert back.layers == before.layers
        assert found.plan.num_blocks == 3


@pytest.fixture
def offline_run(tmp_path):
    """Makes an offline run of wandb, and says what its file holds once it has finished."""
    import wandb

    settings = wandb.Settings(
        mode="offline", silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
    )
    options = {"project": "p", "dir": str(tmp_path), "settings": settings, "reinit": "create_new"}

    def rows():
        end_of(tmp_path)
        return rows_in(wandb_files.find_runs(tmp_path))

    return lambda **more: wandb.init(**(options | more)), options, rows


class TestWandB:
    def test_goes_into_the_rows_of_a_run_that_one_logs_to_and_shifts_none(self, offline_run):
        begin, _, rows = offline_run
        run = begin()
        mirror = WandB(run, layers="none")
        for step in range(0, 60, 10):
            run.log({"mine": step}, step=step)
            mirror.write(frame_of(step))
        mirror.close()
        run.finish()
        found = rows()
        assert [(step, row["mine"]) for step, row in found.items()] == [(step, step) for step in range(0, 60, 10)]
        assert [row["tsemon/step"] for row in found.values()] == list(range(0, 60, 10))
        assert [row["tsemon/loss"] for row in found.values()] == [step / 2 for step in range(0, 60, 10)]

    @pytest.mark.parametrize("explicit", [True, False], ids=["step=", "no step="])
    def test_has_the_newest_frame_of_each_row_where_there_are_more_frames_than_rows(self, offline_run, explicit):
        begin, _, rows = offline_run
        run = begin()
        mirror = WandB(run, layers="none")
        for epoch in range(3):
            for part in range(60):
                mirror.write(frame_of(60 * epoch + part))
            run.log({"epoch": epoch}, **({"step": epoch} if explicit else {}))
        mirror.close()
        run.log({"epoch": 3}, **({"step": 3} if explicit else {}))
        run.finish()
        found = rows()
        # A row that is logged with step= ends when the next one begins.
        newest = {0: 119, 1: 179} if explicit else {0: 59, 1: 119, 2: 179}
        assert {step: row["tsemon/step"] for step, row in found.items() if "tsemon/step" in row} == newest
        assert {step: row["epoch"] for step, row in found.items()} == {step: step for step in range(4)}
        assert mirror.num_skipped == 180 - len(newest)

    def test_counts_what_is_in_the_run_and_what_is_not(self, offline_run):
        begin, _, rows = offline_run
        run = begin()
        mirrored = Mirrored(WandB(run, layers="none"), print)
        for step in range(50):
            mirrored.put(frame_of(step))
        mirrored.end()
        mirrored.join(30)
        run.finish()
        assert [row["tsemon/step"] for row in rows().values()] == [49]
        assert str(mirrored).endswith(": 1 frames, 49 skipped for newer ones")

    def test_moves_no_step_of_the_run_when_it_ends(self, offline_run):
        begin, _, rows = offline_run
        run = begin()
        mirror = WandB(run, layers="none")
        for step in range(5):
            mirror.write(frame_of(step))
        mirror.close()
        assert run.step == 0
        run.log({"mine": 1.0}, step=3)
        run.finish()
        assert {step: row["mine"] for step, row in rows().items() if "mine" in row} == {3: 1.0}

    def test_keeps_what_only_an_earlier_frame_of_the_row_has(self, offline_run):
        begin, _, rows = offline_run
        run = begin()
        mirror = WandB(run, layers="none")
        mirror.write(frame_of(0, rare=7.0))
        mirror.write(frame_of(10))
        run.log({})
        run.finish()
        (row,) = rows().values()
        assert (row["tsemon/step"], row["tsemon/rare"]) == (10, 7.0)

    def test_needs_a_package_that_can_make_a_run_beside_another(self, monkeypatch):
        monkeypatch.setattr("wandb.__version__", "0.19.9")
        with pytest.raises(MissingPackage, match=r"needs wandb 0\.19\.10 or newer, got 0\.19\.9"):
            WandB()

    def test_has_a_row_for_each_frame_where_that_is_wanted(self, offline_run):
        begin, _, rows = offline_run
        run = begin()
        mirror = WandB(run, commit=True, layers="none")
        for step in (0, 50, 100):
            mirror.write(frame_of(step))
            run.log({"mine": step})  # without step=: takes the next row
        mirror.close()
        run.finish()
        found = rows()
        assert [row.get("tsemon/step") for row in found.values()] == [0, None, 50, None, 100, None]
        assert [row.get("mine") for row in found.values()] == [None, 0, None, 50, None, 100]

    def test_may_be_a_run_of_its_own(self, offline_run, tmp_path):
        _, options, rows = offline_run
        _, frames = train(tmp_path, also=WandB(name="mirror", **options))
        found = rows()
        assert [row["tsemon/step"] for row in found.values()] == [frame["step"] for frame in frames]

    def test_draws_all_numbers_over_the_optimizer_step(self, offline_run, tmp_path):
        _, options, rows = offline_run
        mirror = WandB(**options)
        mirror.write(frame_of(0))
        mirror.close()
        rows()
        (file,) = tmp_path.rglob("run-*.wandb")
        metrics = [r.metric for r, _ in wandb_files.WandbFile(file)._records(Notes()) if r.HasField("metric")]
        axes = {metric.name or metric.glob_name: metric.step_metric for metric in metrics}
        assert axes["tsemon/*"] == "tsemon/step"

    def test_of_a_run_that_is_finished_is_told_and_contained(self, offline_run, tmp_path):
        begin, _, _ = offline_run
        run = begin()
        mirror = WandB(run)
        run.finish()
        monitor, frames = train(tmp_path, num_steps=2, also=mirror)
        assert len(frames) == 2
        assert "2 failed" in str(monitor.status)

    def test_takes_nothing_else_for_a_run(self):
        with pytest.raises(InvalidArgument, match="got dict"):
            WandB({})
        with pytest.raises(InvalidArgument, match=r"options of wandb.init \(project\)"):
            WandB(Collecting(), project="x")

"""`tsemon train`, as a person runs it."""

import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tests import commands
from tests.frames import scalars_in
from tests.processes import start_tsemon
from tsemon.errors import TsemonError
from tsemon.lab.train.checkpoints import Checkpoints
from tsemon.lab.train.recipe import changed
from tsemon.lab.train.recipes import SMALL_TEXT
from tsemon.lab.train.training import Training
from tsemon.tools.cli import app

TINY = {
    "sizes.depth": "2",
    "sizes.width": "16",
    "sizes.heads": "2",
    "sizes.ffn": "16",
    "data.context": "16",
    "batch_size": "4",
    "evaluate_every": "none",
    "evaluation_batches": "2",
}
SETTINGS = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(folder, *arguments):
    return commands.tsemon("train", *arguments, folder=folder)


def train_twice_at_once(folder, *arguments):
    """On two processes, as torchrun starts them."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", "tsemon", "train", *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


class TestTrain:
    def test_trains_tells_and_saves(self, tmp_path):
        done = train(tmp_path, "small-text", "--steps", "20", "--run", "first", *SETTINGS)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"first: CausalLanguageModel of 0\.\d\d M parameters on cpu", lines[0])
        assert [
            bool(re.match(rf"step {step}/20  loss \d\.\d+  lr .* tokens/s", lines[i])) for i, step in [(1, 10), (2, 20)]
        ]
        assert re.fullmatch(r"step 20/20  validation loss .*, perplexity .*, bits per byte \d\.\d+", lines[3])
        assert lines[4:] == [
            "checkpoint: checkpoints/first/step-00000020.pt   tsemon run: train/first in the folder .tsemon"
        ]
        assert list((tmp_path / ".tsemon").iterdir())
        assert [path.name for path in Checkpoints(tmp_path / "checkpoints" / "first").paths()] == [
            "step-00000018.pt",
            "step-00000020.pt",
        ]

    def test_tells_tsemon_each_evaluation(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        settings = [*SETTINGS, "--set", "evaluate_every=2", "--steps", "7", "--every", "3", "--run", "told"]
        assert CliRunner().invoke(app, ["train", "small-text", *settings]).exit_code == 0
        told = scalars_in(tmp_path / ".tsemon", "validation_loss")
        assert list(told) == [2, 4, 6, 7]
        assert len({*told.values()}) == 4

    def test_goes_on_after_a_kill_as_if_nothing_had_been(self, tmp_path):
        settings = ["small-text", "--steps", "400", *SETTINGS, "--no-monitor", "--run", "killed"]
        often = ["--checkpoint-every", "15"]
        process = start_tsemon("train", *settings, *often, folder=tmp_path, stdout=subprocess.PIPE)
        with process:
            assert any(line.startswith("step 50/400") for line in process.stdout)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        done = train(tmp_path, *settings, "--resume")
        assert done.returncode == 0, done.stderr
        assert re.search(r"goes on from step \d+", done.stdout)
        state = Checkpoints(tmp_path / "checkpoints" / "killed").load_newest()
        whole = Training(changed(SMALL_TEXT, {**TINY, "steps": "400"}))
        for _ in whole.losses:
            pass
        assert state["step"] == 400
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in whole.model.state_dict().items())
        assert re.search(r"validation loss (\S+),", done.stdout)[1] == f"{whole.evaluate()['validation_loss']:.4f}"

    @pytest.mark.parametrize(
        ("checkpoint_every", "told"),
        [
            ("400", "stopped: there is no checkpoint yet"),
            ("20", r"stopped: --run stopped --resume goes on from checkpoints/stopped/step-0+(\d+)\.pt"),
        ],
    )
    def test_tells_at_ctrl_c_where_it_is(self, checkpoint_every, told, tmp_path):
        settings = ["small-text", "--steps", "4000", *SETTINGS, "--no-monitor", "--run", "stopped"]
        settings += ["--checkpoint-every", checkpoint_every]
        process = start_tsemon("train", *settings, folder=tmp_path, stdout=subprocess.PIPE)
        with process:
            assert any(line.startswith("step 30/4000") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            last = process.stdout.read().splitlines()[-1]
        assert process.returncode == 130
        assert re.fullmatch(told, last)

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("small-txt",), r"no recipe named 'small-txt'; did you mean 'small-text'"),
            (("small-text", "--set", "stesp=3"), r"no setting named 'stesp'; did you mean 'steps'"),
            (("small-text", "--set", "steps"), r"--set takes key=value, got 'steps'"),
            (("small-text", "--resume"), r"holds no run of small-text with a checkpoint"),
            (("small-text", "--run", "mine"), r"checkpoints of an earlier run; go on with it \(--resume\) or choose"),
            (("small-text", "--run", "../mine"), r"a run's name is .* got '\.\./mine'"),
            (("small-text", "--run", ""), r"a run's name is .* got ''"),
            (("small-text", "--run", "new", "--checkpoints", "file"), r"no checkpoint can be written to file/new"),
            (("small-text", "--device", "foo"), r"got 'foo'"),
            (("vit-80-cifar10",), r"data_batch_1\.bin"),
        ],
    )
    def test_says_what_it_cannot_do(self, arguments, told, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Checkpoints(tmp_path / "checkpoints" / "mine").save(1, {})
        (tmp_path / "file").touch()
        result = CliRunner().invoke(app, ["train", *arguments])
        assert isinstance(result.exception, TsemonError)
        assert re.search(told, str(result.exception))
        assert result.stdout == ""

    def test_lists_its_recipes(self):
        shown = CliRunner().invoke(app, ["train", "--list"]).stdout
        assert all(f"{name}\n" in shown for name in ("small-text", "small-digits", "vit-80-cifar10"))


@pytest.mark.thorough
class TestTrainOnTwoProcesses:
    def test_does_what_one_process_does(self, tmp_path):
        settings = ["--steps", "10", *SETTINGS, "--set", "accumulation=2", "--set", "learning_rate=1e-3"]
        done = train_twice_at_once(tmp_path, "small-text", "--run-name", "two", *settings)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"^step 10/10  loss", done.stdout, re.MULTILINE)) == 1  # rank 0 alone
        assert "tsemon run: train/two" in done.stdout
        one = Training(changed(SMALL_TEXT, {**TINY, "steps": "10", "accumulation": "2", "learning_rate": "1e-3"}))
        losses = list(itertools.islice(one.losses, 10))
        shown = float(re.search(r"step 10/10  loss (\S+)", done.stdout)[1])
        assert shown == pytest.approx(losses[-1].item(), abs=2e-4)  # four decimals, and sums in another order
        state = Checkpoints(tmp_path / "checkpoints" / "two").load_newest()
        assert len(state["processes"]) == 2
        for name, tensor in one.model.state_dict().items():
            # Adam's steps are of the size of the learning rate even where a gradient is rounding alone.
            torch.testing.assert_close(state["model"][name], tensor, rtol=0, atol=1e-4, msg=name)

    def test_goes_on_as_one_process_does(self, tmp_path):
        settings = ["small-text", "--steps", "10", "--run-name", "two", *SETTINGS]
        assert train_twice_at_once(tmp_path, *settings).returncode == 0
        resumed = train_twice_at_once(tmp_path, *settings, "--resume")
        assert resumed.returncode == 0, resumed.stderr
        assert "goes on from step 10" in resumed.stdout

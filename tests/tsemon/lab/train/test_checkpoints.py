import contextlib
import os
import pickle
import resource
import subprocess
import sys

import pytest
import torch

from tsemon.errors import CheckpointError, InvalidArgument, MissingData
from tsemon.lab.train.checkpoints import Checkpoints, newest_run, run_name

STATE = {"step": 1, "recipe": {}, "model": {}, "optimizer": {}, "schedule": {}, "batches": {}, "processes": []}
"""What a checkpoint has at the least."""


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run", keep=2)


@contextlib.contextmanager
def files_of_at_most(size_bytes):
    """To a writer, a full disk. No longer than it must: the tests' own output may go to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestCheckpoints:
    def test_give_the_newest_one_back(self, checkpoints):
        for step in (1, 12, 7):
            checkpoints.save(step, STATE | {"step": step, "weight": torch.full((2,), float(step))})
        state = checkpoints.load_newest()
        assert (state["step"], state["weight"].tolist()) == (12, [12.0, 12.0])

    def test_are_the_last_few_of_all(self, checkpoints):
        for step in (5, 10, 15, 100_000_000):
            checkpoints.save(step, {})
        assert [path.name for path in checkpoints.paths()] == ["step-00000015.pt", "step-100000000.pt"]

    def test_appear_whole_or_not_at_all(self, checkpoints):
        large = {"step": torch.zeros(100_000)}
        told = r"step-00000001\.pt could not be written: .*File too large; make room and start"
        with pytest.raises(CheckpointError, match=told), files_of_at_most(65536):
            checkpoints.save(1, large)
        checkpoints.save(1, STATE)
        with (
            pytest.raises(CheckpointError, match=r"--resume goes on from .*step-00000001\.pt"),
            files_of_at_most(65536),
        ):
            checkpoints.save(2, large)
        assert checkpoints.load_newest() == STATE
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001.pt"]

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ({"a": 1}, "is no checkpoint of tsemon train: without step, recipe, model"),
            (torch.zeros(3), "is no checkpoint of tsemon train: it holds one Tensor"),
            ({**STATE, "optimizer": None}, "is no checkpoint of tsemon train: without optimizer"),
            (b"", "cannot be read as a checkpoint: EOFError"),
            (b"no archive", "cannot be read as a checkpoint: Weights only load failed"),
            (b"PK\x03\x04", "cannot be read as a checkpoint: PytorchStreamReader failed"),
        ],
    )
    def test_say_which_file_is_none_and_which_is_older(self, checkpoints, content, told):
        checkpoints.save(2, content)
        if isinstance(content, bytes):
            checkpoints.newest().write_bytes(content)
        with pytest.raises(InvalidArgument, match=rf"step-00000002\.pt {told}.*; there is no older one") as raised:
            checkpoints.load_newest()
        assert "\n" not in str(raised.value)
        older = checkpoints.save(1, STATE)
        with pytest.raises(InvalidArgument, match=f"delete it to resume from {older}"):
            checkpoints.load_newest()

    def test_run_nothing_that_a_file_asks_for(self, checkpoints, tmp_path):
        class Malice:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "harm"),))

        checkpoints.folder.mkdir()
        torch.save({"step": Malice()}, checkpoints.folder / "step-00000001.pt", pickle_module=pickle)
        with pytest.raises(InvalidArgument, match=r"step-00000001\.pt cannot be read"):
            checkpoints.load_newest()
        assert not (tmp_path / "harm").exists()

    def test_say_that_there_is_none(self, checkpoints):
        with pytest.raises(MissingData, match=r"no checkpoint in .*run; start the run without --resume"):
            checkpoints.load_newest()

    def test_are_of_one_process_at_a_time(self, checkpoints):
        code = (
            "import sys; from pathlib import Path; from tsemon.lab.train.checkpoints import Checkpoints\n"
            "with Checkpoints(Path(sys.argv[1])).held(): print('held', flush=True); sys.stdin.read()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", code, checkpoints.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with other:
            assert other.stdout.readline() == b"held\n"
            saving = checkpoints.folder / "step-00000001.1.part"
            saving.touch()
            with (
                pytest.raises(CheckpointError, match=r"another process is training the run in .*run; wait"),
                checkpoints.held(),
            ):
                pass
            assert saving.exists()
            other.kill()
        with checkpoints.held():
            assert not saving.exists()

    def test_leave_no_empty_folder(self, checkpoints):
        with checkpoints.held():
            assert checkpoints.folder.exists()
        assert not checkpoints.folder.exists()
        with checkpoints.held():
            saved = checkpoints.save(1, {})
        assert list(checkpoints.folder.iterdir()) == [saved]

    def test_are_refused_in_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=r"to .*file/run: .*; choose another folder: --checkpoints"):
            Checkpoints(tmp_path / "file" / "run").held().__enter__()

    def test_are_refused_on_a_full_disk(self, checkpoints):
        with pytest.raises(CheckpointError, match="no checkpoint can be written to"), files_of_at_most(0):
            checkpoints.held().__enter__()

    def test_are_at_least_one(self, tmp_path):
        with pytest.raises(InvalidArgument, match="at least 1 checkpoint is kept, got 0"):
            Checkpoints(tmp_path, keep=0)


class TestTheNewestRun:
    def test_is_the_one_of_the_recipe_that_was_saved_last(self, tmp_path):
        names = ("vit-20260101-000002", "vit-20260101-000001", "vit-pre-norm-20260101-000003")
        for age, name in enumerate(names):
            path = Checkpoints(tmp_path / name).save(1, {})
            os.utime(path, (age, age))
        (tmp_path / "vit-20260101-000009").mkdir()
        assert newest_run(tmp_path, "vit") == "vit-20260101-000001"
        with pytest.raises(MissingData, match="holds no run of vi with a checkpoint"):
            newest_run(tmp_path, "vi")


class TestTheNameOfARun:
    @pytest.mark.parametrize("name", ["a", "vit-20260101-000001", "_x.1", "-", "x" * 100])
    def test_is_that_of_one_folder(self, name):
        assert run_name(name) == name

    @pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", ".hidden", "a b", "a\n", "é", "x" * 101])
    def test_is_nothing_else(self, name):
        with pytest.raises(InvalidArgument, match="a run's name is 1 to 100 letters"):
            run_name(name)

import os
import pickle

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingData
from tsemon.train.checkpoints import Checkpoints, newest_run


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run", keep=2)


class TestCheckpoints:
    def test_give_the_newest_one_back(self, checkpoints):
        for step in (1, 12, 7):
            checkpoints.save(step, {"step": step, "weight": torch.full((2,), float(step))})
        state = checkpoints.load_newest()
        assert (state["step"], state["weight"].tolist()) == (12, [12.0, 12.0])

    def test_are_the_last_few_of_all(self, checkpoints):
        for step in (5, 10, 15, 100_000_000):
            checkpoints.save(step, {})
        assert [path.name for path in checkpoints.paths()] == ["step-00000015.pt", "step-100000000.pt"]

    def test_appear_whole_or_not_at_all(self, checkpoints, monkeypatch):
        checkpoints.save(1, {"step": 1})

        def stop_in_the_middle(state, file):
            file.write(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(torch, "save", stop_in_the_middle)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(2, {"step": 2})
        assert checkpoints.load_newest() == {"step": 1}

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

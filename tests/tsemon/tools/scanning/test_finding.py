import json
import re

import pytest
import torch

from tests.unreadable import unreadable
from tsemon.errors import InvalidArgument, MissingData
from tsemon.tools.scanning.finding import find_candidates, step_pattern


@pytest.fixture
def folder(tmp_path):
    """Makes empty files: names alone are looked at here."""

    def made(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return made


def steps_of(path, pattern=None):
    return {candidate.name: candidate.step for candidate in find_candidates(path, pattern)}


class TestFindCandidates:
    @pytest.mark.parametrize(
        ("name", "step"),
        [
            ("step-00000010.pt", 10),
            ("global_step1000/model.safetensors", 1000),
            ("checkpoint-500/pytorch_model.bin", 500),
            ("checkpoint_000123/model.pt", 123),
            ("iter_0002000/model.pt", 2000),
            ("epoch=3-step=900.ckpt", 900),
            ("model-1000.pth", 1000),
            ("ckpt_70.pt", 70),
            ("run/7000.safetensors", 7000),
            ("iter_0000100/mp_rank_00/model_optim_rng.pt", 100),
            ("global_step100/mp_rank_00_model_states.pt", 100),
            ("seed-1/model_1500_epoch3.pt", 1500),
            ("run-2024-01-05_12-30-00/weights.pt", None),
            ("run-20240105_123000/weights.pt", None),
            ("step1e3.pt", None),
            ("seed-1/step-100k.pt", None),
            ("gpt2.pt", None),
            ("epoch_3.pt", None),
            ("best.pt", None),
        ],
    )
    def test_reads_the_step_from_the_name(self, folder, name, step):
        assert steps_of(folder(name)) == {name: step}

    def test_reads_it_where_it_is_told_to(self, folder):
        path = folder("a/epoch_3_of_900.pt", "a/best.pt")
        assert steps_of(path, step_pattern(r"epoch_(\d+)")) == {"a/epoch_3_of_900.pt": 3, "a/best.pt": None}

    def test_tells_a_folder_that_cannot_be_read(self, folder):
        path = folder("a/step-1.pt", "b/step-2.pt")
        with unreadable(path / "a"):
            found = find_candidates(path)
        assert [(one.name, one.problem) for one in found] == [
            ("b/step-2.pt", None),
            ("a", "it cannot be read: Permission denied"),
        ]

    def test_orders_by_step(self, folder):
        path = folder("step-1000.pt", "step-20.pt", "step-3.pt")
        assert [candidate.step for candidate in find_candidates(path)] == [3, 20, 1000]

    def test_leaves_what_trainers_put_beside_the_parameters(self, folder):
        beside = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"]
        path = folder("checkpoint-1/model.safetensors", *(f"checkpoint-1/{name}" for name in beside))
        assert [*steps_of(path)] == ["checkpoint-1/model.safetensors"]

    def test_leaves_hidden_files_and_other_kinds(self, folder):
        assert steps_of(folder(".cache/step-1.pt", "notes.txt", ".step-2.pt")) == {}

    def test_finds_a_step_beside_a_whole_model(self, folder):
        steps = [f"step_{step}.safetensors" for step in (100, 200, 300)]
        path = folder("model.safetensors", "pytorch_model.bin", *steps)
        found = {one.name: (one.step, one.problem) for one in find_candidates(path)}
        assert found == {
            **{name: (step, None) for name, step in zip(steps, (100, 200, 300), strict=True)},
            "model.safetensors": (None, None),
            "pytorch_model.bin": (None, None),
        }

    def test_tells_what_it_passes_over_for_a_whole_model(self, folder):
        path = folder("checkpoint-5/model.safetensors", "checkpoint-5/pytorch_model.bin", "checkpoint-5/head.pt")
        why = "it is passed over: model.safetensors beside it is the whole model"
        assert {one.name: one.problem for one in find_candidates(path)} == {
            "checkpoint-5/model.safetensors": None,
            "checkpoint-5/pytorch_model.bin": why,
            "checkpoint-5/head.pt": why,
        }

    def test_joins_the_shards_that_an_index_names(self, folder):
        path = folder("checkpoint-5/model-00001-of-00002.safetensors", "checkpoint-5/model-00002-of-00002.safetensors")
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (path / "checkpoint-5/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        [candidate] = find_candidates(path)
        assert ([file.name for file in candidate.paths], candidate.step) == (sorted(shards.values()), 5)

    def test_joins_shards_without_an_index(self, folder):
        path = folder("step-5-00001-of-00002.pt", "step-5-00002-of-00002.pt")
        [candidate] = find_candidates(path)
        assert (len(candidate.paths), candidate.step, candidate.problem) == (2, 5, None)

    def test_tells_of_a_shard_that_is_not_there(self, folder):
        path = folder("c/model-00001-of-00002.safetensors")
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (path / "c/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        [candidate] = find_candidates(path)
        assert candidate.problem == "the shard model-00002-of-00002.safetensors is not there, is it half-written?"
        [candidate] = find_candidates(folder("d/step-5-00001-of-00003.pt") / "d")
        assert candidate.problem == "1 of its 3 shards are there"

    def test_opens_no_file_of_another_folder_for_an_index(self, folder):
        path = folder("secret.pt", "c/model.safetensors.index.json")
        (path / "c/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.pt"}}))
        [candidate] = find_candidates(path / "c")
        assert candidate.problem == "it names no shards in its folder"

    def test_says_what_to_do_with_a_distributed_checkpoint(self, tmp_path):
        import torch.distributed.checkpoint as dcp

        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-7", no_dist=True)
        [candidate] = find_candidates(tmp_path)
        assert "dcp_to_torch" in candidate.problem

    def test_tells_of_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(MissingData, match=re.escape(f"{tmp_path / 'none'} is not there")):
            find_candidates(tmp_path / "none")

    def test_tells_that_it_was_given_a_file(self, folder):
        path = folder("step-1.pt") / "step-1.pt"
        with pytest.raises(MissingData, match=re.escape(f"{path} is a file: give the folder")):
            find_candidates(path)


class TestStepPattern:
    def test_has_one_group(self):
        with pytest.raises(InvalidArgument, match="one group"):
            step_pattern(r"\d+")

    def test_is_a_regular_expression(self):
        with pytest.raises(InvalidArgument, match="regular expression"):
            step_pattern(r"(\d+")

import argparse
import os

import pytest
import torch
from safetensors.torch import save_file

from tsemon.tools.scanning.opening import NotACheckpoint, open_weights, step_in


@pytest.fixture
def tensors():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.ones(2).long()}


def read(*paths):
    weights = open_weights([*paths])
    try:
        return {name: weights.tensor(name).clone() for name in weights.entries}, dict(weights.extra)
    finally:
        weights.close()


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestOpenWeights:
    @pytest.mark.parametrize(
        "nest", [lambda t: t, lambda t: {"state_dict": t, "global_step": 7}, lambda t: {"model": t}]
    )
    def test_finds_the_parameters_in_what_torch_saved(self, tmp_path, tensors, nest):
        torch.save(nest(tensors), tmp_path / "x.pt")
        found, _ = read(tmp_path / "x.pt")
        assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in tensors.items()}

    @pytest.mark.parametrize(
        "nest",
        [
            lambda model, optimizer: {"epoch": 1, "my_model": model, "optim": optimizer},
            lambda model, optimizer: {"my_model": model, "training": {"optimizers": {"adam": optimizer}}},
            lambda model, optimizer: {"model": {"my_model": model, "optim": optimizer}},
        ],
    )
    def test_takes_no_moments_of_an_optimizer_for_parameters(self, tmp_path, nest):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save(nest(model.state_dict(), optimizer.state_dict()), tmp_path / "x.pt")
        assert {*read(tmp_path / "x.pt")[0]} == {"my_model.weight", "my_model.bias"}

    def test_reads_safetensors_with_what_they_tell(self, tmp_path, tensors):
        save_file(tensors, tmp_path / "x.safetensors", metadata={"step": "12"})
        found, extra = read(tmp_path / "x.safetensors")
        assert found["a"].tolist() == tensors["a"].tolist()
        assert step_in(extra) == 12

    def test_reads_files_of_before_zip(self, tmp_path, tensors):
        torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
        assert read(tmp_path / "x.pt")[0]["a"].tolist() == tensors["a"].tolist()

    def test_joins_shards(self, tmp_path, tensors):
        paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
        save_file({"a": tensors["a"]}, paths[0])
        save_file({"b": tensors["b"]}, paths[1])
        assert {*read(*paths)[0]} == {"a", "b"}

    def test_knows_floats_of_every_width(self, tmp_path):
        kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
        save_file(
            {str(kind): torch.ones(2).to(kind) for kind in kinds} | {"i": torch.ones(2).int()},
            tmp_path / "x.safetensors",
        )
        weights = open_weights([tmp_path / "x.safetensors"])
        assert [name for name, entry in weights.entries.items() if not entry.is_floating] == ["i"]
        weights.close()

    def test_knows_tied_weights(self, tmp_path, tensors):
        torch.save({"a": tensors["a"], "c": tensors["a"]}, tmp_path / "x.pt")
        weights = open_weights([tmp_path / "x.pt"])
        assert weights.entries["c"].same_as == "a"
        weights.close()

    @pytest.mark.parametrize("is_zip", [True, False])
    def test_runs_no_code(self, tmp_path, tensors, is_zip):
        made = tmp_path / "made"
        torch.save({"model": tensors, "x": RunsCode(made)}, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
        with pytest.raises(
            NotACheckpoint, match=r"\(posix.mkdir\), which could run code .* torch.save\(model.state_dict"
        ):
            open_weights([tmp_path / "x.pt"])
        assert not made.exists()

    def test_names_the_class_that_it_does_not_open(self, tmp_path, tensors):
        torch.save({"state_dict": tensors, "hyper_parameters": argparse.Namespace(lr=1.0)}, tmp_path / "x.ckpt")
        with pytest.raises(NotACheckpoint, match=r"\(argparse\.Namespace\)"):
            open_weights([tmp_path / "x.ckpt"])

    @pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
    def test_leaves_a_half_written_file(self, tmp_path, tensors, name):
        save = torch.save if name == "x.pt" else save_file
        save({"a": torch.ones(1000)}, tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for share in (0.0, 0.3, 0.9):
            (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
            with pytest.raises(NotACheckpoint, match="half-written"):
                open_weights([tmp_path / name])

    def test_leaves_what_is_no_checkpoint(self, tmp_path):
        (tmp_path / "x.bin").write_bytes(bytes(range(256)))
        with pytest.raises(NotACheckpoint, match="cannot be read"):
            open_weights([tmp_path / "x.bin"])
        (tmp_path / "x.pt").write_text("hello")
        with pytest.raises(NotACheckpoint, match=r"half-written\? The reader of \.pt files ends with KeyError: 101"):
            open_weights([tmp_path / "x.pt"])
        torch.save([1, 2], tmp_path / "x.pt")
        with pytest.raises(NotACheckpoint, match="one list"):
            open_weights([tmp_path / "x.pt"])
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "x.pt")
        with pytest.raises(NotACheckpoint, match="no parameters of a model, only state, param_groups"):
            open_weights([tmp_path / "x.pt"])

    def test_takes_memory_for_what_is_looked_at_alone(self, tmp_path):
        """Of 128 MiB one row is read; the process may not grow by more than a quarter of it."""
        import psutil

        torch.save({"a": torch.zeros(16, 2**21), "b": torch.ones(4)}, tmp_path / "x.pt")
        os.utime(tmp_path / "x.pt", (1, 1))  # a young one is read whole
        before = psutil.Process().memory_info().rss
        weights = open_weights([tmp_path / "x.pt"])
        assert weights.tensor("b").sum() == 4
        assert weights.tensor("a")[3].sum() == 0
        grown = psutil.Process().memory_info().rss - before
        weights.close()
        assert grown < 32 * 2**20


class TestStepIn:
    @pytest.mark.parametrize("extra", [{"step": 7}, {"global_step": 7}, {"iteration": torch.tensor(7)}, {"step": "7"}])
    def test_reads_what_trainers_write(self, extra):
        assert step_in(extra) == 7

    @pytest.mark.parametrize("extra", [{}, {"step": -1}, {"step": True}, {"step": "x"}, {"step": 1.5}])
    def test_takes_nothing_else(self, extra):
        assert step_in(extra) is None

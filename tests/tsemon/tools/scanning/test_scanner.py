import math
import os
import shutil
import time

import psutil
import pytest
import torch
from safetensors.torch import save, save_file

from tsemon.measures import alignment, checkpoint_cosine, param_norm, power_law_fit, step_size
from tsemon.tools.scanning import Scanner
from tsemon.tools.scanning.inputs import Source
from tsemon.tools.scanning.running import MEASURED

STEPS = [step * 10 for step in range(11)]
EXACT = {"rel": 1e-6}
"""The measures sum in float32, the scan in float64."""


def scanned(folder, **options):
    scanner = Scanner(folder, **options)
    records = list(scanner.look())
    scanner.close()
    return records, scanner


def flat(parameters, is_wanted):
    """The definition written out: all parameters in one vector of float64."""
    return torch.cat([value.flatten().double() for name, value in parameters.items() if is_wanted(name)])


def is_embedding(name):
    return any(part in name for part in ("shared", "embed_tokens", "wte", "wpe"))


def is_counted(name):
    return not is_embedding(name)


PLACES = [("t5", ""), ("t5", "-pt"), ("gpt2", ""), ("gpt2", "-pt")]


class TestScanner:
    @pytest.mark.parametrize(("model", "form"), PLACES, ids=lambda part: part)
    def test_measures_what_the_definitions_say(self, trained, model, form):
        root, kept = trained
        records, _ = scanned(root / f"{model}{form}")
        assert [record.step for record in records] == STEPS
        for record, before in zip(records[1:], records, strict=False):
            w, v = (flat(kept[model, step], is_counted) for step in (record.step, before.step))
            assert record.scalars["total_param_norm"] == pytest.approx(w.norm().item(), rel=1e-12)
            assert record.scalars["checkpoint_distance"] == pytest.approx((w - v).norm().item(), rel=1e-12)
            assert record.scalars["direction_cosine"] == pytest.approx((w @ v / w.norm() / v.norm()).item(), rel=1e-12)
            along = (w - v) @ v / (w - v).norm() / v.norm()
            assert record.scalars["checkpoint_alignment"] == pytest.approx(along.item(), rel=1e-9)
            embeddings = flat(kept[model, record.step], is_embedding)
            assert record.scalars["embedding_param_norm"] == pytest.approx(embeddings.norm().item(), rel=1e-12)
            assert (record.scalars["checkpoint_gap_steps"], record.scalars["nonfinite_entries"]) == (10, 0)

    def test_agrees_with_the_measures_of_the_library(self, trained):
        root, kept = trained
        records, _ = scanned(root / "gpt2")
        w, v = ([p for name, p in kept["gpt2", step].items() if is_counted(name)] for step in (50, 40))
        scalars = records[5].scalars
        assert scalars["total_param_norm"] == pytest.approx(param_norm(w).item(), **EXACT)
        assert scalars["checkpoint_distance"] == pytest.approx(step_size(v, w).item(), **EXACT)
        assert scalars["direction_cosine"] == pytest.approx(checkpoint_cosine(v, w).item(), **EXACT)
        assert scalars["checkpoint_alignment"] == pytest.approx(alignment(v, w).item(), rel=1e-4)

    @pytest.mark.parametrize(
        ("model", "blocks"),
        [("gpt2", [f"transformer.h.{n}" for n in range(3)]),
         ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"])],
    )  # fmt: skip
    def test_measures_each_block_by_itself(self, trained, model, blocks):
        root, kept = trained
        records, scanner = scanned(root / model)
        assert list(scanner.groups.blocks) == blocks
        for number, block in enumerate(blocks):
            w, v = (
                flat(kept[model, step], lambda name, block=block: is_counted(name) and name.startswith(f"{block}."))
                for step in (100, 90)
            )
            layers = {name: values[number] for name, values in records[-1].layers.items()}
            assert layers["param_norm"] == pytest.approx(w.norm().item(), rel=1e-12)
            assert layers["direction_cosine"] == pytest.approx((w @ v / w.norm() / v.norm()).item(), rel=1e-12)
            assert layers["checkpoint_distance"] == pytest.approx((w - v).norm().item(), rel=1e-12)

    def test_gives_the_exponent_of_growth_once_it_can_be_known(self, trained):
        root, kept = trained
        records, _ = scanned(root / "gpt2")
        norms = torch.stack([flat(kept["gpt2", step], is_counted).norm() for step in STEPS])
        expected = power_law_fit(torch.tensor(STEPS[1:]), norms[1:] - norms[0])
        assert all(math.isnan(record.scalars["norm_growth_exponent"]) for record in records[:8])
        assert records[-1].scalars["norm_growth_exponent"] == pytest.approx(expected.exponent.item(), rel=1e-9)
        assert records[-1].scalars["norm_growth_r2"] == pytest.approx(expected.r2.item(), rel=1e-9)

    def test_has_nothing_beside_the_first_checkpoint(self, trained):
        records, _ = scanned(trained[0] / "gpt2")
        assert "direction_cosine" not in records[0].scalars
        assert "checkpoint_distance" not in records[0].layers

    def test_takes_the_time_at_which_a_checkpoint_was_saved(self, trained):
        records, _ = scanned(trained[0] / "gpt2-pt")
        assert records[3].time == pytest.approx((trained[0] / "gpt2-pt" / "m3.pt").stat().st_mtime)

    def test_counts_what_is_not_finite(self, tmp_path):
        w = torch.ones(3, 4)
        torch.save({"h.0.attn.w": w, "h.1.attn.w": w.clone()}, tmp_path / "step-1.pt")
        w_bad = w.clone()
        w_bad[0, :2] = torch.tensor([math.nan, math.inf])
        torch.save({"h.0.attn.w": w, "h.1.attn.w": w_bad}, tmp_path / "step-2.pt")
        records, _ = scanned(tmp_path)
        assert records[1].layers["nonfinite_entries"] == (0, 2)
        assert records[1].scalars["nonfinite_entries"] == 2
        assert records[1].layers["param_norm"][0] == pytest.approx(math.sqrt(12))
        assert math.isnan(records[1].layers["param_norm"][1])
        assert math.isnan(records[1].layers["direction_cosine"][1])

    def test_sums_numbers_whose_squares_are_no_float32(self, tmp_path):
        torch.save({"h.0.attn.w": torch.full((2, 2), 1e30)}, tmp_path / "step-1.pt")
        torch.save({"h.0.attn.w": torch.full((2, 2), 1e-30)}, tmp_path / "step-2.pt")
        records, _ = scanned(tmp_path)
        assert [record.scalars["total_param_norm"] for record in records] == [
            pytest.approx(2e30, rel=1e-6),
            pytest.approx(2e-30, rel=1e-6),
        ]
        assert records[1].scalars["direction_cosine"] == pytest.approx(1.0)

    def test_goes_on_beyond_files_that_it_leaves_out(self, trained, tmp_path):
        root, _ = trained
        for step in (0, 1, 2):
            shutil.copy(root / "gpt2-pt" / f"m{step}.pt", tmp_path / f"m{step}.pt")
        (tmp_path / "half.pt").write_bytes((tmp_path / "m1.pt").read_bytes()[:5000])
        torch.save({"model": {"h.0.attn.w": torch.ones(2, 2)}, "step": 15}, tmp_path / "other.pt")
        torch.save({"model": {"w": torch.ones(2)}, "step": 10}, tmp_path / "same.pt")
        torch.save({"w": torch.ones(2)}, tmp_path / "nameless.pt")
        torch.save({"w": {1, 2}, "f": print}, tmp_path / "step-3.pt")
        records, scanner = scanned(tmp_path)
        assert [record.step for record in records] == [0, 10, 20]
        assert "half-written" in scanner.left_out["half.pt"]
        assert "of another model than the first" in scanner.left_out["other.pt"]
        assert scanner.left_out["same.pt"] == "another checkpoint of step 10 was read already"
        assert "neither its name nor the file tells a step from 0 to 2^53 - 1" in scanner.left_out["nameless.pt"]
        assert "could run code" in scanner.left_out["step-3.pt"]
        assert len(scanner.left_out) == 5

    def test_reads_of_one_step_the_file_with_the_shortest_name(self, tmp_path):
        for name, value in (("ckpt-100.pt", 1.0), ("ckpt-200.pt", 2.0), ("ckpt-200-ema.pt", 1.5)):
            torch.save({"h.0.attn.w": torch.full((2, 2), value)}, tmp_path / name)
        records, scanner = scanned(tmp_path)
        assert [record.name for record in records] == ["ckpt-100.pt", "ckpt-200.pt"]
        assert scanner.left_out == {"ckpt-200-ema.pt": "another checkpoint of step 200 was read already"}

    def test_reads_what_is_new_when_it_looks_again(self, trained, tmp_path):
        root, _ = trained
        source = root / "gpt2-pt"
        shutil.copy(source / "m0.pt", tmp_path)
        (tmp_path / "m1.pt").write_bytes((source / "m1.pt").read_bytes()[:5000])
        scanner = Scanner(tmp_path)
        assert [record.step for record in scanner.look()] == [0]
        assert [*scanner.look()] == []
        shutil.copy(source / "m1.pt", tmp_path)  # it was half-written before
        (tmp_path / "m0.pt").unlink()  # as a trainer does that keeps the newest
        [record] = scanner.look()
        scanner.close()
        whole, _ = scanned(source)
        assert record.scalars == {**whole[1].scalars} | {
            "norm_growth_exponent": pytest.approx(math.nan, nan_ok=True),
            "norm_growth_r2": pytest.approx(math.nan, nan_ok=True),
        }
        assert scanner.left_out == {}

    def test_leaves_nothing_out_where_whoever_asked_went_away(self, trained):
        scanner = Scanner(trained[0] / "gpt2-pt")
        found = [next(scanner.look()).step for _ in STEPS]  # each time of a new look, as after an outage
        assert [*scanner.look()] == []
        scanner.close()
        assert found == STEPS
        assert scanner.left_out == {}

    @pytest.mark.parametrize(("age_s", "gap"), [(0, 1), (3600, None)], ids=["young", "old"])
    @pytest.mark.parametrize("form", ["pt", "safetensors"])
    def test_compares_no_checkpoint_with_itself(self, tmp_path, form, age_s, gap):
        """Of a file that is written over in its place: the older of the two is what it was, or is not compared."""

        def write(step, norm):
            tensors = {f"h.{n}.attn.weight": torch.full((2, 2), norm / 2 / 2**0.5) for n in range(2)}
            if form == "pt":
                torch.save({"model": tensors, "step": step}, tmp_path / "latest.pt")
            else:
                data = save(tensors, {"step": str(step)})
                (tmp_path / "latest.safetensors").write_bytes(data)
            os.utime(tmp_path / f"latest.{form}", (time.time() - age_s + step,) * 2)

        scanner = Scanner(tmp_path)
        write(1, 1.0)
        first = [*scanner.look()]
        write(2, 3.0)
        [second] = scanner.look()
        scanner.close()
        assert [record.scalars["total_param_norm"] for record in (*first, second)] == pytest.approx([1, 3], rel=1e-6)
        if form == "pt" and gap is not None:
            assert second.scalars["checkpoint_distance"] == pytest.approx(2, rel=1e-6)
        else:
            assert (second.gap_steps, "checkpoint_distance" in second.scalars) == (None, False)

    @pytest.mark.parametrize("form", ["pt", "safetensors"])
    def test_takes_memory_for_about_two_checkpoints(self, tmp_path, form):
        """Of eight, 32 MiB each and 256 MiB together. Beside two of them there is what is widened at a time, and what the
        allocator keeps."""
        write = torch.save if form == "pt" else save_file
        for step in range(8):
            write({f"h.{n}.attn.weight": torch.randn(1024, 1024) for n in range(8)}, tmp_path / f"step-{step}.{form}")
        scanner, sizes = Scanner(tmp_path), []
        process = psutil.Process()
        before = process.memory_info().rss
        for _ in scanner.look():
            sizes.append((process.memory_info().rss - before) / 2**20)
        scanner.close()
        assert len(sizes) == 8
        assert max(sizes) < 176

    def test_goes_on_where_a_trainer_deletes_what_it_reads(self, trained, tmp_path):
        shutil.copytree(trained[0] / "gpt2", tmp_path / "c")
        scanner, found = Scanner(tmp_path / "c"), []
        for record in scanner.look():
            found.append(record.step)
            for step in (record.step, record.step + 20):
                shutil.rmtree(tmp_path / "c" / f"checkpoint-{step}", ignore_errors=True)
        scanner.close()
        assert found == [0, 10, 40, 50, 80, 90]
        assert scanner.left_out["checkpoint-20/model.safetensors"] == "model.safetensors is not there"

    def test_says_that_it_found_no_blocks(self, tmp_path):
        torch.save({"layers.0.mix.weight": torch.ones(2, 2)}, tmp_path / "step-1.pt")
        [record], scanner = scanned(tmp_path)
        assert record.layers == {}
        assert record.scalars["total_param_norm"] == 2
        assert "--blocks" in scanner.not_measured["param_norm"]

    def test_builds_no_model_where_it_is_not_asked_to(self, trained):
        records, scanner = scanned(trained[0] / "gpt2", source=None)
        assert "saturation" not in records[0].layers
        assert {*scanner.not_measured.values()} == {"it was not asked for (--no-saturation)"}
        assert {*scanner.not_measured} == {
            "saturation",
            "positions_attended",
            "saturated_positions_attended",
            *MEASURED,
        }

    def test_says_why_saturation_is_not_measured(self, trained):
        records, scanner = scanned(trained[0] / "gpt2-pt", source=Source())
        assert "saturation" not in records[0].layers
        assert "no config.json of transformers beside" in scanner.not_measured["saturation"]

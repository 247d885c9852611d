import json
import math
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from tests import zoo
from tsemon import measures
from tsemon.errors import InvalidArgument, MissingData
from tsemon.lab.train.recipe import ImageData, Recipe, TextData
from tsemon.lab.train.training import Training
from tsemon.tools.cli import app
from tsemon.tools.scanning import Scanner
from tsemon.tools.scanning.inputs import Source, token_ids
from tsemon.tools.scanning.opening import open_weights
from tsemon.tools.scanning.running import CannotRun, build_runner


def cosines(plain, scaled):
    """The definition written out, token by token, in float64."""
    pairs = zip(plain.double().flatten(0, 1), scaled.double().flatten(0, 1), strict=True)
    return torch.stack([f @ g / f.norm() / g.norm() for f, g in pairs]).mean().item()


def keeper(seen, name):
    def keep(_module, _inputs, output):
        seen[name] = output[0] if isinstance(output, tuple) else output

    return keep


def twin(model, names, run):
    """Saturation of the outputs of the named blocks: two models side by side, one with parameters times 1024."""
    states = {1: {}, 1024: {}}
    for scale, seen in states.items():
        hooks = [model.get_submodule(name).register_forward_hook(keeper(seen, name)) for name in names]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
            run(model)
        for hook in hooks:
            hook.remove()
    return [cosines(states[1][name], states[1024][name]) for name in names]


def saturations(folder, source):
    scanner = Scanner(folder, source=source)
    records = list(scanner.look())
    scanner.close()
    return [record.layers.get("saturation") for record in records], scanner


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "tokens.json").write_text(json.dumps(zoo.ids().tolist()))
    return Source(tokens=tmp_path / "tokens.json")


class TestWhetherBlocksSmooth:
    def test_is_that_of_plain_hooks_and_of_the_weights(self, trained, tokens):
        from transformers import GPT2LMHeadModel

        folder = trained[0] / "gpt2"
        scanner = Scanner(folder, source=tokens)
        *_, record = scanner.look()
        scanner.close()
        model = GPT2LMHeadModel.from_pretrained(folder / record.name.partition("/")[0]).eval()
        states, sums = [], []
        for block in model.transformer.h:
            block.register_forward_pre_hook(lambda _, args: states.append(args[0]))
            block.ln_2.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
        with torch.no_grad():
            model(zoo.ids())
        pairs = list(zip(states, sums, strict=True))
        ratios = [measures.residual_hfc_lfc_ratio(x, y).log().mean().exp().item() for x, y in pairs]
        assert record.layers["residual_hfc_lfc_ratio"] == pytest.approx(ratios, rel=1e-4)
        changes = [measures.residual_cosine_change(x, y).mean().item() for x, y in pairs]
        assert record.layers["residual_cosine_change"] == pytest.approx(changes, rel=1e-4)
        ranks = [measures.residual_rank_ratio(x[0], y[0]).item() for x, y in pairs]
        assert record.layers["residual_rank_ratio"] == pytest.approx(ranks, rel=1e-3)
        assert record.layers["hfc_lfc"][:3] == pytest.approx(
            [measures.hfc_lfc(x).mean().item() for x in states], rel=1e-4
        )
        attention = model.transformer.h[1].attn
        width = model.config.n_embd
        value, output = attention.c_attn.weight.T[2 * width :], attention.c_proj.weight.T
        share = measures.value_output_negative_share(value, output, model.config.n_head)
        assert record.heads["value_output_negative_share"][1] == pytest.approx(share.tolist())

    def test_says_how_much_of_the_weights_sharpens(self, tmp_path):
        """The eigenvalues of a smoothing model are at least 0; those of a sharpening one at most 0, about half of them 0."""
        for kind, told in (("smoothing", "0%"), ("sharpening", None)):
            sizes = {"depth": 2, "width": 16, "heads": 1, "ffn": 32, "norm": "pre", "reparameterisation": kind}
            recipe = Recipe(
                name=kind,
                model="CausalLanguageModel",
                sizes=sizes,
                data=TextData(context=16),
                batch_size=2,
                steps=1,
                learning_rate=1e-4,
            )
            training = Training(recipe)
            list(training.losses)
            (tmp_path / kind).mkdir()
            torch.save(training.state_dict(), tmp_path / kind / "step-1.pt")
            shown = CliRunner().invoke(app, ["scan", str(tmp_path / kind), "--spool", str(tmp_path / "spool")]).stdout
            (share,) = re.findall(r"(\d+%) of the eigenvalues of its value and output weights sharpen", shown)
            assert share == told if told else 20 < int(share[:-1]) < 80
            assert re.search(r"attention smooths \(lowers HFC/LFC\) in \d of 2 blocks", shown)


class TestSaturation:
    def test_of_gpt2_is_that_of_two_models_side_by_side(self, trained, tokens):
        from transformers import GPT2LMHeadModel

        folder = trained[0] / "gpt2"
        found, scanner = saturations(folder, tokens)
        model = GPT2LMHeadModel.from_pretrained(folder / "checkpoint-70").eval()
        names = [f"transformer.h.{number}" for number in range(3)]
        expected = twin(model, names, lambda model: model(zoo.ids()))
        assert found[7][1:] == pytest.approx(expected, abs=1e-4)  # float32 of other kernels, and exponents of 1e12
        assert scanner.saturation_on == "the token ids in tokens.json"

    def test_of_t5_goes_through_encoder_and_decoder(self, trained, tokens):
        from transformers import T5ForConditionalGeneration

        folder = trained[0] / "t5"
        found, _ = saturations(folder, tokens)
        model = T5ForConditionalGeneration.from_pretrained(folder / "checkpoint-70").eval()
        names = [f"{part}.block.{number}" for part in ("encoder", "decoder") for number in range(2)]
        expected = twin(model, names, lambda model: model(input_ids=zoo.ids(), decoder_input_ids=zoo.ids()))
        into_encoder, *of_encoder, into_decoder, last, newest = found[7]
        assert [*of_encoder, last, newest] == pytest.approx(expected, abs=1e-4)
        assert [into_encoder, into_decoder] == pytest.approx([1.0, 1.0])  # an embedding points where it did

    def test_is_another_for_each_checkpoint(self, trained):
        found, scanner = saturations(trained[0] / "gpt2", Source())
        assert len({tuple(values) for values in found}) == len(found) == 11
        assert scanner.saturation_on == "random tokens (seed 0)"

    def test_is_that_of_the_file_whatever_was_run_before(self, trained, tmp_path):
        shutil.copytree(trained[0] / "gpt2" / "checkpoint-70", tmp_path / "checkpoint-70")
        alone, _ = saturations(tmp_path, Source())
        among, _ = saturations(trained[0] / "gpt2", Source())
        assert alone[0] == among[7]

    @pytest.mark.parametrize(
        ("model", "data", "on"),
        [("CausalLanguageModel", TextData(context=16), "random tokens (seed 0)"),
         ("Llama", TextData(context=16), "random tokens (seed 0)"),
         ("TransformerXL", TextData(context=16, is_streamed=True), "random tokens (seed 0)"),
         ("VisionTransformer", ImageData(), "random images (seed 0)")],
    )  # fmt: skip
    def test_is_measured_of_tsemon_trains_own_checkpoints(self, tmp_path, model, data, on):
        sizes = {"width": 16, "heads": 2, "depth": 2}
        sizes |= {"Llama": {"ffn": 32}, "TransformerXL": {"ffn": 32, "memory": 8}}.get(model, {"ffn": 32})
        sizes |= {"patch": 4} if model == "VisionTransformer" else {}
        recipe = Recipe(name="x", model=model, sizes=sizes, data=data, batch_size=2, steps=2, learning_rate=1e-3)
        training = Training(recipe)
        for _ in training.losses:
            torch.save(training.state_dict(), tmp_path / f"step-{training.step:08}.pt")
        found, scanner = saturations(tmp_path, Source())
        assert "saturation" not in scanner.not_measured
        assert scanner.not_measured["positions_attended"] == "the model does not give the weights of its attention"
        assert scanner.saturation_on == on
        assert [len(values) for values in found] == [3, 3]
        assert all(math.isfinite(value) and -1 <= value <= 1 for values in found for value in values)

    def test_reads_a_text_as_bytes_where_the_recipe_does(self, tmp_path):
        sizes = {"width": 16, "heads": 2, "ffn": 32, "depth": 2}
        data = TextData(context=16)
        recipe = Recipe(
            name="x", model="CausalLanguageModel", sizes=sizes, data=data, batch_size=2, steps=1, learning_rate=1e-3
        )
        training = Training(recipe)
        next(training.losses)
        torch.save(training.state_dict(), tmp_path / "step-1.pt")
        (tmp_path / "some.txt").write_text("To be, or not to be, that is the question. " * 4)
        [saturation], scanner = saturations(tmp_path, Source(text=tmp_path / "some.txt"))
        ids = torch.tensor([*(tmp_path / "some.txt").read_bytes()][:128]).reshape(8, 16)
        assert saturation[1:] == pytest.approx(
            twin(training.model.eval(), ["blocks.0", "blocks.1"], lambda model: model(ids)), abs=1e-4
        )
        assert scanner.saturation_on == "the text some.txt"


class TestPositionsAttended:
    def test_of_gpt2_are_counted_in_the_model_and_near_its_limit(self, trained, tokens):
        from transformers import GPT2LMHeadModel

        scanner = Scanner(trained[0] / "gpt2", source=tokens)
        record = [*scanner.look()][7]
        scanner.close()
        model = GPT2LMHeadModel.from_pretrained(
            trained[0] / "gpt2" / "checkpoint-70", attn_implementation="eager"
        ).eval()
        for name, scale in (("positions_attended", 1), ("saturated_positions_attended", 1024)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(scale)
                weights = model(zoo.ids(), output_attentions=True).attentions
            expected = [
                [sum((row > 1e-5).sum().item() for rows in a[:, head] for row in rows) / a[:, head, :, 0].numel()
                 for head in range(4)]
                for a in weights
            ]  # fmt: skip
            assert torch.tensor(record.heads[name]).allclose(torch.tensor(expected))
            assert record.layers[name] == pytest.approx([sum(heads) / 4 for heads in expected])
        # A saturated query attends to less, and of 12 causal tokens to 6.5 at the most.
        assert max(record.layers["saturated_positions_attended"]) < min(record.layers["positions_attended"]) <= 6.5

    def test_of_t5_are_the_encoders_before_the_decoders(self, trained, tokens):
        scanner = Scanner(trained[0] / "t5", source=tokens)
        record = next(scanner.look())
        scanner.close()
        positions = record.layers["positions_attended"]
        assert positions == pytest.approx([12, 12, 6.5, 6.5], rel=0.05)  # of 12 tokens an encoder sees all

    def test_come_to_the_frame_by_head(self, trained):
        scanner = Scanner(trained[0] / "gpt2", source=Source())
        record = next(scanner.look())
        scanner.close()
        frame = record.frame(None)
        assert frame.heads["saturated_positions_attended"].shape == (3, 4)
        flat = [value for row in record.heads["saturated_positions_attended"] for value in row]
        assert frame.heads["saturated_positions_attended"].tolist() == pytest.approx(flat)


class TestWhatIsTold:
    def why(self, folder, source=None):
        [(_, scanner)] = [saturations(folder, source or Source())]
        return scanner.not_measured["saturation"]

    @pytest.fixture
    def folder(self, trained, tmp_path):
        shutil.copytree(trained[0] / "gpt2" / "checkpoint-70", tmp_path / "c" / "checkpoint-70")
        return tmp_path / "c"

    def change(self, folder, **changes):
        path = folder / "checkpoint-70" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_of_code_that_came_with_the_checkpoint_which_is_not_run(self, folder, tmp_path):
        code = f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass A: pass\n"
        (folder / "checkpoint-70" / "modeling_evil.py").write_text(code)
        self.change(
            folder, model_type="evil", auto_map={"AutoConfig": "modeling_evil.A", "AutoModel": "modeling_evil.A"}
        )
        assert "could not be built" in self.why(folder)
        assert not (tmp_path / "was-run").exists()

    def test_of_an_architecture_that_is_not_known(self, folder):
        self.change(folder, architectures=["set_seed"])
        assert self.why(folder) == "config.json names 'set_seed' as its architecture, which transformers does not have"

    def test_of_a_config_of_another_size(self, folder):
        self.change(folder, n_embd=64)
        assert "has the shape (100, 32), the model's is (100, 64)" in self.why(folder)

    def test_of_a_config_of_another_depth(self, folder):
        self.change(folder, n_layer=4)
        assert self.why(folder) == "the model has 4 blocks, the checkpoint's names 3"

    @pytest.mark.parametrize("what", ["n_embd", "vocab_size", "n_positions"])
    def test_of_a_config_that_asks_for_any_size_before_it_is_taken(self, folder, what):
        self.change(folder, **{what: 4 * 10**7})  # of n_embd, 19 PB
        assert "has the shape" in self.why(folder)

    def test_of_a_config_that_asks_for_any_depth(self, folder):
        self.change(folder, n_layer=10**9)
        assert self.why(folder) == "config.json says n_layer: 1e+09, and the checkpoint has 40 tensors"

    def test_of_a_config_that_is_deeper_than_its_checkpoint(self, folder):
        self.change(folder, n_layer=1000)
        assert "many more parts than the checkpoint has tensors for" in self.why(folder)

    def test_of_a_model_that_has_no_room(self, folder):
        weights = open_weights([folder / "checkpoint-70" / "model.safetensors"])
        with pytest.raises(CannotRun, match=r"GPT2LMHeadModel takes about 0\.0 GiB in float32, and 0\.0 GiB are free"):
            build_runner([folder / "checkpoint-70"], weights, Source(), room_bytes=100_000)
        build_runner([folder / "checkpoint-70"], weights, Source(), room_bytes=2**25)
        weights.close()

    def test_of_a_text_without_a_tokenizer(self, folder, tmp_path):
        (tmp_path / "x.txt").write_text("some text")
        assert "no tokenizer in checkpoint-70" in self.why(folder, Source(text=tmp_path / "x.txt"))

    def test_of_tokens_that_the_model_does_not_have(self, folder, tmp_path):
        (tmp_path / "x.json").write_text("[1, 2, 500]")
        assert self.why(folder, Source(tokens=tmp_path / "x.json")) == "token ids are from 0 to 99, got 1 to 500"

    def test_of_parameters_that_are_not_there(self, trained, folder):
        weights = open_weights([folder / "checkpoint-70" / "model.safetensors"])
        runner = build_runner([folder / "checkpoint-70"], weights, Source())
        weights.entries.pop("transformer.ln_f.weight")
        with pytest.raises(CannotRun, match=r"no transformer\.ln_f\.weight, which GPT2LMHeadModel needs"):
            runner.near_the_limit(weights)
        weights.close()

    def test_and_norms_are_measured_all_the_same(self, folder):
        self.change(folder, architectures=["set_seed"])
        scanner = Scanner(folder, source=Source())
        [record] = scanner.look()
        scanner.close()
        assert record.scalars["total_param_norm"] > 0


class TestTokenIds:
    def test_are_the_same_random_ones_each_time(self):
        first, _ = token_ids(Source(), None, 50, 16)
        second, _ = token_ids(Source(), None, 50, 16)
        assert first.equal(second)
        assert first.shape == (8, 16)

    def test_of_a_file_are_cut_to_what_the_model_takes(self, tmp_path):
        (tmp_path / "x.json").write_text(json.dumps([*range(40)]))
        ids, _ = token_ids(Source(tokens=tmp_path / "x.json"), None, 50, 16)
        assert ids.tolist() == [[*range(16)], [*range(16, 32)]]

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '["a", "b"]', "[[1, 2], [3]]", "[[]]"])
    def test_tells_of_a_file_that_holds_none(self, tmp_path, text):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"x\.json"):
            token_ids(Source(tokens=tmp_path / "x.json"), None, 50, 16)

    def test_come_from_one_place(self, tmp_path):
        (tmp_path / "x").touch()
        with pytest.raises(InvalidArgument, match="got both"):
            Source(text=tmp_path / "x", tokens=tmp_path / "x")
        with pytest.raises(MissingData, match="is no file"):
            Source(text=tmp_path)

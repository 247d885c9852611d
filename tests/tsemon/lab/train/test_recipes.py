import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingData, TsemonError
from tsemon.lab.train.datasets import open_data
from tsemon.lab.train.recipe import ImageData, Recipe, TextData, changed
from tsemon.lab.train.recipes import RECIPES, SMALL_DIGITS, SMALL_TEXT, recipe_named
from tsemon.lab.train.tasks import MaskedTask, RecurrentTask, Task, task_of
from tsemon.lab.train.training import Training, build_model

PAPERS = [recipe for name, recipe in RECIPES.items() if not name.startswith("small-")]


class TestARecipe:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"steps": 0}, "steps must be at least 1, got 0"),
            ({"learning_rate": 0.0}, "learning_rate must be above 0"),
            ({"schedule": "linear"}, "constant, cosine, multi-step, inverse-sqrt, got 'linear'"),
            ({"optimizer": "sgd"}, "optimizer is one of adamw, adafactor, got 'sgd'"),
            ({"precision": "float16"}, "float32, bfloat16, got 'float16'"),
            ({"evaluate_every": 0}, "at least 1, or none, got 0"),
            ({"clip_norm": 0.0}, "clip_norm must be above 0 and finite, or none, got 0.0"),
            ({"clip_norm": -1.0}, "clip_norm must be above 0"),
            ({"learning_rate": math.nan}, "learning_rate must be above 0 and finite, got nan"),
            ({"learning_rate": math.inf}, "learning_rate must be above 0 and finite, got inf"),
            ({"weight_decay": -1.0}, "weight_decay must be 0 or more and finite, got -1.0"),
            ({"betas": (0.9, 1.0)}, "betas must be from 0 to less than 1, both"),
            ({"warmup": -1}, "warmup must be 0 or more steps, got -1"),
            ({"final_ratio": 2.0}, "final_ratio must be from 0 to 1, got 2.0"),
            ({"seed": 1 << 63}, "seed must be from 0 to less than 2.63"),
        ],
    )
    def test_says_what_is_out_of_range(self, changes, told):
        with pytest.raises(InvalidArgument, match=told):
            dataclasses.replace(SMALL_TEXT, **changes)

    @pytest.mark.parametrize(
        ("kind", "changes", "told"),
        [
            (TextData, {"context": 0}, r"data\.context must be at least 1, got 0"),
            (
                TextData,
                {"validation_ratio": 2.0},
                r"data\.validation_ratio must be a share from 0 to less than 1, got 2",
            ),
            (ImageData, {"validation_ratio": math.nan}, r"data\.validation_ratio must be a share"),
            (ImageData, {"image_size": 0}, r"data\.image_size must be at least 1, got 0"),
        ],
    )
    def test_says_what_is_out_of_range_in_its_data(self, kind, changes, told):
        with pytest.raises(InvalidArgument, match=told):
            kind(**changes)

    def test_shares_its_batch_evenly(self):
        recipe = dataclasses.replace(SMALL_TEXT, batch_size=12, accumulation=2)
        assert recipe.rows_of_batch(3) == 6
        with pytest.raises(InvalidArgument, match="2 accumulated batches on 4 processes; choose a multiple of 8"):
            recipe.rows_of_batch(4)

    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    def test_becomes_plain_values(self, recipe):
        assert json.loads(json.dumps(recipe.as_dict())) == recipe.as_dict()


class TestASetting:
    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("steps", "7", 7),
            ("learning_rate", "1e-4", 1e-4),
            ("clip_norm", "none", None),
            ("clip_norm", "0.5", 0.5),
            ("betas", "0.9,0.95", (0.9, 0.95)),
            ("compile", "true", True),
            ("schedule", "inverse-sqrt", "inverse-sqrt"),
            ("preset", "bytes-32", "bytes-32"),
            ("data.path", "books", Path("books")),
            ("data.context", "128", 128),
            ("sizes.tau", "0.5", 0.5),
            ("sizes.depth", "8", 8),
            ("sizes.norm", "post", "post"),
            ("sizes.tau", "none", None),
            ("sizes.learn_tau", "true", True),
        ],
    )
    def test_is_read_as_its_field_is_declared(self, key, text, value):
        recipe = changed(SMALL_TEXT, {key: text})
        group, _, field = key.rpartition(".")
        holder = {"": recipe, "data": recipe.data, "sizes": None}[group]
        found = recipe.sizes[field] if holder is None else getattr(holder, field)
        assert (found, type(found)) == (value, type(value))

    def test_keeps_all_others(self):
        recipe = changed(SMALL_TEXT, {"data.context": "32", "sizes.depth": "2"})
        assert changed(recipe, {"data.context": "64", "sizes.depth": "4"}) == SMALL_TEXT

    @pytest.mark.parametrize(
        ("key", "text", "told"),
        [
            ("learning_rat", "1", "no setting named 'learning_rat'; did you mean 'learning_rate'"),
            ("data.contxt", "1", r"no setting named 'data\.contxt'; did you mean 'data\.context'"),
            ("steps", "many", "steps is int, got 'many'"),
            ("compile", "perhaps", "compile is bool, got 'perhaps'"),
            ("betas", "0.9", "betas is float,float, got '0.9'"),
            (
                "data.mixture",
                "a:0.5,b:0.4",
                r"proportions above 0 with the sum 1, got \{'a': 0\.5, 'b': 0\.4\}, whose sum is 0\.9",
            ),
            ("data.mixture", "a:1.5,b:-0.5", "proportions above 0 with the sum 1"),
            ("data.mixture", "a:0.5,a:0.5", "data.mixture is name:proportion,name:proportion,..., got 'a:0.5,a:0.5'"),
            ("data.mixture", "a", "data.mixture is name:proportion"),
            ("schedule", "linear", "schedule is constant or cosine or multi-step or inverse-sqrt, got 'linear'"),
            ("name", "x", "no setting named 'name'"),
        ],
    )
    def test_says_what_is_wrong(self, key, text, told):
        with pytest.raises(InvalidArgument, match=told):
            changed(SMALL_TEXT, {key: text})


class TestTheNamedRecipes:
    def test_are_found_by_their_names(self):
        assert all(recipe_named(name).name == name for name in RECIPES)

    def test_tell_the_nearest_name(self):
        with pytest.raises(InvalidArgument, match="no recipe named 'smal-text'; did you mean 'small-text'"):
            recipe_named("smal-text")

    @pytest.mark.parametrize("recipe", PAPERS, ids=lambda recipe: recipe.name)
    def test_of_the_papers_say_what_to_fetch_and_where(self, recipe, tmp_path):
        with pytest.raises(MissingData, match=r"--data .*https://"):
            open_data(recipe.data)
        with pytest.raises(MissingData, match=r"(expected|is there|is not there).*https://"):
            open_data(dataclasses.replace(recipe.data, path=tmp_path / "nowhere"))

    def test_have_the_settings_of_the_papers(self):
        def settings(recipe: Recipe, *names):
            return tuple(getattr(recipe, name) for name in names)

        rates = {name: RECIPES[f"vit-80-cifar10{name}"].learning_rate for name in ("", "-pre-norm", "-post-norm")}
        assert rates == {"": 1e-4, "-pre-norm": 1e-4, "-post-norm": 0.5e-4}
        vit = recipe_named("vit-80-cifar10")
        assert settings(vit, "batch_size", "weight_decay", "schedule", "betas") == (
            128,
            0.1,
            "multi-step",
            (0.9, 0.999),
        )
        xl = recipe_named("transformer-xl-60-wikitext103")
        assert settings(xl, "batch_size", "learning_rate", "clip_norm", "schedule") == (40, 2.5e-4, None, "cosine")
        assert xl.data.is_streamed
        llama = recipe_named("resformer-82m-slimpajama")
        assert settings(llama, "betas", "weight_decay", "clip_norm", "steps") == ((0.9, 0.95), 0.1, 1.0, 10_000)
        assert llama.batch_size * llama.data.context == 2**21  # tokens

    @pytest.mark.parametrize("name", ["", "-pre-norm", "-post-norm"])
    def test_have_the_vision_transformer_of_the_paper(self, name):
        """80 blocks of 4 D^2 + 2 D F weights and 9 D + F biases and norms, and the ends."""

        model = build_model(RECIPES[f"vit-80-cifar10{name}"], {"image_size": 32, "channels": 3, "num_classes": 10})
        block = 4 * 192**2 + 2 * 192 * 384 + 9 * 192 + 384
        ends = 48 * 192 + 192 + 192 + 65 * 192 + 192 * 10 + 10
        last_norm = 2 * 192 if name == "-pre-norm" else 0
        assert sum(parameter.numel() for parameter in model.parameters()) == 80 * block + ends + last_norm


class TestDataOfText:
    def test_is_the_standard_library_as_bytes_alone(self):
        with pytest.raises(InvalidArgument, match="read as bytes, not as bpe; give other text with --data"):
            open_data(TextData(tokenizer="bpe"))

    @pytest.mark.parametrize(
        ("num_bytes", "told"),
        [
            (0, r"a\.txt holds no text"),
            (50, r"to train on has 49 tokens; expected more than data\.context, 64"),
            (1_200, r"validation part of .*a\.txt has 60 tokens; .*data\.context, 64.*data\.validation_ratio"),
        ],
    )
    def test_is_refused_where_it_is_too_short(self, tmp_path, num_bytes, told):
        (tmp_path / "a.txt").write_text("a" * num_bytes)
        with pytest.raises(InvalidArgument, match=told):
            open_data(TextData(path=tmp_path / "a.txt", context=64))

    def test_is_drawn_from_folders_in_the_proportions_of_a_mixture(self, tmp_path):
        for name, letter in (("few", "a"), ("many", "b")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x.txt").write_text(letter * {"few": 2_000, "many": 20_000}[name])
        recipe = changed(SMALL_TEXT, {"data.mixture": "few:0.75,many:0.25"})
        data = open_data(dataclasses.replace(recipe.data, path=tmp_path, context=8))
        for batches in (data.batches(rows=1000, seed=0), data.validation_batches(rows=100)):
            inputs, _ = next(batches)
            # Of 1,000 and of 100 sequences: three standard errors.
            assert (inputs[:, 0] == ord("a")).double().mean() == pytest.approx(0.75, abs=0.13)
        assert data.sizes == {"vocab": 256, "context": 8}
        assert data.meaning(1.0, 0.0)["bits_per_byte"] == pytest.approx(1 / math.log(2), rel=1e-3)
        training = Training(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=tmp_path), steps=2))
        assert len(list(training.losses)) == 2
        assert math.isfinite(training.evaluate()["validation_loss"])

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"mixture": {"a": 1.0}}, "needs a folder with a folder for each of its names"),
            ({"mixture": {"a": 0.5, "c": 0.5}, "path": True}, r"the folder .*c of data\.mixture is not there"),
            ({"mixture": {"a": 1.0}, "path": True, "is_streamed": True}, "cannot be streamed"),
            ({"mixture": {"a": 1.0}, "path": True, "tokenizer": "bpe"}, "bpe would be learned from each"),
        ],
    )
    def test_is_no_mixture_without_its_folders_or_with_a_tokenizer_for_each(self, tmp_path, changes, told):
        (tmp_path / "a").mkdir()
        if "path" in changes:
            changes = changes | {"path": tmp_path}
        with pytest.raises(TsemonError, match=told):
            open_data(TextData(**changes))

    def test_need_not_be_set_apart(self, tmp_path):
        (tmp_path / "a.txt").write_text("a" * 1_200)
        data = open_data(TextData(path=tmp_path / "a.txt", context=64, validation_ratio=0))
        assert list(data.validation_batches(rows=2)) == []

    def test_has_no_bits_per_byte_where_the_tokens_lose_some(self, tmp_path):
        pytest.importorskip("tokenizers")
        (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 99)
        of_words, of_bytes = (
            open_data(TextData(path=tmp_path / "a.txt", context=4, tokenizer=tokenizer, vocab=5))
            for tokenizer in ("words", "bytes")
        )
        assert of_words.meaning(1.0, 0.0).keys() == {"perplexity"}
        assert of_bytes.meaning(1.0, 0.0).keys() == {"perplexity", "bits_per_byte"}

    def test_is_streamed_in_an_evaluation_too(self, tmp_path):
        (tmp_path / "a.txt").write_text("0123456789" * 8)
        data = open_data(TextData(path=tmp_path / "a.txt", context=4, is_streamed=True, validation_ratio=0.5))
        batches = list(data.validation_batches(rows=2))
        rows = ["".join(chr(token) for inputs, _ in batches for token in inputs[row]) for row in (0, 1)]
        assert all("01234567890123456789".find(row[:10]) >= 0 for row in rows)
        assert [len(row) for row in rows] == [16, 16]


class TestTheSizesOfAModel:
    @pytest.mark.parametrize(("name", "size"), [("depth", "abc"), ("depth", 1.5), ("width", -4), ("heads", 0)])
    def test_are_named_where_they_are_wrong(self, name, size):
        recipe = dataclasses.replace(SMALL_TEXT, sizes={**SMALL_TEXT.sizes, name: size})
        with pytest.raises(InvalidArgument, match=rf"{name}\W.*{size}"):
            build_model(recipe, {"vocab": 256, "context": 64})

    @pytest.mark.parametrize(
        ("recipe", "name", "told"),
        [
            (SMALL_TEXT, "context", r"data\.context and is 64; leave it out"),
            (SMALL_TEXT, "vocab", r"data\.tokenizer and data\.vocab and is 256; leave"),
            (SMALL_DIGITS, "num_classes", "the data and is 10; leave it out"),
        ],
    )
    def test_are_not_those_that_the_data_decide(self, recipe, name, told):
        changed = dataclasses.replace(recipe, sizes={**recipe.sizes, name: 8})
        with pytest.raises(InvalidArgument, match=rf"sizes\.{name} follows from {told}"):
            build_model(changed, open_data(recipe.data).sizes)


class TestEveryRecipe:
    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    def test_has_a_model_that_its_data_fit(self, recipe):
        """Without its weights: the largest has 201 million."""
        vocab = 256 if recipe.data == TextData() else getattr(recipe.data, "vocab", None)
        is_cifar = recipe.name.startswith("vit")
        sizes = (
            {"vocab": vocab, "context": recipe.data.context}
            if vocab
            else {"image_size": 32 if is_cifar else 16, "channels": 3 if is_cifar else 1, "num_classes": 10}
        )
        with torch.device("meta"):
            model = build_model(recipe, sizes)
        is_streamed, fills_in_masks = (
            getattr(recipe.data, "is_streamed", False),
            recipe.name in ("small-bert", "small-t5"),
        )
        assert task_of(model).__class__ is (RecurrentTask if is_streamed else MaskedTask if fills_in_masks else Task)
        million = {"transformer": 201.2, "resformer": 81.9, "vanilla": 81.9, "neutreno": 81.9}.get(
            recipe.name.split("-")[0]
        )
        if million is not None:
            assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(million, abs=0.5)

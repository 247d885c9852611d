"""From a recipe to a training, and back to it after an interruption."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from tsemon.errors import InvalidArgument
from tsemon.lab.train.recipe import ImageData, Recipe, TextData
from tsemon.lab.train.training import Training

TINY = Recipe(
    name="tiny",
    model="CausalLanguageModel",
    sizes={"depth": 1, "width": 16, "heads": 2, "ffn": 16},
    data=TextData(context=8),
    batch_size=4,
    steps=6,
    learning_rate=1e-2,
    schedule="cosine",
    warmup=2,
    clip_norm=0.5,
    evaluation_batches=2,
)
DIGITS = dataclasses.replace(
    TINY,
    model="VisionTransformer",
    sizes={"depth": 1, "width": 16, "heads": 2, "ffn": 16, "patch": 4},
    data=ImageData(augmentation="crop-flip"),
    schedule="multi-step",
)

LEARNING_DIGITS = dataclasses.replace(
    DIGITS,
    sizes=DIGITS.sizes | {"norm": "pre"},
    data=ImageData(),
    batch_size=32,
    steps=100,
    schedule="constant",
    clip_norm=None,
    evaluation_batches=None,
)


def changed(recipe=TINY, **changes):
    return dataclasses.replace(recipe, **changes)


class Dropped(torch.nn.Module):
    """Draws from the global generator in each training step, as dropout does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return torch.nn.functional.dropout(self.model(inputs), 0.1, self.training)


class TestATraining:
    def test_ends_after_the_steps_of_its_recipe(self):
        training = Training(TINY)
        assert len(list(training.losses)) == training.step == 6

    def test_follows_the_schedule_of_its_recipe(self):
        training = Training(changed(schedule="constant", steps=4))
        used = [training.optimizer.param_groups[0]["lr"] for _ in training.losses]
        assert used == [0.005, 0.01, 0.01, 0.01]

    def test_leaves_the_global_generator_alone(self):
        before = torch.random.get_rng_state()
        next(Training(TINY).losses)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_draws_its_weights_from_its_seed(self):
        first, same, other = (Training(changed(seed=seed)).model.head.weight for seed in (1, 1, 2))
        assert torch.equal(first, same)
        assert not torch.equal(first, other)

    def test_learns(self):
        losses = list(Training(changed(steps=60, schedule="constant", clip_norm=None)).losses)
        assert (
            sum(losses[-10:]) / 10 < losses[0] - 1.0
        )  # from log 256 = 5.5 towards 3.1, that of the bytes' frequencies

    def test_takes_steps_relative_to_the_parameters_with_adafactor(self):
        training = Training(changed(optimizer="adafactor", schedule="constant", warmup=0, weight_decay=0.0))
        before = copy.deepcopy(training.model.state_dict())
        next(training.losses)
        for name, new in training.model.state_dict().items():
            size = (new - before[name]).double().square().mean().sqrt().item()
            # Algorithm 4 of Adafactor: rate times max(1e-3, RMS of the parameter), and an update with an RMS of at most 1.
            assert size <= 0.01 * max(1e-3, before[name].double().square().mean().sqrt().item()) * (1 + 1e-4), name
        assert size > 0

    def test_takes_the_same_step_from_a_batch_in_parts(self):
        whole = changed(DIGITS, data=ImageData(), batch_size=8, clip_norm=None, learning_rate=1e-3)
        first, second = Training(whole), Training(changed(whole, accumulation=2))
        # Adam divides by the gradient's own size: where that is rounding alone, so is the step.
        torch.testing.assert_close(next(first.losses), next(second.losses), rtol=1e-5, atol=0)
        first_bias, second_bias = (training.model.head.bias.grad for training in (first, second))
        torch.testing.assert_close(first_bias, second_bias, rtol=1e-4, atol=1e-6)

    def test_takes_its_sizes_from_the_data(self):
        training = Training(DIGITS)
        config = training.model.config
        assert (config.image_size, config.channels, config.num_classes) == (16, 1, 10)

    def test_is_on_the_cpu_in_bfloat16_too(self):
        training = Training(changed(precision="bfloat16", steps=3))
        seen = []
        training.model.head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        assert all(loss.isfinite() for loss in training.losses)
        assert seen == [torch.bfloat16] * 3

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"model": "VisionTransfomer"}, "did you mean 'VisionTransformer'"),
            ({"sizes": {"dephth": 1}}, "no size named 'dephth'; did you mean 'depth'"),
            ({"preset": "bytes-23"}, "did you mean 'bytes-32'"),
            ({"batch_size": 5, "accumulation": 2}, "choose a multiple of 2"),
        ],
    )
    def test_says_what_it_cannot_make(self, changes, told):
        with pytest.raises(InvalidArgument, match=told):
            Training(changed(**changes))


class TestAnEvaluation:
    def test_tells_loss_and_bits_per_byte_of_text(self):
        training = Training(TINY)
        told = training.evaluate()
        assert told["perplexity"] == pytest.approx(torch.tensor(told["validation_loss"]).exp().item())
        assert told["bits_per_byte"] == pytest.approx(told["validation_loss"] / 0.6931471805599453)

    def test_tells_the_accuracy_of_images(self):
        training = Training(changed(LEARNING_DIGITS))
        at_first = training.evaluate()
        for _ in training.losses:
            pass
        assert at_first["accuracy"] < 0.3
        assert training.evaluate()["accuracy"] > 0.5  # 0.1 is chance; measured 0.7

    def test_tells_the_accuracy_of_hidden_tokens(self):
        training = Training(RECIPES["masks"])
        assert training.model.config.vocab == 257, "the last one is the mask"
        told = training.evaluate()
        assert told == training.evaluate()
        assert told.keys() == {"validation_loss", "accuracy"}
        assert told["accuracy"] < 0.2

    def test_is_the_mean_over_all_targets(self):
        training = Training(changed(DIGITS, batch_size=7, evaluation_batches=None))
        with torch.no_grad():
            logits = training.model.eval()(training.data.images.val_images)
        expected = torch.nn.functional.cross_entropy(logits, training.data.images.val_labels)
        assert training.evaluate()["validation_loss"] == pytest.approx(expected.item(), rel=1e-5)

    def test_changes_nothing_of_the_training(self):
        plain, evaluated = Training(TINY), Training(TINY)
        losses = [(loss, evaluated.evaluate())[0] for loss in evaluated.losses]
        assert losses == list(plain.losses)

    def test_runs_in_eval_mode_and_without_gradients(self):
        training, seen = Training(TINY), []
        training.model.register_forward_hook(
            lambda module, _, output: seen.append((module.training, output.requires_grad))
        )
        training.model.train()
        training.evaluate()
        assert set(seen) == {(False, False)}
        assert training.model.training

    def test_begins_without_a_memory_and_leaves_that_of_the_training(self):
        training = Training(RECIPES["memory"])
        next(training.losses)
        assert training.evaluate() == training.evaluate()

    def test_tells_a_loss_that_is_none(self):
        training = Training(TINY)
        torch.nn.init.constant_(training.model.head.bias, torch.nan)
        assert math.isnan(training.evaluate()["validation_loss"])

    def test_tells_nothing_where_nothing_was_set_apart(self):
        assert Training(changed(data=TextData(context=8, validation_ratio=0.0))).evaluate() == {}


RECIPES = {
    "text": TINY,
    "streamed text": changed(data=TextData(context=8, is_streamed=True)),
    "memory": changed(
        model="TransformerXL", sizes=TINY.sizes | {"memory": 8}, data=TextData(context=8, is_streamed=True)
    ),
    "augmented images": DIGITS,
    "accumulation": changed(accumulation=2),
    "bfloat16": changed(precision="bfloat16"),
    "inverse-sqrt": changed(schedule="inverse-sqrt"),
    "masks": changed(model="TextEncoder"),
    "T5": changed(model="T5Encoder", optimizer="adafactor"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("num_before", [1, 4])
class TestAResumedTraining:
    def test_is_bit_equal_to_one_that_was_not_interrupted(self, recipe, num_before, tmp_path):
        whole = Training(recipe)
        expected = list(whole.losses)
        interrupted = Training(recipe)
        list(itertools.islice(interrupted.losses, num_before))
        torch.save(interrupted.state_dict(), tmp_path / "checkpoint.pt")
        resumed = Training(recipe)
        resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
        assert resumed.step == num_before
        assert list(resumed.losses) == expected[num_before:]
        assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


class TestTheStateOfATraining:
    def test_holds_the_random_state(self):
        def dropping():
            training = Training(TINY)
            training.model.head = Dropped(training.model.head)
            return training

        torch.manual_seed(0)
        whole = dropping()
        losses = list(itertools.islice(whole.losses, 2))
        state = copy.deepcopy(whole.state_dict())
        losses += list(whole.losses)
        torch.manual_seed(1)
        resumed = dropping()
        resumed.load_state_dict(state)
        assert list(resumed.losses) == losses[2:]

    def test_is_of_one_recipe(self):
        state = Training(TINY).state_dict()
        other = Training(changed(learning_rate=0.5, data=TextData(context=7)))
        with pytest.raises(InvalidArgument, match=r"data\.context was 8 and is 7, learning_rate was 0\.01 and is 0\.5"):
            other.load_state_dict(state)

    def test_may_be_gone_on_from_for_longer(self):
        training = Training(changed(schedule="constant"))
        list(training.losses)
        longer = Training(changed(schedule="constant", steps=8))
        longer.load_state_dict(training.state_dict())
        assert len(list(longer.losses)) == 2

    def test_may_be_older_than_a_setting_of_recipes(self):
        state = Training(TINY).state_dict()
        older = state | {"recipe": {key: value for key, value in state["recipe"].items() if key != "optimizer"}}
        Training(TINY).load_state_dict(older)
        with pytest.raises(InvalidArgument, match="optimizer was 'adamw' and is 'adafactor'"):
            Training(changed(optimizer="adafactor")).load_state_dict(older)

    def test_is_not_past_the_end(self):
        state = Training(TINY).state_dict() | {"step": 6}
        with pytest.raises(InvalidArgument, match="already at step 6, and the run is to end at step 5; resume with"):
            Training(changed(steps=5)).load_state_dict(state)

    def test_is_of_as_many_processes(self):
        state = Training(TINY).state_dict()
        state["processes"] *= 2
        with pytest.raises(InvalidArgument, match="saved by 2 processes, these are 1"):
            Training(TINY).load_state_dict(state)

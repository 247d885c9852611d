import copy

import pytest
import torch

from tests.tsemon.models.variants import (
    DE_ESCALATED,
    MODELS,
    VARIANTS,
    inputs_for,
    language,
    parametrised,
    vision,
)
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import DeEscalatedBlock, PostNormBlock


def make(build, fields, seed=0):
    torch.manual_seed(seed)
    return build(**fields)


def loss_and_gradients(run, model, inputs):
    """Run the pass, given the model, and its backward pass."""
    model.zero_grad()
    output = run(inputs)
    output.float().square().mean().backward()
    return output, [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


COMPILED_ALWAYS = ("language-learned", "vision-post", "repeating-None")
"""All others are compiled in `make test-all`."""


class TestACompiledModel:
    @pytest.mark.parametrize(
        ("build", "fields"),
        [
            pytest.param(*model, id=name, marks=[] if name in COMPILED_ALWAYS else [pytest.mark.thorough])
            for name, model in MODELS.items()
        ],
    )
    def test_is_one_graph(self, build, fields):
        torch._dynamo.reset()
        model, inputs = make(build, {**fields, "depth": 2}), inputs_for(build)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        expected = loss_and_gradients(model, model, inputs)
        # float32, in another order where the graph is traced: some hundred roundings of 6e-8.
        torch.testing.assert_close(loss_and_gradients(compiled, model, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("build", "fields"), MODELS.values(), ids=MODELS.keys())
class TestEveryModel:
    def test_runs_in_bfloat16_with_a_finite_gradient_for_every_parameter(self, build, fields):
        inputs = inputs_for(build)
        half = inputs.bfloat16() if inputs.is_floating_point() else inputs
        model = make(build, fields).bfloat16()
        output, gradients = loss_and_gradients(model, model, half)
        assert output.dtype == torch.bfloat16
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)

    def test_comes_back_from_its_state_dict(self, build, fields):
        model, other, inputs = make(build, fields), make(build, fields, seed=1), inputs_for(build)
        assert not torch.equal(other(inputs), model(inputs))
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(other(inputs), model(inputs))


@pytest.mark.parametrize("build", [vision, language])
class TestADeEscalatedModel:
    @pytest.mark.parametrize("tau", [None, 0.5])
    def test_is_a_stack_of_depth_blocks(self, build, tau):
        blocks = build(tau=tau).blocks
        assert [type(block) for block in blocks] == [PostNormBlock if tau is None else DeEscalatedBlock] * 3
        assert tau is None or {block.deescalation.tau for block in blocks} == {tau}

    @pytest.mark.parametrize("norm", ["post", "pre"])
    def test_starts_with_the_weights_of_its_twins(self, build, norm):
        twin = make(build, {"norm": norm}).state_dict()
        for name, value in make(build, {"tau": 1.0}).state_dict().items():
            assert torch.equal(value, twin.pop(name))
        assert {name.partition(".")[0] for name in twin} == (set() if norm == "post" else {"norm"})

    def test_with_a_tau_of_zero_is_the_classic_one(self, build):
        inputs = inputs_for(build)
        assert torch.equal(make(build, {"tau": 0.0})(inputs), make(build, {})(inputs))


class TestTheVisionTransformer:
    def test_reads_patches_row_by_row(self):
        model = vision().double()
        images = inputs_for(vision, torch.float64)
        seen = {}
        model.embed.register_forward_hook(lambda _, inputs, __: seen.update(patches=inputs[0]))
        model(images)
        expected = [images[:, :, row : row + 4, left : left + 4].flatten(1) for row in (0, 4) for left in (0, 4)]
        assert torch.equal(seen["patches"], torch.stack(expected, dim=1))

    @pytest.mark.parametrize("norm", ["post", "pre"])
    def test_puts_the_class_token_first_and_answers_from_it(self, norm):
        model = vision(norm=norm)
        seen = {}
        model.blocks[0].register_forward_hook(lambda _, inputs, __: seen.update(first=inputs[0]))
        model.blocks[-1].register_forward_hook(lambda _, __, output: seen.update(last=output))
        logits = model(inputs_for(vision))
        torch.testing.assert_close(seen["first"][:, 0], (model.class_token + model.positions[0]).expand(2, -1))
        last = seen["last"][:, 0]
        normed = last if norm == "post" else torch.nn.functional.layer_norm(last, (12,))
        torch.testing.assert_close(logits, model.head(normed))

    def test_tells_the_size_it_was_given(self):
        with pytest.raises(ShapeError, match=r"\(3, 8, 8\)\), got \(2, 3, 16, 16\)"):
            vision()(torch.ones(2, 3, 16, 16))

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"patch": 3}, "image_size 8 and patch 3"),
            ({"depth": 0}, "got 0"),
            ({"width": 13}, "width 13"),
            ({"tau": 2.0}, "got 2"),
            ({"num_classes": 0}, "num_classes 0"),
            ({"channels": 0}, "channels 0"),
        ],
    )
    def test_refuses_sizes_that_do_not_fit(self, sizes, words):
        with pytest.raises(InvalidArgument, match=words):
            vision(**sizes)


class TestTheCausalLanguageModel:
    @pytest.mark.parametrize(**parametrised(VARIANTS))
    def test_does_not_see_the_future(self, fields):
        assert logits_moved_before(make(language, fields).double(), token=5) == 0.0

    @pytest.mark.parametrize(**parametrised(DE_ESCALATED))
    def test_would_see_it_through_the_mean_of_the_whole_sequence(self, fields):
        assert logits_moved_before(make(language, {**fields, "full_mean": True}).double(), token=5) > 1e-3

    def test_takes_sequences_shorter_than_its_context(self):
        model = language(tau=0.5).double()
        tokens = inputs_for(language)
        torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])

    def test_tells_how_long_a_sequence_may_be(self):
        with pytest.raises(ShapeError, match=r"at most 9 tokens, got \(2, 10\)"):
            language()(torch.zeros(2, 10, dtype=torch.int64))

    @pytest.mark.parametrize("sizes", [{"vocab": 0}, {"context": 0}, {"depth": 0}, {"heads": 5}, {"causal": False}])
    def test_refuses_sizes_that_do_not_fit(self, sizes):
        with pytest.raises(InvalidArgument):
            language(**sizes)


def logits_moved_before(model, token):
    """How far changing this token moves the logits of earlier ones."""
    tokens = inputs_for(language)
    changed = tokens.clone()
    changed[:, token] = (changed[:, token] + 1) % 20
    moved = (model(changed) - model(tokens)).abs()
    assert moved[:, token].min() > 0
    return moved[:, :token].max().item()

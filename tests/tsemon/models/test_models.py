import copy

import pytest
import torch

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import CausalLanguageModel, DeEscalatedBlock, DeEscalation, PostNormBlock, VisionTransformer

TAUS = [None, 0.5, 1.0]
VISION = {"image_size": 8, "patch": 4, "channels": 3, "num_classes": 5, "depth": 3, "width": 12, "heads": 3, "ffn": 24}
LANGUAGE = {"vocab": 20, "context": 9, "depth": 3, "width": 12, "heads": 3, "ffn": 24}


def build(kind, tau, seed=0, **sizes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "vision":
            return VisionTransformer(**(VISION | sizes), tau=tau)
        return CausalLanguageModel(**(LANGUAGE | sizes), tau=tau)


def inputs_for(kind):
    generator = torch.Generator().manual_seed(1)
    if kind == "vision":
        return torch.randn(2, 3, 8, 8, generator=generator)
    return torch.randint(20, (2, 9), generator=generator)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("kind", ["vision", "language"])
class TestEveryModel:
    def test_is_a_stack_of_depth_blocks(self, kind, tau):
        blocks = build(kind, tau).blocks
        assert [type(block) for block in blocks] == [PostNormBlock if tau is None else DeEscalatedBlock] * 3
        assert tau is None or {block.deescalation.tau for block in blocks} == {tau}

    def test_gives_finite_logits_and_gradients(self, kind, tau):
        model = build(kind, tau)
        logits = model(inputs_for(kind))
        logits.square().sum().backward()
        assert logits.shape == ((2, 5) if kind == "vision" else (2, 9, 20))
        assert logits.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    def test_comes_back_from_its_state_dict(self, kind, tau):
        model, other = build(kind, tau), build(kind, tau, seed=1)
        inputs = inputs_for(kind)
        assert not torch.equal(other(inputs), model(inputs))
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(other(inputs), model(inputs))

    def test_runs_in_bfloat16(self, kind, tau):
        inputs = inputs_for(kind)
        half = build(kind, tau).bfloat16()(inputs.bfloat16() if kind == "vision" else inputs)
        assert half.dtype == torch.bfloat16
        # Some ten roundings to 8 bits on the way to logits near 1.
        torch.testing.assert_close(half.float(), build(kind, tau)(inputs), rtol=0.1, atol=0.1)

    def test_starts_with_the_weights_of_its_twin(self, kind, tau):
        twin = build(kind, None).state_dict()
        for name, value in build(kind, tau).state_dict().items():
            assert torch.equal(value, twin.pop(name))
        assert not twin


class TestTheVisionTransformer:
    def test_reads_patches_row_by_row(self):
        model = build("vision", None).double()
        images = inputs_for("vision").double()
        seen = {}
        model.embed.register_forward_hook(lambda _, inputs, __: seen.update(patches=inputs[0]))
        model(images)
        expected = [images[:, :, row : row + 4, left : left + 4].flatten(1) for row in (0, 4) for left in (0, 4)]
        assert torch.equal(seen["patches"], torch.stack(expected, dim=1))

    def test_puts_the_class_token_first_and_answers_from_it(self):
        model = build("vision", None)
        images = inputs_for("vision")
        seen = {}
        model.blocks[0].register_forward_hook(lambda _, inputs, __: seen.update(first=inputs[0]))
        model.blocks[-1].register_forward_hook(lambda _, __, output: seen.update(last=output))
        logits = model(images)
        torch.testing.assert_close(seen["first"][:, 0], (model.class_token + model.positions[0]).expand(2, -1))
        torch.testing.assert_close(logits, model.head(seen["last"][:, 0]))

    def test_tells_the_size_it_was_given(self):
        with pytest.raises(ShapeError, match=r"\(3, 8, 8\)\), got \(2, 3, 16, 16\)"):
            build("vision", None)(torch.ones(2, 3, 16, 16))

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"patch": 3}, "image_size 8 and patch 3"),
            ({"depth": 0}, "got 0"),
            ({"width": 13}, "width 13"),
        ],
    )
    def test_refuses_sizes_that_do_not_fit(self, sizes, words):
        with pytest.raises(InvalidArgument, match=words):
            build("vision", None, **sizes)

    def test_refuses_a_tau_over_one(self):
        with pytest.raises(InvalidArgument, match="got 2"):
            build("vision", 2.0)


class TestTheCausalLanguageModel:
    @pytest.mark.parametrize("tau", TAUS)
    def test_does_not_see_the_future(self, tau):
        assert logits_moved_before(build("language", tau).double(), token=5) == 0.0

    @pytest.mark.parametrize("tau", [0.5, 1.0])
    def test_would_see_it_through_the_mean_of_the_whole_sequence(self, tau):
        model = build("language", tau).double()
        for block in model.blocks:
            block.deescalation = DeEscalation(tau, causal=False)
        assert logits_moved_before(model, token=5) > 1e-3

    def test_takes_sequences_shorter_than_its_context(self):
        model = build("language", 0.5).double()
        tokens = inputs_for("language")
        torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])

    def test_tells_how_long_a_sequence_may_be(self):
        with pytest.raises(ShapeError, match=r"at most 9 tokens, got \(2, 10\)"):
            build("language", None)(torch.zeros(2, 10, dtype=torch.int64))

    @pytest.mark.parametrize("sizes", [{"vocab": 0}, {"context": 0}, {"depth": 0}, {"heads": 5}])
    def test_refuses_sizes_that_do_not_fit(self, sizes):
        with pytest.raises(InvalidArgument):
            build("language", None, **sizes)


def logits_moved_before(model, token):
    """How far changing this token moves the logits of earlier ones."""
    tokens = inputs_for("language")
    changed = tokens.clone()
    changed[:, token] = (changed[:, token] + 1) % 20
    moved = (model(changed) - model(tokens)).abs()
    assert moved[:, token].min() > 0
    return moved[:, :token].max().item()

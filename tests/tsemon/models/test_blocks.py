import math

import pytest
import torch

from tests.tsemon.models import written_out
from tests.tsemon.models.variants import BLOCK, DE_ESCALATED, PLAIN, parametrised
from tests.tsemon.models.written_out import EXACT, averaging_matrix
from tsemon.errors import InvalidArgument
from tsemon.models import BlockConfig, DeEscalatedBlock, DeEscalation, FeedForward
from tsemon.models.blocks import block

TAUS = [0.0, 0.375, 1.0]


def make(seed=0, **fields):
    """The block, with norms that do not start as ones and zeros."""
    torch.manual_seed(seed)
    made = block(BlockConfig(**BLOCK, **fields)).double()
    for name, parameter in made.named_parameters():
        if name.startswith("norm"):
            torch.nn.init.normal_(parameter)
    return made


def shared_energy_ratio(x_BTD):
    return x_BTD.mean(1).square().sum() * x_BTD.shape[1] / x_BTD.square().sum()


@pytest.mark.parametrize("causal", [False, True])
class TestABlock:
    @pytest.mark.parametrize(**parametrised(PLAIN | DE_ESCALATED))
    def test_equals_its_equations_written_out(self, x_BTD, causal, fields):
        config = BlockConfig(**BLOCK, causal=causal, **fields)
        made = make(causal=causal, **fields)
        expected = torch.stack([written_out.block(config, made, x) for x in x_BTD])
        torch.testing.assert_close(made(x_BTD), expected, **EXACT)

    @pytest.mark.parametrize("norm", ["post", "pre", "branch"])
    def test_mixes_no_tokens_when_alpha_is_zero(self, x_BTD, causal, norm):
        made = make(causal=causal, norm=norm, alpha=0.0)
        torch.testing.assert_close(made(x_BTD)[:, :1], made(x_BTD[:, :1]), **EXACT)

    @pytest.mark.parametrize(**parametrised(PLAIN | DE_ESCALATED))
    def test_starts_with_the_weights_of_its_twins(self, causal, fields):
        torch.manual_seed(0)
        classic = block(BlockConfig(**BLOCK, causal=causal)).state_dict()
        torch.manual_seed(0)
        for name, value in block(BlockConfig(**BLOCK, causal=causal, **fields)).state_dict().items():
            assert torch.equal(value, torch.tensor(0.375) if name.endswith("tau") else classic[name])


class TestTheMeanOfTheWholeSequence:
    @pytest.mark.parametrize("tau_at", ["output", "feed_forward", "attention"])
    def test_is_taken_in_a_causal_block_where_it_is_asked_for(self, x_BTD, tau_at):
        fields = {"causal": True, "tau": 0.4, "full_mean": True, "tau_at": tau_at}
        made = make(**fields)
        expected = torch.stack([written_out.block(BlockConfig(**BLOCK, **fields), made, x) for x in x_BTD])
        torch.testing.assert_close(made(x_BTD), expected, **EXACT)


class TestABlockConfig:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"norm": "prae"}, r"norm must be one of \('post', 'pre', 'branch'\), got 'prae'"),
            ({"activation": "tanh"}, "activation must be"),
            ({"tau": 0.5, "tau_at": "ffn"}, "tau_at must be"),
            ({"attention": "flash"}, "attention must be"),
            ({"reparameterisation": "sharp"}, "expected a reparameterisation"),
            ({"tau": 0.5, "norm": "pre"}, "tau=0.5 with norm='pre'"),
            ({"learn_tau": True}, "tau is None"),
            ({"full_mean": True}, "tau is None"),
            ({"full_mean": True, "tau": 0.5}, "for causal models"),
            ({"masking": "multiply"}, "for causal models with free weights, got causal=False"),
            ({"masking": "multiply", "causal": True, "reparameterisation": "smoothing"}, "got causal=True and reparam"),
            ({"masking": "add"}, "masking must be one of"),
        ],
    )
    def test_refuses_what_contradicts_itself(self, fields, words):
        with pytest.raises(InvalidArgument, match=words):
            BlockConfig(**BLOCK, **fields)

    @pytest.mark.parametrize("tau", [-0.1, 1.1, math.nan])
    def test_gives_a_tau_that_is_a_share(self, tau):
        with pytest.raises(InvalidArgument, match=f"from 0 to 1, got {tau}"):
            make(tau=tau)


class TestFeedForward:
    def test_has_a_hidden_width(self):
        with pytest.raises(InvalidArgument, match="got 0"):
            FeedForward(12, 0)

    def test_knows_its_activations(self):
        with pytest.raises(InvalidArgument, match="got 'tanh'"):
            FeedForward(12, 24, "tanh")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("tau", TAUS)
class TestDeEscalation:
    def test_equals_equation_21_written_out(self, x_BTD, causal, learn, tau):
        expected = torch.stack([x - tau * averaging_matrix(7, causal) @ x for x in x_BTD])
        torch.testing.assert_close(DeEscalation(tau, causal, learn).double()(x_BTD), expected, **EXACT)

    def test_keeps_half_precision(self, x_BTD, causal, learn, tau):
        x_BTD = x_BTD.bfloat16()
        y_BTD = DeEscalation(tau, causal, learn).bfloat16()(x_BTD)
        assert y_BTD.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits; tau, the mean and the difference of numbers up to 4 are each rounded once.
        torch.testing.assert_close(y_BTD.double(), DeEscalation(tau, causal)(x_BTD.double()), rtol=2**-7, atol=2**-6)


class TestDeEscalationOfWholeSequences:
    def test_divides_token_similarity_as_the_equation_says(self, x_BTD):
        x_BTD = x_BTD[:1] + 2  # s is a ratio of sums, so one sequence
        s = shared_energy_ratio(x_BTD)
        kept = (1 - 0.4) ** 2 * s
        torch.testing.assert_close(shared_energy_ratio(DeEscalation(0.4)(x_BTD)), kept / (kept + 1 - s), **EXACT)

    def test_leaves_no_similarity_at_tau_1(self, x_BTD):
        made = make(tau=1.0)
        before = {}
        made.deescalation.register_forward_hook(lambda _, inputs, __: before.update(x=inputs[0]))
        after = made(x_BTD)
        assert isinstance(made, DeEscalatedBlock)
        assert shared_energy_ratio(before["x"]) > 0.01
        assert shared_energy_ratio(after) < 1e-28  # the square of float64's rounding, with room


class TestDeEscalationByPrefixMeans:
    def test_turns_the_first_token_into_zeros_at_tau_1(self, x_BTD):
        y_BTD = DeEscalation(1.0, causal=True)(x_BTD)
        assert (y_BTD[:, 0] == 0).all()
        assert (y_BTD[:, 1:] != 0).all()

    def test_sums_long_bfloat16_sequences_in_float32(self):
        equal_BTD = torch.full((1, 2000, 1), 1.5, dtype=torch.bfloat16)
        assert (DeEscalation(1.0, causal=True)(equal_BTD) == 0).all()  # a bfloat16 sum would be off by up to 2^-9


class TestALearnedTau:
    @pytest.mark.parametrize("causal", [False, True])
    def test_has_the_gradient_of_equation_21(self, x_BTD, causal):
        step = DeEscalation(0.4, causal, learn=True).double()
        step(x_BTD).square().sum().backward()
        means = torch.stack([averaging_matrix(7, causal) @ x for x in x_BTD])
        torch.testing.assert_close(
            step.tau.grad, (-2 * (x_BTD - 0.4 * means) * means).sum(), rtol=1e-6, atol=0
        )  # tau is a float32 0.4

    def test_can_be_printed_where_it_has_no_value(self):
        with torch.device("meta"):
            assert repr(DeEscalation(0.4, learn=True)) == "DeEscalation(tau=learned, causal=False)"

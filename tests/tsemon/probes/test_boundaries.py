import pytest
import torch
from torch import nn

from tests.tsemon.probes.probing import num_hooks, probe_of, reading_of
from tests.tsemon.probes.structures import (
    Attention,
    D,
    Dicts,
    FeedForward,
    MambaSsm,
    OldVitPytorch,
    PostNormParts,
    VitPytorch,
    WithFunctionalNorm,
    XTransformer,
)
from tsemon.measures import escalation_rate, token_similarity

MODELS = {
    "vit-pytorch": VitPytorch,
    "vit-pytorch of one block": lambda: VitPytorch(1),
    "vit-pytorch of old": OldVitPytorch,
    "parts in dicts": Dicts,
    "post-norm parts": PostNormParts,
    "x-transformers": XTransformer,
    "x-transformers, post-norm": lambda: XTransformer(is_pre_norm=False),
    "x-transformers, two attentions": lambda: XTransformer(layers=(Attention, Attention, FeedForward)),
    "mamba-ssm": MambaSsm,
    "mamba-ssm in wrappers": lambda: wrapped(MambaSsm()),
}


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def wrapped(model):
    model.layers = nn.ModuleList(map(Wrapper, model.layers))
    return model


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 8, D)


def expected(model, x):
    with torch.no_grad():
        return torch.stack([token_similarity(state).mean() for state in model.states(x)])


def similarity(reading):
    return torch.as_tensor(reading.layers["token_similarity"]).float()


class TestHiddenStates:
    @pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
    def test_are_those_between_the_blocks(self, make, x):
        model = make()
        reading, probe = reading_of(model, lambda: model(x), layout="BTC")
        assert "token_similarity" not in probe.not_measured
        torch.testing.assert_close(similarity(reading), expected(model, x), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
    def test_are_seen_in_every_sample_and_leave_nothing(self, make, x):
        model = make()
        probe = probe_of(model, layout="BTC")
        for scale in (1, 2):
            probe.arm({"token_similarity"})
            output = model(scale * x)
            reading = probe.collect()
            probe.disarm()
            torch.testing.assert_close(similarity(reading), expected(model, scale * x), rtol=1e-5, atol=1e-6)
            assert torch.equal(output, model(scale * x))
        assert num_hooks(model) == 0

    def test_are_unknown_behind_a_last_block_whose_sum_a_function_normalizes(self, x):
        model = WithFunctionalNorm()
        reading, probe = reading_of(model, lambda: model(x))
        torch.testing.assert_close(similarity(reading)[:-1], expected(model, x)[:-1], rtol=1e-5, atol=1e-6)
        assert similarity(reading)[-1].isnan()
        assert "the output of the last block is unknown: layers.2" in probe.not_measured["token_similarity"]

    def test_are_unknown_behind_the_last_block_where_autograd_does_not_run(self, x):
        model = OldVitPytorch()
        reading, probe = reading_of(model, lambda: model(x))
        saturation = torch.as_tensor(reading.layers["saturation"])
        assert saturation.isnan().tolist() == [False, False, False, True]
        assert "the output of the last block is unknown" in probe.not_measured["saturation"]

    def test_show_the_sum_of_a_residual_that_is_a_module_of_its_own(self, x):
        model = XTransformer()
        reading, _ = reading_of(model, lambda: model(x))
        with torch.no_grad():
            states = model.states(x)
            (norm, _), attention, _ = model.layers[0]
            y = x + attention(norm(x))
        want = escalation_rate(states[0], y).mean()
        torch.testing.assert_close(torch.as_tensor(reading.layers["escalation_rate"]).float()[0], want)

    def test_are_seen_when_the_blocks_run_without_the_module_around_them(self, x):
        model = VitPytorch()
        model.forward = None  # as a training_step that calls the parts by itself
        probe = probe_of(model)
        for _ in range(3):  # the first finds out that the gate is not called, the second where the tokens lie
            probe.arm({"token_similarity"})
            model.head(model.states(x)[-1])
            reading = probe.collect()
            probe.disarm()
        torch.testing.assert_close(similarity(reading), expected(model, x), rtol=1e-5, atol=1e-6)

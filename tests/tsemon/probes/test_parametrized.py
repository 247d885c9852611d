import pytest
from torch import nn
from torch.nn.utils import parametrize

from tests import zoo
from tests.tsemon.probes.probing import ALL, reading_of
from tsemon.probes import find_blocks
from tsemon.probes.discovery import is_linear, widths
from tsemon.probes.groups import is_tied
from tsemon.probes.query_key import queries_and_keys


class Counting(nn.Module):
    """A parametrization that another call changes, as calls change spectral norm's."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * (1 + 0.01 * self.calls)


def parametrized(model):
    """All linear layers of it, and the counters."""
    linear = [module for module in model.modules() if is_linear(module)]
    for module in linear:
        parametrize.register_parametrization(module, "weight", Counting())
    return model, [module.parametrizations["weight"][0] for module in linear]


class TestAParametrization:
    @pytest.mark.parametrize("make", [zoo.our_language_model, zoo.gpt2, zoo.bert])
    def test_runs_as_often_as_if_nobody_watched(self, make):
        model, forward = make()
        _, counters = parametrized(model)
        before = [counter.calls for counter in counters]
        forward()
        alone = [counter.calls - had for counter, had in zip(counters, before, strict=True)]
        reading_of(model, forward, measures=ALL - {"saturation", "saturation_scale"})  # these make passes of their own
        watched = [counter.calls - had for counter, had in zip(counters, before, strict=True)]
        assert max(alone) > 0
        assert watched == [2 * calls for calls in alone]

    @pytest.mark.parametrize("make", [zoo.our_language_model, zoo.gpt2])
    def test_hides_no_linear_layer(self, make):
        model, forward = make()
        sizes = [widths(module) for module in model.modules() if is_linear(module)]
        parametrized(model)
        assert [widths(module) for module in model.modules() if is_linear(module)] == sizes
        reading, probe = reading_of(model, forward, measures={"escalation_rate", "dead_units"})
        assert set(reading.layers) == {"escalation_rate", "dead_units"}
        assert probe.not_measured == {}

    @pytest.mark.parametrize("make", [zoo.torch_encoder, zoo.gpt2])
    def test_hides_no_queries_and_keys(self, make):
        model, _ = make()
        attention = find_blocks(model)[0].attention
        plain = queries_and_keys(attention)
        for module in attention.modules():
            for name in ("in_proj_weight", "weight"):
                if isinstance(getattr(module, name, None), nn.Parameter):
                    parametrize.register_parametrization(module, name, Counting())
        shapes = sorted((tuple(s.parameter.shape), s.axis, s.stretches) for s in plain)
        found = queries_and_keys(attention)
        assert sorted((tuple(s.parameter.shape), s.axis, s.stretches) for s in found) == shapes

    def test_hides_no_tied_weight(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        assert not is_tied(model, model[1])
        model[1].weight = model[0].weight
        parametrize.register_parametrization(model[1], "weight", Counting())
        assert is_tied(model, model[1])

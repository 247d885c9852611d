import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, reading_of


def losses(model):
    """Each sample's own, by vmap."""
    parameters = dict(model.named_parameters())
    return vmap(lambda ids: loss_of(model, parameters, ids))(zoo.ids())


def gradients(model):
    """Each sample's own, by vmap of grad: what differentially private training needs."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    per_sample = vmap(grad(lambda given, ids: loss_of(model, given, ids)), in_dims=(None, 0))(parameters, zoo.ids())
    return per_sample["head.weight"]


def loss_of(model, parameters, ids):
    return F.cross_entropy(functional_call(model, parameters, (ids[None],))[0], ids)


class TestAModelUnderTransformsOfTorchFunc:
    @pytest.mark.parametrize("of", [losses, gradients])
    def test_is_not_measured_and_says_why(self, of):
        model, _ = zoo.our_language_model()
        alone = of(model)
        given = []
        reading, probe = reading_of(
            model, lambda: given.append(of(model)), measures=ALL - {"saturation", "saturation_scale"}
        )
        assert torch.equal(given[0], alone)
        assert "token_similarity" not in reading.layers
        for name in ("token_similarity", "attention_entropy", "escalation_rate", "dead_units", "output_variation"):
            assert "transforms of torch.func" in probe.not_measured[name]
        assert num_hooks(model) == 0

    def test_is_measured_again_without_them(self):
        model, forward = zoo.our_language_model()
        reading, _ = reading_of(model, lambda: (losses(model), forward()), measures={"token_similarity"})
        assert "token_similarity" in reading.layers

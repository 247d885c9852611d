"""The models of examples/models, each in one file, against those of tsemon.models with the same weights."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from tests.tsemon.models.written_out import EXACT
from tsemon import models

FOLDER = Path(__file__).parents[3] / "examples/models"
BLOCK = {"depth": 3, "width": 12, "heads": 2, "ffn": 24}
TEXT, IMAGES = {"vocab": 20, "context": 9}, {"image_size": 8, "patch": 4, "channels": 3, "num_classes": 5}
SHARPENING = {"norm": "pre", "reparameterisation": "sharpening", "projection": "transpose"}
MODELS = {
    "de_escalated": ("DeEscalated", TEXT, "CausalLanguageModel", {"tau": 0.2}),
    "norm_growth": ("NormGrowth", TEXT, "CausalLanguageModel", {"norm": "branch", "activation": "relu"}),
    "resformer": ("ResFormer", {"vocab": 20}, "Llama", {"value_weights": (0.5, 0.5)}),
    "sharpening": ("SharpeningTransformer", IMAGES, "VisionTransformer", SHARPENING),
}


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODELS)
class TestAModelInOneFile:
    def test_equals_that_of_tsemon_with_the_same_weights(self, name):
        kind, sizes, reference, rules = MODELS[name]
        own = getattr(module_of(name), kind)(**sizes, **BLOCK).double()
        config = getattr(models, f"{reference}Config")(**sizes, **BLOCK, **rules)
        reference = getattr(models, reference)(config).double()
        for parameter in reference.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        own.load_state_dict(reference.state_dict())
        inputs = torch.randn(2, 3, 8, 8).double() if sizes is IMAGES else torch.randint(20, (2, 9))
        torch.testing.assert_close(own(inputs), reference(inputs), **EXACT)

    def test_starts_with_the_same_weights(self, name):
        kind, sizes, reference, rules = MODELS[name]
        torch.manual_seed(0)
        own = getattr(module_of(name), kind)(**sizes, **BLOCK | {"width": 96, "ffn": 192})
        config = getattr(models, f"{reference}Config")(**sizes, **BLOCK | {"width": 96, "ffn": 192}, **rules)
        torch.manual_seed(0)
        reference = getattr(models, reference)(config)
        stds = [{name: x.std().item() for name, x in model.named_parameters()} for model in (own, reference)]
        assert stds[0] == pytest.approx(stds[1], rel=0.3)  # of 96 entries: four standard errors

    def test_needs_pytorch_alone(self, name):
        imports = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert {module.partition(".")[0] for module in imports} == {"torch"}


def test_the_saturation_of_a_network_is_that_of_its_definition():
    """Section 4.1 of the paper: on logits, with all parameters times c."""
    module = module_of("norm_growth")
    torch.manual_seed(0)
    model, tokens = module.NormGrowth(**TEXT, **BLOCK).double(), torch.randint(20, (2, 9))
    found = module.saturation(model, tokens, scale=7.0)
    plain = model(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7.0)
    scaled = model(tokens)
    cosines = (plain * scaled).sum(-1) / plain.norm(dim=-1) / scaled.norm(dim=-1)
    torch.testing.assert_close(found, cosines.mean())

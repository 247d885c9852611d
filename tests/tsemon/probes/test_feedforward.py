import math

import pytest
import torch
from torch import nn

from tests import zoo
from tests.tsemon.probes.probing import reading_of
from tsemon.probes import find_blocks
from tsemon.probes.feedforward import last_layer

LAST_LAYERS = {
    zoo.bert: "output.dense",
    zoo.gpt2: "mlp.c_proj",
    zoo.llama: "mlp.down_proj",
    zoo.torch_encoder: "linear2",
    zoo.torch_decoder: "linear2",
    zoo.our_vision_transformer: "feed_forward.contract",
    zoo.our_language_model: "feed_forward.contract",
    zoo.t5: "layer.1.DenseReluDense.wo",
    zoo.albert: "albert_layers.0.ffn_output",
    zoo.gptj: "mlp.fc_out",
}


def kill(layer, units):
    """Let the layer before an activation give the same for every token in these units."""
    if isinstance(layer, nn.Linear):
        layer.weight.data[units] = 0.0
    else:
        layer.weight.data[:, units] = 0.0


class TestDeadUnits:
    @pytest.mark.parametrize("make", LAST_LAYERS, ids=lambda make: make.__name__)
    def test_are_looked_for_where_the_feed_forward_part_leads_back(self, make):
        block = find_blocks(make()[0])[0]
        assert last_layer(block) is block.module.get_submodule(LAST_LAYERS[make])

    def test_equal_their_definition_from_hooks_made_by_hand(self, any_model):
        model, forward = any_model
        model.eval()
        blocks = find_blocks(model)
        for block in blocks:
            first = next(
                m for m in block.module.modules() if getattr(m, "weight", None) is not None and is_first(m, block)
            )
            kill(first, slice(0, 10 + block.number))
        reading, probe = reading_of(model, forward)
        seen = []
        for block in blocks:
            last_layer(block).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1)))
        forward()
        expected = [(z.amax(dim=0) == z.amin(dim=0)).double().mean().item() for z in seen]
        assert all(0.05 < share < 0.5 for share in expected)
        assert reading.layers["dead_units"].tolist() == pytest.approx(expected)
        assert "dead_units" not in probe.not_measured

    def test_are_those_of_valid_tokens_in_finite_sequences(self):
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        layer = model.blocks[0].feed_forward.expand
        kill(layer, slice(0, 32))
        x_BTD, block = torch.randn(4, 6, 32), model.blocks[0]
        x_BTD[1, 2, 3] = math.nan

        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([block])

            def forward(self, x_BTD, attention_mask):
                return self.blocks[0](x_BTD)

        masked = Masked()
        moving = torch.zeros(4, 6, 64)
        moving[1:, :2, :8] = 1.0  # only where padding is
        block.feed_forward.contract.register_forward_pre_hook(lambda _, args: (args[0] + moving,))
        mask = (torch.arange(6) >= torch.tensor([0, 2, 2, 2])[:, None]).long()
        reading, _ = reading_of(masked, lambda: masked(x_BTD, mask))
        assert reading.layers["dead_units"].tolist() == [0.5]
        reading, _ = reading_of(masked, lambda: masked(x_BTD, torch.ones(4, 6)))
        assert reading.layers["dead_units"].tolist() == [24 / 64]

    def test_are_unknown_where_there_is_but_one_token_or_none_is_finite(self):
        torch.manual_seed(0)
        block = zoo.our_language_model()[0].blocks[0]
        for x_BTD in (torch.randn(1, 1, 32), torch.full((2, 6, 32), math.nan)):
            model = nn.Sequential(block)
            reading, _ = reading_of(model, lambda model=model, x_BTD=x_BTD: model(x_BTD))
            assert reading.layers["dead_units"].isnan().all()

    def test_are_not_counted_in_experts(self):
        torch.manual_seed(0)
        reading, probe = reading_of(*zoo.mixtral())
        assert "dead_units" not in reading.layers
        assert "no linear layer leads a feed-forward part back" in probe.not_measured["dead_units"]

    def test_are_not_counted_in_experts_that_get_some_of_the_tokens(self):
        class Expert(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention, self.norm = zoo.our_language_model()[0].blocks[0].attention, nn.LayerNorm(32)
                self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2))

            def forward(self, x_BTD):
                x_BTD = x_BTD + self.attention(x_BTD)
                y_ND = self.norm(x_BTD).flatten(0, 1)
                half = len(y_ND) // 2
                y_ND = torch.cat([self.experts[0](y_ND[:half]), self.experts[1](y_ND[half:])])
                return x_BTD + y_ND.view_as(x_BTD)

        torch.manual_seed(0)
        model, x_BTD = nn.Sequential(Expert(), Expert()), torch.randn(2, 6, 32)
        reading, probe = reading_of(model, lambda: model(x_BTD))
        assert "dead_units" not in reading.layers
        assert "as an expert does not" in probe.not_measured["dead_units"]

    def test_of_several_processes_are_the_mean_of_their_shares(self):
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        probe = reading_of(model, lambda: model(zoo.ids()))[1]._parts["feedforward"]
        of_two = {"dead_units": torch.tensor([0.25 + 0.75, 0.5]), "dead_units/n": torch.tensor([2.0, 1.0])}
        assert probe.finish(of_two).layers["dead_units"].tolist() == [0.5, 0.5]


def is_first(module, block):
    """Whether this is a layer that widens D for the feed-forward part."""
    if module in set(block.attention.modules()) or module.weight.ndim != 2:
        return False
    return sorted(module.weight.shape) == sorted(last_layer(block).weight.shape) and module is not last_layer(block)

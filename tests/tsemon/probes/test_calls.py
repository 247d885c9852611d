import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, raise_fault, reading_of
from tsemon.measures import token_similarity
from tsemon.probes import Probe, find_blocks


class Universal(nn.Module):
    """One layer, applied several times; after `exit_after` of them the pass is over."""

    def __init__(self, exit_after=3, checkpointed=False):
        super().__init__()
        self.layer = zoo.our_language_model()[0].blocks[0]
        self.exit_after, self.checkpointed = exit_after, checkpointed

    def forward(self, x_BTD):
        for _ in range(self.exit_after):
            x_BTD = checkpoint(self.layer, x_BTD, use_reentrant=False) if self.checkpointed else self.layer(x_BTD)
        return x_BTD


def universal_reading(model, x_BTD, num_layers=3):
    probe = Probe(model, [], find_blocks(model, blocks=["layer"] * num_layers), raise_fault)
    probe.arm(ALL)
    model(x_BTD).square().mean().backward()
    reading = probe.collect()
    probe.disarm()
    return reading, probe


class TestAModuleThatIsSeveralLayers:
    def test_is_listed_once_for_each(self):
        names = [block.name for block in find_blocks(zoo.albert()[0])]
        assert names == [f"albert.encoder.albert_layer_groups.0 ({number} of 3)" for number in (1, 2, 3)]
        blocks = find_blocks(Universal(), blocks=["layer", "layer"])
        assert [(block.name, block.number) for block in blocks] == [("layer (1 of 2)", 0), ("layer (2 of 2)", 1)]

    def test_is_listed_in_groups_where_there_are_several(self):
        from transformers import AlbertConfig, AlbertModel

        sizes = zoo.SIZES | {"num_hidden_layers": 4}
        model = AlbertModel(AlbertConfig(vocab_size=100, embedding_size=16, num_hidden_groups=2, **sizes))
        names = [block.name.removeprefix("encoder.albert_layer_groups.") for block in find_blocks(model)]
        assert names == ["0 (1 of 2)", "0 (2 of 2)", "1 (1 of 2)", "1 (2 of 2)"]

    def test_gives_each_layer_its_own_numbers(self):
        torch.manual_seed(0)
        model, forward = zoo.albert(attn_implementation="eager")
        model.eval()
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.data.mul_(20)  # at its initialisation attention is all but uniform
        reading, probe = reading_of(model, forward, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
        assert num_hooks(model) == 0
        output = model(zoo.ids(), output_hidden_states=True, output_attentions=True)
        similarity = torch.stack([token_similarity(x).mean() for x in output.hidden_states])
        torch.testing.assert_close(reading.layers["token_similarity"], similarity)
        entropy_LH = torch.stack(
            [torch.special.entr(a).sum(dim=-1).mean(dim=(0, 2)) for a in output.attentions]
        ) / math.log(12)
        torch.testing.assert_close(reading.heads["attention_entropy"], entropy_LH)
        assert entropy_LH.std(dim=0).min() > 1e-4, "the layers must differ to be told from each other"
        for name in ("escalation_rate", "dead_units"):
            assert reading.layers[name].isfinite().all(), name
            assert name not in probe.not_measured

    def test_has_its_parameters_counted_in_the_first(self):
        torch.manual_seed(0)
        model, forward = zoo.albert()
        reading, _ = reading_of(model, forward, torch.optim.AdamW(model.parameters()))
        for name in ("param_norm", "grad_norm", "update_norm"):
            assert reading.layers[name].isfinite().tolist() == [True, False, False], name

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_is_not_counted_again_when_it_is_recomputed(self, checkpointed):
        torch.manual_seed(0)
        model, x_BTD = Universal(checkpointed=checkpointed), torch.randn(2, 6, 32)
        reading, _ = universal_reading(model, x_BTD)
        states = [x_BTD]
        for _ in range(3):
            states.append(model.layer(states[-1]))
        # The entries stand before the layer's de-escalation, entry 0 is its input.
        assert reading.layers["token_similarity"].isfinite().all()
        after = torch.stack([token_similarity(x).mean() for x in states[1:]])
        torch.testing.assert_close(reading.layers["deescalated_token_similarity"], after)
        assert reading.layers["attention_entropy"].isfinite().all()

    def test_says_which_layers_did_not_run(self):
        torch.manual_seed(0)
        reading, probe = universal_reading(Universal(exit_after=2), torch.randn(2, 6, 32))
        assert reading.layers["token_similarity"].isfinite().tolist() == [True, True, True, False]
        assert "1 of 4 hidden states" in probe.not_measured["token_similarity"]

    def test_may_run_more_often_than_it_was_named(self):
        torch.manual_seed(0)
        model, x_BTD = Universal(exit_after=5), torch.randn(2, 6, 32)
        more, _ = universal_reading(model, x_BTD)
        model.exit_after = 3
        exact, _ = universal_reading(model, x_BTD)
        assert (
            more.layers["deescalated_token_similarity"].tolist()
            == exact.layers["deescalated_token_similarity"].tolist()
        )

    def test_is_told_from_its_other_layers_where_its_owner_is_not_called(self):
        torch.manual_seed(0)
        model, x_BTD = Universal(), torch.randn(2, 6, 32)
        probe = Probe(model, [], find_blocks(model, blocks=["layer"] * 3), raise_fault)
        for _ in range(2):  # the first only finds out
            probe.arm(ALL)
            Universal.forward(model, x_BTD)
            reading = probe.collect()
            probe.disarm()
        expected, _ = universal_reading(model, x_BTD)
        for name in ("token_similarity", "escalation_rate", "attention_entropy"):
            assert reading.layers[name].tolist() == expected.layers[name].tolist(), name

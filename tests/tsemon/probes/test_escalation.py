import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import reading_of
from tsemon.measures import escalation_rate
from tsemon.probes import find_blocks


def pre_norm_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_BTD)


def nano_gpt():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x_BTD):
            q, k, v = (x.unflatten(2, (4, 8)).transpose(1, 2) for x in self.c_attn(x_BTD).split(32, dim=2))
            return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(32), Attention(), nn.LayerNorm(32)
            self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, x_BTD):
            x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
            return x_BTD + self.mlp(self.ln_2(x_BTD))

    model = nn.Sequential(Layer(), Layer(), Layer())
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_BTD)


def positions_in_every_layer():
    """A norm gets a sum before attention, too."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.ln_1, self.ln_2 = (
                nn.MultiheadAttention(32, 4, batch_first=True),
                nn.LayerNorm(32),
                nn.LayerNorm(32),
            )
            self.positions = nn.Parameter(torch.randn(12, 32))

        def forward(self, x_BTD):
            y_BTD = self.ln_1(x_BTD + self.positions)
            return self.ln_2(x_BTD + self.attn(y_BTD, y_BTD, y_BTD, need_weights=False)[0])

    model = nn.Sequential(Layer(), Layer(), Layer())
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_BTD)


def in_place():
    """The residual is added into what attention returned, and into the block's own input."""

    class Layer(nn.Module):
        def __init__(self, into_input):
            super().__init__()
            self.attn, self.norm, self.into_input = (
                nn.MultiheadAttention(32, 4, batch_first=True),
                nn.LayerNorm(32),
                into_input,
            )

        def forward(self, x_BTD):
            y_BTD = self.attn(x_BTD, x_BTD, x_BTD, need_weights=False)[0]
            x_BTD = x_BTD.add_(y_BTD) if self.into_input else y_BTD.add_(x_BTD)
            return self.norm(x_BTD)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(False), Layer(True), Layer(False)])

        def forward(self, x_BTD):
            x_BTD = x_BTD.clone()
            for layer in self.layers:
                x_BTD = layer(x_BTD)
            return x_BTD

    model = Model()
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_BTD)


WHERE_Y_COMES = {
    zoo.bert: "attention.output.LayerNorm",
    zoo.gpt2: "ln_2",
    zoo.llama: "post_attention_layernorm",
    zoo.vit: "layernorm_after",
    zoo.torch_encoder: "norm1",
    zoo.torch_decoder: "norm1",
    zoo.our_vision_transformer: "norm1",
    zoo.our_language_model: "norm1",
    zoo.t5: "layer.1.layer_norm",
    zoo.albert: "albert_layers.0.attention.LayerNorm",
    zoo.gemma2: "pre_feedforward_layernorm",
    zoo.olmo2: "mlp",
    zoo.qwen3: "post_attention_layernorm",
    pre_norm_encoder: "norm2",
    nano_gpt: "ln_2",
    positions_in_every_layer: "ln_2",
    in_place: "norm",
}


def by_hand(model, forward, where):
    """The rate of every block, from what the block and the named module in it get, in float64."""
    xs, ys = [], []
    blocks = find_blocks(model)

    def keep(into):
        return lambda _, args, kwargs: into.append((*args, *kwargs.values())[0].detach().double().clone())

    for block in {block.module: block for block in blocks}.values():
        block.module.register_forward_pre_hook(keep(xs), with_kwargs=True)
        block.module.get_submodule(where).register_forward_pre_hook(keep(ys), with_kwargs=True)
    forward()
    assert len(xs) == len(ys) == len(blocks)
    pairs = [
        (x.transpose(0, 1), y.transpose(0, 1)) if blocks[0].tokens_first else (x, y)
        for x, y in zip(xs, ys, strict=True)
    ]
    return torch.stack([escalation_rate(x, y).mean() for x, y in pairs])


class TestEscalationRate:
    @pytest.mark.parametrize("make", WHERE_Y_COMES, ids=lambda make: make.__name__)
    def test_equals_its_definition_from_hooks_made_by_hand(self, make):
        torch.manual_seed(0)
        model, forward = make()
        model.eval()  # no dropout, so that two passes see the same states
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "embed" not in name:
                    parameter.mul_(3)  # at its initialisation attention adds next to nothing, and any rate is 1
        reading, probe = reading_of(model, forward)
        expected = by_hand(model, forward, WHERE_Y_COMES[make])
        assert (expected - 1).abs().max() > 1e-2
        # Sums of 12 x 32 squares in float32, of states that the models hold in float32.
        torch.testing.assert_close(reading.layers["escalation_rate"].double(), expected, rtol=1e-4, atol=0)
        assert "escalation_rate" not in probe.not_measured

    @pytest.mark.parametrize("make", [zoo.gptj, zoo.gpt_neox], ids=lambda make: make.__name__)
    def test_is_not_made_up_where_the_feed_forward_part_runs_beside_attention(self, make):
        torch.manual_seed(0)
        reading, probe = reading_of(*make())
        assert "escalation_rate" not in reading.layers
        assert "in 3 of 3 blocks: no norm gets the sum" in probe.not_measured["escalation_rate"]
        assert "runs beside attention" in probe.not_measured["escalation_rate"]

    def test_is_not_made_up_where_the_feed_forward_part_runs_first(self):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm1, self.norm2, self.norm3 = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
                self.ffn = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
                self.attn = nn.MultiheadAttention(32, 4, batch_first=True)

            def forward(self, x):
                x = x + self.ffn(self.norm1(x))
                y = self.norm2(x)
                x = x + self.attn(y, y, y, need_weights=False)[0]
                return self.norm3(x)

        torch.manual_seed(0)
        model, x_BTD = nn.Sequential(Layer(), Layer()), torch.randn(2, 6, 32)
        reading, probe = reading_of(model, lambda: model(x_BTD))
        assert "escalation_rate" not in reading.layers
        assert "or before it" in probe.not_measured["escalation_rate"]

    def test_leaves_padding_out(self):
        torch.manual_seed(0)
        model, _ = zoo.llama()
        ids, keep = zoo.ids(batch=2), 7
        mask = (torch.arange(12) < keep).long().expand(2, 12)
        padded, _ = reading_of(model, lambda: model(ids, attention_mask=mask).logits)
        short, _ = reading_of(model, lambda: model(ids[:, :keep]).logits)
        torch.testing.assert_close(
            padded.layers["escalation_rate"], short.layers["escalation_rate"], rtol=1e-4, atol=1e-6
        )

    def test_keeps_float32_under_autocast(self):
        torch.manual_seed(0)
        model, forward = nano_gpt()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reading, _ = reading_of(model, forward)
            expected = by_hand(model, forward, "ln_2")
        torch.testing.assert_close(reading.layers["escalation_rate"].double(), expected, rtol=1e-4, atol=0)

    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_does_not_depend_on_the_scale(self, scale):
        class MaxNorm(nn.Module):  # LayerNorm squares
            def forward(self, x_BTD):
                return x_BTD / x_BTD.abs().amax()

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn, self.norm = nn.Sequential(nn.Linear(32, 32, bias=False)), MaxNorm()

            def forward(self, x_BTD):
                return self.norm(x_BTD + self.attn(x_BTD.cumsum(dim=1)))

        torch.manual_seed(0)
        model, x_BTD = nn.Sequential(Layer()), scale * torch.randn(4, 12, 32)
        model[0].attn.__class__ = type("Attention", (nn.Sequential,), {})
        reading, _ = reading_of(model, lambda: model(x_BTD), layout="BTC")  # no attention tells it
        expected = by_hand(model, lambda: model(x_BTD), "norm")
        torch.testing.assert_close(reading.layers["escalation_rate"].double(), expected, rtol=1e-4, atol=0)

    def test_leaves_a_sequence_out_that_is_not_finite(self):
        torch.manual_seed(0)
        model, _ = nano_gpt()
        x_BTD = torch.randn(4, 12, 32)
        healthy, _ = reading_of(model, lambda: model(x_BTD[:3]))
        x_BTD[3, 2, 1] = math.nan
        reading, _ = reading_of(model, lambda: model(x_BTD))
        torch.testing.assert_close(reading.layers["escalation_rate"], healthy.layers["escalation_rate"])

    def test_does_not_keep_what_it_saw(self):
        torch.manual_seed(0)
        model, forward = zoo.gptj()  # it waits for a sum to the end
        _, probe = reading_of(model, forward)
        assert probe._parts["escalation"]._layer is None

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import reading_of
from tsemon.measures import escalation_rate
from tsemon.probes import find_blocks
from tsemon.probes.escalation import CHANGES, SUB_STEPS
from tsemon.probes.reading import OnHost


def pre_norm_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_BTD)


def pre_norm_decoder():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, norm_first=True, batch_first=True), 3)
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    return model, lambda: model(x_BTD, x_BTD.flip(1), tgt_mask=mask, tgt_is_causal=True)


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


def scaled(make):
    torch.manual_seed(0)
    model, forward = make()
    model.eval()  # no dropout, so that two passes see the same states
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(3)  # at its initialisation attention adds next to nothing, and any rate is 1
    return model, forward


def our_pre_norm_model():
    return our_model(norm="pre")


def our_branch_norm_model():
    return our_model(norm="branch")


def our_model(**options):
    from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

    sizes = {"vocab": 100, "context": 16, "depth": 3, "width": 32, "heads": 4, "ffn": 64}
    model = CausalLanguageModel(CausalLanguageModelConfig(**sizes, **options))
    return model, lambda: model(zoo.ids())


class Parts(NamedTuple):
    """Where the states of a block are found: what the module gets, or what it returns."""

    added: str
    """Returns A."""
    summed: str
    """Gets Y."""
    fed: str
    """Gets the state before the feed-forward part."""
    end: str
    """Gets Z. Empty: Z is what the block returns."""
    norms: tuple[str, ...]


POST = Parts("attention", "norm1", "feed_forward.expand", "norm2", ("norm1", "norm2"))
PARTS = {
    zoo.bert: Parts(
        *("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.LayerNorm"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    zoo.gpt2: Parts("attn.c_proj", "ln_2", "ln_2", "", ("ln_1", "ln_2")),
    zoo.llama: Parts(
        *("self_attn.o_proj", "post_attention_layernorm", "post_attention_layernorm", ""),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    zoo.vit: Parts("attention", "layernorm_after", "layernorm_after", "", ("layernorm_before", "layernorm_after")),
    zoo.gemma2: Parts(
        *("post_attention_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm", ""),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    zoo.olmo2: Parts(
        "post_attention_layernorm", "mlp", "mlp", "", ("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    zoo.mixtral: Parts(
        *("self_attn.o_proj", "post_attention_layernorm", "post_attention_layernorm", ""),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    zoo.torch_encoder: Parts("self_attn", "norm1", "linear1", "norm2", ("norm1", "norm2")),
    zoo.torch_decoder: Parts("self_attn", "norm1", "linear1", "norm3", ("norm1", "norm2", "norm3")),
    zoo.our_language_model: POST,
    zoo.our_vision_transformer: POST,
    our_pre_norm_model: Parts("attention", "norm2", "norm2", "", ("norm1", "norm2")),
    our_branch_norm_model: Parts("norm1", "feed_forward.expand", "feed_forward.expand", "", ("norm1", "norm2")),
    pre_norm_encoder: Parts("self_attn", "norm2", "norm2", "", ("norm1", "norm2")),
    pre_norm_decoder: Parts("self_attn", "norm2", "norm3", "", ("norm1", "norm2", "norm3")),
    nano_gpt: Parts("attn", "ln_2", "ln_2", "", ("ln_1", "ln_2")),
}


def sub_steps_by_hand(model, forward, parts):
    """All metrics of each block by their definitions, from plain hooks, in float64."""
    blocks, seen = find_blocks(model), []

    def first(value):
        while not isinstance(value, torch.Tensor):
            value = value[0]
        value = value.detach().double().clone()
        return value.transpose(0, 1) if blocks[0].tokens_first else value

    def got(of_block, name):
        return lambda _, args, kwargs: of_block.__setitem__(f"before {name}", first((*args, *kwargs.values())))

    def returned(of_block, name):
        return lambda _, args, output: of_block.__setitem__(f"after {name}", first(output))

    for block in blocks:
        seen.append({})
        for name in {"", parts.added, parts.summed, parts.fed, parts.end, *parts.norms}:
            module = block.module.get_submodule(name)
            module.register_forward_pre_hook(got(seen[-1], name), with_kwargs=True)
            module.register_forward_hook(returned(seen[-1], name))
    forward()

    def diversity(x):
        return (x - x.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2)) / x.square().sum(dim=(1, 2))

    def size(x):
        return x.square().mean(dim=(1, 2)).sqrt()

    def hfc_lfc(x):
        mean = x.mean(dim=1, keepdim=True)
        return (x - mean).square().sum(dim=(1, 2)).sqrt() / mean.expand_as(x).square().sum(dim=(1, 2)).sqrt()

    def cosine(x):
        cosines = F.normalize(x, dim=2) @ F.normalize(x, dim=2).transpose(1, 2)
        tokens = x.shape[1]
        return (cosines.sum(dim=(1, 2)) - tokens) / (tokens * (tokens - 1))

    def rank(x):
        values = torch.linalg.svdvals(x[:1])  # of the first sequence
        shares = values / values.sum(dim=1, keepdim=True)
        return (-torch.special.xlogy(shares, shares).sum(dim=1)).exp()

    def metrics(at):
        x, y, z = at["before "], at[f"before {parts.summed}"], at[f"before {parts.end}" if parts.end else "after "]
        a, fed = at[f"after {parts.added}"], at[f"before {parts.fed}"]
        norms = [(at[f"before {name}"], at[f"after {name}"]) for name in parts.norms]
        rates = {
            "escalation_rate": diversity(x) / diversity(y),
            "residual_gain": size(y) / size(x),
            "attention_escalation_rate": diversity(x) / diversity(a),
            "attention_gain": size(a) / size(x),
            "feedforward_escalation_rate": diversity(fed) / diversity(z),
            "feedforward_gain": size(z) / size(fed),
            "norm_escalation_rate": math.prod(diversity(u) / diversity(v) for u, v in norms),
            "norm_gain": math.prod(size(v) for _, v in norms),
        }
        half = math.ceil(len(norms) / 2)  # a decoder has two of attention
        changes = {"residual": [(x, y)], "feedforward": [(fed, z)], "norm1": norms[:half], "norm2": norms[half:]}
        for step, pairs in changes.items():
            rates |= {
                f"{step}_hfc_lfc_ratio": math.prod(hfc_lfc(v) / hfc_lfc(u) for u, v in pairs),
                f"{step}_cosine_change": sum(cosine(v) - cosine(u) for u, v in pairs),
                f"{step}_rank_ratio": math.prod(rank(v) / rank(u) for u, v in pairs),
            }
        return {
            name: per_sample.log().mean().exp() if name.endswith("hfc_lfc_ratio") else per_sample.mean()
            for name, per_sample in rates.items()
        }

    of_blocks = [metrics(at) for at in seen]
    return {name: torch.stack([found[name] for found in of_blocks]) for name in of_blocks[0]}


OF_SUB_STEPS = tuple(name for steps in (SUB_STEPS, CHANGES) for names in steps.values() for name in names)


def on_host(value):
    return value.finish(value.raw) if isinstance(value, OnHost) else value


class TestSubSteps:
    @pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
    def test_equal_their_definitions_from_hooks_made_by_hand(self, make):
        model, forward = scaled(make)
        reading, probe = reading_of(model, forward)
        expected = sub_steps_by_hand(model, forward, PARTS[make])
        for name in OF_SUB_STEPS:
            # Sums of 12 x 32 squares in float32, of states that the models hold in float32; norms are a product of four.
            torch.testing.assert_close(
                on_host(reading.layers[name]).double(),
                expected[name],
                rtol=4e-4,
                atol=1e-6 if "cosine" in name else 0,
                msg=name,
            )
            assert name not in probe.not_measured

    def test_of_the_first_sample_are_there_while_nothing_tells_the_layout_before_attention(self):
        model, forward = scaled(zoo.gpt2)
        first, _ = reading_of(model, forward)
        assert all(on_host(first.layers[name]).isfinite().all() for name in OF_SUB_STEPS)

    def test_leave_out_what_the_usual_tier_does_not_need(self):
        model, forward = scaled(zoo.gpt2)
        reading, _ = reading_of(model, forward, measures={"escalation_rate"})
        assert reading.layers.keys() & {*OF_SUB_STEPS} == {"escalation_rate"}

    @pytest.mark.parametrize("make", [zoo.gptj, zoo.gpt_neox], ids=lambda make: make.__name__)
    def test_are_not_made_up_where_the_feed_forward_part_runs_beside_attention(self, make):
        torch.manual_seed(0)
        reading, probe = reading_of(*make())
        for name in OF_SUB_STEPS:
            assert name not in reading.layers
            assert "runs beside attention" in probe.not_measured[name]

    @pytest.mark.parametrize(("name", "num"), [("residual_rank_ratio", 6), ("norm1_rank_ratio", 6), (None, 16)])
    def test_make_one_gram_matrix_of_each_state_that_a_rank_is_of(self, name, num):
        """X, N(X), Y and N(Y) of three pre-norm blocks, and the last Z. Three states of the first block are read twice."""
        model, forward = scaled(pre_norm_encoder)
        names = set(OF_SUB_STEPS) if name is None else {name}
        reading, _ = reading_of(model, forward, measures=names)
        raw = [value.raw for value in reading.layers.values() if isinstance(value, OnHost) and value.raw.numel()]
        assert [len(grams_SKK) for grams_SKK in raw] == [num]

    def test_are_not_made_up_where_the_residual_is_added_in_place(self):
        torch.manual_seed(0)
        reading, probe = reading_of(*in_place())
        assert reading.layers["attention_gain"].isnan().tolist() == [True, False, True]
        assert "in 2 of 3 blocks: what attention returned was overwritten" in probe.not_measured["attention_gain"]
        assert "in 3 of 3 blocks: no feed-forward part" in probe.not_measured["feedforward_gain"]

    def test_change_no_bit_of_the_training(self):
        def trained(measures):
            torch.manual_seed(0)
            model, forward = zoo.gpt2()  # with dropout
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for _ in range(2):
                torch.manual_seed(1)
                reading_of(model, forward, optimizer, measures=measures)
            return [*model.parameters()]

        for watched, plain in zip(trained(OF_SUB_STEPS), trained(()), strict=True):
            assert torch.equal(watched, plain)

    def test_keep_no_state_alive(self):
        torch.manual_seed(0)
        _, probe = reading_of(*zoo.bert())
        assert probe._parts["escalation"]._layer is None


class TestEscalationRate:
    @pytest.mark.parametrize("make", WHERE_Y_COMES, ids=lambda make: make.__name__)
    def test_equals_its_definition_from_hooks_made_by_hand(self, make):
        model, forward = scaled(make)
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

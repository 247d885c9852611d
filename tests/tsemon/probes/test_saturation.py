"""Saturation against its definition: a copy of the model, all parameters times c, and tsemon.measures."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import hidden_states, probe_of, reading_of
from tsemon.measures import saturation
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.probes import stand_in

WANTED = {"saturation", "saturation_scale"}


def measured(model, forward, **options):
    """Saturation, and what the model was run on."""
    reading, probe = reading_of(model, forward, measures=WANTED, **options)
    return reading, probe._held.inputs


def by_definition(model, inputs, scale, valid=...):
    """Of a deep copy whose parameters are multiplied in place, over all tokens of all samples."""
    twin = copy.deepcopy(model).eval()
    plain = hidden_states(twin, lambda: twin(*inputs.args, **inputs.kwargs))
    for parameter in twin.parameters():
        parameter.data.mul_(scale)
    scaled = hidden_states(twin, lambda: twin(*inputs.args, **inputs.kwargs))
    return torch.stack(
        [saturation(f[valid].flatten(0, -2), g[valid].flatten(0, -2)) for f, g in zip(plain, scaled, strict=True)]
    )


def assert_close(reading, wanted):
    """Scaling by a power of two rounds nothing; what differs is the order of sums in float32 and in float64."""
    torch.testing.assert_close(reading.layers["saturation"].double(), wanted, atol=1e-5, rtol=0)


@pytest.fixture(autouse=True)
def no_fused_encoder():
    """The hooks of the definition need what the extra pass does for itself."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Doubled(torch.autograd.Function):
    """A function of its own, as fused kernels are: torch's overrides see nothing of what it does with a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return torch.from_numpy(x.detach().numpy() * weight.detach().numpy())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Odd(nn.Module):
    """A block with parameters in every place where people keep them."""

    def __init__(self, tied):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.listed = nn.ParameterList([torch.randn(16), torch.randn(16)])
        self.own = nn.Parameter(torch.randn(16))
        self.tied = tied
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        h = self.norm(x)
        h = h + self.attention(h, h, h)[0]
        h = h + h.norm(dim=-1, keepdim=True) * self.recurrent(F.normalize(h, dim=-1))[0]
        h = self.normed(h) * self.listed[0] + torch.stack([*self.listed]).sum(0)
        h = Doubled.apply(h, self.own) + F.linear(h, self.tied.weight[:16]) + self._parameters["own"]
        return x + self.norm(h)


class Oddities(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(Odd(self.embed) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


class AuthorsAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTD):
        query, key, value = self.into(x_BTD).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
        return self.out(mixed_BHTK.transpose(1, 2).flatten(2))


class AuthorsBlock(nn.Module):
    """x + LN(sublayer(x)), with scores that are not divided by the root of the head's width."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = AuthorsAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.norm1(self.attention(x_BTD))
        return x_BTD + self.norm2(self.feed_forward(x_BTD))


class Embedding(nn.Module):
    def __init__(self, vocab, context, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)

    def forward(self, ids_BT):
        return self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]


class TestSaturation:
    def test_equals_its_definition(self, any_model, monkeypatch):
        monkeypatch.setattr("tsemon.probes.saturation.MAX_TOKENS", 100)  # all that there are
        model, forward = any_model
        reading, inputs = measured(model, forward)
        assert_close(reading, by_definition(model, inputs, 1024.0))

    def test_scales_every_parameter_wherever_it_is_kept(self):
        model = Oddities()
        reading, inputs = measured(model, lambda: model(zoo.ids()))
        assert_close(reading, by_definition(model, inputs, 1024.0))

    def test_is_low_for_a_standard_block_at_random_initialisation(self):
        torch.manual_seed(0)
        model = CausalLanguageModel(
            CausalLanguageModelConfig(vocab=257, context=64, depth=4, width=128, heads=4, ffn=512)
        )
        reading, _ = measured(model, lambda: model(torch.randint(0, 257, (4, 64))))
        # 0.05 to 0.11 over 1,024 tokens of text; here 64 random ones.
        assert all(0.0 < value < 0.2 for value in reading.layers["saturation"][1:].tolist())

    def test_is_high_for_the_authors_block(self):
        torch.manual_seed(0)
        model = nn.Sequential(Embedding(257, 64, 128), nn.Sequential(*[AuthorsBlock(128, 4) for _ in range(4)]))
        reading, _ = measured(model, lambda: model(torch.randint(0, 257, (4, 64))))
        # 0.958, 0.911, 0.865 and 0.831 over text.
        found = reading.layers["saturation"].tolist()
        assert found[1:] == pytest.approx([0.958, 0.911, 0.865, 0.831], abs=0.05)
        assert found == sorted(found, reverse=True)

    def test_leaves_padding_out(self):
        torch.manual_seed(0)
        model, _ = zoo.bert()
        mask = torch.ones(4, 12, dtype=torch.long)
        mask[:, 7:] = 0
        reading, inputs = measured(model, lambda: model(input_ids=zoo.ids(), attention_mask=mask).logits)
        wanted = by_definition(model, inputs, 1024.0, valid=mask.bool())
        assert_close(reading, wanted)

    def test_compares_64_tokens_evenly_spread_over_those_that_are_no_padding(self):
        torch.manual_seed(0)
        model, _ = zoo.bert()
        ids = torch.randint(3, 100, (4, 50))
        mask = (torch.arange(50) < torch.tensor([50, 10, 30, 38])[:, None]).long()  # 128 tokens, every second counts
        reading, inputs = measured(model, lambda: model(input_ids=ids, attention_mask=mask).logits)
        second = mask.flatten().bool() & (mask.flatten().cumsum(0) % 2 == 0)
        wanted = by_definition(model, inputs, 1024.0, valid=second.view(4, 50))
        assert_close(reading, wanted)

    @pytest.mark.parametrize(
        ("dtype", "scale"),
        [(torch.float32, 1024.0), (torch.float64, 1024.0), (torch.bfloat16, 1024.0), (torch.float16, 8.0)],
    )
    def test_has_a_scale_that_the_dtype_has_room_for(self, dtype, scale):
        torch.manual_seed(0)
        from transformers import LlamaConfig, LlamaForCausalLM

        # Gated and 256 wide: of the standard blocks the first to overflow, in float16 at 16.
        sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 688}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).to(dtype)
        reading, _ = measured(model, lambda: model(zoo.ids()).logits)
        assert reading.scalars["saturation_scale"] == scale
        assert reading.layers["saturation"].isfinite().all()

    def test_is_undefined_where_the_scaled_model_overflows(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 16), nn.Sequential(*[Explosive() for _ in range(3)]))
        reading, _ = measured(model, lambda: model(zoo.ids()))
        is_finite = reading.layers["saturation"].isfinite().tolist()
        assert (is_finite[0], is_finite[-1]) == (True, False)

    def test_is_undefined_where_a_single_token_overflows(self):
        """The mean of the others would be that of the tame ones."""
        model = nn.Sequential(nn.Embedding(100, 16), nn.Sequential(*[Explosive() for _ in range(3)]))
        model[0].weight.data[zoo.ids()[0, 0]] = 1e36
        reading, _ = measured(model, lambda: model(zoo.ids()))
        assert reading.layers["saturation"][0].isnan()

    def test_is_of_the_same_sequences_for_who_trains_in_eval_mode(self):
        model = zoo.our_language_model()[0].eval()
        probe, found = probe_of(model), []
        for ids in (zoo.ids(), zoo.ids().flip(1)):
            probe.arm(WANTED)
            model(ids)
            found.append(probe.collect().layers["saturation"])
            probe.disarm()
        assert torch.equal(*found)

    def test_is_of_the_parameters_own_dtype_under_autocast(self):
        model, _ = zoo.our_language_model()
        inside, _ = measured_under_autocast(model, zoo.ids())
        outside, _ = measured(model, lambda: model(zoo.ids()))
        assert torch.equal(inside.layers["saturation"], outside.layers["saturation"])

    def test_takes_inputs_that_only_autocast_could_mix_with_the_parameters(self):
        model, _ = zoo.torch_encoder()
        x_TBD = torch.randn(12, 4, 32, dtype=torch.bfloat16)
        reading, _ = measured_under_autocast(model, x_TBD)
        assert reading.layers["saturation"].isfinite().all()

    def test_of_a_compiled_model_is_that_of_the_eager_one(self):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
        eager, _ = measured(model, lambda: model(zoo.ids()))
        found, _ = measured(compiled, lambda: compiled(zoo.ids()))
        assert torch.equal(found.layers["saturation"], eager.layers["saturation"])

    def test_reads_nothing_back_from_the_device(self):
        """On `meta` nothing has a value, so whatever would wait for the device raises."""
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="meta")
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        x_BTD, mask_BT = torch.empty(4, 12, 32, device="meta"), torch.empty(4, 12, dtype=torch.bool, device="meta")
        reading, _ = measured(model, lambda: model(x_BTD, src_key_padding_mask=mask_BT))
        assert reading.layers["saturation"].raw.device.type == "meta"

    def test_needs_memory_for_the_scaled_weights_of_one_layer(self, monkeypatch):
        model, forward = zoo.our_language_model()
        probe = probe_of(model)
        probe.arm(WANTED)
        forward()
        times, copies, num_alive = stand_in._tensor, [], []

        def counted(parameter, scale):
            copied = times(parameter, scale)
            copies.append(weakref.ref(copied))
            num_alive.append(sum(copy() is not None for copy in copies))
            return copied

        monkeypatch.setattr(stand_in, "_tensor", counted)
        probe.collect()
        assert max(num_alive) == 2  # a weight and its bias


class Explosive(nn.Module):
    """Its output grows with the eighth power of the scale, and nothing brings it back."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.attention(x, x, x)[0] * self.gain**3


def measured_under_autocast(model, inputs):
    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)

    return measured(model, forward)

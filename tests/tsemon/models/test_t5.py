import math

import pytest
import torch

from tests.tsemon.models.written_out import EXACT
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import T5Encoder, T5EncoderConfig

SIZES = {"vocab": 20, "context": 300, "depth": 3, "width": 12, "heads": 3, "head_width": 5, "ffn": 24}


def t5(**fields):
    model = T5Encoder(T5EncoderConfig(**SIZES | fields)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def tokens_of(length):
    return torch.randint(20, (2, length), generator=torch.Generator().manual_seed(1))


def bucket(distance):
    """Section 2.1: 32 embeddings for offsets of growing ranges up to 128; half of them are for later keys."""
    first, size = (16, distance) if distance > 0 else (0, -distance)
    return first + (size if size < 8 else min(15, 8 + int(math.log(size / 8) / math.log(16) * 8)))


def norm(module, x):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * module.weight


def written_out(model, tokens):
    """One sequence (T), query by query."""
    x, num = model.embed.weight[tokens], len(tokens)
    for block in model.blocks:
        a, y = block.attention, norm(block.norm1, x)
        query, key, value = (y @ to.weight.T for to in (a.to_query, a.to_key, a.to_value))
        rows = []
        for i in range(num):
            heads = []
            for h in range(3):
                cut = slice(5 * h, 5 * h + 5)
                bias = torch.stack([model.positions.weight[bucket(j - i), h] for j in range(num)])
                weights = (key[:, cut] @ query[i, cut] + bias).exp()
                heads.append(weights / weights.sum() @ value[:, cut])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ a.to_output.weight.T
        hidden = norm(block.norm2, x) @ block.feed_forward.expand.weight.T
        x = x + (hidden * (hidden > 0)) @ block.feed_forward.contract.weight.T
    return norm(model.norm, x) / math.sqrt(12) @ model.embed.weight.T


class TestAT5Encoder:
    def test_equals_its_equations(self):
        model, tokens = t5(), tokens_of(40)
        expected = torch.stack([written_out(model, row) for row in tokens])
        torch.testing.assert_close(model(tokens), expected, **EXACT)

    def test_equals_hugging_face_s_with_the_same_weights(self):
        import transformers

        sizes = {"vocab_size": 20, "d_model": 12, "d_kv": 5, "d_ff": 24, "num_layers": 3, "num_heads": 3}
        theirs = transformers.T5EncoderModel(transformers.T5Config(**sizes)).double().eval()
        model, tokens = t5(), tokens_of(300)
        layers = theirs.encoder.block
        with torch.no_grad():
            theirs.shared.weight.copy_(model.embed.weight)
            layers[0].layer[0].SelfAttention.relative_attention_bias.weight.copy_(model.positions.weight)
            for layer, block in zip(layers, model.blocks, strict=True):
                attention, feed_forward = layer.layer[0], layer.layer[1]
                names = {"q": "to_query", "k": "to_key", "v": "to_value", "o": "to_output"}
                for name, ours in names.items():
                    attention.SelfAttention.get_submodule(name).weight.copy_(block.attention.get_submodule(ours).weight)
                attention.layer_norm.weight.copy_(block.norm1.weight)
                feed_forward.layer_norm.weight.copy_(block.norm2.weight)
                feed_forward.DenseReluDense.wi.weight.copy_(block.feed_forward.expand.weight)
                feed_forward.DenseReluDense.wo.weight.copy_(block.feed_forward.contract.weight)
            theirs.encoder.final_layer_norm.weight.copy_(model.norm.weight)
            expected = theirs(tokens).last_hidden_state @ model.embed.weight.T / math.sqrt(12)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)  # their norm is in float32

    def test_starts_with_logits_of_the_size_of_one(self):
        torch.manual_seed(0)
        logits = T5Encoder.from_preset("t5-bytes")(torch.randint(256, (2, 64)))
        assert 0.5 < logits.std() < 2

    def test_has_as_many_parameters_as_the_encoder_of_t5_base(self):
        with torch.device("meta"):
            model = T5Encoder.from_preset("t5-base")
        assert sum(parameter.numel() for parameter in model.parameters()) == 109_628_544

    @pytest.mark.parametrize("field", SIZES)
    def test_says_which_size_is_wrong(self, field):
        with pytest.raises(InvalidArgument, match=f"{field} must be at least 1, got 0"):
            T5EncoderConfig(**SIZES | {field: 0})

    @pytest.mark.parametrize("shape", [(2, 301), (2, 0), (3,), (1, 2, 3)])
    def test_says_which_shape_it_takes(self, shape):
        with pytest.raises(ShapeError, match=r"expected \(batch, tokens\) with 1 to 300 tokens, got"):
            t5()(torch.zeros(shape, dtype=torch.int64))

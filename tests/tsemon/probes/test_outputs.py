import math

import pytest
import torch
from torch import nn

from tests import zoo
from tests.tsemon.probes.probing import num_hooks, probe_of, reading_of
from tsemon.measures import token_diversity
from tsemon.models import T5Encoder, T5EncoderConfig


def variation(logits):
    """Written out, of all predictions."""
    return token_diversity(logits.detach().double().flatten(0, -2).softmax(dim=-1))


def t5_encoder(vocab=100):
    """Its logits are products with the token embedding: it has no output head."""
    config = T5EncoderConfig(vocab=vocab, context=16, depth=2, width=32, heads=4, head_width=8, ffn=64)
    model = T5Encoder(config)
    return model, lambda: model(zoo.ids())


class WithoutLinear(nn.Module):
    """Attention of bare parameters, and logits by the token embedding."""

    class Block(nn.Module):
        class SelfAttention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = nn.Parameter(torch.randn(3, 32, 32) / 6), nn.Parameter(torch.randn(32, 32) / 6)

            def forward(self, x_BTD):
                query, key, value = (
                    x.unflatten(2, (4, 8)).transpose(1, 2) for x in torch.einsum("btd,pde->pbte", x_BTD, self.qkv)
                )
                mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
                return mixed.transpose(1, 2).flatten(2) @ self.out

        def __init__(self):
            super().__init__()
            self.norm1, self.attention, self.norm2 = nn.LayerNorm(32), self.SelfAttention(), nn.LayerNorm(32)
            self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x_BTD):
            x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
            return x_BTD + self.mlp(self.norm2(x_BTD))

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(100, 32), nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD @ self.embed.weight.T


def without_linear():
    model = WithoutLinear()
    return model, lambda: model(zoo.ids())


class TestOutputVariation:
    @pytest.mark.parametrize(
        "make",
        [
            *(zoo.bert, zoo.gpt2, zoo.llama, zoo.vit, zoo.t5),
            *(zoo.our_vision_transformer, zoo.our_language_model, t5_encoder, without_linear),
        ],
    )
    def test_equals_its_definition_written_out_in_float64(self, make):
        torch.manual_seed(0)
        model, forward = make()
        model.eval()
        for parameter in model.get_output_embeddings().parameters() if make in (zoo.bert, zoo.llama) else ():
            parameter.data.mul_(20)
        reading, probe = reading_of(model, forward)
        torch.testing.assert_close(
            reading.scalars["output_variation"].double(), variation(forward()), rtol=1e-5, atol=0
        )
        assert "output_variation" not in probe.not_measured

    def test_is_not_of_hidden_states_that_are_as_wide_as_the_vocabulary(self):
        model, _ = t5_encoder(vocab=32)
        _, probe = reading_of(model, lambda: model(zoo.ids() % 32))
        assert "nor one that is known to be logits" in probe.not_measured["output_variation"]

    def test_is_of_at_most_256_predictions_evenly_spread(self):
        torch.manual_seed(0)
        model, _ = zoo.llama()
        ids = zoo.ids(batch=20, tokens=16)
        reading, _ = reading_of(model, lambda: model(ids))
        rows = (torch.arange(256) * 2 + 1) * 320 // 512
        expected = variation(model(ids).logits.flatten(0, 1)[rows])
        torch.testing.assert_close(reading.scalars["output_variation"].double(), expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_leaves_padding_out_though_the_head_is_outside_of_the_gate(self, side):
        torch.manual_seed(0)
        model, _ = zoo.llama()
        ids = zoo.ids(batch=2)
        mask = (torch.arange(12) >= 5 if side == "left" else torch.arange(12) < 7).long().expand(2, 12)
        reading, _ = reading_of(model, lambda: model(ids, attention_mask=mask))
        expected = variation(model(ids, attention_mask=mask).logits[mask.bool()])
        torch.testing.assert_close(reading.scalars["output_variation"].double(), expected, rtol=1e-5, atol=0)

    def test_is_zero_where_all_inputs_get_the_same_answer(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        model.head.weight.data.zero_()
        reading, _ = reading_of(model, forward)
        assert reading.scalars["output_variation"] < 1e-12

    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_takes_logits_of_any_scale(self, scale):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        for parameter in model.head.parameters():
            parameter.data.mul_(scale)
        reading, _ = reading_of(model, forward)
        # Probabilities that agree are held in float32, so that their differences of 1e-20 are none.
        torch.testing.assert_close(
            reading.scalars["output_variation"].double(), variation(forward()), rtol=1e-5, atol=1e-12
        )

    def test_keeps_float32_under_autocast(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reading, _ = reading_of(model, forward)
            logits = forward()
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(reading.scalars["output_variation"].double(), variation(logits), rtol=1e-5, atol=0)

    def test_leaves_out_predictions_that_are_not_finite(self):
        torch.manual_seed(0)
        model, _ = zoo.our_vision_transformer()
        images = torch.randn(5, 1, 16, 16)
        images[2, 0, 0, 0] = math.nan
        reading, _ = reading_of(model, lambda: model(images))
        expected = variation(model(images[[0, 1, 3, 4]]))
        torch.testing.assert_close(reading.scalars["output_variation"].double(), expected, rtol=1e-4, atol=0)

    def test_of_a_single_prediction_is_unknown(self):
        model, _ = zoo.our_vision_transformer()
        reading, _ = reading_of(model, lambda: model(torch.randn(1, 1, 16, 16)))
        assert reading.scalars["output_variation"].isnan()

    def test_is_not_that_of_hidden_states(self):
        from transformers import BertConfig, BertModel, ViTConfig, ViTModel

        for model, inputs in (  # their poolers are linear layers, and no heads
            (BertModel(BertConfig(vocab_size=100, **zoo.SIZES)), zoo.ids()),
            (ViTModel(ViTConfig(image_size=16, patch_size=4, **zoo.SIZES)), torch.randn(4, 3, 16, 16)),
        ):
            reading, probe = reading_of(model, lambda model=model, inputs=inputs: model(inputs)[0])
            assert "output_variation" not in reading.scalars
            assert "no tensor named logits" in probe.not_measured["output_variation"]

    def test_is_found_in_what_people_return(self):
        class Model(nn.Module):
            def __init__(self, form):
                super().__init__()
                self.inner, self.form = zoo.our_language_model()[0], form

            def forward(self, ids):
                logits = self.inner(ids)
                return self.form(logits, logits.square().mean())

        forms = (
            lambda logits, loss: (loss, logits),
            lambda logits, loss: {"loss": loss, "logits": logits},
            lambda logits, loss: {"loss": loss, "prediction": logits},
            lambda logits, loss: loss,  # then from the module inside
        )
        for form in forms:
            torch.manual_seed(0)
            model = Model(form)
            reading, _ = reading_of(model, lambda model=model: model(zoo.ids()))
            torch.testing.assert_close(
                reading.scalars["output_variation"].double(), variation(model.inner(zoo.ids())), rtol=1e-5, atol=0
            )

    def test_is_that_of_the_pass_that_is_measured(self):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        model.eval()
        expected, _ = reading_of(model, forward)
        probe = probe_of(model)
        probe.arm({"output_variation"})
        with torch.no_grad():
            model(zoo.ids().flip(0).flip(1))
        forward()
        model(zoo.ids().flip(0).flip(1))
        with torch.no_grad():
            model(zoo.ids().flip(1))
        got = probe.collect()
        probe.disarm()
        assert got.scalars["output_variation"] == expected.scalars["output_variation"]
        assert num_hooks(model) == 0

    def test_is_not_made_up_of_a_pass_that_failed_behind_the_blocks(self):
        torch.manual_seed(0)
        model, _ = zoo.gpt2()
        probe = probe_of(model)
        probe.arm({"output_variation"})
        failing = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(zoo.ids())
        failing.remove()
        got = probe.collect()
        probe.disarm()
        assert "output_variation" not in got.scalars
        assert "GPT2LMHeadModel did not return" in probe.not_measured["output_variation"]

    def test_is_not_read_in_a_compiled_model(self):
        torch._dynamo.reset()
        model, _ = zoo.our_language_model()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        reading, probe = reading_of(model, lambda: compiled(zoo.ids()))
        assert "output_variation" not in reading.scalars
        assert "through what torch.compile made of it" in probe.not_measured["output_variation"]

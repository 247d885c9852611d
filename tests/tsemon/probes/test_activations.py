import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import ALL, hidden_states, num_hooks, probe_of, reading_of
from tsemon.measures import effective_rank, token_similarity, token_statistics
from tsemon.measures.states import Batch, state_metrics, state_sums
from tsemon.measures.sums import values_of

EVERY_SAMPLE = (
    "token_similarity",
    "token_diversity",
    "centred_token_similarity",
    "global_diversity",
    "cosine_similarity",
    "hfc_lfc",
    "batch_similarity",
    "hidden_rms",
    "hidden_max",
    "first_hidden_norm_ratio",
)


def metrics_of(x_BTD, valid_BT=None):
    """What a probe makes of one hidden state."""
    stats = token_statistics(x_BTD, valid_BT)
    return state_metrics(values_of(state_sums(stats, Batch.of(stats), x_BTD.shape[-1])))


def on_host(value):
    """What the exporter's thread makes of it."""
    return value.finish(value.raw)


class TestActivations:
    def test_equal_their_definitions_written_out_in_float64(self, any_model):
        model, forward = any_model
        model.eval()  # no dropout, so that two passes see the same states
        reading, _ = reading_of(model, forward)
        for entry, x_BTD in enumerate(hidden_states(model, forward)):
            tokens = x_BTD.shape[1]
            projector = torch.full((tokens, tokens), 1 / tokens, dtype=torch.float64)
            share = [(torch.linalg.norm(projector @ x) / torch.linalg.norm(x)) ** 2 for x in x_BTD]
            centred = x_BTD - x_BTD.mean(dim=(0, 1))
            centred_share = [(torch.linalg.norm(projector @ x) / torch.linalg.norm(x)) ** 2 for x in centred]
            unit = F.normalize(x_BTD, dim=-1)
            cosines = [(u @ u.T)[~torch.eye(tokens, dtype=torch.bool)].mean() for u in unit]
            norms = x_BTD.norm(dim=-1)
            expected = {
                "global_diversity": centred.square().sum() / x_BTD.square().sum(),
                "hfc_lfc": torch.stack(
                    [torch.linalg.norm(x - projector @ x) / torch.linalg.norm(projector @ x) for x in x_BTD]
                ).mean(),
                "hidden_max": x_BTD.abs().max(),
                "first_hidden_norm_ratio": (norms[:, 0] / norms[:, 1:].mean(dim=1)).mean(),
                "batch_similarity": token_similarity(x_BTD.mean(dim=1)),
                "token_similarity": torch.stack(share).mean(),
                "token_diversity": 1 - torch.stack(share).mean(),
                "centred_token_similarity": torch.stack(centred_share).mean(),
                "cosine_similarity": torch.stack(cosines).mean(),
                "hidden_rms": x_BTD.square().mean().sqrt(),
                "nonfinite": torch.tensor(0.0),
            }
            for name, value in expected.items():
                got = reading.layers[name][entry].double()
                torch.testing.assert_close(
                    got, value.double(), rtol=1e-4, atol=1e-6, msg=f"{name}[{entry}]: {got}, {value}"
                )

    def test_have_the_effective_ranks_that_the_measure_gives(self, any_model):
        model, forward = any_model
        model.eval()
        reading, _ = reading_of(model, forward)
        ranks = {name: on_host(reading.layers[name]) for name in ("effective_rank", "batch_rank")}
        for entry, x_BTD in enumerate(hidden_states(model, forward)):
            means_BD = x_BTD.mean(dim=1)
            expected = {
                "effective_rank": effective_rank(x_BTD[0]),
                "batch_rank": effective_rank(means_BD - means_BD.mean(dim=0)),
            }
            for name, value in expected.items():
                # The hidden states' mean tokens are of float32; where a rank is near 1, that is all its digits.
                torch.testing.assert_close(ranks[name][entry].double(), value, rtol=1e-3, atol=0, msg=name)

    def test_take_their_effective_rank_from_the_first_sequence_that_is_finite(self):
        torch.manual_seed(0)
        model, _ = zoo.torch_encoder()
        x_TBD = torch.randn(12, 4, 32)
        x_TBD[3, 0, 5] = math.nan
        reading, _ = reading_of(model, lambda: model(x_TBD))
        healthy_3D = x_TBD[:, 1:].mean(dim=0)
        for name, expected in (
            ("effective_rank", effective_rank(x_TBD[:, 1])),
            ("batch_rank", effective_rank(healthy_3D - healthy_3D.mean(dim=0))),
        ):
            torch.testing.assert_close(on_host(reading.layers[name])[0], expected, rtol=1e-4, atol=0, msg=name)

    def test_find_the_first_token_behind_padding_on_the_left(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(2, 6, 8)
        x_BTD[:, 2] *= 100
        valid_BT = (torch.arange(6) >= 2).expand(2, 6)
        got = metrics_of(x_BTD, valid_BT)["first_hidden_norm_ratio"]
        norms = x_BTD.norm(dim=-1)
        torch.testing.assert_close(got, (norms[:, 2] / norms[:, 3:].mean(dim=1)).mean())

    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_do_not_depend_on_the_scale_but_where_they_measure_it(self, scale):
        torch.manual_seed(0)
        x_BTD = torch.randn(4, 6, 8) + torch.randn(8)
        usual = metrics_of(x_BTD)
        scaled = metrics_of(x_BTD * scale)
        for name, value in usual.items():
            expected = value * scale if name in ("hidden_max", "hidden_rms") else value
            torch.testing.assert_close(scaled[name], expected, msg=name)

    def test_keep_a_global_diversity_where_all_that_is_left_is_small(self):
        """1 - shared has no digit of this in float32."""
        torch.manual_seed(0)
        own_BTD = 1e-5 * torch.randn(4, 6, 8, dtype=torch.float64)
        x_BTD = (1 + own_BTD).float()
        got = metrics_of(x_BTD)["global_diversity"]
        centred = x_BTD.double() - x_BTD.double().mean(dim=(0, 1))
        expected = centred.square().sum() / x_BTD.double().square().sum()
        # The mean is right to 6e-8 of 1, the differences from it are 1e-5.
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)

    def test_keep_float32_under_autocast(self):
        torch.manual_seed(0)
        model, forward = zoo.bert()
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reading, _ = reading_of(model, forward)
            x_BTD = hidden_states(model, forward)[-1]
        unit = F.normalize(x_BTD, dim=-1)
        cosines = torch.stack([(u @ u.T)[~torch.eye(12, dtype=torch.bool)].mean() for u in unit])
        torch.testing.assert_close(
            reading.layers["cosine_similarity"][-1].double(), cosines.mean(), rtol=1e-5, atol=1e-6
        )
        centred = x_BTD - x_BTD.mean(dim=(0, 1))
        expected = centred.square().sum() / x_BTD.square().sum()
        torch.testing.assert_close(reading.layers["global_diversity"][-1].double(), expected, rtol=1e-4, atol=0)
        got = on_host(reading.layers["effective_rank"])[-1].double()
        torch.testing.assert_close(got, effective_rank(x_BTD[0]), rtol=1e-4, atol=0)

    def test_leave_padding_out(self):
        torch.manual_seed(0)
        model, _ = zoo.llama()
        ids, keep = zoo.ids(batch=2), 7
        mask = torch.ones_like(ids)
        mask[:, keep:] = 0
        padded, _ = reading_of(model, lambda: model(ids, attention_mask=mask).logits)
        short, _ = reading_of(model, lambda: model(ids[:, :keep]).logits)
        for name in EVERY_SAMPLE:
            torch.testing.assert_close(padded.layers[name], short.layers[name], rtol=1e-4, atol=1e-6, msg=name)
        for name in ("effective_rank", "batch_rank"):
            expected = on_host(short.layers[name])
            torch.testing.assert_close(on_host(padded.layers[name]), expected, rtol=1e-3, atol=0, msg=name)

    def test_see_only_the_first_of_several_micro_batches(self):
        torch.manual_seed(0)
        model, _ = zoo.gpt2()
        model.eval()
        one, _ = reading_of(model, lambda: model(zoo.ids()).logits)
        several, _ = reading_of(model, lambda: (model(zoo.ids()), model(zoo.ids().flip(0).flip(1)))[0].logits)
        assert several.layers["token_similarity"].tolist() == one.layers["token_similarity"].tolist()

    def test_are_not_those_of_an_evaluation_before_the_training_pass(self):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        expected, _ = reading_of(model.eval(), forward)
        probe = probe_of(model)
        probe.arm(ALL)
        with torch.no_grad():
            model.eval()(zoo.ids().flip(0).flip(1))
            model.train()(zoo.ids().flip(0).flip(1))
            model.eval()
        forward()  # with gradients, in eval mode: some train without dropout
        got = probe.collect()
        probe.disarm()
        assert got.layers["token_similarity"].tolist() == expected.layers["token_similarity"].tolist()
        assert got.layers["attention_entropy"].tolist() == expected.layers["attention_entropy"].tolist()

    def test_are_not_those_of_an_evaluation_with_gradients_where_training_is_in_train_mode(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()  # without dropout, so that both modes compute the same
        expected, _ = reading_of(model, forward)
        probe = probe_of(model)
        probe.arm(ALL)
        model.eval()(zoo.ids().flip(0).flip(1))
        model.train()
        forward()
        got = probe.collect()
        probe.disarm()
        assert got.layers["token_similarity"].tolist() == expected.layers["token_similarity"].tolist()

    def test_read_a_block_that_turns_its_axes_round_for_its_attention(self):
        class Turning(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(16, 2)  # wants tokens first

            def forward(self, x_BTD):
                x_TBD = x_BTD.transpose(0, 1)
                return x_BTD + self.attn(x_TBD, x_TBD, x_TBD, need_weights=False)[0].transpose(0, 1)

        torch.manual_seed(0)
        model, x_BTD = nn.Sequential(Turning(), Turning()), torch.randn(3, 10, 16)
        expected = [x_BTD, model[0](x_BTD), model(x_BTD)]
        expected = torch.stack([token_similarity(x).mean() for x in expected])
        probe = probe_of(model)
        for _ in range(2):
            probe.arm(ALL)
            model(x_BTD)
            got = probe.collect().layers["token_similarity"]
            probe.disarm()
            torch.testing.assert_close(got, expected)

    def test_leave_a_sequence_out_that_is_not_finite_or_all_padding(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(4, 6, 8) + torch.randn(4, 1, 8)
        good = metrics_of(x_BTD[:2])
        x_BTD[2, 0, 0] = math.inf
        valid_BT = torch.ones(4, 6, dtype=torch.bool)
        valid_BT[3] = False
        got = metrics_of(x_BTD, valid_BT)
        for name in EVERY_SAMPLE:
            torch.testing.assert_close(got[name], good[name], msg=name)

    def test_are_undefined_where_no_sequence_is_finite(self):
        got = metrics_of(torch.full((2, 6, 8), math.nan))
        assert got.pop("nonfinite") == 1
        assert all(value.isnan() for value in got.values())

    def test_weigh_sequences_by_their_tokens_in_the_mean_of_the_batch(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(2, 6, 8) + torch.randn(2, 1, 8)
        valid_BT = torch.ones(2, 6, dtype=torch.bool)
        valid_BT[1, 2:] = False
        got = metrics_of(x_BTD, valid_BT)["centred_token_similarity"]
        centred = [x_BTD[0], x_BTD[1, :2]]
        common = torch.cat(centred).mean(dim=0)
        torch.testing.assert_close(got, torch.stack([token_similarity(x - common) for x in centred]).mean())

    def test_know_of_a_single_sequence_nothing_that_needs_several(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(1, 6, 8)
        got = metrics_of(x_BTD)
        assert {name for name, value in got.items() if value.isnan()} == {
            "centred_token_similarity",
            "batch_similarity",
        }
        torch.testing.assert_close(got["global_diversity"].float(), got["token_diversity"])

    def test_find_the_mask_whoever_on_the_way_was_given_it(self):
        class Wrapped(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, batch):
                return self.model(batch["ids"], batch["mask"]).logits

        torch.manual_seed(0)
        model, _ = zoo.llama()
        wrapped, ids = Wrapped(model), zoo.ids(batch=2)
        mask = (torch.arange(12) < torch.tensor([[5], [9]])).long()
        expected, _ = reading_of(model, lambda: model(ids, attention_mask=mask).logits)
        plain, _ = reading_of(model, lambda: model(ids).logits)
        got, _ = reading_of(wrapped, lambda: wrapped({"ids": ids, "mask": mask}))
        assert got.layers["token_similarity"].tolist() == expected.layers["token_similarity"].tolist()
        assert got.layers["token_similarity"].tolist() != plain.layers["token_similarity"].tolist()

    def test_are_read_where_the_owner_of_the_blocks_is_not_called(self):
        class Lightning(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = zoo.our_language_model()[0]
                self.blocks = self.inner.blocks
                del self.inner.blocks

            def training_step(self, x_BTD):
                for block in self.blocks:
                    x_BTD = block(x_BTD)
                return x_BTD

        torch.manual_seed(0)
        model, x_BTD = Lightning(), torch.randn(2, 6, 32)
        probe = probe_of(model)
        for is_first in (True, False):
            probe.arm(ALL)
            model.training_step(x_BTD)
            reading = probe.collect()
            probe.disarm()
            assert ("token_similarity" not in reading.layers) == is_first
            assert ("token_similarity" in probe.not_measured) == is_first
        torch.testing.assert_close(reading.layers["token_similarity"][0], token_similarity(x_BTD).mean())
        assert reading.layers["attention_entropy"].isfinite().all()
        assert num_hooks(model) == 0

    def test_are_those_of_the_pass_that_went_through(self):
        """A pass that ran out of memory is tried again with a smaller batch."""
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        expected, _ = reading_of(model, forward)
        probe = probe_of(model)
        probe.arm(ALL)
        failing = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(zoo.ids().flip(0))
        failing.remove()
        forward()
        got = probe.collect()
        probe.disarm()
        assert got.layers["token_similarity"].tolist() == expected.layers["token_similarity"].tolist()

    def test_leave_a_decoders_padding_out(self):
        torch.manual_seed(0)
        model, _ = zoo.torch_decoder()
        x_BTD, memory = torch.randn(2, 10, 32), torch.randn(2, 5, 32)
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        padding = torch.arange(10).expand(2, 10) >= 6
        model.eval()
        padded, _ = reading_of(model, lambda: model(x_BTD, memory, tgt_mask=mask, tgt_key_padding_mask=padding))
        short, _ = reading_of(model, lambda: model(x_BTD[:, :6], memory, tgt_mask=mask[:6, :6]))
        for name in ("token_similarity", "attention_entropy"):
            torch.testing.assert_close(padded.layers[name], short.layers[name], rtol=1e-4, atol=1e-5, msg=name)

    def test_tell_how_many_sequences_are_not_finite(self):
        model, _ = zoo.torch_encoder()
        x_TBD = torch.randn(12, 4, 32)
        x_TBD[3, 1, 5] = math.nan
        reading, _ = reading_of(model, lambda: model(x_TBD))
        assert reading.layers["nonfinite"].tolist() == [0.25] * 4
        assert reading.layers["token_similarity"].isfinite().all(), "the three healthy sequences still have a mean"

    def test_are_taken_before_and_after_deescalation(self):
        torch.manual_seed(0)
        from tsemon.models import VisionTransformer, VisionTransformerConfig

        sizes = {"image_size": 16, "patch": 4, "channels": 1, "num_classes": 10, "depth": 3, "width": 32}
        model = VisionTransformer(VisionTransformerConfig(**sizes, heads=4, ffn=64, tau=1.0))
        reading, _ = reading_of(model, lambda: model(torch.randn(4, 1, 16, 16)))
        assert (reading.layers["token_similarity"][1:] > 1e-3).all()
        assert (reading.layers["deescalated_token_similarity"] < 1e-10).all()

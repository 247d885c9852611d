import copy
import functools
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import zoo
from tsemon.catalogue import CATALOGUE
from tsemon.measures import normalized_row_entropy, token_similarity, token_statistics
from tsemon.probes import Probe, find_blocks
from tsemon.probes.activations import _averages
from tsemon.probes.attention import sampled_scores

ALL = {metric.name for metric in CATALOGUE}


def raise_fault(error):
    raise error


def probe_of(model, optimizer=None, measures=ALL, on_fault=raise_fault):
    return Probe(model, optimizer, find_blocks(model), measures, on_fault)


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def reading_of(model, forward, optimizer=None, **kwargs):
    probe = probe_of(model, optimizer, **kwargs)
    probe.arm()
    output = forward()
    if optimizer is not None:
        output.float().square().mean().backward()
        optimizer.step()
    reading = probe.collect()
    probe.disarm()
    return reading, probe


def hidden_states(model, forward):
    """Entry 0 and the output of every block, as float64 (B, T, D), by the plainest of hooks."""
    blocks, seen = find_blocks(model), []
    handles = [
        blocks[0].module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
        )
    ]
    for block in blocks:
        if block.deescalation is None:
            handles.append(block.module.register_forward_hook(lambda _, args, output: seen.append(output)))
        else:
            handles.append(block.deescalation.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    forward()
    for handle in handles:
        handle.remove()
    states = [x[0] if isinstance(x, tuple) else x for x in seen]
    return [(x.transpose(0, 1) if blocks[0].tokens_first else x).detach().double() for x in states]


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
            expected = {
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

    def test_leave_padding_out(self):
        torch.manual_seed(0)
        model, _ = zoo.llama()
        ids, keep = zoo.ids(batch=2), 7
        mask = torch.ones_like(ids)
        mask[:, keep:] = 0
        padded, _ = reading_of(model, lambda: model(ids, attention_mask=mask).logits)
        short, _ = reading_of(model, lambda: model(ids[:, :keep]).logits)
        for name in ("token_similarity", "token_diversity", "cosine_similarity", "hidden_rms"):
            torch.testing.assert_close(padded.layers[name], short.layers[name], rtol=1e-4, atol=1e-6)

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
        probe.arm()
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
        probe.arm()
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
        for is_first in (True, False):
            probe.arm()
            model(x_BTD)
            got = probe.collect().layers["token_similarity"]
            probe.disarm()
            assert got[0].isnan().item() == is_first, "the input was measured before the axes could be known"
            torch.testing.assert_close(got[1:], expected[1:])

    def test_leave_a_sequence_out_that_is_not_finite_or_all_padding(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(4, 6, 8) + torch.randn(4, 1, 8)
        good = _averages(token_statistics(x_BTD[:2]), width=8)
        x_BTD[2, 0, 0] = math.inf
        valid_BT = torch.ones(4, 6, dtype=torch.bool)
        valid_BT[3] = False
        got = _averages(token_statistics(x_BTD, valid_BT), width=8)
        for name in ("token_similarity", "centred_token_similarity", "cosine_similarity", "hidden_rms"):
            torch.testing.assert_close(got[name], good[name], msg=name)

    def test_weigh_sequences_by_their_tokens_in_the_mean_of_the_batch(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(2, 6, 8) + torch.randn(2, 1, 8)
        valid_BT = torch.ones(2, 6, dtype=torch.bool)
        valid_BT[1, 2:] = False
        got = _averages(token_statistics(x_BTD, valid_BT), width=8)["centred_token_similarity"]
        centred = [x_BTD[0], x_BTD[1, :2]]
        common = torch.cat(centred).mean(dim=0)
        torch.testing.assert_close(got, torch.stack([token_similarity(x - common) for x in centred]).mean())

    def test_know_no_centred_similarity_of_a_single_sequence(self):
        assert _averages(token_statistics(torch.randn(1, 6, 8)), width=8)["centred_token_similarity"].isnan()

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
            probe.arm()
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
        probe.arm()
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
        from tsemon.models import VisionTransformer

        model = VisionTransformer(
            image_size=16, patch=4, channels=1, num_classes=10, depth=3, width=32, heads=4, ffn=64, tau=1.0
        )
        reading, _ = reading_of(model, lambda: model(torch.randn(4, 1, 16, 16)))
        assert (reading.layers["token_similarity"][1:] > 1e-3).all()
        assert (reading.layers["deescalated_token_similarity"] < 1e-10).all()


class TestAttentionEntropy:
    @pytest.mark.parametrize("make", [zoo.bert, zoo.gpt2, zoo.llama, zoo.vit], ids=lambda make: make.__name__)
    def test_equals_that_of_the_weights_that_the_model_returns(self, make):
        torch.manual_seed(0)
        model, _ = make(attn_implementation="eager")
        model.eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in ("query", "key", "q_proj", "k_proj", "c_attn")):
                    parameter.mul_(40)  # at its initialisation attention is all but uniform
        inputs = torch.randn(4, 3, 16, 16) if make is zoo.vit else zoo.ids(tokens=48)
        weights = torch.stack(model(inputs, output_attentions=True).attentions).detach().double()
        entropy_LBHT = torch.special.entr(weights).sum(-1)
        tokens = weights.shape[-1]
        is_causal = make in (zoo.gpt2, zoo.llama)
        visible_T = torch.arange(1, tokens + 1) if is_causal else torch.full((tokens,), tokens)
        ratio = (entropy_LBHT / visible_T.double().log())[..., visible_T > 1]
        expected_LH = ratio.mean(dim=(1, 3))
        assert expected_LH.max() < 0.97, (
            "attention must be far enough from uniform to tell a right entropy from a wrong one"
        )
        assert (expected_LH.amax(-1) - expected_LH.amin(-1)).min() > 0.005, "and differ from head to head"

        eager, _ = reading_of(model, lambda: model(inputs))
        model.set_attn_implementation("sdpa")
        sdpa, _ = reading_of(model, lambda: model(inputs))
        for reading in (eager, sdpa):
            torch.testing.assert_close(reading.heads["attention_entropy"].double(), expected_LH, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                reading.layers["attention_entropy_min"].double(), expected_LH.amin(-1), rtol=1e-4, atol=1e-5
            )

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_is_seen_inside_multihead_attention(self, need_weights):
        torch.manual_seed(0)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

            def forward(self, x):
                return x + self.attn(x, x, x, need_weights=need_weights)[0]

        model, x = nn.Sequential(Block(), Block()), torch.randn(3, 10, 16)
        reading, probe = reading_of(model, lambda: model(x))
        _, weights = model[0].attn(x, x, x, average_attn_weights=False)
        expected = torch.special.entr(weights).sum(-1).mean(dim=(0, 2)) / math.log(10)
        torch.testing.assert_close(reading.heads["attention_entropy"][0], expected, rtol=1e-4, atol=1e-5)
        assert not probe.not_measured.keys() & {"attention_entropy"}

    @pytest.mark.parametrize("kind", ["causal", "bool", "float", "grouped", "three axes"])
    def test_of_a_few_rows_is_that_of_those_rows(self, kind):
        torch.manual_seed(0)
        tokens, heads = 200, 4
        query, key = 3 * torch.randn(2, heads, tokens, 8), torch.randn(2, heads, tokens, 8)
        arguments, visible = {}, torch.ones(tokens, tokens, dtype=torch.bool)
        if kind == "causal":
            arguments, visible = {"is_causal": True}, visible.tril()
        elif kind == "bool":
            visible = torch.rand(2, 1, tokens, tokens) > 0.5
            arguments = {"attn_mask": visible}
        elif kind == "float":
            visible = visible.tril(3)
            arguments = {"attn_mask": torch.zeros(tokens, tokens).masked_fill(~visible, -1e9)}
        elif kind == "grouped":
            key = key[:, ::2]
            arguments = {"enable_gqa": True}
        elif kind == "three axes":
            query, key = query[:, 0], key[:, 0]
            visible = torch.rand(2, tokens, tokens) > 0.5
            arguments = {"attn_mask": visible}
        sampled = sampled_scores(query, key, key, **arguments)
        assert 1 < len(sampled.rows) < tokens
        got = normalized_row_entropy(sampled.scores_BHTS, sampled.visible_BHTS)

        if kind == "three axes":
            query, key, visible = query[:, None], key[:, None], visible[:, None]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.double() @ key.double().transpose(-2, -1) / math.sqrt(8)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        ratio = torch.special.entr(weights).sum(-1) / visible.expand_as(weights).sum(-1).double().log()
        expected = ratio[: len(got), :, sampled.rows].nanmean(-1)
        assert expected.max() < 0.97
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)

    def test_leaves_a_frozen_encoder_on_its_fast_path(self):
        """A hook or a mode there would change its last bits, or raise where it works on nested tensors."""

        class Tuned(nn.Module):
            def __init__(self):
                super().__init__()
                layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)
                self.head = nn.Linear(16, 1)

            def train(self, mode=True):
                super().train(mode)
                self.encoder.eval()
                return self

            def forward(self, x_BTD):
                padding = torch.arange(x_BTD.shape[1]).expand(x_BTD.shape[:2]) >= 5
                return self.head(self.encoder(x_BTD, src_key_padding_mask=padding))

        torch.manual_seed(0)
        model, x_BTD = Tuned().train(), torch.randn(3, 8, 16)
        expected = model(x_BTD)
        probe = probe_of(model)
        probe.arm()
        assert torch.equal(model(x_BTD), expected)
        probe.collect()
        assert "frozen in eval mode" in probe.not_measured["token_similarity"]
        probe.disarm()

    def test_of_an_attention_that_blocks_share_is_that_of_the_first(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        model.blocks[2].attention = model.blocks[1].attention
        reading, probe = reading_of(model, forward)
        assert reading.layers["attention_entropy"].isnan().tolist() == [False, False, True]
        assert "1 of 3 blocks" in probe.not_measured["attention_entropy"]

    def test_may_be_watched_on_several_threads_at_once(self):
        """The names inside torch.nn.functional are shared; whoever is last puts them back."""
        originals = F.scaled_dot_product_attention, F.softmax
        wrong = []

        def watch():
            model, forward = zoo.torch_encoder()
            for _ in range(20):
                reading, _ = reading_of(model, forward, measures={"attention_entropy"})
                if not reading.layers["attention_entropy"].isfinite().all():
                    wrong.append(reading)

        threads = [threading.Thread(target=watch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert (F.scaled_dot_product_attention, F.softmax) == originals

    def test_is_let_go_of_when_the_user_interrupts(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        model, _ = zoo.our_language_model()
        own = model.blocks[0].attention.register_forward_hook(interrupt)
        probe = probe_of(model)
        probe.arm()
        with pytest.raises(KeyboardInterrupt):
            model(zoo.ids())
        assert torch.overrides._get_current_function_mode_stack() == []
        own.remove()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # as one does after Ctrl-C
            assert torch.equal(
                twin.blocks[2].attention(torch.ones(1, 2, 32)), model.blocks[2].attention(torch.ones(1, 2, 32))
            )
            twin.blocks[2].attention.to_output.weight.data.zero_()
        assert model.blocks[2].attention.to_output.weight.abs().sum() > 0, "the twin runs on its own weights"
        probe.disarm()
        assert all("forward" not in vars(module) for module in model.modules())
        assert num_hooks(model) == 0

    def test_leaves_pytorch_as_it_was_when_the_model_raises(self):
        class Broken(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

            def forward(self, x):
                return self.attn(x, x, x[:, :3])[0]

        original = F.scaled_dot_product_attention
        model = nn.Sequential(Broken())
        probe = probe_of(model)
        probe.arm()
        with pytest.raises((RuntimeError, AssertionError)):
            model(torch.randn(2, 5, 16))
        probe.disarm()
        assert F.scaled_dot_product_attention is original
        assert torch.overrides._get_current_function_mode_stack() == []


class TestParameters:
    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
            lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
            lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
        ],
        ids=["adamw", "adamw-amsgrad", "adamw-foreach", "adamw-fused", "adam", "sgd", "rmsprop"],
    )
    def test_updates_equal_the_difference_of_the_parameters(self, make_optimizer):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = make_optimizer(model.parameters())
        for _ in range(3):  # so that the moments are not those of a first step
            forward().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        reading, _ = reading_of(model, forward, optimizer)
        for layer, block in enumerate(find_blocks(model)):
            names = [f"{block.name}.{name}" for name, _ in block.module.named_parameters()]
            old = torch.cat([before[name].flatten() for name in names])
            new = torch.cat([model.get_parameter(name).detach().double().flatten() for name in names])
            gradient = torch.cat([model.get_parameter(name).grad.double().flatten() for name in names])
            expected = {
                "param_norm": new.norm(),
                "grad_norm": gradient.norm(),
                "update_norm": (new - old).norm(),
                "update_ratio": (new - old).norm() / old.norm(),
                "update_alignment": F.cosine_similarity(new - old, old, dim=0),
            }
            for name, value in expected.items():
                torch.testing.assert_close(reading.layers[name][layer].double(), value, rtol=1e-3, atol=1e-5, msg=name)

    def test_updates_are_measured_as_the_parameters_are_now(self):
        """After attach they may have become bfloat16, where the rebuilt update is not what rounding left."""
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        model.to(torch.bfloat16)
        before = torch.cat([p.detach().double().flatten() for p in model.transformer.h[0].parameters()])
        probe.arm()
        forward().square().mean().backward()
        optimizer.step()
        got = probe.collect().layers["update_norm"][0]
        after = torch.cat([p.detach().double().flatten() for p in model.transformer.h[0].parameters()])
        torch.testing.assert_close(got.double(), (after - before).norm(), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("overflows", [False, True])
    def test_gradients_and_updates_are_those_without_the_loss_scale(self, fused, overflows):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        block = model.transformer.h[0]
        probe = probe_of(model, optimizer)
        probe.arm()
        loss = forward().square().mean()
        plain = torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        scaler.scale(loss).backward()
        if overflows:
            next(block.parameters()).grad.fill_(torch.inf)
        before = torch.cat([p.detach().flatten().clone() for p in block.parameters()])
        scaler.step(optimizer)
        after = torch.cat([p.detach().flatten() for p in block.parameters()])
        reading = probe.collect()
        probe.disarm()
        if overflows and not fused:
            assert "made no step" in probe.not_measured["update_norm"]
            return
        torch.testing.assert_close(reading.layers["update_norm"][0], (after - before).norm(), rtol=1e-3, atol=1e-7)
        if not overflows:
            expected = torch.cat([g.flatten() for g in plain]).norm()
            torch.testing.assert_close(reading.layers["grad_norm"][0], expected, rtol=1e-3, atol=0)

    def test_gradients_of_a_closure_are_those_that_it_made(self):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        probe.arm()

        def closure():
            optimizer.zero_grad()
            loss = forward().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        reading = probe.collect()
        expected = torch.cat([p.grad.flatten() for p in model.layers[0].parameters()]).norm()
        torch.testing.assert_close(reading.layers["grad_norm"][0], expected)

    def test_a_nan_in_one_block_shows_there_and_in_the_total(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        probe.arm()
        forward().sum().backward()
        next(model.layers[1].parameters()).grad[0, 0] = math.nan
        optimizer.step()
        reading = probe.collect()
        assert reading.layers["grad_norm"].isnan().tolist() == [False, True, False]
        assert reading.layers["param_norm"].isnan().tolist() == [False, True, False]
        assert all(reading.scalars[name].isnan() for name in ("total_grad_norm", "total_param_norm", "step_size"))

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_ratio_and_alignment_are_against_the_whole_block_when_part_of_it_is_frozen(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        for layer in model.layers:
            layer.linear1.requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=1e-1))
        delta = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()]) - before
        got = reading.layers["update_ratio"][0].double()
        torch.testing.assert_close(got, delta.norm() / before.norm(), rtol=1e-3, atol=0)
        got, alignment = reading.layers["update_alignment"][0].double(), F.cosine_similarity(delta, before, dim=0)
        torch.testing.assert_close(got, alignment, rtol=1e-3, atol=2e-5)

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_a_frozen_block_does_not_move_and_counts_in_the_whole(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        model.layers[0].requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=1e-1))
        delta = torch.cat([p.detach().double().flatten() for p in model.parameters()]) - before
        assert reading.layers["update_norm"][0] == 0
        assert reading.layers["update_ratio"][0] == 0
        assert reading.layers["update_alignment"][0].isnan(), "what does not move has no direction"
        got, expected = reading.scalars["update_alignment"].double(), F.cosine_similarity(delta, before, dim=0)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-5)

    def test_the_optimizer_inside_a_wrapper_is_watched(self):
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer

            def step(self):
                self.optimizer.step()

        model, forward = zoo.torch_encoder()
        reading, probe = reading_of(model, forward, Wrapper(torch.optim.AdamW(model.parameters())))
        assert (reading.layers["update_norm"] > 0).all()
        assert probe.not_measured == {}

    def test_several_steps_are_said_to_be_several(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm()
        for _ in range(3):
            forward().sum().backward()
            optimizer.step()
        probe.collect()
        assert "the first of 3 optimizer steps" in probe.not_measured["update_norm"]

    def test_parameters_of_another_optimizer_are_said_to_be_missing(self):
        model, forward = zoo.torch_encoder()
        _, probe = reading_of(model, forward, torch.optim.AdamW(model.layers[0].parameters()))
        assert "which another optimizer must train" in probe.not_measured["update_norm"]

    def test_totals_leave_embeddings_out_and_count_tied_weights_once(self):
        model, forward = zoo.gpt2()
        reading, _ = reading_of(model, forward)
        counted = [p for name, p in model.named_parameters() if "wte" not in name and "wpe" not in name]
        expected = torch.cat([p.detach().flatten() for p in counted]).norm()
        torch.testing.assert_close(reading.scalars["total_param_norm"], expected, rtol=1e-5, atol=0)

    def test_the_learning_rate_is_the_one_that_was_used(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        probe = probe_of(model, optimizer)
        probe.arm()
        forward().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1  # as a schedule does
        assert probe.collect().scalars["learning_rate"] == 0.5

    def test_gradients_are_seen_although_the_loop_clears_them(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm()
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (probe.collect().layers["grad_norm"] > 0).all()


class TestNotMeasured:
    def test_says_that_updates_need_an_optimizer(self):
        _, probe = reading_of(*zoo.torch_encoder())
        assert probe.not_measured["update_norm"] == "no optimizer was given to attach()"

    def test_says_that_the_hooks_of_a_compiled_model_did_not_fire(self):
        model, _ = zoo.torch_encoder()
        compiled = torch.compile(model, backend="eager")
        x_TBD = torch.randn(12, 4, 32)
        compiled(x_TBD).sum().backward()
        reading, probe = reading_of(model, lambda: compiled(x_TBD))
        assert "token_similarity" not in reading.layers
        assert "is the model compiled" in probe.not_measured["token_similarity"]

    def test_only_what_was_asked_for_is_measured(self):
        model, forward = zoo.torch_encoder()
        reading, probe = reading_of(model, forward, measures={"token_similarity"})
        assert (set(reading.layers), set(reading.heads), set(reading.scalars)) == ({"token_similarity"}, set(), set())
        assert probe.not_measured == {}


class TestAGuest:
    def test_leaves_no_hook(self, any_model):
        model, forward = any_model
        optimizer = torch.optim.AdamW(model.parameters())
        before = num_hooks(model)
        reading_of(model, forward, optimizer)
        assert num_hooks(model) == before
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks

    def test_is_not_seen_by_selective_checkpointing(self):
        """Its cache would hand our tensors out for the model's, and gradients would be wrong without a word."""

        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = zoo.our_language_model()[0].blocks  # de-escalation divides and multiplies, as we do

            def forward(self, x):
                kept = [torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor]
                for block in self.blocks:
                    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
                    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
                return x

        def gradients(watched):
            torch.manual_seed(0)
            model = Checkpointed()
            x = torch.randn(3, 8, 32)
            probe = probe_of(model)
            if watched:
                probe.arm()
            (model(x) ** 2).mean().backward()
            probe.disarm()
            return [p.grad for p in model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))

    @pytest.mark.parametrize("attach_first", [True, False])
    def test_breaks_no_compiled_graph(self, attach_first):
        model, _ = zoo.our_language_model()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        if not attach_first:
            compiled(zoo.ids())
        probe = probe_of(model)
        for _ in range(3):
            probe.arm()
            compiled(zoo.ids()).sum().backward()  # raises where a graph breaks
            probe.collect()
            probe.disarm()

    def test_comes_out_of_the_model_after_an_interrupt_in_the_middle_of_that(self, monkeypatch):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm()
        remove, calls = torch.utils.hooks.RemovableHandle.remove, []

        def interrupted(handle):
            calls.append(handle)
            if len(calls) == 5:
                raise KeyboardInterrupt
            remove(handle)

        monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward()
        probe.disarm()
        assert num_hooks(model) == 0
        assert not optimizer._optimizer_step_pre_hooks
        assert all("forward" not in vars(module) for module in model.modules())

    @pytest.mark.parametrize("where", ["inside attention", "attention", "block", "model"])
    def test_leaves_what_is_compiled_in_parts_alone(self, where):
        torch._dynamo.reset()
        compiled = []

        def backend(graph, _):
            compiled.append(graph)
            return graph.forward

        model, _ = zoo.our_language_model()
        if where == "inside attention":
            core = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend=backend, fullgraph=True)
            model.blocks[0].attention.forward = lambda x_BTD: core(x_BTD.unsqueeze(1)).squeeze(1)
        else:
            module = {"attention": model.blocks[0].attention, "block": model.blocks[0], "model": model}[where]
            module.forward = torch.compile(module.forward, backend=backend, fullgraph=True)
        probe = probe_of(model)
        for _ in range(6):
            model(zoo.ids()).sum().backward()
            probe.arm()
            model(zoo.ids()).sum().backward()
            probe.collect()
            probe.disarm()
        assert len(compiled) <= 2

    def test_contains_a_fault_and_measures_the_rest(self, monkeypatch):
        model, forward = zoo.torch_encoder()
        faults = []
        monkeypatch.setattr("tsemon.probes.attention.normalized_row_entropy", lambda *_: 1 / 0)
        reading, _ = reading_of(model, forward, on_fault=faults.append)
        assert {type(fault) for fault in faults} == {ZeroDivisionError}
        assert reading.layers["token_similarity"].isfinite().all()

    def test_does_not_come_along_when_the_model_is_copied_or_pickled(self):
        model, _ = zoo.torch_encoder()
        probe = probe_of(model)
        probe.arm()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.randn(12, 4, 32))
        assert "token_similarity" not in probe.collect().layers

    def test_reads_nothing_back_from_the_device(self):
        """On `meta` nothing has a value, so whatever would wait for the device raises."""
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="meta"), 3, enable_nested_tensor=False
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        reading, _ = reading_of(model, lambda: model(torch.empty(4, 12, 32, device="meta")), optimizer)
        assert reading.layers["token_similarity"].device.type == "meta"
        assert {"update_norm", "attention_entropy"} <= set(reading.layers)

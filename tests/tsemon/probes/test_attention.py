import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, probe_of, reading_of
from tsemon.measures.rows import choose, weigh
from tsemon.measures.scores import DotProducts


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
        arguments.pop("enable_gqa", None)
        scores = DotProducts(query, key, **arguments)
        chosen = choose(scores.size, 64, scores.device)
        assert 1 < len(chosen.rows) < tokens
        sums = weigh(scores, chosen)
        got = sums.entropy_BH / sums.choices_BH

        if kind == "three axes":
            query, key, visible = query[:, None], key[:, None], visible[:, None]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.double() @ key.double().transpose(-2, -1) / math.sqrt(8)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        ratio = torch.special.entr(weights).sum(-1) / visible.expand_as(weights).sum(-1).double().log()
        expected = ratio[: len(got), :, chosen.rows].nanmean(-1)
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
        probe.arm(ALL)
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
        probe.arm(ALL)
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
        probe.arm(ALL)
        with pytest.raises((RuntimeError, AssertionError)):
            model(torch.randn(2, 5, 16))
        probe.disarm()
        assert F.scaled_dot_product_attention is original
        assert torch.overrides._get_current_function_mode_stack() == []

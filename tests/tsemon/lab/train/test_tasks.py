import math

import pytest
import torch
from torch import nn

from tsemon.lab.train.tasks import IGNORED, MaskedTask

VOCAB = 51
"""Fifty tokens and the mask."""


class Knowing(nn.Module):
    """Notes what it sees, and gives probability `right` to the tokens of `batch`, the rest to all entries alike."""

    def __init__(self, batch, right):
        super().__init__()
        self.batch, self.right, self.seen = batch, right, []

    def forward(self, tokens_BT):
        self.seen.append(tokens_BT)
        known = nn.functional.one_hot(self.batch, VOCAB).double()
        return (self.right * known + (1 - self.right) / VOCAB).log()


def tokens_of(batch=200, tokens=100):
    return torch.randint(VOCAB - 1, (batch, tokens), generator=torch.Generator().manual_seed(0))


class TestAMaskedTask:
    def test_hides_tokens_as_bert_does(self):
        """Of 15 % of the tokens 80 % become the mask, 10 % a drawn token, 10 % stay."""
        tokens = tokens_of()
        seen, targets = MaskedTask(VOCAB)._hide(tokens)
        is_target = targets != IGNORED
        assert torch.equal(targets[is_target], tokens[is_target])
        assert torch.equal(seen[~is_target], tokens[~is_target])
        is_mask, stays = seen == VOCAB - 1, seen == tokens
        shares = [x[is_target].double().mean().item() for x in (is_mask, ~is_mask & ~stays, stays)]
        # 3,000 targets: standard errors below 0.01; one in fifty of the drawn ones is the token itself.
        assert [is_target.double().mean().item(), *shares] == pytest.approx([0.15, 0.8, 0.098, 0.102], abs=0.025)

    def test_has_the_loss_of_what_is_hidden(self):
        tokens = tokens_of()
        model = Knowing(tokens, 0.5)
        loss, accuracy = MaskedTask(VOCAB).loss_and_accuracy(model, tokens, tokens)
        assert loss.item() == pytest.approx(-math.log(0.5 + 0.5 / VOCAB))
        assert accuracy == 1.0
        model.batch = (tokens + 1) % (VOCAB - 1)
        loss, accuracy = MaskedTask(VOCAB).loss_and_accuracy(model, tokens, tokens)
        assert loss.item() == pytest.approx(-math.log(0.5 / VOCAB))
        assert accuracy == 0.0

    def test_has_a_target_in_the_smallest_batch(self):
        task = MaskedTask(VOCAB)
        assert all((task._hide(torch.zeros(1, 1, dtype=torch.int64))[1] == 0).all() for _ in range(20))

    def test_goes_on_where_it_was(self):
        tokens, task = tokens_of(), MaskedTask(VOCAB, seed=3)
        task._hide(tokens)
        state = task.state_dict()
        expected = task._hide(tokens)
        resumed = MaskedTask(VOCAB)
        resumed.load_state_dict(state, torch.device("cpu"))
        assert all(map(torch.equal, resumed._hide(tokens), expected))

    def test_hides_the_same_in_each_evaluation(self):
        tokens, task = tokens_of(), MaskedTask(VOCAB, seed=3)
        assert all(map(torch.equal, task.fresh()._hide(tokens), task.fresh()._hide(tokens)))

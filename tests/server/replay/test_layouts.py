"""One collapsing training in several layouts, from `attach` over its spool to the built-in rules: the same alerts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.sources import find_sources

SEQUENCES, TOKENS, WIDTH, DEPTH, CLASSES = 8, 12, 32, 16, 29
STEPS, EVERY = 40, 5
COLLAPSING, HEALTHY = 3e-3, 1e-4
"""Learning rates. Post-norm blocks without warm-up do not survive the first."""


class Attention(nn.Module):
    def __init__(self, tokens_first):
        super().__init__()
        self.qkv, self.out, self.tokens_first = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), tokens_first

    def forward(self, x, mask):
        x = x.transpose(0, 1) if self.tokens_first else x
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        return self.out(y.transpose(0, 1) if self.tokens_first else y)


class Block(nn.Module):
    def __init__(self, tokens_first):
        super().__init__()
        self.attn, self.norm_1, self.norm_2 = Attention(tokens_first), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        x = self.norm_1(x + self.attn(x, mask))
        return self.norm_2(x + self.mlp(x))


class Model(nn.Module):
    """Predicts the sum of neighbors. Gets ids (B, T), and the document of each."""

    def __init__(self, tokens_first=False, causal=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.head, self.tokens_first, self.causal = nn.Linear(WIDTH, CLASSES), tokens_first, causal
        self.blocks = nn.ModuleList(Block(tokens_first) for _ in range(DEPTH))

    def forward(self, ids, documents):
        mask = documents[:, None, :, None] == documents[:, None, None]
        if self.causal:
            mask = mask & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) % TOKENS)
        x = x.transpose(0, 1).contiguous() if self.tokens_first else x
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.transpose(0, 1) if self.tokens_first else x)


def alerts_of(folder, rows, learning_rate, **options):
    """Step of each rule that fires, and what tsemon has found out about the layout."""
    torch.manual_seed(0)
    model = Model(**options).double()  # so the trainings stay the same to the last steps
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    documents = torch.arange(SEQUENCES).repeat_interleave(TOKENS).view(rows, -1)
    with tsemon.attach(model, optimizer, run="r", every=EVERY, spool_dir=folder) as monitor:
        for _ in range(STEPS):
            ids = torch.randint(CLASSES, (SEQUENCES, TOKENS))
            targets = (ids + ids.roll(1, dims=-1)) % CLASSES
            loss = F.cross_entropy(model(ids.view(rows, -1), documents).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    assert monitor.status.faults == ()
    (source,) = find_sources([folder])
    return {alert.rule: alert.firing_step for alert in replay(source.open(), Evaluator(PACK)).alerts}, monitor.status


class TestACollapsingTraining:
    @pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.thorough)])
    def test_alerts_at_the_same_steps_as_a_batch_packed_and_tokens_first(self, tmp_path, causal):
        batch, _ = alerts_of(tmp_path / "batch", SEQUENCES, COLLAPSING, causal=causal)
        packed, of_packed = alerts_of(tmp_path / "packed", 1, COLLAPSING, causal=causal)
        turned, of_turned = alerts_of(tmp_path / "turned", SEQUENCES, COLLAPSING, causal=causal, tokens_first=True)
        assert "token-similarity-escalation" in batch
        assert batch == packed == turned
        assert "8 documents a row" in of_packed.how["layout"]
        assert "tokens first" in of_turned.how["layout"]

    def test_does_not_alert_in_health(self, tmp_path):
        packed, _ = alerts_of(tmp_path / "packed", 1, HEALTHY)
        assert packed == {}

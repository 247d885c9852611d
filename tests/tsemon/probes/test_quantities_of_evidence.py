"""A user's own quantities are missing, with the reason, where the metrics of the same tensors are."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of

WIDTH, HEADS, NUM_BLOCKS = 32, 4, 3
SEVERAL_CALLS = "Attention computes attention in several calls"


def once(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def by_halves(query, key, value):
    """Of the heads."""
    halves = zip(*(x.chunk(2, dim=1) for x in (query, key, value)), strict=True)
    return torch.cat([once(*each) for each in halves], dim=1)


def by_halves_of_scores(query, key, value):
    halves = zip(*(x.chunk(2, dim=1) for x in (query, key, value)), strict=True)
    return torch.cat([(q @ k.mT).softmax(dim=-1) @ v for q, k, v in halves], dim=1)


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x):
        y = self.attend(*(y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)))
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(attend), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, *attends):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(map(Block, attends))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def largest(x, is_token):
    return x.abs().amax()


def of(where, axis="block"):
    return tsemon.Quantity(name=f"own_{where}", of=where, function=largest, axis=axis, merge="max")


@pytest.fixture
def measured(tmp_path):
    def measured(model, *quantities, num_steps=2, **options):
        ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"measures": [*quantities], "every": 1, "spool_dir": tmp_path, **options}
        with tsemon.attach(model, optimizer, run="run", **options) as monitor:
            for _ in range(num_steps):
                model(ids).square().mean().backward()
                optimizer.step()
                monitor.step()
        assert monitor.status.num_faults == 0
        return frames_in(tmp_path)[-1], monitor.status

    return measured


class TestAQuantityOfAttention:
    @pytest.mark.parametrize("where", ["attention", "queries", "keys", "values"])
    def test_that_takes_several_calls_is_missing(self, measured, where):
        frame, status = measured(Model(once, by_halves, once), of(where))
        values = values_of(frame, f"own_{where}")
        assert [math.isnan(value) for value in values] == [False, True, False]
        assert SEVERAL_CALLS in status.not_measured[f"own_{where}"]

    @pytest.mark.parametrize("where", ["attention", "values"])
    def test_that_takes_several_softmaxes_is_missing(self, measured, where):
        frame, status = measured(Model(once, by_halves_of_scores, once), of(where))
        assert [math.isnan(value) for value in values_of(frame, f"own_{where}")] == [False, True, False]
        assert SEVERAL_CALLS in status.not_measured[f"own_{where}"]

    def test_of_no_block_is_missing(self, measured):
        frame, status = measured(Model(by_halves, by_halves), of("attention"), of("queries", axis="run"))
        assert "own_attention" not in frame["layers"]
        assert frame["scalars"].get("own_queries") is None
        assert SEVERAL_CALLS in status.not_measured["own_attention"]
        assert SEVERAL_CALLS in status.not_measured["own_queries"]


UNUSABLE = "attach(documents=...) returned a tensor of shape (4, 11) for 4 rows of 12 tokens"


class TestAQuantity:
    @pytest.mark.parametrize("where", ["output", "input", "attention", "queries", "keys", "values"])
    @pytest.mark.parametrize("axis", ["block", "run"])
    def test_of_sequences_that_are_not_known_is_missing(self, measured, where, axis):
        frame, status = measured(Model(once, once), of(where, axis), documents=lambda ids: ids[:, 1:])
        assert f"own_{where}" not in frame["layers"] or all(map(math.isnan, values_of(frame, f"own_{where}")))
        value = frame["scalars"].get(f"own_{where}")
        assert value is None or math.isnan(value)
        assert UNUSABLE in status.not_measured[f"own_{where}"]

    def test_of_a_layout_that_is_contradicted_late_is_missing(self, measured):
        """The first block shows no attention, so the layout that is given counts until the second one has run."""

        def unseen(query, key, value):
            return (query @ key.mT).sigmoid() @ value

        frame, status = measured(Model(unseen, once), of("output", axis="activation"), num_steps=1, layout="TBC")
        assert "own_output" not in frame["layers"] or all(map(math.isnan, values_of(frame, "own_output")))
        assert "attach(layout='TBC') says tokens first" in status.not_measured["own_output"]

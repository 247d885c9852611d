"""Samples and heads in one axis: each head's values are its own, or missing with the reason if nothing tells them apart."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of

WIDTH, TOKENS = 32, 12
UNKNOWN = "samples and heads are merged into one axis, and nothing shows which of them comes first"


def batch_first(x_BTHK):
    return x_BTHK.transpose(1, 2).reshape(-1, TOKENS, x_BTHK.shape[-1])


def heads_first(x_BTHK):
    return x_BTHK.permute(2, 0, 1, 3).flatten(0, 1)


def joined_heads(x_BTHK):
    """Set Transformer's way."""
    return torch.cat(list(x_BTHK.unbind(2)), 0)


def as_in_fairseq(x_BTHK):
    x_TBD = x_BTHK.flatten(2).transpose(0, 1).contiguous()
    return x_TBD.view(TOKENS, -1, x_BTHK.shape[-1]).transpose(0, 1)


def by_index(x_BTHK):
    """Nothing that is called shows the order."""
    return torch.stack([x_BTHK[sample, :, head] for head in range(x_BTHK.shape[2]) for sample in range(len(x_BTHK))])


BATCH_FIRST = {batch_first, as_in_fairseq}


class Attention(nn.Module):
    def __init__(self, merge, heads, kind):
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads
        self.merge, self.kind = merge, kind

    def forward(self, x, padding):
        batch, heads = len(x), self.num_heads
        query, key, value = (y.unflatten(-1, (heads, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        self.seen = tuple(y.detach().transpose(1, 2).double() for y in (query, key, value))
        query, key, value = map(self.merge, (query, key, value))
        mask = None
        if padding is not None:
            is_batch_first = self.merge in BATCH_FIRST
            mask = padding.repeat_interleave(heads, dim=0) if is_batch_first else padding.repeat(heads, 1)
            mask = mask[:, None].expand(-1, TOKENS, -1)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(query, key, value, mask)
        else:
            scores = torch.bmm(query, key.mT) / query.shape[-1] ** 0.5
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            y = torch.bmm(scores.softmax(dim=-1), value)
        y = y.unflatten(0, (batch, heads) if self.merge in BATCH_FIRST else (heads, batch))
        y = y.transpose(1, 2) if self.merge in BATCH_FIRST else y.permute(1, 2, 0, 3)
        return self.out(y.flatten(2))


class Block(nn.Module):
    def __init__(self, *given):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(*given), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, padding):
        x = x + self.attn(self.norm_1(x), padding)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, merge, heads=4, kind="softmax"):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block(merge, heads, kind) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)

    def forward(self, ids, padding=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x)


@pytest.fixture
def measured(tmp_path):
    def measured(model, batch=3, padding=None, **options):
        ids = torch.randint(50, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"attention_rows": "all", "every": 1, "spool_dir": tmp_path, **options}
        with tsemon.attach(model, optimizer, run="run", **options) as monitor:
            model(ids, padding).square().mean().backward()
            expected = [oracle(block.attn, padding) for block in model.blocks]
            optimizer.step()
            monitor.step()
        assert monitor.status.num_faults == 0
        return frames_in(tmp_path)[0], monitor.status, {name: [one[name] for one in expected] for name in expected[0]}

    return measured


def oracle(attention, padding):
    """In float64, and the entropies and the largest logits also of each head."""
    query, key, value = attention.seen
    scores = query @ key.mT / query.shape[-1] ** 0.5
    is_token = torch.ones(len(query), TOKENS, dtype=torch.bool) if padding is None else padding
    scores = scores.masked_fill(~is_token[:, None, None], -torch.inf)
    weights, counts = scores.softmax(dim=-1), is_token[:, None].expand(scores.shape[:3])
    share = torch.special.entr(weights).sum(dim=-1) / is_token.sum(dim=-1)[:, None, None].log()
    entropy_H = share.masked_fill(~counts, torch.nan).nanmean(dim=-1).mean(dim=0)
    largest_H = scores.masked_fill(~counts[..., None], -torch.inf).amax(dim=(0, 2, 3))
    importance = torch.where(counts[..., None], weights, 0.0).sum(dim=(1, 2))
    importance = importance / importance.sum(dim=-1, keepdim=True)
    spread = (torch.special.entr(importance).sum(dim=-1) / is_token.sum(dim=-1).log()).mean()
    lengths = [v.norm(dim=-1)[of] for v, of in zip(value.transpose(1, 2).flatten(2), is_token, strict=True)]
    return {
        "attention_entropy": entropy_H.mean().item(),
        "max_attention_logit": largest_H.max().item(),
        "attention_entropy_min": entropy_H.min().item(),
        "importance_entropy": spread.item(),
        "first_value_norm_ratio": torch.stack([x[0] / x[1:].mean() for x in lengths]).mean().item(),
        "by head": (entropy_H.tolist(), largest_H.tolist()),
    }


OF_ROWS = ("attention_entropy", "max_attention_logit")
OF_HEADS = ("attention_entropy_min", "importance_entropy", "first_value_norm_ratio")


def assert_right(frame, expected, names):
    for name in names:
        assert values_of(frame, name) == pytest.approx(expected[name], rel=1e-5), name


def by_head(frame, expected):
    for place, name in enumerate(OF_ROWS):
        yield values_of(frame, name, "heads"), [value for one in expected["by head"] for value in one[place]]


@pytest.fixture
def is_token():
    return torch.arange(TOKENS) < torch.tensor([12, 7, 9])[:, None]


@pytest.mark.parametrize("kind", ["softmax", "sdpa"])
class TestHeadsAmongTheRows:
    @pytest.mark.parametrize("is_padded", [False, True])
    @pytest.mark.parametrize("merge", [batch_first, heads_first, joined_heads, as_in_fairseq])
    def test_are_told_from_how_they_were_merged(self, measured, is_token, merge, kind, is_padded):
        frame, _, expected = measured(Model(merge, kind=kind), padding=is_token if is_padded else None)
        assert_right(frame, expected, (*OF_ROWS, *OF_HEADS))
        for values, rights in by_head(frame, expected):
            assert values == pytest.approx(rights, rel=1e-5)

    @pytest.mark.parametrize(
        ("merge", "batch", "heads"), [(by_index, 3, 4), (by_index, 4, 4), (batch_first, 4, 4), (heads_first, 4, 4)]
    )
    def test_are_missing_if_nothing_tells_them(self, measured, merge, batch, heads, kind):
        own = tsemon.Quantity(name="own", of="attention", function=lambda weights, is_token: weights.amax())
        measures = [*OF_ROWS, *OF_HEADS, "attention_entropy_se", "spectral_gap", "value_top_eigenvalue", own]
        frame, status, expected = measured(Model(merge, heads, kind), batch, measures=measures)
        assert_right(frame, expected, OF_ROWS)
        for name in (*OF_HEADS, "attention_entropy_se", "spectral_gap", "value_top_eigenvalue", "own"):
            assert name not in frame["layers"] or all(map(math.isnan, values_of(frame, name))), name
            assert UNKNOWN in status.not_measured[name], name
        for values, _ in by_head(frame, expected):
            assert all(map(math.isnan, values))

    def test_of_padded_samples_that_nothing_tells_are_missing(self, measured, is_token, kind):
        frame, _, expected = measured(Model(by_index, kind=kind), padding=is_token)
        assert_right(frame, expected, OF_ROWS)
        assert all(map(math.isnan, values_of(frame, "attention_entropy_min")))

    @pytest.mark.parametrize(("merge", "batch", "heads"), [(joined_heads, 4, 4), (as_in_fairseq, 4, 4)])
    def test_are_told_where_they_are_as_many_as_samples(self, measured, merge, batch, heads, kind):
        frame, _, expected = measured(Model(merge, heads, kind), batch)
        assert_right(frame, expected, (*OF_ROWS, *OF_HEADS))

    @pytest.mark.parametrize(("batch", "heads"), [(1, 4), (3, 1)])
    def test_need_no_order_if_there_is_one_of_either(self, measured, batch, heads, kind):
        frame, _, expected = measured(Model(by_index, heads, kind), batch)
        assert_right(frame, expected, (*OF_ROWS, *OF_HEADS))

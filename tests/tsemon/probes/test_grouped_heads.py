"""Grouped queries as an axis of their own, (B, G, H / G, T, K): the numbers are those of the same heads side by side."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tsemon.probes.probing import reading_of

D, G, R, K, DEPTH = 32, 2, 3, 8, 3
"""G key heads with R query heads each."""
OF_ROWS = {"grad_norm_qk", "value_output_growth", "value_output_negative_share", "value_output_norm"}
"""Metrics of rows of the packed projection, which are known in the first sample or the second."""


def side_by_side(q, k, v, mask):
    k, v = (x.repeat_interleave(R, dim=1) for x in (k, v))
    scores = (q @ k.mT / K**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def einsum(q, k, v, mask):
    scores = torch.einsum("bgrtk,bgsk->bgrts", q.unflatten(1, (G, R)), k) / K**0.5
    return torch.einsum("bgrts,bgsk->bgrtk", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1, 2)


def matmul(q, k, v, mask):
    scores = q.unflatten(1, (G, R)) @ k.unsqueeze(2).mT / K**0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def fused(q, k, v, mask):
    heads = q.unflatten(1, (G, R)), k.unsqueeze(2), v.unsqueeze(2)
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).flatten(1, 2)


def fused_with_mask_by_group(q, k, v, mask):
    masks = mask.expand(len(q), G, 1, -1, -1)
    k, v = (x.unsqueeze(2).expand(-1, -1, R, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q.unflatten(1, (G, R)), k, v, attn_mask=masks).flatten(1, 2)


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), Attention(attend), nn.Sequential(nn.Linear(D, D), nn.GELU())

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.attend = G * R, G, attend
        self.qkv, self.proj = nn.Linear(D, (R + 2) * G * K), nn.Linear(R * G * K, D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, K)).transpose(1, 2).split([R * G, G, G], dim=1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def measured(attend):
    model = Model(attend)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reading, probe = reading_of(model, lambda: model(torch.randn(4, 7, D)), optimizer)
    return reading, probe


@pytest.mark.parametrize("attend", [einsum, matmul, fused, fused_with_mask_by_group])
def test_attention_over_groups_is_measured_as_heads_side_by_side(attend):
    reading, _ = measured(attend)
    expected, _ = measured(side_by_side)
    assert {"attention_entropy", "first_value_norm_ratio"} <= reading.layers.keys() | reading.heads.keys()
    for kind in ("layers", "heads"):
        found, others = getattr(reading, kind), getattr(expected, kind)
        assert found.keys() - OF_ROWS == others.keys() - OF_ROWS
        for name in found.keys() - OF_ROWS:
            torch.testing.assert_close(
                *(_value(of[name]) for of in (found, others)), rtol=1e-4, atol=1e-6, equal_nan=True
            )


@pytest.mark.parametrize("attend", [einsum, matmul, fused])
def test_values_over_groups_show_their_rows_at_once(attend):
    reading, probe = measured(attend)
    assert reading.layers["grad_norm_qk"].isfinite().all()
    assert "grad_norm_qk" not in probe.not_measured


def _value(found):
    return found if isinstance(found, torch.Tensor) else found.finish(found.raw)

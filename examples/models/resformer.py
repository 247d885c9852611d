"""ResFormer: a Llama-like decoder with value residuals, in one file to copy (Value Residual Learning, arXiv 2410.17897).

Its parameters have the names and sizes of tsemon.models.Llama(value_weights=(0.5, 0.5)).
Axes: B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F


def linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def rotate(x_BHTK):
    """Rotary positions: pairs (x_i, x_(i + K/2)) turn by the angle t / 10000^(2i / K)."""
    tokens, size = x_BHTK.shape[2:]
    rates = 10_000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64, device=x_BHTK.device) / size)
    angles_TK = torch.arange(tokens, dtype=torch.float64, device=x_BHTK.device)[:, None] * rates
    cosine_TK, sine_TK = angles_TK.cos().to(x_BHTK.dtype), angles_TK.sin().to(x_BHTK.dtype)
    left, right = x_BHTK.chunk(2, dim=-1)
    return torch.cat([left * cosine_TK - right * sine_TK, left * sine_TK + right * cosine_TK], dim=-1)


class Attention(nn.Module):
    """Takes the values of the first layer, V_1; None in the first layer, which returns its own."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.to_query, self.to_key, self.to_value = (linear(width, width) for _ in range(3))
        self.to_output = linear(width, width)

    def forward(self, x_BTD, first_BHTK):
        query, key, value = (
            to(x_BTD).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for to in (self.to_query, self.to_key, self.to_value)
        )
        first_BHTK = value if first_BHTK is None else first_BHTK
        value = (value + first_BHTK) / 2  # Eq. 7
        mixed_BHTK = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.to_output(mixed_BHTK.transpose(1, 2).flatten(2)), first_BHTK


class SwiGLU(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.gate, self.expand, self.contract = linear(width, ffn), linear(width, ffn), linear(ffn, width)

    def forward(self, x_BTD):
        return self.contract(F.silu(self.gate(x_BTD)) * self.expand(x_BTD))


class Block(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention, self.feed_forward = Attention(width, heads), SwiGLU(width, ffn)

    def forward(self, x_BTD, first_BHTK):
        attended_BTD, first_BHTK = self.attention(self.norm1(x_BTD), first_BHTK)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self.feed_forward(self.norm2(x_BTD)), first_BHTK


class ResFormer(nn.Module):
    """Takes tokens (B, T), returns logits (B, T, V)."""

    def __init__(self, *, vocab, depth, width, heads, ffn):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, ffn) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), linear(width, vocab)

    def forward(self, tokens_BT):
        x_BTD, first_BHTK = self.embed(tokens_BT), None
        for block in self.blocks:
            x_BTD, first_BHTK = block(x_BTD, first_BHTK)
        return self.head(self.norm(x_BTD))

"""A deep post-norm decoder with de-escalation, in one file to copy (Classic Transformers, arXiv 2312.06182).

Its parameters have the names and sizes of tsemon.models.CausalLanguageModel(norm="post", tau=...).
Axes: B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F


def de_escalate(x_BTD, tau):
    """Subtract tau times the mean of tokens 0 to t from token t.

    Eq. 21 has the mean of all tokens, and the paper trains with tau = 1: such a decoder sees later tokens. This one does
    not, and learns with tau = 0.2.
    """
    counts_T1 = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)[:, None]
    return x_BTD - tau * x_BTD.cumsum(dim=1) / counts_T1


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.to_query_key_value, self.to_output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTD):
        qkv_BHTK = self.to_query_key_value(x_BTD).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        mixed_BHTK = F.scaled_dot_product_attention(*qkv_BHTK.chunk(3, dim=1), is_causal=True)
        return self.to_output(mixed_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.expand, self.contract = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x_BTD):
        return self.contract(F.gelu(self.expand(x_BTD)))


class Block(nn.Module):
    """Algorithm 1 of the paper, and de-escalation at the end of each block."""

    def __init__(self, width, heads, ffn, tau):
        super().__init__()
        self.tau = tau
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.norm2 = FeedForward(width, ffn), nn.LayerNorm(width)

    def forward(self, x_BTD):
        y_BTD = self.norm1(x_BTD + self.attention(x_BTD))
        z_BTD = self.norm2(y_BTD + self.feed_forward(y_BTD))
        return de_escalate(z_BTD, self.tau)


class DeEscalated(nn.Module):
    """Takes tokens (B, T), returns logits (B, T, V)."""

    def __init__(self, *, vocab, context, depth, width, heads, ffn, tau=0.2):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, ffn, tau) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)

"""Models as people write them by hand.

Axes: B samples, T tokens, D width, H heads.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH = 100, 16, 32, 4, 3


class CausalSelfAttention(nn.Module):
    """One linear map to queries, keys and values, as in nanoGPT; by the fused kernel, or by a softmax in plain sight."""

    def __init__(self, is_fused, dropout):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.weights_seen = nn.Identity()  # where a test can see the weights, where there are any
        self.residual_dropout = nn.Dropout(dropout)
        self.is_fused = is_fused
        nn.init.normal_(self.c_attn.weight, std=0.4)  # far enough from uniform to tell a right entropy from a wrong one

    def forward(self, x_BTD):
        batch, tokens, width = x_BTD.shape
        query, key, value = (
            part.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
            for part in self.c_attn(x_BTD).split(width, -1)
        )
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            mixed = self.weights_seen(F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)) @ value
        return self.residual_dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class Block(nn.Module):
    def __init__(self, is_fused=True, dropout=0.1):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention(is_fused, dropout)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class GPT(nn.Module):
    """In the style of nanoGPT: a ModuleDict of parts, the head tied to the token embedding."""

    def __init__(self, *, is_fused=True, dropout=0.1, depth=DEPTH, checkpointing=None):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(Block(is_fused, dropout) for _ in range(depth)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.checkpointing = checkpointing
        """The arguments of torch.utils.checkpoint, where the blocks are computed twice to save memory."""

    def forward(self, ids_BT):
        parts = self.transformer
        x_BTD = parts["wte"](ids_BT) + parts["wpe"](torch.arange(ids_BT.shape[1]))
        for block in parts["h"]:
            x_BTD = block(x_BTD) if self.checkpointing is None else checkpoint(block, x_BTD, **self.checkpointing)
        return self.lm_head(parts["ln_f"](x_BTD))


class Stage(nn.Module):
    """A part of a GPT's blocks, with what comes before or after them."""

    def __init__(self, gpt, first, end):
        super().__init__()
        self.embed = gpt.transformer["wte"] if first == 0 else None
        self.place = gpt.transformer["wpe"] if first == 0 else None
        self.blocks = nn.ModuleList(gpt.transformer["h"][first:end])
        self.head = nn.Sequential(gpt.transformer["ln_f"], gpt.lm_head) if end == DEPTH else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class AroundMultiheadAttention(nn.Module):
    """A block by hand around the attention of torch.nn."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x_BTD):
        y_BTD = self.norm(x_BTD)
        hidden = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).triu(1)
        mixed_BTD, _ = self.attention(y_BTD, y_BTD, y_BTD, attn_mask=hidden, need_weights=False)
        x_BTD = x_BTD + self.dropout(mixed_BTD)
        return x_BTD + self.feed_forward(x_BTD)


class Mixer(CausalSelfAttention):
    """Attention, but nothing in its name says so."""


class Cell(nn.Module):
    """A block by another name."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = Mixer(True, dropout)
        self.feed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.mix(self.first_norm(x_BTD))
        return x_BTD + self.feed(self.second_norm(x_BTD)).tanh()


class Tower(nn.Module):
    """Blocks of any kind, one on the other."""

    def __init__(self, make_block=Cell):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = nn.ModuleList(make_block() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids_BT):
        x_BTD = self.embed(ids_BT)
        for cell in self.cells:
            x_BTD = cell(x_BTD)
        return self.out(x_BTD)

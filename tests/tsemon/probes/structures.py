"""Blocks as public code arranges them, as small as possible: width 16, two heads, inputs (batch, tokens, 16)."""

import torch
from torch import nn
from torch.nn import functional as F

D = 16


class Attention(nn.Module):
    """As in vit-pytorch, which has its norm inside; the others have theirs elsewhere."""

    def __init__(self, width=D, has_norm=False):
        super().__init__()
        self.norm = nn.LayerNorm(width) if has_norm else nn.Identity()
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.to_qkv(self.norm(x)).chunk(3, -1))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, width=D, has_norm=False):
        layers = (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        super().__init__(*([nn.LayerNorm(width)] if has_norm else []), *layers)


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(D), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Block(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def blocks(number=3):
    return [Block() for _ in range(number)]


class Holder(nn.Module):
    """A model of which only the structure matters."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        raise NotImplementedError


class Tower(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Linear(D, D), nn.ModuleList(blocks(depth)), nn.LayerNorm(D)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def frozen(model):
    return model.requires_grad_(False)


# Models that say what their hidden states are: `states(x)` holds the first block's input and the output of each block.


class OfParts(nn.Module):
    """Blocks that are never called, only their parts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x):
        return self.head(self.states(x)[-1])


class VitPytorch(OfParts):
    """`for attn, ff in self.layers`; an attention that has its norm inside."""

    def __init__(self, depth=3):
        super().__init__()
        self.head = nn.LayerNorm(D)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(has_norm=True), FeedForward(has_norm=True)]) for _ in range(depth)
        )

    def states(self, x):
        states = [x]
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
            states.append(x)
        return states


class OldVitPytorch(VitPytorch):
    """Norms in wrappers, and none behind the last block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()
        self.layers = nn.ModuleList(nn.ModuleList([PreNorm(Attention()), PreNorm(FeedForward())]) for _ in range(3))


class Dicts(OfParts):
    """Parts in a ModuleDict, and an output head that is no norm."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(D, 5)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"ln1": nn.LayerNorm(D), "attn": Attention(), "ln2": nn.LayerNorm(D), "mlp": FeedForward()})
            for _ in range(3)
        )

    def states(self, x):
        states = [x]
        for layer in self.layers:
            x = x + layer["attn"](layer["ln1"](x))
            x = x + layer["mlp"](layer["ln2"](x))
            states.append(x)
        return states


class PostNormParts(OfParts):
    """The norm behind each sum; the last is the model's output."""

    def __init__(self):
        super().__init__()
        parts = (Attention, lambda: nn.LayerNorm(D), FeedForward, lambda: nn.LayerNorm(D))
        self.layers = nn.ModuleList(nn.ModuleList([make() for make in parts]) for _ in range(3))

    def states(self, x):
        states = [x]
        for attention, norm1, feed_forward, norm2 in self.layers:
            x = norm1(x + attention(x))
            x = norm2(x + feed_forward(x))
            states.append(x)
        return states


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class XTransformer(OfParts):
    """Attention and feed-forward part are entries of one list, each with its norms and a module that adds the residual."""

    def __init__(self, is_pre_norm=True, layers=(Attention, FeedForward)):
        super().__init__()
        self.layers, self.num_layers = nn.ModuleList(), len(layers)
        for make in layers * 3:
            norm = nn.LayerNorm(D)
            norms = nn.ModuleList([norm, None] if is_pre_norm else [None, norm])
            self.layers.append(nn.ModuleList([norms, make(), Residual()]))
        self.head = nn.LayerNorm(D) if is_pre_norm else nn.Identity()

    def states(self, x):
        states = [x]
        for (before, after), block, residual in self.layers:
            y = x if before is None else before(x)
            x = residual(block(y), x)
            x = x if after is None else after(x)
            states.append(x)
        return states[:: self.num_layers]


class WithFunctionalNorm(VitPytorch):
    """A norm that is a function stands between the last block and the output."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x):
        return F.rms_norm(self.states(x)[-1], (D,))


class WithoutNorms(VitPytorch):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(3))


class MambaSsm(nn.Module):
    """Blocks that pass the residual beside their branch, whose sum with it is the hidden state."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm_f = nn.ModuleList(SplitBlock() for _ in range(3)), nn.LayerNorm(D)

    def states(self, x):
        states, residual = [x], None
        for layer in self.layers:
            x, residual = layer(x, residual)
            states.append(x + residual)
        return states

    def forward(self, x):
        return self.norm_f(self.states(x)[-1])


class SplitBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(D), Gated()

    def forward(self, hidden_states, residual=None):
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mixer(self.norm(residual)), residual


class Gated(nn.Module):
    """Mixes neighboring tokens; its name says nothing."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x):
        y, gate = self.in_proj(x).chunk(2, -1)
        return self.out_proj(self.conv(y.mT).mT * gate.sigmoid())


class ResidualUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), Gated()

    def forward(self, x):
        return x + self.inner(self.norm(x))


class DownSample(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.reduction(self.norm(x.unflatten(1, (-1, 2)).flatten(2)))


class Stage(nn.Module):
    """Of timm's Swin."""

    def __init__(self, depth, is_first):
        super().__init__()
        self.downsample = nn.Identity() if is_first else DownSample()
        self.blocks = nn.Sequential(*blocks(depth))

    def forward(self, x):
        return self.blocks(self.downsample(x))


class BlockChunk(nn.ModuleList):
    """Of DINOv2."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class ParallelBlock(nn.Module):
    """Of timm: attentions side by side."""

    def __init__(self):
        super().__init__()
        self.attns = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), Attention()) for _ in range(2))
        self.ffns = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), FeedForward()) for _ in range(2))

    def forward(self, x):
        x = x + torch.stack([attn(x) for attn in self.attns]).sum(0)
        return x + torch.stack([ffn(x) for ffn in self.ffns]).sum(0)


class ListsOfParts(nn.Module):
    """XLM: a list of all attentions, a list of all norms."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, D)
        self.attentions = nn.ModuleList(Attention() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.ffns = nn.ModuleList(FeedForward() for _ in range(3))


class Unit(nn.Module):
    """Two layers and a residual: no norm, no word for what it does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.second(self.first(x).relu())

"""The decoder of Effects of Parameter Norm Growth (arXiv 2010.09697, Definitions 4 to 6), in one file to copy.

Its parameters have the names and sizes of tsemon.models.CausalLanguageModel(norm="branch", activation="relu").
Axes: B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class Attention(nn.Module):
    """Definition 4: softmax(Q K' / sqrt(K)) V for each head. Later tokens are hidden; the authors' code shows them."""

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
        return self.contract(F.relu(self.expand(x_BTD)))


class Block(nn.Module):
    """Definitions 5 and 6: x + LN(f(x)). Apart from softmax and biases, twice the parameters give twice the stream."""

    def __init__(self, width, heads, ffn):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.norm2 = FeedForward(width, ffn), nn.LayerNorm(width)

    def forward(self, x_BTD):
        y_BTD = x_BTD + self.norm1(self.attention(x_BTD))
        return y_BTD + self.norm2(self.feed_forward(y_BTD))


class NormGrowth(nn.Module):
    """Takes tokens (B, T), returns logits (B, T, V)."""

    def __init__(self, *, vocab, context, depth, width, heads, ffn):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, ffn) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def saturation(model, tokens_BT, scale=1000.0):
    """Section 4.1: mean cosine of the logits of the model and of the same model with all parameters times `scale`."""
    scaled = {name: scale * parameter for name, parameter in model.named_parameters()}
    saturated_BTV = functional_call(model, scaled, (tokens_BT,))
    return F.cosine_similarity(model(tokens_BT), saturated_BTV, dim=-1).mean()

"""Models as the large training codes and the small teaching ones build them, from memory of their structure only.

What is peculiar to each is kept: where blocks lie, which axes their hidden states have, what their calls take and return.

Axes: B samples, T tokens, N tokens of all documents in a row, D width, H heads, K width of a head.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.hugging_face import LENGTHS, by_document, packed, without_padding
from tests.zoo.specimen import (
    BATCH,
    HEADS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Specimen,
    Subject,
    enliven,
    grid,
    ids,
    images,
    one_row,
    stack,
    to_a_target,
    tokens_first,
)


def heads_of(x_BTD):
    return x_BTD.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(query_BTD, key_BTD, value_BTD, **how):
    mixed_BHTK = F.scaled_dot_product_attention(heads_of(query_BTD), heads_of(key_BTD), heads_of(value_BTD), **how)
    return mixed_BHTK.transpose(1, 2).flatten(2)


def feed_forward(hidden=2 * WIDTH):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class Wrapped(nn.Module):
    """An embedding, blocks and a head; how blocks are kept and called is the model's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)


def subject(model, stacks, batch=lambda step: {"tokens": ids(step)}, **more):
    return Subject(**{"model": enliven(model), "batch": batch, "loss": to_a_target, "stacks": stacks} | more)


# Megatron-LM.


class MegatronAttention(nn.Module):
    """Queries, keys and values are interleaved per group of heads."""

    def __init__(self):
        super().__init__()
        self.linear_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core_attention = MegatronCore()
        self.linear_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, attention_mask):
        mixed = self.linear_qkv(hidden_states).unflatten(-1, (HEADS, 3, -1))  # (T, B, H, 3, K)
        return self.linear_proj(self.core_attention(*mixed.unbind(3), attention_mask)), None


class MegatronCore(nn.Module):
    """Scores of (samples x heads) matrices; True in the mask is hidden."""

    def forward(self, query_TBHK, key_TBHK, value_TBHK, attention_mask):
        tokens, samples = query_TBHK.shape[:2]
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query_TBHK, key_TBHK, value_TBHK))
        scores = torch.bmm(query, key.transpose(1, 2)) * query.shape[-1] ** -0.5
        scores = scores.view(samples, HEADS, tokens, tokens).masked_fill(attention_mask, -10000.0)
        weights = torch.softmax(scores, dim=-1).view(-1, tokens, tokens)
        return torch.bmm(weights, value).transpose(0, 1).reshape(tokens, samples, WIDTH)


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = MegatronAttention()
        self.mlp = feed_forward()

    def forward(self, hidden_states, attention_mask, context=None):
        attended, _ = self.self_attention(self.input_layernorm(hidden_states), attention_mask)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.pre_mlp_layernorm(hidden_states)), context


class MegatronDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(3))

    def forward(self, hidden_states, attention_mask):
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, attention_mask)
        return hidden_states


class Megatron(Wrapped):
    def __init__(self):
        super().__init__()
        self.decoder = MegatronDecoder()

    def forward(self, tokens):
        hidden_states = self.embed(tokens).transpose(0, 1).contiguous()
        attention_mask = ~torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        hidden_states = self.decoder(hidden_states, attention_mask[None, None])
        return self.head(self.final_norm(hidden_states)).transpose(0, 1)


def megatron():
    model = Megatron()
    return subject(model, [stack(model.decoder.layers, layout=tokens_first)])


class FusedMegatronAttention(MegatronAttention):
    def forward(self, hidden_states, attention_mask):
        query, key, value = self.linear_qkv(hidden_states).unflatten(-1, (HEADS, 3, -1)).permute(3, 1, 2, 0, 4)
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear_proj(mixed_BHTK.permute(2, 0, 1, 3).flatten(2)), None


def fused_megatron(size=BATCH):
    def build():
        model = Megatron()
        for layer in model.decoder.layers:
            layer.self_attention = FusedMegatronAttention()
        batch = lambda step: {"tokens": ids(step, size=size)}  # noqa: E731
        return subject(model, [stack(model.decoder.layers, layout=tokens_first)], batch)

    return build


# torchtitan.


class TitanAttention(nn.Module):
    """All tokens of all documents in one row: (N, D), and no batch axis."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_ND, mask_NN):
        query, key, value = (
            project(x_ND).unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for project in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_NN)
        return self.wo(mixed[0].transpose(0, 1).flatten(1))


class TitanBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = TitanAttention()
        self.feed_forward = feed_forward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x_ND, mask_NN):
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), mask_NN)
        return x_ND + self.feed_forward(self.ffn_norm(x_ND))


class Titan(Wrapped):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): TitanBlock() for number in range(3)})

    def forward(self, tokens, positions):
        x_ND, document_N = self.embed(tokens), (positions == 0).cumsum(0)
        mask_NN = (document_N[:, None] == document_N) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for layer in self.layers.values():
            x_ND = layer(x_ND, mask_NN)
        return self.head(self.final_norm(x_ND))


def one_row_of_documents(step):
    found = packed(step)
    return {"tokens": found["input_ids"].flatten(), "positions": found["position_ids"].flatten()}


def torchtitan():
    model = Titan()
    known = stack(model.layers.values(), layout=one_row, sequences=by_document)
    return subject(model, [known], one_row_of_documents)


# OLMo-core.


class OlmoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x_BTD):
        query, key = self.q_norm(self.w_q(x_BTD)), self.k_norm(self.w_k(x_BTD))
        return self.w_out(attend(query, key, self.w_v(x_BTD), is_causal=True))


class ReorderedNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.attention_norm = OlmoAttention(), nn.RMSNorm(WIDTH)
        self.feed_forward, self.feed_forward_norm = feed_forward(), nn.RMSNorm(WIDTH)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention_norm(self.attention(x_BTD))
        return x_BTD + self.feed_forward_norm(self.feed_forward(x_BTD))


class Olmo(Wrapped):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): ReorderedNormBlock() for number in range(3)})

    def forward(self, tokens):
        x_BTD = self.embed(tokens)
        for block in self.blocks.values():
            x_BTD = block(x_BTD)
        return self.head(self.final_norm(x_BTD))


def olmo_core():
    model = Olmo()
    return subject(model, [stack(model.blocks.values())])


# The small ones.


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD, **how):
        return self.c_proj(attend(*self.c_attn(x_BTD).chunk(3, dim=-1), **(how or {"is_causal": True})))


class SmallBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), FusedAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), feed_forward()

    def forward(self, x_BTD, **how):
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD), **how)
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class NanoGPT(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        blocks = nn.ModuleList(SmallBlock() for _ in range(depth))
        embeddings = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(64, WIDTH)}
        self.transformer = nn.ModuleDict(embeddings | {"h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = embeddings["wte"].weight

    def forward(self, tokens):
        parts = self.transformer
        x_BTD = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x_BTD = block(x_BTD)
        return self.lm_head(parts["ln_f"](x_BTD))


def nanogpt(**more):
    def build():
        model = NanoGPT()
        return subject(model, [stack(model.transformer["h"])], **more)

    return build


class NanochatBlock(nn.Module):
    """Norms without weights, queries and keys normalized; squared ReLU."""

    def __init__(self):
        super().__init__()
        self.attn = NanochatAttention()
        self.mlp = NanochatMLP()

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attn(F.rms_norm(x_BTD, (WIDTH,)))
        return x_BTD + self.mlp(F.rms_norm(x_BTD, (WIDTH,)))


class NanochatAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD):
        query, key, value = (heads_of(project(x_BTD)) for project in (self.c_q, self.c_k, self.c_v))
        query, key = (F.rms_norm(x, (x.shape[-1],)) for x in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class NanochatMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD):
        return self.c_proj(F.relu(self.c_fc(x_BTD)).square())


class Nanochat(nn.Module):
    """The residual stream is scaled and mixed with the embedding before each block."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": nn.ModuleList(NanochatBlock() for _ in range(3))}
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 0.1))

    def forward(self, tokens):
        x_BTD = first_BTD = F.rms_norm(self.transformer["wte"](tokens), (WIDTH,))
        for number, block in enumerate(self.transformer["h"]):
            x_BTD = block(self.resid_lambdas[number] * x_BTD + self.x0_lambdas[number] * first_BTD)
        return 15 * torch.tanh(self.lm_head(F.rms_norm(x_BTD, (WIDTH,))) / 15)


def nanochat():
    model = Nanochat()
    return subject(model, [stack(model.transformer["h"])])


class BankBlock(nn.Module):
    """Owns no parameters: its weights are slices of tensors that hold those of all blocks."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = BankAttention(), BankMLP()

    def forward(self, x_BTD, qkvo_4DD, up_FD, down_DF, mask):
        x_BTD = x_BTD + self.attn(F.rms_norm(x_BTD, (WIDTH,)), qkvo_4DD, mask)
        return x_BTD + self.mlp(F.rms_norm(x_BTD, (WIDTH,)), up_FD, down_DF)


class BankAttention(nn.Module):
    def forward(self, x_BTD, qkvo_4DD, mask):
        query, key, value = (heads_of(F.linear(x_BTD, weight)) for weight in qkvo_4DD[:3])
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return F.linear(mixed.transpose(1, 2).flatten(2), qkvo_4DD[3])


class BankMLP(nn.Module):
    def forward(self, x_BTD, up_FD, down_DF):
        return F.linear(F.relu(F.linear(x_BTD, up_FD)).square(), down_DF)


class Banked(nn.Module):
    """One row of documents, each of which begins with a token of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(BankBlock() for _ in range(3))
        self.attn_bank = nn.Parameter(torch.zeros(3, 4, WIDTH, WIDTH))
        self.up_bank, self.down_bank = (nn.Parameter(torch.zeros(3, *shape)) for shape in ((64, WIDTH), (WIDTH, 64)))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        document_BT = (tokens == 1).cumsum(-1)
        mask = (document_BT[:, :, None] == document_BT[:, None]) & torch.ones(2 * (tokens.shape[1],)).tril().bool()
        x_BTD = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, self.attn_bank[number], self.up_bank[number], self.down_bank[number], mask[:, None])
        return self.lm_head(F.rms_norm(x_BTD, (WIDTH,)))


def modded_nanogpt():
    model = enliven(Banked())
    with torch.no_grad():
        model.attn_bank.mul_(8)  # of three axes, of which only the last is what a weight takes

    def batch(step):
        found = packed(step)
        return {"tokens": found["input_ids"].masked_fill(found["position_ids"] == 0, 1).view(1, -1)}

    known = stack(model.blocks, sequences=by_document)
    return Subject(model=model, batch=batch, loss=to_a_target, stacks=[known])


class LinguaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD, freqs, mask=None, attn_impl="sdpa"):
        return self.wo(attend(self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD), is_causal=mask == "causal"))


class LinguaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = LinguaAttention(), feed_forward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, freqs, mask=None, attn_impl="sdpa"):
        h = x + self.attention(self.attention_norm(x), freqs, mask=mask, attn_impl=attn_impl)
        return h + self.feed_forward(self.ffn_norm(h))


class Lingua(Wrapped):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LinguaBlock() for _ in range(3))

    def forward(self, token_values):
        h = self.embed(token_values)
        for layer in self.layers:
            h = layer(h, None, mask="causal", attn_impl="sdpa")
        return self.head(self.final_norm(h))


def lingua():
    model = Lingua()
    return subject(model, [stack(model.layers)], lambda step: {"token_values": ids(step)})


# Padding, by all its names.


class Padded(Wrapped):
    """An encoder whose mask has a name and a polarity of its own."""

    def __init__(self, name, is_token):
        super().__init__()
        self.name, self.is_token = name, is_token
        self.layers = nn.ModuleList(SmallBlock() for _ in range(2))

    def forward(self, tokens, **mask):
        seen_BT = mask[self.name].bool() == self.is_token
        x_BTD = self.embed(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD, attn_mask=seen_BT[:, None, None])
        return self.head(self.final_norm(x_BTD))[seen_BT]


def padded_by(name, *, is_token):
    """is_token: what the mask says of a token."""

    def build():
        model = Padded(name, is_token)

        def batch(step):
            seen_BT = torch.arange(TOKENS) < LENGTHS[:, None]
            return {"tokens": ids(step), name: seen_BT if is_token else ~seen_BT}

        return subject(model, [stack(model.layers, sequences=without_padding)], batch)

    return build


class PaddedTorch(nn.Module):
    """PyTorch's own encoder, tokens first, where True in the mask is padding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens, src_key_padding_mask):
        x_TBD = self.encoder(self.embed(tokens).transpose(0, 1), src_key_padding_mask=src_key_padding_mask)
        return x_TBD.transpose(0, 1)[~src_key_padding_mask]


def torch_encoder():
    model = PaddedTorch()

    def batch(step):
        return {"tokens": ids(step), "src_key_padding_mask": torch.arange(TOKENS) >= LENGTHS[:, None]}

    return subject(model, [stack(model.encoder.layers, layout=tokens_first, sequences=without_padding)], batch)


class PackedEncoder(Wrapped):
    """Documents of a row are known only from the mask that the attention is given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SmallBlock() for _ in range(2))

    def forward(self, tokens, document):
        x_BTD, mask = self.embed(tokens), document[:, :, None] == document[:, None]
        for layer in self.layers:
            x_BTD = layer(x_BTD, attn_mask=mask[:, None])
        return self.head(self.final_norm(x_BTD))


def packed_encoder():
    model = PackedEncoder()

    def batch(step):
        found = packed(step)
        return {"tokens": found["input_ids"], "document": (found["position_ids"] == 0).cumsum(-1)}

    return subject(model, [stack(model.layers, sequences=by_document)], batch)


# Blocks of several classes, without attention, in stages, in towers.


class LinearUnit(nn.Module):
    """A residual unit without attention: a gated sum over the tokens so far."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD):
        value, gate = self.mix(self.norm(x_BTD)).chunk(2, dim=-1)
        steps = torch.arange(1, x_BTD.shape[1] + 1).view(1, -1, 1)
        return x_BTD + self.out(value.cumsum(1) / steps * gate.sigmoid())


class Hybrid(Wrapped):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, tokens):
        x_BTD = self.embed(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.final_norm(x_BTD))


def hybrid(kinds):
    def build():
        model = Hybrid(kinds)
        calls = iter(range(len(kinds)))
        attentions = [next(calls) if kind is not LinearUnit else None for kind in kinds]
        return subject(model, [stack(model.layers, attentions=attentions)])

    return build


class BlockChunk(nn.ModuleList):
    def forward(self, x_BTD):
        for block in self:
            x_BTD = block(x_BTD)
        return x_BTD


class Parts(Wrapped):
    """A module that only holds the blocks, and is never called."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.blocks = nn.ModuleList(SmallBlock() for _ in range(2))

    def forward(self, tokens):
        x_BTD = self.embed(tokens)
        for block in self.backbone.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.final_norm(x_BTD))


def parts():
    model = Parts()
    return subject(model, [stack(model.backbone.blocks)])


class Chunked(Wrapped):
    """DINOv2's blocks as its sharded training keeps them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BlockChunk(SmallBlock() for _ in range(2)) for _ in range(2))

    def forward(self, tokens):
        x_BTD = self.embed(tokens)
        for chunk in self.blocks:
            x_BTD = chunk(x_BTD)
        return self.head(self.final_norm(x_BTD))


def chunked():
    model = Chunked()
    return subject(model, [stack(block for chunk in model.blocks for block in chunk)])


class ParallelBlock(nn.Module):
    """One norm and one projection for both, attention beside feed-forward, in the style of ViT-22B."""

    def __init__(self):
        super().__init__()
        self.norm, self.to_all = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5 * WIDTH)
        self.attn_out, self.ff_out = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attn = DotProduct()

    def forward(self, x_BTD):
        query, key, value, hidden = self.to_all(self.norm(x_BTD)).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], dim=-1)
        return x_BTD + self.attn_out(self.attn(query, key, value)) + self.ff_out(F.gelu(hidden))


class DotProduct(nn.Module):
    def forward(self, query_BTD, key_BTD, value_BTD):
        return attend(query_BTD, key_BTD, value_BTD)


class Distilled(nn.Module):
    """A student, and its frozen teacher."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = NanoGPT(3), NanoGPT(2)
        self.teacher.requires_grad_(False)

    def forward(self, tokens):
        with torch.no_grad():
            wanted = self.teacher(tokens).softmax(-1)
        return -(wanted * self.student(tokens).log_softmax(-1)).sum(-1).mean()


def student_and_teacher():
    model = Distilled()
    known = stack(model.student.transformer["h"], attentions=[4, 5])  # behind the teacher's three, and its softmax
    return subject(model, [known], loss=lambda output: output)


class Keeper(nn.Module):
    """Its attention is called `selfattnln`, in which `ln` is no norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.selfattnln = nn.LayerNorm(WIDTH), KernelAttention()

    def forward(self, x_BTD):
        return x_BTD + self.selfattnln(self.norm(x_BTD))


class KernelAttention(FusedAttention):
    pass


class FromScratchViT(nn.Module):
    """A class token, positions, and PyTorch's attention in blocks that are called; images of patches on a grid."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.ModuleList(GridBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x_BHWD = self.patches(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x_BHWD = layer(x_BHWD)
        return self.head(x_BHWD.mean((1, 2)))


class GridBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), FusedAttention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), feed_forward()

    def forward(self, x_BHWD):
        mixed_BND = self.attn(self.norm1(x_BHWD).flatten(1, 2), is_causal=False)
        x_BHWD = x_BHWD + mixed_BND.view_as(x_BHWD)
        return x_BHWD + self.mlp(self.norm2(x_BHWD))


def grid_vit():
    model = FromScratchViT()
    return subject(model, [stack(model.layers, layout=grid)], lambda step: {"x": images(step)})


def named(name, build, **more):
    return Specimen(name=name, build=build, **more)


SPECIMENS = [
    named("Megatron-LM style: [T, B, C], layers return a tuple", megatron, is_representative=True),
    named("Megatron-LM style: [T, B, C], fused attention", fused_megatron()),
    named("Megatron-LM style: [T, B, C] with T = B", fused_megatron(size=TOKENS)),
    named("torchtitan style: ModuleDict, [T, C] without a batch axis", torchtitan, is_representative=True),
    named("OLMo-core style: ModuleDict", olmo_core, is_representative=True),
    named("nanoGPT style", nanogpt()),
    named("nanochat style", nanochat),
    named("modded-nanogpt style: parameter banks, documents in one row", modded_nanogpt),
    named("lingua style", lingua),
    named("torch.nn.TransformerEncoder: [T, B, C], padded", torch_encoder),
    named("padding_mask with 1 = token", padded_by("padding_mask", is_token=True), is_representative=True),
    named("padding_mask with 1 = padding", padded_by("padding_mask", is_token=False)),
    named("attention_mask with True = padding", padded_by("attention_mask", is_token=False)),
    named("mask with True = token", padded_by("mask", is_token=True)),
    named("documents known only from the attention mask", packed_encoder, is_representative=True),
    named(
        "hybrid: attention in every second block",
        hybrid([LinearUnit, SmallBlock, LinearUnit, SmallBlock]),
        is_representative=True,
    ),
    named("linear recurrence: no attention", hybrid([LinearUnit] * 3), is_representative=True),
    named("DINOv2 style: BlockChunk", chunked, is_representative=True),
    named("blocks in a module that is never called", parts),
    named("ViT-22B style: one projection for attention and feed-forward", hybrid([ParallelBlock] * 2)),
    named("attention module with 'ln' in its name", hybrid([Keeper] * 2), is_representative=True),
    named("ViT on a grid: [B, H, W, C]", grid_vit, is_representative=True),
    named("distillation: student and frozen teacher", student_and_teacher, is_representative=True),
    named("loop: gradient clipping", nanogpt(clip=0.01), is_representative=True),
    named("loop: gradient accumulation", nanogpt(num_passes=2)),
    named("loop: SGD with momentum", nanogpt(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))),
]

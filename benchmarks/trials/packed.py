"""Trainings on documents, as a padded batch and packed into rows: the same weights, documents and losses.

Axes: `B` documents, `T` tokens of the longest, `R` rows, `L` tokens of a row, `N` tokens of all documents, `S` keys,
`D` width, `H` heads, `K` width of a head, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen
import transformers
from torch import Tensor, nn

from trials import defects as d
from trials.recording import Trial
from trials.subjects import PADDING, AttentionOnlyBlock, Subject, hidden, score, text
from tsemon.lab.train import text_batches
from tsemon.lab.train.batches import Batch, generator
from tsemon.models.attention import SelfAttention, attend, visible
from tsemon.models.blocks import BlockConfig, last_norm, stack

LAYOUTS = ("batch", "rows", "one row", "varlen", "calls")
"""One document per row, with padding; several per row, with a block-diagonal mask and padding at the end of the row; all
documents in one row, with such a mask; the same without a mask, in one call of a kernel that gets `cu_seqlens`; the same
with one attention call per document."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """PyTorch's function of this name, which has no kernel for CPUs, written out. Takes and returns (N, H, K)."""
    mixed, lengths = [], cu_seq_q.diff().tolist()
    for query_THK, key_SHK, value_SHK in zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True):
        scores_HTS = torch.einsum("thk,shk->hts", query_THK, key_SHK) / math.sqrt(query.shape[2])
        if window_size[1] == 0:
            scores_HTS = scores_HTS.masked_fill(~visible(len(query_THK), len(key_SHK), query.device), -math.inf)
        weights_HTS = (scores_HTS - scores_HTS.amax(dim=2, keepdim=True).detach()).exp()
        weights_HTS = weights_HTS / weights_HTS.sum(dim=2, keepdim=True)
        mixed.append(torch.einsum("hts,shk->thk", weights_HTS, value_SHK))
    return torch.cat(mixed)


torch.nn.attention.varlen.varlen_attn = varlen_attn  # type: ignore[assignment]  # where tsemon looks for it


@dataclass
class Seen:
    """The tokens that each token attends to: all of its row by default."""

    mask_RLL: Tensor | None = None
    cu_seqlens: Tensor | None = None
    in_calls: bool = False


class DocumentAttention(SelfAttention):
    """Attention within the documents of a row."""

    def forward(self, x_RLD: Tensor, seen: Any = None) -> Tensor:
        qkv = self.to_query_key_value(x_RLD).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        if seen.in_calls:
            documents = zip(*(each.split(seen.cu_seqlens.diff().tolist(), dim=2) for each in qkv), strict=True)
            mixed = torch.cat([attend(*document, causal=self.causal) for document in documents], dim=2)
        elif seen.cu_seqlens is not None:
            longest, window = int(seen.cu_seqlens.diff().max()), (-1, 0 if self.causal else -1)
            query, key, value = (each[0].transpose(0, 1) for each in qkv)
            bounds = seen.cu_seqlens, seen.cu_seqlens, longest, longest
            mixed = varlen_attn(query, key, value, *bounds, window_size=window).transpose(0, 1)[None]
        elif seen.mask_RLL is not None:
            mixed = attend(*qkv, causal=False, visible_TS=seen.mask_RLL[:, None])
        else:
            mixed = attend(*qkv, causal=self.causal)
        y_RLD: Tensor = self.to_output(mixed.transpose(1, 2).flatten(2))
        return y_RLD


class DocumentModel(nn.Module):
    """BERT-like, or GPT-like if causal: takes tokens (R, L), returns logits (R, L, V)."""

    def __init__(self, config: BlockConfig, depth: int, context: int, *, attention_only: bool) -> None:
        super().__init__()
        self.causal = config.causal
        self.embed, self.positions = nn.Embedding(256, config.width), nn.Embedding(context, config.width)
        self.blocks = stack(config, depth)
        if attention_only:
            self.blocks = nn.ModuleList(AttentionOnlyBlock(config.width, causal=config.causal) for _ in range(depth))
        for block in self.blocks:
            block.attention = DocumentAttention(config.width, config.heads, config.causal)
        self.norm = last_norm(config)
        self.head = nn.Linear(config.width, 256)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        in_calls: bool = False,
    ) -> Tensor:
        seen = Seen(None, cu_seqlens, in_calls)
        if cu_seqlens is None:
            seen.mask_RLL = self._mask(input_ids, attention_mask, position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x_RLD = self.embed(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x_RLD = block(x_RLD, seen)
        logits_RLV: Tensor = self.head(self.norm(x_RLD))
        return logits_RLV

    def _mask(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
        if attention_mask is None and position_ids is None:
            return None
        num_tokens = input_ids.shape[1]
        mask = torch.ones(len(input_ids), num_tokens, num_tokens, dtype=torch.bool)
        if self.causal:
            mask = mask & visible(num_tokens, num_tokens, input_ids.device)
        if attention_mask is not None and position_ids is None:
            mask = mask & attention_mask[:, None].bool()
        return mask if position_ids is None else mask & same_document(position_ids)


def same_document(position_ids: Tensor) -> Tensor:
    """(R, L, L): whether two tokens are of one document. Positions start again with each."""
    numbers_RL = (position_ids == 0).cumsum(dim=1)
    return numbers_RL[:, :, None] == numbers_RL[:, None]


def documents(seed: int, *, hides: bool, shortest: int, longest: int, batch: int) -> Iterator[Batch]:
    """Inputs and targets (B, T), with padding behind each document."""
    draw = generator(seed)
    batches: Iterator[Batch] = text_batches(text(), longest, batch, seed)
    for inputs_BT, targets_BT in hidden(batches, seed) if hides else batches:
        is_padding_BT = torch.arange(longest) >= torch.randint(shortest, longest + 1, (batch, 1), generator=draw)
        yield inputs_BT.masked_fill(is_padding_BT, PADDING), targets_BT.masked_fill(is_padding_BT, -100)


def arguments(inputs_BT: Tensor, layout: str, num_rows: int) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of the model, and True at tokens of documents (R, L)."""
    valid_BT = inputs_BT != PADDING
    if layout == "batch":
        return {"input_ids": inputs_BT} | ({} if valid_BT.all() else {"attention_mask": valid_BT.long()}), valid_BT
    rows = num_rows if layout == "rows" else 1
    valid_RL = valid_BT.view(rows, -1)
    length = int(valid_RL.sum(dim=1).max())
    order_RL = (~valid_RL).int().argsort(dim=1, stable=True)[:, :length]
    valid_RL = valid_RL.gather(1, order_RL)
    positions_BT = torch.arange(inputs_BT.shape[1]).expand_as(inputs_BT)
    positions_RL = positions_BT.reshape(rows, -1).gather(1, order_RL).masked_fill(~valid_RL, 0)
    given = {"input_ids": inputs_BT.view(rows, -1).gather(1, order_RL), "position_ids": positions_RL}
    if layout in ("varlen", "calls"):
        given["cu_seqlens"] = nn.functional.pad(valid_BT.sum(dim=1).cumsum(dim=0), (1, 0)).int()
        return given | ({"in_calls": True} if layout == "calls" else {}), valid_RL
    return given | ({} if valid_RL.all() else {"attention_mask": valid_RL.long()}), valid_RL


def document_model(
    seed: int,
    *,
    layout: str,
    causal: bool,
    depth: int = 4,
    shortest: int = 40,
    longest: int = 40,
    batch: int = 12,
    num_rows: int = 3,
    attention_only: bool = False,
    **sizes: Any,
) -> Subject:
    shape = dict[str, Any](width=40, heads=4, ffn=112, norm="pre") | sizes
    config = BlockConfig(causal=causal, **shape)
    model = DocumentModel(config, depth, longest, attention_only=attention_only).double()
    batches = documents(seed, hides=not causal, shortest=shortest, longest=longest, batch=batch)
    return Subject(model, batches, loss_of(layout, num_rows, lambda model, given: model(**given)))


def hugging_face(seed: int, *, layout: str, causal: bool, depth: int = 4, num_rows: int = 3) -> Subject:
    """GPT-2, which finds documents by their positions, or BERT with a mask (R, 1, L, L). Without dropout."""
    batches = documents(seed, hides=not causal, shortest=8, longest=40, batch=12)
    if causal:
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=256, n_positions=40, n_embd=40, n_layer=depth, n_head=4, bos_token_id=0, eos_token_id=0,
                use_cache=False, **no_dropout,
            )
        )  # fmt: skip
    else:
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=256, max_position_embeddings=40, hidden_size=40, num_hidden_layers=depth, num_attention_heads=4,
                intermediate_size=112, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def logits(model: nn.Module, given: dict[str, Any]) -> Tensor:
        if (positions := given.get("position_ids")) is not None:
            given = {"input_ids": given["input_ids"], "position_ids": positions}
            if not causal:
                given["attention_mask"] = same_document(positions)[:, None]
        found: Tensor = model(**given).logits
        return found

    return Subject(model.double(), batches, loss_of(layout, num_rows, logits))


def loss_of(
    layout: str, num_rows: int, logits: Callable[[nn.Module, dict[str, Any]], Tensor]
) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Mean over all targets, in whichever rows they lie."""

    def loss(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        given, valid_RL = arguments(inputs_BT, layout, num_rows)
        return score(logits(model, given)[valid_RL][None], targets_BT[inputs_BT != PADDING][None])

    return loss


def layouts(trial: Trial) -> tuple[str, ...]:
    """The layouts that the training supports. Hugging Face models need a mask on a CPU."""
    return LAYOUTS[:3] if getattr(trial.subject, "func", None) is hugging_face else LAYOUTS


def laid_out(trial: Trial, layout: str) -> Trial:
    """The training with its documents laid out so."""
    name = f"{trial.name}-{layout.replace(' ', '-')}"
    subject: Any = trial.subject
    return replace(trial, name=name, subject=partial(subject, layout=layout))


def _of(kind: str, causal: bool) -> tuple[Trial, ...]:
    make = partial(document_model, causal=causal)
    base = Trial(name=kind, subject=make, about="4 blocks, pre-norm", steps=120, seed=71)
    padded = replace(base, subject=partial(make, shortest=8), seed=72)
    deep = replace(base, subject=partial(make, depth=20, width=32, ffn=80, norm="post"), seed=73)
    failing: tuple[Trial, ...] = (
        deep.failing(f"{kind}-post-20", "tse", "post-norm, 20 blocks, no warm-up", rate=3e-3, warmup=0),
        padded.failing(f"{kind}-post-20-padded", "tse", "the same, documents of 8 to 40 tokens", rate=3e-3, warmup=0,
                       subject=partial(make, shortest=8, depth=20, width=32, ffn=80, norm="post")),
        padded.failing(f"{kind}-qk-x12", "entropy", "queries and keys start 12 times too large",
                       d.queries_and_keys_times(12)),
        base.failing(f"{kind}-rate-x14", "entropy", "14 times the rate, no warm-up, unclipped", rate=3.5e-2, warmup=0,
                     clip_norm=math.inf),
        padded.failing(f"{kind}-attention-only", "rank", "10 blocks of attention alone",
                       subject=partial(make, shortest=8, depth=10, attention_only=True)),
        padded.failing(f"{kind}-decay-negative", "norm", "a weight decay of -6", d.weight_decay(-6.0)),
        base.failing(f"{kind}-inflated", "norm", "one block's weights grow by 3 % a step from step 30 on",
                     d.inflated(2, 1.03), event_step=30),
        padded.failing(f"{kind}-graph-cut", "dead", "block 2's output is detached", d.cut_graph(2)),
        base.failing(f"{kind}-rate-0", "dead", "the rate is 0 from step 60 on", d.rate_times(0.0), event_step=60),
        padded.failing(f"{kind}-rate-x60-late", "diverge", "60 times the rate from step 70 on, unclipped",
                       d.both(d.rate_times(60), d.no_clipping), event_step=70),
        base.failing(f"{kind}-gradient-x1e4", "diverge", "a loss times 10,000 from step 70 on, clipped", d.loss_times(1e4),
                     event_step=70),
        padded.failing(f"{kind}-nan", "diverge", "a weight becomes NaN at step 70", d.nan_weight, event_step=70),
        padded.failing(f"{kind}-same-batch", "data", "the same batch from step 60 on", d.same_batch, event_step=60),
        base.failing(f"{kind}-one-document", "data", "one document for all from step 70 on",
                     d.batches_through(d.constant_inputs), event_step=70),
    )  # fmt: skip
    hugging_face_padded = replace(padded, subject=partial(hugging_face, causal=causal))
    failing += (
        hugging_face_padded.failing(f"{kind}-hugging-face-decay", "norm", "Hugging Face, a weight decay of -6",
                                    d.weight_decay(-6.0)),
        hugging_face_padded.failing(f"{kind}-hugging-face-deep", "tse", "Hugging Face, 16 blocks, 4 times the rate",
                                    rate=1e-2, warmup=0, subject=partial(hugging_face, causal=causal, depth=16)),
    )  # fmt: skip
    healthy = (
        replace(base, name=f"{kind}-equal", about="documents of 40 tokens, 4 a row"),
        replace(padded, name=f"{kind}-padded", about="documents of 8 to 40 tokens, 4 a row"),
        replace(base, name=f"{kind}-short", about="64 documents of 4 to 12 tokens, 16 a row", seed=74,
                subject=partial(make, shortest=4, longest=12, batch=64, num_rows=4)),
        replace(base, name=f"{kind}-long", about="4 documents of 100 to 160 tokens, 2 a row", seed=75,
                subject=partial(make, shortest=100, longest=160, batch=4, num_rows=2)),
        replace(base, name=f"{kind}-mixed", about="12 documents of 2 to 120 tokens, 6 a row", seed=76,
                subject=partial(make, shortest=2, longest=120, num_rows=2)),
        replace(padded, name=f"{kind}-warm-up", about="a warm-up of 100 steps", warmup=100, seed=77),
        replace(padded, name=f"{kind}-post", about="post-norm, 4 blocks", rate=1e-3, warmup=40, seed=78,
                subject=partial(make, shortest=8, norm="post")),
        replace(padded, name=f"{kind}-deep", about="pre-norm, 16 blocks", rate=1e-3, seed=79,
                subject=partial(make, shortest=8, depth=16, width=32, ffn=80)),
        replace(base, name=f"{kind}-hugging-face", about="Hugging Face's " + ("GPT-2" if causal else "BERT"), rate=1e-3,
                subject=partial(hugging_face, causal=causal), seed=80),
    )  # fmt: skip
    return (*failing, *healthy)


TRIALS = (*_of("gpt", causal=True), *_of("bert", causal=False))

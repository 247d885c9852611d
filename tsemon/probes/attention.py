"""How attention is spread: weighed on a few evenly spread query rows of every block, or on all of them.

The largest logit is always the maximum over all rows of the sequences of which some rows are weighed.

Axes: B samples, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.rows import (
    MAX_ROWS,
    Chosen,
    Rows,
    Sums,
    choose,
    highest,
    row_metrics,
    row_sums,
    softmaxed,
    weigh,
)
from tsemon.measures.scores import Scores, Size
from tsemon.measures.sequences import Sequences
from tsemon.measures.sums import Partials
from tsemon.probes.calls import Calls
from tsemon.probes.deferred import Deferred
from tsemon.probes.discovery import Block
from tsemon.probes.packing import Packing
from tsemon.probes.quantities import with_padding
from tsemon.probes.reading import Reading
from tsemon.probes.tap import UNKNOWN_HEADS, AttentionPart, Seen
from tsemon.quantity import Where

OF_HEADS = ("attention_entropy_min", "attention_entropy_se", "importance_entropy")
"""Metrics that need the order of samples and heads. The others are means or maxima over all rows."""


class AttentionProbe(AttentionPart):
    """What the rows of every block's self-attention look like in one forward pass."""

    METRICS = (
        "attention_entropy",
        "attention_entropy_min",
        "attention_entropy_se",
        "importance_entropy",
        "sink_share",
        "max_attention_logit",
        "positions_attended",
    )

    TAKES_ROWS = True

    def __init__(self, blocks: list[Block], depth: int, packing: Packing, calls: Calls, rows: Rows) -> None:
        self._rows = rows
        super().__init__(blocks, depth, packing, calls)

    def forget(self) -> None:
        super().forget()
        self._sums = Deferred(_row_sums)
        self._rows_of: dict[Size, Chosen] = {}
        self._chosen = ""
        self._unknown_heads = set[int]()
        """Blocks in which the order of samples and heads is not known."""
        self._num_single = 0
        """Blocks in which each sequence has one key."""

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        if not scores.are_heads_known:
            self._unknown_heads.add(block.number)
        batch, _, queries, keys = scores.size
        sequences = self.sequences(block, scores)
        valid_BT = sequences.valid_BT
        if scores.are_heads_known and self.own.of("attention", "queries", "keys"):
            self._see_own(block, scores, _explicit(valid_BT, scores))
        if not self.wanted:
            return True
        if (chosen := self._rows_of.get(scores.size)) is None:
            chosen = self._rows_of[scores.size] = choose(scores.size, self._rows, scores.device)
        self._num_single += keys == 1
        self._chosen = f"{len(chosen.rows)} of {queries} query rows per head, {chosen.num_samples} of {batch} sequences"
        sums = weigh(scores, chosen, sequences)
        if "max_attention_logit" in self.wanted and len(chosen.rows) < queries:
            sums = sums._replace(highest_BH=highest(scores, chosen.num_samples, _explicit(valid_BT, scores)))
        self._sums.put(block.number, sums, (chosen, keys, sequences), key=(scores.size, id(sequences)))
        return True

    def drop(self, block: Block) -> None:
        super().drop(block)
        self._sums.drop(block.number)

    def collect(self) -> Partials:
        return self._sums.collect(self._depth)

    def _see_own(self, block: Block, scores: Scores, valid_BT: Tensor) -> None:
        if self.own.of("attention"):
            chosen = choose(scores.size, MAX_ROWS if self._rows == "all" else self._rows, scores.device)
            scores_BHRS, visible_BHRS = scores.of(slice(0, chosen.num_samples)).at(chosen.rows)
            found, _ = softmaxed(scores_BHRS, visible_BHRS)
            sees_BHR = visible_BHRS.any(dim=-1).expand(scores_BHRS.shape[:-1])
            weights_BHRS = torch.where(sees_BHR[..., None], found.weights / found.total[..., None], 0.0)
            valid_BR = valid_BT[: chosen.num_samples].index_select(1, chosen.rows) & sees_BHR.any(dim=1)
            self.own.see("attention", block.number, weights_BHRS, valid_BR)
        if self.own.of("queries", "keys") and (factors := scores.factors) is not None:
            query_BHTK, key_BGSK = factors
            self.own.see("queries", block.number, *with_padding(query_BHTK, valid_BT))
            is_self = key_BGSK.shape[2] == valid_BT.shape[1]
            self.own.see("keys", block.number, *with_padding(key_BGSK, valid_BT if is_self else None))

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        reason = f"in {self._num_single} of {len(self._blocks)} blocks sequences have one token, which has no choice"
        undefined = [name for name in self.METRICS if name not in ("max_attention_logit", "positions_attended")]
        found = dict.fromkeys(undefined if self._num_single else (), reason)
        if self._unknown_heads:
            why = f"in {len(self._unknown_heads)} of {len(self._blocks)} blocks {UNKNOWN_HEADS}"
            found |= dict.fromkeys(OF_HEADS, why)
        return found | super().why_missing(why_unseen)

    def why_not_own(self, where: Where, why_unseen: str) -> str:
        if self._unknown_heads:
            return UNKNOWN_HEADS
        if where in ("queries", "keys") and len(self._seen) == len(self._blocks):
            return "the model computes scores by itself, from queries and keys that tsemon does not see"
        return super().why_not_own(where, why_unseen)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "attention_entropy" not in sums:
            return Reading()
        layers, heads = row_metrics(sums)
        for number in self._unknown_heads:
            for value in (*heads.values(), *(layers[name] for name in OF_HEADS)):
                value[number] = torch.nan
        return Reading(dict(layers), dict(heads))

    def how(self) -> str:
        return f"in {len(self._sums)} of {len(self._blocks)} blocks, {self._chosen}" if self._chosen else ""


def _row_sums(fields: tuple[Tensor, ...], how: tuple[Chosen, int, Sequences]) -> Partials:
    return row_sums(Sums(*fields), *how)


def _explicit(valid_BT: Tensor | None, scores: Scores) -> Tensor:
    shape = scores.size.batch, scores.size.queries
    return torch.ones(shape, dtype=torch.bool, device=scores.device) if valid_BT is None else valid_BT

"""How attention is spread: weighed on a few evenly spread query rows of every block, or on all of them.

Axes: B samples, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.rows import MAX_ROWS, Rows, choose, row_metrics, row_sums, softmaxed, weigh
from tsemon.measures.scores import Scores
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding
from tsemon.probes.quantities import with_padding
from tsemon.probes.reading import Reading
from tsemon.probes.tap import AttentionPart, Seen
from tsemon.quantity import Where


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

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls, rows: Rows) -> None:
        self._rows = rows
        super().__init__(blocks, depth, padding, calls)

    def forget(self) -> None:
        super().forget()
        self._chosen = ""

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        batch, _, queries, keys = scores.size
        valid_BT = self._padding.valid(block.stack, batch, queries)
        if valid_BT is None:
            valid_BT = torch.ones(batch, queries, dtype=torch.bool, device=scores.device)
        first_B, num_keys_B = _tokens(scores, self._padding.valid(block.stack, batch, keys))
        self._see_own(block, scores, valid_BT)
        if not self.wanted:
            return True
        chosen = choose(scores.size, self._rows, scores.device)
        self._chosen = f"{len(chosen.rows)} of {queries} query rows per head, {chosen.num_samples} of {batch} sequences"
        sums = weigh(scores, chosen, valid_BT, first_B)
        self._of_layers[block.number] = row_sums(sums, num_keys_B, chosen)
        return True

    def _see_own(self, block: Block, scores: Scores, valid_BT: Tensor) -> None:
        batch, _, _, keys = scores.size
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
            self.own.see("keys", block.number, *with_padding(key_BGSK, self._padding.valid(block.stack, batch, keys)))

    def why_not_own(self, where: Where, why_unseen: str) -> str:
        if where in ("queries", "keys") and self._seen:
            return "the model computes scores by itself, from queries and keys that tsemon does not see"
        return super().why_not_own(where, why_unseen)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "attention_entropy" not in sums:
            return Reading()
        layers, heads = row_metrics(sums)
        return Reading(dict(layers), dict(heads))

    def how(self) -> str:
        return f"in {len(self._of_layers)} of {len(self._blocks)} blocks, {self._chosen}" if self._chosen else ""


def _tokens(scores: Scores, valid_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the first token of each sample is, and how many there are. What may not see itself is taken for padding."""
    batch, _, _, keys = scores.size
    valid_BS = scores.sees_itself() if valid_BS is None else valid_BS
    if valid_BS is None:
        valid_BS = torch.ones(batch, keys, dtype=torch.bool, device=scores.device)
    num_B = valid_BS.sum(dim=-1)
    return valid_BS.byte().argmax(dim=-1), torch.where(num_B > 0, num_B + keys - valid_BS.shape[-1], keys)

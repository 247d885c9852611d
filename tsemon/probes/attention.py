"""How attention is spread: weighed on a few evenly spread query rows of every block, or on all of them.

Axes: L blocks, B samples, H heads, T queries, S keys, R query rows, M moments.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding
from tsemon.probes.part import Partial, Reading, counted, mean, stacked
from tsemon.probes.rows import MAX_ROWS, Rows, Sums, choose, weigh
from tsemon.probes.scores import Scores
from tsemon.probes.tap import AttentionPart, Seen

PER_HEAD = ("attention_entropy", "sink_share", "positions_attended")
MOMENTS = "moments"
"""Of the entropies of the weighed rows: number, sum, sum of squares, and the number of all rows that they stand for."""


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

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, rows: Rows = MAX_ROWS) -> None:
        super().__init__(blocks, depth, padding)
        self._rows = rows
        self._sums: dict[int, dict[str, Tensor]] = {}

    def forget(self) -> None:
        super().forget()
        self._sums = {}

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        batch, _, queries, keys = scores.size
        valid_BT = self._padding.valid(block.stack, batch, queries)
        first_B, num_keys_B = _tokens(scores, self._padding.valid(block.stack, batch, keys))
        chosen = choose(scores.size, self._rows, scores.device)
        sums = weigh(scores, chosen, valid_BT, first_B)
        self._sums[block.number] = _of_samples(sums, num_keys_B[: chosen.num_samples], chosen.share)
        return True

    def collect(self) -> dict[str, Partial]:
        found: dict[str, Partial] = {}
        for name in {name for sums in self._sums.values() for name in sums}:
            values = (self._sums.get(layer, {}).get(name) for layer in range(self._depth))
            is_max = name == "max_attention_logit"
            found[name] = Partial(stacked(values, -torch.inf), "max") if is_max else Partial(stacked(values))
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "attention_entropy" not in sums:
            return Reading()
        heads = {name: mean(sums, name) for name in PER_HEAD}
        heads["max_attention_logit"] = _known(sums["max_attention_logit"])
        layers = {name: value_LH.nanmean(dim=-1) for name, value_LH in heads.items()}
        layers["max_attention_logit"] = _known(sums["max_attention_logit"].amax(dim=-1))
        entropy_LH = heads["attention_entropy"]
        layers["attention_entropy_min"] = _known(torch.where(entropy_LH.isnan(), torch.inf, entropy_LH).amin(dim=-1))
        layers["attention_entropy_se"] = _standard_error(sums[MOMENTS])
        layers["importance_entropy"] = mean(sums, "importance_entropy")
        return Reading(dict(layers), dict(heads))


def _tokens(scores: Scores, valid_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the first token of each sample is, and how many there are. What may not see itself is taken for padding."""
    batch, _, _, keys = scores.size
    valid_BS = scores.sees_itself() if valid_BS is None else valid_BS
    if valid_BS is None:
        valid_BS = torch.ones(batch, keys, dtype=torch.bool, device=scores.device)
    num_B = valid_BS.sum(dim=-1)
    return valid_BS.byte().argmax(dim=-1), torch.where(num_B > 0, num_B + keys - valid_BS.shape[-1], keys)


def _of_samples(sums: Sums, num_keys_B: Tensor, share: float) -> dict[str, Tensor]:
    """Sums over samples of each sample's mean over rows."""
    received_BS = sums.received_BS / sums.received_BS.sum(dim=-1, keepdim=True)
    importance_B = torch.special.entr(received_BS).sum(dim=-1) / num_keys_B.to(received_BS.dtype).log()
    is_known_B1 = sums.moments_BM.isfinite().all(dim=-1, keepdim=True)
    moments_M = torch.where(is_known_B1, sums.moments_BM, 0.0).sum(dim=0)
    return {
        **counted("attention_entropy", sums.entropy_BH / sums.choices_BH),
        **counted("sink_share", sums.sink_BH / sums.others_BH),
        **counted("positions_attended", sums.attended_BH / sums.rows_BH),
        **counted("importance_entropy", importance_B),
        "max_attention_logit": sums.highest_BH.amax(dim=0),
        MOMENTS: torch.cat([moments_M, moments_M[:1] / share]),
    }


def _standard_error(moments_LM: Tensor) -> Tensor:
    """sd / sqrt(n) * sqrt(1 - n / N) of n rows that stand for N."""
    num_L, sum_L, squares_L, all_L = moments_LM.unbind(dim=-1)
    variance_L = (squares_L - sum_L.square() / num_L).clamp_min(0) / (num_L - 1)
    error_L = (variance_L / num_L * (1 - num_L / all_L)).sqrt()
    return torch.where((num_L > 0) & (num_L == all_L), 0.0, error_L).float()


def _known(value: Tensor) -> Tensor:
    """NaN where nothing was found that could be the largest or the smallest."""
    return torch.where(value.isinf(), torch.nan, value)

"""How attention is spread: weighed on a few evenly spread query rows of every block, or on all of them.

Axes: L blocks, B samples, H heads, T queries, S keys, M moments.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.rows import Chosen, Rows, Sums, choose, weigh
from tsemon.measures.scores import Scores
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding
from tsemon.probes.part import Partial, Reading, counted, mean, stacked
from tsemon.probes.tap import AttentionPart, Seen

PER_HEAD = ("attention_entropy", "sink_share", "positions_attended")
SPREAD = "spread"
"""Of the rows' entropies: what `_spread` gives, of which their standard error is made."""


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
        super().__init__(blocks, depth, padding, calls)
        self._rows = rows
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._chosen = ""

    def forget(self) -> None:
        super().forget()
        self._sums, self._chosen = {}, ""

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        batch, _, queries, keys = scores.size
        valid_BT = self._padding.valid(block.stack, batch, queries)
        if valid_BT is None:
            valid_BT = torch.ones(batch, queries, dtype=torch.bool, device=scores.device)
        first_B, num_keys_B = _tokens(scores, self._padding.valid(block.stack, batch, keys))
        chosen = choose(scores.size, self._rows, scores.device)
        self._chosen = f"{len(chosen.rows)} of {queries} query rows per head, {chosen.num_samples} of {batch} sequences"
        sums = weigh(scores, chosen, valid_BT, first_B)
        self._sums[block.number] = _of_samples(sums, num_keys_B, chosen)
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
        layers["attention_entropy_se"] = _standard_error(sums[SPREAD])
        layers["importance_entropy"] = mean(sums, "importance_entropy")
        return Reading(dict(layers), dict(heads))

    def how(self) -> str:
        return f"in {len(self._sums)} of {len(self._blocks)} blocks, {self._chosen}" if self._chosen else ""


def _tokens(scores: Scores, valid_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the first token of each sample is, and how many there are. What may not see itself is taken for padding."""
    batch, _, _, keys = scores.size
    valid_BS = scores.sees_itself() if valid_BS is None else valid_BS
    if valid_BS is None:
        valid_BS = torch.ones(batch, keys, dtype=torch.bool, device=scores.device)
    num_B = valid_BS.sum(dim=-1)
    return valid_BS.byte().argmax(dim=-1), torch.where(num_B > 0, num_B + keys - valid_BS.shape[-1], keys)


def _of_samples(sums: Sums, num_keys_B: Tensor, chosen: Chosen) -> dict[str, Tensor]:
    """Sums over samples of each sample's mean over rows."""
    received_BS = sums.received_BS / sums.received_BS.sum(dim=-1, keepdim=True)
    largest_B = num_keys_B[: chosen.num_samples].to(received_BS.dtype).log()
    return {
        **counted("attention_entropy", sums.entropy_BH / sums.choices_BH),
        **counted("sink_share", sums.sink_BH / sums.others_BH),
        **counted("positions_attended", sums.attended_BH / sums.rows_BH),
        **counted("importance_entropy", torch.special.entr(received_BS).sum(dim=-1) / largest_B),
        "max_attention_logit": sums.highest_BH.amax(dim=0),
        SPREAD: _spread(sums.moments_BM, chosen),
    }


def _spread(moments_BM: Tensor, chosen: Chosen) -> Tensor:
    """Sums over samples: samples, all samples, rows, all rows of these samples; the means, their squares, and the squared
    distances of rows from their sample's mean."""
    num_B, sum_B, squares_B = moments_BM.unbind(dim=-1)
    mean_B = sum_B / num_B
    within_B = (squares_B - sum_B * mean_B).clamp_min(0)
    one_B = torch.ones_like(num_B)
    each_B = [one_B, one_B / chosen.samples_share, num_B, num_B / chosen.rows_share, mean_B, mean_B.square(), within_B]
    return torch.where(mean_B.isfinite(), torch.stack(each_B), 0.0).sum(dim=-1)


def _standard_error(spread_LM: Tensor) -> Tensor:
    """Of a mean over some rows of some samples, which is off by the choice of the samples and by that of the rows.

    se^2 = (1 - b/B) s_b^2 / b + b/B (1 - n/N) s_w^2 / n     (two-stage sampling: Cochran, Sampling Techniques, Ch. 10)

    for b of B samples, n of their N rows, s_b^2 the variance of samples' means and s_w^2 that of rows within a sample. Of
    one sample of many s_b is not known: then samples are taken to differ by what a mean of so many rows does.
    """
    b_L, all_samples_L, n_L, all_rows_L, mean_L, squares_L, within_L = spread_LM.unbind(dim=-1)
    of_rows_L = within_L / (n_L - b_L) / n_L
    of_samples_L = (squares_L - mean_L.square() / b_L).clamp_min(0) / (b_L - 1) / b_L
    of_samples_L = torch.where(b_L > 1, of_samples_L, of_rows_L)
    is_part_L, share_L = b_L < all_samples_L, b_L / all_samples_L
    squared_L = torch.where(is_part_L, (1 - share_L) * of_samples_L, 0.0)
    squared_L = squared_L + torch.where(n_L < all_rows_L, share_L * (1 - n_L / all_rows_L) * of_rows_L, 0.0)
    return torch.where(b_L > 0, squared_L.sqrt(), torch.nan).float()


def _known(value: Tensor) -> Tensor:
    """NaN where nothing was found that could be the largest or the smallest."""
    return torch.where(value.isinf(), torch.nan, value)

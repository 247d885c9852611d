"""How fast attention alone would mix the tokens of one sequence. Axes: B samples, T tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.mixing import Chunks, gaps, spectrum
from tsemon.probes.discovery import Block
from tsemon.probes.reading import OnHost, Reading, stacked
from tsemon.probes.tap import AttentionPart, Seen


class MixingProbe(AttentionPart):
    """The spectral gap of every block's self-attention in the first sequence of one forward pass."""

    METRICS = ("spectral_gap",)

    def forget(self) -> None:
        super().forget()
        self._spectra: dict[int, Tensor] = {}

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        valid_BT = self._padding.valid(block.stack, scores.size.batch, scores.size.keys)
        valid_BT = scores.sees_itself() if valid_BT is None else valid_BT
        if valid_BT is None:
            valid_BT = torch.ones(1, scores.size.keys, dtype=torch.bool, device=scores.device)
        if scores.size.queries == scores.size.keys:
            self._spectra[block.number] = spectrum(Chunks(scores.of(slice(0, 1)), valid_BT[0]))
        return True

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if not self._spectra:
            return Reading()
        spectra = stacked((self._spectra.get(layer) for layer in range(self._depth)), torch.nan)
        return Reading({"spectral_gap": OnHost(spectra, gaps)})

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

    def drop(self, block: Block) -> None:
        super().drop(block)
        self._spectra.pop(block.number, None)

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        if scores.size.queries == scores.size.keys:
            valid_T = self.sequences(block, scores).of_first()
            if valid_T is None:
                valid_T = torch.ones(scores.size.keys, dtype=torch.bool, device=scores.device)
            self._spectra[block.number] = spectrum(Chunks(scores.of(slice(0, 1)), valid_T))
        return True

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if differ := len(self._seen - self._spectra.keys()):
            why = (
                f"{differ} of {len(self._blocks)} blocks have queries and keys of different numbers, so no eigenvalues"
            )
            return {"spectral_gap": why} | super().why_missing(why_unseen)
        return super().why_missing(why_unseen)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if not self._spectra:
            return Reading()
        spectra = stacked((self._spectra.get(layer) for layer in range(self._depth)), torch.nan)
        return Reading({"spectral_gap": OnHost(spectra, gaps)})

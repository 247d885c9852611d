"""Sums over the parameters of each group: the blocks, and the ends that `groups` names.

One tensor of each kind holds the sums of all groups, so the number of kernels does not grow with the number of blocks.

Axes: P parameters, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tsemon.measures.sums import COUNT, Partial, Partials
from tsemon.probes.groups import HEAD, NUM_ENDS, OTHER

ALL_HERE = "/here"
"""Suffix of the name that keeps the fraction of processes with this sum: without one of them it is not the whole."""


class GroupSums:
    """The sums of this process in one step, by kind and group."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self._num_groups, self._device = depth + NUM_ENDS, device
        self._sums_G: dict[str, Tensor] = {}
        self._found: dict[str, set[int]] = {}
        """By kind, the groups in which it was found."""
        self._unknown: dict[str, set[int]] = {}
        """By kind, the groups in which it is NaN."""

    def copy(self) -> GroupSums:
        """Return sums that do not change with these."""
        other = GroupSums(self._num_groups - NUM_ENDS, self._device)
        other._sums_G = {kind: sums_G.clone() for kind, sums_G in self._sums_G.items()}
        other._found = {kind: set(groups) for kind, groups in self._found.items()}
        other._unknown = {kind: set(groups) for kind, groups in self._unknown.items()}
        return other

    def expect(self, *kinds: str) -> None:
        """Announce kinds that may not be found on this process, because other ranks may find them."""
        for kind in kinds:
            self._found.setdefault(kind, set())

    def groups(self, kind: str) -> set[int]:
        """The groups in which it was found."""
        return self._found.get(kind, set())

    def add(self, kind: str, groups: Sequence[int], values_P: Tensor, shares: Sequence[float] = (1.0,)) -> None:
        """Add values of some parameters to the sums of their groups, weighed by their shares, or by one for all."""
        self._found.setdefault(kind, set()).update(groups)
        values_P = values_P.to(self._device, non_blocking=True)
        if len(set(shares)) > 1:
            values_P = values_P * self._here(torch.tensor(shares, dtype=torch.float64))
        elif shares[0] != 1:
            values_P = values_P * shares[0]
        sums_G = self._sums_G.setdefault(kind, self._nothing())
        sums_G.index_add_(0, self._index(groups), values_P)

    def add_nothing(self, kind: str, groups: Iterable[int]) -> None:
        """Add zero to these groups: nothing happened there."""
        self._found.setdefault(kind, set()).update(groups)

    def make_unknown(self, kind: str, groups: Iterable[int]) -> None:
        """NaN for these groups, and for the whole, whatever is added."""
        self._found.setdefault(kind, set()).update(groups)
        self._unknown.setdefault(kind, set()).update(groups)

    def collect(self, share: float) -> Partials:
        """`share`: what this process is of all processes."""
        partials: Partials = {}
        for kind, found in self._found.items():
            sums_G = self._sums_G.get(kind, self._nothing())
            if unknown := self._unknown.get(kind):
                sums_G = sums_G.index_fill(0, self._index(sorted(unknown)), torch.nan)
            is_found = [group in found or group - self._num_groups in found for group in range(self._num_groups)]
            partials[kind] = Partial(sums_G)
            partials[kind + COUNT] = Partial(torch.tensor(is_found, dtype=torch.float64))
            partials[kind + ALL_HERE] = Partial(torch.tensor(share, dtype=torch.float64))
        return partials

    def _nothing(self) -> Tensor:
        return torch.zeros(self._num_groups, dtype=torch.float64, device=self._device)

    def _index(self, groups: Sequence[int]) -> Tensor:
        return self._here(torch.tensor([group % self._num_groups for group in groups]))

    def _here(self, of_host: Tensor) -> Tensor:
        return of_host.to(self._device, non_blocking=True)


class MergedSums:
    """The sums of all processes by kind and group; NaN where nothing was measured, or some process gave none."""

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self._sums = sums

    def __contains__(self, kind: str) -> bool:
        return kind in self._sums

    def __getitem__(self, kind: str) -> Tensor:
        return torch.where(self._is_known(kind), self._sums[kind], torch.nan)

    def blocks(self, kind: str) -> Tensor:
        return self[kind][:-NUM_ENDS]

    def total(self, kind: str) -> Tensor:
        """Over all groups but the embeddings."""
        is_known = self._is_known(kind)
        total = self._sums[kind][:-NUM_ENDS].sum() + self._sums[kind][OTHER] + self._sums[kind][HEAD]
        return torch.where(is_known.any(), total, torch.nan)

    def _is_known(self, kind: str) -> Tensor:
        device = self._sums[kind].device
        is_whole = self._sums[kind + ALL_HERE].to(device, non_blocking=True) > 1 - 1e-6
        return is_whole & (self._sums[kind + COUNT].to(device, non_blocking=True) > 0)

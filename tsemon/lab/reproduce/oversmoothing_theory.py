"""Theorem 3 of Transformer Oversmoothing by iteration: which eigenvalue of I + H (x) A dominates, and what comes of it.

Axes: `N` pairs of attention A and weights H, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from tsemon.lab.reproduce.result import Claim, Table, verdict
from tsemon.measures import dominating_eigenvalue, hfc_lfc

ATTENTION = ("symmetric", "Dirichlet rows", "softmax of normals")
WEIGHTS = ("normal", "sharpening", "smoothing")
WINNERS = ("perron", "lowest", "other", "tie")
DOUBLINGS = 24
"""The update is squared so often: at 2^24 layers a modulus that is larger by 1e-6 of itself, all that
`dominating_eigenvalue` tells apart, has outgrown the others by e^16."""
GONE = 1e-6
"""HFC/LFC below this counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Of N random pairs of A and H: what the eigenvalues foretell, and what comes."""

    kinds: tuple[str, ...]
    hfc_lfc_N: Tensor
    """At 2^24 layers."""
    spectrum_is_real_N: Tensor

    def count(self, kind: str) -> int:
        return Counter(self.kinds)[kind]

    def smoothed(self, *kinds: str) -> int:
        """How many pairs of these kinds lose all that tells their tokens apart."""
        return sum(bool(value < GONE) for name, value in zip(self.kinds, self.hfc_lfc_N, strict=True) if name in kinds)

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(
            kinds=self.kinds + other.kinds,
            hfc_lfc_N=torch.cat([self.hfc_lfc_N, other.hfc_lfc_N]),
            spectrum_is_real_N=torch.cat([self.spectrum_is_real_N, other.spectrum_is_real_N]),
        )


def random_pairs(num: int, *, num_tokens: int = 8, width: int = 8, seed: int = 0) -> Mapping[tuple[str, str], Pairs]:
    """`num` pairs for each kind of A and each kind of H."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for attention in ATTENTION:
        for weights in WEIGHTS:
            a_NTT = random_attention(attention, num, num_tokens, generator)
            h_NDD = random_weights(weights, num, width, generator)
            x_NTD = torch.randn(num, num_tokens, width, generator=generator, dtype=torch.float64)
            winner = dominating_eigenvalue(a_NTT, h_NDD)
            found[attention, weights] = Pairs(
                kinds=tuple(str(kind) for kind in winner.kind),
                hfc_lfc_N=hfc_lfc(in_the_limit(a_NTT, h_NDD, x_NTD)),
                spectrum_is_real_N=winner.spectrum_is_real,
            )
    return found


def random_attention(kind: str, num: int, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Positive matrices whose rows sum to 1, (N, T, T)."""
    if kind == "Dirichlet rows":
        lengths = -torch.rand(num, num_tokens, num_tokens, generator=generator, dtype=torch.float64).log()
        rows: Tensor = torch.nn.functional.normalize(lengths, p=1, dim=2)
        return rows
    scores = 2 * torch.randn(num, num_tokens, num_tokens, generator=generator, dtype=torch.float64)
    if kind == "softmax of normals":
        return scores.softmax(dim=2)
    even = ((scores + scores.mT) / 2).exp()
    scale = torch.ones(num, num_tokens, 1, dtype=torch.float64)
    for _ in range(1000):  # Sinkhorn's iteration: the same factors for rows and columns keep it symmetric
        scale = (scale / (even @ scale)).sqrt()
    return scale * even * scale.mT


def random_weights(kind: str, num: int, width: int, generator: torch.Generator) -> Tensor:
    """H: normal, or V L V^-1 with L uniform in [-1, 0] (sharpening) or [0, 1] (smoothing), as in Section 4. (N, D, D)"""
    basis = torch.randn(num, width, width, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return torch.mul(basis, width**-0.5)
    sign = -1 if kind == "sharpening" else 1
    eigenvalues = sign * torch.rand(num, 1, width, generator=generator, dtype=torch.float64)
    h_NDD: Tensor = (basis * eigenvalues) @ torch.linalg.inv(basis)
    return h_NDD


def in_the_limit(a_NTT: Tensor, h_NDD: Tensor, x_NTD: Tensor) -> Tensor:
    """X after 2^24 layers of X + A X H (Eq. 2), up to its scale."""
    size = x_NTD[0].numel()
    update = torch.eye(size, dtype=x_NTD.dtype) + torch.einsum("nij,nlk->nikjl", a_NTT, h_NDD).reshape(-1, size, size)
    for _ in range(DOUBLINGS):
        update = update @ update
        update = update / update.abs().amax(dim=(1, 2), keepdim=True)
    return (update @ x_NTD.flatten(1)[:, :, None]).view_as(x_NTD)


def claims_of_theory(pairs: Mapping[tuple[str, str], Pairs]) -> Iterator[Claim]:
    every = reduce(add, pairs.values())
    perron, rest = every.count("perron"), every.count("lowest") + every.count("other")
    not_smoothed = rest - every.smoothed("lowest", "other")
    yield Claim(
        paper="HFC/LFC goes to 0 where A's eigenvalue 1 dominates, and not where its smallest does (Theorem 3)",
        seen=f"it goes to 0 in {every.smoothed('perron')} of {perron} pairs of the first type and stays in {not_smoothed} "
        f"of {rest} others",
        agrees=verdict(every.smoothed("perron") == perron, not_smoothed == rest),
    )
    symmetric = reduce(add, (pairs[ATTENTION[0], weights] for weights in WEIGHTS))
    num_complex, num = int((~every.spectrum_is_real_N).sum()), len(every.kinds)
    num_complex_even = int((~symmetric.spectrum_is_real_N).sum())
    yield Claim(
        paper="All eigenvalues of A are real (Proposition 1), so that there are two types of dominating ones (Theorem 1)",
        seen=f"{num_complex} of {num} A have complex ones, {num_complex_even} of {len(symmetric.kinds)} symmetric A; "
        f"in {every.count('other')} pairs the winner is of neither type, in {every.count('tie')} there is a tie",
        agrees=verdict(num_complex == 0, every.count("other") == 0, num_complex_even == 0),
    )
    sharp, smooth = (reduce(add, (pairs[attention, kind] for attention in ATTENTION)) for kind in WEIGHTS[1:])
    even = pairs[ATTENTION[0], "sharpening"]
    yield Claim(
        paper="Eigenvalues of H in (0, 1] let A's eigenvalue 1 dominate, in [-1, 0) the smallest (Corollary 3)",
        seen=f"{smooth.count('perron')} of {len(smooth.kinds)}, and {sharp.count('lowest')} of {len(sharp.kinds)}; of those "
        f"with a symmetric A {even.count('lowest')} of {len(even.kinds)}. HFC/LFC goes to 0 in {smooth.smoothed(*WINNERS)} "
        f"of the former and in {sharp.smoothed(*WINNERS)} of the latter",
        agrees=verdict(smooth.count("perron") == len(smooth.kinds), sharp.count("lowest") == len(sharp.kinds)),
    )


def pair_table(pairs: Mapping[tuple[str, str], Pairs]) -> Table:
    return Table(
        title="Which eigenvalue dominates, and in how many of these pairs HFC/LFC goes to 0",
        columns=(
            "A",
            "H",
            *(f"{kind}: pairs" for kind in WINNERS),
            *(f"{kind}: to 0" for kind in WINNERS),
            "A with complex ones",
        ),
        rows=[
            (
                *key,
                *(of_key.count(kind) for kind in WINNERS),
                *(of_key.smoothed(kind) for kind in WINNERS),
                int((~of_key.spectrum_is_real_N).sum()),
            )
            for key, of_key in pairs.items()
        ],
    )

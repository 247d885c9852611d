"""The sequences of a batch: the tokens of each row without padding, or the documents that are packed into it.

Axes: B rows, T tokens, N tokens of all rows, S documents, D width, H heads, R rows of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tsemon.measures.linear import ratio, unit_of, widened
from tsemon.measures.scores import MASKED, Scores
from tsemon.measures.spectra import token_gram
from tsemon.measures.tokens import TokenStatistics, first_ratio, token_statistics

MAX_DOCUMENTS = 1024
"""Documents of a batch that are measured. How many there are is known to the device alone, so there is a place for each."""
CHECKED_ROWS = 16
"""Rows of attention, evenly spread, in which no token may see another document."""

MAX_BIASES = 2
"""Maximum number of keys that a module adds behind the keys of the tokens."""
OUTGROWN = -1e30
"""Numbers that hide keys whatever the scores are, such as the lowest of float32, are below it."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a batch (B, T)."""

    valid_BT: Tensor | None = None
    """Which tokens count. None: all."""
    documents_BT: Tensor | None = None
    """The document of each token, counted over all rows; -1 for tokens that do not count. None: each row is one sequence."""

    @classmethod
    def of_starts(cls, starts_BT: Tensor, valid_BT: Tensor) -> Sequences:
        """Documents that begin at these tokens, and end where the next one begins."""
        valid_BT = valid_BT.bool()
        is_first_BT = valid_BT & (valid_BT.cumsum(dim=-1) == 1)
        number_N = ((starts_BT & valid_BT) | is_first_BT).flatten().cumsum(dim=0) - 1
        number_BT = number_N.view_as(valid_BT)
        counts_BT = valid_BT & (number_BT < MAX_DOCUMENTS)
        return cls(counts_BT, torch.where(counts_BT, number_BT, -1))

    @classmethod
    def of_documents(cls, documents_BT: Tensor, valid_BT: Tensor | None = None) -> Sequences:
        """Runs of equal numbers among the tokens that count. Tokens with a negative number are in no document."""
        is_any_BT = documents_BT >= 0
        valid_BT = is_any_BT if valid_BT is None else is_any_BT & valid_BT.bool()
        places_BT = torch.arange(documents_BT.shape[-1], device=documents_BT.device)
        last_BT = torch.where(valid_BT, places_BT, 0).cummax(dim=-1).values
        before_BT = documents_BT.gather(-1, torch.nn.functional.pad(last_BT[:, :-1], (1, 0)))
        return _simplified(documents_BT != before_BT, valid_BT)

    @property
    def num_places(self) -> int:
        """How many documents there may be."""
        assert self.documents_BT is not None
        return min(self.documents_BT.numel(), MAX_DOCUMENTS)

    def statistics(self, x_BTD: Tensor) -> TokenStatistics:
        """Statistics of each sequence: (B,), or (S,) with a count of 0 in places without a document."""
        if self.documents_BT is None:
            return token_statistics(x_BTD, self.valid_BT)
        return _statistics(x_BTD, self.documents_BT.flatten(), self.num_places)

    def gram(self, x_BTD: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
        """Gram matrix of the first sequence that counts, over its largest entry; as `spectra.token_gram`."""
        if self.documents_BT is None:
            return token_gram(x_BTD, self.valid_BT, scale, counts)
        first = counts.int().argmax(dim=0, keepdim=True)
        is_first_1N = (self.documents_BT == first).view(1, -1)
        return token_gram(
            x_BTD.reshape(1, -1, x_BTD.shape[-1]), is_first_1N, scale[first], counts.any(dim=0, keepdim=True)
        )

    def as_rows(self, batch: int) -> Sequences:
        """The same for tokens (1, N) that are (B, T) elsewhere. No document is in two rows."""
        valid_BT, documents_BT = (
            None if x_1N is None else x_1N.view(batch, -1) for x_1N in (self.valid_BT, self.documents_BT)
        )
        return Sequences(valid_BT, documents_BT)

    def first_ratio(self, length_BT: Tensor) -> Tensor:
        """Length of each sequence's first vector divided by the mean length of its others. Padding has length 0."""
        if self.documents_BT is None:
            return first_ratio(length_BT, self.valid_BT)
        return _first_ratio(length_BT.flatten(), self.documents_BT.flatten(), self.num_places)

    def of_first(self) -> Tensor | None:
        """Which tokens (T,) of the first row belong to its first sequence. None: all."""
        if self.documents_BT is None:
            return None if self.valid_BT is None else self.valid_BT[0]
        number_T = self.documents_BT[0]
        first = number_T.index_select(0, (number_T >= 0).int().argmax(dim=0, keepdim=True))
        return (number_T >= 0) & (number_T == first)

    def firsts(self) -> Tensor | None:
        """Position (B, T) of the first token of each token's own sequence. None: the beginning of its row."""
        if self.documents_BT is not None:
            return self._places_of_first(self.documents_BT)
        if self.valid_BT is None:
            return None
        return self.valid_BT.int().argmax(dim=-1, keepdim=True).expand_as(self.valid_BT)

    def differ_from(self, other: Sequences) -> Tensor:
        """Whether a token counts in one of them alone, or two tokens are of one sequence in one of them alone."""
        mine, others = self._explicit(other), other._explicit(self)
        assert mine.documents_BT is not None
        assert others.documents_BT is not None
        return (mine.documents_BT != others.documents_BT).any()

    def _explicit(self, other: Sequences) -> Sequences:
        """With a number for each token."""
        if self.documents_BT is not None:
            return self
        valid_BT = self.valid_BT
        if valid_BT is None:
            like = other.valid_BT
            assert like is not None
            valid_BT = torch.ones_like(like, dtype=torch.bool)
        return Sequences.of_starts(torch.zeros_like(valid_BT, dtype=torch.bool), valid_BT)

    def _places_of_first(self, documents_BT: Tensor) -> Tensor:
        tokens = documents_BT.shape[-1]
        places_BT = torch.arange(tokens, device=documents_BT.device).expand_as(documents_BT)
        before_BT = torch.nn.functional.pad(documents_BT[:, :-1], (1, 0), value=-2)
        starts_BT = torch.where(documents_BT != before_BT, places_BT, 0)
        return starts_BT.cummax(dim=-1).values


ROWS = Sequences()
"""Each row is a sequence, and all of its tokens count."""


def _index(documents_N: Tensor, places: int) -> Tensor:
    """The place of each token's document; one more for tokens that do not count."""
    return torch.where(documents_N >= 0, documents_N, places)


def _sum(values_N: Tensor, index_N: Tensor, places: int) -> Tensor:
    return values_N.new_zeros(places + 1, *values_N.shape[1:]).index_add_(0, index_N, values_N)


def _firsts(documents_N: Tensor, places: int) -> Tensor:
    """Position of the first token of each document, and of the last token for places without a document."""
    places_N = torch.arange(len(documents_N), device=documents_N.device)
    last = places_N.new_full((places + 1,), len(documents_N) - 1)
    return last.scatter_reduce(0, _index(documents_N, places), places_N, "amin")


def _statistics(x_BTD: Tensor, documents_N: Tensor, places: int) -> TokenStatistics:
    """`token_statistics` of each document, by sums over its tokens."""
    x_ND, index_N = widened(x_BTD).flatten(0, 1), _index(documents_N, places)
    x_ND = torch.where((documents_N >= 0)[:, None], x_ND, 0.0)
    largest_N = torch.maximum(x_ND.amax(dim=-1), -x_ND.amin(dim=-1))
    largest_S = largest_N.new_zeros(places + 1).scatter_reduce(
        0, index_N, torch.where(largest_N.isnan(), torch.inf, largest_N), "amax"
    )
    unit_S = unit_of(largest_S)
    x_ND = x_ND / unit_S[index_N, None]
    count_S = _sum(torch.ones_like(largest_N), index_N, places)
    # As in `linear.centred`, from differences to the first token: tokens that agree leave exactly nothing.
    own_ND = x_ND - x_ND[_firsts(documents_N, places)][index_N]
    own_ND -= (_sum(own_ND, index_N, places) / count_S[:, None])[index_N]
    mean_SD = _sum(x_ND, index_N, places) / count_S[:, None]
    length_N = torch.linalg.vector_norm(x_ND, dim=-1)
    unit_mean_SD = _sum(x_ND / length_N[:, None], index_N, places) / count_S[:, None]
    found = TokenStatistics(
        shared=torch.linalg.vector_norm(mean_SD, dim=-1) * count_S.sqrt(),
        own=_sum(own_ND.square().sum(dim=-1), index_N, places).sqrt(),
        unit_mean=unit_mean_SD.square().sum(dim=-1),
        mean_token=mean_SD,
        count=count_S,
        largest=largest_S,
        unit=unit_S,
        first_ratio=count_S,
    )
    of_documents = {name: getattr(found, name)[:places] for name in TokenStatistics.__slots__}
    return TokenStatistics(**of_documents | {"first_ratio": _first_ratio(length_N, documents_N, places)})


def _first_ratio(length_N: Tensor, documents_N: Tensor, places: int) -> Tensor:
    index_N = _index(documents_N, places)
    first_S = length_N[_firsts(documents_N, places)]
    count_S = _sum(torch.ones_like(length_N), index_N, places)
    others_S = (_sum(length_N, index_N, places) - first_S) / (count_S - 1)
    return torch.where(count_S > 1, ratio(first_S, others_S), torch.nan)[:places]


def seen_by_attention(scores: Scores) -> Sequences | None:
    """Return the sequences that a self-attention's mask leaves, None if it has no mask or its keys are not known.

    A token is padding if no other token sees it, or only padding does; the last token of a causal document sees others. A
    document begins at a token that does not see the last one before it, nor is seen by it. If tokens see other documents, as
    in a sparse pattern, their row is one sequence.
    """
    if scores.documents_BT is not None:
        return Sequences.of_documents(scores.documents_BT)
    batch, _, tokens, _ = scores.size
    if (offset := first_own_key(scores)) is None:
        return None
    own_BT = torch.arange(tokens, device=scores.device).expand(batch, tokens)
    if (itself_BT := scores.sees(own_BT + offset)) is None:
        return None
    valid_BT = _valid(scores, own_BT, itself_BT, offset) if tokens > 1 else itself_BT
    last_BT = torch.where(valid_BT, own_BT, -1).cummax(dim=-1).values
    last_BT = torch.nn.functional.pad(last_BT[:, :-1], (1, 0), value=-1)
    next_BT = torch.where(valid_BT, own_BT, tokens).flip(-1).cummin(dim=-1).values.flip(-1)
    next_BT = torch.nn.functional.pad(next_BT[:, 1:], (0, 1), value=tokens)
    sees_last_BT = _known(scores.sees(last_BT.clamp_min(0) + offset))
    sees_next_BT = _known(scores.sees(next_BT.clamp_max(tokens - 1) + offset))
    joined_BT = (last_BT >= 0) & (sees_last_BT | sees_next_BT.gather(-1, last_BT.clamp_min(0)))
    starts_BT = valid_BT & ~joined_BT & (last_BT >= 0)
    is_crossed_B = crosses(scores, Sequences.of_starts(starts_BT, valid_BT))
    return _simplified(starts_BT & ~is_crossed_B[:, None], valid_BT)


def first_own_key(scores: Scores) -> int | None:
    """The key of the first query's own token: behind a memory, if there are more keys. None if that is not known.

    One or two more keys may be a bias at the end (`nn.MultiheadAttention`).
    """
    more = scores.size.keys - scores.size.queries
    return more if more == 0 or more > MAX_BIASES else None


def _valid(scores: Scores, own_BT: Tensor, itself_BT: Tensor, offset: int) -> Tensor:
    """Which tokens are no padding."""
    tokens = own_BT.shape[-1]

    def sees(distance: int) -> Tensor:
        """Whether each token sees the one at this distance; False if it does not exist."""
        places_BT = own_BT + distance
        is_inside_BT = (places_BT >= 0) & (places_BT < tokens)
        return _known(scores.sees(places_BT.clamp(0, tokens - 1) + offset)) & is_inside_BT

    def shifted(x_BT: Tensor, by: int) -> Tensor:
        """x_BT[:, j + by] at j; False if it does not exist."""
        pad = (0, by) if by > 0 else (-by, 0)
        padded = torch.nn.functional.pad(x_BT, pad)
        return padded[:, by:] if by > 0 else padded[:, :by]

    back_BT, ahead_BT = sees(-1), sees(1)
    is_seen_BT = shifted(back_BT, 1) | shifted(ahead_BT, -1)
    # The last token of a causal document is seen by itself alone. So is padding in a mask that lets each token see itself;
    # but what is behind such padding sees what is before it, or, if the mask is not causal, tokens see the next one.
    is_passed_BT = shifted(sees(-2), 1) | shifted(ahead_BT, -2)
    is_last_BT = itself_BT & back_BT & ~is_passed_BT
    valid_BT = torch.where(is_seen_BT.any(dim=-1, keepdim=True), is_seen_BT | is_last_BT, itself_BT)
    # Queries of padding on the left may be let see everything, lest their softmax be NaN: tokens do not see them.
    has_unseen_behind_BT = _any_from_here(ahead_BT & shifted(itself_BT & ~back_BT, 1))
    is_before_BT = has_unseen_behind_BT & _any_from_here(shifted(back_BT, 1))
    sees_end_BT = _known(scores.sees(torch.full_like(own_BT, tokens - 1 + offset)))
    return valid_BT & ((~(is_before_BT & sees_end_BT)).cumsum(dim=-1) > 0)


def _any_from_here(x_BT: Tensor) -> Tensor:
    return x_BT.flip(-1).cumsum(dim=-1).flip(-1) > 0


def _simplified(starts_BT: Tensor, valid_BT: Tensor) -> Sequences:
    """The sequences that begin there, and at the first token of each row, in as few words as may be said without waiting."""
    if valid_BT.device.type == "cpu" and not starts_BT.any():
        return Sequences(None if valid_BT.all() else valid_BT)
    return Sequences.of_starts(starts_BT, valid_BT)


def _known(sees_BT: Tensor | None) -> Tensor:
    assert sees_BT is not None
    return sees_BT


def crosses(scores: Scores, sequences: Sequences) -> Tensor:
    """Whether a token of each row (B,) sees one of another document; some rows of attention are checked."""
    batch = scores.size.batch
    documents_BT = sequences.documents_BT
    assert documents_BT is not None
    rows = _checked_rows(scores)
    visible_BHRS = scores.at(rows)[1][..., first_own_key(scores) or 0 :]
    of_row_BR = documents_BT.index_select(1, rows)
    differ_BRS = (
        (of_row_BR[:, :, None] != documents_BT[:, None]) & (of_row_BR >= 0)[:, :, None] & (documents_BT >= 0)[:, None]
    )
    return (visible_BHRS.expand(batch, -1, -1, -1).any(dim=1) & differ_BRS).flatten(1).any(dim=-1)


def hides_keys(scores: Scores) -> Tensor:
    """Whether a query cannot see a key; some rows of attention are checked."""
    _, visible_BHRS = scores.at(_checked_rows(scores))
    return ~visible_BHRS.all()


def hides_by_number(scores: Scores) -> Tensor:
    """Whether keys are hidden by a number such as -1e9, which larger scores outgrow; some rows of attention are checked."""
    scores_BHRS, _ = scores.at(_checked_rows(scores))
    return ((scores_BHRS < -MASKED) & (scores_BHRS > OUTGROWN)).any()


def _checked_rows(scores: Scores) -> Tensor:
    num_rows = min(scores.size.queries, CHECKED_ROWS)
    return (torch.arange(num_rows, device=scores.device) * 2 + 1) * scores.size.queries // (2 * num_rows)

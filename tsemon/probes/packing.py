"""Which tokens of a forward pass form one sequence: padding is left out, and documents packed into a row are apart.

The mask of a stack's first attention shows both, regardless of the name of an argument and of its value at padding. If that
attention has no mask, its rows are whole sequences. If it is not seen, arguments of the model with the usual names decide.
Functions that the user gave take precedence.

Axes: B rows, T tokens, N tokens of all rows.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.measures.scores import Scores
from tsemon.measures.sequences import (
    MAX_DOCUMENTS,
    ROWS,
    Sequences,
    crosses,
    first_own_key,
    hides_by_number,
    hides_keys,
    seen_by_attention,
)
from tsemon.probes.discovery import Block
from tsemon.probes.naming import words
from tsemon.probes.part import SINGLE_TOKEN
from tsemon.probes.quantities import Harmless

OfInputs = Callable[..., Tensor]
"""A function of the model's inputs: True at tokens (B, T), or the number of each token's document."""

PADDING = {"attention_mask": 1, "src_key_padding_mask": 0, "padding_mask": 0, "key_padding_mask": 0}
"""Names of masks (B, T) of padding, and the value that they have at tokens by convention."""
OF_DECODER = {"decoder_attention_mask": 1, "tgt_key_padding_mask": 0}
POSITIONS = ("position_ids", "positions", "pos_ids", "input_pos")
"""Names of positions (B, T) or (T), which restart with each document."""
BOUNDARIES = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seq_q", "cu_doc_lens")
"""Names of where documents begin, and the last one ends, among the tokens of all rows."""


HIDDEN_KEYS = "the keys that attention hides"
OF_SEVERAL_TOKENS = (
    *("escalation_rate", "attention_escalation_rate", "feedforward_escalation_rate", "norm_escalation_rate"),
    *(f"{step}_hfc_lfc_ratio" for step in ("residual", "feedforward", "norm1", "norm2")),
    *(f"{step}_cosine_change" for step in ("residual", "feedforward", "norm1", "norm2")),
    *("first_value_norm_ratio", "spectral_gap"),
)
"""Metrics that are undefined for sequences of one token."""
ONE_TOKEN = "the batch has one token, and no other to compare it with"


class _Found(NamedTuple):
    sequences: Sequences
    why: str


class _Attention(NamedTuple):
    """The first attention of a stack."""

    block: Block
    size: torch.Size
    """Batch and queries."""
    sequences: Sequences | None
    """None if it has no mask, or one that does not say it."""
    hides_keys: Tensor | None
    """Whether it hides keys, if these are not the tokens of the queries."""


class Verdict(NamedTuple):
    """Problems of a pass, by stack."""

    why_not: dict[int, str]
    doubts: dict[int, Tensor]
    """Only the device knows whether the values are wrong."""
    undefined: Mapping[str, str] = {}
    """Metric to the reason why it has no value on sequences of this size."""


class _Padding(NamedTuple):
    name: str
    valid_BT: Tensor
    is_unclear: Tensor
    """Whether nothing shows which value stands for padding."""


class Packing:
    """The sequences of the current forward pass."""

    def __init__(
        self, blocks: Sequence[Block], padding: OfInputs | None = None, documents: OfInputs | None = None
    ) -> None:
        self._stacks = {block.stack for block in blocks}
        self._given = {"padding": padding, "documents": documents}
        first = {block.stack: block for block in reversed(blocks)}
        self._first = {stack: block for stack, block in first.items() if block.attention is not None}
        """The first block of each stack, if it has attention: later attention comes too late."""
        self._chunks: dict[str, int] = {}
        """Stack by warning about chunks. The warning may not be confirmed yet."""
        self._chunked = set[int]()
        """Stacks whose first attention works on chunks, so its mask does not show documents."""
        self._inputs: dict[str, Tensor] = {}
        self._results: dict[str, Tensor | str] = {}
        """Results of the functions that were given, or the reason why a result is unusable."""
        self.disagreements: dict[str, Tensor] = {}
        """A text for each two sources, and whether they disagree in this pass: only the device knows."""
        self.doubts: dict[int, Tensor] = {}
        """By stack, whether the pass was measured with wrong sequences."""
        self.begin()

    def begin(self) -> None:
        """A forward pass begins that is measured."""
        self._by_attention: dict[int, _Attention] = {}
        self.outgrown: dict[int, Tensor] = {}
        """By stack, whether its mask loses its effect if the parameters are scaled up."""
        self._in_parts = set[int]()
        """Stacks whose first attention took several calls."""
        self._tokens: dict[int, tuple[int, bool]] = {}
        """Number of tokens of the newest state of each stack, and whether they are a grid."""
        self._compared = set[int]()
        """Blocks whose attention was compared with the attention of the first block."""
        self._unusable: dict[str, str] = {}
        """By name of a given function: an error in the shape of its result."""
        self._used = set[str]()
        """Names of the given functions whose result had the right shape for some stack."""
        self._over: dict[int, Any] = {}
        self._decided: dict[tuple[int, int, int], _Found] = {}
        self._why_not: dict[int, str] = {}
        self.disagreements, self.doubts = {}, {}

    def forget_inputs(self) -> None:
        self._inputs, self._results = {}, {}

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the arguments of a module around the blocks. An inner module's arguments replace an outer's."""
        self.read_names(module, args, kwargs)
        for name, function in self._given.items():
            if function is not None and name not in self._results:
                self._results[name] = _called(name, function, args, kwargs)

    def read_names(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same for a block, without the functions that were given, which take the inputs of the model."""
        given = dict(zip(_names_of_arguments(type(module).forward), args, strict=False)) | kwargs
        self._inputs |= dict(_named(given))

    def waits_for_attention(self, block: Block) -> bool:
        """Whether the block's own attention is to say it, and has not yet."""
        return self._first.get(block.stack) is block and block.stack not in self._by_attention | self._over

    def settle(self, block: Block) -> None:
        """The block has run: if its attention was not seen, nothing is to be waited for."""
        self._over[block.stack] = None

    def meet_state(self, block: Block, x: Tensor) -> None:
        """The state that goes into a block."""
        width = block.width if block.width in x.shape else x.shape[-1]
        self._tokens[block.stack] = x.numel() // max(width or 1, 1), x.ndim == 4

    def num_tokens(self, block: Block) -> int:
        """Tokens of all rows of the newest state of its stack; 0 if none was seen."""
        return self._tokens.get(block.stack, (0, False))[0]

    def why_odd(self, block: Block, scores: Scores) -> str:
        """Why the rows of this attention are not the tokens of the block's state, each once per head; empty if they are."""
        size = scores.size
        tokens, is_grid = self._tokens.get(block.stack, (0, False))
        num_rows = size.batch * size.queries
        if not tokens or num_rows % tokens == 0 or (is_grid and num_rows > tokens):  # windows of a grid are filled up
            return ""
        return (
            f"the rows of its attention, {size.queries} in each of {size.batch}, are not the {tokens} tokens of the hidden "
            "state"
        )

    def has_decided(self, stack: int, batch: int, tokens: int) -> bool:
        """Whether states of the stack are (B, T, ...)."""
        return (stack, batch, tokens) in self._decided

    def meet_attention(self, block: Block, made: Callable[[], Scores]) -> None:
        """An attention that is seen in the pass. The first of a stack counts, others may show that it sees chunks."""
        first = self._by_attention.get(block.stack)
        if first is None:
            self._meet_first(block, made())
        elif self.compares(block) and block.number not in self._compared and block.number != first.block.number:
            self._compared.add(block.number)
            self._compare(block, first, made())

    def compares(self, block: Block) -> bool:
        """Whether later attention of the stack is to be compared with the first."""
        first = self._by_attention.get(block.stack)
        is_packed = first is not None and first.sequences is not None and first.sequences.documents_BT is not None
        return is_packed and block.stack not in self._chunked and not any(self._given.values())

    def meet_again(self, block: Block) -> None:
        """An attention took another call."""
        first = self._by_attention.get(block.stack)
        if first is not None and first.block.number == block.number:
            self._in_parts.add(block.stack)

    def _meet_first(self, block: Block, scores: Scores) -> None:
        size, seen = torch.Size((scores.size.batch, scores.size.queries)), seen_by_attention(scores)
        hides = hides_keys(scores) if first_own_key(scores) is None else None
        self._by_attention[block.stack] = _Attention(block, size, seen, hides)
        self.outgrown[block.stack] = hides_by_number(scores)
        if seen is None or any(self._given.values()):
            return
        for (stack, batch, tokens), (decided, _) in self._decided.items():
            is_of_same = stack == block.stack and size == (batch, tokens)
            if is_of_same and (seen.valid_BT is not None or decided.valid_BT is not None):
                text = (
                    f"the attention of {block.name} is the first that was seen, and {HIDDEN_KEYS} came too late for the "
                    "blocks before it. Give attach(..., padding=...) or documents=..."
                )
                self._doubt(stack, decided.differ_from(seen), text)

    def _compare(self, block: Block, first: _Attention, scores: Scores) -> None:
        size = torch.Size((scores.size.batch, scores.size.queries))
        if size != first.size or first_own_key(scores) is None or first.sequences is None:
            return
        text = (
            f"attention of {block.name} sees tokens of several documents that the mask of {first.block.name} shows, so they "
            "are chunks of one sequence. From the next sample on, rows are measured as one sequence"
        )
        is_crossed = crosses(scores, first.sequences).any()
        if is_crossed.device.type != "cpu" or is_crossed.item():
            self._chunks[text] = block.stack
        if is_crossed.device.type == "cpu" and is_crossed.item():
            self._chunked.add(block.stack)
        self._doubt(block.stack, is_crossed, text)

    def confirm(self, text: str) -> None:
        """The host has read that a text of `disagreements` is true."""
        if (stack := self._chunks.get(text)) is not None:
            self._chunked.add(stack)

    def _doubt(self, stack: int, is_wrong: Tensor, text: str) -> None:
        """Values of this stack do not count if `is_wrong`."""
        if is_wrong.device.type == "cpu":
            if is_wrong.item():
                self._why_not.setdefault(stack, text)
            return
        self.disagreements[text] = is_wrong
        self.doubts[stack] = self.doubts[stack] | is_wrong if stack in self.doubts else is_wrong

    def of(self, stack: int, batch: int, tokens: int) -> Sequences | None:
        """The sequences of states (B, T, ...) of this stack; None if that cannot be said."""
        found = self._decided.get((stack, batch, tokens))
        if found is None:
            found = self._decided[stack, batch, tokens] = self._decide(stack, batch, tokens, is_state=True)
        return None if self.why_not(stack) else found.sequences

    def has_met(self, stack: int) -> bool:
        """Whether an attention of the stack was seen in this pass."""
        return stack in self._by_attention

    def of_others(self, stack: int, batch: int, tokens: int) -> Sequences | None:
        """The sequences of what else has these axes, such as queries; None if the states have others, as in windows."""
        found = self._decided.get((stack, batch, tokens)) or self._decide(stack, batch, tokens, is_state=False)
        first = self._by_attention.get(stack)
        is_of_attention = first is not None and first.size == (batch, tokens)
        if found.sequences.valid_BT is None:
            return ROWS if is_of_attention else None
        return found.sequences

    def why_not(self, stack: int) -> str:
        """Why the stack's sequences are not known; empty if they are."""
        unused = (text for name, text in self._unusable.items() if name not in self._used)
        return self._why_not.get(stack) or next(unused, "")

    def verdict(self) -> Verdict:
        """Return the problems of this pass."""
        why_not = {stack: why for stack in self._stacks if (why := self.why_not(stack))}
        return Verdict(why_not, dict(self.doubts), self._undefined())

    def _undefined(self) -> dict[str, str]:
        sizes = {(batch, tokens) for _, batch, tokens in self._decided}
        sizes |= {(batch, tokens) for _, (batch, tokens), *_ in self._by_attention.values()}
        if not sizes or any(tokens > 1 for _, tokens in sizes):
            return {}
        found = dict.fromkeys(OF_SEVERAL_TOKENS, SINGLE_TOKEN)
        return found if any(batch > 1 for batch, _ in sizes) else found | {"dead_units": ONE_TOKEN}

    def restore(self, verdict: Verdict) -> None:
        """Return to the verdict of an earlier pass, after another pass."""
        self._why_not, self.doubts = dict(verdict.why_not), dict(verdict.doubts)
        self._unusable.clear()

    def how(self) -> str:
        return "; ".join(dict.fromkeys(found.why for found in self._decided.values() if found.why))

    def _decide(self, stack: int, batch: int, tokens: int, *, is_state: bool) -> _Found:
        found = self._of_given(stack, batch, tokens, is_state=is_state) or self._of_attention(stack, batch, tokens)
        return found or self._of_inputs(stack, batch, tokens, is_state=is_state)

    def _of_given(self, stack: int, batch: int, tokens: int, *, is_state: bool) -> _Found | None:
        reading = {}
        for name, result in self._results.items():
            if isinstance(result, str):
                self._why_not[stack] = result
                return _Found(ROWS, "")
            if result.numel() == batch * tokens and (shaped := _shaped(result, batch, tokens)) is not None:
                reading[name] = shaped
                self._used.add(name)
            elif is_state:
                shape = tuple(result.shape)
                self._unusable[name] = (
                    f"attach({name}=...) returned a tensor of shape {shape} for {batch} rows of {tokens} tokens"
                )
        first = self._by_attention.get(stack)
        is_shown = len(self._stacks) > 1 and first is not None and first.sequences is not None
        if not reading or is_shown:  # one function cannot say it of several stacks that differ
            return None
        valid_BT = reading.get("padding")
        if (documents_BT := reading.get("documents")) is None:
            assert valid_BT is not None
            return self._checked(stack, batch, tokens, Sequences(valid_BT.bool()), "attach(padding=...)")
        sequences = Sequences.of_documents(documents_BT, valid_BT)
        return self._checked(stack, batch, tokens, sequences, "attach(documents=...)")

    def _checked(self, stack: int, batch: int, tokens: int, sequences: Sequences, source: str) -> _Found:
        """The same; what attention hides may contradict it."""
        first = self._by_attention.get(stack)
        if first is not None and first.size == (batch, tokens):
            seen = first.sequences
            if seen is None and first.hides_keys is None and sequences.documents_BT is not None:
                seen = Sequences(sequences.valid_BT)  # attention without a mask sees all of a row
            if seen is not None and not (seen.valid_BT is None and sequences.valid_BT is None):
                text = (
                    f"{source} and {HIDDEN_KEYS} do not agree on which tokens form a sequence; the former is measured"
                )
                self.disagreements[text] = _without_hidden_singles(sequences, seen).differ_from(seen)
        return _Found(sequences, _in_words(sequences, source) or f"each row is one sequence, from {source}")

    def _of_attention(self, stack: int, batch: int, tokens: int) -> _Found | None:
        first = self._by_attention.get(stack)
        if first is None or first.hides_keys is not None:
            return None
        if batch > 1 and first.size == (1, batch * tokens) and first.sequences is not None:
            first = first._replace(size=torch.Size((batch, tokens)), sequences=first.sequences.as_rows(batch))
        if first.size[1] != tokens or first.size[0] % batch:
            return None
        sequences, padding = first.sequences, self._named_padding(stack, batch, tokens)
        valid_BT = None if padding is None else padding.valid_BT
        if sequences is None:
            for source, documents in self._named_documents(batch, tokens, valid_BT):
                text = (
                    f"{source} restarts within rows, but attention sees all of a row; rows are measured as one sequence"
                )
                self.disagreements[text] = documents.differ_from(Sequences(valid_BT))
            return None
        if stack in self._chunked:
            sequences = Sequences(sequences.valid_BT)
        if first.size[0] != batch:
            sequences, is_mixed = _merged(sequences, batch)
            self._doubt(stack, is_mixed, "the rows of attention are neither head by head nor sample by sample")
        if padding is not None:
            text = f"{padding.name} and {HIDDEN_KEYS} do not agree on which tokens are padding; the latter is measured"
            differ = Sequences(padding.valid_BT).differ_from(Sequences(sequences.valid_BT))
            self.disagreements[text] = differ & ~padding.is_unclear
        return _Found(sequences, _in_words(sequences, HIDDEN_KEYS))

    def _of_inputs(self, stack: int, batch: int, tokens: int, *, is_state: bool) -> _Found:
        first, padding = self._by_attention.get(stack), self._named_padding(stack, batch, tokens)
        valid_BT = None if padding is None else padding.valid_BT
        is_in_parts = first is not None and stack in self._in_parts and first.size != (batch, tokens)
        if first is None or first.hides_keys is not None or is_in_parts:
            for source, sequences in self._named_documents(batch, tokens, valid_BT):
                return _Found(sequences, _in_words(sequences, source))
        if is_state:
            if first is not None and is_in_parts:
                self._why_not[stack] = (
                    f"{type(first.block.attention).__name__} computes attention in several calls, which does not show which "
                    "tokens form a sequence. Give attach(..., documents=...)"
                )
            elif first is not None and first.hides_keys is not None and first.size == (batch, tokens):
                text = "attention hides keys that are not the tokens of its queries. Give attach(..., documents=...)"
                self._doubt(stack, first.hides_keys, text)
            if padding is not None:
                text = f"nothing shows whether 1 or 0 is padding in {padding.name}. Give attach(..., padding=...)"
                self._doubt(stack, padding.is_unclear, text)
            elif first is None:
                self._doubt_other_masks(stack, batch, tokens)
        sequences = Sequences(valid_BT)
        return _Found(sequences, "" if padding is None else _in_words(sequences, padding.name))

    def _doubt_other_masks(self, stack: int, batch: int, tokens: int) -> None:
        """Attention was not seen, so what looks like a mask of tokens may be one of padding."""
        for name, mask in self._inputs.items():
            may_be = mask.dtype == torch.bool or (not mask.is_floating_point() and "mask" in words(name))
            if may_be and tuple(mask.shape) == (batch, tokens):
                is_mixed = mask.bool().any() & ~mask.bool().all()
                text = f"attention was not seen, and {name} may show padding. Give attach(..., padding=...)"
                self._doubt(stack, is_mixed, text)

    def _named_padding(self, stack: int, batch: int, tokens: int) -> _Padding | None:
        names = PADDING | OF_DECODER
        if len(self._stacks) > 1:
            names = OF_DECODER if stack else PADDING
        for name, value in names.items():
            mask = self._inputs.get(name)
            if mask is None or tuple(mask.shape) != (batch, tokens):
                continue
            if mask.is_floating_point() and value == 0:  # 0 at tokens, -inf at padding
                valid_BT = mask >= 0
                return _Padding(name, valid_BT, torch.zeros_like(valid_BT[0, 0]))
            return _Padding(name, *_read_mask(mask.bool()))
        return None

    def _named_documents(self, batch: int, tokens: int, valid_BT: Tensor | None) -> Iterator[tuple[str, Sequences]]:
        for name in BOUNDARIES:
            ends = self._inputs.get(name)
            if ends is not None and ends.ndim == 1:
                num = batch * tokens
                places_BT = torch.arange(num, device=ends.device).view(batch, tokens)
                inside_BT = places_BT < ends[-1]
                starts_N = torch.zeros(num + 1, dtype=torch.bool, device=ends.device)
                starts_BT = starts_N.index_fill(0, ends.long().clamp(0, num), value=True)[:-1].view(batch, tokens)
                yield name, Sequences.of_starts(starts_BT, inside_BT if valid_BT is None else valid_BT & inside_BT)
        for name in POSITIONS:
            positions_BT = _shaped(self._inputs.get(name), batch, tokens)
            if positions_BT is not None:
                starts_BT = torch.zeros_like(positions_BT, dtype=torch.bool)
                starts_BT[:, 1:] = positions_BT[:, 1:] <= positions_BT[:, :-1]
                yield name, Sequences.of_starts(starts_BT, torch.ones_like(starts_BT) if valid_BT is None else valid_BT)


def check_of_inputs(name: str, given: object) -> None:
    """Raises InvalidArgument unless it is a function."""
    if given is not None and not callable(given):
        what = "True at tokens and False at padding" if name == "padding" else "the number of each token's document"
        raise InvalidArgument(
            f"{name} must be a function that gets the model's inputs and returns a tensor (batch, tokens) with {what}, got "
            f"{type(given).__name__}"
        )


@functools.lru_cache(maxsize=1024)
def _names_of_arguments(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]  # the first is self


def _called(name: str, function: OfInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | str:
    try:
        with Harmless(may_wait=True):
            result = function(*args, **kwargs)
    except Exception as error:
        return f"attach({name}=...) raised {type(error).__name__}: {error}"
    if isinstance(result, Tensor) and result.ndim in (1, 2) and not result.is_floating_point():
        return result.detach()
    kind = (
        f"a tensor of {result.dtype} with shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
    )
    return f"attach({name}=...) must return a tensor (batch, tokens) of bool or int, returned {kind}"


def _named(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of up to two axes by name, also inside a batch that is passed as a dict, a dataclass or a named tuple."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _named({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)})
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            yield from _named(value._asdict())
        elif isinstance(value, Tensor) and value.ndim in (1, 2) and not hasattr(value, "to_local"):
            yield name, value


def _shaped(of_tokens: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The same as (B, T), where it is of all tokens or the same for all rows."""
    if of_tokens is None:
        return None
    if of_tokens.numel() == batch * tokens and of_tokens.shape[-1] in (tokens, batch * tokens):
        return of_tokens.reshape(batch, tokens)
    return of_tokens.reshape(1, tokens).expand(batch, tokens) if of_tokens.numel() == tokens else None


def _read_mask(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens count in a mask of padding, and whether nothing shows it.

    The longest row is not padded, so at the side of the padding the mask is not all equal; at the other side it is.
    """
    is_even_left, is_even_right = ((side == side[0]).all() for side in (mask_BT[:, 0], mask_BT[:, -1]))
    at_tokens = torch.where(is_even_left, mask_BT[0, 0], mask_BT[0, -1])
    is_all_equal = (mask_BT == mask_BT[0, 0]).all()
    return (mask_BT == at_tokens) | is_all_equal, (is_even_left == is_even_right) & ~is_all_equal


def _changes(documents_BT: Tensor) -> Tensor:
    """Return True at each token whose number differs from the previous one."""
    changes_BT = torch.zeros_like(documents_BT, dtype=torch.bool)
    changes_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return changes_BT


def _without_hidden_singles(sequences: Sequences, seen: Sequences) -> Sequences:
    """Without documents of one token that a mask does not tell from padding: nothing but the token itself sees it."""
    documents_BT = sequences.documents_BT
    if documents_BT is None or seen.valid_BT is None:
        return sequences
    starts_BT = torch.nn.functional.pad(_changes(documents_BT)[:, 1:], (1, 1), value=True)
    is_single_BT = starts_BT[:, :-1] & starts_BT[:, 1:]
    return Sequences.of_documents(torch.where(is_single_BT & ~seen.valid_BT, -1, documents_BT))


def _merged(sequences: Sequences, batch: int) -> tuple[Sequences, Tensor]:
    """The sequences of one head of each row, for an attention with its heads among the rows, and whether they are unknown.

    All heads of a row agree, which shows whether the rows are (batch, heads) or (heads, batch).
    """
    valid_BT, documents_BT = sequences.valid_BT, sequences.documents_BT
    if valid_BT is None:
        return sequences, torch.zeros((), dtype=torch.bool)
    starts_BT = torch.zeros_like(valid_BT) if documents_BT is None else _changes(documents_BT)
    by_sample, by_head = (
        [x_BT.view(*shape, x_BT.shape[-1]).movedim(axis, 0) for x_BT in (starts_BT, valid_BT)]
        for shape, axis in (((batch, -1), 1), ((-1, batch), 0))
    )
    is_by_sample, is_by_head = (
        torch.stack([(heads_HBT == heads_HBT[:1]).all() for heads_HBT in order]).all() for order in (by_sample, by_head)
    )
    starts_BT, valid_BT = (
        torch.where(is_by_sample, sample_HBT[0], head_HBT[0])
        for sample_HBT, head_HBT in zip(by_sample, by_head, strict=True)
    )
    merged = Sequences(valid_BT) if documents_BT is None else Sequences.of_starts(starts_BT, valid_BT)
    return merged, ~(is_by_sample | is_by_head)


def _in_words(sequences: Sequences, source: str) -> str:
    """Numbers only where they can be read without waiting for a device."""
    valid_BT, documents_BT = sequences.valid_BT, sequences.documents_BT
    if valid_BT is None:
        return ""
    if valid_BT.device.type != "cpu":
        what = "padding" if documents_BT is None else "padding and documents"
        return f"{what} from {source}"
    share = 1 - valid_BT.float().mean().item()
    words = [f"{share:.0%} of tokens are padding"] if share and documents_BT is None else []
    if documents_BT is not None:
        num = int(documents_BT.max()) + 1
        limit = f", the first {MAX_DOCUMENTS} of the batch" if num == MAX_DOCUMENTS else ""
        words.append(f"{num / len(documents_BT):.3g} documents a row{limit}")
        words += [f"{share:.0%} of tokens belong to none"] if share else []
    return f"{', '.join(words)}, from {source}" if words else ""

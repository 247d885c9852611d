"""The bodies that writers send, and how they become frames.

Unknown keys are refused: a misspelt one would otherwise be lost without a word.
"""

# ruff: noqa: RUF012  # pydantic copies the defaults of its fields
from __future__ import annotations

import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    FailFast,
    Field,
    FiniteFloat,
    JsonValue,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from tsemon.catalogue import LAYERED
from tsemon.errors import InvalidFrame
from tsemon.stacks import Stacks
from tsemon.wire import (
    MAX_BLOCK_NAME,
    MAX_BLOCKS,
    MAX_CONFIG_BYTES,
    MAX_FRAMES,
    MAX_NOT_MEASURED,
    MAX_QUANTITIES,
    MAX_REASON,
    MAX_ROWS,
    MAX_SCALARS,
    MAX_STACKS,
    MAX_STEP,
    MAX_TAGS,
    METRIC_NAME,
    NAME,
    Array,
    Frame,
    OnConflict,
    Rows,
    RunState,
)
from tsemon_answers.record import LARGEST
from tsemon_answers.runs import OwnQuantity
from tsemon_server.bodies import WHOLE, Body, first_problem, place_of, shown

MetricName = Annotated[str, Field(pattern=f"^{METRIC_NAME}$", max_length=128)]
Title = Annotated[str, Field(pattern=f"^{NAME}$", max_length=128)]
WriterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$", max_length=64)]
Count = Annotated[int, Field(ge=0, le=MAX_STEP), WHOLE]
NumberOfAttempt = Annotated[int, Field(ge=1, le=LARGEST), WHOLE]
BlockIndex = Annotated[int, Field(ge=0), WHOLE]


def _fit_to_keep(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        text = json.dumps(config, allow_nan=False, ensure_ascii=False)
    except ValueError:  # also of integers of more than 4300 digits
        raise PydanticCustomError("not_finite", "Every number should be finite, as JSON has no others") from None
    if (size_bytes := len(text.encode())) > MAX_CONFIG_BYTES:
        raise PydanticCustomError(
            "too_large",
            "It should take at most {most} bytes as JSON, not {size}",
            {"most": MAX_CONFIG_BYTES, "size": size_bytes},
        )
    return config


Config = Annotated[dict[str, JsonValue], AfterValidator(_fit_to_keep)]
Number = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"] | None


class PackedArray(Body):
    """An array as bytes: 3.5 times smaller and 3.7 times cheaper to read than a list."""

    shape: Annotated[list[Annotated[int, Field(ge=0), WHOLE]], Field(max_length=2)]
    """The lengths of its axes: [layers], or [blocks, heads]."""
    f32: str
    """The values in row-major order as little-endian float32, in base64."""


# Named, because Python 3.11 cannot hash FailFast inside a union.
Row = TypeAliasType("Row", Annotated[list[Number], Field(max_length=MAX_BLOCKS), FailFast()])
PlainArray = TypeAliasType("PlainArray", Annotated[list[Number | Row], Field(max_length=MAX_BLOCKS + 1), FailFast()])
AnyArray = Annotated[
    Annotated[PackedArray, Tag("packed")] | Annotated[PlainArray, Tag("plain")],
    Discriminator(lambda value: "plain" if isinstance(value, list) else "packed"),
]
Reason = Annotated[str, Field(max_length=MAX_REASON)]
Arrays = Annotated[dict[MetricName, AnyArray], Field(max_length=MAX_SCALARS)]


class FrameBody(Body):
    """All that one writer measured at one optimizer step."""

    seq: Count
    """Position in the writer's stream, from 0; with run, attempt and writer it is the frame's identity."""
    step: Count
    """Optimizer steps done before the one that was measured: the first step of a run is 0."""
    time: Annotated[FiniteFloat, Field(ge=0)]
    """When the frame was made, in seconds since 1970, UTC, by the writer's clock."""
    scalars: Annotated[dict[MetricName, Number], Field(max_length=MAX_SCALARS)] = {}
    """Metrics with one number; null is NaN."""
    layers: Arrays = {}
    """Metrics with a value per block. Activations also have one for the input of each stack, before its blocks."""
    heads: Arrays = {}
    """Metrics with a value per head, shape [blocks, heads]."""
    not_measured: Annotated[dict[MetricName, Reason], Field(max_length=MAX_NOT_MEASURED)] | None = None
    """Why metrics are not measured: all of them, where that is known first or has changed; absent, it is as it was."""
    crc: Annotated[int, Field(ge=0, lt=2**32), WHOLE] | None = None
    """CRC-32 of the frame's content, as docs/wire.md defines it. A frame with another CRC-32 is refused."""


Numbers = TypeAliasType("Numbers", Annotated[list[Number], Field(max_length=MAX_ROWS), FailFast()])


class RowsBody(Body):
    """Scalars of steps without a frame: rows of the same names."""

    seq: Count
    """Position of the first row in the writer's stream of rows, from 0. Rows and frames are counted separately."""
    step: Annotated[list[Count], Field(min_length=1, max_length=MAX_ROWS), FailFast()]
    """Optimizer steps before each row."""
    time: Annotated[list[Annotated[FiniteFloat, Field(ge=0)]], Field(max_length=MAX_ROWS), FailFast()]
    """Time of each row, in seconds since 1970, UTC."""
    scalars: Annotated[dict[MetricName, Numbers], Field(min_length=1, max_length=MAX_SCALARS)]
    """By name, a number per row."""

    @model_validator(mode="after")
    def _is_of_one_length(self) -> Self:
        lengths = {len(self.step), len(self.time), *map(len, self.scalars.values())}
        if len(lengths) > 1:
            raise PydanticCustomError(
                "unequal",
                "Steps, times and all scalars should have as many entries, not {lengths}",
                {"lengths": sorted(lengths)},
            )
        return self

    def to_rows(self) -> Rows:
        columns = {name: [_float(value) for value in values] for name, values in self.scalars.items()}
        return Rows(self.seq, self.step, self.time, columns)


def _few_in_all(history: list[RowsBody]) -> list[RowsBody]:
    if (num_rows := sum(len(rows.step) for rows in history)) > MAX_ROWS:
        raise PydanticCustomError(
            "too_many", "A body should have at most {most} rows, not {rows}", {"most": MAX_ROWS, "rows": num_rows}
        )
    return history


History = Annotated[list[RowsBody], Field(max_length=MAX_ROWS), FailFast(), AfterValidator(_few_in_all)]


class FramesBody(Body):
    """Frames of one writer, and its rows of scalars. All of them are stored, or none."""

    writer: WriterName
    """Who sends: one name per process, the same for its whole life."""
    attempt: NumberOfAttempt
    """The attempt, as the reply to the registration named it."""
    frames: Annotated[list[FrameBody], Field(max_length=MAX_FRAMES), FailFast()]  # one problem is told, not a million
    """In any order; frames that are stored already are counted and left alone."""
    history: History = []
    """Scalars of steps without a frame. Rows that are stored already are left alone."""

    def to_frames(self, stacks: Stacks) -> list[Frame]:
        """Hold the frames against the stacks of the model. Raises InvalidFrame."""
        return [to_frame(sent, stacks) for sent in self.frames]

    def to_rows(self) -> list[Rows]:
        return [sent.to_rows() for sent in self.history]


class QuantityBody(OwnQuantity, Body):
    """A metric of the user's own, as charts show it."""

    name: MetricName
    """Its name. If the catalogue has a metric of this name, the catalogue's description is shown."""


class StackBody(Body):
    """Blocks that follow each other."""

    name: Title
    """A short name, such as encoder or decoder; no other stack of the run has it."""
    blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS), WHOLE]
    """Number of blocks."""


def _with_names_of_their_own(stacks: list[StackBody]) -> list[StackBody]:
    if len({stack.name for stack in stacks}) < len(stacks):
        raise PydanticCustomError("twice", "Each stack should have a name of its own")
    return stacks


GivenStacks = Annotated[list[StackBody], Field(max_length=MAX_STACKS), AfterValidator(_with_names_of_their_own)] | None


def stacks_of(num_blocks: int, given: GivenStacks) -> Stacks:
    """The stacks that a body describes."""
    return Stacks.of(num_blocks, [stack.model_dump() for stack in given or ()])


def with_blocks_in_all(given: GivenStacks, num_blocks: int | None) -> GivenStacks:
    """Check that the stacks have this number of blocks in all, unless the number is itself wrong and None."""
    if given and num_blocks is not None and (found := stacks_of(0, given).num_blocks) != num_blocks:
        raise PydanticCustomError(
            "number_of_blocks",
            "Their blocks should add up to the {expected} blocks of the model, not to {found}",
            {"expected": num_blocks, "found": found},
        )
    return given


class Registration(Body):
    """A training process that starts."""

    project: Title = "default"
    """The project that the run belongs to."""
    run: Title
    """The run's name. The same name again is a new attempt of the same run."""
    config: Config | None = None
    """Anything worth keeping with the run; absent, it stays as it was."""
    tags: Annotated[list[Title], Field(max_length=MAX_TAGS)] | None = None
    """Free words for filters; absent, they stay as they were."""
    blocks: Annotated[list[Annotated[str, Field(max_length=MAX_BLOCK_NAME)]], Field(max_length=MAX_BLOCKS)] = []
    """The names of the model's blocks in depth order; their number is the model's depth."""
    stacks: GivenStacks = None
    """The stacks that these blocks form, one after the other; absent, they are one stack."""
    frozen_blocks: Annotated[list[BlockIndex], Field(max_length=MAX_BLOCKS)] = []
    """Indexes of the blocks that are not trained, on purpose: rules do not expect them to move."""
    quantities: Annotated[list[QuantityBody], Field(max_length=MAX_QUANTITIES)] | None = None
    """Metrics of the user's own; absent, they stay as they were."""
    resume_step: Count | None = None
    """The step that this attempt starts at: it hides, and keeps, what earlier attempts wrote from there on."""
    attempt_key: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]*$")] | None = None
    """Any text that names this start. The same key again is the same attempt: a lost reply can be asked for again."""
    on_conflict: OnConflict = "take_over"
    """If a live process sends to a run of this name, `new` opens the run `name (2)`, `take_over` opens another attempt of
    this run, beside the live one, and `refuse` is an error."""

    @field_validator("stacks")
    @classmethod
    def _have_all_blocks(cls, stacks: GivenStacks, info: ValidationInfo) -> GivenStacks:
        return with_blocks_in_all(stacks, len(info.data["blocks"]) if "blocks" in info.data else None)

    @field_validator("frozen_blocks")
    @classmethod
    def _are_blocks(cls, frozen: list[int], info: ValidationInfo) -> list[int]:
        num_blocks = len(info.data.get("blocks", ()))
        if any(index >= num_blocks for index in frozen):
            raise PydanticCustomError("no_such_block", f"Each should be the index of one of the {num_blocks} blocks")
        return sorted({*frozen})


class RunChange(Body):
    """What shall be different about a run; what is absent stays."""

    state: RunState | None = None
    """State of `attempt`."""
    attempt: NumberOfAttempt | None = None
    """Attempt whose state it is; absent for the current one. A run is running as long as one of its attempts is live."""
    tags: Annotated[list[Title], Field(max_length=MAX_TAGS)] | None = None
    """Free words for filters, in place of those there are."""
    config: Config | None = None
    """Anything worth keeping with the run, in place of what there is."""


class Heartbeat(Body):
    """A sign of life from a writer that has nothing to send."""

    writer: WriterName
    """Who it is."""
    attempt: NumberOfAttempt
    """The attempt, as the reply to the registration named it."""
    step: Count
    """The optimizer step that the writer is at, sampled or not: the run's `process_step`."""


def read_frames(raw: bytes | bytearray) -> FramesBody:
    """The body of frames, or InvalidFrame that names the frame and the metric."""
    try:
        return FramesBody.model_validate_json(raw)
    except ValidationError as error:
        raise problem_of(error, raw) from None


def problem_of(error: ValidationError, raw: bytes | bytearray) -> InvalidFrame:
    """The error that names the first problem of a body of frames, or of the header of a packed body."""
    return InvalidFrame(f"{first_problem(error, prefix=_place(error, raw))}; nothing of this body is stored")


def to_frame(sent: FrameBody, stacks: Stacks) -> Frame:
    """The frame with its arrays unpacked and their shapes held against the model's stacks, or InvalidFrame."""
    try:
        layers = dict(_arrays(sent.layers, lambda name, shape: check_layers(name, shape, stacks), "layers"))
        heads = dict(_arrays(sent.heads, lambda _, shape: check_heads(shape, stacks.num_blocks), "heads"))
    except ValueError as error:
        raise InvalidFrame(f"frame seq {sent.seq}, {error}; nothing of this body is stored") from None
    scalars = {name: _float(value) for name, value in sent.scalars.items()}
    return Frame(sent.seq, sent.step, sent.time, scalars, layers, heads, sent.not_measured, sent.crc)


def _arrays(sent: Mapping[str, Any], check: Any, kind: str) -> Iterator[tuple[str, Array]]:
    for name, value in sent.items():
        try:
            array = _packed(value) if isinstance(value, PackedArray) else _plain(value)
            check(name, array.shape)
        except ValueError as error:
            raise ValueError(f"{kind} {name!r}: {error}") from None
        yield name, array


def _packed(sent: PackedArray) -> Array:
    try:
        data = binascii.a2b_base64(sent.f32, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64 of little-endian float32, got text that is not base64 ({error})") from None
    shape = tuple(sent.shape)
    num_values = 1
    for length in shape:
        num_values *= length
    if 4 * num_values != len(data):
        raise ValueError(f"expected {4 * num_values} bytes for shape {list(shape)}, got {len(data)}")
    return Array(shape, data)


def _plain(sent: PlainArray) -> Array:
    rows = [value for value in sent if isinstance(value, list)]
    if not rows:
        return Array.of(_float(value) for value in sent if not isinstance(value, list))
    lengths = {len(row) for row in rows}
    if len(rows) != len(sent) or len(lengths) != 1:
        raise ValueError(
            f"expected rows of one length, got lengths {sorted(lengths)} and {len(sent) - len(rows)} numbers"
        )
    return Array.of((_float(value) for row in rows for value in row), (len(rows), lengths.pop()))


def _float(value: float | str | None) -> float:
    return float("nan") if value is None else float(value)


def check_layers(name: str, shape: tuple[int, ...], stacks: Stacks) -> None:
    metric, num_blocks, num_stacks = LAYERED.get(name), stacks.num_blocks, len(stacks.each)
    has = f"{num_blocks} blocks" + (f" in {num_stacks} stacks" if num_stacks > 1 else "")
    if metric is not None:
        expected = (stacks.num_entries(metric.axis),)
        if shape != expected:
            more = "one entry more" + (" per stack" if num_stacks > 1 else "")
            why = f"activations have {more}" if metric.axis == "activation" else "one entry per block"
            raise ValueError(f"expected shape {list(expected)} ({has}, {why}), got {list(shape)}")
    elif shape not in ((num_blocks,), (stacks.num_states,)):
        raise ValueError(f"expected shape [{num_blocks}] or [{stacks.num_states}] ({has}), got {list(shape)}")


def check_heads(shape: tuple[int, ...], num_blocks: int) -> None:
    if len(shape) != 2 or shape[0] != num_blocks or shape[1] == 0:
        raise ValueError(f"expected shape [{num_blocks}, heads] ({num_blocks} blocks), got {list(shape)}")


def _place(error: ValidationError, raw: bytes | bytearray) -> str:
    """'frame seq 17, layers 'token_similarity'' for the first problem."""
    where = place_of(error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"])
    if len(where) < 2 or where[0] != "frames" or not isinstance(where[1], int):
        return "body of frames"
    try:
        seq = json.loads(raw)["frames"][where[1]]["seq"]  # reads NaN literals, which may be what is wrong
    except (ValueError, LookupError, TypeError, RecursionError):
        seq = "unknown"
    place = f"frame seq {shown(seq)} (number {where[1] + 1} in the body)"
    return f"{place}, {where[2]} {where[3]!r:.80}" if len(where) > 3 else place

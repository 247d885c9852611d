"""The stacks of a model as the depth that arrays have: names, numbers, and how the stages of a pipeline join them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from tsemon.errors import InvalidArgument
from tsemon.probes.discovery import Block
from tsemon.probes.naming import words
from tsemon.stacks import Stack, Stacks

Sized = tuple[str, int]
"""The path of a stack in the model, and its number of blocks."""


def named_stacks(paths: Sequence[Sized]) -> Stacks:
    """Stacks with short names: the first parts of each path that no other path begins with, after the parts that all share.

    "model.encoder.layers" and "model.decoder.layers" become "encoder" and "decoder". A single stack has no name.
    """
    if len(paths) == 1:
        return Stacks.of(paths[0][1])
    parts = [path.split(".") for path, _ in paths]
    num_shared = len(list(itertools.takewhile(lambda column: len({*column}) == 1, zip(*parts, strict=False))))
    rests = [path[num_shared:] for path in parts]

    def name(own: list[str]) -> str:
        others = [rest for rest in rests if rest is not own]
        ends = (end for end in range(1, len(own)) if all(other[:end] != own[:end] for other in others))
        return ".".join(own[: next(ends, len(own))])

    return Stacks(tuple(Stack(name(own), size) for own, (_, size) in zip(rests, paths, strict=True)))


def stacks_of(blocks: Sequence[Block]) -> Stacks:
    """The stacks of a whole model, without their names."""
    sizes = Counter(block.entry - block.number for block in blocks)
    return Stacks(tuple(Stack("", size) for size in sizes.values()))


def firsts_of(blocks: Sequence[Block]) -> list[Block]:
    """The first block of each stack, among these blocks."""
    firsts = {block.entry - block.number: block for block in reversed(blocks)}
    return [*reversed(firsts.values())]


def joined(stages: Sequence[Sequence[Sized]]) -> list[Sized]:
    """Join the stacks of all stages of a pipeline.

    A stage continues the last stack of the stage before it, but a decoder does not continue an encoder. Raises
    InvalidArgument if a stack continues after another one, because its blocks are then apart.
    """
    found: list[Sized] = []
    for before, stage in zip([(), *stages], stages, strict=False):
        (path, size), *others = stage
        if before and _continues(before, stage):
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((path, size))
        found += others
    if len({path for path, _ in found}) < len(found):
        raise InvalidArgument(
            "the stages of a pipeline should contain one stack after the other, got stages that each have a part of "
            f"several: {', '.join(path or 'the model itself' for path, _ in found)}. Name the blocks of one stack in blocks="
        )
    return found


def _continues(before: Sequence[Sized], stage: Sequence[Sized]) -> bool:
    last, first = words(before[-1][0]), words(stage[0][0])
    if len(before) > 1 or len(stage) > 1:
        return last == first
    kinds = {"encoder", "decoder"}
    return not (kinds & {*last} and kinds & {*first} and kinds & {*last} != kinds & {*first})

"""Frames as rules see them: one view a step, whoever measured what of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tsemon.stacks import Stacks
from tsemon.wire import Array, Frame
from tsemon_server.filling import filled
from tsemon_server.rules.program import View


def views_of(frames: Iterable[Frame], frozen: frozenset[int], stacks: Stacks | None = None) -> Iterator[View]:
    """In the order of steps. Of what several writers measured at one step, each fills what the ones before left out."""
    return views_in_order(sorted(frames, key=lambda frame: (frame.step, frame.seq)), frozen, stacks)


def views_in_order(frames: Iterable[Frame], frozen: frozenset[int], stacks: Stacks | None = None) -> Iterator[View]:
    """The same of frames that come in that order: no more than those of one step are held."""
    for _, group in groupby(frames, lambda frame: frame.step):
        first, *others = (_view(frame, frozen, stacks) for frame in group)
        for other in others:
            first = replace(
                first,
                scalars={**other.scalars, **first.scalars},
                layers=filled(first.layers, other.layers),
                heads=filled(first.heads, other.heads),
            )
        yield first


def _view(frame: Frame, frozen: frozenset[int], stacks: Stacks | None) -> View:
    layers = {name: _numbers(values) for name, values in frame.layers.items()}
    heads = {name: _numbers(values) for name, values in frame.heads.items()}
    return View(frame.step, frame.scalars, layers, heads, frozen, stacks)


def _numbers(values: Array) -> NDArray[np.float32]:
    flat: NDArray[np.float32] = np.frombuffer(values.data, _FLOAT32)
    return flat if len(values.shape) == 1 else flat.reshape(values.shape)


_FLOAT32 = np.dtype("<f4")

"""Frames as rules see them: one view a step, whoever measured what of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Array, Frame
from tsemon_server.filling import filled
from tsemon_server.rules.program import View


def views_of(frames: Iterable[Frame], frozen: frozenset[int]) -> Iterator[View]:
    """In the order of steps. Of what several writers measured at one step, each fills what the ones before left out."""
    return views_in_order(sorted(frames, key=lambda frame: (frame.step, frame.seq)), frozen)


def views_in_order(frames: Iterable[Frame], frozen: frozenset[int]) -> Iterator[View]:
    """The same of frames that come in that order: no more than those of one step are held."""
    for step, group in groupby(frames, lambda frame: frame.step):
        first, *others = (_view(frame, frozen) for frame in group)
        for other in others:
            first = View(
                step,
                {**other.scalars, **first.scalars},
                filled(first.layers, other.layers),
                filled(first.heads, other.heads),
                frozen,
            )
        yield first


def _view(frame: Frame, frozen: frozenset[int]) -> View:
    layers = {name: _numbers(values) for name, values in frame.layers.items()}
    return View(frame.step, frame.scalars, layers, {name: _numbers(v) for name, v in frame.heads.items()}, frozen)


def _numbers(values: Array) -> NDArray[np.float32]:
    return np.frombuffer(values.data, "<f4").reshape(values.shape)

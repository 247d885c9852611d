"""Frames as awkward as those of real runs."""

import math
import random

from tsemon.wire import Array, Frame


def frames_of_a_long_run(num_frames=1500, seed=0):
    """Cadences from every step to every 50th, metrics that come and go, a model that is rebuilt, NaN and infinities."""
    draw, step = random.Random(seed), 0
    for seq in range(num_frames):
        step += draw.choice((1, 1, 1, 5, 50))
        scalars = {"loss": draw.choice((draw.random(), draw.random(), math.nan, math.inf, 1e300))}
        layers = {"token_similarity": Array.of(draw.gauss(0, 1) for _ in range(3))}
        if seq % 10 == 0:
            layers["param_norm"] = Array.of(draw.choice((draw.random(), math.nan)) for _ in range(2))
        num_heads = 2 if seq > 900 and seq % 3 else 4
        heads = {"attention_entropy": Array.of((draw.random() for _ in range(2 * num_heads)), (2, num_heads))}
        yield Frame(seq, step, 1e9 + seq, scalars, layers, heads)

"""What the tests of integrations share: the run that a training left in its spool folder, and batches to train on."""

import json
from typing import Any, NamedTuple

import torch

from tsemon.transport import Spool, find_spools
from tsemon.wire import is_rows

VALUES_OF_THE_MOMENT = {"overhead_ratio", "contained_faults"}


class Recording(NamedTuple):
    frames: list[dict[str, Any]]
    state: str | None
    resume_step: int | None

    @property
    def steps(self):
        return [frame["step"] for frame in self.frames]

    @property
    def losses(self):
        return [frame["scalars"].get("loss") for frame in self.frames]

    @property
    def measured(self):
        """What the frames say of the training, without what they say of tsemon."""
        scalars = [{n: v for n, v in f["scalars"].items() if n not in VALUES_OF_THE_MOMENT} for f in self.frames]
        return [(scalars, frame["layers"], frame["heads"]) for scalars, frame in zip(scalars, self.frames, strict=True)]


def recorded(folder):
    """The one run in this folder."""
    (path,) = find_spools(folder)
    spool, frames = Spool.open(path), []
    while (batch := spool.next_batch()) is not None:
        frames += [json.loads(text) for text in batch.frames if not is_rows(text)]
        spool.acknowledge(batch.ends[-1])
    state, resume_step = spool.end_state, spool.registration["resume_step"]
    spool.close()
    return Recording(frames, state, resume_step)


def ids(num_samples, num_tokens=12):
    return torch.randint(3, 100, (num_samples, num_tokens), generator=torch.Generator().manual_seed(1))


def count_steps(optimizer):
    """A list that grows by one with every step of the optimizer."""
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps

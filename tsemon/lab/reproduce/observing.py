"""What tsemon's own probes say of a model, as arrays: through `attach`, a spool, and the frames in it.

Axes of arrays: one entry per layer, as the catalogue has it; per head where a metric has heads.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tsemon
from tsemon.transport import Spool, find_spools
from tsemon.wire import is_rows

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Frame:
    step: int
    scalars: Mapping[str, float]
    layers: Mapping[str, Values]
    heads: Mapping[str, Values]


@dataclass
class Recording:
    """A watched training. Its frames are there when the `recorded` block has ended."""

    monitor: tsemon.Monitor
    frames: list[Frame] = field(default_factory=list)

    def series(self, metric: str, layer: int | None = None) -> tuple[Values, Values]:
        """The steps at which it was measured, and its values: of the run, or of one layer. KeyError where it never was."""
        found = [
            (frame.step, frame.scalars[metric] if layer is None else frame.layers[metric][layer])
            for frame in self.frames
            if metric in (frame.scalars if layer is None else frame.layers)
        ]
        if not found:
            raise KeyError(metric)
        steps, values = zip(*found, strict=True)
        return np.array(steps), np.array(values)


@contextmanager
def recorded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    measures: Collection[str] | None = None,
    attention_rows: int | Literal["all"] = 64,
    blocks: Sequence[nn.Module | str] | None = None,
) -> Iterator[Recording]:
    """Watch the model as any user would; what would have gone to a server is in `frames` at the end."""
    with tempfile.TemporaryDirectory() as folder:
        monitor = tsemon.attach(
            model,
            optimizer,
            run="recorded",
            every=every,
            measures=measures,
            attention_rows=attention_rows,
            blocks=blocks,
            spool_dir=folder,
            layout="BTC",
        )
        recording = Recording(monitor)
        with monitor:
            yield recording
        recording.frames += frames_in(Path(folder))


def observe(model: nn.Module, run: Callable[[], Tensor | None], **options: Any) -> Frame:
    """One pass, which changes no weight. `run` calls the model once and may return a loss to go back from; with a loss
    there are gradients in the frame. Options are those of `recorded`. Dropout works: the model is in training mode.
    A pass under `no_grad` is none of training, and is not seen."""
    model.train()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    with recorded(model, still, **options) as recording:
        loss = run()
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            still.step()
            still.zero_grad()
        recording.monitor.step(loss)
    return recording.frames[0]


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A `run` without a loss: one pass, of which nothing is kept."""
    model(*args, **kwargs)


def frames_in(folder: Path) -> list[Frame]:
    """All frames that monitors have written to this folder."""
    frames = []
    for path in find_spools(folder):
        spool = Spool.open(path)
        while (batch := spool.next_batch()) is not None:
            frames += [_frame(json.loads(text)) for text in batch.frames if not is_rows(text)]
            spool.acknowledge(batch.ends[-1])
        spool.close()
    return frames


def _frame(body: Mapping[str, Any]) -> Frame:
    return Frame(
        step=body["step"],
        scalars={name: _number(value) for name, value in body["scalars"].items()},
        layers={name: _array(value) for name, value in body.get("layers", {}).items()},
        heads={name: _array(value) for name, value in body.get("heads", {}).items()},
    )


def _number(value: float | str | None) -> float:
    return float("nan") if value is None else float(value)


def _array(packed: Mapping[str, Any]) -> Values:
    return np.frombuffer(base64.b64decode(packed["f32"]), "<f4").reshape(packed["shape"]).astype(np.float64)

"""What other tools take to keep the same values and to read them back. Needs that tool and numpy.

python peers.py write|read TOOL FOLDER STEPS METRICS prints a line of JSON at its end. Each tool is used by its documented
interface, with everything in this process: no HTTP, and nothing recorded besides the values.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from cost import stopwatch
from numpy.typing import NDArray
from values import LAYERS, METRICS, Size, blocks

SHOWN = METRICS[0]
"""The metric that is read back."""

Floats = NDArray[np.float64]


class Peer:
    """A tool with its store in `folder`, and one run in it."""

    name: ClassVar[str]
    package: ClassVar[str]
    write_api: ClassVar[str]
    read_api: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> None:
        """Create the store and the run, before the clock starts."""

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        """Keep the values of a step."""
        raise NotImplementedError

    def end(self) -> None:
        """Return when all is kept."""

    def open(self) -> None:
        """Get ready to read, before the clock starts."""

    def series(self, layers: Sequence[int]) -> list[Floats]:
        """The shown metric over all steps, for each of the layers."""
        raise NotImplementedError


class MLflow(Peer):
    name = "MLflow, SQLite"
    package = "mlflow"
    write_api = "MlflowClient.log_batch, one call per step"
    read_api = "MlflowClient.get_metric_history, one call per layer"

    def begin(self) -> None:
        from mlflow.entities import Metric

        self._metric = Metric
        self._connect()
        self._run_id = self._client.create_run(self._client.create_experiment("bench")).info.run_id
        (self.folder / "run_id").write_text(self._run_id)

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in _flat(values_ML)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def open(self) -> None:
        self._connect()
        self._run_id = (self.folder / "run_id").read_text()
        self._client.get_run(self._run_id)

    def series(self, layers: Sequence[int]) -> list[Floats]:
        histories = (self._client.get_metric_history(self._run_id, f"{SHOWN}/{layer:02}") for layer in layers)
        return [np.array([metric.value for metric in history]) for history in histories]

    def _connect(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")


class Trackio(Peer):
    name = "trackio"
    package = "trackio"
    write_api = "trackio.log, one call per step"
    read_api = "get_metric_values for one layer, get_logs for all"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ["TRACKIO_DIR"] = str(folder)  # read at its import

    def begin(self) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project="bench", name="run", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        self._trackio.log(dict(_flat(values_ML)), step=step)

    def end(self) -> None:
        self._trackio.finish()

    def open(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        SQLiteStorage.get_runs("bench")

    def series(self, layers: Sequence[int]) -> list[Floats]:
        if len(layers) == 1:  # what `trackio get metric` calls
            rows = self._storage.get_metric_values("bench", "run", f"{SHOWN}/{layers[0]:02}")
            return [np.array([row["value"] for row in rows])]
        logs = self._storage.get_logs("bench", "run")
        return [np.array([log[f"{SHOWN}/{layer:02}"] for log in logs]) for layer in layers]


class TensorBoard(Peer):
    name = "TensorBoard"
    package = "tensorboard"
    write_api = "EventFileWriter.add_event, one event per step with all values"
    read_api = "EventAccumulator.Reload of all values, then Scalars"

    def begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(self.folder))

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _flat(values_ML)]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def end(self) -> None:
        self._writer.close()

    def open(self) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

        self._accumulator, self._array = EventAccumulator, make_ndarray

    def series(self, layers: Sequence[int]) -> list[Floats]:
        events = self._read()
        return [np.array([e.value for e in events.Scalars(f"{SHOWN}/{layer:02}")]) for layer in layers]

    def _read(self) -> Any:
        events = self._accumulator(str(self.folder), size_guidance={"scalars": 0, "tensors": 0})  # 0: all of them
        events.Reload()
        return events


class TensorBoardScalars(TensorBoard):
    name = "TensorBoard, a value at a time"
    write_api = "tensorboard.summary.Writer.add_scalar, one call per value"
    read_api = "EventAccumulator.Reload of all values, then Tensors"

    def begin(self) -> None:
        from tensorboard.summary import Writer

        self._scalars = Writer(str(self.folder))

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        for name, value in _flat(values_ML):
            self._scalars.add_scalar(name, value, step)

    def end(self) -> None:
        self._scalars.close()

    def series(self, layers: Sequence[int]) -> list[Floats]:
        events = self._read()
        found = (events.Tensors(f"{SHOWN}/{layer:02}") for layer in layers)
        return [np.array([self._array(e.tensor_proto) for e in tensors]) for tensors in found]


class Aim(Peer):
    name = "Aim"
    package = "aim"
    write_api = "Run.track of a dictionary of metrics, one call per step and layer"
    read_api = "Run.get_metric and its data.numpy, one call per layer"

    def begin(self) -> None:
        from aim import Repo, Run

        Repo.from_path(str(self.folder), init=True)
        self._run = Run(repo=str(self.folder), system_tracking_interval=None, capture_terminal_logs=False)
        (self.folder / "run_hash").write_text(self._run.hash)

    def write(self, step: int, values_ML: NDArray[np.float32]) -> None:
        for layer, values_M in enumerate(values_ML.T.tolist()):
            self._run.track(dict(zip(METRICS, values_M, strict=False)), step=step, context={"layer": layer})

    def end(self) -> None:
        self._run.close()

    def open(self) -> None:
        from aim import Run
        from aim.sdk.sequence import Context

        self._context = Context
        run_hash = (self.folder / "run_hash").read_text()
        options: dict[str, Any] = {"system_tracking_interval": None, "capture_terminal_logs": False}
        self._run = Run(run_hash, repo=str(self.folder), **options)  # read_only=True finds no sequences

    def series(self, layers: Sequence[int]) -> list[Floats]:
        found = (self._run.get_metric(SHOWN, self._context({"layer": layer})) for layer in layers)
        return [metric.data.numpy()[1][0] for metric in found]


PEERS: dict[str, type[Peer]] = {
    "mlflow": MLflow,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
    "tensorboard-scalars": TensorBoardScalars,
    "aim": Aim,
}


def write(peer: Peer, size: Size) -> dict[str, Any]:
    """Keep a run of this size; the seconds and bytes that it took."""
    shutil.rmtree(peer.folder, ignore_errors=True)
    peer.folder.mkdir(parents=True)
    peer.begin()
    spent = stopwatch()
    for first, values_TML in blocks(size):
        for offset, values_ML in enumerate(values_TML):
            peer.write(first + offset, values_ML)
    peer.end()
    took = asdict(spent())
    return {"spent": took, "size_bytes": sum(path.stat().st_size for path in peer.folder.rglob("*") if path.is_file())}


def read(peer: Peer, size: Size) -> dict[str, Any]:
    """Read one layer, then all layers; the seconds that each took. What is read must be what was written."""
    expected_TL = np.concatenate([values_TML[:, 0] for _, values_TML in blocks(size)])
    peer.open()
    figures = {}
    for name, layers in (("series", [LAYERS // 2]), ("heatmap", list(range(LAYERS)))):
        spent = stopwatch()
        found = peer.series(layers)
        figures[name] = asdict(spent())
        np.testing.assert_allclose(np.stack(found, axis=1), expected_TL[:, layers], rtol=1e-6)
    return figures


def _flat(values_ML: NDArray[np.float32]) -> list[tuple[str, float]]:
    rows = zip(METRICS, values_ML.tolist(), strict=False)
    return [(f"{name}/{layer:02}", value) for name, row in rows for layer, value in enumerate(row)]


def main(task: str, tool: str, folder: str, steps: str, metrics: str) -> None:
    peer = PEERS[tool](Path(folder).resolve())
    try:
        version = importlib.metadata.version(peer.package)
        importlib.import_module(peer.package)
    except ImportError as error:  # PackageNotFoundError is one
        print(json.dumps({"absent": f"{type(error).__name__}: {error}"}))
        return
    figures = {"write": write, "read": read}[task](peer, Size(int(steps), int(metrics)))
    told = json.dumps(figures | {"version": version})
    if task == "write":
        (peer.folder / "written.json").write_text(told)
    print(told)


if __name__ == "__main__":
    main(*sys.argv[1:])

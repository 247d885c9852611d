"""Runs in the files of other tools: event files and runs of wandb are written by these tools, rows go into tables that
MLflow made."""

import gzip
import math
import sqlite3
import time
from pathlib import Path

from tsemon.tools.importing.source import Notes
from tsemon.tools.importing.wandb_files import WandbFile

MLFLOW = Path(__file__).parent / "mlflow-3.17.2.db.gz"
"""A store as MLflow 3.17.2 left it: a run that was killed, with a value of each kind, and one that was deleted."""


def write_events(folder, steps, num_layers=3, **options):
    """What a training with TensorBoard writes: a loss that is NaN and infinite once, and a value per layer."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), **options) as writer:
        for step in steps:
            for layer in range(num_layers):
                writer.add_scalar(f"layers.{layer}.attn.entropy", layer + step / 100, step)
            writer.add_scalar("train/loss", {2: math.nan, 3: math.inf}.get(step, 1 / (step + 1)), step)


def write_wandb(folder, rows, *, name="my run", project="pretrain", run_id=None, exit_code=0, **options):
    """An offline run of wandb with a row for each dict."""
    import wandb

    settings = wandb.Settings(
        mode="offline", silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
    )
    run = wandb.init(
        project=project, name=name, id=run_id, dir=str(folder), settings=settings, reinit="create_new", **options
    )
    for row in rows:
        run.log(dict(row), step=row.get("step"))
    run.finish(exit_code=exit_code)
    end_of(folder)


def end_of(folder):
    """Wait until the files in a folder are complete: another process writes them."""
    deadline = time.monotonic() + 30
    while not all(map(_has_end, folder.rglob("run-*.wandb"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_end(path):
    return any(record.HasField("exit") for record, _ in WandbFile(path)._records(Notes()))


class MlflowStore:
    """MLflow's store without its runs; rows are appended as `log_metric` does."""

    def __init__(self, path):
        self.path = path
        path.write_bytes(gzip.decompress(MLFLOW.read_bytes()))
        with self._connection() as store:
            for table in ("metrics", "params", "tags", "runs"):
                store.execute(f"DELETE FROM {table}")

    def add_run(self, run_uuid, name, *, status="FINISHED", stage="active", start_ms=0, params=(), tags=()):
        with self._connection() as store:
            store.execute(
                "INSERT INTO runs (run_uuid, name, status, start_time, lifecycle_stage, experiment_id) "
                "VALUES (?, ?, ?, ?, ?, 1)",
                (run_uuid, name, status, start_ms, stage),
            )
            store.executemany(
                "INSERT INTO params VALUES (?, ?, ?)", [(*pair, run_uuid) for pair in dict(params).items()]
            )
            store.executemany("INSERT INTO tags VALUES (?, ?, ?)", [(*pair, run_uuid) for pair in dict(tags).items()])

    def log(self, run_uuid, key, value, step, time_ms=1_700_000_000_000):
        is_nan = math.isnan(value)
        kept = 0.0 if is_nan else math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value
        with self._connection() as store:
            store.execute(
                "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", (key, kept, time_ms + step, run_uuid, step, is_nan)
            )

    def _connection(self):
        class Closing(sqlite3.Connection):
            def __exit__(self, *error):
                super().__exit__(*error)
                self.close()

        return sqlite3.connect(self.path, factory=Closing)

"""What a database has of the run `gpt`, frame by frame."""

from contextlib import closing

from tests.faults.processes import known_frame
from tsemon_answers.runs import RunFilter
from tsemon_client import Client
from tsemon_server.store import Store

MAX_POINTS = 10_000
"""The most that a series over HTTP gives: up to so many samples it gives them as they are."""


def stored_frames(database, writer, attempt=None):
    """The seqs of the writer's frames, with repetitions if there were any; each has all of its values."""
    with closing(Store(database)) as store, store.read() as reader:
        (run,) = reader.runs.find(RunFilter(run="gpt"), order="name", limit=2)
        if writer not in reader.frames.recorded(run.run_id).scalars:
            return []
        scalars = reader.frames.metric(run.run_id, "scalars", writer, attempt=attempt).samples()
        layers = reader.frames.metric(run.run_id, "layers", f"{writer}.layers", attempt=attempt).samples()
    assert (scalars.num_damaged, layers.num_damaged) == (0, 0)
    seqs = scalars.steps.tolist()
    assert scalars.values[:, 0].tolist() == seqs
    assert layers.steps.tolist() == seqs
    assert layers.values.tolist() == [known_frame(writer, seq).layers[f"{writer}.layers"].tolist() for seq in seqs]
    return seqs


def assert_all_arrived(service, num_frames):
    """Every frame of each writer is there once: in the database, which is sound, in the run's count, and over REST."""
    for writer, number in num_frames.items():
        assert stored_frames(service.database, writer) == list(range(number)), writer
    findings = []
    with closing(Store(service.database)) as store:
        (checked,) = store.check(findings.append)
    assert findings == []
    assert checked.num_hot + checked.num_settled == sum(num_frames.values())
    with Client(service.url) as client:
        run = client.find_run("gpt")
        assert run.num_frames == sum(num_frames.values())
        for writer, number in num_frames.items():
            series = client.series(run.run_id, writer, from_step=max(0, number - MAX_POINTS), points=MAX_POINTS)
            assert series.step == series.mean == list(range(number))[-MAX_POINTS:], writer

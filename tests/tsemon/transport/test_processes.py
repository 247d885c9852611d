"""Trainers in processes of their own: they start at one moment, have children, and end while the service hangs."""

import contextlib
import os
import subprocess
from collections import defaultdict

import pytest

from tests.processes import start_python
from tests.service import ServiceProcess
from tsemon.transport import find_spools, sync
from tsemon_client import Client

TRAINER = """
import os, sys, threading, torch, tsemon
from tests import zoo
torch.set_num_threads(1)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return look()

def look():
    "1 where a process has nothing of the monitor but the code: no thread, no open file."
    import tsemon.monitor
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
        and os.path.exists(f"/proc/self/fd/{fd}")]
    has_thread = any(thread.name.startswith("tsemon") for thread in threading.enumerate())
    return int(not has_thread and not any(sys.argv[1] in path and path.endswith((".seg", "lock")) for path in open_files))

def tell(word):
    print(word, flush=True)
    sys.stdin.readline()

def attach():
    model, forward = zoo.torch_encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    folder, server = sys.argv[1], sys.argv[2] or None
    return model, forward, optimizer, tsemon.attach(model, optimizer, run="r", every=1, spool_dir=folder, server=server)

def step(forward, optimizer, monitor):
    optimizer.zero_grad()
    loss = forward().square().mean()
    loss.backward()
    optimizer.step()
    monitor.step(loss=loss)
"""
PLAIN = f"""{TRAINER}
tell("ready")
model, forward, optimizer, monitor = attach()
tell(monitor.status.delivery.spool_folder)
for _ in range(6):
    step(forward, optimizer, monitor)
monitor.close(timeout_s=60)
"""
SPAWNING = f"""{TRAINER}
if __name__ == "__main__":
    model, forward, optimizer, monitor = attach()
    assert not look()
    loader = torch.utils.data.DataLoader(Samples(), batch_size=1, num_workers=1, multiprocessing_context="spawn")
    for is_clean in loader:
        assert is_clean.item() == 1
        step(forward, optimizer, monitor)
    monitor.close(timeout_s=60)
    assert monitor.status.num_faults == 0
"""
EXITING = f"""{TRAINER}
model, forward, optimizer, monitor = attach()
for _ in range(3):
    step(forward, optimizer, monitor)
while monitor.status.delivery.num_sent < 3:
    threading.Event().wait(0.01)
tell("delivered")
for _ in range(3):
    step(forward, optimizer, monitor)
"""


@pytest.fixture
def start(tmp_path):
    """Start a trainer that spools to `tmp_path / "spool"`."""

    def start(program, server=""):
        path = tmp_path / "trainer.py"
        path.write_text(program)
        environment = {name: value for name, value in os.environ.items() if name != "TSEMON_SERVER"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        trainer = started.enter_context(
            start_python(path, tmp_path / "spool", server, environment=environment, **pipes)
        )
        started.callback(trainer.kill)
        return trainer

    with contextlib.ExitStack() as started:
        yield start


def go_on(*trainers):
    """Once all of them have come to where they wait; what they said there."""
    said = [trainer.stdout.readline().strip() for trainer in trainers]
    for trainer in trainers:
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    return said


class TestTwoProcessesThatStartAtOneMomentUnderOneName:
    def test_both_arrive_whole(self, start, peer, tmp_path):
        trainers = [start(PLAIN, peer.url) for _ in range(2)]
        assert go_on(*trainers) == ["ready", "ready"]
        folders = set(go_on(*trainers))
        assert len(folders) == 2
        assert [trainer.wait(120) for trainer in trainers] == [0, 0]
        assert find_spools(tmp_path / "spool") == []
        steps = defaultdict(list)
        for (_, attempt, writer, _), frame in sorted(peer.frames.items()):
            steps[attempt, writer].append(frame["step"])
        assert sorted(attempt for attempt, _ in steps) == [1, 2]
        assert len({writer for _, writer in steps}) == 2
        assert list(steps.values()) == [list(range(6))] * 2
        assert peer.num_duplicates == 0


class TestSpawnedChildren:
    def test_have_nothing_of_the_monitor(self, start, peer, tmp_path):
        assert start(SPAWNING, peer.url).wait(240) == 0  # two imports of torch, on a machine that does other work, too
        assert peer.seqs("default/r") == list(range(6))
        assert len(peer.runs["default/r"]["attempts"]) == 1
        assert find_spools(tmp_path / "spool") == []


class TestATrainerThatExitsWhileTheServiceHangs:
    def test_leaves_what_is_unsent_in_the_spool_and_ends(self, start, tmp_path):
        with ServiceProcess(tmp_path / "tsemon.db") as service, Client(service.url) as client:
            trainer = start(EXITING, service.url)
            assert trainer.stdout.readline() == "delivered\n"
            service.pause()
            try:
                trainer.stdin.write("\n")
                trainer.stdin.flush()
                assert trainer.wait(120) == 0  # without an end to its delivery it would be there for ever
            finally:
                service.resume()
            (synced,) = sync(tmp_path / "spool", service.url)
            assert (synced.error, synced.num_remaining) == (None, 0)
            run = client.find_run("r")
            assert (run.num_frames, run.state, run.attempt) == (6, "finished", 1)
            assert run.process_step == 5

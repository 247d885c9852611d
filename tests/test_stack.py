"""The demo's failing run, through Prometheus and Alertmanager to a webhook and back: scripts/stack_check.py, whole."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/stack_check.py"
IS_COMPLETE = shutil.which("prometheus") and (shutil.which("prometheus-alertmanager") or shutil.which("alertmanager"))

pytestmark = pytest.mark.skipif(
    not IS_COMPLETE,
    reason="Prometheus or Alertmanager is not installed; scripts/system_parts.py does it where it can",
)


@pytest.fixture
def check(tmp_path):
    """Starts the script; what it has started and written is gone when it ends."""
    started = []

    def start(*arguments, folder=tmp_path):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            env=os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_people_hear_of_it_and_that_it_is_over(check, tmp_path):
    script = check("--patience", "300")
    printed, _ = script.communicate(timeout=1000)
    assert script.returncode == 0, printed
    assert "the service says that token-similarity-escalation fires" in printed
    for alert in ("token-similarity-onset", "TsemonIncident of token-similarity-escalation"):
        assert f"people hear: [critical] {alert}: " in printed
        assert f"people hear that {alert} is over" in printed
    assert "the service has told the Alertmanager twice again" in printed
    assert "Prometheus sees no series of the run any more" in printed
    assert "the server stops, and TsemonDown is pending" in printed
    assert [*tmp_path.glob("tsemon-stack-*")] == []


@pytest.mark.thorough
def test_says_what_is_missing(check, tmp_path):
    script = check("--patience", "0.01")
    printed, _ = script.communicate(timeout=120)
    assert script.returncode == 1
    assert "FAILED: not within 0 s of training: " in printed
    assert "people hear of Prometheus's alert" in printed
    assert [*tmp_path.glob("tsemon-stack-*")] == []


@pytest.mark.thorough
def test_leaves_nothing_running_however_it_ends(check, tmp_path):
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    folders = {number: tmp_path / number.name for number in ends}
    for folder in folders.values():
        folder.mkdir()
    scripts, children = {}, {}
    for number, folder in folders.items():  # one after the other: one that waits might come to its end
        scripts[number] = check(folder=folder)
        children[number] = children_of(scripts[number])
        scripts[number].send_signal(number)
    for number, script in scripts.items():
        script.communicate(timeout=60)
        assert script.returncode == ends[number]
        if number != signal.SIGKILL:
            assert not any(map(is_alive, children[number]))
            assert [*folders[number].glob("tsemon-stack-*")] == []
    deadline = time.monotonic() + 30
    while any(map(is_alive, children[signal.SIGKILL])):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def children_of(script):
    """Once the script trains: while it imports PyTorch, Python may drop the exception that a signal raises."""
    assert any("transformer" in line for line in script.stdout)
    found = psutil.Process(script.pid).children(recursive=True)
    assert len(found) == 3
    return found


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

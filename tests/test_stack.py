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

    def start(*arguments):
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            env=environment,
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
    script = check()
    printed, _ = script.communicate(timeout=240)
    assert script.returncode == 0, printed
    alerts = ("token-similarity-escalation", "TsemonTokenSimilarityEscalation", "TsemonAlertFiring")
    for alert in alerts:
        assert f"people hear: [critical] {alert}" in printed
        assert f"people hear that {alert}" in printed
    assert "the service has told the Alertmanager twice again" in printed
    assert "Prometheus sees no series of the run any more" in printed
    assert [*tmp_path.glob("tsemon-stack-*")] == []


def test_says_what_is_missing(check, tmp_path):
    script = check("--patience", "0.01")
    printed, _ = script.communicate(timeout=120)
    assert script.returncode == 1
    assert "FAILED: not within 0 s of training: " in printed
    assert "people hear of Prometheus's alert" in printed
    assert [*tmp_path.glob("tsemon-stack-*")] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_leaves_nothing_when_it_is_stopped(check, tmp_path, number, status):
    script = check()
    for line in script.stdout:
        if "Alertmanager answer" in line:
            break
    children = psutil.Process(script.pid).children(recursive=True)
    assert len(children) == 3
    script.send_signal(number)
    script.communicate(timeout=60)
    assert script.returncode == status
    assert not any(child.is_running() for child in children)
    assert [*tmp_path.glob("tsemon-stack-*")] == []


def test_what_it_started_ends_with_it_even_when_it_is_killed(check):
    script = check()
    for line in script.stdout:
        if "Alertmanager answer" in line:
            break
    children = psutil.Process(script.pid).children(recursive=True)
    assert len(children) == 3
    script.kill()
    deadline = time.monotonic() + 30
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)

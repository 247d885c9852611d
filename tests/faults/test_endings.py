"""How real training processes can end, and what the server learns of each end."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import pytest

from tests.faults.processes import TIMEOUT_S, Service, await_true
from tests.faults.test_liveness import RULES
from tests.processes import ROOT, run, start_tsemon
from tsemon_client import Client
from tsemon_server.alerts import ActiveRules
from tsemon_server.alerts.liveness import Liveness
from tsemon_server.rules.documents import load
from tsemon_server.store import Store

TRAINING = """
import functools, os, signal, sys
import torch
import tsemon, tsemon.attaching
from tests import zoo

name, url, folder = sys.argv[1:]
torch.set_num_threads(1)
tsemon.attaching.Outbox = functools.partial(tsemon.attaching.Outbox, heartbeat_s=0.1)
if name == "handled SIGTERM":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
model, forward = zoo.torch_encoder()
monitor = tsemon.attach(model, run=name, server=url, every=1, spool_dir=folder)
forward().sum().backward()
monitor.step(loss=1.0)
sys.stdin.readline()
exec({"exception": "1 / 0", "sys.exit": "sys.exit(0)", "os._exit": "os._exit(1)"}.get(name, ""))
"""
SIGNALS = {"SIGTERM": "SIGTERM", "SIGKILL": "SIGKILL", "Ctrl-C": "SIGINT", "handled SIGTERM": "SIGTERM"}
MARKED = {
    "return": "finished",
    "sys.exit": "finished",
    "handled SIGTERM": "finished",
    "exception": "failed",
    "Ctrl-C": "failed",
}
UNMARKED = ["SIGTERM", "SIGKILL", "os._exit"]
"""No code of the process can run, so only the server's clock tells."""
ENDINGS = [*MARKED, *UNMARKED]
EXIT_CODES = {"return": 0, "sys.exit": 0, "handled SIGTERM": 143, "exception": 1, "os._exit": 1}
EXIT_CODES |= {"SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL, "Ctrl-C": -signal.SIGINT}


class Ended:
    """Processes that have trained, and have ended each in its own way."""

    def __init__(self, client, database, spools):
        self.client, self._database, self._spools = client, database, spools

    def start(self, name, url):
        arguments = [sys.executable, "-c", TRAINING, name, url, self._spools]
        options = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": ROOT}
        return subprocess.Popen(arguments, **options, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

    def end(self, name, process):
        if name in SIGNALS:
            process.send_signal(getattr(signal, SIGNALS[name]))
        else:
            process.communicate("\n")
        return process.wait(TIMEOUT_S)

    def states(self):
        return {run.run: run.state for run in self.client.runs()}

    def await_silent(self):
        """The runs whose processes are reported as silent, by a rule with a threshold of 3 s."""
        with closing(Store(self._database)) as store:
            liveness = Liveness(store, ActiveRules(load(RULES)), listen_s=0.5)

            def silent():
                liveness.look()
                time.sleep(0.05)
                return {alert.run for alert in self.client.alerts(rule="silent", state="firing")}

            await_true(lambda: silent() >= set(UNMARKED), "the killed processes are reported")
            return silent()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    database = f"sqlite:///{folder / 'tsemon.db'}"
    with ExitStack() as held:
        service = held.enter_context(Service(database, folder / "service.log"))
        found = Ended(held.enter_context(Client(service.url)), database, str(folder / "spools"))
        processes = {name: found.start(name, service.url) for name in ENDINGS}
        for process in processes.values():
            held.enter_context(process)
            held.callback(process.kill)
        await_true(lambda: found.states() == dict.fromkeys(ENDINGS, "running"), "all train")
        found.codes = {name: found.end(name, process) for name, process in processes.items()}
        found.first_states = found.states()
        found.silent = found.await_silent()
        run(start_tsemon, "sync", found._spools, "--server", service.url)
        found.states_after_sync = found.states()
        yield found


class TestAProcessThatEnds:
    @pytest.mark.parametrize("name", ENDINGS)
    def test_ends_as_without_tsemon(self, ended, name):
        assert ended.codes[name] == EXIT_CODES[name]

    @pytest.mark.parametrize("name", MARKED)
    def test_says_so_where_its_code_can_still_run(self, ended, name):
        assert ended.first_states[name] == MARKED[name]
        assert name not in ended.silent

    @pytest.mark.parametrize("name", UNMARKED)
    def test_is_silent_where_it_cannot(self, ended, name):
        assert ended.first_states[name] == "running"
        assert name in ended.silent

    @pytest.mark.parametrize("name", UNMARKED)
    def test_has_failed_once_its_spool_is_delivered(self, ended, name):
        assert ended.states_after_sync[name] == "failed"

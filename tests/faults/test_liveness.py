"""Real training processes that are stopped, killed, or stuck in a step."""

import ctypes
import functools
import os
import signal
import time

import pytest

from tests import zoo
from tests.faults.processes import CONTEXT, TIMEOUT_S, Service
from tsemon_client import Client
from tsemon_server.alerts import ActiveRules
from tsemon_server.alerts.liveness import Liveness
from tsemon_server.rules.documents import load
from tsemon_server.store import Store

RULES = """
rules:
  - name: silent
    family: liveness
    severity: critical
    title: Nothing is heard
    on: clock
    for: {samples: 1}
    when: {value: [{scalar: silent_seconds}], at_least: 3}
    advice: Look at it.
    source: Nobody.
    origin: Short, for a test.
  - name: stuck
    family: liveness
    severity: critical
    title: No step is made
    on: clock
    for: {samples: 1}
    when: {value: [{scalar: stuck_seconds}], at_least: 1.5}
    advice: Look at it.
    source: Nobody.
    origin: Short, for a test.
"""


class Told(ctypes.Structure):
    _fields_ = [("is_in_long_step", ctypes.c_bool), ("is_done", ctypes.c_bool)]


def _train(url, folder, told):
    import torch

    import tsemon
    import tsemon.attaching

    torch.set_num_threads(1)
    tsemon.attaching.Outbox = functools.partial(tsemon.attaching.Outbox, heartbeat_s=0.1)
    model, forward = zoo.torch_encoder()
    with tsemon.attach(model, run="gpt", server=url, every=10, spool_dir=folder) as monitor:
        while not told.is_done:
            forward()
            while told.is_in_long_step:
                time.sleep(0.01)
            monitor.step()
            time.sleep(0.01)


class Training:
    """A process that trains a model, and a service that looks at it without a pause."""

    def __init__(self, service, folder):
        self.told = CONTEXT.RawValue(Told)
        self.client = Client(service.url)
        self._store = Store(service.database)
        self._liveness = Liveness(self._store, ActiveRules(load(RULES)), listen_s=0.5)
        self.process = CONTEXT.Process(target=_train, args=(service.url, folder, self.told), daemon=True)
        self.process.start()
        self.await_that(lambda: any(run.process_step for run in self.client.runs()), "it trains")

    def alerts(self):
        """The newest of each rule."""
        return {alert.rule: alert.state for alert in reversed([*self.client.alerts()])}

    def await_that(self, is_true, what):
        deadline = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < deadline, f"not so within {TIMEOUT_S} s: {what}; {self.alerts()}"
            self._liveness.look()
            time.sleep(0.02)

    def await_alerts(self, expected):
        self.await_that(lambda: self.alerts() == expected, f"the alerts are {expected}")

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.join()
        self.client.close()
        self._store.close()


@pytest.fixture
def training(sqlite_file, tmp_path):
    with Service(sqlite_file.url, tmp_path / "service.log") as service:
        training = Training(service, tmp_path / "spools")
        yield training
        training.close()


class TestATrainingProcess:
    def test_is_silent_while_it_is_stopped_stuck_in_an_endless_step_and_silent_once_it_is_killed(self, training):
        training.signal(signal.SIGSTOP)
        training.await_alerts({"silent": "firing"})
        training.signal(signal.SIGCONT)
        training.await_alerts({"silent": "resolved"})
        training.told.is_in_long_step = True
        training.await_alerts({"silent": "resolved", "stuck": "firing"})
        training.told.is_in_long_step = False
        training.await_alerts({"silent": "resolved", "stuck": "resolved"})
        training.process.kill()
        training.await_alerts({"silent": "firing", "stuck": "resolved"})

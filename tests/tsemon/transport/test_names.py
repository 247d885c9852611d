"""Two processes that attach under one name, to a real service."""

import logging
import math
import time

import httpx
import pytest

import tsemon
from tests import zoo
from tests.serving import served_from
from tsemon.errors import InvalidArgument, NameInUse


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served_from(tmp_path_factory.mktemp("service") / "runs.db") as served:
        yield served


@pytest.fixture
def attach(service, tmp_path, request):
    """Attach to the service under the test's name; each call is a process with a folder of its own."""
    monitors = []

    def attach(**options):
        model, forward = zoo.torch_encoder()
        options = {"run": request.node.name, "server": service.url} | options
        monitor = tsemon.attach(model, every=1, spool_dir=tmp_path / str(len(monitors)), **options)
        monitor.forward = forward
        monitors.append(monitor)
        return monitor

    yield attach
    for monitor in monitors:
        monitor.close()


def step(monitor, loss=1.0, times=1):
    for _ in range(times):
        monitor.forward()
        monitor.step(loss=loss)


def runs_of(service, name):
    found = httpx.get(f"{service.url}/api/v1/runs", params={"q": name}).json()["runs"]
    return {run["run"]: run for run in found}


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def fires(service, attempts):
    alerts = httpx.get(f"{service.url}/api/v1/alerts", params={"state": "firing"}).json()["alerts"]
    return {alert["attempt"] for alert in alerts if alert["rule"].startswith("loss")} >= attempts


class TestTwoProcessesOfOneName:
    def test_are_two_runs(self, service, attach, caplog, request):
        name = request.node.name
        first = attach()
        step(first)
        assert until(lambda: runs_of(service, name))
        second = attach()
        step(second)
        assert until(lambda: set(runs_of(service, name)) == {name, f"{name} (2)"})
        assert until(lambda: f"this one is the run '{name} (2)'" in caplog.text)
        step(first)
        assert until(lambda: runs_of(service, name)[name]["num_frames"] == 2)

    def test_both_alert_and_both_logs_say_so(self, service, attach, caplog, request):
        caplog.set_level(logging.WARNING)
        first, name = attach(), request.node.name
        step(first)
        assert until(lambda: runs_of(service, name))
        second = attach(on_conflict="take_over")
        step(second)
        assert until(lambda: "another live process sends to the run" in caplog.text)
        for _ in range(2):
            step(first, math.nan)
            step(second, math.nan)
        assert until(lambda: fires(service, {1, 2}))
        assert until(lambda: all(f"as attempt {number}." in caplog.text for number in (1, 2)))
        assert len(runs_of(service, name)) == 1

    def test_are_refused_if_so_asked(self, service, attach, request):
        first, name = attach(), request.node.name
        step(first)
        assert until(lambda: runs_of(service, name))
        with pytest.raises(NameInUse, match="a live process sends to the run"):
            attach(on_conflict="refuse")
        first.close()
        step(attach(on_conflict="refuse"))
        assert until(lambda: runs_of(service, name)[name]["attempt"] == 2)

    def test_are_one_run_if_the_first_has_ended(self, service, attach, request):
        first, name = attach(), request.node.name
        step(first)
        first.close()
        assert runs_of(service, name)[name]["state"] == "finished"
        step(attach())
        assert until(lambda: runs_of(service, name)[name]["attempt"] == 2)
        assert len(runs_of(service, name)) == 1

    def test_are_one_run_if_the_second_resumes(self, service, attach, caplog, request):
        first, name = attach(), request.node.name
        step(first, times=2)
        assert until(lambda: runs_of(service, name))
        step(attach(resume=2))
        assert until(lambda: runs_of(service, name)[name]["attempt"] == 2)
        third = attach()
        third.load_state_dict({**first.state_dict()})
        step(third)
        assert until(lambda: runs_of(service, name)[name]["attempt"] == 3)
        assert len(runs_of(service, name)) == 1

    def test_that_nobody_can_ask_about_attach_all_the_same(self, attach, caplog):
        step(attach(server="http://127.0.0.1:9", on_conflict="refuse"))
        assert "is checked when the run is registered" in caplog.text


def test_a_wrong_choice_is_told(attach):
    with pytest.raises(InvalidArgument, match='on_conflict is "new", "take_over" or "refuse", got \'merge\''):
        attach(on_conflict="merge")

"""Scalars of all steps arrive once, whoever is killed: the training that goes on from its checkpoints, or the service."""

import json
import random
import time
from contextlib import closing

import pytest

import tsemon
from tests import zoo
from tests.processes import Program
from tsemon.transport import sync
from tsemon_client import Client
from tsemon_server.store import Store

NAMES = "a", "val/b", "c"


def given_at(step):
    """The scalars of a step: any of three, at random."""
    chance = random.Random(step)
    return {name: chance.random() for name in NAMES if chance.random() < 0.4}


class TestScalarsOfEveryStep:
    @pytest.mark.parametrize("num_steps", [1200, pytest.param(6000, marks=pytest.mark.thorough)])
    def test_arrive_once_through_kills(self, serve, tmp_path, num_steps):
        chance, service, errors = random.Random(0), serve(settles=True), tmp_path / "errors"
        for number in range(60):
            with errors.open("a") as file:
                program = Program(train, service.url, num_steps, tmp_path, stderr=file)
            began = checkpoint(tmp_path)["step"]
            until = time.monotonic() + 60
            while checkpoint(tmp_path)["step"] == began and program.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.5))
            if number % 2:
                service.kill()
                service.start()
            if program.poll() is not None:
                break
            program.kill()
            program.wait()
        assert program.returncode == 0, errors.read_text()
        assert number >= 3
        sync(tmp_path / "spool", service.url)
        with closing(Store(service.database)) as store, store.read() as reader, Client(service.url) as client:
            run_id = client.find_run("r").run_id
            for name in (*NAMES, "loss"):
                found = reader.frames.metric(run_id, "scalars", name).samples()
                values = dict(zip(found.steps.tolist(), found.values[:, 0].tolist(), strict=True))
                expected = {
                    step: loss_at(step) if name == "loss" else given_at(step).get(name) for step in range(num_steps)
                }
                assert values == {step: value for step, value in expected.items() if value is not None}
                assert len(values) == len(found.steps)


def loss_at(step):
    return 1.0 + step / 2**20


def checkpoint(folder):
    try:
        return json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"step": 0}


def train(url, num_steps, folder):
    model, _ = zoo.torch_encoder()
    state = checkpoint(folder)
    monitor = tsemon.attach(model, run="r", server=url, every=500, spool_dir=folder / "spool")
    if state["step"]:
        monitor.load_state_dict(state)
    for step in range(state["step"], num_steps):
        monitor.step(loss=loss_at(step), **given_at(step))
        time.sleep(0.001)
        if step % 40 == 39:
            (folder / "new.json").write_text(json.dumps(monitor.state_dict()))
            (folder / "new.json").rename(folder / "checkpoint.json")
    monitor.close(timeout_s=60)

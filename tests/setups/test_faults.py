"""When something goes wrong, in the training, in tsemon or around both, the training does what it would have done."""

import itertools
import resource
import shutil
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import tsemon
from tests.setups import loops
from tests.setups.harness import (
    GPT,
    METRICS,
    NUM_STEPS,
    Footprint,
    attach,
    frames_in,
    missing,
    outcome_of,
    plain_loop,
    seeded,
    unwatched,
    values,
    watched,
)
from tests.setups.matrix import ATTENTION, GRADIENTS, HIDDEN_STATES, UPDATES
from tests.setups.test_side_by_side import measured

TORCH, TSEMON = (f"{Path(package.__file__).parent}/" for package in (torch, tsemon))
PLAIN = loops.SETUPS[0]
PLACES = ["attention", "forward", "backward", "optimizer"]
ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]


class Fuse(nn.Module):
    """Raises its error, once it has one, in the forward or in the backward pass."""

    def __init__(self, is_late):
        super().__init__()
        self.error = None
        self.is_late = is_late

    def forward(self, x):
        if not self.is_late:
            self.burn()
        elif x.requires_grad:
            x = x * 1
            x.register_hook(lambda _: self.burn())
        return x

    def burn(self):
        if self.error is not None:
            raise self.error


class FusedAdamW(torch.optim.AdamW):
    def __init__(self, parameters, fuse):
        super().__init__(parameters, lr=1e-3)
        self.fuse = fuse

    def step(self, closure=None):
        self.fuse.burn()
        return super().step(closure)


def with_fuse(place, fuse):
    """The plain loop, and a place where it can break."""
    model = GPT(is_fused=False)
    block = model.transformer["h"][1]
    if place == "attention":
        block.attn.weights_seen = fuse
    elif place != "optimizer":
        block.mlp.append(fuse)
    return plain_loop(lambda: model, (lambda p: FusedAdamW(p, fuse)) if place == "optimizer" else loops.adamw)


def users_frames(error):
    """The traceback without what torch and tsemon do in between."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.name, f.lineno) for f in frames if not f.filename.startswith((TORCH, TSEMON))]


class Broken:
    """A training that breaks in its second step and goes on after it."""

    def __init__(self, place, kind, folder=None):
        fuse, error, losses = Fuse(is_late=place == "backward"), kind("blown"), []
        training = seeded(lambda: with_fuse(place, fuse))
        training.step()
        before = Footprint(training)
        monitor = attach(training, folder) if folder else None
        for step in range(NUM_STEPS):
            fuse.error = error if step == 1 else None
            try:
                losses.append(training.step())
            except BaseException as raised:
                self.raised = raised
                training.optimizer.zero_grad()
                continue
            if monitor is not None:
                monitor.step(loss=losses[-1])
        assert self.raised is error
        if monitor is not None:
            monitor.close()
            self.status, self.frames = monitor.status, frames_in(folder)
        self.traces = Footprint(training).differs_from(before)
        self.outcome = outcome_of(training, losses)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", PLACES)
class TestATrainingThatBreaksInASampledStep:
    def test_breaks_and_goes_on_as_without_tsemon(self, place, kind, tmp_path):
        plain, broken = Broken(place, kind), Broken(place, kind, tmp_path)
        assert broken.outcome.differs_from(plain.outcome) == []
        assert users_frames(broken.raised) == users_frames(plain.raised)
        assert (broken.raised.__context__, broken.raised.__cause__) == (None, None)

    def test_is_left_clean_and_its_next_sampled_step_is_whole(self, place, kind, tmp_path):
        broken = Broken(place, kind, tmp_path)
        assert broken.traces == []
        assert broken.status.faults == ()
        assert [frame["step"] for frame in broken.frames] == [0, 1, 2]
        assert missing(broken.status) == {}
        for frame in broken.frames:
            for metrics in METRICS.values():
                assert all(values(frame, metric).isfinite().all() for metric in metrics)

    def test_is_said_to_have_failed_and_left_clean_where_it_ends_there(self, place, kind, tmp_path):
        fuse = Fuse(is_late=place == "backward")
        training = seeded(lambda: with_fuse(place, fuse))
        training.step()
        before = Footprint(training)
        fuse.error = kind("blown")
        with pytest.raises(kind, match="blown"), attach(training, tmp_path):
            training.step()
        assert Footprint(training).differs_from(before) == []


@contextmanager
def broken_torch(name, result):
    """A function that tsemon calls and the training does not, broken: it raises `result`, or returns it."""
    owner, _, attribute = name.rpartition(".")
    owner = torch.Tensor if owner else torch
    whole = getattr(owner, attribute)

    def broken(*args, **kwargs):
        if isinstance(result, BaseException):
            raise result
        return (
            [x * result for x in whole(*args, **kwargs)]
            if isinstance(args[0], list)
            else whole(*args, **kwargs) * result
        )

    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, whole)


BROKEN_PARTS = {"Tensor.nanmean": (HIDDEN_STATES, ATTENTION), "_foreach_norm": (GRADIENTS, UPDATES)}


@pytest.mark.parametrize("part", BROKEN_PARTS)
class TestAMeasureThatBreaks:
    def train(self, part, result, folder):
        """Broken in the second step and whole again after it."""
        training, losses = seeded(PLAIN.build), []
        before = Footprint(training)
        monitor = attach(training, folder)
        for step in range(NUM_STEPS):
            with broken_torch(part, result) if step == 1 else nullcontext():
                losses.append(training.step())
                monitor.step(loss=losses[-1])
        monitor.close()
        assert Footprint(training).differs_from(before) == []
        assert outcome_of(training, losses).differs_from(unwatched(PLAIN)) == []
        return monitor.status, frames_in(folder)

    @pytest.mark.parametrize("kind", [ZeroDivisionError, torch.OutOfMemoryError])
    def test_costs_its_own_values_of_that_step_and_is_told(self, part, kind, tmp_path):
        status, frames = self.train(part, kind("broken"), tmp_path)
        assert any(f"{kind.__name__}: broken" in fault for fault in status.faults)
        intact = watched(PLAIN, 1).frames
        assert [frame["step"] for frame in frames] == list(range(NUM_STEPS))
        assert measured(frames[:1] + frames[2:]) == measured(intact[:1] + intact[2:])
        for family in METRICS.keys() - set(BROKEN_PARTS[part]):
            for metric in METRICS[family]:
                assert torch.equal(values(frames[1], metric), values(intact[1], metric))

    def test_that_answers_nan_is_written_down_as_nan(self, part, tmp_path):
        status, frames = self.train(part, torch.nan, tmp_path)
        assert status.faults == ()
        metrics = [metric for family in BROKEN_PARTS[part] for metric in METRICS[family]]
        assert any(values(frames[1], metric).isnan().all() for metric in metrics)
        assert all(values(frames[2], metric).isfinite().all() for metric in metrics)

    def test_lets_an_interrupt_through(self, part, tmp_path):
        """Ctrl-C may come while tsemon measures. It is the user's, and what follows is whole again."""
        training = seeded(PLAIN.build)
        before = Footprint(training)
        interrupt = KeyboardInterrupt()
        with attach(training, tmp_path) as monitor:
            monitor.step(loss=training.step())
            with broken_torch(part, interrupt), pytest.raises(KeyboardInterrupt) as raised:
                monitor.step(loss=training.step())
            assert raised.value is interrupt
            training.optimizer.zero_grad()
            for _ in range(2):
                monitor.step(loss=training.step())
            assert missing(monitor.status) == {}
            assert monitor.status.faults == ()
        assert Footprint(training).differs_from(before) == []


@contextmanager
def interrupt_at(num_calls):
    """Ctrl-C when tsemon calls a function of its own for the n-th time."""
    calls = itertools.count(1)

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(TSEMON) and next(calls) == num_calls:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class TestAnInterruptInStep:
    @pytest.mark.parametrize("num_calls", [1, 2, 4, 8, 16])
    def test_is_let_through_and_what_follows_is_whole_again(self, num_calls, tmp_path):
        training = seeded(PLAIN.build)
        before = Footprint(training)
        with attach(training, tmp_path) as monitor:
            loss = training.step()
            with pytest.raises(KeyboardInterrupt), interrupt_at(num_calls):
                monitor.step(loss=loss)
            for _ in range(2):
                monitor.step(loss=training.step())
            assert missing(monitor.status) == {}
            assert monitor.status.faults == ()
        assert Footprint(training).differs_from(before) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a process and its child left. A deadlock in either is a timeout here."""
    folder = tmp_path_factory.mktemp("fork")
    program = [sys.executable, "-m", "tests.setups.forking", folder, "http://127.0.0.1:9"]
    subprocess.run(program, check=True, timeout=120)
    return folder


class TestAForkedProcess:
    @pytest.mark.parametrize("process", ["parent", "child"])
    def test_trains_on_as_without_tsemon(self, folder, process):
        outcome = torch.load(folder / process, weights_only=False)  # classes of ours are in it
        # Python seeds its own generator anew in every forked child.
        assert outcome.differs_from(unwatched(PLAIN)) == ["random state of Python"] * (process == "child")

    def test_exits_as_it_likes(self, folder):
        assert (folder / "exit code").read_text() == "7"

    def test_neither_ends_the_run_nor_writes_into_it(self, folder):
        assert (folder / "run").read_text() == "goes on"
        frames = frames_in(folder / "spool")
        assert [frame["seq"] for frame in frames] == list(range(NUM_STEPS))
        assert measured(frames) == measured(watched(PLAIN, 1).frames)


class TestDelivery:
    def train(self, folder, between=lambda: None, **options):
        training, losses = seeded(PLAIN.build), []
        monitor = attach(training, folder, **options)
        for step in range(NUM_STEPS):
            if step == 2:
                between()
            losses.append(training.step())
            monitor.step(loss=losses[-1])
        monitor.close(timeout_s=0.5)
        assert outcome_of(training, losses).differs_from(unwatched(PLAIN)) == []
        return monitor.status

    def test_to_a_full_disk_does_not_stop_the_training(self, tmp_path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            status = self.train(tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "File too large" in status.delivery.last_error
        assert any("are lost" in fault for fault in status.faults)

    def test_to_a_folder_that_was_deleted_goes_on_in_a_new_one(self, tmp_path):
        def delete():
            while (tmp_path / "spool").exists():  # a segment may begin in it meanwhile
                shutil.rmtree(tmp_path / "spool", ignore_errors=True)

        self.train(tmp_path / "spool", delete)
        assert measured(frames_in(tmp_path / "spool"))[-2:] == measured(watched(PLAIN, 1).frames)[-2:]

    def test_to_a_server_that_is_dead_or_silent_leaves_all_in_the_folder(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            status = self.train(tmp_path / "silent", server=f"http://127.0.0.1:{port}")
        assert status.delivery.num_sent == 0
        status = self.train(tmp_path / "dead", server=f"http://127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in status.delivery.last_error
        for folder in ("silent", "dead"):
            assert measured(frames_in(tmp_path / folder)) == measured(watched(PLAIN, 1).frames)

import gc
import itertools
import json
import logging
import math
import re
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tsemon
from tests import zoo
from tests.frames import frames_in, scalars_in, values_of
from tests.tsemon.test_actions import alert
from tsemon.calm import Calm
from tsemon.catalogue import CATALOGUE, LAYERED
from tsemon.errors import InvalidArgument, NoBlocksFound, SpoolError, TsemonError, UnknownMetric
from tsemon.schedule import SLOW_EVERY
from tsemon.stacks import Stacks
from tsemon.transport import Spool, find_spools


def num_hooks(model, optimizer=None):
    count = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m)) for m in model.modules())
    if optimizer is not None:
        count += len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return count


def train(model, forward, num_steps, monitor=None, optimizer=None, **given):
    """Losses of a plain loop, with dropout and everything else on."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = forward().float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss=loss, **given)
    return losses


def resume_step_in(folder):
    """What the one spool in this folder says."""
    (path,) = find_spools(folder)
    return json.loads((path / "run.json").read_bytes())["resume_step"]


@pytest.fixture
def attached(tmp_path):
    """A small encoder with a monitor that samples every step into a folder."""
    model, forward = zoo.torch_encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path)
    yield model, forward, optimizer, monitor
    monitor.close()


class TestAttach:
    @pytest.mark.parametrize(
        ("make", "every"),
        [
            (zoo.our_vision_transformer, 1),
            (zoo.gpt2, 7),
            pytest.param(zoo.our_language_model, 7, marks=pytest.mark.thorough),
            pytest.param(zoo.gpt2, 1, marks=pytest.mark.thorough),
        ],
    )
    def test_leaves_losses_and_parameters_bit_equal_over_50_steps(self, make, every, tmp_path):
        def run(attach):
            torch.manual_seed(0)
            model, forward = make()
            torch.manual_seed(1)  # dropout draws from here on
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            monitor = tsemon.attach(model, optimizer, run="r", every=every, spool_dir=tmp_path) if attach else None
            losses = train(model, forward, 50, monitor, optimizer)
            if monitor is not None:
                monitor.close()
                assert monitor.status.num_faults == 0
            return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

        plain, watched = run(attach=False), run(attach=True)
        assert watched[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
        assert torch.equal(plain[2], watched[2])

    def test_two_monitors_watch_one_model(self, tmp_path):
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        first, second = (
            tsemon.attach(model, optimizer, run=run, every=1, spool_dir=tmp_path / run) for run in ("one", "two")
        )
        for _ in range(3):
            forward().square().mean().backward()
            optimizer.step()
            first.step()
            second.step()
        first.close()
        second.close()
        one, two = (frames_in(tmp_path / run) for run in ("one", "two"))
        assert [frame["step"] for frame in one] == [0, 1, 2]
        assert [frame["layers"] for frame in one] == [frame["layers"] for frame in two]

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"run": ""}, InvalidArgument, "run is a name"),
            ({"run": "r", "project": "p\nq"}, InvalidArgument, "project is a name"),
            ({"run": "r", "every": 0}, InvalidArgument, "every is a number of optimizer steps"),
            ({"run": "r", "budget": 2}, InvalidArgument, "budget is tsemon's share"),
            ({"run": "r", "measures": ["token_simlarity"]}, UnknownMetric, "did you mean 'token_similarity'"),
            ({"run": "r", "measures": "loss"}, InvalidArgument, r"write \['loss'\]"),
            ({"run": "r", "tags": [str(i) for i in range(101)]}, InvalidArgument, "at most 100 tags, got 101"),
            ({"run": "r", "resume": 2**60}, InvalidArgument, "resume is the step"),
            ({"run": "\ud800"}, InvalidArgument, "run is a name"),
            ({"run": "r", "config": {"a": "\ud800"}}, InvalidArgument, "config is kept as JSON"),
            ({"run": "r", "config": {"a": "x" * 9_000_000}}, InvalidArgument, "config takes 8.6 MiB"),
            ({"run": "r", "optimizer": torch.optim.AdamW}, InvalidArgument, "optimizer is the torch.optim.Optimizer"),
            ({"run": "r", "spool_dir": 5}, InvalidArgument, "spool_dir is the path of a folder"),
            ({"run": "r", "spool_dir": "a\0b"}, SpoolError, "null"),
            ({"run": "r", "measures": [[1]]}, UnknownMetric, "not in the catalogue"),
            ({"run": "r", "on_alert": 5}, InvalidArgument, "on_alert and on_incident must be functions"),
            ({"run": "r", "budget": "a"}, InvalidArgument, "budget is tsemon's share"),
            ({"run": "r", "tags": 5}, InvalidArgument, "tags is a collection"),
            ({"run": "r", "measures": 5}, InvalidArgument, "measures is a collection"),
            ({"run": "r", "blocks": "layers"}, InvalidArgument, r"write \['layers'\]"),
            ({"run": "r", "resume": True}, InvalidArgument, "resume is the step"),
            ({"run": "r", "config": 5}, InvalidArgument, "config is a mapping"),
            ({"run": "r", "tags": "abc"}, InvalidArgument, r"write \['abc'\]"),
            ({"run": "r", "resume": -1}, InvalidArgument, "resume is the step"),
            ({"run": "r", "server": "localhost:8731"}, InvalidArgument, "http"),
            ({"run": "r", "config": {"model": object()}}, InvalidArgument, "config"),
            ({"run": "r", "optimizer": "adam"}, InvalidArgument, "optimizer"),
            ({"run": "r", "process_group": "world"}, InvalidArgument, "process_group is a group of torch.distributed"),
            ({"run": "r", "stage": 1}, InvalidArgument, "stage is this rank's place in a pipeline"),
            ({"run": "r", "spool_dir": "/proc/no-such-folder"}, SpoolError, "/proc/no-such-folder"),
        ],
    )
    def test_raises_for_wrong_arguments(self, arguments, error, text, tmp_path):
        with pytest.raises(error, match=text):
            tsemon.attach(zoo.torch_encoder()[0], **{"spool_dir": tmp_path} | arguments)
        assert issubclass(error, TsemonError)

    def test_takes_whatever_can_be_looped_over(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(
            model, run="r", measures=iter(["token_similarity"]), tags=iter(["a"]), every=1, spool_dir=tmp_path
        ) as monitor:
            train(model, forward, 1, monitor)
        assert set(frames_in(tmp_path)[0]["layers"]) == {"token_similarity"}

    def test_tells_which_blocks_have_no_trainable_parameter(self, tmp_path):
        model, _ = zoo.torch_encoder()
        model.layers[0].requires_grad_(False)
        model.layers[2].requires_grad_(False)
        model.layers[2].linear1.bias.requires_grad_(True)
        with tsemon.attach(model, run="r", spool_dir=tmp_path):
            (path,) = find_spools(tmp_path)
            assert json.loads((path / "run.json").read_bytes())["frozen_blocks"] == [0]

    def test_warns_once_of_the_optimizer_of_another_model(self, tmp_path, caplog):
        (model, forward), (other, _) = zoo.torch_encoder(), zoo.torch_encoder()
        optimizer = torch.optim.AdamW(other.parameters())
        with (
            caplog.at_level(logging.WARNING, "tsemon"),
            tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path) as monitor,
        ):
            train(model, forward, 3, monitor, optimizer)
        (text,) = (record.getMessage() for record in caplog.records)
        assert "the optimizer trains 0 of the model's 36 parameters" in text
        assert "was it made for another copy of the model?" in text

    def test_raises_for_a_model_without_transformer_blocks(self, tmp_path):
        with pytest.raises(NoBlocksFound, match="found no transformer blocks in Linear"):
            tsemon.attach(torch.nn.Linear(2, 2), run="r", spool_dir=tmp_path)

    def test_raises_for_what_is_no_model(self, tmp_path):
        with pytest.raises(InvalidArgument, match=r"watches a torch\.nn\.Module, got str"):
            tsemon.attach("gpt2", run="r", spool_dir=tmp_path)


class TestStep:
    def test_has_hooks_in_the_model_for_sampled_steps_only(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        during, after = [], []

        def count(module, *_):
            if module.training:  # an extra pass meets the user's hooks, too
                during.append(num_hooks(model, optimizer))

        model.layers[1].linear1.register_forward_hook(count)
        own = num_hooks(model, optimizer)
        with tsemon.attach(model, optimizer, run="r", every=3, spool_dir=tmp_path) as monitor:
            for _ in range(7):
                train(model, forward, 1, monitor, optimizer)
                after.append(num_hooks(model, optimizer) - own)
        during = [count - own for count in during]
        assert [count > 0 for count in during] == [True, False, False, True, False, False, True]
        assert [count > 0 for count in after] == [False, False, True, False, False, True, False]
        assert max(after) < max(during), "between two steps only the gate and the optimizer are watched"

    def test_writes_a_frame_for_each_sampled_step(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        with tsemon.attach(model, optimizer, run="r", every=3, spool_dir=tmp_path) as monitor:
            losses = train(model, forward, 8, monitor, optimizer)
        frames = frames_in(tmp_path)
        assert [frame["step"] for frame in frames] == [0, 3, 6, 7]
        assert [frame["seq"] for frame in frames] == [0, 1, 2, 3]
        assert [frame["scalars"]["loss"] for frame in frames[:3]] == pytest.approx([losses[step] for step in (0, 3, 6)])
        assert scalars_in(tmp_path, "loss") == dict(enumerate(pytest.approx(loss) for loss in losses))
        assert not frames[-1]["layers"], "what close() sends has summaries of losses only"

    @pytest.mark.parametrize("every", [None, 50])
    def test_sends_a_loss_that_was_not_finite_after_the_last_sample(self, tmp_path, every):
        with tsemon.attach(zoo.torch_encoder()[0], run="r", every=every, spool_dir=tmp_path) as monitor:
            for step in range(40):
                monitor.step(loss=math.nan if step == 37 else 1.0)
        assert sum(frame["scalars"].get("loss_nonfinite", 0) for frame in frames_in(tmp_path)) > 0

    def test_does_nothing_between_samples_that_modes_of_the_user_could_see(self, tmp_path):
        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", spool_dir=tmp_path) as monitor:
            train(model, forward, 2, monitor)
            seen, loss, norm = [], torch.tensor(2.0), torch.tensor(1.0)
            for mode in (Functions, Operations) * 2:
                with mode():
                    monitor.step(loss=loss)
                    monitor.step(loss=loss, grad_norm=norm)
            assert set(seen) <= {torch._C._set_grad_enabled}
            assert monitor.status.is_loss_watched
        assert monitor.status.num_faults == 0

    def test_says_in_its_frames_what_is_not_measured_once_and_whenever_that_changes(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path) as monitor:
            train(model, forward, 5, monitor)
            not_measured = monitor.status.not_measured
        told = [frame.get("not_measured") for frame in frames_in(tmp_path)]
        assert "update_norm" in not_measured
        said = [reasons for reasons in told if reasons is not None]
        assert said[-1] == dict(not_measured)
        assert told[0] is not None
        assert all(before != after for before, after in itertools.pairwise(said))
        assert len(said) < len(told)

    def test_measures_the_whole_catalogue(self, tmp_path):
        model, forward = zoo.our_language_model()  # de-escalated, so that nothing is missing
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        every = {metric.name for metric in CATALOGUE}
        with tsemon.attach(model, optimizer, run="r", every=1, measures=every, spool_dir=tmp_path) as monitor:
            given = {"sequence_losses": [1.0, 2.0, 3.0, 4.0], "grad_norm": 1.0}
            train(model, forward, 3 * SLOW_EVERY + 1, monitor, optimizer, **given)
            assert monitor.status.not_measured == {}
        frame = frames_in(tmp_path)[3 * SLOW_EVERY]  # by then growth has an exponent, and the loss a noise
        assert {*frame["layers"], *frame["scalars"]} == every
        for name, metric in LAYERED.items():
            assert frame["layers"][name]["shape"] == [Stacks.of(3).num_entries(metric.axis)], name
            assert all(math.isfinite(value) for value in values_of(frame, name)), name
        assert all(math.isfinite(value) for value in frame["scalars"].values())
        heads = {name: array["shape"] for name, array in frame["heads"].items()}
        assert heads == {name: [3, 4] for name, metric in LAYERED.items() if metric.per_head}

    def test_keeps_further_scalars(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(loss=torch.tensor(2.0), accuracy=0.5, tokens=torch.tensor(3))
        monitor.close()
        scalars = frames_in(tmp_path)[0]["scalars"]
        assert (scalars["loss"], scalars["accuracy"], scalars["tokens"]) == (2.0, 0.5, 3.0)

    @pytest.mark.parametrize("as_given", [int, torch.tensor], ids=["numbers", "tensors"])
    def test_adds_up_the_tokens_of_each_step_sampled_or_not(self, tmp_path, as_given):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=3, spool_dir=tmp_path) as monitor:
            for step in range(7):
                monitor.step(loss=1.0, step_tokens=as_given(2**24 + step))
        totals = [sum(2**24 + step for step in range(last + 1)) for last in (0, 3, 6)]
        assert [frame["scalars"]["tokens"] for frame in frames_in(tmp_path)] == pytest.approx(totals, rel=1e-7)
        assert monitor.state_dict()["tokens"] == totals[-1]
        assert monitor.status.num_faults == 0

    def test_takes_the_tokens_so_far_before_those_of_the_step(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(tokens=1000, step_tokens=10)
        monitor.step(step_tokens=10)
        monitor.step()
        monitor.close()
        assert [frame["scalars"].get("tokens") for frame in frames_in(tmp_path)] == [1000, 1010, None]

    def test_says_once_that_tokens_are_all_so_far_if_they_do_not_grow(self, attached, tmp_path, caplog):
        *_, monitor = attached
        for _ in range(3):
            monitor.step(tokens=256)
        assert caplog.text.count("pass the tokens of one step as step_tokens=") == 1
        assert monitor.status.num_faults == 0

    @pytest.mark.parametrize("wrong", ["high", -1, math.nan, torch.zeros(3)], ids=["text", "less", "nan", "vector"])
    def test_contains_a_number_of_tokens_that_is_none(self, attached, tmp_path, wrong):
        *_, monitor = attached
        monitor.step(step_tokens=5)
        monitor.step(step_tokens=wrong)
        monitor.step(step_tokens=5)
        monitor.close()
        assert [frame["scalars"].get("tokens") for frame in frames_in(tmp_path)] == [5, None, 10]
        assert "step_tokens must be one number >= 0, got" in monitor.status.faults[0]

    @pytest.mark.parametrize(
        "wrong", ["high", torch.zeros(3), torch.tensor(1 + 2j), object()], ids=["text", "vector", "complex", "object"]
    )
    def test_contains_a_scalar_that_is_no_number_and_keeps_the_rest(self, attached, tmp_path, wrong):
        *_, monitor = attached
        monitor.step(loss=wrong, accuracy=0.5)
        monitor.step(loss=1.0)
        monitor.close()
        first, second = frames_in(tmp_path)
        assert {"loss", "loss_mean"}.isdisjoint(first["scalars"])
        assert first["scalars"]["accuracy"] == 0.5
        assert second["scalars"]["contained_faults"] == 1.0
        assert "loss" in monitor.status.faults[0]

    def test_takes_none_for_a_number_that_was_not_given(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(loss=None, grad_norm=None, accuracy=0.5)
        monitor.close()
        scalars = frames_in(tmp_path)[0]["scalars"]
        assert {"loss", "grad_norm"}.isdisjoint(scalars)
        assert scalars["accuracy"] == 0.5
        assert monitor.status.num_faults == 0

    def test_leaves_the_norm_of_a_gradient_out_if_it_is_unknown_and_finite(self, attached, tmp_path):
        """NaN would say that the gradient is not finite."""
        model, _, optimizer, monitor = attached
        for value in (1.0, math.nan):
            for p in model.parameters():
                p.grad = torch.full_like(p, value)  # without a backward pass
            optimizer.step()
            monitor.step(loss=1.0)
        monitor.close()
        unknown, not_finite = (frame["scalars"] for frame in frames_in(tmp_path))
        assert "total_grad_norm" not in unknown
        assert unknown["total_clipped_grad_norm"] > 0
        assert not_finite["total_grad_norm"] is None is not_finite["total_clipped_grad_norm"]
        assert "were not made by a backward pass" in monitor.status.not_measured["total_grad_norm"]

    def test_leaves_out_a_scalar_whose_name_the_service_would_refuse(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(**{"val loss": 1.0, "val/loss": 2.0})
        monitor.close()
        scalars = frames_in(tmp_path)[0]["scalars"]
        assert scalars["val/loss"] == 2.0
        assert "val loss" not in scalars
        assert "'val loss' given to monitor.step() was left out" in monitor.status.faults[0]

    def test_leaves_out_a_scalar_with_the_name_of_a_metric(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(loss=1.0, token_similarity=0.5, learning_rate=9.0, val_loss=2.0)
        monitor.close()
        scalars = frames_in(tmp_path)[0]["scalars"]
        assert scalars["val_loss"] == 2.0
        assert "token_similarity" not in scalars
        (fault,) = monitor.status.faults
        assert fault.startswith("'token_similarity' given to monitor.step() was left out: tsemon measures a metric")

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (torch.ones(3), "a torch.float32 tensor of shape (3,)"),
            (torch.tensor(1 + 2j), "a torch.complex64 tensor of shape ()"),
            (torch.ones((), device="meta"), "a torch.float32 tensor of shape () without a value"),
            (1 + 2j, "a complex"),
            ([1.0], "a list"),
            ({"loss": 1.0}, "a dict"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("name", ["loss", "grad_norm"])
    @pytest.mark.parametrize("every", [1, 100])
    def test_warns_at_any_step_of_what_is_not_one_number(self, tmp_path, caplog, every, name, value, what):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=every, spool_dir=tmp_path) as monitor:
            monitor.step()
            with caplog.at_level(logging.WARNING, "tsemon"):
                for _ in range(3):
                    monitor.step(**{name: value})
        [record] = caplog.records
        expected = "was left out: expected one real number, or a tensor with one element"
        assert record.getMessage() == f"tsemon: '{name}' given to monitor.step() {expected}, got {what}"
        assert record.exc_info is None

    def test_keeps_a_loss_that_is_nan(self, attached, tmp_path):
        *_, monitor = attached
        monitor.step(loss=torch.tensor(math.nan))
        monitor.close()
        assert frames_in(tmp_path)[0]["scalars"]["loss"] is None

    def test_contains_a_probe_that_raises(self, attached, tmp_path, monkeypatch, caplog):
        model, forward, optimizer, monitor = attached
        monkeypatch.setattr("tsemon.measures.sequences.token_statistics", lambda *_: 1 / 0)
        with caplog.at_level(logging.WARNING, "tsemon"):
            train(model, forward, 3, monitor, optimizer)
        monitor.close()
        assert monitor.status.num_faults > 0
        assert len([r for r in caplog.records if "ZeroDivisionError" in r.getMessage()]) == 1, "said once"
        assert all("param_norm" in frame["layers"] for frame in frames_in(tmp_path))

    def test_goes_on_after_the_users_model_raised_in_a_sampled_step(self, attached, tmp_path):
        model, forward, optimizer, monitor = attached
        with pytest.raises(AssertionError, match="embedding dimension"):
            model(torch.zeros(12, 4, 31))
        train(model, forward, 2, monitor, optimizer)
        monitor.close()
        assert [frame["step"] for frame in frames_in(tmp_path)] == [0, 1]

    def test_counts_from_the_step_that_was_resumed(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=10, resume=800, spool_dir=tmp_path) as monitor:
            train(model, forward, 11, monitor)
        assert [frame["step"] for frame in frames_in(tmp_path)] == [800, 810]

    def test_tells_whether_the_step_under_way_is_sampled(self, tmp_path):
        model, forward = zoo.torch_encoder()
        told = []
        with tsemon.attach(model, run="r", every=2, spool_dir=tmp_path) as monitor:
            for _ in range(4):
                told.append(monitor.is_sampling)
                train(model, forward, 1, monitor)
        assert told == [True, False, True, False]
        assert not monitor.is_sampling, "closed"

    def test_warns_once_of_steps_after_it_was_closed(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=2, spool_dir=tmp_path) as monitor:
            train(model, forward, 4, monitor)
        train(model, forward, 3, monitor)
        (warning,) = monitor.status.faults
        assert "after monitor.close()" in warning
        assert [frame["step"] for frame in frames_in(tmp_path)] == [0, 2, 3]

    def test_stays_within_the_budget(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", budget=0.01, spool_dir=tmp_path) as monitor:
            train(model, forward, 60, monitor)
            assert monitor.status.gap > 1
        assert len(frames_in(tmp_path)) < 60

    def test_leaves_gradients_on_when_an_interrupt_passes(self, attached, monkeypatch):
        def interrupted(*args, **kwargs):
            torch._C._set_grad_enabled(False)
            raise KeyboardInterrupt

        *_, monitor = attached
        monkeypatch.setattr(monitor._probe, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            monitor.step()
        assert torch.is_grad_enabled()


class TestClose:
    def test_leaves_no_hook(self, attached):
        model, _, optimizer, monitor = attached
        monitor.close()
        assert num_hooks(model, optimizer) == 0

    def test_may_be_called_twice_and_step_after_it(self, attached, tmp_path):
        *_, monitor = attached
        monitor.close()
        monitor.close()
        monitor.step(loss=1.0)
        assert frames_in(tmp_path) == []

    def test_says_failed_when_the_block_raised(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), tsemon.attach(zoo.torch_encoder()[0], run="r", spool_dir=tmp_path):
            raise KeyboardInterrupt
        spool = Spool.open(find_spools(tmp_path)[0])
        assert spool.end_state == "failed"
        spool.close()

    @pytest.mark.parametrize(("code", "state"), [(None, "finished"), (0, "finished"), (1, "failed"), ("no", "failed")])
    def test_says_what_the_exit_code_of_a_block_says(self, tmp_path, code, state):
        with pytest.raises(SystemExit), tsemon.attach(zoo.torch_encoder()[0], run="r", spool_dir=tmp_path):
            sys.exit(code)
        spool = Spool.open(find_spools(tmp_path)[0])
        assert spool.end_state == state
        spool.close()

    def test_lets_the_model_go(self, tmp_path):
        model = zoo.torch_encoder()[0]
        kept = weakref.ref(model)
        monitor = tsemon.attach(model, run="r", spool_dir=tmp_path)
        monitor.close()
        del model
        gc.collect()
        assert kept() is None

    def test_happens_when_the_monitor_is_forgotten(self, tmp_path):
        model, _ = zoo.torch_encoder()
        monitor = tsemon.attach(model, run="r", spool_dir=tmp_path)
        del monitor
        gc.collect()
        assert num_hooks(model) == 0
        spool = Spool.open(find_spools(tmp_path)[0])
        assert spool.end_state == "finished"
        spool.close()

    @pytest.mark.parametrize(("last_line", "state"), [("", "finished"), ("raise SystemError", "failed")])
    def test_happens_at_interpreter_exit(self, tmp_path, last_line, state):
        code = (
            "import torch, tsemon; from tests import zoo\n"
            "model, forward = zoo.torch_encoder()\n"
            f"monitor = tsemon.attach(model, run='r', every=1, spool_dir={str(tmp_path)!r})\n"
            "forward().sum().backward()\n"
            "monitor.step(loss=1.0)\n"
            f"{last_line}\n"
        )
        subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL, timeout=120)
        assert len(frames_in(tmp_path)) == 1
        spool = Spool.open(find_spools(tmp_path)[0])
        assert spool.end_state == state
        spool.close()


class TestAHandlerOfTheUsersLogThatRaises:
    def test_does_not_reach_the_training(self, attached):
        model, forward, optimizer, monitor = attached

        class Broken(logging.Filter):
            def filter(self, record):
                raise RuntimeError("a broken log")

        broken = Broken()
        logging.getLogger("tsemon").addFilter(broken)
        try:
            monitor.step(loss="no number")
            train(model, forward, 2, monitor, optimizer)
        finally:
            logging.getLogger("tsemon").removeFilter(broken)
        assert monitor.status.num_faults == 1


class TestStateDict:
    def test_takes_the_training_on_from_its_checkpoint(self, attached, tmp_path):
        model, forward, optimizer, monitor = attached
        train(model, forward, 3, monitor, optimizer)
        torch.save(monitor.state_dict(), tmp_path / "checkpoint.pt")
        monitor.close()
        again = tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path / "again")
        again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
        assert again.state_dict() == torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        train(model, forward, 2, again, optimizer)
        again.close()
        assert [frame["step"] for frame in frames_in(tmp_path / "again")] == [3, 4]
        assert resume_step_in(tmp_path / "again") == 3
        assert again.status.num_faults == 0

    def test_goes_on_counting_tokens(self, attached, tmp_path):
        model, *_, monitor = attached
        monitor.step(step_tokens=torch.tensor(40))
        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path / "again") as again:
            again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
            again.step(step_tokens=2)
        assert frames_in(tmp_path / "again")[0]["scalars"]["tokens"] == 42

    def test_does_not_begin_at_zero_tokens_in_the_middle_of_a_run(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, resume=800, spool_dir=tmp_path) as monitor:
            monitor.step(step_tokens=2)
            assert "pass tokens= (all tokens so far)" in monitor.status.not_measured["tokens"]
            monitor.step(tokens=8000, step_tokens=2)
            assert "tokens" not in monitor.status.not_measured
        first, second = frames_in(tmp_path)
        assert "tokens" not in first["scalars"]
        assert "tokens" in first["not_measured"]
        assert second["scalars"]["tokens"] == 8000

    def test_takes_it_on_in_the_cadence_that_was_asked_for(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=4, spool_dir=tmp_path) as monitor:
            monitor.load_state_dict({"project": "default", "run": "r", "step": 10})
            train(model, forward, 6, monitor)
        assert [frame["step"] for frame in frames_in(tmp_path)] == [10, 14, 15]

    @pytest.mark.parametrize("wrong", [{"step": 3}, {}, None, "step 3"])
    def test_changes_nothing_once_there_was_a_step(self, attached, tmp_path, wrong, caplog):
        model, forward, optimizer, monitor = attached
        train(model, forward, 1, monitor, optimizer)
        monitor.load_state_dict(wrong)
        train(model, forward, 1, monitor, optimizer)
        monitor.close()
        assert [frame["step"] for frame in frames_in(tmp_path)] == [0, 1]
        assert resume_step_in(tmp_path) is None
        assert "load_state_dict() goes before the first step" in caplog.text

    @pytest.mark.parametrize(
        ("state", "text"),
        [
            (None, "takes what state_dict.. of a monitor returned, got NoneType"),
            ([3], "got list"),
            ({}, r"got the keys \[\]"),
            ({"project": "default", "run": "r", "step": -1}, "is an int >= 0, got -1"),
            ({"project": "default", "run": "r", "step": True}, "got True"),
            ({"project": "default", "run": "r", "step": "2"}, "got '2'"),
            ({"project": "default", "run": "q", "step": 3}, r"of the run 'q' of project 'default'.*resume=3"),
            ({"project": "p", "run": "r", "step": 3}, "attach under that name"),
            ({"step": 3}, r"got the keys \['step'\]"),
            ({"project": "default", "run": "r", "step": 3, "tokens": -1}, "tokens must be one number >= 0, got -1"),
            *(
                (
                    {"project": "default", "run": "r", "step": 3, "losses": losses},
                    "lists of numbers, first and last, got",
                )
                for losses in (
                    3,
                    [1.0],
                    {"first": [1.0]},
                    {"first": [1.0], "last": ["high"]},
                    {"first": 1.0, "last": []},
                    {"first": "12", "last": "34"},
                    {"first": [10**400], "last": []},
                )
            ),
        ],
    )
    def test_of_something_else_is_refused_before_the_training(self, attached, state, text):
        monitor = attached[-1]
        with pytest.raises(InvalidArgument, match=text):
            monitor.load_state_dict(state)
        assert monitor.state_dict()["step"] == 0

    def test_of_the_step_that_attach_was_told_is_no_other_attempt(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, resume=20, on_conflict="refuse", spool_dir=tmp_path) as monitor:
            registration = dict(monitor._outbox._spool.registration)
            monitor.load_state_dict({"project": "default", "run": "r", "step": 20, "tokens": 40})
            assert monitor._outbox._spool.registration == registration
            monitor.step(step_tokens=2)
        assert frames_in(tmp_path)[0]["scalars"]["tokens"] == 42

    def test_goes_before_what_attach_was_told(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, resume=50, spool_dir=tmp_path) as monitor:
            monitor.load_state_dict({"project": "default", "run": "r", "step": 20})
            train(model, forward, 1, monitor)
        assert [frame["step"] for frame in frames_in(tmp_path)] == [20]
        assert resume_step_in(tmp_path) == 20


class TestStatus:
    def test_says_in_words_what_is_watched_and_what_is_not(self, attached):
        model, forward, optimizer, monitor = attached
        train(model, forward, 1, monitor, optimizer)
        text = str(monitor)
        assert "blocks        3: layers.0, layers.1, layers.2" in text
        assert "token_similarity" in text
        assert "every 1 steps, with slow metrics every 10" in text
        assert "activations   4 of 4 hidden states of shape (12, 4, 32)" in text
        assert "attention     in 3 of 3 blocks, 12 of 12 query rows per head, 4 of 4 sequences" in text
        assert "AdamW's update from its state" in text

    def test_groups_what_is_not_measured_by_the_reason(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path) as monitor:
            train(model, forward, 1, monitor)
        reasons = [line for line in str(monitor).splitlines() if "no optimizer was given" in line]
        assert len(reasons) == 1
        assert "grad_norm" in reasons[0]
        assert "update_norm" in reasons[0]

    def test_remembers_what_only_some_samples_measure(self, attached):
        model, forward, optimizer, monitor = attached
        train(model, forward, 2, monitor, optimizer)  # the first is a slow one
        assert "effective_rank" in monitor.status.measured
        slow = next(line for line in str(monitor).splitlines() if line.startswith("  slow"))
        assert "at step 0: " in slow
        assert "effective_rank" in slow
        assert monitor.status.measured["token_similarity"] == 1

    def test_counts_all_of_step_as_overhead_except_for_handlers(self, tmp_path, monkeypatch):
        model, forward = zoo.torch_encoder()

        def slow(*_):
            time.sleep(0.2)

        def overhead_s():
            status = monitor.status
            return status.overhead_ratio * (time.perf_counter() - attached_at)

        with tsemon.attach(model, run="r", every=100, spool_dir=tmp_path, on_alert=slow) as monitor:
            attached_at = time.perf_counter()
            train(model, forward, 3, monitor)
            before_s = overhead_s()
            monkeypatch.setattr(monitor._outbox, "has_news", True)
            monkeypatch.setattr(monitor._outbox, "take_events", lambda: [alert("a", "firing")])
            train(model, forward, 1, monitor)
            assert overhead_s() - before_s < 0.1
            monkeypatch.setattr(monitor._outbox, "take_events", lambda: slow() or [])
            train(model, forward, 1, monitor)
            assert overhead_s() - before_s > 0.15  # the ratio is of slightly more time

    def test_counts_no_cost_twice_when_an_incident_ends_at_close(self, tmp_path, monkeypatch):
        model, forward = zoo.torch_encoder()
        monitor = tsemon.attach(model, run="r", every=1, spool_dir=tmp_path)
        attached_at = time.perf_counter()
        train(model, forward, 20, monitor)
        before_s = monitor.status.overhead_ratio * (time.perf_counter() - attached_at)
        close = monitor._outbox.close
        monkeypatch.setattr(monitor._outbox, "close", lambda **options: (time.sleep(before_s), close(**options)))
        monkeypatch.setattr(monitor._outbox, "take_events", lambda: [alert("a", "firing")])
        monitor.close()
        assert monitor.status.overhead_ratio * (time.perf_counter() - attached_at) < 1.4 * before_s

    def test_has_the_cost_of_the_newest_sample_without_the_steps_before_it(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", spool_dir=tmp_path, budget=1e-9) as monitor:
            train(model, forward, 300, monitor)
            assert monitor.status.gap > 300
            before_s = monitor._cost_s
            monitor.burst(1)
            train(model, forward, 2, monitor)
            assert 0 < monitor.status.sample_s < monitor._cost_s - before_s

    def test_takes_no_number_away_if_another_thread_asks_in_the_middle_of_a_step(self, tmp_path, monkeypatch):
        model, _ = zoo.torch_encoder()
        keep = Calm.keep
        with tsemon.attach(model, run="r", spool_dir=tmp_path, budget=1e-9) as monitor:
            monkeypatch.setattr(Calm, "keep", lambda *numbers: (monitor.status, keep(*numbers))[1])
            for step in range(200):
                monitor.step(loss=200.0 - step)
        means = {frame["step"]: frame["scalars"]["loss_mean"] for frame in frames_in(tmp_path)}
        total = sum(mean * (step - before) for before, (step, mean) in zip([-1, *means], means.items(), strict=False))
        assert total == pytest.approx(sum(range(1, 201)), rel=1e-6)

    def test_tells_of_an_unreachable_server_and_loses_nothing(self, tmp_path):
        model, forward = zoo.torch_encoder()
        monitor = tsemon.attach(model, run="r", every=1, server="http://127.0.0.1:9", spool_dir=tmp_path)
        train(model, forward, 3, monitor)
        monitor.close(timeout_s=0.5)
        assert "127.0.0.1:9" in monitor.status.delivery.last_error
        assert [frame["step"] for frame in frames_in(tmp_path)] == [0, 1, 2]

    def test_names_what_is_measured_what_is_incomplete_and_what_is_not(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.layers[0].parameters())
        with tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path) as monitor:
            train(model, forward, 3, monitor, optimizer)
            lines = str(monitor.status).splitlines()
        kinds = {
            name: sorted({line[:14].strip() for line in lines if re.search(rf"\b{name}\b", line[14:])})
            for name in ("gradient_alignment", "update_norm", "step_size")
        }
        assert kinds == {
            "gradient_alignment": ["measured"],
            "update_norm": ["incomplete"],
            "step_size": ["not measured"],
        }
        (text,) = (line for line in lines if line[14:].startswith("update_norm"))
        assert "which the optimizer given to attach() does not train: if another optimizer trains them" in text

    def test_tells_of_a_folder_that_cannot_be_written(self, caplog):
        with caplog.at_level(logging.WARNING, "tsemon"):
            monitor = tsemon.attach(
                zoo.torch_encoder()[0], run="r", server="http://127.0.0.1:9", spool_dir="/proc/no-such-folder"
            )
        monitor.close(timeout_s=0.1)
        assert "/proc/no-such-folder" in caplog.text
        assert "wait in memory" in monitor.status.faults[0]

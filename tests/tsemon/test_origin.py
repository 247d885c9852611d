"""Where NaN begins is seen before the optimizer spreads it."""

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tsemon
from tests import zoo
from tests.frames import frames_in, values_of
from tsemon.probes.extra_pass import ExtraPass
from tsemon.probes.witness import Witness
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View

BROKEN_AT = 123


class Loop:
    """A training run whose samples are rare from step 10 on."""

    def __init__(self, folder, make_optimizer=torch.optim.AdamW, make=zoo.torch_encoder, **options):
        torch.manual_seed(0)
        self.folder, self.is_clipped, self.before = folder, False, torch.ones(())
        self.model, self._forward = make()
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-3)
        options = {"optimizer": self.optimizer, "budget": 1e-9} | options
        self.monitor = tsemon.attach(self.model, run="r", spool_dir=folder, **options)

    def run(self, num_steps, factor=1.0, *, late=False, gives_loss=True):
        """`late`: each step is given the loss of the one before."""
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            out = self._forward()
            loss = factor * getattr(out, "logits", out).square().mean()
            loss.backward()
            if self.is_clipped:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            given = {"loss": self.before if late else loss} if gives_loss else {}
            self.monitor.step(**given)
            self.before = loss

    def break_weight(self, value=math.nan):
        with torch.no_grad():
            self.model.layers[1].linear1.weight[0, 0] = value

    def frame(self, step=BROKEN_AT):
        return self.frames()[step]

    def frames(self):
        self.monitor.close()
        return {frame["step"]: frame for frame in frames_in(self.folder)}

    def alerts(self):
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        events = [event for view in map(as_view, self.frames().values()) for event in evaluator.advance(state, view)]
        return [event for event in events if event.kind == "firing"]

    @property
    def is_watched(self):
        return any(isinstance(hook, Witness) for hook in self.optimizer._optimizer_step_pre_hooks.values())

    @property
    def not_finite(self):
        return self.monitor.status.how.get("not finite", "")


@pytest.fixture
def loop(tmp_path):
    made = Loop(tmp_path)
    yield made
    made.monitor.close()


@pytest.fixture
def passes(monkeypatch):
    """One entry for each extra pass."""
    seen, run = [], ExtraPass.run
    monkeypatch.setattr(ExtraPass, "run", lambda self, *args: (seen.append(args), run(self, *args))[1])
    return seen


class TestTheFrameOfTheStep:
    @pytest.mark.parametrize("is_clipped", [False, True])
    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
    def test_shows_the_block_whose_weight_is_not_finite(self, tmp_path, optimizer, is_clipped):
        loop = Loop(tmp_path, optimizer)
        loop.is_clipped = is_clipped
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(10)
        assert loop.not_finite == (
            f"the gradient of step {BROKEN_AT}. NaN or infinity begins in the output of layers.1. Before this step, "
            "layers.1.linear1.weight was not finite"
        )
        frame = loop.frame()
        assert values_of(frame, "nonfinite") == [0, 0, 1, 1]
        assert frame["scalars"]["nonfinite_parameters"] == 1
        assert frame["scalars"]["loss"] is None

    def test_shows_the_block_whose_activations_overflow_although_all_weights_are_finite(self, loop):
        loop.run(BROKEN_AT)
        with torch.no_grad():
            for linear in (loop.model.layers[1].linear1, loop.model.layers[1].linear2):
                linear.weight.fill_(1e30)
        loop.run(1)
        assert loop.not_finite.endswith("layers.1. Before this step, all parameters were finite")
        frame = loop.frame()
        assert values_of(frame, "nonfinite") == [0, 0, 1, 1]
        assert frame["scalars"]["nonfinite_parameters"] == 0

    def test_makes_the_rule_fire_with_the_name_of_the_block(self, loop):
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(10)
        alert = next(alert for alert in loop.alerts() if alert.rule.name == "loss-not-finite")
        assert alert.evidence["step"] == BROKEN_AT
        assert "NaN or infinity begins in block 1, " in alert.advice["text"]

    def test_is_followed_by_a_zoom_from_the_next_step_on(self, loop):
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(30)
        steps = [step for step, frame in loop.frames().items() if "nonfinite" in frame["layers"] and step > 100]
        assert steps == [BROKEN_AT + distance for distance in (0, 1, 5, 10, 14)]

    def test_does_not_stand_for_the_slow_tier_that_is_due(self, loop):
        loop.run(BROKEN_AT)
        loop.monitor._cadence._num_since_slow = 10  # or more
        loop.break_weight()
        loop.run(30)
        frames = loop.frames()
        slow = [step for step in frames if step >= BROKEN_AT and "batch_rank" in frames[step]["layers"]]
        assert slow[0] == BROKEN_AT + 1

    def test_has_the_origin_also_if_it_is_sampled_anyway(self, loop):
        loop.run(BROKEN_AT)
        loop.monitor.burst(steps=1)
        loop.run(1)
        loop.break_weight()
        loop.run(1)
        frame = loop.frame(BROKEN_AT + 1)
        assert len(frame["layers"]) > 1
        assert values_of(frame, "nonfinite") == [0, 0, 1, 1]
        assert frame["scalars"]["nonfinite_parameters"] == 1

    def test_has_finite_hidden_states_if_it_begins_behind_them(self, loop):
        loop.run(BROKEN_AT)
        loop.monitor.burst(steps=1)
        loop.run(1)
        loop.run(1, factor=math.nan)
        frame = loop.frame(BROKEN_AT + 1)
        assert values_of(frame, "nonfinite") == [0, 0, 0, 0]
        assert frame["scalars"]["nonfinite_parameters"] == 0

    def test_is_measured_although_the_blocks_run_compiled(self, tmp_path):
        loop = Loop(tmp_path)
        for layer in loop.model.layers:
            layer.compile(backend="eager")
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(1)
        assert values_of(loop.frame(), "nonfinite") == [0, 0, 1, 1]

    def test_needs_no_metric_that_holds_a_batch(self, tmp_path):
        loop = Loop(tmp_path, measures=["nonfinite", "loss_nonfinite"])
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(1)
        frame = loop.frame()
        assert values_of(frame, "nonfinite") == [0, 0, 1, 1]
        assert frame["scalars"]["loss_nonfinite"] == 1


def as_view(frame):
    scalars = {name: math.nan if value is None else value for name, value in frame["scalars"].items()}
    return View(
        frame["step"], scalars, {name: torch.tensor(values_of(frame, name)).numpy() for name in frame["layers"]}
    )


class TestWhereItIsNotSeen:
    """The reason stands in the place of a number."""

    def test_says_that_all_hidden_states_of_the_held_batch_are_finite(self, loop):
        loop.run(BROKEN_AT)
        loop.run(1, factor=math.nan)
        frame = loop.frame()
        assert "nonfinite" not in frame["layers"]
        assert frame["scalars"]["nonfinite_parameters"] == 0
        assert f"Look at the batch of step {BROKEN_AT}, the loss function" in frame["not_measured"]["nonfinite"]
        assert "are finite" in loop.not_finite

    @pytest.mark.parametrize("gives_loss", [True, False])
    def test_is_told_in_its_step_if_the_loss_is_late_or_missing(self, loop, gives_loss):
        loop.run(BROKEN_AT, late=True, gives_loss=gives_loss)
        loop.break_weight()
        loop.run(15, late=True, gives_loss=gives_loss)
        first, *others = loop.alerts()
        assert first.rule.name == "non-finite-update"
        assert (first.evidence["step"], first.evidence["left_step"]) == (BROKEN_AT, BROKEN_AT)
        assert first.evidence["blocks"] == (1, 2)
        assert "NaN or infinity begins in block 1." in first.advice["text"]
        assert [alert.rule.name for alert in others] == ["loss-not-finite"] * gives_loss

    def test_is_told_in_its_step_if_only_the_gradient_is_not_finite(self, loop):
        loop.run(BROKEN_AT)
        loop.model.layers[-1].register_full_backward_hook(lambda _, of_inputs, of_outputs: (math.nan * of_inputs[0],))
        loop.run(5)
        first, after = loop.alerts()
        assert first.rule.name == "non-finite-update"
        assert first.evidence["step"] == BROKEN_AT
        assert first.evidence["blocks"] is None
        assert "were finite: look at the batch of this step" in first.advice["text"]
        assert "begins in block" not in first.advice["text"]
        assert after.rule.name == "loss-not-finite"
        assert "begins in block" not in after.advice["text"]

    def test_does_not_take_what_an_earlier_step_has_spread_for_the_origin(self, loop):
        loop.run(BROKEN_AT)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.fill_(math.nan)
        loop.run(1)
        assert "most parameters were not finite before this step" in loop.not_finite
        assert "nonfinite_parameters" not in loop.frame()["scalars"]

    def test_says_that_no_batch_is_held(self, loop):
        loop.run(BROKEN_AT)
        loop.monitor._probe._held._candidates = []
        loop.break_weight()
        loop.run(1)
        assert "no sequences are held" in loop.not_finite
        assert "nonfinite" not in loop.frame()["layers"]

    def test_is_seen_if_the_closure_is_none(self, tmp_path):
        loop = Loop(tmp_path)
        step = loop.optimizer.step
        loop.optimizer.step = lambda: step(None)  # as Accelerate calls it
        loop.run(BROKEN_AT)
        loop.break_weight()
        loop.run(1)
        assert values_of(loop.frame(), "nonfinite") == [0, 0, 1, 1]

    def test_says_so_if_the_gradients_come_with_the_closure(self, tmp_path):
        loop = Loop(tmp_path)
        loop.run(100)
        loop.break_weight()
        step = loop.optimizer.step
        loop.optimizer.step = lambda: step(lambda: None)
        loop.run(30)
        assert "because the optimizer is given a closure" in loop.not_finite
        assert not any("nonfinite_parameters" in frame["scalars"] for frame in loop.frames().values())

    def test_says_so_without_an_optimizer(self, tmp_path):
        loop = Loop(tmp_path, optimizer=None)
        loop.run(100)
        loop.break_weight()
        loop.run(10)
        reason = "attach() was given no optimizer that trains vectors in a block"
        assert loop.not_finite == f"the loss. It is not known where NaN began, because {reason}"


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class TestTheGradientThatIsRead:
    def test_leaves_the_training_bit_equal(self, tmp_path):
        def train(is_watched):
            loop = Loop(tmp_path / str(is_watched))
            if not is_watched:
                loop.monitor.close()
            loop.run(40)
            return loop

        plain, watched = train(False), train(True)
        assert watched.is_watched
        for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours.grad, theirs.grad)
        watched.monitor.close()

    def test_leaves_weights_gradients_and_random_states_as_they_were_while_it_looks(self, loop):
        loop.run(60)
        loop.break_weight()
        seen = []

        def state():
            grads = [p.grad.clone() for p in loop.model.parameters()]
            return [*(p.detach().clone() for p in loop.model.parameters()), *grads, torch.get_rng_state()]

        look = loop.monitor._probe.look_for_origin

        def looked(**options):
            before, was_training = state(), loop.model.training
            look(**options)
            pairs = zip(before, state(), strict=True)
            seen.append(all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs))
            assert loop.model.training == was_training

        loop.monitor._probe.look_for_origin = looked
        loop.run(1)
        assert seen == [True]

    def test_costs_a_healthy_run_no_pass(self, loop, passes):
        loop.run(20)
        num_passes = len(passes)
        loop.run(60)
        assert len(passes) == num_passes
        assert loop.not_finite == ""

    def test_is_read_again_only_after_a_recovery(self, loop, passes):
        loop.run(BROKEN_AT)
        assert loop.is_watched
        num_passes = len(passes)
        loop.break_weight()
        loop.run(1)
        assert len(passes) == num_passes + 1
        loop.run(30)
        assert sum("nonfinite_parameters" in frame["scalars"] for frame in loop.frames().values()) == 1

    def test_is_read_again_after_a_checkpoint_is_loaded(self, loop):
        loop.run(BROKEN_AT)
        saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        loop.break_weight()
        loop.run(10)
        loop.model.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(saved[1])
        loop.run(67)
        with torch.no_grad():
            loop.model.layers[2].linear1.weight[0, 0] = math.nan
        loop.run(1)
        assert "NaN or infinity begins in the output of layers.2" in loop.not_finite
        frames = loop.frames()
        found = [step for step, frame in frames.items() if "nonfinite_parameters" in frame["scalars"]]
        assert found == [BROKEN_AT, BROKEN_AT + 77]
        assert values_of(frames[found[1]], "nonfinite") == [0, 0, 0, 1]

    def test_raises_no_alert_if_the_optimizer_skips_the_step(self, tmp_path, passes):
        class Careful(torch.optim.AdamW):
            def step(self, closure=None):
                gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
                if all(gradient.isfinite().all() for gradient in gradients):
                    super().step(closure)

        loop = Loop(tmp_path, Careful)
        loop.run(BROKEN_AT, gives_loss=False)
        num_passes = len(passes)
        for _ in range(20):
            loop.run(1, factor=math.nan, gives_loss=False)
        assert ". The optimizer skipped this step" in loop.not_finite
        assert len(passes) < num_passes + 8
        assert loop.alerts() == []

    def test_is_not_read_with_a_fixed_interval(self, tmp_path):
        loop = Loop(tmp_path, every=20, budget=0.01)
        loop.run(2)
        assert not loop.is_watched
        loop.monitor.close()

    def test_is_not_read_if_the_metric_is_not_measured(self, tmp_path):
        loop = Loop(tmp_path, measures=["token_similarity"])
        loop.run(2)
        assert not loop.is_watched
        loop.monitor.close()

    def test_is_not_read_once_the_model_has_moved_to_another_device(self, loop):
        loop.run(5)
        (witness,) = (h for h in loop.optimizer._optimizer_step_pre_hooks.values() if isinstance(h, Witness))
        witness._parameter = nn.Parameter(torch.empty(3, device="meta"))
        witness._parameter.grad = torch.empty(3, device="meta")
        loop.run(1)
        assert witness.is_done
        assert "moved to another device" in witness.why_not
        assert loop.monitor.status.num_faults == 0

    def test_may_be_missing(self, loop):
        loop.run(BROKEN_AT)
        witness = loop.monitor._probe._witness._parameter
        witness.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        loop.break_weight()
        loop.run(2)
        assert "because the optimizer took no step with a gradient that is not finite" in loop.not_finite
        assert loop.monitor.status.num_faults == 0

    def test_is_read_out_of_sight_of_the_users_modes(self, loop):
        loop.run(60)
        with Seeing() as mode:
            loop.monitor._probe._witness(loop.optimizer, (loop.optimizer,), {})
        assert mode.seen == []

    def test_is_passed_over_if_a_scaler_skips_the_step(self, tmp_path):
        loop = Loop(
            tmp_path, partial(torch.optim.AdamW, fused=True)
        )  # it is called all the same, and skips the step itself
        scaler = torch.amp.GradScaler("cpu")
        loop.run(60)
        before = [p.detach().clone() for p in loop.model.parameters()]
        scaler.scale(loop._forward().square().mean() * math.nan).backward()
        scaler.step(loop.optimizer)
        assert all(map(torch.equal, before, loop.model.parameters()))
        loop.monitor.step()
        assert loop.not_finite == ""
        loop.break_weight()
        loop.run(1)
        assert "NaN or infinity begins in the output of layers.1" in loop.not_finite
        loop.monitor.close()

    def test_leaves_with_the_monitor(self, loop):
        loop.run(2)
        copied = copy.deepcopy(loop.optimizer)
        assert not getattr(copied, "_optimizer_step_pre_hooks", None)
        loop.monitor.close()
        assert not loop.is_watched

    def test_does_not_keep_a_monitor_that_nobody_has(self, loop):
        loop.run(2)
        monitor = weakref.ref(loop.monitor)
        loop.monitor = None
        gc.collect()
        is_gone = monitor() is None
        loop.monitor = Loop(loop.folder).monitor  # for the fixture
        assert is_gone
        assert not loop.is_watched


class TestWithSeveralOptimizers:
    def test_the_first_step_of_any_shows_it(self, tmp_path):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=1e-3)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-3)
        with tsemon.attach(model, [vectors, matrices], run="r", spool_dir=tmp_path, budget=1e-9) as monitor:
            for step in range(40):
                if step == 33:
                    with torch.no_grad():
                        model.layers[2].linear1.weight[0, 0] = math.nan
                model.zero_grad()
                (loss := forward().square().mean()).backward()
                matrices.step()
                vectors.step()
                monitor.step(loss=loss)
        frame = next(frame for frame in frames_in(tmp_path) if frame["step"] == 33)
        assert values_of(frame, "nonfinite") == [0, 0, 0, 1]

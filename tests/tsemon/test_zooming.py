"""A monitor with the default cadence zooms closer when something stirs."""

import itertools
import math
import time

import numpy as np
import pytest
import torch

import tsemon
from tests import zoo
from tests.frames import frames_in, scalars_in
from tests.ports import free_port
from tests.tsemon.test_actions import as_json
from tests.tsemon.transport.conftest import Peer
from tsemon.monitor import LATER_REPORTS, REPORTS_EVERY, REPORTS_OF_REFUSED
from tsemon.schedule import FOLLOW_UP_GAP, MAX_GAP, MIN_ZOOMS, ZOOM_GAP, ZOOM_SAMPLES
from tsemon.suspicion import PATIENCE
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View

ONLY_ZOOMS = 1e-9
"""A budget with which only zooms sample from step 10 to step 90, and long after it."""


class Loop:
    """A plain loop that gives the monitor the losses of a list."""

    def __init__(self, folder, **options):
        self.folder, self.num_steps = folder, 0
        self.model, self._forward = zoo.torch_encoder()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        options = {"measures": ["token_similarity", "effective_rank", "loss_mean"]} | options
        self.monitor = tsemon.attach(self.model, self._optimizer, run="r", spool_dir=folder, **options)

    def run(self, num_steps, loss=2.0, scale=1.0, **scalars):
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            (scale * self._forward().square().mean()).backward()
            if torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).isfinite():
                self._optimizer.step()
            self.monitor.step(loss=loss, **scalars)
            self.num_steps += 1

    def sampled(self):
        """The steps of all frames with activations."""
        self.monitor.close()
        return [frame["step"] for frame in frames_in(self.folder) if frame["layers"]]


@pytest.fixture
def loop(tmp_path):
    made = Loop(tmp_path, budget=ONLY_ZOOMS)
    yield made
    made.monitor.close()


def zoom_from(step):
    return [step + distance for distance in (0, 4, 9, 13)]


OF_LOSSES = "loss_mean", "loss_nonfinite", "loss_recent", "loss_before", "loss_noise", "loss_start"


def events_of(frames):
    """What the rules say of their losses."""
    evaluator, views = Evaluator(PACK), []
    for frame in frames:
        scalars = {name: math.nan if value is None else value for name, value in frame["scalars"].items()}
        views.append(View(frame["step"], scalars))
    return evaluator.read([(evaluator.start(), views)])[0]


def alerts_in(folder):
    """The rules that fire, and at which step."""
    return {event.rule.name: event.firing_step for event in events_of(frames_in(folder)) if event.kind == "firing"}


class TestItZoomsIn:
    @pytest.mark.parametrize("loss", [math.nan, torch.tensor(math.inf)])
    def test_from_the_step_after_a_loss_that_is_not_finite(self, loop, loss):
        loop.run(200)
        loop.run(1, loss=loss)
        loop.run(60)
        assert [step for step in loop.sampled() if step > 200] == zoom_from(201)
        assert loop.monitor.status.zooms.step == 201

    def test_at_the_first_loss_below_zero_and_a_rule_fires(self, tmp_path):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        for step in range(260):
            loop.run(1, loss=(2.0 if step <= 200 else -2.0) + 0.1 * math.sin(1.7 * step))
        loop.monitor.close()
        assert loop.monitor.status.zooms.step == 202
        assert alerts_in(tmp_path) == {"loss-changes-sign": 206}

    def test_after_three_high_losses(self, loop):
        loop.run(200)
        loop.run(60, loss=2.1)
        assert [step for step in loop.sampled() if step > 150] == zoom_from(203)

    def test_at_a_gradient_norm_that_is_not_finite(self, loop):
        loop.run(200, grad_norm=torch.tensor(1.0))
        loop.run(60, grad_norm=torch.tensor(math.nan))
        assert [step for step in loop.sampled() if step > 150] == zoom_from(203)

    def test_at_a_gradient_that_is_not_finite_when_it_is_clipped(self, loop):
        loop.run(200)
        loop.run(2, scale=math.inf)  # as a gradient scaler does, whose loop skips these steps
        loop.run(20)
        loop.run(60, scale=math.inf)
        assert [step for step in loop.sampled() if step > 150] == zoom_from(225)
        assert "the gradient norm is not finite" in loop.monitor.status.zooms.reason

    def test_not_while_a_gradient_scaler_looks_for_its_scale(self, loop):
        for num_skipped in (3, 6, 3):
            loop.run(1)
            loop.run(num_skipped, scale=math.inf)
        loop.run(80)
        assert loop.monitor.status.zooms is None

    def test_after_high_losses_at_the_next_step_though_it_has_no_loss(self, loop):
        loop.run(200, loss=-2.0)
        loop.run(4, loss=-1.9)  # the last one is watched with those before it
        loop.run(30, loss=None)
        assert next(step for step in loop.sampled() if step > 150) <= 205

    def test_at_once_if_the_loss_is_not_finite_in_a_zoom(self, loop):
        loop.run(200)
        loop.run(4, loss=2.1)
        loop.run(60, loss=math.nan)
        assert [step for step in loop.sampled() if step > 150][:4] == [203, 205, 210, 214]

    def test_at_the_first_loss_that_is_not_finite_although_zooms_have_used_up_what_they_may_cost(self, loop):
        loop.run(200)
        loop.monitor._cadence._zoomed_s, loop.monitor._cadence._num_zoomed = 1e9, ZOOM_SAMPLES
        for _ in range(3):
            loop.run(1, loss=math.nan)
            loop.run(30)
        assert [step for step in loop.sampled() if step > 150] == [201]
        assert (loop.monitor.status.zooms.num, loop.monitor.status.refusals.num) == (1, 2)

    def test_at_the_first_loss_that_is_not_finite_although_samples_are_near_anyway(self, loop):
        loop.run(200)
        loop.monitor.burst(steps=24, every=4)
        loop.run(5)
        loop.run(60, loss=math.nan)
        assert [step for step in loop.sampled() if step > 150] == [201, 205, 206, 210, 214, 218]

    def test_with_the_slow_tier_in_every_second_sample(self, loop, tmp_path):
        loop.run(200)
        loop.run(60, loss=math.nan)
        loop.monitor.close()
        late = [frame for frame in frames_in(tmp_path) if frame["step"] > 200 and frame["layers"]]
        assert ["effective_rank" in frame["layers"] for frame in late] == [True, False] * (ZOOM_SAMPLES // 2)

    def test_and_the_status_tells_why(self, loop):
        loop.run(200)
        assert "zoomed in" not in str(loop.monitor)
        loop.run(1, loss=math.nan)
        assert "zoomed in     once, last from step 201 on: the loss is not finite" in str(loop.monitor)
        loop.run(50)
        loop.monitor._cadence._budget = 0.5  # enough for another one
        loop.run(1, loss=math.nan)
        assert "zoomed in     2 times, last from step 252 on: the loss is not finite" in str(loop.monitor)


class TestARefusedZoom:
    def test_is_counted_for_each_sign_and_the_status_tells_why(self, loop):
        loop.run(200)
        assert loop.monitor.status.refusals is None
        while loop.monitor.status.refusals is None and loop.num_steps < 600:
            loop.run(1, loss=math.nan)
            loop.run(30)
        first = loop.monitor.status.refusals
        assert (first.num, first.step) == (1, loop.num_steps - 30)
        loop.run(1, loss=math.inf)
        loop.run(5)
        text = f"zoom refused  2 times, last at step {first.step + 31} to keep to the budget: the loss is not finite"
        assert text in str(loop.monitor)

    @pytest.mark.parametrize("loss", [9.0, math.nan])
    def test_leaves_the_next_losses_in_frames_without_a_sample(self, tmp_path, loss):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        loop.run(150)
        loop.run(1, loss=math.nan)
        loop.run(120)
        loop.monitor._cadence._zoomed_s = 1e9
        loop.run(60, loss=loss)
        assert loop.monitor.status.refusals.num == 1
        loop.monitor.close()
        late = [frame for frame in frames_in(tmp_path) if frame["step"] > 265]
        first = late[0]["step"]
        assert first - 271 == (0 if math.isnan(loss) else 2)
        of_first_zoom = 151 + LATER_REPORTS[1]
        assert [frame["step"] for frame in late] == [
            *range(first, first + 16, 5),
            of_first_zoom,
            loop.num_steps - 1,
        ]
        assert not any(frame["layers"] for frame in late)
        key = "loss_mean" if loss == 9.0 else "loss_nonfinite"
        assert [frame["scalars"][key] for frame in late[1:4]] == [9.0 if loss == 9.0 else 5.0] * 3

    def test_lets_the_rules_on_the_loss_see_a_jump(self, tmp_path):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        loop.run(150)
        loop.run(1, loss=math.nan)
        for step in range(300):
            loop.run(1, loss=(2.0 if step < 200 else 4.0) + 0.1 * math.sin(1.7 * step))
            loop.monitor._cadence._zoomed_s = 1e9
        loop.monitor.close()
        assert alerts_in(tmp_path).keys() == {"loss-not-finite", "loss-spike", "loss-regressed"}

    def test_leaves_frames_that_end_the_alert_once_the_loss_has_recovered(self, tmp_path):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        loop.run(150)
        loop.run(1, loss=math.nan)
        for step in range(600):
            loop.run(1, loss=(4.0 if 200 <= step < 220 else 2.0) + 0.1 * math.sin(1.7 * step))
            loop.monitor._cadence._zoomed_s = 1e9
        loop.monitor.close()
        events = events_of(frames_in(tmp_path))
        (ended,) = (event for event in events if event.rule.name == "loss-spike" and event.kind == "resolved")
        assert 351 < ended.firing_step < 380 < ended.resolved_step < 510

    def test_does_not_fill_the_disk_if_signs_never_end(self, loop, tmp_path):
        loop.run(150)
        loop.monitor._cadence._zoomed_s, loop.monitor._cadence._num_zoomed = 1e9, ZOOM_SAMPLES
        for _ in range(300):
            loop.run(1, loss=math.nan)
            loop.run(1)
        loop.monitor.close()
        late = [frame["step"] for frame in frames_in(tmp_path) if frame["step"] > 150]
        num_refused, num_later = len(REPORTS_OF_REFUSED), len(LATER_REPORTS)
        assert len(late) <= 1 + num_later + (num_refused + num_later) * (600 // REPORTS_EVERY) + 1

    def test_is_none_where_samples_are_near_anyway(self, tmp_path):
        loop = Loop(tmp_path, every=2)
        loop.run(20)
        loop.run(10, loss=math.nan)
        assert loop.monitor.status.refusals is None


SAY_NOTHING = {
    "no loss": [None],
    "zero": [0.0],
    "an integer": [3],
    "a bool": [True],
    "an integer of NumPy": [np.int64(2)],
    "a float of NumPy": [np.float16(2.0)],
    "an integer tensor": [torch.tensor(1)],
    "a bool tensor": [torch.tensor(True)],
    "every other step": [2.0, None],
    "every 10th step": [2.0, *[None] * 9],
    "from step 100 on": [*[None] * 100, *[2.0] * 50],
    "in turn": [1.0, 100.0],
}


class TestAfterAZoom:
    def test_frames_with_the_losses_alone_show_that_the_loss_has_recovered(self, tmp_path):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        for step in range(700):
            loop.run(1, loss=(4.0 if 200 <= step < 230 else 2.0) + 0.1 * math.sin(1.7 * step))
        loop.monitor.close()
        begin = loop.monitor.status.zooms.step
        frames = [*frames_in(tmp_path)]
        alone = [frame["step"] - begin for frame in frames if frame["step"] > 290 and not frame["layers"]]
        assert alone == [*LATER_REPORTS, 699 - begin]
        events = events_of(frames)
        ended = [event for event in events if event.rule.name == "loss-spike" and event.kind == "resolved"]
        assert [(event.firing_step < begin + 20, event.resolved_step) for event in ended] == [(True, begin + 100)]

    def test_they_come_though_another_zoom_is_refused(self, tmp_path):
        loop = Loop(tmp_path, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
        for step in range(600):
            loop.run(1, loss=(4.0 if 200 <= step < 210 or 260 <= step < 270 else 2.0) + 0.1 * math.sin(1.7 * step))
            if step == 255:
                loop.monitor._cadence._zoomed_s = 1e9
        assert loop.monitor.status.refusals is not None
        begin = loop.monitor.status.zooms.step
        loop.monitor.close()
        alone = {frame["step"] - begin for frame in frames_in(tmp_path) if not frame["layers"]}
        assert alone >= {*LATER_REPORTS}


class TestItDoesNotZoomIn:
    @pytest.mark.parametrize("losses", SAY_NOTHING.values(), ids=SAY_NOTHING.keys())
    def test_at_losses_that_say_nothing(self, loop, losses):
        for number in range(150):
            loop.run(1, loss=losses[number % len(losses)])
        assert loop.monitor.status.zooms is None
        assert loop.monitor.status.refusals is None
        assert loop.monitor.status.num_faults == 0

    def test_at_what_is_no_loss(self, loop):
        loop.run(100)
        loop.run(30, loss=torch.full((3,), math.nan))
        assert loop.monitor.status.zooms is None

    def test_at_a_fixed_interval(self, tmp_path):
        loop = Loop(tmp_path, every=20)
        loop.run(50)
        loop.run(50, loss=math.nan)
        assert loop.sampled() == [0, 20, 40, 60, 80]

    def test_in_a_burst_of_the_users_that_lasts_as_long(self, loop):
        loop.run(200)
        loop.monitor.burst(12, every=2)
        loop.run(60, loss=math.nan)
        assert [step for step in loop.sampled() if step > 150] == [201, 203, 205, 207, 209, 211]


class TestALossThatComesLateOrSeldom:
    @pytest.mark.parametrize("every", [1, 10])
    def test_is_watched_all_the_same(self, loop, every):
        loop.run(100, loss=None)
        for loss in [2] * 30 + [np.float32(9.0)] * 3:
            loop.run(1, loss=loss)
            loop.run(every - 1, loss=None)
        zooms = loop.monitor.status.zooms
        assert (zooms.num, zooms.step) == (1, 100 + 32 * every + 1)
        assert zooms.reason == "the loss jumped from about 2 to 9"

    def test_is_missed_by_the_status_where_it_never_comes(self, loop):
        text = "no zooms      at signs of the loss: monitor.step() was given no loss"
        loop.run(19, loss=None)
        assert text not in str(loop.monitor)
        loop.run(1, loss=None)
        assert text in str(loop.monitor)
        loop.run(1)
        assert text not in str(loop.monitor)
        late = "late zooms    if any, at signs of the loss: monitor.step() was given {} losses in {} steps: "
        assert late.format(1, 21) not in str(loop.monitor)
        loop.run(40, loss=None)
        assert late.format(1, 61) in str(loop.monitor)
        loop.run(60)
        assert "late zooms" not in str(loop.monitor)


class TestAGradientNormThatNeverComes:
    @pytest.mark.parametrize("norm", [1.0, torch.tensor(math.inf)])
    def test_is_missed_by_the_status(self, loop, norm):
        text = (
            "no zooms      at signs of the gradient norm: clip it by its norm as a whole, or pass step(grad_norm=...)"
        )
        for _ in range(20):
            loop.monitor.step(loss=2.0)
        assert text in str(loop.monitor)
        assert not loop.monitor.status.is_grad_norm_watched
        for _ in range(2):
            loop.monitor.step(loss=2.0, grad_norm=norm)
        assert text not in str(loop.monitor)

    def test_does_not_matter_if_it_is_clipped(self, loop):
        loop.run(20)
        assert "gradient norm: clip it" not in str(loop.monitor)


class TestASampleThatFails:
    def test_ends_the_zoom(self, loop, monkeypatch):
        loop.run(200)
        loop.run(2, loss=math.nan)
        monkeypatch.setattr(loop.monitor, "_packed", lambda *_: 1 / 0)
        loop.run(10)
        monkeypatch.undo()
        assert loop.monitor.status.num_faults == 1
        loop.run(1, loss=math.inf)
        assert loop.sampled()[-1] == 201
        assert loop.monitor.status.zooms.num == 2


class TestABurstOfTheUsers:
    """It begins with the next step, and its samples stand for those of a zoom."""

    def test_has_no_effect_after_the_end_and_a_warning_says_this(self, loop, caplog):
        loop.monitor.close()
        loop.monitor.burst(np.int64(20))
        assert "monitor.burst() was called after monitor.close()" in caplog.text

    @pytest.mark.parametrize("num_bursts", [1, 3])
    def test_that_is_short_does_not_end_a_zoom(self, loop, num_bursts):
        loop.run(200)
        loop.run(3, loss=9.0)
        for _ in range(num_bursts):
            loop.monitor.burst(6, every=1)
            loop.run(1, loss=9.0)
        loop.run(60, loss=9.0)
        late = [step for step in loop.sampled() if step > 150]
        gaps = [after - before for before, after in itertools.pairwise(late)]
        assert gaps[: 4 + num_bursts] == [1] * (4 + num_bursts)
        assert 3 <= len([gap for gap in gaps if gap in (ZOOM_GAP, ZOOM_GAP + 1)]) <= 5

    def test_is_shown_by_the_status_until_it_is_over(self, loop):
        loop.run(20)
        loop.monitor.burst(steps=30, every=3)
        loop.run(4)
        assert "burst         9 more samples, with slow metrics, every 3 steps" in str(loop.monitor)
        loop.run(30)
        assert "burst" not in str(loop.monitor)

    def test_that_is_sparse_does_not_prevent_a_zoom(self, loop):
        loop.run(200)
        loop.monitor.burst(steps=200, every=50)
        loop.run(10)
        loop.run(300, loss=math.nan)
        assert [step for step in loop.sampled() if step > 150] == [201, *zoom_from(211), 274, 324, 374]

    def test_that_is_asked_for_before_a_sampled_step_begins_after_it(self, loop, tmp_path):
        loop.run(10)
        assert loop.monitor.is_sampling
        loop.monitor.burst(steps=1)
        loop.run(5)
        loop.monitor.close()
        tiers = {frame["step"]: frame["layers"].keys() for frame in frames_in(tmp_path) if frame["layers"]}
        assert list(tiers) == [0, 10, 11]
        assert ["effective_rank" in names for names in tiers.values()] == [True, False, True]

    def test_that_covers_a_zoom_replaces_it(self, loop):
        loop.run(200)
        loop.run(3, loss=math.nan)
        loop.monitor.burst(steps=12, every=3)
        loop.run(60)
        assert [step for step in loop.sampled() if step > 150] == [201, 204, 207, 210, 213]

    def test_that_is_short_comes_before_the_rest_of_a_zoom(self, loop):
        loop.run(200)
        loop.run(3, loss=math.nan)
        loop.monitor.burst(steps=2, every=1)
        loop.run(60)
        assert [step for step in loop.sampled() if step > 150] == [201, 204, 205, 209, 214, 218]

    def test_that_is_short_comes_before_a_zoom(self, loop):
        loop.run(200)
        loop.run(2, loss=2.1)  # the third high loss makes it a jump
        loop.monitor.burst(steps=2, every=1)
        loop.run(100, loss=2.1)
        sampled = [step for step in loop.sampled() if step > 150]
        assert sampled[:2] == [203, 204]
        assert [after - before for before, after in itertools.pairwise(sampled[1:])] == [5, 4, 5, 4, FOLLOW_UP_GAP]

    def test_that_is_over_leaves_the_next_zoom_whole(self, loop):
        loop.run(200)
        loop.monitor.burst(steps=2, every=1)
        loop.run(20)
        loop.run(60, loss=math.nan)
        assert [step for step in loop.sampled() if step > 150] == [201, 202, *zoom_from(221)]


def unending(kind):
    """A loss for each step of a run that never calms down."""
    if kind == "jumps":
        return (2.0 * (1 + step // 30) for step in itertools.count())
    return itertools.cycle([math.nan] if kind == "nan" else [2.0, math.nan])


class TestARunThatIsSuspiciousForEver:
    @pytest.mark.parametrize("kind", ["nan", "nan in turn", "jumps"])
    def test_takes_no_more_samples_than_zooms_may_cost(self, loop, kind):
        next_gap = loop.monitor._cadence.next_gap
        # As dear as in a large model, so that the count does not depend on this machine.
        spent = {"cost_s": 0.01, "step_s": 0.001}
        loop.monitor._cadence.next_gap = lambda measured, **tiers: next_gap(measured._replace(**spent), **tiers)
        for loss in itertools.islice(unending(kind), 600):
            loop.run(1, loss=loss)
        status = loop.monitor.status
        num_usual = 3
        assert status.zooms.num >= 1
        assert len(loop.sampled()) <= num_usual + MIN_ZOOMS * ZOOM_SAMPLES + 1
        assert (status.refusals is None) == (kind == "nan")


class TestAServiceThatDoesNotAnswer:
    def test_keeps_no_zoom_back_and_no_training(self, tmp_path):
        peer = Peer().start()
        peer.faults_of_register.extend(["hang"] * 100)
        loop = Loop(tmp_path, server=peer.url)
        loop.monitor._cadence._budget = 1e-9
        slowest_s = 0.0
        for step in range(260):
            start = time.perf_counter()
            loop.run(1, loss=math.nan if step == 200 else 2.0)
            slowest_s = max(slowest_s, time.perf_counter() - start)
        status = loop.monitor.status
        assert (status.zooms.num, status.zooms.step) == (1, 201)
        assert (status.delivery.num_sent, status.num_faults) == (0, 0)
        assert slowest_s < 3  # a request waits for 10 s
        loop.monitor.close(timeout_s=0.1)
        peer.stop()
        assert status.delivery.num_pending >= ZOOM_SAMPLES
        assert [step for step in loop.sampled() if step > 200] == zoom_from(201)

    def test_is_complained_of_once_in_the_status(self, tmp_path):
        loop = Loop(tmp_path, server=f"http://127.0.0.1:{free_port()}")
        loop.run(20)
        deadline = time.monotonic() + 30
        while not loop.monitor.status.delivery.last_error and time.monotonic() < deadline:
            time.sleep(0.01)
        assert str(loop.monitor).count("does not answer") == 1
        loop.monitor.close(timeout_s=0.1)


class TestAPendingAlert:
    @pytest.fixture
    def watched(self, tmp_path):
        """A loop, and the service that it delivers to."""
        peer = Peer().start()
        loop = Loop(tmp_path, server=peer.url, budget=ONLY_ZOOMS)
        yield loop, peer
        loop.monitor.close()
        peer.stop()

    def wait_for(self, peer, is_true):
        with peer.changed:
            assert peer.changed.wait_for(is_true, timeout=30)

    def begin(self, loop, peer, alerts):
        """Until the reply to the third sample, with these alerts, has arrived."""
        loop.run(50)
        self.wait_for(peer, lambda: len(peer.frames) == 2)
        peer.alerts = alerts
        while not loop.monitor._outbox.alerts() and loop.num_steps < 5000:
            loop.run(1)
            time.sleep(0.002)
        return loop.num_steps

    def zoomed_after(self, peer, step):
        """The first steps from then on that were sampled 4 or 5 steps apart."""
        steps = sorted(each for frame in peer.frames.values() if frame["layers"] and (each := frame["step"]) >= step)
        pairs = itertools.takewhile(lambda pair: pair[1] - pair[0] <= ZOOM_GAP + 1, itertools.pairwise(steps))
        return [steps[0], *(after for _, after in pairs)]

    def run_on(self, loop, num_steps):
        for _ in range(num_steps):
            loop.run(1)
            time.sleep(0.005)

    def test_is_followed_until_it_is_decided(self, watched):
        loop, peer = watched
        since = self.begin(loop, peer, [as_json("a", "pending")])
        self.run_on(loop, 12)
        peer.alerts = [as_json("a", "firing")]
        self.run_on(loop, 150)
        loop.monitor.close()
        zoom = self.zoomed_after(peer, since)
        assert zoom[0] <= since + ZOOM_GAP
        assert ZOOM_SAMPLES <= len(zoom) <= 10
        assert "onset is pending" in str(loop.monitor)

    def test_that_is_never_decided_is_given_up(self, watched):
        loop, peer = watched
        since = self.begin(loop, peer, [as_json("a", "pending")])
        self.run_on(loop, 150)
        loop.monitor.close()
        zoom = self.zoomed_after(peer, since)
        assert len(zoom) >= ZOOM_SAMPLES
        assert zoom[-1] <= since + PATIENCE + 2 * ZOOM_GAP

    def test_of_no_consequence_is_passed_over(self, watched):
        loop, peer = watched
        self.begin(loop, peer, [as_json("a", "pending", severity="info"), as_json("b", "acknowledged")])
        self.run_on(loop, 30)
        assert loop.monitor.status.zooms is None

    def num_full_steps(self, loop, monkeypatch):
        """How many of the next 50 steps are not passed by."""
        end_step, ended = loop.monitor._end_step, []
        with monkeypatch.context() as patched:
            patched.setattr(loop.monitor, "_end_step", lambda *args: ended.append(args) or end_step(*args))
            loop.run(50)
        return len(ended)

    def test_is_followed_although_others_do_not_slow_steps_down(self, watched, monkeypatch):
        loop, peer = watched
        others = [
            as_json("a", "pending", severity="info"),
            as_json("b", "acknowledged"),
            as_json("c", "firing", severity="info"),
        ]
        self.begin(loop, peer, others)
        assert self.num_full_steps(loop, monkeypatch) < 5
        peer.alerts = [*others, as_json("d", "pending")]
        loop.monitor.burst(steps=1)  # its reply tells of them
        self.run_on(loop, 30)
        assert loop.monitor.status.zooms.num == 1

    def test_that_is_given_up_does_not_slow_steps_down(self, watched, monkeypatch):
        loop, peer = watched
        self.begin(loop, peer, [as_json("a", "pending")])
        assert self.num_full_steps(loop, monkeypatch) == 50
        self.run_on(loop, 100)
        assert self.num_full_steps(loop, monkeypatch) < 5
        assert loop.monitor.status.zooms.num == 1

    def test_is_followed_although_the_service_does_not_answer_any_more(self, watched):
        loop, peer = watched
        self.begin(loop, peer, [as_json("a", "pending")])
        peer.stop()
        loop.run(100)
        assert loop.monitor.status.zooms.num == 1
        assert loop.monitor.status.num_faults == 0


class TestTheBudget:
    def test_is_for_delivery_too(self, tmp_path):
        loop = Loop(tmp_path, budget=1.0)
        loop.run(50)
        assert loop.monitor.status.gap < 10
        loop.monitor._outbox._cpu_s["sender"] += 1e4
        loop.run(20)
        assert loop.monitor.status.gap == MAX_GAP
        loop.monitor.close()


class TestTheLastSample:
    def test_has_the_losses(self, tmp_path):
        loop = Loop(tmp_path, measures=["token_similarity", "loss_mean", "loss_nonfinite"])
        loop.run(94)
        first = loop.monitor._last_sample
        loop.run(1, loss=torch.tensor(2.0))
        loop.run(1, loss=torch.tensor(2.2))
        loop.monitor.close()
        last = frames_in(tmp_path)[-1]
        assert first < last["step"] == 95
        assert last["scalars"]["loss_mean"] == pytest.approx(2 + 0.2 / (95 - first))
        assert scalars_in(tmp_path, "loss")[95] == pytest.approx(2.2)
        assert not last["layers"]

    def test_has_no_loss_of_an_earlier_step(self, tmp_path):
        loop = Loop(tmp_path, measures=["token_similarity", "loss_mean"])
        loop.run(94)
        loop.run(1, loss=torch.tensor(2.0))
        loop.run(1, loss=None)
        loop.monitor.close()
        last = frames_in(tmp_path)[-1]
        assert last["step"] == 95
        assert "loss_mean" in last["scalars"]
        assert "loss" not in last["scalars"]

    @pytest.mark.parametrize("left_out", [[3.0], torch.empty((), device="meta")], ids=["a list", "without a value"])
    def test_has_no_loss_of_an_earlier_step_for_one_that_was_left_out(self, tmp_path, left_out):
        loop = Loop(tmp_path, measures=["token_similarity", "loss_mean"])
        loop.run(95)
        loop.run(1, loss=left_out)
        loop.monitor.close()
        assert "loss" not in frames_in(tmp_path)[-1]["scalars"]

    def test_leaves_out_the_parameters_which_may_be_those_of_a_checkpoint_by_now(self, tmp_path):
        loop = Loop(tmp_path, measures=["loss_mean", "total_param_norm", "param_norm"])
        checkpoint = {name: value / 2 for name, value in loop.model.state_dict().items()}
        loop.run(95)
        loop.model.load_state_dict(checkpoint)
        loop.monitor.close()
        frames = frames_in(tmp_path)
        assert frames[-1]["step"] == 94
        assert not frames[-1]["layers"]
        assert "total_param_norm" not in frames[-1]["scalars"]
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        events = [e for frame in frames for e in evaluator.advance(state, View(frame["step"], frame["scalars"]))]
        assert events == []


class TestARunThatIsResumed:
    @pytest.mark.parametrize("is_told", [True, False])
    @pytest.mark.parametrize("saved_at", [100, 700])
    @pytest.mark.parametrize("factor", [1.5, 1.0])
    def test_compares_its_losses_with_those_before(self, tmp_path, factor, saved_at, is_told):
        def loss_at(step):
            level = 2 + 3 * math.exp(-step / 100)
            return level * (factor if step >= saved_at else 1.0) + 0.1 * math.sin(1.7 * step)

        state = {"project": "default", "run": "r", "step": saved_at}
        for folder in (tmp_path / "first", tmp_path / "second"):
            loop = Loop(folder, budget=ONLY_ZOOMS, measures=["token_similarity", *OF_LOSSES])
            if folder.name == "second":
                loop.monitor.load_state_dict(state)
            for _ in range(saved_at):
                loop.run(1, loss=loss_at(loop.monitor.num_steps))
            state |= {"losses": loop.monitor.state_dict()["losses"]} if is_told else {}
            loop.monitor.close()
        zooms, is_high = loop.monitor.status.zooms, factor > 1
        assert (zooms is not None and zooms.step <= saved_at + 5) == (is_high and is_told)
        alerts = alerts_in(tmp_path / "second")
        assert alerts.keys() - {"loss-stall", "loss-regressed"} == ({"loss-spike"} if is_high and is_told else set())
        assert alerts.get("loss-spike", 0) <= saved_at + 15

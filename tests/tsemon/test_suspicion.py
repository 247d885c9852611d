import math
import random
import statistics

import pytest
import torch

from tests.server.rules.traces import FOLDER, read, read_all
from tests.tsemon.test_actions import alert
from tsemon.calm import NUM_IN_MOTION, NUM_TOGETHER, Calm
from tsemon.suspicion import (
    CHECK_EVERY,
    FIRST_STEPS,
    MAX_PER_HOUR,
    NUM_HIGH,
    NUM_HIGH_IN_LOGS,
    NUM_SMOOTH,
    PATIENCE,
    RISE_STEPS,
    LossWatch,
    NoiseWatch,
    Suspicion,
)

JUMPS = "dead_relu", "dead_relu_lr", "div_labels", "div_lr", "div_lr_noclip", "div_nan", "div_random", "div_spike"


def noticed(losses, kind=LossWatch):
    """The steps at which something was noticed, and what."""
    watch = kind()
    found = ((step, watch.notice(loss)) for step, loss in enumerate(losses))
    return [(step, text) for step, text in found if text is not None]


def wave(num, around=2.0, swing=0.1):
    return [around + swing * math.sin(1.7 * step) for step in range(num)]


def near_zero(num):
    """Losses that vary by factors, once they have fallen from 2.3."""
    return [2.3 * math.exp(-step / 20) for step in range(60)] + [
        0.02 * 3 ** math.sin(1.7 * step) for step in range(num - 60)
    ]


class TestLossWatch:
    def test_notices_each_time_that_the_loss_ceases_to_be_finite(self):
        losses = [2.0, math.nan, math.inf, 2.0, -math.inf]
        assert noticed(losses) == [(1, "the loss is not finite"), (4, "the loss is not finite")]

    def test_notices_once_that_a_loss_which_was_always_positive_is_below_zero(self):
        told = noticed([*wave(100), *wave(50, around=-2.0)])
        assert [(step, text[:43]) for step, text in told] == [(100, "the loss fell below zero for the first time")]

    @pytest.mark.parametrize(
        "losses", [wave(300, around=0.0), wave(300, around=-2.0), [0.0] * 50, [2.0] * 40 + [0.0] * 60]
    )
    def test_passes_over_a_loss_of_any_sign(self, losses):
        assert not any("below zero" in text for _, text in noticed(losses))

    def test_notices_a_jump_after_three_high_losses(self):
        found = noticed([*wave(100), 2.4, 2.5, 2.6, 2.7])
        assert found == [(100 + NUM_HIGH_IN_LOGS - 1, "the loss jumped from about 1.995 to 2.6")]

    def test_notices_a_jump_after_a_far_larger_one_is_over(self):
        found = noticed([*wave(100), *[1000.0] * 60, *wave(500), 6.0, 6.1, 6.2])
        assert [step for step, _ in found] == [102, 662]

    @pytest.mark.parametrize("first", [12.0, 60.0, 300.0])
    def test_notices_a_jump_however_high_the_first_losses_were(self, first):
        losses = [first * math.exp(-step / 3) + loss for step, loss in enumerate(wave(1000))]
        assert [step for step, _ in noticed([*losses, *[5.0] * 9])] == [1000 + NUM_HIGH_IN_LOGS - 1]

    @pytest.mark.parametrize("first", [20.0, 1e3, 1e6])
    def test_notices_a_jump_soon_after_a_single_first_loss_that_is_far_higher(self, first):
        losses = [first, *wave(199)]
        assert [step for step, _ in noticed([*losses, *[4.0] * 9])] == [200 + NUM_HIGH_IN_LOGS - 1]

    def test_gets_used_to_jumps_where_neighboring_losses_are_alike(self):
        noise, level, losses = random.Random(0), 0.0, []
        for step in range(5000):
            level = 0.8 * level + 0.6 * noise.gauss(0, 0.1)
            losses.append((2 + 6 * math.exp(-step / 300)) * math.exp(level))
        assert 1 <= len(noticed(losses)) <= 3, "about 9 without"
        assert noticed([*losses, *[2 * loss for loss in losses[-9:]]])[-1][0] >= 5000

    def test_detects_a_jump_at_once_after_spikes_where_neighboring_losses_differ(self):
        noise = random.Random(0)
        levels = [2 + 9 * math.exp(-step / 200) for step in range(600)]
        for _ in range(3):
            levels += [5.0] * 8 + [2.4] * 300
        losses = [level + noise.gauss(0, 0.1) for level in (*levels, *[3.5] * 50)]
        assert len(levels) <= noticed(losses)[-1][0] <= len(levels) + NUM_HIGH

    def test_passes_over_two_high_losses(self):
        assert noticed([*wave(100), 9.0, 9.0, *wave(100)]) == []

    def test_wants_more_high_losses_where_the_loss_varies_by_factors(self):
        usual = [2.3 * math.exp(-step / 20) for step in range(60)] + [0.01, 0.03, 0.1] * 50
        assert noticed([*usual, *[0.25] * (NUM_HIGH - 1), *usual[60:]]) == []
        assert noticed([*usual, *[0.25] * NUM_HIGH])[0][0] == len(usual) + NUM_HIGH - 1
        assert noticed([*usual, *[2.0] * NUM_HIGH])[0][0] == len(usual) + NUM_HIGH_IN_LOGS - 1

    def test_waits_until_it_knows_the_usual_loss(self):
        assert noticed([*wave(FIRST_STEPS - 1), 2.6, 2.6, 2.6]) == []

    @pytest.mark.parametrize("value", [0.0, 2.0, -3.0, 1e-30, 1e30])
    def test_is_quiet_while_the_loss_stays_the_same(self, value):
        assert noticed([value] * 300) == []

    @pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (0.0, 0.01), (2.0, 2.1), (-1.0, 1.0)])
    def test_notices_the_jump_of_a_loss_without_noise(self, before, after):
        assert [step for step, _ in noticed([before] * 100 + [after] * 100)] == [102]

    @pytest.mark.parametrize("after", [1e-9, 1e-7])
    def test_passes_over_a_rise_from_zero_by_less_than_float32_rounds_off(self, after):
        assert noticed([0.0] * 100 + [after] * 100) == []
        assert noticed([2.3 * math.exp(-step) for step in range(800)] + [0.0] * 50 + [after] * 100) == []

    def test_is_quiet_where_the_loss_alternates_from_the_start(self):
        assert noticed([1.0, 100.0] * 150) == []

    def test_notices_a_jump_if_the_losses_come_late_or_seldom(self):
        losses = [loss for number, loss in enumerate([*wave(400), *[2.6] * 40]) if number >= 100 and number % 10 == 0]
        assert [step for step, _ in noticed(losses)] == [30 + NUM_HIGH_IN_LOGS - 1]

    def test_passes_over_uneven_losses_near_zero(self):
        losses = [2.3 * math.exp(-step / 20) for step in range(200)]
        assert noticed([*losses, 0.4, 0.1, 0.1, 0.1, 0.1, 0.0]) == []
        assert noticed([*losses, 0.4, 0.4, 0.4])[0][0] == 202

    def test_notices_an_uneven_jump_near_zero_if_three_of_five_losses_are_high(self):
        assert [step for step, _ in noticed([*near_zero(500), 0.4, 0.24, 0.1, 0.11, 0.2])] == [504]
        for healthy in ([0.4, 0.24, 0.1, 0.11, 0.12], [0.4, 0.24, 0.1, 0.01, 0.2], [0.1, 0.11, 0.12, 0.1, 0.11]):
            assert noticed([*near_zero(500), *healthy, *near_zero(500)[60:]]) == []

    def test_takes_losses_that_were_raised_for_a_while_in_the_end(self):
        watches = LossWatch(), LossWatch()
        for watch, raised in zip(watches, ([], [0.08] * 200), strict=True):
            for loss in (*near_zero(500), *raised, *near_zero(500)[60:]):
                assert watch.notice(loss) is None
        assert watches[0].limit == pytest.approx(watches[1].limit, rel=0.05)
        assert not watches[1].is_undecided

    def test_is_quiet_where_the_loss_falls_slowly(self):
        assert noticed([10 * math.exp(-step / 30) for step in range(500)]) == []

    def test_notices_a_slow_rise_and_again_while_it_goes_on(self):
        falls = [2 + 2 * math.exp(-step / 50) + 0.1 * math.sin(1.7 * step) for step in range(400)]
        rises = [2 + 5e-3 * step + 0.1 * math.sin(1.7 * step) for step in range(300)]
        found = noticed(falls + rises)
        assert found[0][0] - 400 < 2 * RISE_STEPS
        assert found[0][1].startswith("the loss rose slowly from about 2.0")
        assert 1 < len(found) <= len(rises) / RISE_STEPS

    def test_wants_twice_the_rise_for_the_next_sign_of_one(self):
        rises = [2 + 0.01 * max(step - 200, 0) + 0.1 * math.sin(1.7 * step) for step in range(3000)]
        assert 2 < len(noticed(rises)) < 10

    def test_passes_over_a_rise_that_is_small_beside_the_noise_or_the_gain(self):
        noise = [0.1 * math.sin(1.7 * step) for step in range(500)]
        assert noticed([2 + 0.03 * (step > 250) + noise[step] for step in range(500)]) == []
        assert (
            noticed([2 + 9 * math.exp(-step / 9) + 0.2 * min(max(step - 250, 0) / 99, 1) for step in range(500)]) == []
        )


class TestNoiseWatch:
    @pytest.mark.parametrize("scale", [1.0, -1.0, 1e-9, 1e9])
    def test_notices_once_that_the_loss_falls_smoothly(self, scale):
        smooth = [2.0 * math.exp(-step / 20) for step in range(100)]
        ((step, text),) = noticed([scale * loss for loss in [*wave(200), *smooth]], NoiseWatch)
        assert 200 + NUM_SMOOTH // 2 <= step <= 200 + NUM_SMOOTH + CHECK_EVERY
        assert text == "the loss hardly varies from step to step"

    def test_is_quiet_where_the_loss_was_always_smooth(self):
        assert noticed([2.0 * math.exp(-step / 20) for step in range(500)], NoiseWatch) == []
        assert noticed([2.0] * 500, NoiseWatch) == []
        assert noticed([0.0, math.nan, 0.0] * 100, NoiseWatch) == []

    def test_is_quiet_where_the_loss_falls_with_its_noise(self):
        assert (
            noticed([math.exp(-step / 50) * (1 + 0.3 * math.sin(1.7 * step)) for step in range(900)], NoiseWatch) == []
        )

    def test_is_quiet_where_the_loss_is_rounded_more_coarsely_than_it_varies(self):
        random.seed(0)
        losses = [2.0 + 0.008 * random.gauss(0, 1) for _ in range(3000)]
        rounded = torch.tensor(losses).bfloat16().tolist()
        assert len(set(rounded)) < 10
        assert noticed(rounded, NoiseWatch) == []


class TestTheRecordedRuns:
    """Of all that were recorded to calibrate the rules."""

    @pytest.mark.parametrize("name", JUMPS)
    def test_are_noticed_where_a_defect_makes_the_loss_jump(self, name):
        trace = read(FOLDER / f"{name}-s0.jsonl.gz")
        step, _ = noticed(trace.losses)[0]
        assert 0 <= step - trace.header["event_step"] <= NUM_HIGH_IN_LOGS

    def test_are_left_alone_while_they_are_healthy(self):
        healthy = [trace for trace in read_all() if trace.is_healthy]
        assert len(healthy) > 30
        # The loss of this one quadruples within ten steps, close to zero.
        assert [trace.name for trace in healthy if noticed(trace.losses)] == ["h_modadd-s0"]
        assert [trace.name for trace in healthy if noticed(trace.losses, NoiseWatch)] == []

    def test_give_the_same_signs_at_most_seven_steps_later_although_usual_losses_are_watched_in_eights(self):
        delays = []
        for trace in read_all():
            suspicion = Suspicion()
            told = [step for step, loss in enumerate(trace.losses) if sign(suspicion, step, loss)]
            watched = sorted({step for watch in (LossWatch, NoiseWatch) for step, _ in noticed(trace.losses, watch)})
            assert len(told) == len(watched), trace.name
            delays += [late - step for late, step in zip(told, watched, strict=True)]
        assert len(delays) >= len(JUMPS)
        assert set(delays) <= set(range(CHECK_EVERY))
        assert statistics.median(delays) == 0

    def test_give_the_same_signs_at_most_fifteen_steps_later_from_calm_steps(self):
        for trace in read_all():
            suspicion, calm, told = Suspicion(), None, []
            for step, loss in enumerate(trace.losses):
                if calm is not None and calm.keep(loss, None):
                    if not calm.is_full:
                        continue
                    suspicion.watch(calm.losses, [])
                elif calm is not None:
                    suspicion.watch(calm.losses, [])
                    told += [step] if sign(suspicion, step, loss) else []
                elif sign(suspicion, step, loss):
                    told.append(step)
                num_together = NUM_IN_MOTION if suspicion.is_limit_moving else NUM_TOGETHER
                calm = Calm(suspicion.limit, num_together, suspicion.floor)
                if not suspicion.is_settled(()):
                    calm = None
            watched = sorted({step for watch in (LossWatch, NoiseWatch) for step, _ in noticed(trace.losses, watch)})
            assert len(told) == len(watched), trace.name
            assert all(0 <= late - step < NUM_TOGETHER for late, step in zip(told, watched, strict=True)), trace.name


def sign(suspicion, step=0, loss=None, norm=None, alerts=(), is_zoomed_in=False):
    return suspicion.sign(step, loss, norm, alerts, is_zoomed_in=is_zoomed_in)


class TestSuspicion:
    def test_has_no_reason_at_first(self):
        assert sign(Suspicion()) is None

    def test_reports_a_loss_once(self):
        suspicion = Suspicion()
        assert sign(suspicion, 7, math.nan) == ("the loss is not finite", True, True)
        assert sign(suspicion, 8, math.nan) is None

    def test_is_decisive_about_the_first_nan_though_a_slow_rise_is_noticed_with_it(self):
        losses = [2 + 2 * math.exp(-step / 50) + 0.1 * math.sin(1.7 * step) for step in range(400)]
        losses += [2 + 5e-3 * step + 0.1 * math.sin(1.7 * step) for step in range(300)]
        (rises_at, text), *_ = noticed(losses)
        assert text.startswith("the loss rose slowly")
        for num_waiting in range(CHECK_EVERY):
            suspicion = Suspicion()
            for step, loss in enumerate(losses[: rises_at + num_waiting]):
                sign(suspicion, step, loss)
            assert sign(suspicion, rises_at + num_waiting, math.nan) == ("the loss is not finite", True, True)

    @pytest.mark.parametrize("level", [2.0, -2.0])
    def test_knows_below_which_a_loss_is_usual(self, level):
        suspicion = Suspicion()
        for step in range(0, 400, 4):
            losses = [level + 0.1 * math.sin(1.7 * (step + i)) for i in range(4)]
            assert max(losses) < suspicion.limit
            suspicion.watch(losses, [])
            assert suspicion.is_settled(())
        assert suspicion.limit < level + 5.0
        assert sign(suspicion, 400, level + 5.0) is None

    def test_reads_every_fourth_gradient_norm_that_is_not_on_the_cpu(self, monkeypatch):
        suspicion, read = Suspicion(), []
        monkeypatch.setattr(suspicion._late_norms, "put", lambda norm: read.append(norm) or [])
        norm = torch.empty((), device="meta")
        for step in range(8):
            suspicion.sign(step, None, norm, (), is_zoomed_in=False)
        assert [one is norm for one in read] == [True, False, False, False] * 2

    def test_takes_no_loss_for_usual_while_a_jump_may_be_coming(self):
        suspicion = Suspicion()
        suspicion.watch(near_zero(500), [])
        assert suspicion.limit > 0.1
        sign(suspicion, 500, 0.4)
        sign(suspicion, 501, 0.24)
        assert suspicion.limit == -math.inf
        assert sign(suspicion, 502, 0.1) is None
        assert sign(suspicion, 503, 0.01) is None
        assert suspicion.limit > 0.1

    def test_keeps_a_sign_among_usual_losses_for_the_next_step(self):
        suspicion = Suspicion()
        suspicion.watch([2.0 + 0.1 * math.sin(1.7 * step) for step in range(100)], [])
        assert suspicion.is_settled(())
        suspicion.watch([2.0] * 40, [])
        assert not suspicion.is_settled(())
        assert sign(suspicion).is_urgent
        assert suspicion.is_settled(())

    def test_is_not_settled_while_an_alert_may_become_a_sign(self):
        suspicion, alerts = Suspicion(), (alert("a", "pending"),)
        assert not suspicion.is_settled(alerts)
        for step in range(PATIENCE + 1):
            assert sign(suspicion, step, alerts=alerts)
            assert not suspicion.is_settled(alerts)
        assert sign(suspicion, PATIENCE + 1, alerts=alerts) is None
        assert suspicion.is_settled(alerts)

    def test_counts_gradient_norms_that_are_not_finite_over_calm_steps(self):
        suspicion = Suspicion()
        suspicion.watch([], [1.0] * 10)
        assert not any(sign(suspicion, 10 + i, None, math.nan) for i in range(2))
        suspicion.watch([], [1.0])
        assert [bool(sign(suspicion, 13 + i, None, math.nan)) for i in range(3)] == [False, False, True]

    def test_reports_a_gradient_norm_each_time_that_it_is_not_finite_three_times_in_a_row(self):
        suspicion = Suspicion()
        norms = [*[1.0] * 10, *[math.inf] * 4, 1.0, math.inf, math.inf, 1.0, None, math.nan, None, math.inf, math.inf]
        told = [step for step, norm in enumerate(norms) if sign(suspicion, step, 2.0, norm)]
        assert told == [12, 22]

    def test_does_not_report_a_gradient_scaler_that_looks_for_its_scale(self):
        """As torch.amp.GradScaler does with float16 and a large loss."""
        suspicion = Suspicion()
        norms = [0.8, *[math.nan] * 5, *[math.inf] * 3, 0.8, math.inf, *[0.8] * 3, math.inf, *[0.8] * 12, math.inf, 0.8]
        assert not [step for step, norm in enumerate(norms) if sign(suspicion, step, 2.0, norm)]

    def test_follows_a_pending_alert_until_its_patience_is_over(self):
        suspicion, pending = Suspicion(), [alert("a", "pending")]
        told = [step for step in range(100, 300) if sign(suspicion, step, alerts=pending)]
        assert told == list(range(100, 100 + PATIENCE + 1))
        assert sign(suspicion, 300, alerts=[*pending, alert("b", "pending")]) == ("onset is pending", False, False)

    @pytest.mark.parametrize("state", ["acknowledged", "resolved"])
    def test_does_not_follow_alerts_that_are_decided(self, state):
        assert sign(Suspicion(), alerts=[alert("a", state)]) is None

    def test_gives_a_firing_alert_that_was_never_pending_one_zoom(self):
        suspicion, firing = Suspicion(), [alert("a", "firing")]
        assert sign(suspicion, 1, alerts=firing) == ("onset fires", False, False)
        suspicion.begins()
        assert not any(sign(suspicion, step, alerts=firing, is_zoomed_in=step < 20) for step in range(2, 80))

    def test_does_not_follow_a_pending_alert_that_fires(self):
        suspicion = Suspicion()
        assert sign(suspicion, 1, alerts=[alert("a", "pending")])
        suspicion.begins()
        assert sign(suspicion, 2, alerts=[alert("a", "firing")]) is None

    def test_does_not_follow_what_is_only_worth_knowing(self):
        assert sign(Suspicion(), alerts=[alert("a", "pending", severity="info")]) is None

    def test_lets_a_dozen_zooms_begin_within_an_hour(self):
        now_s = [1000.0]
        suspicion = Suspicion(now_s=lambda: now_s[0])
        for _ in range(MAX_PER_HOUR):
            assert sign(suspicion, loss=math.nan)
            assert sign(suspicion, loss=1.0) is None
            suspicion.begins()
            now_s[0] += 10
        assert sign(suspicion, loss=math.nan) is None
        assert sign(suspicion, alerts=[alert("a", "pending")], is_zoomed_in=True)
        now_s[0] = 1000.0 + 3600
        assert sign(suspicion, alerts=[alert("b", "pending")])

    def test_counts_a_pending_alert_once_if_there_is_no_zoom_for_it(self):
        suspicion, a, b = Suspicion(now_s=lambda: 1000.0), alert("a", "pending"), alert("b", "pending")
        for _ in range(MAX_PER_HOUR):
            suspicion.begins()
        for step in range(30):
            assert sign(suspicion, step, alerts=[a] if step < 10 else [a, b]) is None
        assert suspicion.refusals == (2, 10, "after 12 zooms within an hour", "onset is pending")
        assert sign(suspicion, 30, math.nan).is_decisive
        assert sign(suspicion, 31, 2.0) is sign(suspicion, 32, math.nan) is None
        assert suspicion.refusals == (3, 32, "after 12 zooms within an hour", "the loss is not finite")

    def test_gives_each_pending_alert_one_zoom(self):
        suspicion, a, b = Suspicion(), alert("a", "pending"), alert("b", "pending")
        assert sign(suspicion, 1, alerts=[a])
        suspicion.begins()
        assert sign(suspicion, 2, alerts=[a], is_zoomed_in=True)
        assert sign(suspicion, 3, alerts=[a, b], is_zoomed_in=True)
        assert sign(suspicion, 20, alerts=[a, b]) is None
        assert sign(suspicion, 21, alerts=[]) is None
        assert sign(suspicion, 22, alerts=[a])

"""From alerts to incidents."""

from dataclasses import replace

from tsemon_server.incidents import ORDER, Symptom, incidents_of
from tsemon_server.incidents.grouping import FLAPS_WITHIN, SETTLES_AFTER, STALL
from tsemon_server.rules import PACK

RULES = {rule.name: rule for rule in PACK}


def alert(name, left, fired=None, *, over=None, cleared=True, pending=None, blocks=None):
    """An alert of a built-in rule that left its healthy range at `left`."""
    rule = RULES[name]
    return Symptom(
        rule=name,
        family=rule.family,
        severity=rule.severity,
        left_step=left,
        pending_step=left if pending is None else pending,
        firing_step=fired,
        blocks=blocks,
        resolved_step=over,
        is_cleared=over is not None and cleared,
    )


def stall(since, over=None):
    return alert(STALL, since, pending=since + 60, over=over)


def verdicts(*symptoms, step=None):
    return [incident.verdict(ORDER, step) for incident in incidents_of(symptoms)]


def causes(*symptoms, step=None):
    return [verdict.rule for verdict in verdicts(*symptoms, step=step)]


DECAY = alert("weight-decay-outweighs-gradient", 0, 10, blocks=(0, 3))
COLLAPSE = alert("states-collapse", 20, 40)
OUTPUT = alert("output-ignores-input", 15, 35)
RANK = alert("token-rank-collapse", 0, 5)
ESCALATION = alert("token-similarity-escalation", 0, 20, blocks=(5, 23))


class TestAnIncident:
    def test_has_all_alerts_that_are_open_at_a_time(self):
        (verdict,) = verdicts(DECAY, OUTPUT, COLLAPSE)
        assert verdict.alerts == ["weight-decay-outweighs-gradient", "output-ignores-input", "states-collapse"]
        assert (verdict.family, verdict.severity, verdict.state) == ("dead", "critical", "open")
        assert (verdict.step, verdict.left_step, verdict.blocks) == (10, 0, (0, 3))

    def test_has_no_alert_that_only_informs(self):
        assert verdicts(alert("escalation-forecast", 0, 10)) == []
        (verdict,) = verdicts(DECAY, alert("escalation-forecast", 0, 5))
        assert verdict.step == 10

    def test_has_all_later_alerts_but_for_one_that_ends_the_training(self):
        mild, nan = alert("update-misalignment", 5, 15), alert("loss-not-finite", 200, 200)
        assert causes(mild, alert("parameter-norm-jump", 150, 160)) == ["update-misalignment"]
        assert causes(mild, nan) == ["update-misalignment", "loss-not-finite"]
        assert causes(mild, COLLAPSE, nan) == ["update-misalignment"]  # it is critical already
        late = replace(nan, left_step=5000, pending_step=5000, firing_step=5000)
        assert causes(mild, COLLAPSE, late) == ["update-misalignment", "loss-not-finite"]
        gradient = alert("non-finite-gradient", 5000, 5000)
        assert causes(mild, COLLAPSE, gradient, replace(late, left_step=9000, firing_step=9000)) == [
            "update-misalignment",
            "non-finite-gradient",
        ]
        assert causes(mild, replace(nan, left_step=SETTLES_AFTER, firing_step=SETTLES_AFTER)) == ["update-misalignment"]

    def test_has_no_later_critical_alert_that_nothing_in_a_milder_one_can_cause(self):
        mild, repeats = alert("updates-too-large", 5, 15), alert("sequences-repeat", 5000, 5010)
        assert causes(mild, repeats) == ["updates-too-large", "sequences-repeat"]
        assert causes(mild, alert("states-collapse", 5000, 5010)) == ["updates-too-large"]
        assert causes(mild, COLLAPSE, repeats) == ["updates-too-large", "sequences-repeat"]
        late = alert("token-similarity-escalation", 5000, 5010)
        assert causes(COLLAPSE, late) == ["states-collapse"], "of the same family"
        soon = replace(repeats, left_step=200, pending_step=200, firing_step=210)
        assert causes(mild, COLLAPSE, soon) == ["updates-too-large"]  # it is critical already
        spike = alert("loss-spike", 0, 5)
        assert causes(spike, alert("sequences-repeat", 200, 210)) == [
            "loss-spike"
        ]  # the loss may show the same failure
        assert causes(spike, repeats) == ["loss-spike", "sequences-repeat"]

    def test_has_no_critical_alert_of_the_user_that_comes_much_later(self):
        own = replace(alert("loss-spike", 5000, 5001), rule="gpu-too-hot", family="custom", severity="critical")
        assert causes(COLLAPSE, own) == ["states-collapse", "gpu-too-hot"]
        assert causes(COLLAPSE, replace(own, severity="warning")) == ["states-collapse"]
        soon = replace(own, left_step=300, pending_step=300, firing_step=300)
        assert causes(alert("loss-spike", 200, 205), soon) == ["loss-spike", "gpu-too-hot"]

    def test_begins_with_a_stall_that_the_user_made_critical(self):
        assert causes(replace(alert(STALL, 0, 100), severity="critical")) == [STALL]

    def test_of_rules_of_the_user_has_no_later_alert_of_another_rule(self):
        own = replace(alert("loss-spike", 0, 1), rule="my-rule", family="custom")
        again = replace(own, left_step=300, pending_step=300, firing_step=300)
        assert causes(own, again, alert("parameter-norm-jump", 200, 210)) == ["my-rule", "parameter-norm-jump"]

    def test_does_not_begin_with_a_pending_alert(self):
        assert verdicts(alert("states-collapse", 20)) == []

    def test_is_another_one_if_what_was_before_is_over(self):
        over = alert("loss-spike", 20, 30, over=50)
        assert causes(over, alert("dead-units", 200, 210)) == ["loss-spike", "dead-units"]

    def test_opens_again_with_a_consequence_of_what_has_cleared(self):
        over = alert("token-similarity-escalation", 15, 30, over=55)
        later = alert("batch-rank-collapse", 140, 195)
        (verdict,) = verdicts(over, later)
        assert (verdict.rule, verdict.state) == ("token-similarity-escalation", "open")
        assert verdict.alerts == ["token-similarity-escalation", "batch-rank-collapse"]
        assert len(verdicts(over, replace(later, firing_step=56 + FLAPS_WITHIN))) == 2, "much later"
        assert len(verdicts(over, replace(later, severity="critical"))) == 1
        assert len(verdicts(replace(over, severity="warning"), replace(later, severity="critical"))) == 2, "worse"
        assert len(verdicts(replace(over, is_cleared=False), later)) == 2, "a person resolved it"

    def test_has_an_alert_that_left_its_range_while_it_was_open(self):
        over = replace(DECAY, resolved_step=50, is_cleared=True)
        assert causes(over, alert("loss-spike", 45, 60)) == ["weight-decay-outweighs-gradient"]

    def test_counts_an_alert_that_flaps_once(self):
        flaps = [alert("updates-too-large", step, step + 10, over=step + 20) for step in range(0, 900, 100)]
        (verdict,) = verdicts(*flaps)
        assert verdict.alerts == ["updates-too-large"]

    def test_does_not_count_an_alert_as_flapping_that_comes_again_much_later(self):
        flaps = [alert("loss-spike", step, step + 5, over=step + 10) for step in (0, 20 + FLAPS_WITHIN)]
        assert len(verdicts(*flaps)) == 2

    def test_does_not_count_nan_that_begins_in_another_block_as_flapping(self):
        nan = alert("non-finite-update", 400, 400, over=410, blocks=(2, 3))
        spread = alert("loss-not-finite", 402, 402, over=410, blocks=(0, 3))
        again = alert("non-finite-update", 600, 600, blocks=(1, 3))
        first, second = verdicts(
            nan, spread, again, replace(spread, left_step=602, firing_step=602, resolved_step=None)
        )
        assert (first.blocks, first.left_step, second.blocks, second.left_step) == ((2, 3), 400, (1, 3), 600)
        assert second.alerts == ["non-finite-update", "loss-not-finite"]
        assert len(verdicts(nan, replace(again, blocks=(2, 3)))) == 1

    def test_counts_an_alert_that_flaps_once_however_far_apart_samples_are(self):
        flaps = [alert("loss-spike", step, step + 500, over=step + 2000) for step in range(0, 9000, 3000)]
        assert len(verdicts(*flaps)) == 1
        spikes = [alert("loss-spike", step, step, over=step + 5) for step in (0, 300, 600, 1200, 2400)]
        assert len(verdicts(*spikes)) == 3

    def test_is_not_kept_open_for_other_failures_by_the_loss_alone(self):
        over, stands = alert("exploding-gradient", 0, 10, over=50), alert("block-does-not-move", 5000, 5010)
        assert causes(over, stall(since=5), stands) == ["exploding-gradient", "block-does-not-move"]
        assert causes(over, stall(since=5, over=6000), stands) == ["exploding-gradient", "block-does-not-move"]
        again = replace(over, left_step=5000, pending_step=5000, firing_step=5010, resolved_step=None)
        assert causes(over, stall(since=5), again) == ["exploding-gradient"]
        assert causes(over, stall(since=5), alert("dead-units", 5000, 5010)) == ["exploding-gradient", "dead-units"]
        nan = alert("loss-not-finite", 5000, 5000)
        assert causes(over, stall(since=5), nan) == ["exploding-gradient", "loss-not-finite"]

    def test_is_the_same_in_whatever_order_the_alerts_come(self):
        assert verdicts(COLLAPSE, DECAY, OUTPUT) == verdicts(DECAY, OUTPUT, COLLAPSE)


class TestTheCause:
    def test_is_what_can_cause_the_others_and_not_what_fired_first(self):
        assert causes(RANK, ESCALATION) == ["token-similarity-escalation"]

    def test_is_what_left_its_range_first_if_neither_can_cause_the_other(self):
        late = alert("sequences-repeat", 90, 95)
        assert causes(alert("dead-units", 60, 100), late) == ["dead-units"]

    def test_left_its_range_before_its_consequences(self):
        late = alert("weight-decay-outweighs-gradient", 50, 60)
        assert causes(alert("states-collapse", 10, 30), late) == ["states-collapse"]

    def test_of_a_low_rank_is_the_collapse_of_all_states(self):
        assert causes(RANK, alert("states-collapse", 0, 10)) == ["states-collapse"]

    def test_is_not_found_among_alerts_that_come_after_the_verdict_has_settled(self):
        late = alert("token-similarity-escalation", 0, 100, pending=6 + SETTLES_AFTER)
        assert causes(RANK, late) == ["token-rank-collapse"]

    def test_is_no_alert_that_was_pending_but_fired_after_the_verdict_had_settled(self):
        output = alert("output-ignores-input", 95, 100)
        assert causes(output, alert("dead-units", 90, 260, pending=150)) == ["output-ignores-input"]

    def test_is_an_alert_that_was_pending_before_and_fired_late_if_it_explains_all(self):
        assert causes(RANK, alert("token-similarity-escalation", 0, 100)) == ["token-similarity-escalation"]

    def test_does_not_change_when_an_alert_that_must_last_is_over_later(self):
        updates, entropy = alert("update-misalignment", 95, 150), alert("attention-entropy-collapse", 95, 100)
        assert causes(updates, entropy) == ["update-misalignment"]
        over = replace(updates, resolved_step=101, is_cleared=True)
        assert causes(replace(updates, firing_step=100), entropy) == ["update-misalignment"]
        assert causes(replace(over, firing_step=100), entropy) == ["attention-entropy-collapse"]
        assert causes(replace(updates, pending_step=150, resolved_step=205), entropy) == ["update-misalignment"]

    def test_may_be_a_pending_alert_that_explains_the_others_until_the_verdict_settles(self):
        pending = alert("token-similarity-escalation", 0)
        assert causes(RANK, pending, step=10) == ["token-similarity-escalation"]
        assert causes(RANK, pending, step=5 + SETTLES_AFTER) == ["token-rank-collapse"]
        assert causes(RANK, pending) == ["token-rank-collapse"]

    def test_of_a_silent_process_needs_no_further_step(self):
        (verdict,) = verdicts(Symptom("process-silent", "liveness", "warning", 366, 366, 366, None))
        assert (verdict.step, verdict.settles_step) == (366, 366)

    def test_is_no_pending_alert_that_explains_nothing(self):
        assert causes(ESCALATION, alert("hidden-state-blow-up", 30), step=30) == ["token-similarity-escalation"]

    def test_may_be_a_rule_of_the_user(self):
        own = Symptom("my-rule", "custom", "warning", 0, 0, 5, None)
        assert causes(own) == ["my-rule"]
        assert causes(own, alert("updates-too-large", 0, 10)) == ["updates-too-large"]
        assert causes(own, COLLAPSE) == ["my-rule", "states-collapse"], "it is critical, and news"
        assert len(verdicts(replace(own, severity="critical"), COLLAPSE)) == 1


class TestTheEnd:
    def test_is_open_while_an_alert_fires(self):
        (verdict,) = verdicts(replace(DECAY, resolved_step=50, is_cleared=True), OUTPUT)
        assert (verdict.state, verdict.ended_step) == ("open", None)

    def test_is_recovered_if_all_conditions_are_over(self):
        (verdict,) = verdicts(replace(DECAY, resolved_step=50, is_cleared=True))
        assert (verdict.state, verdict.ended_step) == ("recovered", 50)

    def test_is_no_recovery_if_the_run_or_a_person_ended_an_alert(self):
        (verdict,) = verdicts(replace(DECAY, resolved_step=50, is_cleared=False))
        assert (verdict.state, verdict.ended_step) == ("ended", 50)

    def test_waits_for_the_loss_to_fall_again(self):
        over = replace(DECAY, resolved_step=90, is_cleared=True)
        (verdict,) = verdicts(over, stall(since=5))
        assert verdict.state == "open"
        (verdict,) = verdicts(over, replace(stall(since=5, over=350), firing_step=305))
        assert (verdict.state, verdict.ended_step) == ("recovered", 350)

    def test_waits_for_a_stall_that_never_fires_but_does_not_remember_it(self):
        over = alert("batch-rank-collapse", 100, 110, over=130)
        withdrawn = stall(since=120, over=200)
        (verdict,) = verdicts(over, withdrawn)
        assert (verdict.state, verdict.ended_step) == ("recovered", 130)
        meanwhile, later = (alert("updates-too-large", 150, fired) for fired in (195, 210))
        assert len(verdicts(over, withdrawn, meanwhile)) == 1
        assert len(verdicts(over, withdrawn, later)) == len(verdicts(over, later)) == 2

    def test_waits_for_a_loss_that_was_lowest_at_the_sample_before(self):
        over = alert("updates-too-large", 1000, 1050, over=1100)
        (verdict,) = verdicts(over, replace(stall(since=950), pending_step=1050))
        assert verdict.state == "open"

    def test_does_not_wait_for_a_loss_that_had_stopped_falling_before(self):
        over = alert("attention-entropy-collapse", 500, 510, over=600)
        (verdict,) = verdicts(over, stall(since=100))
        assert verdict.state == "recovered"

    def test_has_what_comes_before_the_loss_falls_again(self):
        over = alert("token-similarity-escalation", 10, 20, over=100)
        (verdict,) = verdicts(over, stall(since=15), alert("batch-rank-collapse", 150, 160))
        assert verdict.alerts == ["token-similarity-escalation", "batch-rank-collapse"]

    def test_does_not_wait_for_the_loss_if_a_person_or_the_run_ended_an_alert(self):
        (verdict,) = verdicts(replace(DECAY, resolved_step=90, is_cleared=False), stall(since=5))
        assert (verdict.state, verdict.ended_step) == ("ended", 90)

    def test_stays_recovered_when_the_loss_stalls_much_later(self):
        over = alert("attention-entropy-collapse", 100, 110, over=500)
        (verdict,) = verdicts(over, replace(stall(since=4000, over=5000), is_cleared=False))
        assert verdict.state == "recovered"


class TestLateFrames:
    def test_bring_an_earlier_alert_into_the_stored_incident(self):
        stored = replace(COLLAPSE, incident=7, left_step=110, pending_step=110, firing_step=120)
        late = alert("exploding-gradient", 90, 95)
        (incident,) = incidents_of([stored, late])
        assert incident.key == 7
        assert incident.verdict(ORDER).rule == "exploding-gradient"

    def test_do_not_bring_an_alert_into_it_that_was_over_long_before(self):
        stored = replace(COLLAPSE, incident=7, left_step=110, pending_step=110, firing_step=120)
        assert len(incidents_of([stored, alert("loss-spike", 20, 25, over=40)])) == 2


class TestAlertsOnTheProcess:
    def test_have_incidents_of_their_own_and_steps_instead_of_seconds(self):
        silent = Symptom.of("process-silent", "liveness", "warning", 77, 77, {"left_step": 1100, "step": 77})
        assert silent.left_step == 77
        assert causes(DECAY, silent) == ["weight-decay-outweighs-gradient", "process-silent"]


class TestTheOrder:
    def test_outweighs_a_consequence_that_is_seen_a_sample_earlier_and_is_worse(self):
        decay = alert("weight-decay-outweighs-gradient", 10, 20)
        outputs = alert("output-ignores-input", 5, 15)
        assert causes(decay, outputs) == ["weight-decay-outweighs-gradient"]

"""What a training loop does by itself when an alert fires."""

import logging
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler as lr

import tsemon
from tests import zoo
from tests.frames import frames_in
from tests.tsemon.transport.conftest import Peer
from tsemon.actions import FAMILIES, Action, Burst, LowerLearningRate, SaveCheckpoint, Stop, handlers_of, in_words, when
from tsemon.errors import InvalidArgument
from tsemon.schedule import MAX_GAP
from tsemon.wire import Alert
from tsemon_server.rules import rule


def as_json(alert_id="a", state="firing", **more):
    known = {"rule": "onset", "family": "tse", "severity": "warning", "summary": "tokens grow alike", "evidence": {}}
    steps = {"advice": {}, "pending_step": 1, "firing_step": 2, "resolved_step": 3}
    return {"alert_id": alert_id, "state": state, **known, **steps, **more}


def alert(*args, **more):
    return Alert.from_json(as_json(*args, **more))


class Noting(Action):
    """What was done, as text."""

    def __init__(self, notes, text):
        self.notes, self.text = notes, text

    def act(self, alert, training):
        self.notes.append(f"{self.text} {alert.alert_id if isinstance(alert, Alert) else alert.incident_id}")


class Raising(Action):
    def act(self, alert, training):
        raise OSError("no space left")


class Loop:
    """A plain loop whose monitor delivers to `peer`."""

    def __init__(self, peer, folder, on_alert, **options):
        self.peer, self.num_steps = peer, 0
        self.model, self._forward = zoo.torch_encoder()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = tsemon.attach(
            self.model,
            self.optimizer,
            run="r",
            server=peer.url,
            on_alert=on_alert,
            spool_dir=folder,
            measures=["token_similarity", "effective_rank"],
            **{"every": 1} | options,
        )

    def step(self):
        self._forward()
        self.monitor.step(loss=1.0)
        self.num_steps += 1

    def step_until(self, is_true):
        deadline = time.monotonic() + 60
        while not is_true():
            self.step()
            assert time.monotonic() < deadline, self.monitor.status

    def hear(self, *alerts):
        """Step until the service's reply with these alerts was read, and once more."""
        self.peer.alerts = list(alerts)
        known = [(one["alert_id"], one["state"]) for one in alerts]
        self.step_until(lambda: [(one.alert_id, one.state) for one in self.monitor._outbox.alerts()] == known)
        self.step()


@pytest.fixture
def peer():
    peer = Peer().start()
    yield peer
    peer.stop()


@pytest.fixture
def loop(peer, tmp_path):
    opened = []

    def of(on_alert=None, **options):
        opened.append(Loop(peer, tmp_path, on_alert, **options))
        return opened[-1]

    yield of
    for each in opened:
        each.monitor.close()


@pytest.fixture
def monitor(tmp_path):
    """Of a model with an optimizer, without a service."""
    model, _ = zoo.torch_encoder()
    with tsemon.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run="r", spool_dir=tmp_path) as monitor:
        yield monitor


class TestAlertsInTheLoop:
    def test_are_told_when_they_fire_and_when_they_are_resolved_at_the_step_after_the_reply(self, loop):
        told = []
        training = loop(told.append)

        def told_at(state):
            del told[:]
            training.hear(as_json(state=state))
            return [(one.alert_id, one.state) for one in told], [one.alert_id for one in training.monitor.alerts]

        assert told_at("pending") == ([], [])
        assert told_at("firing") == ([("a", "firing")], ["a"])
        assert told_at("acknowledged") == ([], ["a"]), "somebody knows, and it still fires"
        assert told_at("firing") == ([], ["a"])
        assert told_at("resolved") == ([("a", "resolved")], [])

    def test_are_told_once_where_they_were_acknowledged_before_the_loop_heard_of_them(self, loop):
        told = []
        training = loop(told.append)
        for state in ("acknowledged", "acknowledged", "resolved"):
            training.hear(as_json(state=state))
        assert [one.state for one in told] == ["acknowledged", "resolved"]

    def test_are_resolved_when_the_service_says_no_more_of_them(self, loop):
        told = []
        training = loop(told.append)
        training.hear(as_json("a"), as_json("b", "acknowledged"))
        training.hear()
        assert [(one.alert_id, one.state) for one in told[2:]] == [("a", "resolved"), ("b", "resolved")]

    def test_are_logged_with_a_step_where_nobody_asked_for_them(self, loop, caplog):
        training = loop()
        with caplog.at_level(logging.INFO, "tsemon"):
            training.hear(as_json("a"), as_json("b", resolved_step=None))
            training.hear(as_json("a", "resolved"))
        logged = [record.getMessage() for record in caplog.records]
        assert "tsemon: step 3: onset resolved" in logged
        assert "tsemon: onset of step 2 resolved" in logged, "the service did not say when"

    def test_do_not_raise_what_a_callback_raises_and_the_next_callback_is_called(self, loop):
        told = []
        training = loop([lambda alert: 1 / 0, told.append])
        training.hear(as_json())
        assert [one.alert_id for one in told] == ["a"]
        assert "on_alert failed for onset, training is not affected: ZeroDiv" in training.monitor.status.faults[0]
        assert training.monitor.status.num_faults == 0, "it is none of tsemon's own"


def incident_as_json(incident_id="1", state="open", **more):
    cause = {name: as_json()[name] for name in ("rule", "family", "severity", "summary", "advice")}
    place = {"step": 2, "left_step": 1, "blocks": None, "is_settled": True}
    return {"incident_id": incident_id, "state": state, **cause, **place, **more}


class TestIncidentsInTheLoop:
    def test_are_the_only_warning_of_a_failure_where_nobody_asked_for_it(self, loop, caplog):
        training = loop()
        with caplog.at_level(logging.INFO, "tsemon"):
            training.peer.incidents = [
                incident_as_json(blocks=[3, 5], where="blocks 3 to 5") | {"advice": {"text": "lower it"}}
            ]
            training.hear(as_json("a", incident_id="1"), as_json("b", incident_id="1"))
            training.peer.incidents = [incident_as_json(state="recovered")]
            training.hear()
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        told = [text for text in warnings if text.startswith("tsemon: step ")]
        assert told == ["tsemon: step 2, warning, blocks 3 to 5 since step 1: tokens grow alike What to try: lower it"]
        assert "tsemon: incident of step 2 recovered: onset" in [record.getMessage() for record in caplog.records]

    def test_are_told_once_when_they_open_and_once_when_they_are_over(self, loop):
        told = []
        training = loop(lambda alert: told.append(f"alert {alert.alert_id} {alert.state}"),
                        on_incident=lambda incident: told.append(f"{incident.incident_id} {incident.state}"))  # fmt: skip

        def hear(*incidents, **alert):
            del told[:]
            training.peer.incidents = list(incidents)
            training.hear(as_json(incident_id="1", **alert))
            return told[:]

        assert hear(incident_as_json()) == ["alert a firing", "1 open"]
        assert hear(incident_as_json(rule="other"), alert_id="b") == ["alert b firing", "alert a resolved"]
        assert hear(incident_as_json(state="recovered"), alert_id="c")[1:] == ["alert b resolved", "1 recovered"]
        assert hear(incident_as_json(state="recovered"), alert_id="d")[1:] == ["alert c resolved"]
        assert hear(incident_as_json(), alert_id="e")[2:] == ["1 open"], "it opens again"
        assert hear(incident_as_json("2", "recovered"), alert_id="f")[2:] == ["2 recovered", "1 ended"]
        assert hear(incident_as_json(state="recovered"), alert_id="g")[2:] == [], "its end was told"
        assert hear(incident_as_json("2", "recovered"), alert_id="h")[2:] == []

    def test_do_not_raise_what_a_function_raises_and_the_next_one_is_called(self, loop):
        told = []
        training = loop(on_incident=[lambda incident: 1 / 0, told.append])
        training.peer.incidents = [incident_as_json()]
        training.hear(as_json(incident_id="1"))
        assert [one.incident_id for one in told] == ["1"]
        assert "on_incident failed for onset, training is not affected: ZeroDiv" in training.monitor.status.faults[0]

    @pytest.mark.parametrize("given", [0, [None]])
    def test_are_refused_where_there_is_no_function_for_them(self, loop, given):
        with pytest.raises(InvalidArgument, match="on_incident must be functions, actions, or lists of them"):
            loop(on_incident=given)

    def test_lead_to_actions_by_their_cause_and_not_by_an_alert_that_follows_from_it(self, loop):
        told, done = [], []
        dead = when(families="dead", do=Noting(done, "dead"))
        training = loop(on_incident=[told.append, dead, when(severity="critical", do=Noting(done, "critical"))])

        def hear(**incident):
            training.peer.incidents = [given] = [incident_as_json(**incident)]
            training.peer.alerts = [as_json("a", family="dead", severity="critical", incident_id="1")]
            training.step_until(
                lambda: (
                    [(one.rule, one.severity) for one in training.monitor.incidents]
                    == [(given["rule"], given["severity"])]
                )
            )
            training.step()

        hear()
        assert done == []
        hear(rule="dead-units", family="dead")
        assert done == ["dead 1"], "its cause turned out later"
        hear(rule="dead-units", family="dead", severity="critical")
        hear(severity="critical")
        assert done == ["dead 1", "critical 1"], "once for each incident"
        assert [one.rule for one in told] == ["onset"], "a function is called once"

    def test_are_those_that_are_open_in_the_last_reply(self, loop):
        training = loop()
        assert training.monitor.incidents == []
        training.peer.incidents = [incident_as_json()]
        training.hear(as_json(incident_id="1"))
        (incident,) = training.monitor.incidents
        assert (incident.incident_id, incident.rule, incident.left_step) == ("1", "onset", 1)
        assert [one.incident_id for one in training.monitor.alerts] == ["1"]


class TestWhen:
    @pytest.fixture
    def done(self, monitor):
        """What is done for these alerts, one after the other."""

        def of(alerts, **conditions):
            notes = []
            for one in alerts:
                for handler in handlers_of(when(do=Noting(notes, "did"), **conditions)):
                    handler(one, monitor)
            return notes

        return of

    def test_is_for_alerts_of_at_least_a_severity(self, done):
        alerts = [alert(severity, severity=severity) for severity in ("info", "warning", "critical")]
        assert done(alerts, severity="info") == ["did info", "did warning", "did critical"]
        assert done(alerts) == ["did warning", "did critical"]
        assert done(alerts, severity="critical") == ["did critical"]

    def test_is_for_the_families_and_rules_that_are_named(self, done):
        alerts = [alert("a", family="tse"), alert("b", family="entropy"), alert("c", family="entropy", rule="collapse")]
        assert done(alerts, families={"entropy", "norm"}) == ["did b", "did c"]
        assert done(alerts, families="entropy", rules=["collapse"]) == ["did c"]

    def test_is_for_what_begins_to_fire(self, done):
        assert done([alert(state, state=state) for state in ("firing", "acknowledged", "resolved")]) == ["did firing"]

    def test_does_each_thing_once_for_each_alert_in_order(self, monitor):
        notes = []
        handlers = handlers_of([when(do=[Noting(notes, "first"), Noting(notes, "then")]), Noting(notes, "at last")])
        for one in (alert("a"), alert("a"), alert("b")):
            for handler in handlers:
                handler(one, monitor)
        assert notes == ["first a", "then a", "at last a", "first b", "then b", "at last b"]

    def test_does_each_thing_once_for_each_incident(self, monitor):
        notes = []
        (handler,) = handlers_of(Noting(notes, "did"))
        for one in (alert("a", incident_id="1"), alert("b", incident_id="1"), alert("c", incident_id="2"), alert("1")):
            handler(one, monitor)
        assert notes == ["did a", "did c", "did 1"], "the last one belongs to no incident"

    def test_waits_for_an_alert_of_the_incident_that_matches(self, monitor):
        notes = []
        (handler,) = handlers_of(when(do=Noting(notes, "did"), severity="critical"))
        for one in (alert("a", incident_id="1"), alert("b", incident_id="1", severity="critical")):
            handler(one, monitor)
        assert notes == ["did b"]

    def test_does_each_thing_once_for_each_alert_where_it_is_asked_to(self, monitor):
        notes = []
        (handler,) = handlers_of(when(do=Noting(notes, "did"), per="alert"))
        for one in (alert("a", incident_id="1"), alert("b", incident_id="1"), alert("b", incident_id="1")):
            handler(one, monitor)
        assert notes == ["did a", "did b"]
        assert in_words(when(do=Stop(), per="alert")) != in_words(Stop()), "ranks must agree on it"

    def test_does_the_others_where_one_fails(self, loop):
        notes = []
        training = loop(when(do=[Raising(), Noting(notes, "did")]))
        training.hear(as_json())
        assert notes == ["did a"]
        assert "no space left" in training.monitor.status.faults[0]

    @pytest.mark.parametrize("action", [Stop(), LowerLearningRate()], ids=["Stop", "LowerLearningRate"])
    def test_leads_from_the_family_liveness_to_a_change_of_training_only_where_it_is_named(self, action, monitor):
        stuck = alert(family="liveness", rule="training-stuck", severity="critical")

        def changes(on_alert):
            monitor.should_stop, monitor.optimizers[0].param_groups[0]["lr"] = False, 0.1
            (handler,) = handlers_of(on_alert, monitor.optimizers)
            handler(stuck, monitor)
            return monitor.should_stop or rates(monitor.optimizers[0]) != [0.1]

        assert not changes(action)
        assert not changes(when(do=action))
        assert not changes(when(do=action, families="tse"))
        assert changes(when(do=action, rules="training-stuck"))
        monitor._step += 1000
        assert changes(when(do=action, families={"liveness", "tse"}))

    def test_leads_from_the_family_liveness_to_other_actions_as_from_any(self, done):
        assert done([alert("stuck", family="liveness")]) == ["did stuck"]

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: when(do=[print]), r"when\(do=\) takes actions such as Stop\(\), got <built-in function print>"),
            (lambda: when(do=[]), r"when\(do=\) takes actions such as Stop\(\), got none"),
            (lambda: when(do=Stop(), families={"los", "tse"}), "families are among custom, .*, tse, got los$"),
            (lambda: handlers_of(Stop), r"expected Stop\(...\), got the class Stop"),
            (lambda: when(do=Stop(), severity="fatal"), "severity is one of info, warning, critical, got 'fatal'"),
            (lambda: when(do=Stop(), families=5), "families are names, got 5"),
            (lambda: when(do=Stop(), per="run"), "per must be 'incident' or 'alert', got 'run'"),
            (lambda: SaveCheckpoint("model.pt"), "SaveCheckpoint takes a function"),
            (lambda: Burst(every=0), "every is an int of at least 1, got 0"),
            (lambda: Burst(every=True), "every is an int of at least 1, got True"),
            (lambda: Burst(every=np.array([1, 2])), "every is an int of at least 1, got array"),
            (lambda: Burst(pause=0), "pause is an int of at least 1, got 0"),
            (lambda: LowerLearningRate(factor=2), "between 0 and 1, got 2"),
            (lambda: LowerLearningRate("adam"), "takes optimizers of torch.optim, got str"),
            (lambda: handlers_of([print, 5]), "must be functions, actions, or lists of them, got 5"),
            (lambda: handlers_of(when(do=Stop(), per="alert"), of_incidents=True), r"per='alert'\) is for on_alert="),
            (lambda: handlers_of(LowerLearningRate()), "attached to, and there is none"),
            (lambda: handlers_of(Stop(), is_one_of_several=True), r"pass attach\(..., process_group=\) on all"),
        ],
    )
    def test_tells_what_cannot_be_done_before_the_training_begins(self, make, text):
        with pytest.raises(InvalidArgument, match=text):
            make()


def test_families_are_those_of_the_server():
    assert set(FAMILIES) == set(rule.FAMILIES)


class TestInWords:
    def test_tells_actions_apart_by_their_settings_and_conditions(self):
        different = [
            LowerLearningRate(factor=0.5),
            LowerLearningRate(factor=0.9),
            LowerLearningRate(at_most=1),
            LowerLearningRate(pause=7),
            Burst(),
            Burst(steps=7),
            Burst(every=7),
            Burst(at_most=7),
            Burst(pause=7),
            Stop(),
            when(do=Stop(), severity="critical"),
            when(do=Stop(), families="tse"),
        ]
        assert len({str(in_words(one)) for one in different}) == len(different)

    def test_is_the_same_for_the_same_and_leaves_functions_out(self):
        def given(note):
            return [note, LowerLearningRate(factor=0.5), when(do=SaveCheckpoint(note), families={"tse", "rank"})]

        assert in_words(given(print)) == in_words(given(repr))
        assert len(in_words(given(print))) == 2


class TestSaveCheckpoint:
    def test_calls_the_users_function_with_the_alert_once(self, loop):
        saved = []
        training = loop(SaveCheckpoint(saved.append))
        training.hear(as_json())
        training.hear(as_json(state="resolved"))
        assert [one.summary for one in saved] == ["tokens grow alike"]


class TestStop:
    def test_asks_the_loop_to_end(self, loop):
        training = loop(when(do=Stop(), severity="critical"))
        training.hear(as_json())
        assert not training.monitor.should_stop
        training.hear(as_json(), as_json("b", severity="critical"))
        assert training.monitor.should_stop


class TestBurst:
    def test_samples_the_steps_after_an_alert_with_the_slow_tier_and_then_as_before(self, loop, peer):
        told_at = []
        training = loop([Burst(steps=6, every=2), lambda _: told_at.append(training.num_steps)], every=7)
        training.hear(as_json())
        begins = told_at[0] + 1
        while training.num_steps < begins + 33:
            training.step()
        training.monitor.close()
        frames = {frame["step"]: frame for frame in peer.frames.values()}
        assert sorted(step for step in frames if step >= begins) == [begins + n for n in (0, 2, 4, 11, 18, 25, 32)]
        assert all("effective_rank" in frames[begins + n]["layers"] for n in (0, 2, 4))

    def test_begins_anew_after_a_pause_and_only_so_many_times(self, monitor):
        """For a rule that fires again at each step."""
        burst, begins = Burst(steps=3, at_most=3), []
        for step in range(200):
            monitor._step = step
            burst.act(alert(str(step)), monitor)
            if monitor._new_burst:
                begins.append(step)
            monitor._new_burst = None
        assert begins == [0, 30, 60]

    def test_begins_with_the_step_after_it_was_asked_for(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=100, spool_dir=tmp_path) as monitor:
            for step in range(8):
                forward()
                if step == 3:
                    monitor.burst(steps=3)
                monitor.step()
        frames = frames_in(tmp_path)
        assert [frame["step"] for frame in frames] == [0, 4, 5, 6]
        assert all("token_similarity" in frame["layers"] for frame in frames)

    def test_ignores_the_budget_and_leaves_it_as_it_was(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", budget=1e-6, spool_dir=tmp_path) as monitor:
            for _ in range(95):
                forward()
                monitor.step()
            gap = monitor.status.gap
            monitor.burst(steps=5)
            for _ in range(10):
                forward()
                monitor.step()
            assert monitor.status.gap == gap == MAX_GAP
        sampled = [frame["step"] for frame in frames_in(tmp_path)]
        assert sampled[-6:] == [89, 96, 97, 98, 99, 100]


SCHEDULERS = {
    "LambdaLR": lambda opt: lr.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "StepLR": lambda opt: lr.StepLR(opt, 3),
    "cosine": lambda opt: lr.CosineAnnealingLR(opt, 20),
    "restarts": lambda opt: lr.CosineAnnealingWarmRestarts(opt, 3),
    "one cycle": lambda opt: lr.OneCycleLR(opt, 0.3, total_steps=20),
    "cyclic": lambda opt: lr.CyclicLR(opt, 0.1, 0.4, step_size_up=3, cycle_momentum=False),
    "in sequence": lambda opt: lr.SequentialLR(
        opt, [lr.LinearLR(opt, 0.1, total_iters=4), lr.LambdaLR(opt, lambda step: 0.9**step)], [4]
    ),
}


def scheduled(make):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[0]}, {"params": parameters[1], "lr": 0.2}], lr=0.1)
    return optimizer, make(optimizer)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:.*optimizer.step")
class TestLowerLearningRate:
    @pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
    def test_lowers_what_the_scheduler_gives_from_then_on(self, make, monitor):
        (optimizer, schedule), (plain, plain_schedule) = scheduled(make), scheduled(make)
        lower = LowerLearningRate(optimizer, factor=0.25, schedulers=schedule)
        for step in range(12):
            if step == 2:
                lower.act(alert(), monitor)
            schedule.step()
            plain_schedule.step()
            by = 1.0 if step < 2 else 0.25
            assert rates(optimizer) == pytest.approx([by * rate for rate in rates(plain)], rel=1e-6), step
        assert lower.scale == 0.25

    def test_refuses_a_scheduled_optimizer_without_its_scheduler(self):
        with pytest.raises(InvalidArgument, match="would overwrite a lower learning rate"):
            LowerLearningRate(scheduled(SCHEDULERS["LambdaLR"])[0])

    def test_leaves_the_rate_where_a_scheduler_came_later_and_is_not_known(self, monitor):
        (optimizer,) = monitor.optimizers
        lower = LowerLearningRate()
        lr.StepLR(optimizer, 3)
        with pytest.raises(InvalidArgument, match="name it"):
            lower.act(alert(), monitor)
        assert (rates(optimizer), lower.scale) == ([0.1], 1.0)

    def test_takes_the_optimizers_that_were_attached_to_and_lowers_three_times_at_most(self, monitor):
        lower = LowerLearningRate()
        for step in range(0, 500, 100):
            monitor._step = step
            lower.act(alert(), monitor)
        assert rates(monitor.optimizers[0]) == pytest.approx([0.1 / 8])

    def test_lowers_once_for_the_alerts_of_one_incident(self, monitor):
        lower = LowerLearningRate(pause=20)
        scales = []
        for step in (3, 3, 3, 8, 22, 23, 23):
            monitor._step = step
            lower.act(alert(), monitor)
            scales.append(lower.scale)
        assert scales == [0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]

    def test_lowers_in_a_training_after_another_that_went_further(self, monitor):
        lower = LowerLearningRate()
        for step in (5000, 10):
            monitor._step = step
            lower.act(alert(), monitor)
        assert lower.scale == 0.25

    def test_lowers_once_in_the_loop_where_three_rules_fire_at_one_step(self, loop):
        training = loop(LowerLearningRate())
        training.hear(*(as_json(name, rule=name, family="entropy") for name in "abc"))
        assert rates(training.optimizer) == pytest.approx([0.05])

    def test_changes_a_rate_that_is_a_tensor_in_its_place(self, monitor):
        rate = torch.tensor(0.1)
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for _ in range(2)]
        optimizer = torch.optim.SGD(groups, lr=rate, foreach=False)
        LowerLearningRate(optimizer).act(alert(), monitor)
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        assert rate.item() == pytest.approx(0.05)

    def test_happens_in_the_loop(self, loop):
        training = loop(LowerLearningRate(factor=0.1))
        training.hear(as_json())
        assert rates(training.optimizer) == pytest.approx([0.01])


@pytest.fixture
def group(tmp_path):
    """Of this process alone: alerts take the way that they take between several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class TestAfterAFailedCollective:
    @pytest.fixture
    def broken(self, loop, group, monkeypatch):
        """A loop of rank 0 that was told of an alert `a`, had `b` to pass on when collectives began to fail, then `c`."""
        told = []

        def knows(name):
            return lambda: name in [one.alert_id for one in told]

        training = loop([told.append, Burst(), when(do=Stop(), rules={"b", "c"})], process_group=group)
        training.peer.alerts = [as_json("a")]
        training.step_until(knows("a"))

        def fail(*args, **kwargs):
            raise RuntimeError("a rank is gone")

        monkeypatch.setattr(dist, "all_gather", fail)
        training.monitor._relay.put(alert("b", rule="b"))
        training.step_until(lambda: training.monitor._relay is None)
        training.peer.alerts = [as_json("a"), as_json("c", rule="c")]
        training.step_until(knows("c"))
        for _ in range(10):
            training.step()
        return training, told

    def test_functions_are_called_in_rank_0_and_no_action_changes_its_training(self, broken):
        training, told = broken
        assert [one.alert_id for one in told] == ["a", "b", "c"]
        assert not training.monitor.should_stop

    def test_the_user_is_told_once(self, broken):
        training, _ = broken
        texts = [text for text in training.monitor.status.faults if "no longer in step" in text]
        assert len(texts) == 1
        assert "actions are not done on any rank" in texts[0]

    def test_nothing_is_said_to_be_agreed(self, broken):
        training, _ = broken
        assert not training.monitor._newest.sample.has_agreed
        assert training.monitor._newest.sample.names, "its own samples are measured as before"


class TestALostSample:
    def test_takes_no_alert_with_it(self, loop, group, monkeypatch):
        """What the ranks agreed in it is lost; the alert goes out again in the next one, before its end does."""
        told = []
        training = loop(told.append, process_group=group)
        training.step()
        probe = training.monitor._probe
        collect, lost = probe.collect, []

        def lose_the_first_that_carries_one(**options):
            reading = collect(**options)
            if any(options["to_agree"][4:]) and not lost:
                lost.append(reading)
                reading.agreed = None
            return reading

        monkeypatch.setattr(probe, "collect", lose_the_first_that_carries_one)
        training.hear(as_json())
        training.hear(as_json(state="resolved"))
        training.step_until(lambda: len(told) == 2)
        assert lost
        assert [one.state for one in told] == ["firing", "resolved"]

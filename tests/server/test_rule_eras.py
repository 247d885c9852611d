"""An edited rule counts from the next step on, and for no step before, whatever is read again."""

import json
import random
from contextlib import closing

import pytest

from tests.server.conftest import Api, loss_frame
from tests.server.test_project_rules import above
from tests.server.test_rulebook import RULE, call, put
from tests.server.test_watching import alerts, look, send, states
from tsemon_server.alerts import watch as watching
from tsemon_server.alerts.eras import handed_over
from tsemon_server.rules.documents import load
from tsemon_server.rules.views import views_of
from tsemon_server.store.ledger import progress
from tsemon_server.store.ledger.progress import RuleEra

RULES = load(json.dumps({"rules": [RULE]}))


@pytest.fixture
def api(start, clock):
    return start(rules=RULES, clock=clock)


@pytest.fixture
def run_id(api):
    return api.register()


def edit(api, bound, **changes):
    """Let the rule fire above another loss."""
    put(api, "/rules/high-loss", above(bound, **changes))


def told(api):
    return sorted(((found["rule_version"], *states([found])[0]) for found in alerts(api)), key=str)


class TestAnEditedRule:
    def test_does_not_judge_earlier_steps_for_a_late_frame(self, api, run_id):
        send(api, run_id, [7] * 20)
        edit(api, 6)
        send(api, run_id, [7], 21)
        send(api, run_id, [7], 20)
        send(api, run_id, [7], 22)
        assert told(api) == [(2, "firing", 20, 21, None)]

    def test_does_not_judge_earlier_steps_after_a_restart(self, api, run_id, start):
        send(api, run_id, [7] * 20)
        edit(api, 6)
        send(start(rules=RULES), run_id, [1, 7], 20)
        assert told(api) == [(2, "pending", 21, None, None)]

    def test_does_not_judge_earlier_steps_in_its_status(self, api, run_id, start):
        send(api, run_id, [7] * 20)
        edit(api, 6)
        (standing,) = start(rules=RULES).get(f"/runs/{run_id}/rules")["rules"]
        assert (standing["state"], standing["judged_step"]) == ("quiet", 19)

    def test_leaves_a_late_frame_to_the_version_of_its_step(self, api, run_id):
        send(api, run_id, [20] * 3)
        send(api, run_id, [1] * 5, 5)
        edit(api, 50)
        send(api, run_id, [20] * 4, 10)
        send(api, run_id, [20, 20], 3)
        assert told(api) == [(1, "resolved", 0, 1, 6)]

    def test_leaves_frames_that_come_very_late_to_the_version_of_their_step(self, api, run_id, clock):
        for step in range(10, 400):
            send(api, run_id, [1 if step < 12 else 7], step)
            if step == 200:
                edit(api, 6)
        send(api, run_id, [20, 20], 3, writer="late")
        look(api, clock, after_s=20)
        assert told(api) == [(1, "resolved", 3, 4, 11), (2, "firing", 201, 202, None)]

    def test_goes_on_with_the_alert_of_the_version_before(self, api, run_id, start):
        send(api, run_id, [20] * 3)
        edit(api, 30)
        send(start(rules=RULES), run_id, [20, 20, 1, 1], 3)
        assert told(api) == [(1, "resolved", 0, 1, 6)]

    def test_counts_from_its_edit_where_it_is_edited_while_late_frames_are_read(self, api, run_id, clock, monkeypatch):
        past_of = watching.past_of

        def edit_meanwhile(*arguments):
            edit(api, 6)
            send(api, run_id, [3, 3], 400)
            past = past_of(*arguments)
            edit(api, 2)
            send(api, run_id, [3, 3], 402)
            return past

        for step in range(10, 400):
            send(api, run_id, [1 if step < 12 else 7], step)
        send(api, run_id, [20, 20], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", edit_meanwhile)
            look(api, clock, after_s=10)
        assert told(api) == [(1, "resolved", 3, 4, 11), (3, "firing", 402, 403, None)]

    def test_counts_from_its_edit_where_no_frame_comes_while_late_frames_are_read(
        self, api, run_id, clock, monkeypatch
    ):
        past_of = watching.past_of

        def edit_meanwhile(*arguments):
            past = past_of(*arguments)
            edit(api, 2)
            return past

        for step in range(10, 400):
            send(api, run_id, [1], step)
        send(api, run_id, [1, 1], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", edit_meanwhile)
            look(api, clock, after_s=10)
        send(api, run_id, [3] * 3, 400)
        send(api, run_id, [3] * 2, 404)
        send(api, run_id, [3], 403)
        assert told(api) == [(2, "firing", 400, 401, None)]

    def test_keeps_what_its_rule_remembered_where_it_is_edited_before_late_frames_are_read(
        self, api, run_id, clock, monkeypatch, database
    ):
        past_of = watching.past_of
        put(api, "/rules/high-loss", {"name": "high-loss", "when": "lowest(loss) < 0.5 and loss > 2 for 1 sample"})

        def edit_meanwhile(*arguments):
            with closing(Api(database, rules=RULES, clock=clock)) as other:
                send(other, run_id, [3], 400)
                put(
                    other,
                    "/rules/high-loss",
                    {"name": "high-loss", "when": "lowest(loss) < 0.4 and loss > 2 for 1 sample"},
                )
                return past_of(*arguments)

        for step in range(10, 400):
            send(api, run_id, [0.1 if step == 20 else 1], step)
        send(api, run_id, [1, 1], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", edit_meanwhile)
            look(api, clock, after_s=10)
        assert told(api) == [(2, "firing", 400, 400, None)]

    def test_that_is_disabled_fires_at_no_late_frame(self, api, run_id):
        send(api, run_id, [1] * 5)
        send(api, run_id, [7] * 5, 10)
        call(api, "DELETE", "/rules/high-loss")
        send(api, run_id, [1], 20)
        send(api, run_id, [20, 20], 5)
        send(api, run_id, [20, 20], 15)
        put(api, "/rules/high-loss", RULE)
        send(api, run_id, [1], 21)
        assert [found["state"] for found in alerts(api) if found["state"] != "resolved"] == []

    def test_takes_nothing_from_an_alert_that_ended_when_it_was_disabled(self, api, run_id):
        send(api, run_id, [20] * 10)
        call(api, "DELETE", "/rules/high-loss")
        send(api, run_id, [20] * 3, 11)
        send(api, run_id, [20], 10)
        assert [(found["resolved_reason"], *states([found])[0]) for found in alerts(api)] == [
            ("rule disabled", "resolved", 0, 1, 9)
        ]


class TestARuleThatIsDisabledAndEnabledAgain:
    @pytest.fixture(params=["", "?project=default"])
    def of(self, request):
        return request.param

    @pytest.fixture(params=[False, True])
    def restart(self, request, start, clock):
        return lambda api: start(rules=RULES, clock=clock) if request.param else api

    def test_fires_again(self, api, run_id, of, restart):
        send(api, run_id, [20] * 5)
        call(api, "DELETE", f"/rules/high-loss{of}")
        call(api, "POST", f"/rules/high-loss/restore{of}")
        api = restart(api)
        send(api, run_id, [20] * 5, 5)
        assert [states([found])[0] for found in alerts(api)] == [("firing", 5, 6, None), ("resolved", 0, 1, 4)]

    @pytest.mark.parametrize("late", [2, 4, 5, 6])
    def test_fires_again_however_late_a_frame_comes(self, api, run_id, of, restart, late):
        sent = [step for step in range(20) if step != late]
        for step in sent:
            if step == 5 or (step == 6 and late == 5):
                call(api, "DELETE", f"/rules/high-loss{of}")
                call(api, "POST", f"/rules/high-loss/restore{of}")
                api = restart(api)
            send(api, run_id, [20], step)
        send(api, run_id, [20], late)
        found = [states([found])[0] for found in alerts(api)]
        assert [one[0] for one in found] == ["firing", "resolved"]
        assert found[0][1] >= (4 if late == 4 else 5)  # the next step that was read

    def test_fires_again_if_late_frames_were_read_meanwhile(self, api, run_id, of, clock, monkeypatch):
        past_of = watching.past_of

        def disable_meanwhile(*arguments):
            past = past_of(*arguments)
            call(api, "DELETE", f"/rules/high-loss{of}")
            call(api, "POST", f"/rules/high-loss/restore{of}")
            return past

        for step in range(10, 400):
            send(api, run_id, [20], step)
        send(api, run_id, [1, 1], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", disable_meanwhile)
            look(api, clock, after_s=10)
        send(api, run_id, [20] * 3, 400)
        assert [states([found])[0] for found in alerts(api)] == [
            ("firing", 400, 401, None),
            ("resolved", 10, 11, 399),
        ]

    def test_stays_over_if_somebody_resolved_its_alert(self, api, run_id):
        send(api, run_id, [20] * 5)
        (alert,) = alerts(api)
        api.http.post(f"/api/v1/alerts/{alert['alert_id']}/resolve", json={"by": "ada"})
        edit(api, 10, title="Another title")
        send(api, run_id, [20] * 5, 5)
        assert [found["state"] for found in alerts(api)] == ["resolved"]


class TestRulesWhoseStateCannotBeRead:
    def test_read_all_frames_again(self, api, run_id, start, clock):
        send(api, run_id, [20] * 40)
        api.database.execute("UPDATE rule_checkpoint SET state = substr(state, 1, 1)")
        api = start(rules=RULES, clock=clock)
        send(api, run_id, [20] * 2, 40)
        look(api, clock, after_s=60)
        meanwhile = ("resolved", 40, 41, 41)
        assert states(alerts(api)) == [meanwhile, ("firing", 0, 1, None)]
        send(api, run_id, [1] * 4, 42)
        assert states(alerts(api)) == [meanwhile, ("resolved", 0, 1, 43)]


class TestTheErasOfAnAttempt:
    def test_are_kept_in_order_and_the_oldest_stand_for_those_before(self, api, run_id, monkeypatch):
        monkeypatch.setattr(progress, "MOST_ERAS", 4)
        for number, step in enumerate((-1, 3, 5, 5, 8, 9)):
            with api.parts.store.write() as writer:
                writer.progress.begin_era(run_id, 1, RuleEra(step, {"a": number}))
        with api.parts.store.read() as reader:
            kept = reader.progress.eras(run_id, 1)
        assert kept == [RuleEra(5, {"a": 2}), RuleEra(5, {"a": 3}), RuleEra(8, {"a": 4}), RuleEra(9, {"a": 5})]

    def test_go_with_the_run(self, api, run_id):
        send(api, run_id, [1])
        assert api.database.execute("SELECT count(*) FROM rule_era") == [(1,)]
        api.http.delete(f"/api/v1/runs/{run_id}")
        assert api.database.execute("SELECT count(*) FROM rule_era") == [(0,)]

    @pytest.mark.parametrize("seed", range(8))
    def test_give_the_alerts_of_reading_each_step_once_by_its_rules(self, start, database, clock, seed):
        """Frames in any order, edits, restarts and a second server; then each step is read by the rules of its era."""
        chance = random.Random(seed)
        frames = [loss_frame(step, chance.choice([1, 3, 7, 7, 20, 20])) for step in range(60)]
        coming = sorted(frames, key=lambda frame: frame.step + chance.choice([0, 0, 0, 3, 12]))
        api = start(rules=RULES, clock=clock)
        run_id = api.register()
        with closing(Api(database, rules=RULES, clock=clock)) as other:
            while coming:
                size = chance.choice([1, 1, 2, 5])
                chance.choice([api, other]).send_ok(run_id, coming[:size])
                coming = coming[size:]
                if chance.random() < 0.15:
                    edit(other, chance.choice([2, 5, 6, 10, 30]))
                if chance.random() < 0.05:
                    api = start(rules=RULES, clock=clock)
            look(other, clock, after_s=20)
            assert told_by(other, run_id) == read_once(other, run_id, frames)


def told_by(api, run_id):
    """Without what fired only because a frame was late."""
    return sorted(
        (found["firing_step"], found["pending_step"], found["rule_version"])
        for found in api.get("/alerts", run=run_id, limit=1000)["alerts"]
        if found["firing_step"] not in (None, found["resolved_step"])
    )


def read_once(api, run_id, frames):
    """What fires if each step is read by the rules of its era."""
    with api.parts.store.read() as reader:
        eras = [
            (one.after_step, api.parts.active.of_versions(reader.rules, one.versions))
            for one in reader.progress.eras(run_id, 1)
        ]
    fired, last, state = [], eras[0][1], eras[0][1].evaluator.start()
    for view in views_of(frames, frozenset()):
        rules = [rules for after_step, rules in eras if after_step < view.step][-1]
        state = handed_over(state, last, rules)
        fired += [
            (event.firing_step, event.pending_step, rules.versions[event.rule.name])
            for event in rules.evaluator.advance(state, view)
            if event.kind == "firing"
        ]
        last = rules
    return fired

"""Rules over REST: read, edited, switched off, tried."""

import json
import math
import operator
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.server.conftest import Api, layer_frame, loss_frame, problem
from tsemon_server.alerts import Rulebook
from tsemon_server.rules.documents import load
from tsemon_server.store import Store
from tsemon_server.store.series.settling import Sizes

RULE = {
    "name": "high-loss",
    "family": "loss",
    "severity": "warning",
    "title": "The loss is high",
    "when": {"value": [{"scalar": "loss"}], "above": 10},
    "clear": {"value": [{"scalar": "loss"}], "below": 5},
    "for": {"samples": 2, "steps": 0},
    "advice": "lower the learning rate",
    "source": "the tests",
    "origin": "convention",
}
DEEP = {key: value for key, value in RULE.items() if key != "clear"} | {
    "name": "deep",
    "when": {"value": [{"layers": "grad_norm"}, {"layers": "max"}], "above": 1},
}
BUILT_IN = json.dumps({"rules": [RULE, RULE | {"name": "other"}]})
YAML = """
rules:
  - name: high-loss
    family: loss
    severity: critical   # as nothing else matters
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    for: {samples: 2, steps: 0}
    advice: lower the learning rate
    source: the tests
    origin: convention
"""


@pytest.fixture
def api(start):
    return start(rules=load(BUILT_IN))


def put(api, path, body):
    reply = api.http.put(f"/api/v1{path}", content=body if isinstance(body, str) else json.dumps(body))
    return reply.json() if reply.status_code == 200 else problem(reply)


def call(api, method, path):
    reply = api.http.request(method, f"/api/v1{path}")
    return reply.json() if reply.status_code == 200 else problem(reply)


def try_rules(api, **body):
    reply = api.http.post("/api/v1/rules/test", json=body)
    return reply.json() if reply.status_code == 200 else problem(reply)


def told(versions):
    return [(v["name"], v["version"], v["origin"], v["enabled"]) for v in versions]


def fired(api, run_id):
    """Rule, version, severity and state of the run's alerts, and why they are over; by rule."""
    found = api.get("/alerts", run=run_id)["alerts"]
    told = ("rule", "rule_version", "severity", "state", "resolved_reason")
    return sorted(tuple(alert[name] for name in told) for alert in found)


def send(api, run_id, losses, from_step=0):
    api.send_ok(run_id, [loss_frame(from_step + i, float(loss)) for i, loss in enumerate(losses)])


LINE = {"name": "mine", "when": "loss > 10 for 2 samples", "clear": "loss < 5"}


class TestARuleInOneLine:
    def test_is_kept_as_it_was_written_and_told_in_words(self, api):
        (version,) = put(api, "/rules/mine", LINE)["versions"]
        assert version["definition"] == LINE
        assert api.get("/rules/mine")["versions"] == [version]
        explained = api.get("/rules")["explained"]["mine"]
        assert explained["when"] == [{"depth": 0, "text": "loss above 10"}]
        assert explained["hold"] == {"samples": 2, "steps": 0}

    def test_fires_with_the_defaults_of_what_it_leaves_out(self, api):
        put(api, "/rules/mine", LINE)
        run_id = api.register()
        send(api, run_id, [20, 20, 20])
        (alert,) = [alert for alert in api.get("/alerts", run=run_id)["alerts"] if alert["rule"] == "mine"]
        assert (alert["family"], alert["severity"], alert["state"]) == ("custom", "warning", "firing")
        assert alert["summary"].startswith("Mine: loss is 20 (above 10)")
        assert alert["advice"] == {"text": "", "source": ""}

    def test_that_is_wrong_is_refused_with_the_column(self, api):
        error, detail = put(api, "/rules/mine", LINE | {"when": "lss > 10"})[1:3]
        assert error == "invalid_rules"
        assert "rules[0].when: column 1: no metric is named 'lss'" in detail
        assert detail.endswith("\n    lss > 10\n    ^")


class TestTheRules:
    def test_are_those_of_the_pack(self, api):
        rules = api.get("/rules")["rules"]
        assert told(rules) == [("high-loss", 1, "built-in", True), ("other", 1, "built-in", True)]
        assert rules[0]["definition"] == RULE
        assert api.get("/rules/high-loss") == {"versions": rules[:1]}

    def test_are_told_in_words_with_what_their_definitions_leave_out(self, api):
        explained = api.get("/rules")["explained"]
        assert [*explained] == ["high-loss", "other"]
        assert explained["high-loss"] == {
            "watches": ["loss"],
            "when": [{"depth": 0, "text": "loss above 10"}],
            "hold": {"samples": 2, "steps": 0},
            "clear": [{"depth": 0, "text": "loss below 5"}],
            "clear_hold": {"samples": 2, "steps": 0},
            "only_while": [],
            "after": {"samples": 0, "steps": 0},
        }
        put(api, "/rules/high-loss", YAML)
        assert api.get("/rules")["explained"]["high-loss"]["clear"] == []

    def test_stay_as_they_are_when_the_service_starts_again_and_say_what_a_new_pack_says(self, start, api):
        before = api.get("/rules")
        assert start(rules=load(BUILT_IN)).get("/rules") == before
        new = [RULE | {"severity": "info"}, RULE | {"name": "third"}]
        api = start(rules=load(json.dumps({"rules": new})))
        assert told(api.get("/rules")["rules"]) == [("high-loss", 2, "built-in", True), ("third", 1, "built-in", True)]
        assert [v["definition"]["severity"] for v in api.get("/rules/high-loss")["versions"]] == ["info", "warning"]

    def test_have_one_version_each_where_several_processes_start_at_once(self, database):
        with ExitStack() as held, ThreadPoolExecutor(4) as threads:
            stores = [Store(database.url) for _ in range(4)]
            for store in stores:
                held.callback(store.close)
            assert [*threads.map(Rulebook(load(BUILT_IN)).register, stores)] == [None] * 4
            with stores[0].read() as reader:
                assert [version.version for version in reader.rules.newest()] == [1, 1]

    def test_that_nobody_knows_are_told_as_such(self, api):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore")):
            assert call(api, method, f"/rules/absent{path}")[:2] == (404, "unknown_rule")


class TestAnEditedRule:
    def test_is_another_version_which_its_alerts_name(self, api):
        run_id = api.register()
        send(api, run_id, [20])
        versions = put(api, "/rules/high-loss", YAML)["versions"]
        assert told(versions) == [("high-loss", 2, "edited", True), ("high-loss", 1, "built-in", True)]
        other = api.register("other run")
        send(api, other, [20, 20])
        assert fired(api, other)[1] == ("other", 1, "warning", "firing", None)
        assert fired(api, other)[0] == ("high-loss", 2, "critical", "firing", None)

    def test_is_in_force_for_the_next_frame_in_every_process(self, api):
        processes = [api, Api(api.database, rules=load(BUILT_IN))]
        run_id = api.register()
        for process in processes:
            send(process, api.register(f"warm {id(process)}"), [20])
        put(processes[0], "/rules/high-loss", YAML)
        send(processes[1], run_id, [20, 20])
        processes[1].close()
        assert fired(api, run_id)[0] == ("high-loss", 2, "critical", "firing", None)

    def test_survives_a_restart_and_a_new_pack(self, start, api):
        put(api, "/rules/high-loss", YAML)
        api = start(rules=load(json.dumps({"rules": [RULE | {"severity": "info"}]})))
        assert told(api.get("/rules")["rules"]) == [("high-loss", 2, "edited", True)]
        run_id = api.register()
        send(api, run_id, [20, 20])
        assert fired(api, run_id) == [("high-loss", 2, "critical", "firing", None)]

    def test_may_be_new(self, api):
        assert told(put(api, "/rules/mine", RULE | {"name": "mine"})["versions"]) == [("mine", 1, "edited", True)]
        assert [rule["name"] for rule in api.get("/rules")["rules"]] == ["high-loss", "mine", "other"]

    def test_is_no_new_version_where_it_says_the_same(self, api):
        once = put(api, "/rules/high-loss", YAML)
        assert put(api, "/rules/high-loss", YAML) == once
        assert put(api, "/rules/other", RULE | {"name": "other"}) == api.get("/rules/other")
        assert len(api.get("/rules/other")["versions"]) == 1

    def test_is_the_packs_again_when_it_says_what_the_pack_says(self, api):
        put(api, "/rules/high-loss", YAML)
        assert told(put(api, "/rules/high-loss", RULE)["versions"])[0] == ("high-loss", 3, "built-in", True)

    @pytest.mark.parametrize(
        ("body", "detail"),
        [
            (YAML.replace("above", "abov"), r"body line 7: rules\[0\]\.when"),
            (json.dumps(RULE | {"family": "x"}), r"body line 1: rules\[0\]\.family"),
            (YAML.replace("high-loss", "other"), "expected the one rule high-loss, got other"),
            (BUILT_IN, "expected the one rule high-loss, got high-loss, other"),
            ("rules: []", "rules"),
            ("rules: [", "body line 1"),
        ],
    )
    def test_is_refused_with_the_line_of_what_is_wrong(self, api, body, detail):
        before = api.get("/rules")
        status, _, told = put(api, "/rules/high-loss", body)
        assert status == 422
        assert detail.replace("\\", "") in told
        assert api.get("/rules") == before

    def test_must_be_text(self, api):
        reply = api.http.put("/api/v1/rules/high-loss", content=b"\xff\xfe")
        assert problem(reply)[:2] == (422, "invalid_argument")


class TestAFileOfRules:
    def test_is_put_in_force_as_a_whole_and_leaves_others(self, api):
        body = json.dumps({"rules": [RULE | {"severity": "info"}, RULE | {"name": "mine"}]})
        rules = put(api, "/rules", body)["rules"]
        expected = [("high-loss", 2, "edited", True), ("mine", 1, "edited", True), ("other", 1, "built-in", True)]
        assert told(rules) == expected
        assert put(api, "/rules", body)["rules"] == rules

    def test_is_refused_as_a_whole(self, api):
        before = api.get("/rules")
        bad = {"rules": [RULE | {"name": "mine"}, RULE | {"severity": "bad"}]}
        assert put(api, "/rules", bad)[:2] == (422, "invalid_rules")
        assert api.get("/rules") == before


class TestADisabledRule:
    def test_looks_at_no_run_and_what_it_opened_is_over(self, api):
        run_id = api.register()
        send(api, run_id, [20, 20])
        pending = api.register("pending")
        send(api, pending, [20])
        api.database.execute("DELETE FROM notice")
        assert told(call(api, "DELETE", "/rules/high-loss")["versions"])[0] == ("high-loss", 2, "edited", False)
        assert fired(api, run_id) == [
            ("high-loss", 1, "warning", "resolved", "rule disabled"),
            ("other", 1, "warning", "firing", None),
        ]
        assert [alert["resolved_step"] for alert in api.get("/alerts", rule="high-loss")["alerts"]] == [1]
        assert {*api.database.execute("SELECT rule FROM notice JOIN alert USING (alert_id)")} == {("high-loss",)}
        send(api, pending, [20], 1)
        assert [rule for rule, *_ in fired(api, pending)] == ["other"]

    def test_is_disabled_once(self, api):
        once = call(api, "DELETE", "/rules/high-loss")
        assert call(api, "DELETE", "/rules/high-loss") == once

    def test_is_in_force_again_when_it_is_edited_or_restored(self, api):
        for again in (
            lambda: put(api, "/rules/high-loss", YAML),
            lambda: call(api, "POST", "/rules/high-loss/restore"),
        ):
            call(api, "DELETE", "/rules/high-loss")
            assert again()["versions"][0]["enabled"]
        assert api.get("/rules")["rules"][0]["definition"] == RULE

    def test_of_ones_own_cannot_be_restored(self, api):
        put(api, "/rules/mine", RULE | {"name": "mine"})
        assert call(api, "POST", "/rules/mine/restore")[:2] == (404, "unknown_rule")


class TestADefinitionThatThisVersionCannotRead:
    def test_looks_at_no_run_and_stops_no_other(self, api, caplog):
        # Of another title in each database: what was compiled is kept by what the rule says.
        put(api, "/rules/mine", RULE | {"name": "mine", "title": api.database.url[-100:]})
        api.database.execute("UPDATE rule_version SET definition = '{}' WHERE name = 'mine'")
        run_id = api.register()
        put(api, "/rules/third", RULE | {"name": "third"})
        send(api, run_id, [20, 20])
        assert [rule for rule, *_ in fired(api, run_id)] == ["high-loss", "other", "third"]
        assert "rule mine, version 1" in caplog.text


class TestHowRulesStandOnARun:
    def standing(self, api, run_id):
        found = api.get(f"/runs/{run_id}/rules")
        return found["step"], {rule["rule"]: (rule["state"], rule["judged_step"]) for rule in found["rules"]}

    def test_is_told_for_each_rule_in_force(self, api):
        run_id = api.register()
        put(api, "/rules/deep", DEEP)
        call(api, "DELETE", "/rules/other")
        assert self.standing(api, run_id) == (None, {"high-loss": ("unknown", None), "deep": ("unknown", None)})
        for losses, state in (([1], "quiet"), ([20], "pending"), ([20], "firing")):
            step = len(api.losses(run_id))
            send(api, run_id, losses, step)
            assert self.standing(api, run_id) == (step, {"high-loss": (state, step), "deep": ("unknown", None)})

    def test_tells_what_is_not_measured(self, api):
        run_id = api.register()
        put(api, "/rules/high-loss", DEEP | {"name": "high-loss", "when": {"all": [RULE["when"], DEEP["when"]]}})
        lacks = lambda: api.get(f"/runs/{run_id}/rules")["rules"][-1]["not_measured"]  # noqa: E731
        assert lacks() == ["grad_norm", "loss"]
        send(api, run_id, [1])
        assert lacks() == ["grad_norm"]
        api.send_ok(run_id, [layer_frame(1, [1.0, 2.0], "grad_norm")])
        assert lacks() == []

    def test_tells_what_a_rule_waits_for(self, api):
        run_id = api.register()
        put(api, "/rules/high-loss", {"name": "high-loss", "when": "mean(loss, samples=4) > 10 after 50 steps"})
        waits = lambda: api.get(f"/runs/{run_id}/rules")["rules"][-1]["waits_for"]  # noqa: E731
        assert waits() == ""  # that the run has no loss says enough
        send(api, run_id, [20, 20])
        assert waits() == "4 more samples with loss and 59 more steps"
        send(api, run_id, [20, 20], 60)
        assert waits() == "2 more samples"
        send(api, run_id, [20, 20], 62)
        assert waits() == ""

    def test_tells_that_a_guard_holds_a_rule_back(self, api):
        run_id = api.register()
        put(api, "/rules/high-loss", {"name": "high-loss", "when": "loss > 10 for 1 sample", "only_while": "loss < 30"})
        waits = lambda: api.get(f"/runs/{run_id}/rules")["rules"][-1]["waits_for"]  # noqa: E731
        send(api, run_id, [5])
        assert waits() == ""
        send(api, run_id, [40], 2)
        assert waits() == "a sample in which only_while holds"
        send(api, run_id, [5], 3)
        assert waits() == ""
        send(api, run_id, [20], 4)
        send(api, run_id, [40], 5)
        assert waits() == "", "it fires"

    def test_begins_anew_with_an_attempt(self, api):
        run_id = api.register()
        send(api, run_id, [20, 20])
        api.register(resume_step=1)
        assert self.standing(api, run_id) == (None, {"high-loss": ("unknown", None), "other": ("unknown", None)})

    def test_is_of_a_run_that_is_there(self, api):
        assert api.get("/runs/absent/rules")[:2] == (404, "unknown_run")


class TestRulesThatAreTried:
    LOSSES = (1, 20, 20, 20, 1, 1, 20, 20, 1)
    FIRED = ((1, 2, 5), (6, 7, None))

    def alerts(self, found):
        return tuple((a["pending_step"], a["firing_step"], a["resolved_step"]) for a in found["alerts"])

    @pytest.mark.parametrize("is_settled", [False, True])
    def test_say_of_a_stored_run_what_they_would_have_said_and_keep_nothing_of_it(self, api, is_settled):
        run_id = api.register()
        send(api, run_id, self.LOSSES)
        if is_settled:
            store = Store(api.database.url)
            assert store.settle(sizes=Sizes(4, 1)) == 2
            store.close()
        before = api.get("/alerts")
        found = try_rules(api, run_id=run_id, rules=json.dumps([RULE | {"name": "tried"}]).join(['{"rules": ', "}"]))
        assert self.alerts(found) == self.FIRED
        assert (found["num_frames"], found["problems"]) == (9, [])
        assert {a["rule"] for a in found["alerts"]} == {"tried"}
        assert api.get("/alerts") == before
        assert len(api.get("/rules")["rules"]) == 2

    def test_are_those_in_force_and_say_what_they_said(self, api):
        run_id = api.register()
        call(api, "DELETE", "/rules/other")
        send(api, run_id, self.LOSSES)
        found = try_rules(api, run_id=run_id)
        live = api.get("/alerts", rule="high-loss")["alerts"][::-1]
        assert [{key: alert[key] for key in kept} for alert in live for kept in found["alerts"][:1]] == found["alerts"]

    def test_read_frames_that_are_given(self, api):
        frames = [json.loads(loss_frame(step, float(loss)).to_json()) for step, loss in enumerate(self.LOSSES)]
        found = try_rules(api, frames=frames[::-1], rules=YAML)
        assert self.alerts(found) == ((1, 2, 5), (6, 7, None))

    def test_know_which_blocks_are_frozen(self, api):
        stuck = {"value": [{"layers": "update_norm"}, "skip_frozen"], "below": 1e-9, "in": "any"}
        rule = DEEP | {"when": stuck}
        frames = [json.loads(layer_frame(step, [0.0, 1.0], "update_norm").to_json()) for step in range(3)]
        body = {"frames": frames, "num_blocks": 2, "rules": json.dumps({"rules": [rule]})}
        assert self.alerts(try_rules(api, **body)) == ((0, 1, None),)
        assert self.alerts(try_rules(api, **body, frozen_blocks=[0])) == ()
        run_id = api.register(frozen_blocks=[0])
        api.send_ok(run_id, [layer_frame(step, [0.0, 1.0], "update_norm") for step in range(3)])
        assert self.alerts(try_rules(api, run_id=run_id, rules=body["rules"])) == ()

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({}, 422, "invalid_argument"),
            ({"run_id": "a", "frames": []}, 422, "invalid_argument"),
            ({"run_id": "absent"}, 404, "unknown_run"),
            ({"frames": [], "rules": "rules: ["}, 422, "invalid_document"),
            ({"frames": [], "rules": "rules: [{}]"}, 422, "invalid_rules"),
            ({"frames": [{"seq": 0}]}, 422, "invalid_argument"),
            (
                {"frames": [{"seq": 0, "step": 0, "time": 1, "layers": {"grad_norm": [1]}}], "num_blocks": 3},
                422,
                "invalid_frame",
            ),
        ],
    )
    def test_are_refused_what_they_cannot_read(self, api, body, status, code):
        assert try_rules(api, **body)[:2] == (status, code)


class TestARuleThatIsChecked:
    def check(self, api, body):
        reply = api.http.post("/api/v1/rules/check", content=body if isinstance(body, str) else json.dumps(body))
        return reply.json() if reply.status_code == 200 else problem(reply)

    def test_has_the_place_of_a_mistake_and_the_nearest_name(self, api):
        found = self.check(api, {"name": "mine", "when": "any(atention_entropy < 0.1)", "severity": "bad"})
        assert [mistake["field"] for mistake in found["mistakes"]] == ["when", "severity"]
        mistake, other = found["mistakes"]
        assert (mistake["column"], mistake["length"], mistake["nearest"]) == (5, 16, "attention_entropy")
        assert mistake["text"].startswith("no metric is named 'atention_entropy'")
        assert "\n" not in mistake["text"]
        assert (other["column"], other["example"]) == (None, None)
        assert (found["explained"], found["lines"]) == (None, {})

    def test_is_told_in_words_and_as_lines_and_nothing_is_kept(self, api):
        found = self.check(api, RULE | {"name": "tree"})
        assert found["lines"] == {"when": "loss > 10", "clear": "loss < 5"}
        assert found["explained"]["hold"] == {"samples": 2, "steps": 0}
        assert (found["mistakes"], found["notes"]) == ([], [])
        assert "tree" not in {rule["name"] for rule in api.get("/rules")["rules"]}

    def test_finds_what_costs_too_much(self, api):
        (mistake,) = self.check(api, {"name": "mine", "when": "any(z_score(grad_norm, 900) > 1)"})["mistakes"]
        assert (mistake["field"], mistake["column"]) == ("when", None)
        assert mistake["text"].startswith("this rule needs an estimated 6.44 ms of CPU time for each frame")

    def test_may_be_a_file_with_one_rule(self, api):
        assert self.check(api, YAML)["mistakes"] == []
        assert self.check(api, BUILT_IN)[:2] == (422, "invalid_argument")

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ("rules: [", 422, "invalid_document"),
            ("rules: []", 422, "invalid_rules"),
            ("[]", 422, "invalid_rules"),
            ('{"name": "' + "x" * 70_000 + '"}', 413, "body_too_large"),
        ],
    )
    def test_is_refused_if_it_is_no_rule_at_all(self, api, body, status, code):
        assert self.check(api, body)[:2] == (status, code)

    def test_is_answered_soon_however_it_is_written(self, api):
        nested = "(" * 40 + " + ".join(["loss"] * 400) + ")" * 40 + " > 1"
        body = {"name": "mine", "when": nested, "evidence": {f"e{i}": "loss" for i in range(4000)}}
        began = time.process_time()
        self.check(api, body)
        assert time.process_time() - began < 5


class TestATrace:
    """What a rule saw of a run."""

    def trace(self, api, when, frames, points=100, **more):
        rule = {"name": "tried", "when": when, "for": {"samples": 2, "steps": 0}}
        body = {"frames": [json.loads(frame.to_json()) for frame in frames], "num_blocks": 3}
        found = try_rules(api, **body, rules=json.dumps({"rules": [rule]}), points=points, **more)
        (trace,) = found["traces"]
        return trace

    def losses(self, *losses):
        return [loss_frame(step, float(loss)) for step, loss in enumerate(losses)]

    def test_has_each_value_with_its_bound_and_when_the_rule_was_met(self, api):
        trace = self.trace(api, "loss > 10", self.losses(1, 20, 1, 1, 30, 40, 1, 1, 20))
        (comparison,) = trace["comparisons"]
        assert comparison["text"] == "loss above 10"
        assert [point["seen"] for point in comparison["points"]] == [1, 20, 1, 1, 30, 40, 1, 1, 20]
        assert comparison["points"][1] == {
            "step": 1,
            "seen": 20,
            "layer": None,
            "bounds": {"above": 10},
            "holds": True,
        }
        assert (comparison["num_held"], comparison["num_known"]) == (4, 9)
        assert trace["spans"] == [
            {"pending_step": 1, "firing_step": None, "end_step": 3},
            {"pending_step": 4, "firing_step": 5, "end_step": 7},
            {"pending_step": 8, "firing_step": None, "end_step": None},
        ]
        assert (trace["first_step"], trace["last_step"], trace["num_samples"]) == (0, 8, 9)

    def test_says_what_came_nearest(self, api):
        trace = self.trace(api, "loss > 10", self.losses(1, 9, 7))
        nearest = trace["comparisons"][0]["nearest"]
        assert (nearest["step"], nearest["seen"], nearest["bounds"], trace["spans"]) == (1, 9, {"above": 10}, [])

    def test_keeps_what_is_nearest_if_there_are_more_samples_than_points(self, api):
        losses = [1.0] * 333
        losses[100], losses[201] = 20.0, 9.0
        trace = self.trace(api, "loss > 10", self.losses(*losses), points=9)
        points = trace["comparisons"][0]["points"]
        assert trace["samples_per_point"] == 64
        assert len(points) == 6
        assert [point["seen"] for point in points] == [1, 20, 1, 9, 1, 1]
        assert points[1]["step"] == 100
        low = self.trace(api, "loss < 0", self.losses(*losses[::-1], -5), points=4)["comparisons"][0]["points"]
        assert [point["seen"] for point in low] == [1, 1, -5]

    @pytest.mark.parametrize(
        ("when", "seen", "layer"),
        [
            ("any(grad_norm > 5)", 9, "2"),
            ("all(grad_norm > 5)", 1, "0"),
            ("first(grad_norm > 5)", 1, "0"),
            ("last(grad_norm > 5)", 9, "2"),
            ("any(grad_norm < 5)", 1, "0"),
            ("all(grad_norm < 5)", 9, "2"),
            ("any(grad_norm > 5, layers=2)", 4, "1"),
            ("any(grad_norm > 5, share=0.5)", 4, "1"),
            ("any(2 < grad_norm < 6)", 4, "1"),
            ("any(grad_norm > 2 * mean(grad_norm))", 9, "2"),
        ],
    )
    def test_shows_the_layer_that_decides(self, api, when, seen, layer):
        trace = self.trace(api, when, [layer_frame(0, [1.0, 4.0, 9.0], "grad_norm")])
        (point,) = trace["comparisons"][0]["points"]
        assert (point["seen"], point["layer"]) == (seen, layer)
        sides = {"above": operator.gt, "below": operator.lt}
        assert point["holds"] is all(sides[name](seen, bound) for name, bound in point["bounds"].items())

    def test_has_gaps_where_a_value_was_not_measured_and_names_it(self, api):
        trace = self.trace(api, "loss > 3 or any(grad_norm > 1) or finite(loss)", self.losses(1, math.nan, 2))
        assert [point["seen"] for point in trace["comparisons"][0]["points"]] == [1, None, 2]
        assert {point["holds"] for point in trace["comparisons"][1]["points"]} == {None}
        assert trace["comparisons"][1]["nearest"] is None
        assert trace["comparisons"][2]["num_held"] == 2
        assert trace["not_measured"] == ["grad_norm"]

    def test_is_one_for_each_attempt(self, api):
        run_id = api.register()
        send(api, run_id, [1, 20, 20, 20])
        api.register(resume_step=2)
        api.send_ok(run_id, [loss_frame(2, 2.0), loss_frame(3, 2.0)], attempt=2)
        rules = json.dumps({"rules": [RULE]})
        first, second = try_rules(api, run_id=run_id, rules=rules, points=10)["traces"]
        assert [(one["attempt"], one["first_step"], one["num_samples"]) for one in (first, second)] == [
            (1, 0, 4),
            (2, 2, 2),
        ]
        assert (len(first["spans"]), len(second["spans"])) == (1, 0)

    def test_has_no_more_spans_than_there_is_room_for(self, api):
        trace = self.trace(api, "loss > 10", self.losses(*[20, 20, 1, 1] * 210))
        assert (len(trace["spans"]), trace["num_spans"]) == (200, 210)
        assert trace["spans"][-1] == {"pending_step": 796, "firing_step": 797, "end_step": 799}

    def test_is_of_few_rules_and_only_if_it_is_asked_for(self, api):
        assert try_rules(api, frames=[], rules=BUILT_IN)["traces"] == []
        many = json.dumps({"rules": [RULE | {"name": f"r{i}"} for i in range(5)]})
        assert try_rules(api, frames=[], rules=many, points=10)[:2] == (422, "invalid_argument")
        assert try_rules(api, frames=[], points=10)[:2] == (422, "invalid_argument")
        assert try_rules(api, frames=[], rules=many, points=501)[:2] == (422, "invalid_argument")

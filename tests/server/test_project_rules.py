"""Rules and thresholds of one project: who may change them, and what they change for whom."""

import json

import pytest

from tests.server.access.conftest import Guarded
from tests.server.conftest import loss_frame
from tests.server.test_rulebook import RULE, call, fired, put, send, told, try_rules
from tsemon_server.alerts import ActiveRules
from tsemon_server.alerts.programs import Programs
from tsemon_server.rules import bounds
from tsemon_server.rules.documents import load
from tsemon_server.store import Store

BUILT_IN = load(json.dumps({"rules": [RULE, RULE | {"name": "other"}]}))


def above(bound, **changes):
    return RULE | {"when": {"value": [{"scalar": "loss"}], "above": bound}} | changes


@pytest.fixture
def api(start):
    return start(rules=BUILT_IN)


def shown(api, project):
    return told(api.get("/rules", project=project)["rules"])


def whose(api, project):
    return {rule["name"]: rule["project"] for rule in api.get("/rules", project=project)["rules"]}


def run_of(api, project, losses):
    run_id = api.register(project=project)
    send(api, run_id, losses)
    return run_id


class TestAProjectsVersionOfARule:
    def test_counts_for_its_runs_alone(self, api):
        put(api, "/rules/high-loss?project=strict", above(2))
        strict, lax = (run_of(api, project, [3, 3, 3]) for project in ("strict", "lax"))
        assert fired(api, strict) == [("high-loss", 2, "warning", "firing", None)]
        assert fired(api, lax) == []

    def test_of_another_threshold_alerts_on_the_same_frames_and_in_each_process(self, start, api):
        other = start(rules=BUILT_IN)
        for project, bound in (("strict", 2), ("lax", 50)):
            put(api, f"/rules/high-loss?project={project}", above(bound))
        found = {project: fired(other, run_of(other, project, [20, 20])) for project in ("strict", "lax", "none")}
        of_others = ("other", 1, "warning", "firing", None)
        assert found == {
            "strict": [("high-loss", 2, "warning", "firing", None), of_others],
            "lax": [of_others],
            "none": [("high-loss", 1, "warning", "firing", None), of_others],
        }

    def test_is_shown_beside_the_servers(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        put(api, "/rules/mine?project=p", above(3, name="mine"))
        assert whose(api, "p") == {"high-loss": "p", "mine": "p", "other": None}
        assert api.get("/rules", project="p")["project"] == "p"
        assert api.get("/rules")["projects"] == ["p"]
        assert whose(api, "q") == {"high-loss": None, "other": None}
        assert told(api.get("/rules")["rules"]) == [("high-loss", 1, "built-in", True), ("other", 1, "built-in", True)]
        assert "loss above 2" in str(api.get("/rules", project="p")["explained"]["high-loss"])

    def test_has_the_servers_history_behind_its_own(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        put(api, "/rules/high-loss", above(9))
        versions = api.get("/rules/high-loss", project="p")["versions"]
        assert [(v["version"], v["project"]) for v in versions] == [(2, "p"), (3, None), (1, None)]
        assert [v["version"] for v in api.get("/rules/high-loss")["versions"]] == [3, 1]
        put(api, "/rules/mine?project=p", above(2, name="mine"))
        assert call(api, "GET", "/rules/mine")[1] == "unknown_rule"

    def test_stays_when_the_servers_is_edited(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        put(api, "/rules/high-loss", above(100))
        assert [rule for rule, *_ in fired(api, run_of(api, "p", [3, 3]))] == ["high-loss"]
        assert [rule for rule, *_ in fired(api, run_of(api, "q", [20, 20]))] == ["other"]

    def test_survives_a_restart_and_a_new_pack(self, start, api):
        put(api, "/rules/high-loss?project=p", above(2))
        api = start(rules=load(json.dumps({"rules": [RULE | {"severity": "critical"}]})))
        assert shown(api, "p") == [("high-loss", 2, "edited", True)]
        assert shown(api, "q") == [("high-loss", 3, "built-in", True)]

    def test_that_says_what_the_servers_says_is_the_servers(self, api):
        for rule in (RULE, above(2), RULE):
            put(api, "/rules?project=p", {"rules": [rule, RULE | {"name": "other"}]})
        assert whose(api, "p") == {"high-loss": None, "other": None}
        put(api, "/rules/high-loss", above(9))
        put(api, "/rules/high-loss?project=p", RULE)  # as built in, but not as the server's
        assert whose(api, "p") == {"high-loss": "p", "other": None}

    def test_needs_a_project_with_a_name(self, api):
        assert put(api, "/rules/high-loss?project=", above(2))[0] == 422
        assert put(api, f"/rules/high-loss?project={'p' * 129}", above(2))[0] == 422


@pytest.mark.both_engines
class TestARuleThatAProjectDisables:
    def test_goes_on_in_others(self, api):
        mine, theirs = (run_of(api, project, [20, 20]) for project in ("p", "q"))
        assert call(api, "DELETE", "/rules/high-loss?project=p")["versions"][0]["enabled"] is False
        assert fired(api, mine)[0][3:] == ("resolved", "rule disabled")
        assert fired(api, theirs)[0][3:] == ("firing", None)

    def test_looks_at_no_new_run(self, api):
        call(api, "DELETE", "/rules/high-loss?project=p")
        assert [rule for rule, *_ in fired(api, run_of(api, "p", [20, 20]))] == ["other"]

    def test_is_over_in_projects_without_their_own_where_the_server_disables_it(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        mine, theirs = (run_of(api, project, [20, 20]) for project in ("p", "q"))
        call(api, "DELETE", "/rules/high-loss")
        assert fired(api, mine)[0][3:] == ("firing", None)
        assert fired(api, theirs)[0][3:] == ("resolved", "rule disabled")


@pytest.mark.both_engines
class TestARestoredRule:
    def test_is_the_servers_again(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        versions = call(api, "POST", "/rules/high-loss/restore?project=p")["versions"]
        assert [(v["version"], v["project"], v["origin"]) for v in versions] == [
            (1, None, "built-in"),
            (3, "p", "server"),
            (2, "p", "edited"),
        ]
        assert api.get("/rules")["projects"] == []
        assert fired(api, run_of(api, "p", [3, 3])) == []

    def test_follows_the_servers_edits(self, api):
        put(api, "/rules/high-loss?project=p", above(100))
        call(api, "POST", "/rules/high-loss/restore?project=p")
        put(api, "/rules/high-loss", above(2))
        assert [rule for rule, *_ in fired(api, run_of(api, "p", [3, 3]))] == ["high-loss"]

    def test_adds_nothing_where_the_project_has_none_of_its_own(self, api):
        before = api.get("/rules/high-loss", project="p")
        assert call(api, "POST", "/rules/high-loss/restore?project=p") == before

    def test_is_over_where_the_servers_is_disabled(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        call(api, "DELETE", "/rules/high-loss")
        run_id = run_of(api, "p", [3, 3])
        call(api, "POST", "/rules/high-loss/restore?project=p")
        assert fired(api, run_id)[0][3:] == ("resolved", "rule disabled")
        send(api, run_id, [3, 3, 3], from_step=10)
        assert len(fired(api, run_id)) == 1

    def test_must_be_one_that_the_server_has(self, api):
        put(api, "/rules/mine?project=p", above(2, name="mine"))
        status, error, detail = call(api, "POST", "/rules/mine/restore?project=p")[:3]
        assert (status, error) == (404, "unknown_rule")
        assert "disable the rule" in detail


class TestWhatIsToldOfARun:
    def test_is_by_the_rules_of_its_project(self, api):
        put(api, "/rules/mine?project=p", above(2, name="mine"))
        call(api, "DELETE", "/rules/other?project=p")
        found = {
            project: [rule["rule"] for rule in api.get(f"/runs/{run_of(api, project, [3, 3])}/rules")["rules"]]
            for project in ("p", "q")
        }
        assert found == {"p": ["high-loss", "mine"], "q": ["high-loss", "other"]}

    def test_is_what_a_test_of_the_rules_says(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        runs = {project: run_of(api, project, [3, 3]) for project in ("p", "q")}
        tried = {project: try_rules(api, run_id=run_id)["alerts"] for project, run_id in runs.items()}
        assert {project: [alert["rule"] for alert in alerts] for project, alerts in tried.items()} == {
            "p": ["high-loss"],
            "q": [],
        }

    def test_can_be_tried_with_frames(self, api):
        put(api, "/rules/high-loss?project=p", above(2))
        frames = [json.loads(loss_frame(step, 3.0).to_json()) for step in range(2)]
        tried = [try_rules(api, frames=frames, **given)["alerts"] for given in ({"project": "p"}, {})]
        assert [[alert["rule"] for alert in alerts] for alerts in tried] == [["high-loss"], []]


class TestTheRulesInForce:
    @pytest.fixture
    def store(self, api):
        return api.app.state.parts.store

    def of(self, active, store, *projects):
        with store.read() as reader:
            return [active.of(reader.rules, project) for project in projects]

    def test_are_one_for_all_projects_without_their_own(self, api, store):
        put(api, "/rules/high-loss?project=p", above(2))
        mine, theirs, servers = self.of(ActiveRules(BUILT_IN), store, "p", "q", None)
        assert theirs.evaluator is servers.evaluator
        assert mine.evaluator is not servers.evaluator
        assert mine.on_clock is not None

    def test_have_one_evaluator_where_projects_say_the_same(self, api, store):
        for project in ("p", "q"):
            put(api, f"/rules/high-loss?project={project}", above(2))
        mine, theirs = self.of(ActiveRules(BUILT_IN), store, "p", "q")
        assert mine.evaluator is theirs.evaluator
        assert (mine.versions["high-loss"], theirs.versions["high-loss"]) == (2, 3)

    def test_keep_their_evaluators_when_another_project_edits(self, api, store):
        put(api, "/rules/high-loss?project=p", above(2))
        active = ActiveRules(BUILT_IN)
        before = self.of(active, store, "p", None)
        put(api, "/rules/high-loss?project=q", above(4))
        after = self.of(active, store, "p", None)
        assert [one.evaluator for one in after] == [one.evaluator for one in before]

    def test_of_other_projects_are_not_read_again_when_one_edits(self, api, store, monkeypatch):
        for project in ("p", "q"):
            put(api, f"/rules/high-loss?project={project}", above(2))
        active, asked = ActiveRules(BUILT_IN), []
        self.of(active, store, "p", "q", None)
        put(api, "/rules/high-loss?project=q", above(4))
        with store.read() as reader:
            newest = reader.rules.newest
            monkeypatch.setattr(reader.rules, "newest", lambda whose: asked.append(whose) or newest(whose))
            for project in ("p", "q", None):
                active.of(reader.rules, project)
        assert {*asked} == {"q"}

    def test_of_200_projects_that_take_turns_are_compiled_once(self, api, store):
        with store.write() as writer:
            for number in range(200):
                definition = above(2, name="high-loss", clear={"value": [{"scalar": "loss"}], "below": number / 200})
                api.app.state.parts.rulebook.edit(writer.rules, load(json.dumps({"rules": [definition]})), f"p{number}")
        active, projects = ActiveRules(BUILT_IN, Programs()), [f"p{number}" for number in range(200)]
        first, again = self.of(active, store, *projects), self.of(active, store, *projects)
        assert len({id(one.evaluator) for one in first}) == 200
        assert all(one.evaluator is other.evaluator for one, other in zip(first, again, strict=True))

    def test_that_nobody_has_needed_for_long_are_compiled_again(self, api, store):
        for project, bound in (("p", 2), ("q", 3)):
            put(api, f"/rules/high-loss?project={project}", above(bound))
        active = ActiveRules(BUILT_IN, Programs(most_bytes=1))
        mine, again = self.of(active, store, "p", "p")
        assert mine.evaluator is again.evaluator
        self.of(active, store, "q")
        (later,) = self.of(active, store, "p")
        assert later.evaluator is not mine.evaluator
        assert later.rules == mine.rules

    def test_are_asked_for_with_one_query_while_nobody_edits(self, api, store, monkeypatch):
        put(api, "/rules/high-loss?project=p", above(2))
        active = ActiveRules(BUILT_IN)
        self.of(active, store, "p", "q")
        with store.read() as reader:
            asked = []
            monkeypatch.setattr(reader.rules, "newest", lambda *_: asked.append("newest"))
            monkeypatch.setattr(reader.rules, "num_versions_of", lambda *_: asked.append("num_versions_of"))
            active.of_projects(reader.rules, ["p", "q", "r"])
        assert asked == []

    def test_of_a_run_are_those_of_its_project(self, api, store):
        active = ActiveRules(BUILT_IN)
        run_id = api.register(project="p")
        with store.read() as reader:
            assert active.of_run(reader, run_id) == active.of(reader.rules, "p")
        put(api, "/rules/high-loss?project=p", above(2))
        with store.read() as reader:
            assert active.of_run(reader, run_id) == active.of(reader.rules, "p")
            assert active.of_run(reader, run_id) != active.of(reader.rules, None)
            assert active.of_run(reader, "none") == active.of(reader.rules, None)


class TestAProjectsAdministrator:
    CHANGES = ("PUT", "/rules"), ("PUT", "/rules/mine"), ("DELETE", "/rules/mine"), ("POST", "/rules/mine/restore")

    @pytest.fixture
    def guarded(self, database):
        guarded = Guarded(database.url, lambda: 1.7e9)
        guarded.admin = guarded.token("admin")
        guarded.mine = guarded.token("admin", project="mine")
        self.change(guarded, "PUT", "/rules", guarded.admin)
        yield guarded
        guarded.parts.store.close()

    def change(self, guarded, method, path, token, project=None, bound=1):
        query = "" if project is None else f"?project={project}"
        body = json.dumps({"rules": [above(bound, name="mine")]}) if method == "PUT" else None
        return guarded.ask(method, path + query, token, content=body)

    @pytest.mark.parametrize(("method", "path"), CHANGES)
    def test_changes_the_projects_rules_and_nobody_elses(self, guarded, method, path):
        self.change(guarded, "PUT", "/rules", guarded.mine, "mine", bound=7)
        assert self.change(guarded, method, path, guarded.mine, "mine", bound=5).status_code == 200
        with guarded.parts.store.read() as reader:
            servers, theirs = reader.rules.newest(), reader.rules.newest("theirs")
            versions = reader.rules.versions("mine", "mine")
        assert [(v.version, v.enabled) for v in servers] == [(1, True)]
        assert theirs == servers
        assert max(v.version for v in versions if v.project == "mine") == 3

    @pytest.mark.parametrize(("method", "path"), CHANGES)
    @pytest.mark.parametrize("project", ["theirs", None])
    def test_is_refused_those_of_others_and_of_the_server(self, guarded, method, path, project):
        before = self.num_versions(guarded)
        reply = self.change(guarded, method, path, guarded.mine, project)
        assert (reply.status_code, reply.json()["error"]) == (403, "forbidden")
        assert "the token may change the rules of project 'mine' alone (project=mine)" in reply.json()["detail"]
        assert self.num_versions(guarded) == before
        assert self.change(guarded, method, path, guarded.admin, project, bound=3).status_code in (200, 404)

    def num_versions(self, guarded):
        with guarded.parts.store.read() as reader:
            return reader.rules.num_versions()

    def test_needs_the_scope(self, guarded):
        reader = guarded.token("read", "ingest", project="mine")
        assert self.change(guarded, "PUT", "/rules", reader, "mine").status_code == 403

    def test_sees_the_servers_rules_and_the_projects_own(self, guarded):
        self.change(guarded, "PUT", "/rules", guarded.admin, "mine", bound=2)
        self.change(guarded, "PUT", "/rules", guarded.admin, "theirs", bound=3)
        for query in ("", "?project=mine"):
            found = guarded.ask("GET", f"/rules{query}", guarded.mine).json()
            assert (found["project"], found["projects"]) == ("mine", ["mine"])
            assert [(rule["name"], rule["project"]) for rule in found["rules"]] == [("mine", "mine")]
            versions = guarded.ask("GET", f"/rules/mine{query}", guarded.mine).json()["versions"]
            assert [(v["version"], v["project"]) for v in versions] == [(2, "mine"), (1, None)]
        for path in ("/rules", "/rules/mine"):
            assert guarded.ask("GET", f"{path}?project=theirs", guarded.mine).status_code == 403
        assert guarded.ask("GET", "/rules", guarded.admin).json()["projects"] == ["mine", "theirs"]

    def test_tries_frames_with_the_projects_rules(self, guarded):
        self.change(guarded, "PUT", "/rules", guarded.admin, bound=10)
        self.change(guarded, "PUT", "/rules", guarded.mine, "mine", bound=2)
        frames = [json.loads(loss_frame(step, 3.0).to_json()) for step in range(2)]

        def tried(token, **given):
            return guarded.ask("POST", "/rules/test", token, json={"frames": frames} | given)

        assert len(tried(guarded.mine).json()["alerts"]) == 1
        assert tried(guarded.admin).json()["alerts"] == []
        assert len(tried(guarded.admin, project="mine").json()["alerts"]) == 1
        assert tried(guarded.mine, project="theirs").status_code == 403


class TestADatabaseThatTwoProcessesEdit:
    def test_gives_each_version_its_own_number(self, api, database):
        other = Store(database.url)
        api.register(project="p")
        put(api, "/rules/high-loss?project=p", above(2))
        with other.read() as reader:
            assert reader.rules.newest("p")[0].version == 2
        other.close()


def dear(number):
    """A rule that takes about a quarter of what a project may have."""
    return {"name": f"dear-{number}", "when": f"any(median(grad_norm + {number}, samples=20) > 1)"}


class TestWhatRulesOfAProjectMayCost:
    @pytest.fixture
    def full(self, api):
        """A project that has as many rules as it may."""
        number = 0
        while isinstance(put(api, f"/rules/dear-{number}?project=p", dear(number)), dict):
            number += 1
        return number

    def test_is_bounded_for_one_rule(self, api):
        status, error, told = put(
            api, "/rules/mine?project=p", {"name": "mine", "when": "any(z_score(grad_norm, 900) > 1)"}
        )
        assert (status, error) == (422, "invalid_rules")
        assert "this rule needs an estimated 6.44 ms of CPU time for each frame, and may need 0.5 ms" in told
        assert api.get("/rules")["projects"] == []

    def test_is_bounded_for_all_together(self, api, full):
        status, error, told = put(api, f"/rules/dear-{full}?project=p", dear(full))
        assert (status, error) == (422, "invalid_rules")
        assert told.startswith("the own rules of project 'p' need an estimated 1.76 ms of CPU time for each frame")
        assert f"the most expensive of the {full + 1} is dear-" in told
        own = [name for name, project in whose(api, "p").items() if project]
        assert own == [f"dear-{number}" for number in range(full)]

    def test_is_bounded_for_each_project_by_itself(self, api, full):
        for project in ("?project=q", ""):
            assert isinstance(put(api, f"/rules/dear-{full}{project}", dear(full)), dict)

    def test_leaves_room_for_others_once_a_rule_is_gone(self, api, full):
        call(api, "DELETE", "/rules/dear-0?project=p")
        assert isinstance(put(api, f"/rules/dear-{full}?project=p", dear(full)), dict)
        assert put(api, "/rules/dear-0?project=p", dear(0))[0] == 422

    def test_counts_a_rule_once_however_often_it_is_edited(self, api, full):
        for _ in range(3):
            put(api, "/rules/dear-0?project=p", dear(0) | {"severity": "info"})
            assert isinstance(put(api, "/rules/dear-0?project=p", dear(0)), dict)

    def test_can_be_lowered_rule_by_rule_if_it_is_above_the_limit_of_this_version(self, api, full, monkeypatch):
        monkeypatch.setattr(bounds, "MOST_OF_ALL", bounds.MOST_OF_ALL._replace(frame_us=500))
        assert put(api, "/rules/dear-9?project=p", dear(9))[0] == 422
        cheaper = {"name": "dear-0", "when": "any(median(grad_norm, samples=4) > 1)"}
        assert isinstance(put(api, "/rules/dear-0?project=p", cheaper), dict)
        assert put(api, "/rules/dear-0?project=p", dear(0))[0] == 422

    def test_is_bounded_for_the_rules_that_the_server_was_given(self, api):
        replies = [put(api, f"/rules/dear-{number}", dear(number)) for number in range(9)]
        refused = [reply for reply in replies if not isinstance(reply, dict)]
        assert 0 < len(refused) < 9
        assert refused[0][2].startswith("the server's rules that are not built in need an estimated")
        assert isinstance(call(api, "POST", "/rules/high-loss/restore"), dict)

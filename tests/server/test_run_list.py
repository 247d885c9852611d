"""The list of a whole fleet: what it finds, in which order, and how many there are."""

import math
from itertools import count

import pytest

from tests.server.conftest import loss_frame, problem
from tsemon.wire import Frame
from tsemon_answers.runs import RunFilter
from tsemon_server.rules import PACK
from tsemon_server.store.ledger.listing import SILENT_RULES, STUCK_RULES

RUNS = {
    # name: last step, loss, open alerts; None is none
    "a": (5, 2.0, 0),
    "b": (None, None, 2),
    "c": (900, math.nan, 0),
    "d": (5, 1e300, 1),
    "e": (2**53 - 1, -3.5, 0),
    "f": (0, math.inf, 0),
    "g": (7, 2.0, 1),
    "h": (None, None, 0),
    "i": (8, None, 0),
    "j": (9, -math.inf, 3),
    "k": (10, 0.0, 0),
}


def names(api, **params):
    return [run["run"] for run in api.get("/runs", **params)["runs"]]


def over_pages(api, between=lambda: None, **params):
    seen, cursor = [], None
    while True:
        page = api.get("/runs", cursor=cursor, **params)
        assert page["total"] > 0
        seen += [run["run"] for run in page["runs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return seen
        between()


@pytest.fixture
def fleet(api):
    """The runs above, made in the order of their names; their ids by name."""
    ids = {}
    for name, (step, loss, num_alerts) in RUNS.items():
        ids[name] = api.register(name)
        if step is not None:
            api.send_ok(ids[name], [Frame(0, step, 1.0, {} if loss is None else {"loss": loss})])
        for number in range(num_alerts):
            api.open_alert(ids[name], f"rule-{number}", state="firing" if number % 2 else "pending")
    return ids


def sorted_by(ids, value, descending):
    """Names in order; those without a finite value come last, and equal ones go by id."""
    has = [name for name in ids if value(name) is not None and math.isfinite(value(name))]
    has_none = sorted(set(ids) - set(has), key=ids.get, reverse=descending)
    return sorted(has, key=lambda name: (value(name), ids[name]), reverse=descending) + has_none


@pytest.mark.both_engines
class TestOrders:
    @pytest.mark.parametrize("sign", ["", "-"])
    def test_are_those_of_the_values_page_by_page(self, api, fleet, sign):
        made = {name: number for number, name in enumerate(RUNS)}
        expected = {
            "created": sorted(RUNS, key=made.get, reverse=sign == "-"),
            "name": sorted(RUNS, reverse=sign == "-"),
            "step": sorted_by(fleet, lambda name: RUNS[name][0], sign == "-"),
            "loss": sorted_by(fleet, lambda name: RUNS[name][1], sign == "-"),
            "alerts": sorted(RUNS, key=lambda name: (RUNS[name][2], made[name]), reverse=sign == "-"),
        }
        for order, found in expected.items():
            for limit in (1, 3, 20):
                assert over_pages(api, order=sign + order, limit=limit) == found, (order, limit)

    def test_keep_their_place_while_other_runs_come_and_go(self, api, fleet):
        for order in ("-step", "loss", "-alerts", "created"):
            expected = [name for name in names(api, order=order) if name in RUNS]
            others = [api.register(f"{order} {number}") for number in range(4)]

            def change(others=others):
                if others:
                    api.http.delete(f"/api/v1/runs/{others.pop()}")
                    api.send_ok(api.register("new"), [loss_frame(3)])

            assert [name for name in over_pages(api, change, order=order, limit=2) if name in RUNS] == expected

    def test_may_have_what_is_live_first_and_the_newest_of_that(self, api):
        ids = {name: api.register(name) for name in "abcdefghij"}
        api.open_alert(ids["d"], STUCK_RULES[0], state="firing")
        api.open_alert(ids["f"], SILENT_RULES[0], state="firing")
        for name, state in (("i", "failed"), ("b", "finished")):
            api.http.patch(f"/api/v1/runs/{ids[name]}", json={"state": state})
        api.send_ok(ids["a"], [loss_frame(1)])
        for limit in (1, 2, 3, 20):
            assert over_pages(api, order="live", limit=limit) == [*"jhgedca" + "bif"], limit

    def test_of_live_runs_is_the_same_while_all_of_them_send_frames(self, api):
        ids = [api.register(f"run-{number:02}") for number in range(60)]
        steps = count()

        def train():
            step = next(steps)
            for run_id in ids:
                api.send_ok(run_id, [loss_frame(step)])

        train()
        assert over_pages(api, train, order="live", limit=50) == [f"run-{number:02}" for number in range(59, -1, -1)]

    def test_of_live_runs_misses_none_that_ends_meanwhile(self, api):
        ids = {name: api.register(name) for name in "abcdef"}
        ending = iter("fab")
        end = lambda: api.http.patch(f"/api/v1/runs/{ids[next(ending)]}", json={"state": "finished"})  # noqa: E731
        assert set(over_pages(api, end, order="live", limit=3)) == {*"abcdef"}

    def test_refuse_a_cursor_of_another_order(self, api, fleet):
        cursors = {
            order: api.get("/runs", order=order, limit=1)["next_cursor"]
            for order in ("step", "-step", "alerts", "live")
        }
        for order in cursors:
            for other in cursors.keys() - {order}:
                assert api.get("/runs", order=order, cursor=cursors[other])[:2] == (422, "invalid_argument")


ASKED = [
    ({"q": "gpt"}, ["GPT-small"]),
    ({"q": "IMAGE"}, ["vit_100%", "vitx100"]),
    ({"q": "BaseLine"}, ["GPT-small", "vitx100"]),
    ({"q": "köLN"}, ["GPT-small"]),
    ({"q": "élan"}, ["vit_100%"]),
    ({"q": "t_1"}, ["vit_100%"]),
    ({"q": "%"}, ["vit_100%"]),
    ({"q": 'a"b'}, ["vit_100%"]),
    ({"q": '","'}, []),
    ({"q": "["}, []),
    ({"q": ""}, ["GPT-small", "vit_100%", "vitx100"]),
    ({"tag": "baseline"}, ["GPT-small", "vitx100"]),
    ({"tag": ["x", "baseline"]}, ["vitx100"]),
    ({"tag": "base"}, []),
    ({"tag": "Baseline"}, []),
    ({"tag": "Köln", "q": "small", "project": "Pretrain", "state": "running"}, ["GPT-small"]),
    ({"tag": "Köln", "q": "vit"}, []),
]


class TestTheSearch:
    @pytest.fixture
    def searched(self, api):
        api.register("GPT-small", project="Pretrain", tags=["baseline", "Köln"])
        api.register("vit_100%", project="images", tags=["ÉLAN", 'a"b'])
        api.register("vitx100", project="images", tags=["baseline", "x"])
        return api

    def test_finds_parts_of_names_projects_and_tags(self, searched):
        for ask, found in ASKED:
            page = searched.get("/runs", order="name", **ask)
            assert ([run["run"] for run in page["runs"]], page["total"]) == (found, len(found)), ask

    def test_refuses_what_is_no_text_of_a_name(self, searched):
        assert searched.get("/runs", q="x" * 201)[:2] == (422, "invalid_argument")
        assert searched.get("/runs", tag=["x"] * 21)[:2] == (422, "invalid_argument")
        assert searched.get("/runs", condition="asleep")[:2] == (422, "invalid_argument")

    def test_takes_a_character_that_no_name_has_as_any_text(self, searched):
        reply = searched.http.get("/api/v1/runs", params={"q": "gpt\0"})
        # PostgreSQL's text cannot hold this one character and says so, SQLite looks for it and finds nothing.
        if searched.database.engine == "sqlite":
            assert reply.json()["runs"] == []
        else:
            assert problem(reply)[:2] == (422, "invalid_argument")


class TestTheTotal:
    def test_is_of_all_pages_and_of_what_fits(self, api, fleet):
        api.http.patch(f"/api/v1/runs/{fleet['c']}", json={"state": "failed"})
        page = api.get("/runs", limit=2)
        assert page["total"] == 11
        assert api.get("/runs", limit=2, cursor=page["next_cursor"])["total"] == 11
        assert [api.get("/runs", state=state)["total"] for state in ("running", "failed", "finished")] == [10, 1, 0]

    def test_is_counted_up_to_a_bound(self, api, fleet):
        with api.app.state.parts.store.read() as reader:
            assert [reader.runs.count(RunFilter(), most) for most in (3, 11, 20)] == [3, 11, 11]


class TestTheCondition:
    def test_is_what_alerts_of_liveness_say_of_a_run_that_goes_on(self, api):
        said = {
            "a": ([("process-silent", "firing")], "silent"),
            "b": ([("training-hangs", "firing")], "stuck"),
            "c": ([("training-stuck", "firing"), ("process-lost", "firing")], "silent"),
            "d": ([("process-silent", "pending"), ("training-slow", "firing")], "running"),
            "e": ([("training-stuck", "resolved")], "running"),
            "f": ([], "running"),
            "g": ([("process-silent", "firing")], "failed"),
            "h": ([], "finished"),
        }
        ids = {name: api.register(name) for name in said}
        for name, (alerts, _) in said.items():
            for rule, state in alerts:
                api.open_alert(ids[name], rule, family="liveness", state=state)
        for name, state in (("g", "failed"), ("h", "finished")):
            api.http.patch(f"/api/v1/runs/{ids[name]}", json={"state": state})
        expected = {name: found for name, (_, found) in said.items()}
        assert {run["run"]: run["condition"] for run in api.get("/runs")["runs"]} == expected
        assert {name: api.get(f"/runs/{ids[name]}")["condition"] for name in ids} == expected
        for wanted in ("running", "silent", "stuck", "finished", "failed"):
            found = [name for name, condition in expected.items() if condition == wanted]
            page = api.get("/runs", condition=wanted, order="name")
            assert ([run["run"] for run in page["runs"]], page["total"]) == (found, len(found))

    def test_stays_while_somebody_has_seen_to_the_alert(self, api):
        run_id = api.register()
        alert_id = api.open_alert(run_id, "process-silent", family="liveness")
        assert api.http.post(f"/api/v1/alerts/{alert_id}/ack", json={"by": "me"}).status_code == 200
        assert names(api, condition="silent") == ["gpt"]
        api.fall_silent(run_id)
        api.register(attempt_key="another")
        assert names(api, condition="running") == ["gpt"]

    def test_goes_by_rules_that_there_are(self):
        on_clock = {rule.name for rule in PACK if rule.on == "clock"}
        assert {*SILENT_RULES, *STUCK_RULES} <= on_clock


class TestTheTags:
    def test_are_those_of_the_most_runs_first(self, api):
        for name, tags in (("a", ["x", "y", "x"]), ("b", ["y", "Köln"]), ("c", []), ("d", ["y", "x"])):
            api.register(name, tags=tags, project="p" if name in "ab" else "q")
        assert api.get("/tags") == {
            "tags": [{"tag": "y", "runs": 3}, {"tag": "x", "runs": 2}, {"tag": "Köln", "runs": 1}]
        }
        assert api.get("/tags", project="q")["tags"] == [{"tag": "x", "runs": 1}, {"tag": "y", "runs": 1}]
        assert api.get("/tags", project="none")["tags"] == []

    def test_are_two_hundred_at_most(self, api):
        for number in range(6):
            api.register(str(number), tags=["all", *(f"{number}-{nth}" for nth in range(40))])
        tags = api.get("/tags")["tags"]
        assert (len(tags), tags[0]) == (200, {"tag": "all", "runs": 6})

import re
import sqlite3
from dataclasses import replace
from itertools import count

import pytest
from sqlalchemy import event

from tsemon.wire import Frame
from tsemon_answers.runs import RunFilter
from tsemon_server.store import Store
from tsemon_server.store.ledger.listing import Place

from .conftest import loss_frame, problem


class TestRegistering:
    def test_the_same_name_again_is_the_same_run_and_a_new_attempt(self, api):
        bodies = [api.http.post("/api/v1/runs", json={"run": "gpt"}).json() for _ in range(2)]
        assert bodies[0]["run_id"] == bodies[1]["run_id"]
        assert [body["attempt"] for body in bodies] == [1, 2]

    def test_the_same_name_in_another_project_is_another_run(self, api):
        assert api.register("gpt") != api.register("gpt", project="other")

    def test_the_same_attempt_key_is_the_same_attempt(self, api):
        first, again, other = (
            api.http.post("/api/v1/runs", json={"run": "gpt", "attempt_key": key}).json() for key in ("a", "a", "b")
        )
        assert first == again
        assert other["attempt"] == 2

    def test_the_same_attempt_key_leaves_the_run_as_it_is(self, api):
        run_id = api.register(attempt_key="a", tags=["x"])
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        api.register(attempt_key="a", tags=["y"])
        run = api.get(f"/runs/{run_id}")
        assert (run["state"], run["tags"]) == ("finished", ["x"])

    def test_sets_the_run_running(self, api):
        run_id = api.register()
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "failed"})
        api.register()
        assert api.get(f"/runs/{run_id}")["state"] == "running"

    def test_keeps_config_and_tags_that_a_later_attempt_does_not_give(self, api):
        run_id = api.register(config={"lr": 0.1}, tags=["a"])
        api.register()
        run = api.get(f"/runs/{run_id}")
        assert (run["config"], run["tags"]) == ({"lr": 0.1}, ["a"])

    @pytest.mark.parametrize(
        ("body", "detail"),
        [
            ({}, "run: Field required"),
            ({"run": "gpt", "blockz": []}, "blockz: Extra inputs"),
            ({"run": "a\nb"}, "run: String should match"),
            ({"run": "gpt", "attempt_key": ""}, "attempt_key: expected at least one character, got an empty text"),
            ({"run": "x" * 300}, "run: String should have at most 128"),
            ({"run": "gpt", "project": "x" * 129}, "project: String should have at most 128"),
            ({"run": "gpt", "tags": ["x" * 129]}, r"tags\.0: String should have at most 128"),
            ({"run": "gpt", "blocks": ["x" * 257]}, r"blocks\.0: String should have at most 256"),
            ({"run": "gpt", "tags": ["\x00"]}, r"tags\.0: String should match"),
            ({"run": "gpt", "blocks": ["a", "b"], "frozen_blocks": [2]}, "frozen_blocks: Each .* of the 2 blocks, got"),
            ({"run": "gpt", "blocks": ["a"], "frozen_blocks": [-1]}, r"frozen_blocks\.0: Input should be greater"),
            (
                {"run": "gpt", "quantities": [{"name": "a b", "axis": "run"}]},
                r"quantities\.0\.name: String should match",
            ),
            ({"run": "gpt", "quantities": [{"name": "a", "axis": "head"}]}, r"quantities\.0\.axis: Input should be"),
            (
                {"run": "gpt", "quantities": [{"name": "a", "axis": "run"}] * 101},
                "quantities: List should have at most 100",
            ),
            ({"run": "gpt", "resume_step": -1}, "resume_step: Input should be greater than or equal to 0, got -1"),
            ([], "expected|Input should be an object"),
        ],
    )
    def test_refuses_what_it_does_not_understand(self, api, body, detail):
        status, error, told = problem(api.http.post("/api/v1/runs", json=body))
        assert (status, error) == (422, "invalid_argument")
        assert re.search(detail, told)
        assert api.get("/runs")["runs"] == []


class TestARun:
    def test_tells_what_is_known_about_it(self, api):
        config = {"lr": 0.1, "deep": {"a": [None, True]}}
        run_id = api.register(num_blocks=3, config=config, tags=["a b", "c"], frozen_blocks=[2, 0, 2])
        api.send_ok(run_id, [loss_frame(0, 3.0), loss_frame(7, 2.5)])
        run = api.get(f"/runs/{run_id}")
        expected = {
            "run_id": run_id,
            "project": "default",
            "run": "gpt",
            "state": "running",
            "condition": "running",
            "attempt": 1,
            "num_blocks": 3,
            "tags": ["a b", "c"],
            "last_step": 7,
            "num_frames": 2,
            "loss": 2.5,
            "process_step": 7,
            "open_alerts": 0,
            "alerts_at_end": 0,
            "blocks": ["h.0", "h.1", "h.2"],
            "stacks": [{"name": "", "blocks": 3, "first_block": 0, "first_state": 0}],
            "frozen_blocks": [0, 2],
            "not_measured": {},
            "config": {"lr": 0.1, "deep": {"a": [None, True]}},
            "quantities": {},
            "metrics": {"scalars": ["loss"], "layers": {}, "heads": {}},
            "latest": {"step": 7, "time": 1007.0, "scalars": {"loss": 2.5}},
            "unevaluated_frames": 0,
            "default_metric": None,
        }
        assert {key: run[key] for key in expected} == expected
        assert run["created_at"].endswith("Z")
        assert set(run) - set(expected) == {"created_at", "updated_at", "stepped_at", "attempts"}
        assert api.get("/runs")["runs"] == [{key: run[key] for key in api.get("/runs")["runs"][0]}]

    def test_tells_what_is_not_measured_and_why_as_its_writers_said_last(self, api):
        run_id = api.register()
        said = {"saturation": "on demand", "attention_entropy": "no attention was seen"}
        api.send_ok(run_id, [replace(loss_frame(10, seq=1), not_measured=said), loss_frame(20, seq=2)])
        api.send_ok(run_id, [replace(loss_frame(0, seq=0), not_measured={"loss": "came late"})])
        api.send_ok(run_id, [replace(loss_frame(10), not_measured={"grad_norm": "no gradient"})], writer="stage-1")
        assert api.get(f"/runs/{run_id}")["not_measured"] == {**said, "grad_norm": "no gradient"}
        api.send_ok(run_id, [replace(loss_frame(30, seq=3), not_measured={})])
        assert api.get(f"/runs/{run_id}")["not_measured"] == {"grad_norm": "no gradient"}
        api.register()
        assert api.get(f"/runs/{run_id}")["not_measured"] == {}

    def test_describes_metrics_of_the_users_own_as_the_newest_registration_that_does(self, api):
        described = {"axis": "activation", "title": "tails", "equation": "m4 / m2^2", "unit": "1", "low": 1.0}
        described |= {"high": None, "log_scale": True}
        run_id = api.register(quantities=[{"name": "kurtosis", **described}])
        assert api.get(f"/runs/{run_id}")["quantities"] == {"kurtosis": described}
        api.register()
        assert api.get(f"/runs/{run_id}")["quantities"] == {"kurtosis": described}, "absent, they stay as they were"
        api.register(quantities=[{"name": "skewness", "axis": "run"}])
        assert list(api.get(f"/runs/{run_id}")["quantities"]) == ["skewness"]

    def test_does_not_name_as_not_measured_what_another_writer_measures(self, api):
        """Of a pipeline only the last stage has a loss, and only the first an embedding."""
        run_id = api.register()
        first = Frame(
            0, 10, 1.0, {"embedding_norm": 1.0}, {}, not_measured={"loss": "no loss", "dead_units": "no gate"}
        )
        api.send_ok(run_id, [first], writer="stage-0")
        last = replace(loss_frame(10), not_measured={"embedding_norm": "no embedding", "dead_units": "no gate"})
        api.send_ok(run_id, [last], writer="stage-1")
        assert api.get(f"/runs/{run_id}")["not_measured"] == {"dead_units": "no gate"}

    def test_names_as_not_measured_what_was_measured_before(self, api):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(10)])
        api.send_ok(run_id, [Frame(1, 20, 2.0, {}, {}, not_measured={"loss": "the loop gives none any more"})])
        assert api.get(f"/runs/{run_id}")["not_measured"] == {"loss": "the loop gives none any more"}

    def test_has_no_latest_before_the_first_frame(self, api):
        run = api.get(f"/runs/{api.register()}")
        assert (run["latest"], run["last_step"], run["loss"]) == (None, None, None)

    def test_shows_a_loss_that_is_not_finite_as_null(self, api):
        run_id = api.register(config={})
        api.send_ok(run_id, [loss_frame(0, float("inf"))])
        run = api.get(f"/runs/{run_id}")
        assert (run["loss"], run["latest"]["scalars"]) == (None, {"loss": None})

    def test_changes_only_what_is_given(self, api):
        run_id = api.register(tags=["a"], config={"x": 1})
        reply = api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        assert (reply.json()["state"], reply.json()["tags"]) == ("finished", ["a"])
        assert api.get(f"/runs/{run_id}")["config"] == {"x": 1}

    @pytest.mark.parametrize("config", ['{"lr": NaN}', '{"deep": [{"a": -Infinity}]}', '{"lr": 1e999}'])
    def test_refuses_a_config_with_a_number_that_is_not_finite(self, api, config):
        run_id = api.register(config={"x": 1})
        for method, path, start in (("POST", "/runs", '{"run": "other", '), ("PATCH", f"/runs/{run_id}", "{")):
            reply = api.http.request(method, f"/api/v1{path}", content=f'{start}"config": {config}}}')
            status, error, detail = problem(reply)
            assert (status, error) == (422, "invalid_argument")
            assert detail.startswith("body, config: Every number should be finite")
        assert api.get(f"/runs/{run_id}")["config"] == {"x": 1}
        assert len(api.get("/runs")["runs"]) == 1

    def test_takes_everything_along_when_it_is_deleted(self, api):
        run_id, kept = api.register("a"), api.register("b")
        for run in (run_id, kept):
            api.send_ok(run, [loss_frame(0)])
        assert api.http.delete(f"/api/v1/runs/{run_id}").status_code == 204
        assert api.get(f"/runs/{run_id}")[:2] == (404, "unknown_run")
        assert api.losses(kept) == {0: 1.0}
        assert api.register("a") != run_id

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", ""),
            ("DELETE", ""),
            ("PATCH", ""),
            ("GET", "/series?metric=loss"),
            ("GET", "/heatmap?metric=token_similarity"),
            ("POST", "/frames"),
            ("POST", "/heartbeat"),
        ],
    )
    def test_that_nobody_registered_is_unknown_everywhere(self, api, method, path):
        bodies = {
            "PATCH": {"state": "finished"},
            "/frames": {"writer": "w", "attempt": 1, "frames": []},
            "/heartbeat": {"writer": "w", "attempt": 1, "step": 0},
        }
        reply = api.http.request(method, f"/api/v1/runs/nope{path}", json=bodies.get(path) or bodies.get(method))
        assert problem(reply)[:2] == (404, "unknown_run")


class TestAttempts:
    def test_hide_what_earlier_ones_wrote_from_their_start_on(self, api):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step, 1.0) for step in range(6)])
        api.register(resume_step=3)
        assert api.get(f"/runs/{run_id}")["last_step"] == 2
        api.send_ok(run_id, [loss_frame(step, 2.0) for step in (3, 4)], attempt=2)
        assert api.losses(run_id) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
        run = api.get(f"/runs/{run_id}")
        assert (run["last_step"], run["loss"], run["num_frames"]) == (4, 2.0, 8)
        assert [(a["attempt"], a["resume_step"]) for a in run["attempts"]] == [(1, None), (2, 3)]

    def test_keep_what_they_wrote(self, api):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step, 1.0) for step in range(6)])
        api.register(resume_step=3)
        assert api.losses(run_id, attempt=1) == dict.fromkeys(range(6), 1.0)
        assert api.losses(run_id, attempt=2) == {}

    def test_without_a_start_hide_everything(self, api):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(0)])
        api.register()
        assert api.losses(run_id) == {}
        assert api.get(f"/runs/{run_id}")["latest"] is None

    def test_hide_frames_of_an_earlier_one_that_come_late(self, api):
        run_id = api.register()
        api.register(resume_step=3)
        api.send_ok(run_id, [loss_frame(step, 1.0) for step in range(6)])
        assert list(api.losses(run_id)) == [0, 1, 2]
        run = api.get(f"/runs/{run_id}")
        assert (run["num_frames"], run["last_step"]) == (6, 2)

    def test_may_differ_in_depth(self, api):
        run_id = api.register(num_blocks=1)
        api.post_raw(
            run_id, b'{"writer":"w","attempt":1,"frames":[{"seq":0,"step":0,"time":1,"layers":{"grad_norm":[1]}}]}'
        )
        api.register(num_blocks=2, resume_step=1)
        api.post_raw(
            run_id, b'{"writer":"w","attempt":2,"frames":[{"seq":0,"step":1,"time":1,"layers":{"grad_norm":[2,3]}}]}'
        )
        assert api.get(f"/runs/{run_id}/heatmap", metric="grad_norm")["values"] == [[1.0, None], [2.0, 3.0]]
        assert api.get(f"/runs/{run_id}/series", metric="grad_norm", layer=1)["step"] == [1]

    def test_that_do_not_exist_are_told_apart_from_runs(self, api):
        run_id = api.register()
        status, error, detail = problem(api.send(run_id, [loss_frame(0)], attempt=2))
        assert (status, error) == (404, "unknown_attempt")
        assert "attempts are 1 to 1" in detail
        assert api.get(f"/runs/{run_id}/series", metric="loss", attempt=2)[:2] == (404, "unknown_attempt")


class TestTheListOfRuns:
    def names(self, api, **params):
        return [run["run"] for run in api.get("/runs", **params)["runs"]]

    def test_shows_the_last_updated_first(self, api):
        ids = {name: api.register(name) for name in "abc"}
        api.send_ok(ids["a"], [loss_frame(0)])
        assert self.names(api) == ["a", "c", "b"]
        assert self.names(api, order="updated") == ["b", "c", "a"]
        assert self.names(api, order="-name") == ["c", "b", "a"]

    def test_filters(self, api):
        run_id = api.register("a", project="p")
        api.register("b", project="q")
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        assert self.names(api, project="q") == ["b"]
        assert self.names(api, run="a") == ["a"]
        assert self.names(api, state="finished") == ["a"]
        assert self.names(api, state="failed") == []

    @pytest.mark.parametrize("order", ["updated", "-updated", "name", "-name"])
    def test_gives_each_run_once_over_pages(self, api, order):
        everything = {api.register(name) for name in "abcdefg"}
        seen, cursor = [], None
        while True:
            page = api.get("/runs", order=order, limit=3, cursor=cursor)
            seen += [run["run_id"] for run in page["runs"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert len(seen) == 7
        assert set(seen) == everything

    @pytest.mark.parametrize("order", ["updated", "-updated", "name", "-name"])
    def test_loses_nothing_that_is_left_alone_while_others_come_go_and_change(self, api, order):
        ids = {name: api.register(name) for name in "abcdefghijkl"}
        touched, seen, cursor = {"c", "h", "k"}, [], None
        for turn in count():
            page = api.get("/runs", order=order, limit=2, cursor=cursor)
            seen += [run["run"] for run in page["runs"]]
            cursor = page["next_cursor"]
            if cursor is None or turn > 30:
                break
            if turn < 4:
                api.register(f"a{turn}")
                api.register(f"z{turn}")
                api.send_ok(ids["h"], [loss_frame(turn)])
                api.http.delete(f"/api/v1/runs/{ids['ck'[turn % 2]]}")
        assert sorted(name for name in seen if name in ids and name not in touched) == [*"abdefgijl"]

    @pytest.mark.parametrize(("order", "index"), [("-updated", "run_by_update"), ("name", "run_by_title")])
    def test_is_read_from_an_index_a_page_at_a_time(self, api, order, index):
        if api.database.engine != "sqlite":
            return  # which plan PostgreSQL chooses depends on what it has counted
        statements = []
        store = Store(api.database.url)
        event.listen(store._database.engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
        after = Place((1.0, "x") if order == "-updated" else ("x", "x"))
        with store.read() as reader:
            reader.runs.find(RunFilter(), order=order, limit=50, after=after)
        store.close()
        statement, values = next(statement for statement in statements if "ORDER BY" in statement[0])
        connection = sqlite3.connect(api.database.path)
        plan = " ".join(row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values))
        connection.close()
        assert re.search(f"SEARCH run USING (COVERING )?INDEX {index}", plan)
        assert "TEMP B-TREE" not in plan

    def test_is_not_shifted_by_runs_that_come_between_two_pages(self, api):
        for name in "bdf":
            api.register(name)
        page = api.get("/runs", order="name", limit=2)
        api.register("a")
        api.register("e")
        assert self.names(api, order="name", cursor=page["next_cursor"]) == ["e", "f"]

    def test_has_no_run_of_a_name_that_no_run_can_have(self, api):
        api.register()
        found = api.get("/runs", run="gpt\0")
        # PostgreSQL's text cannot hold this one character and says so, SQLite looks for it and finds nothing.
        if api.database.engine == "sqlite":
            assert found["runs"] == []
        else:
            assert found[:2] == (422, "invalid_argument")

    @pytest.mark.parametrize("cursor", ["nonsense", "WzFd", "é"])
    def test_refuses_a_cursor_it_did_not_give(self, api, cursor):
        assert api.get("/runs", cursor=cursor)[:2] == (422, "invalid_argument")

    def test_refuses_a_cursor_of_another_order(self, api):
        for name in "ab":
            api.register(name)
        cursor = api.get("/runs", order="name", limit=1)["next_cursor"]
        assert api.get("/runs", order="updated", cursor=cursor)[:2] == (422, "invalid_argument")

"""Runs at a glance."""

import math

import numpy as np
import pytest

from tests.server.conftest import layer_frame, loss_frame
from tsemon.wire import Array, Frame
from tsemon_server.services.queries.glances import worst_of
from tsemon_server.store import Store
from tsemon_server.store.series.settling import Sizes

NAN, INF = math.nan, math.inf


def diversity_frame(step, values):
    return layer_frame(step, values, metric="token_diversity")


def glances(api, *run_ids, **params):
    return api.get("/glances", run=list(run_ids), **params)["glances"]


def settle(api):
    store = Store(api.database.url)
    store.settle(sizes=Sizes(segment=10, kept=0))
    store.close()


class TestGlances:
    @pytest.mark.parametrize("is_settled", [False, True], ids=["hot", "settled"])
    def test_show_the_loss_as_a_series_does_and_the_worst_layer_of_the_newest_step(self, api, is_settled):
        long, short, plain = api.register("long"), api.register("short"), api.register("plain")
        api.send_ok(long, [loss_frame(step, 9.0 if step == 300 else step / 7) for step in range(500)])
        api.send_ok(long, [diversity_frame(step, [0.5, 1 - step / 1000, 0.75]) for step in (600, 900)])
        api.send_ok(short, [loss_frame(0, INF), loss_frame(5, 2.5)])
        api.register("none")
        if is_settled:
            settle(api)
        found = glances(api, long, short, plain, points=10)
        for glance in found[:2]:
            series = api.get(f"/runs/{glance['run_id']}/series", metric="loss", points=10)
            assert glance["loss"] == {"step": series["step"], "mean": series["mean"]}
        assert 3 < len(found[0]["loss"]["step"]) <= 10
        assert found[1]["loss"] == {"step": [0, 5], "mean": [None, 2.5]}
        assert found[0]["worst"] == {
            "metric": "token_diversity",
            "layer": 1,
            "label": None,
            "value": pytest.approx(0.1),
            "rule": "token-similarity-escalation",
            "threshold": 1e-6,
            "decades": pytest.approx(math.log10((0.1 / 0.9) / 1e-6), abs=1e-3),
        }
        assert found[1]["worst"] is None
        assert found[2] == {"run_id": plain, "loss": None, "worst": None}

    @pytest.mark.parametrize("is_settled", [False, True], ids=["hot", "settled"])
    def test_look_at_what_all_writers_measured_at_the_newest_step(self, api, is_settled):
        run_id = api.register()
        for writer, values in (("stage0", [0.9, 0.05, NAN]), ("stage1", [NAN, NAN, 0.7])):
            frames = [diversity_frame(step, [1.0] * 3) for step in (1, 2)]
            api.send_ok(run_id, [*frames, diversity_frame(3, values)], writer=writer)
        if is_settled:
            api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
            settle(api)
            assert api.database.execute("SELECT count(*) FROM frame") == [(1,)]
        (glance,) = glances(api, run_id)
        # Neither measured `nonfinite`, and yet the NaN of the one is what the other measured.
        assert glance["worst"] == {
            "metric": "token_diversity",
            "layer": 1,
            "label": None,
            "value": pytest.approx(0.05),
            "rule": "token-similarity-escalation",
            "threshold": 1e-6,
            "decades": pytest.approx(math.log10((0.05 / 0.95) / 1e-6), abs=1e-3),
        }

    @pytest.mark.parametrize("is_settled", [False, True], ids=["hot", "settled"])
    def test_look_at_the_newest_step_with_layers_where_the_last_frames_have_losses_alone(self, api, is_settled):
        run_id, bare = api.register(), api.register("bare")
        api.send_ok(
            run_id,
            [
                *(diversity_frame(step, [1.0, 1 - step / 100, 1.0]) for step in range(50)),
                *map(loss_frame, range(70, 90, 5)),
            ],
        )
        api.send_ok(bare, [loss_frame(step) for step in range(50)])
        if is_settled:
            api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
            settle(api)
        found = glances(api, run_id, bare)
        assert found[0]["worst"]["value"] == pytest.approx(0.51)
        assert found[1]["worst"] is None

    def test_go_back_to_what_a_later_attempt_has_left(self, api):
        run_id = api.register()
        api.send_ok(run_id, [diversity_frame(step, [1.0, 1 - step / 100, 1.0]) for step in range(50)])
        settle(api)
        api.register(resume_step=40)
        assert glances(api, run_id)[0]["worst"]["value"] == pytest.approx(0.61)
        api.register()
        assert glances(api, run_id)[0]["worst"] is None

    def test_follow_what_is_sent_after_they_were_asked_for(self, api):
        run_id = api.register()
        assert glances(api, run_id)[0]["loss"] is None
        for step in (1, 2):
            api.send_ok(run_id, [loss_frame(step)])
            assert glances(api, run_id)[0]["loss"]["step"] == [*range(1, step + 1)]
            assert len(glances(api, run_id, points=3)[0]["loss"]["step"]) == step
        api.register(resume_step=2)
        assert glances(api, run_id)[0]["loss"]["step"] == [1]
        api.send_ok(run_id, [loss_frame(9)], attempt=1)  # late, and hidden
        assert glances(api, run_id)[0]["loss"]["step"] == [1]
        api.http.delete(f"/api/v1/runs/{run_id}")
        assert glances(api, run_id) == []

    def test_name_each_run_once_in_the_order_asked_for_and_leave_out_what_is_not_there(self, api):
        a, b = api.register("a"), api.register("b")
        assert [glance["run_id"] for glance in glances(api, b, "nope", a, b)] == [b, a]
        assert glances(api, "nope") == []

    def test_are_of_up_to_a_hundred_runs(self, api):
        for params in ({"run": []}, {"run": ["x"] * 101}, {"run": ["x"], "points": 2}, {"run": ["x"], "points": 201}):
            assert api.get("/glances", **params)[:2] == (422, "invalid_argument")

    def test_do_without_a_frame_that_is_damaged(self, api):
        run_id = api.register()
        frame = Frame(0, 0, 1.0, {"loss": 1.0}, {"token_diversity": Array.of([0.1, 0.2, 0.3])})
        api.send_ok(run_id, [frame])
        blob = api.database.execute("SELECT blob FROM frame")[0][0]
        api.database.execute("UPDATE frame SET blob = :blob", blob=bytes(blob)[:10])
        assert glances(api, run_id)[0]["worst"] is None

    def test_name_the_block_that_is_nearest_to_a_rule_and_the_rule(self, api):
        run_id = api.register(num_blocks=2)
        layers = {"token_diversity": Array.of([0.9, 0.8, 0.2]), "dead_units": Array.of([0.5, 0.75])}
        api.send_ok(run_id, [Frame(0, 0, 1.0, {}, layers)])
        worst = glances(api, run_id)[0]["worst"]
        assert worst.pop("decades") == pytest.approx(math.log10(4 / 3))
        assert worst == {
            "metric": "dead_units",
            "layer": 1,
            "label": None,
            "value": 0.75,
            "rule": "dead-units",
            "threshold": 0.8,
        }

    def test_are_made_once_as_long_as_nothing_is_sent(self, api):
        run_id = api.register()
        api.send_ok(run_id, [layer_frame(0, [0.1, 0.2, 0.3])])
        first = glances(api, run_id)
        api.database.execute("UPDATE frame SET blob = :blob", blob=b"unreadable")
        assert glances(api, run_id) == first

    def test_leave_out_blocks_that_are_frozen_on_purpose(self, api):
        run_id = api.register(num_blocks=2, frozen_blocks=[0])
        layers = {"update_norm": Array.of([0.0, 0.01]), "param_norm": Array.of([1.0, 1.0])}
        api.send_ok(run_id, [Frame(0, 0, 1.0, {}, layers)])
        worst = glances(api, run_id)[0]["worst"]
        assert (worst["metric"], worst["layer"], worst["rule"]) == ("update_norm / param_norm", 1, "updates-too-large")


class TestTheMetricThatIsShownFirst:
    @pytest.mark.parametrize(
        ("layers", "expected"),
        [
            (
                {"token_similarity": [0.9, 0.9, 0.9], "grad_norm": [1, 1], "token_diversity": [0.1] * 3},
                "token_diversity",
            ),
            ({"token_similarity": [0.9] * 3, "hidden_rms": [1.0] * 3, "dead_units": [0.5, 0.75]}, "dead_units"),
            ({"token_similarity": [NAN] * 3, "hidden_rms": [1.0] * 3}, "hidden_rms"),
            ({"token_similarity": [0.9] * 3}, None),
            ({}, None),
        ],
        ids=["with a healthy range", "nearest to a rule", "any other", "similarity alone", "the loss alone"],
    )
    def test_is_never_raw_token_similarity(self, api, layers, expected):
        run_id = api.register(num_blocks=2)
        layers = {name: Array.of(values) for name, values in layers.items()}
        api.send_ok(run_id, [Frame(0, 0, 1.0, {"loss": 2.5}, layers)])
        assert api.get(f"/runs/{run_id}")["default_metric"] == expected


class TestTheWorstLayer:
    @pytest.mark.parametrize(
        ("layers", "worst"),
        [
            ({}, None),
            ({"hidden_rms": [1.0, NAN]}, None),  # undefined
            ({"token_diversity": []}, None),
            ({"token_diversity": [0.5, 0.1, 0.2]}, ("token_diversity", 1, 0.1)),
            ({"token_similarity": [0.5, 0.9, 0.2]}, None),  # by itself it means little
            ({"token_diversity": [0.5, NAN, 0.2]}, ("token_diversity", 1, None)),
            ({"token_similarity": [0.5, NAN, 0.9]}, ("token_similarity", 1, None)),
            ({"token_diversity": [0.5, NAN, 0.1], "nonfinite": [0, 0, 0]}, ("token_diversity", 2, 0.1)),
            ({"token_diversity": [NAN, NAN], "nonfinite": [0, NAN]}, None),
            ({"token_diversity": [0.5, 0.1], "nonfinite": [0.25, NAN, 0.5]}, ("nonfinite", 2, 0.5)),
            ({"nonfinite_entries": [0, 4, 12], "param_norm": [1.0, INF, NAN]}, ("nonfinite_entries", 2, 12)),
            ({"token_similarity": [0.5, 0.9], "grad_norm": [0.1, -INF, INF]}, ("grad_norm", 1, None)),
        ],
    )
    def test_is_what_is_not_finite_else_what_is_nearest_to_a_rule(self, layers, worst):
        found = worst_of({name: np.array(values) for name, values in layers.items()})
        assert (found and (found.metric, found.layer, found.value)) == worst

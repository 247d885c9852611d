import math
import re
import shutil
import struct
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import values
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from tsemon.errors import InvalidArgument
from tsemon.wire import Array, Frame
from tsemon_server.exposition.runs import NEVER_UNDEFINED, shown
from tsemon_server.exposition.sharing import share_counters
from tsemon_server.exposition.text import OPEN_METRICS, PLAIN, content_type_for, escaped
from tsemon_server.rules.documents import load
from tsemon_server.settings import MetricsSettings, settings_from_environment
from tsemon_server.store import Store
from tsemon_server.store.live import LiveRun

from .conftest import layer_frame, loss_frame
from .test_alerts import HIGH_LOSS


def scrape(api):
    """All samples as {(name, labels): value}."""
    reply = api.http.get("/metrics")
    assert reply.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def of_run(api, run_id):
    return {
        (name, *(value for key, value in labels if key != "run_id")): value
        for (name, labels), value in scrape(api).items()
        if ("run_id", run_id) in labels
    }


class TestMetrics:
    def test_show_the_newest_frame_of_a_running_run(self, start):
        api = start(clock=lambda: 1000.0)
        run_id = api.register(num_blocks=2)
        for step, loss in ((3, 2.5), (2, 9.0)):
            frame = Frame(step, step, 0.0, {"loss": loss}, {"token_diversity": Array.of([0.25, 0.5, math.inf])})
            api.send_ok(run_id, [frame])
        assert of_run(api, run_id) == {
            ("tsemon_run_info", "default", "gpt"): 1.0,
            ("tsemon_run_step",): 3.0,
            ("tsemon_run_process_step",): 3.0,
            ("tsemon_run_loss",): 2.5,
            ("tsemon_run_last_seen_timestamp_seconds",): 1000.0,
            ("tsemon_run_stepped_timestamp_seconds",): 1000.0,
            ("tsemon_run_unevaluated_frames",): 0.0,
            ("tsemon_run_nonfinite_values",): 1.0,
            ("tsemon_layers_token_diversity_min",): 0.25,
            ("tsemon_layers_token_diversity_mean",): 0.375,
            ("tsemon_layers_token_diversity_max",): 0.5,
            ("tsemon_layers_token_diversity_argmax",): 1.0,
            ("tsemon_layer_token_diversity", "00"): 0.25,
            ("tsemon_layer_token_diversity", "01"): 0.5,
            ("tsemon_layer_token_diversity", "02"): math.inf,
        }

    def test_show_no_more_than_a_frame_had(self, start):
        api = start(clock=lambda: 1000.0)
        empty, bare = api.register("empty"), api.register("bare")
        api.send_ok(bare, [layer_frame(4, [1, 2, 3], "hidden_rms")])
        assert {name for name, *_ in of_run(api, empty)} == {
            "tsemon_run_info",
            "tsemon_run_last_seen_timestamp_seconds",
            "tsemon_run_unevaluated_frames",
        }
        assert of_run(api, bare)[("tsemon_run_step",)] == 4.0

    @pytest.mark.parametrize("is_settled", [False, True])
    def test_show_a_run_that_went_back_as_it_was_there(self, start, is_settled):
        api = start(clock=lambda: 1000.0)
        run_id = api.register(num_blocks=2)
        layers = {"token_diversity": Array.of([0.25, 0.5, 0.75])}
        api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": step}, layers) for step in range(600)])
        if is_settled:
            store = Store(api.database.url)
            assert store.settle() > 0
            store.close()
        api.register(num_blocks=2, resume_step=100)
        shown = of_run(api, run_id)
        assert (shown[("tsemon_run_step",)], shown[("tsemon_run_loss",)]) == (99.0, 99.0)
        assert shown[("tsemon_layer_token_diversity", "02")] == 0.75

    @pytest.mark.parametrize("is_settled", [False, True])
    def test_have_the_layers_of_an_ended_run_whose_last_frames_have_losses_alone(self, start, is_settled):
        api = start(clock=lambda: 1000.0)
        run_id = api.register(num_blocks=2)
        layers = {"token_diversity": Array.of([0.25, 0.5, 0.75])}
        api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": 2.0}, layers) for step in range(6)])
        api.send_ok(run_id, [loss_frame(step, 1.5) for step in range(6, 10)])
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        if is_settled:
            store = Store(api.database.url)
            assert store.settle() > 0
            store.close()
        shown = of_run(api, run_id)
        assert (shown[("tsemon_run_step",)], shown[("tsemon_run_loss",)]) == (9.0, 1.5)
        assert shown[("tsemon_layer_token_diversity", "02")] == 0.75

    def test_have_layers_that_sort_as_text(self, api):
        run_id = api.register(num_blocks=120)
        api.send_ok(run_id, [layer_frame(0, list(range(121)), "token_diversity")])
        layers = [layer for name, *rest in of_run(api, run_id) if name.startswith("tsemon_layer_") for layer in rest]
        assert layers == sorted(layers) == [f"{layer:03}" for layer in range(121)]

    def test_survive_a_restart(self, start):
        run_id = start().register()
        start().send_ok(run_id, [loss_frame(5)])
        assert of_run(start(), run_id)[("tsemon_run_step",)] == 5.0

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_keep_an_ended_run_for_a_grace_period(self, start, state):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state})
        now[0] = 1059.0
        assert of_run(api, run_id)
        now[0] = 1061.0
        assert not of_run(api, run_id)

    def test_keep_it_as_long_as_is_set(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0], grace_s=5)
        run_id = api.register()
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        now[0] = 1004.0
        assert of_run(api, run_id)
        now[0] = 1006.0
        assert not of_run(api, run_id)

    def test_drop_a_running_run_that_fell_silent(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        now[0] = 1000.0 + 3599
        assert of_run(api, run_id)
        now[0] = 1000.0 + 3601
        assert not of_run(api, run_id)

    def test_show_alerts_while_they_fire(self, start):
        api = start(rules=HIGH_LOSS)
        run_id = api.register()
        firing = ("tsemon_alert_firing", "loss", "high-loss", "warning")
        api.send_ok(run_id, [loss_frame(0, 20.0)])
        assert firing not in of_run(api, run_id)
        api.send_ok(run_id, [loss_frame(1, 20.0), loss_frame(2, 20.0)])
        assert of_run(api, run_id)[firing] == 1.0
        api.send_ok(run_id, [loss_frame(step, 0.0) for step in (3, 4, 5)])
        assert firing not in of_run(api, run_id)

    def test_show_an_incident_once_while_it_is_open(self, start):
        rules = load("""
        rules:
          - name: dead
            family: dead
            severity: warning
            when: any(grad_norm < 1) for 1 sample
            clear: not any(grad_norm < 1) for 1 sample
          - {name: high-loss, when: loss > 10 for 1 sample, clear: loss < 5 for 1 sample, severity: warning}
        """)
        api = start(rules=rules)
        run_id = api.register(num_blocks=3)

        def incidents():
            return [dict(labels) for name, labels in scrape(api) if name == "tsemon_incident"]

        def send(step, loss, *norms):
            api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": loss}, {"grad_norm": Array.of(norms)})])

        send(0, 1.0, 2, 2, 2)
        assert incidents() == []
        send(1, 1.0, 2, 0, 0)
        send(2, 20.0, 2, 0, 0)
        (incident,) = api.get("/incidents")["incidents"]
        assert incidents() == [
            {
                "run_id": run_id, "incident_id": incident["incident_id"], "rule": "dead", "family": "dead",
                "severity": incident["severity"], "blocks": "1-2",
            }
        ]  # fmt: skip
        send(3, 1.0, 2, 2, 2)
        assert incidents() == []

    def test_count_frames(self, api):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(0), loss_frame(1)])
        api.send_ok(run_id, [loss_frame(1), loss_frame(2)])
        found = scrape(api)
        assert found[("tsemon_frames_total", (("outcome", "accepted"),))] == 3.0
        assert found[("tsemon_frames_total", (("outcome", "duplicate"),))] == 1.0

    def test_escape_what_users_wrote(self, api):
        run_id = api.register("a,b [c]", project="p/q")
        assert ("tsemon_run_info", "p/q", "a,b [c]") in of_run(api, run_id)

    def test_carry_no_timestamps(self, api):
        api.send_ok(api.register(), [loss_frame(0)])
        families = text_string_to_metric_families(api.http.get("/metrics").text)
        assert {sample.timestamp for family in families for sample in family.samples} == {None}

    def test_are_lines_that_prometheus_own_tool_has_nothing_to_say_about(self, api):
        promtool = shutil.which("promtool")
        if promtool is None:
            pytest.skip("promtool is not installed")
        run_id = api.register(num_blocks=2)
        api.send_ok(run_id, [Frame(0, 0, 0.0, {"loss": math.nan}, {"token_similarity": Array.of([1, math.inf, 0])})])
        page = api.http.get("/metrics").content
        done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
        # It would have each histogram's and info's name end as it likes; what it cannot read is an error.
        assert b"error" not in done.stdout + done.stderr, done.stderr

    def test_tell_of_no_alert_that_is_silenced(self, start):
        api = start(clock=lambda: 1000.0)
        run_id = api.register()
        api.open_alert(run_id)
        assert ("tsemon_alert_firing", "loss", "high-loss", "warning") in of_run(api, run_id)
        assert [name for name, *_ in of_run(api, run_id) if name == "tsemon_incident"]
        until = "1970-01-01T01:00:00Z"
        reply = api.http.post(
            "/api/v1/silences", json={"rule": "high-loss", "until": until, "created_by": "ada", "reason": "known"}
        )
        assert reply.is_success, reply.text
        assert not {name for name, *_ in of_run(api, run_id)} & {"tsemon_alert_firing", "tsemon_incident"}

    def test_show_an_alert_that_is_acknowledged(self, api):
        run_id = api.register()
        reply = api.http.post(f"/api/v1/alerts/{api.open_alert(run_id)}/ack", json={"by": "ada"})
        assert reply.is_success, reply.text
        assert of_run(api, run_id)[("tsemon_alert_firing", "loss", "high-loss", "warning")] == 1.0

    def test_show_no_alert_of_a_run_that_has_ended(self, api):
        run_id = api.register()
        api.open_alert(run_id)
        assert api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"}).is_success
        names = {name for name, *_ in of_run(api, run_id)}
        assert "tsemon_run_info" in names
        assert not names & {"tsemon_alert_firing", "tsemon_incident"}

    def test_say_where_the_process_is_between_two_samples(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(10)])
        for now[0], step in ((1030.0, 17), (1060.0, 17)):
            body = {"writer": "w", "attempt": 1, "step": step}
            assert api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json=body).status_code == 200
        shown = of_run(api, run_id)
        assert [shown[(f"tsemon_run_{name}",)] for name in ("step", "process_step")] == [10.0, 17.0]
        times = [shown[(f"tsemon_run_{name}_timestamp_seconds",)] for name in ("last_seen", "stepped")]
        assert times == [1060.0, 1030.0]


class TestValuesOfARun:
    @pytest.fixture
    def run_id(self, api):
        return api.register(num_blocks=3)

    def test_are_shown_as_aggregates_whatever_is_listed_layer_by_layer(self, start):
        api = start(layers=("hidden_rms",))
        run_id = api.register(num_blocks=3)
        api.send_ok(run_id, [Frame(0, 0, 0.0, {}, {"grad_norm": Array.of([2, 8, 5])})])
        assert named(of_run(api, run_id), "tsemon_layer") == {
            ("tsemon_layers_grad_norm_min",): 2.0,
            ("tsemon_layers_grad_norm_mean",): 5.0,
            ("tsemon_layers_grad_norm_max",): 8.0,
            ("tsemon_layers_grad_norm_last",): 5.0,
            ("tsemon_layers_grad_norm_argmax",): 1.0,
        }

    def test_are_shown_layer_by_layer_where_that_is_asked_for(self, start):
        api = start(layers=("*",))
        run_id = api.register(num_blocks=2)
        api.send_ok(run_id, [Frame(0, 0, 0.0, {}, {"mine": Array.of([2, 8])})])
        assert of_run(api, run_id)[("tsemon_layer_mine", "01")] == 8.0

    def test_of_heads_are_those_of_their_layer_on_average(self, api, run_id):
        heads = {"attention_entropy": Array.of([1, 3, 5, 9, math.nan, 2], (3, 2))}
        api.send_ok(run_id, [Frame(0, 0, 0.0, {}, {}, heads)])
        shown = of_run(api, run_id)
        assert [shown[("tsemon_layer_attention_entropy", layer)] for layer in ("00", "01", "02")] == [2.0, 7.0, 2.0]
        names = ("min", "mean", "max", "last", "argmax")
        assert [shown[(f"tsemon_layers_attention_entropy_{name}",)] for name in names] == [1.0, 4.0, 9.0, 2.0, 1.0]

    def test_of_a_layer_go_before_those_of_its_heads(self, api, run_id):
        layers, heads = {"attention_entropy": Array.of([1, 2, 3])}, {"attention_entropy": Array.of([9] * 6, (3, 2))}
        api.send_ok(run_id, [Frame(0, 0, 0.0, {}, layers, heads)])
        assert of_run(api, run_id)[("tsemon_layers_attention_entropy_max",)] == 3.0

    def test_that_are_not_finite_are_shown_layer_by_layer_and_in_no_aggregate(self, api, run_id):
        values = [math.nan, 3.0, -math.inf, 1.0]
        api.send_ok(run_id, [layer_frame(0, values, "hidden_rms")])
        shown = of_run(api, run_id)
        layers = [shown[("tsemon_layer_hidden_rms", f"{layer:02}")] for layer in range(4)]
        assert math.isnan(layers[0])
        assert layers[1:] == values[1:]
        text = api.http.get("/metrics").text  # written as Prometheus' documentation has it
        assert ("} NaN\n" in text, "} -Inf\n" in text, " nan\n" in text) == (True, True, False)
        names = ("min", "mean", "max", "last", "argmax")
        assert [shown[(f"tsemon_layers_hidden_rms_{name}",)] for name in names] == [1.0, 2.0, 3.0, 1.0, 1.0]
        assert shown[("tsemon_run_nonfinite_values",)] == 2.0

    def test_that_are_nowhere_finite_have_no_aggregate(self, api, run_id):
        api.send_ok(
            run_id, [layer_frame(0, [math.nan] * 3, "grad_norm"), layer_frame(1, [1, 2, math.nan], "grad_norm")]
        )
        shown = of_run(api, run_id)
        assert ("tsemon_layers_grad_norm_last",) not in shown
        assert shown[("tsemon_layers_grad_norm_max",)] == 2.0
        other = api.register("other", num_blocks=3)
        api.send_ok(other, [layer_frame(0, [math.nan] * 3, "grad_norm")])
        assert not named(of_run(api, other), "tsemon_layers")

    @pytest.mark.parametrize(
        ("name", "num_found"), [("loss", 1), ("total_grad_norm", 1), ("norm_growth_r2", 0), ("mine", 0)]
    )
    def test_that_are_nan_count_where_that_cannot_mean_that_there_was_nothing_to_measure(
        self, api, run_id, name, num_found
    ):
        api.send_ok(run_id, [Frame(0, 0, 0.0, {name: math.nan})])
        assert of_run(api, run_id)[("tsemon_run_nonfinite_values",)] == num_found

    def test_are_exact(self, api, run_id):
        values = [struct.unpack("<f", struct.pack("<f", value))[0] for value in (0.1, 1e-38, 3.4e38, 16777217.0)]
        api.send_ok(run_id, [Frame(0, 2**53 - 1, 0.0, {"loss": 0.1 + 0.2}, {"hidden_rms": Array.of(values)})])
        shown = of_run(api, run_id)
        found = [shown[("tsemon_layer_hidden_rms", f"{layer:02}")] for layer in range(4)]
        assert struct.pack("<4f", *found) == struct.pack("<4f", *values)
        assert (shown[("tsemon_run_loss",)], shown[("tsemon_run_step",)]) == (0.1 + 0.2, 2**53 - 1)

    def test_that_are_measured_now_and_then_stay_until_they_are_old(self, api, run_id):
        rank = {"effective_rank": Array.of([4, 5, 6, 7])}
        frames = [Frame(0, 0, 0.0, {"loss": 9.0, "eval": 1.5}, rank), *(loss_frame(step) for step in range(1, 32))]
        api.send_ok(run_id, frames)
        shown = of_run(api, run_id)
        assert (shown[("tsemon_run_eval",)], shown[("tsemon_run_loss",)]) == (1.5, 1.0)
        assert shown[("tsemon_layers_effective_rank_max",)] == 7.0
        api.send_ok(run_id, [loss_frame(32)])
        assert ("tsemon_run_eval",) not in of_run(api, run_id)

    def test_that_are_measured_now_and_then_stay_however_many_writers_there_are(self, api, run_id):
        for stage in range(8):
            extra = {f"eval{stage}": 1.5}
            frames = [Frame(step, step, 0.0, {"loss": 1.0, **(extra if not step else {})}) for step in range(32)]
            api.send_ok(run_id, frames, writer=f"stage{stage}")
        assert {(f"tsemon_run_eval{stage}",) for stage in range(8)} <= {*of_run(api, run_id)}
        api.send_ok(run_id, [loss_frame(32)], writer="stage0")
        assert not {(f"tsemon_run_eval{stage}",) for stage in range(8)} & {*of_run(api, run_id)}

    def test_are_not_those_of_another_attempt(self, api, run_id):
        api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": 1.0, "old": 1.0}) for step in range(3)])
        api.register(num_blocks=3, resume_step=2)
        assert ("tsemon_run_old",) in of_run(api, run_id)
        api.send_ok(run_id, [Frame(0, 2, 0.0, {"loss": 2.0})], attempt=2)
        shown = of_run(api, run_id)
        assert shown[("tsemon_run_loss",)] == 2.0
        assert ("tsemon_run_old",) not in shown

    def test_are_found_among_many_frames_as_among_few(self, api, run_id):
        """PostgreSQL once took a second for a thousand frames, looking all of them up for each of them."""
        taken_s = []
        for first in (0, 64):
            api.send_ok(run_id, [loss_frame(step) for step in range(first, 64 if not first else 3000)])
            began = time.perf_counter()
            assert of_run(api, run_id)[("tsemon_run_step",)] == (2999.0 if first else 63.0)
            taken_s.append(time.perf_counter() - began)
        assert taken_s[1] < 10 * taken_s[0] + 1.0

    def test_of_several_writers_meet_under_their_layer(self, api, run_id):
        """Stages of a pipeline, one a step behind: NaN stands for the layers of the other."""
        front = Frame(0, 8, 0.0, {"loss": math.nan}, {"grad_norm": Array.of([1, math.nan, math.nan])})
        back = Frame(0, 7, 0.0, {"lr": 0.5}, {"grad_norm": Array.of([math.nan, 2, 3]), "mine": Array.of([1, 1, 1])})
        api.send_ok(run_id, [front], writer="stage0")
        api.send_ok(run_id, [back], writer="stage1")
        shown = of_run(api, run_id)
        assert [shown[("tsemon_layer_grad_norm", f"{layer:02}")] for layer in range(3)] == [1.0, 2.0, 3.0]
        assert (shown[("tsemon_run_step",)], shown[("tsemon_run_lr",)]) == (8.0, 0.5)
        assert shown[("tsemon_layers_mine_max",)] == 1.0
        assert shown[("tsemon_run_nonfinite_values",)] == 1.0  # the newest has a loss, and it is NaN

    def test_of_the_newest_frame_are_not_replaced_by_older_ones_of_its_writer(self, api, run_id):
        layers = [Array.of([1, 2, 3]), Array.of([math.nan, 2, 3])]
        frames = [
            Frame(0, 0, 0.0, {"eval": 1.0}, {"grad_norm": layers[0]}),
            Frame(1, 1, 0.0, {}, {"grad_norm": layers[1]}),
        ]
        api.send_ok(run_id, frames)
        assert math.isnan(of_run(api, run_id)[("tsemon_layer_grad_norm", "00")])

    def test_of_the_largest_step_are_shown_whichever_came_last(self, api, run_id):
        api.send_ok(run_id, [Frame(5, 3, 0.0, {"loss": 5.0})])
        api.send_ok(run_id, [Frame(4, 3, 0.0, {"loss": 4.0})])
        assert of_run(api, run_id)[("tsemon_run_step",)] == 3.0

    def test_are_all_there_when_it_went_back_to_what_had_settled(self, api, run_id):
        layers, heads = {"grad_norm": Array.of([1, 2, 3])}, {"mine": Array.of([1, 2, 3, 4, 5, 6], (3, 2))}
        api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": step, "lr": 0.5}, layers, heads) for step in range(600)])
        before = of_run(api, run_id)
        store = Store(api.database.url)
        assert store.settle() > 0
        store.close()
        api.register(num_blocks=3, resume_step=100)
        times = [
            f"tsemon_run_{name}"
            for name in ("process_step", "stepped_timestamp_seconds", "last_seen_timestamp_seconds")
        ]
        changed = {("tsemon_run_step",): 99.0, ("tsemon_run_loss",): 99.0}
        without = {key: value for key, value in (before | changed).items() if key[0] not in times}
        assert {key: value for key, value in of_run(api, run_id).items() if key[0] not in times} == without


class TestNames:
    @pytest.fixture
    def run_id(self, api):
        return api.register()

    def test_of_scalars_are_made_fit(self, api, run_id):
        api.send_ok(run_id, [Frame(0, 0, 0.0, {"eval/loss.mean-1:x": 3.0})])
        assert of_run(api, run_id)[("tsemon_run_eval_loss_mean_1_x",)] == 3.0

    @pytest.mark.parametrize(
        "name", ["step", "info", "process_step", "last_seen_timestamp_seconds", "nonfinite_values", "nonfinite.values"]
    )
    def test_that_are_ours_are_not_taken(self, api, run_id, name):
        api.send_ok(run_id, [Frame(0, 7, 0.0, {name: -5.0})])
        assert -5.0 not in of_run(api, run_id).values()
        assert left_out(api) == (0, 0, 1)

    def test_that_become_the_same_are_given_to_the_one_that_needs_no_change(self, api, run_id):
        api.send_ok(run_id, [Frame(0, 0, 0.0, {"a.b": 1.0, "a_b": 2.0, "a/b": 3.0}, {"c.d": Array.of([1, 2])})])
        assert of_run(api, run_id)[("tsemon_run_a_b",)] == 2.0
        assert left_out(api) == (0, 0, 2)

    def test_that_end_like_those_of_counters_are_gauges_all_the_same(self, api, run_id):
        names = [
            "tokens",
            "tokens_total",
            "tokens_created",
            "tokens_bucket",
            "tokens_sum",
            "tokens_count",
            "tokens_info",
        ]
        api.send_ok(run_id, [Frame(0, 0, 0.0, {name: number for number, name in enumerate(names)})])
        shown = of_run(api, run_id)
        assert [shown[(f"tsemon_run_{name}",)] for name in names] == list(range(7))
        families = open_metrics_families(api.http.get("/metrics", headers={"Accept": OPEN_METRICS}).text)
        assert {f"tsemon_run_{name}" for name in names} <= {family.name for family in families}

    HOSTILE = (
        'a"b',
        "back\\slash",
        "\\",
        '"} 1',
        "{}",
        "%s %d %%",
        "<script>",
        "\u202eevil",
        "# HELP x",
        "tsemon\u00e9\U0001f600",
    )

    @pytest.mark.parametrize("content_type", [PLAIN, OPEN_METRICS])
    def test_of_runs_come_back_as_they_were(self, api, content_type):
        for name in self.HOSTILE:
            api.send_ok(api.register(name, project=name), [layer_frame(0, [1, math.nan, 3])])
        parse = open_metrics_families if content_type == OPEN_METRICS else text_string_to_metric_families
        reply = api.http.get("/metrics", headers={"Accept": content_type})
        assert reply.headers["content-type"] == content_type
        samples = [
            sample for family in parse(reply.text) for sample in family.samples if sample.name == "tsemon_run_info"
        ]
        assert sorted(sample.labels["run"] for sample in samples) == sorted(self.HOSTILE)
        assert sorted(sample.labels["project"] for sample in samples) == sorted(self.HOSTILE)


class TestTheFormat:
    @pytest.mark.parametrize(
        ("accept", "expected"),
        [
            ("", PLAIN),
            ("*/*", PLAIN),
            ("text/html", PLAIN),
            ("application/openmetrics-text", OPEN_METRICS),
            ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPEN_METRICS),
            ("application/openmetrics-text;q=0.2,text/plain;q=0.9", PLAIN),
            ("application/openmetrics-text;q=0", PLAIN),
            ("application/openmetrics-text;q=many", PLAIN),
            (",;,q=;", PLAIN),
        ],
    )
    def test_is_the_one_that_is_asked_for(self, accept, expected):
        assert content_type_for(accept) == expected

    def test_says_the_same_in_both(self, api):
        api.send_ok(api.register(), [layer_frame(0, [1, math.inf, 3]), loss_frame(1)])
        api.http.get("/metrics")  # the families of requests are there from now on
        pages = [api.http.get("/metrics", headers={"Accept": accept}).text for accept in (PLAIN, OPEN_METRICS)]
        parsed = [text_string_to_metric_families(pages[0]), open_metrics_families(pages[1])]
        of_runs = [
            {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples if "run_id" in s.labels}
            for families in parsed
        ]
        assert of_runs[0] == of_runs[1] != {}
        names = [{line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")} for page in pages]
        assert {name.removesuffix("_total").removesuffix("_info") for name in names[0]} == names[1]

    def test_has_each_family_once_and_all_its_samples_behind_it(self, api):
        for number in range(3):
            api.send_ok(api.register(f"run {number}"), [layer_frame(0, [1, 2, 3])])
        lines = api.http.get("/metrics").text.splitlines()
        families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(families) == len(set(families))
        assert families == sorted(families)
        current = None
        for line in lines:
            current = line.split()[2] if line.startswith("#") else current
            assert line.startswith(("#", current))


class TestLimits:
    def test_keep_the_youngest_runs(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0], max_runs=2)
        runs = []
        for now[0] in (1000.0, 1001.0, 1002.0):
            runs.append(api.register(f"run {now[0]}"))
        now[0] = 1003.0
        api.send_ok(runs[0], [loss_frame(0)])  # who was heard of last does not matter: they would take turns
        assert [bool(of_run(api, run_id)) for run_id in runs] == [False, True, True]
        assert left_out(api) == (1, 0, 0)

    def test_keep_runs_of_each_project_before_more_of_one(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0], max_runs=4)
        runs = {}
        for now[0], name in enumerate(["a1", "a2", "b1", "b2", "flood1", "flood2", "flood3", "flood4"], start=1000):
            runs[name] = api.register(name, project=name.rstrip("1234"))
        assert {name for name, run_id in runs.items() if of_run(api, run_id)} == {"a2", "b2", "flood3", "flood4"}
        assert left_out(api) == (4, 0, 0)

    def test_keep_the_catalogues_scalars_before_others(self, start):
        api = start(max_scalars=3)
        run_id = api.register()
        api.send_ok(run_id, [Frame(0, 0, 0.0, {"a": 1, "b": 1, "c": 1, "loss": 1, "total_grad_norm": 1})])
        assert {"tsemon_run_loss", "tsemon_run_total_grad_norm", "tsemon_run_a"} <= {
            name for name, *_ in of_run(api, run_id)
        }
        assert left_out(api) == (0, 0, 2)

    def test_keep_as_many_metrics_that_have_layers(self, start):
        api = start(max_scalars=2)
        run_id = api.register()
        names = ("a", "b", "c", "grad_norm")
        api.send_ok(run_id, [Frame(0, 0, 0.0, {}, {name: Array.of([1, 2]) for name in names})])
        shown = named(of_run(api, run_id), "tsemon_layers_")
        assert {name.split("_", 2)[2].rsplit("_", 1)[0] for name, *_ in shown} == {"a", "grad_norm"}
        assert left_out(api) == (0, 10, 0)

    def test_of_series_let_no_deep_model_take_the_room_of_others(self, start):
        api = start(max_series=60)
        deep, shallow = api.register("deep", num_blocks=500), api.register("shallow", num_blocks=3)
        for run_id, num_layers in ((deep, 501), (shallow, 4)):
            api.send_ok(run_id, [layer_frame(0, [0.5] * num_layers, "token_diversity")])
        assert not named(of_run(api, deep), "tsemon_layer_")
        assert len(named(of_run(api, deep), "tsemon_layers_")) == 5
        assert len(named(of_run(api, shallow), "tsemon_layer_")) == 4
        assert left_out(api) == (0, 501, 0)

    def test_of_series_leave_out_the_deepest_model_first(self):
        depths = {"a": 40, "b": 3, "c": 30, "d": 4}
        runs = []
        for run_id, depth in depths.items():
            values = {"scalars": {}, "layers": {"grad_norm": np.ones(depth, np.float32)}, "heads": {}}
            runs.append(LiveRun(run_id, "p", run_id, 0, 0, 0.0, 0.0, [values], []))
        settings = MetricsSettings(max_series=4 * (7 + 5) + 40)
        families, left_out = shown(runs, [], [], settings, {})
        assert left_out.series == 40
        lines = families["tsemon_layer_grad_norm"].samples.splitlines()
        assert Counter(re.findall(r'run_id="(.)"', "".join(lines))) == {"b": 3, "c": 30, "d": 4}

    @pytest.mark.parametrize("most", [0, 1, 5, 6, 12, 17, 20, 30])
    def test_of_series_are_kept(self, start, most):
        api = start(max_series=most)
        for number in range(3):
            frame = Frame(0, 0, 0.0, {"loss": 1.0, "lr": 1.0}, {"grad_norm": Array.of([1, 2])})
            api.send_ok(api.register(f"run {number}"), [frame])
        found = scrape(api)
        assert len([1 for _, labels in found if "run_id" in dict(labels)]) <= most
        assert sum(left_out(api)) > 0

    def test_that_keep_nothing_off_say_so(self, api):
        api.send_ok(api.register(), [layer_frame(0, [1, 2, 3])])
        assert left_out(api) == (0, 0, 0)


class TestWhatTheServiceSaysOfItself:
    def test_is_how_long_bodies_and_rules_take(self, start):
        api = start(rules=HIGH_LOSS)
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(0), loss_frame(1)])
        api.post_raw(run_id, b"nonsense")
        found = scrape(api)
        assert found[("tsemon_ingest_seconds_count", ())] == 1.0
        assert 0 < found[("tsemon_ingest_seconds_sum", ())] < 60
        assert found[("tsemon_rule_evaluation_seconds_count", ())] == 2.0
        assert found[("tsemon_refused_bodies_total", ())] == 1.0

    def test_has_buckets_that_add_up(self, api):
        run_id = api.register()
        for step in range(5):
            api.send_ok(run_id, [loss_frame(step)])
        buckets = [
            (float(dict(labels)["le"]), value)
            for (name, labels), value in scrape(api).items()
            if name == "tsemon_ingest_seconds_bucket"
        ]
        assert buckets == sorted(buckets)
        assert all(low[1] <= high[1] for low, high in pairwise(buckets))
        assert buckets[-1] == (math.inf, 5.0)

    def test_counts_requests_by_the_template_of_their_path(self, api):
        run_id = api.register()
        for _ in range(2):
            api.http.get(f"/api/v1/runs/{run_id}")
        api.http.get("/api/v1/runs/not-there")
        api.http.get("/wp-login.php")
        api.http.request("BREW", "/coffee")
        api.http.get("/api/v1/runs", headers={"Host": "evil.example"})
        found = {dict(labels)["status"] + " " + dict(labels)["method"] + " " + dict(labels)["route"]: value
                 for (name, labels), value in scrape(api).items() if name == "tsemon_http_requests_total"}  # fmt: skip
        assert found == {
            "200 POST /api/v1/runs": 1.0,
            "200 GET /api/v1/runs/{run_id}": 2.0,
            "404 GET /api/v1/runs/{run_id}": 1.0,
            "404 GET other": 1.0,
            "404 other other": 1.0,
            "400 GET other": 1.0,
        }

    def test_names_nothing_that_a_stranger_has_written(self, api):
        for path in (
            "/secret-1",
            "/api/v1/runs/secret-2",
            "/api/v1/runs/secret-3/series?metric=secret-4",
            "/api/v1/secret-5",
        ):
            api.http.get(path)
            api.http.post(path)
        assert "secret" not in api.http.get("/metrics").text

    def test_knows_the_route_of_every_kind_of_request(self, api):
        templates = set(api.http.get("/openapi.json").json()["paths"])
        for path in templates:
            api.http.get(path.replace("{", "").replace("}", ""), params={"seconds": 0})  # events would go on
        found = {dict(labels)["route"] for (name, labels) in scrape(api) if name == "tsemon_http_requests_total"}
        assert found - templates == {"/openapi.json"}  # the document does not describe itself
        assert templates - found <= {"/api/v1/rules/test", "/api/v1/rules/check"}  # GET asks for the rule of that name

    def test_is_what_waits(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step) for step in range(700)])
        api.open_alert(run_id)
        found = scrape(api)
        assert found[("tsemon_unsettled_frames", ())] == 700.0
        assert found[("tsemon_queue_depth", (("queue", "commits"),))] == 0.0
        assert found[("tsemon_queue_depth", (("queue", "notices"),))] == 2.0  # of the alert and of its incident
        assert found[("tsemon_queue_depth", (("queue", "deliveries"),))] == 0.0
        assert ("tsemon_settling_lag_seconds", ()) not in found

    def test_is_how_long_ago_all_was_packed(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0], housekeeping_pause_s=0.01)
        while ("tsemon_settling_lag_seconds", ()) not in scrape(api):
            pass
        assert scrape(api)[("tsemon_settling_lag_seconds", ())] < 5.0
        start(clock=lambda: now[0])  # one that does nothing
        now[0] = 5000.0
        assert 3995.0 < scrape(start(clock=lambda: now[0]))[("tsemon_settling_lag_seconds", ())] <= 4000.0 + 5.0

    def test_is_its_version(self, api):
        assert [labels for name, labels in scrape(api) if name == "tsemon_build_info"] == [(("version", "0.1.0"),)]

    def test_is_not_kept_for_a_second_as_runs_are(self, start):
        api = start(cache_s=3600.0)
        run_id = api.register()
        assert of_run(api, run_id)
        api.send_ok(run_id, [loss_frame(0)])
        found = scrape(api)
        assert ("tsemon_run_step", (("run_id", run_id),)) not in found
        assert found[("tsemon_frames_total", (("outcome", "accepted"),))] == 1.0


class TestTheDocumentation:
    PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()

    def test_names_all_that_is_on_the_page(self, start):
        api = start(rules=HIGH_LOSS)
        run_id = api.register()
        api.open_alert(run_id)
        api.send_ok(run_id, [Frame(0, 0, 0.0, {"loss": 1.0}, {"token_diversity": Array.of([1, 2, 3])})])
        text = api.http.get("/metrics").text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert {"tsemon_alert_firing", "tsemon_incident"} <= names
        stand_for = {"tsemon_run_loss": "tsemon_run_NAME", "tsemon_layer_token_diversity": "tsemon_layer_M"}
        names = {stand_for.get(name, name.replace("token_diversity", "M")) for name in names}
        cells = [line.split("|")[1] for line in self.PAGE.splitlines() if line.startswith("| `")]
        rows = {name for cell in cells for name in re.findall(r"`(\w+|\.\.\.\w+)`", cell)}
        rows = {name.replace("...", "tsemon_layers_M") for name in rows}
        assert names <= rows
        absent = {"tsemon_settling_lag_seconds"}  # where nothing was packed yet
        assert {name for name in rows if name.startswith("tsemon_")} - absent <= names

    def test_tells_the_settings_and_what_they_are_by_default(self):
        default = MetricsSettings()
        for name, value in (("LAYERS", ",".join(default.layers)), ("MAX_RUNS", default.max_runs),
                            ("MAX_SCALARS", default.max_scalars), ("MAX_SERIES", default.max_series)):  # fmt: skip
            row = next(line for line in self.PAGE.splitlines() if line.startswith(f"| `TSEMON_METRICS_{name}` |"))
            assert row.split("|")[2].strip(" `") == str(value)
        assert f"`TSEMON_METRICS_GRACE_S` ({default.grace_s})" in self.PAGE

    def test_lists_the_metrics_whose_nan_is_trouble(self):
        (sentence,) = re.findall(r"and NaN in ([^;]+);", self.PAGE)
        assert set(re.findall(r"`(\w+)`", sentence)) == NEVER_UNDEFINED


class TestSettings:
    def test_come_from_the_environment(self):
        given = {"LAYERS": " a, b,,*", "MAX_RUNS": "1", "MAX_SCALARS": "0", "MAX_SERIES": "30"}
        found = settings_from_environment({f"TSEMON_METRICS_{name}": value for name, value in given.items()})
        assert found.metrics == MetricsSettings(layers=("a", "b", "*"), max_runs=1, max_scalars=0, max_series=30)
        assert settings_from_environment({}).metrics == MetricsSettings()
        assert settings_from_environment({"TSEMON_METRICS_LAYERS": ""}).metrics.layers == ()

    @pytest.mark.parametrize("value", ["", "-1", "1e3", "many"])
    def test_are_numbers(self, value):
        with pytest.raises(InvalidArgument, match="TSEMON_METRICS_MAX_RUNS must be a number from 0, got"):
            settings_from_environment({"TSEMON_METRICS_MAX_RUNS": value})


def named(samples, start):
    return {key: value for key, value in samples.items() if key[0].startswith(start)}


def left_out(api):
    found = scrape(api)
    return tuple(found[("tsemon_exposition_left_out", (("what", what),))] for what in ("runs", "series", "scalars"))


def test_a_label_is_escaped_as_prometheus_reads_it():
    assert escaped('a\\b"c\nd') == r"a\\b\"c\nd"


def test_a_file_of_counters_is_there_only_when_it_is_whole(tmp_path, monkeypatch):
    """Else whoever scrapes another worker just then gets no page."""

    def write_a_part(path, data):
        path.touch()
        raise OSError("no space left")

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    share_counters(tmp_path, 1)
    assert list(tmp_path.glob("*.db")) == []

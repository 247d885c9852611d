import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tsemon.wire import Array, Frame
from tsemon_server.store import Store

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
            frame = Frame(step, step, 0.0, {"loss": loss}, {"token_similarity": Array.of([0.25, 0.5, math.inf])})
            api.send_ok(run_id, [frame])
        assert of_run(api, run_id) == {
            ("tsemon_run_info", "default", "gpt"): 1.0,
            ("tsemon_run_step",): 3.0,
            ("tsemon_run_loss",): 2.5,
            ("tsemon_run_last_seen_timestamp_seconds",): 1000.0,
            ("tsemon_layer_token_similarity", "00"): 0.25,
            ("tsemon_layer_token_similarity", "01"): 0.5,
            ("tsemon_layer_token_similarity", "02"): math.inf,
        }

    def test_show_no_more_than_a_frame_had(self, start):
        api = start(clock=lambda: 1000.0)
        empty, bare = api.register("empty"), api.register("bare")
        api.send_ok(bare, [layer_frame(4, [1, 2, 3], "hidden_rms")])
        assert {name for name, *_ in of_run(api, empty)} == {
            "tsemon_run_info",
            "tsemon_run_last_seen_timestamp_seconds",
        }
        assert of_run(api, bare)[("tsemon_run_step",)] == 4.0

    @pytest.mark.parametrize("is_settled", [False, True])
    def test_show_a_run_that_went_back_as_it_was_there(self, start, is_settled):
        api = start(clock=lambda: 1000.0)
        run_id = api.register(num_blocks=2)
        layers = {"token_similarity": Array.of([0.25, 0.5, 0.75])}
        api.send_ok(run_id, [Frame(step, step, 0.0, {"loss": step}, layers) for step in range(600)])
        if is_settled:
            store = Store(api.database.url)
            assert store.settle() > 0
            store.close()
        api.register(num_blocks=2, resume_step=100)
        shown = of_run(api, run_id)
        assert (shown[("tsemon_run_step",)], shown[("tsemon_run_loss",)]) == (99.0, 99.0)
        assert shown[("tsemon_layer_token_similarity", "02")] == 0.75

    def test_have_layers_that_sort_as_text(self, api):
        run_id = api.register(num_blocks=120)
        api.send_ok(run_id, [layer_frame(0, list(range(121)))])
        layers = [layer for name, *rest in of_run(api, run_id) if name.startswith("tsemon_layer") for layer in rest]
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
        firing = ("tsemon_alert_firing", "high-loss", "warning")
        api.send_ok(run_id, [loss_frame(0, 20.0)])
        assert firing not in of_run(api, run_id)
        api.send_ok(run_id, [loss_frame(1, 20.0), loss_frame(2, 20.0)])
        assert of_run(api, run_id)[firing] == 1.0
        api.send_ok(run_id, [loss_frame(step, 0.0) for step in (3, 4, 5)])
        assert firing not in of_run(api, run_id)

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

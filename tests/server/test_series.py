import math
import statistics

import numpy as np
import pytest

from tsemon.wire import Array, Frame
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.store import Store
from tsemon_server.store.series.cells import of_samples, smallest_shift
from tsemon_server.store.series.metric import Points

from .conftest import layer_frame, loss_frame


def buckets_written_out(steps, values, points, ends_alone):
    """The definition, slowly: step, least, mean and largest value, number of values that are not finite."""
    samples = sorted(zip(steps, values, strict=True), key=lambda sample: sample[0])
    first, last = (samples[0][0], samples[-1][0]) if samples else (0, 0)
    shift = 0
    while len(samples) > points and (last >> shift) - (first >> shift) >= points - 2 * ends_alone:
        shift += 1
    groups = {}
    for step, value in samples:
        key = (step >> shift, ends_alone and step == last, ends_alone and step != first)
        groups.setdefault(key, []).append((step, value))
    for group in sorted(groups.values()):
        finite = [value for _, value in group if math.isfinite(value)]
        summary = (min(finite), statistics.fmean(finite), max(finite)) if finite else (math.nan,) * 3
        yield (group[0][0] + group[-1][0]) // 2, *summary, len(group) - len(finite)


class TestBuckets:
    @pytest.mark.parametrize("num_samples", [0, 1, 2, 3, 4, 5, 10, 11, 97, 1000])
    @pytest.mark.parametrize("most", [3, 4, 10, 64])
    @pytest.mark.parametrize("ends_alone", [True, False])
    def test_equal_the_definition_written_out(self, num_samples, most, ends_alone):
        random = np.random.default_rng(num_samples * 100 + most)
        steps = np.cumsum(random.integers(0, 5, num_samples))
        values = random.normal(size=num_samples)
        values[random.random(num_samples) < 0.3] = np.nan
        values[random.random(num_samples) < 0.1] = np.inf
        expected = list(buckets_written_out(steps.tolist(), values.tolist(), most, ends_alone))
        shift = 0
        if num_samples > most:
            shift = smallest_shift(int(steps[0]), int(steps[-1]), most - 2 * ends_alone)
        spans, stats = bucketed(Points(of_samples(steps, values[:, None]), shift), ends_alone=ends_alone)
        assert len(spans) == len(expected) <= most
        found = np.column_stack(
            [
                (spans[:, 0] + spans[:, 1]) // 2,
                stats[:, 0, 0],
                stats[:, 0, 1],
                stats[:, 0, 2],
                spans[:, 2] - stats[:, 0, 3],
            ]
        )
        # 1e-12: the two add up in another order
        np.testing.assert_allclose(found, np.reshape(expected, (-1, 5)), rtol=1e-12, atol=1e-12)

    def test_have_their_mean_between_their_bounds(self):
        _, stats = bucketed(Points(of_samples(np.arange(1000), np.full((1000, 1), 0.1)), 4), ends_alone=True)
        assert (stats[..., 0] <= stats[..., 1]).all()
        assert (stats[..., 1] <= stats[..., 2]).all()

    def test_have_a_mean_where_the_sum_is_too_large_for_a_number(self):
        _, stats = bucketed(Points(of_samples(np.arange(4), np.full((4, 1), 1e308)), 2), ends_alone=False)
        assert stats[0, 0].tolist() == [1e308, 1e308, 1e308, 4.0]


@pytest.fixture
def run_id(api):
    """Two blocks, 20 steps; layer i of token_similarity at step s is s + i / 4."""
    run_id = api.register(num_blocks=2)
    frames = [
        Frame(
            step,
            step,
            0.0,
            {"loss": float(step), "update_alignment": -1.0},
            {
                "token_similarity": Array.of([step, step + 0.25, step + 0.5]),
                "update_alignment": Array.of([0.5, 0.75]),
            },
            {"attention_entropy": Array.of([1, 2, 3, 4, 5, 6], (2, 3))},
        )
        for step in range(20)
    ]
    api.send_ok(run_id, frames)
    return run_id


class TestSeries:
    def test_is_raw_where_it_fits(self, api, run_id):
        series = api.get(f"/runs/{run_id}/series", metric="token_similarity", layer=1, points=20)
        assert series["step"] == list(range(20))
        assert series["min"] == series["mean"] == series["max"] == [step + 0.25 for step in range(20)]
        assert series["nonfinite"] == [0] * 20

    def test_is_cut_to_its_range_before_it_is_reduced(self, api, run_id):
        series = api.get(f"/runs/{run_id}/series", metric="loss", from_step=4, to_step=12, points=3)
        assert series["step"] == [4, 8, 12]
        assert (series["min"], series["mean"], series["max"]) == ([4, 5, 12], [4, 8, 12], [4, 11, 12])

    def test_takes_the_number_of_the_run_or_of_a_layer_where_both_have_the_name(self, api, run_id):
        at = {"metric": "update_alignment", "to_step": 0}
        assert api.get(f"/runs/{run_id}/series", **at)["mean"] == [-1.0]
        assert api.get(f"/runs/{run_id}/series", layer=1, **at)["mean"] == [0.75]

    def test_reads_the_head_that_was_asked_for(self, api, run_id):
        at = {"metric": "attention_entropy", "to_step": 0}
        found = [api.get(f"/runs/{run_id}/series", layer=1, head=head, **at)["mean"] for head in range(3)]
        assert found == [[4.0], [5.0], [6.0]]

    @pytest.mark.parametrize("head", [{}, {"head": 2}])
    def test_counts_negative_layers_from_the_end_and_says_which_that_was(self, api, run_id, head):
        ask = {"metric": "attention_entropy" if head else "token_similarity", **head}
        last = api.get(f"/runs/{run_id}/series", layer=-1, **ask)
        assert last["layer"] == (1 if head else 2)
        assert last == api.get(f"/runs/{run_id}/series", layer=last["layer"], **ask)

    @pytest.mark.parametrize("is_settled", [False, True])
    def test_counts_negative_layers_of_an_attempt_from_the_end_of_that_attempt(self, api, run_id, is_settled):
        if is_settled:
            api.send_ok(run_id, [layer_frame(step, [0.0, 0.25, 0.5]) for step in range(20, 600)])
            store = Store(api.database.url)
            assert store.settle() > 0
            store.close()
        api.register(num_blocks=4, resume_step=10)
        api.send_ok(run_id, [layer_frame(10, [1, 2, 3, 4, 5])], attempt=2)
        ask = {"metric": "token_similarity", "layer": -1, "to_step": 10}
        first = api.get(f"/runs/{run_id}/series", attempt=1, **ask)
        assert (first["layer"], first["mean"][-1]) == (2, 10.5)
        second = api.get(f"/runs/{run_id}/series", attempt=2, **ask)
        assert (second["layer"], second["mean"]) == (4, [5.0])

    @pytest.mark.parametrize("layer", [{"layer": -1}, {"layer": 0}, {}])
    def test_of_a_run_without_blocks_says_that_there_are_no_layers(self, api, layer):
        run_id = api.register(num_blocks=0)
        status, error, detail = api.get(f"/runs/{run_id}/series", metric="grad_norm", **layer)
        assert (status, error) == (404, "unknown_layer")
        assert "'grad_norm' has no layers in this run" in detail

    def test_finds_a_metric_in_frames_of_every_shape(self, api, run_id):
        api.send_ok(run_id, [loss_frame(20, 7.0)])
        api.send_ok(run_id, [layer_frame(21, [1, 2, 3], "hidden_rms"), loss_frame(22, 8.0)])
        series = api.get(f"/runs/{run_id}/series", metric="loss", from_step=19)
        assert dict(zip(series["step"], series["mean"], strict=True)) == {19: 19.0, 20: 7.0, 22: 8.0}

    def test_is_the_same_every_time(self, api, run_id):
        ask = {"metric": "loss", "points": 7}
        assert api.get(f"/runs/{run_id}/series", **ask) == api.get(f"/runs/{run_id}/series", **ask)

    @pytest.mark.parametrize("where", [{"metric": "total_grad_norm"}, {"metric": "grad_norm", "layer": 1}])
    def test_of_a_known_metric_that_was_not_recorded_is_empty(self, api, run_id, where):
        series = api.get(f"/runs/{run_id}/series", **where)
        assert [series[key] for key in ("step", "min", "mean", "max", "nonfinite")] == [[]] * 5

    @pytest.mark.parametrize(
        ("ask", "status", "error", "detail"),
        [
            ({"metric": "token_similarty"}, 404, "unknown_metric", "did you mean 'token_similarity'?"),
            ({"metric": "token_similarty", "layer": 0}, 404, "unknown_metric", "did you mean 'token_similarity'?"),
            ({"metric": "zzz", "layer": 0, "head": 0}, 404, "unknown_metric", "'zzz'"),
            ({"metric": "token_similarity", "layer": 3}, 404, "unknown_layer", "has the layers 0 to 2, got 3"),
            ({"metric": "token_similarity", "layer": -4}, 404, "unknown_layer", "has 3 layers, -1 is the last"),
            ({"metric": "loss", "layer": -1}, 404, "unknown_layer", "one number per step without layers"),
            ({"metric": "grad_norm", "layer": 2}, 404, "unknown_layer", "has the layers 0 to 1, got 2"),
            ({"metric": "token_similarity"}, 422, "invalid_argument", "give layer, from 0 to 2"),
            ({"metric": "attention_entropy", "head": 1}, 422, "invalid_argument", "give layer, from 0 to 1"),
            ({"metric": "attention_entropy", "layer": 0, "head": 3}, 404, "unknown_layer", "heads 0 to 2, got 3"),
            ({"metric": "grad_norm", "layer": 0, "head": 0}, 404, "unknown_layer", "not recorded per head"),
            ({"metric": "loss", "layer": 0}, 404, "unknown_layer", "leave layer out"),
            ({"metric": "loss", "head": 0}, 404, "unknown_layer", "leave head out"),
            ({"metric": "loss", "from_step": 5, "to_step": 4}, 422, "invalid_range", "got 5 > 4; swap them"),
            ({"metric": "loss", "points": 2}, 422, "invalid_argument", "points"),
            ({"metric": "loss", "points": 10_001}, 422, "invalid_argument", "points"),
            ({"metric": "loss", "attempt": 10**20}, 422, "invalid_argument", "attempt"),
            ({"metric": "loss", "head": 10**20}, 422, "invalid_argument", "head"),
            ({"metric": "loss", "layer": 10**20}, 422, "invalid_argument", "layer"),
            ({"metric": "loss", "from_step": -1}, 422, "invalid_argument", "from_step"),
            ({"metric": "loss", "from_step": "a"}, 422, "invalid_argument", "from_step"),
            ({}, 422, "invalid_argument", "metric: Field required"),
        ],
    )
    def test_tells_what_is_wrong_with_the_question(self, api, run_id, ask, status, error, detail):
        found = api.get(f"/runs/{run_id}/series", **ask)
        assert found[:2] == (status, error)
        assert detail in found[2]


class TestHeatmap:
    def test_has_all_layers_of_each_column(self, api, run_id):
        found = api.get(f"/runs/{run_id}/heatmap", metric="token_similarity", columns=4)
        assert (found["metric"], found["layers"], found["step"]) == ("token_similarity", 3, [3, 11, 17])
        assert found["values"] == [[mean, mean + 0.25, mean + 0.5] for mean in (3.5, 11.5, 17.5)]

    def test_is_cut_to_its_range(self, api, run_id):
        found = api.get(f"/runs/{run_id}/heatmap", metric="token_similarity", from_step=3, to_step=4)
        assert found["step"] == [3, 4]

    def test_of_a_known_metric_that_was_not_recorded_is_empty(self, api, run_id):
        found = api.get(f"/runs/{run_id}/heatmap", metric="hidden_rms")
        assert (found["metric"], found["layers"], found["damaged"]) == ("hidden_rms", 3, 0)
        assert found["step"] == found["values"] == found["samples"] == []

    def test_keeps_a_spike_of_one_step_that_its_mean_hides(self, api):
        run_id = api.register(num_blocks=2)
        spikes = {300: [0.5, 9.0], 700: [-7.0, 0.5], 900: [math.nan, 0.5]}
        frames = [layer_frame(step, spikes.get(step, [0.5, 0.5]), "grad_norm") for step in range(1000)]
        api.send_ok(run_id, frames)
        found = api.get(f"/runs/{run_id}/heatmap", metric="grad_norm", columns=4, extremes=True)
        assert found["samples"] == [256, 256, 256, 232]
        assert found["farthest"] == [[0.5, 0.5], [0.5, 9.0], [-7.0, 0.5], [0.5, 0.5]]
        assert found["nonfinite"] == [[0, 0], [0, 0], [0, 0], [1, 0]]
        plain = api.get(f"/runs/{run_id}/heatmap", metric="grad_norm", columns=4)
        assert (plain["farthest"], plain["nonfinite"]) == (None, None)
        assert plain["values"] == found["values"]
        assert found["values"][1] == [0.5, pytest.approx((255 * 0.5 + 9) / 256)]

    @pytest.mark.parametrize(
        ("ask", "status", "error"),
        [
            ({"metric": "nope"}, 404, "unknown_metric"),
            ({"metric": "loss"}, 404, "unknown_layer"),
            ({"metric": "token_similarity", "from_step": 2, "to_step": 1}, 422, "invalid_range"),
            ({"metric": "token_similarity", "columns": 0}, 422, "invalid_argument"),
            ({"metric": "token_similarity", "attempt": 4}, 404, "unknown_attempt"),
        ],
    )
    def test_tells_what_is_wrong_with_the_question(self, api, run_id, ask, status, error):
        assert api.get(f"/runs/{run_id}/heatmap", **ask)[:2] == (status, error)

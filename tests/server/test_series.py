import math
import statistics
from itertools import pairwise

import numpy as np
import pytest

from tsemon.wire import Array, Frame
from tsemon_server.queries.reduce import bucketed, column_means

from .conftest import layer_frame, loss_frame


def buckets_written_out(steps, values, points):
    """The definition, slowly."""
    samples = list(zip(steps, values, strict=True))
    if len(samples) > points:
        inner, parts = samples[1:-1], points - 2
        cuts = [len(inner) * part // parts for part in range(parts + 1)]
        groups = [samples[:1], *(inner[a:b] for a, b in pairwise(cuts)), samples[-1:]]
    else:
        groups = [[sample] for sample in samples]
    for group in groups:
        finite = [value for _, value in group if math.isfinite(value)]
        summary = (min(finite), statistics.fmean(finite), max(finite)) if finite else (math.nan,) * 3
        yield group[(len(group) - 1) // 2][0], *summary, len(group) - len(finite)


class TestBuckets:
    @pytest.mark.parametrize("num_samples", [0, 1, 2, 3, 4, 5, 10, 11, 97, 1000])
    @pytest.mark.parametrize("points", [3, 4, 10, 64])
    def test_equal_the_definition_written_out(self, num_samples, points):
        random = np.random.default_rng(num_samples * 100 + points)
        steps = np.cumsum(random.integers(0, 5, num_samples))
        values = random.normal(size=num_samples)
        values[random.random(num_samples) < 0.3] = np.nan
        values[random.random(num_samples) < 0.1] = np.inf
        found = bucketed(steps, values, points)
        expected = list(buckets_written_out(steps.tolist(), values.tolist(), points))
        assert len(found.step) == len(expected) <= points
        for column, wanted in zip(found, zip(*expected, strict=True), strict=False):
            # 1e-12: the two add up in another order
            np.testing.assert_allclose(column, wanted, rtol=1e-12, atol=1e-12)

    def test_keep_the_first_and_the_last_sample_alone(self):
        values = np.array([9.0, *[0.0] * 50, 7.0])
        found = bucketed(np.arange(52), values, 5)
        assert (found.step[0], found.mean[0], found.step[-1], found.mean[-1]) == (0, 9.0, 51, 7.0)

    def test_have_their_mean_between_their_bounds(self):
        found = bucketed(np.arange(1000), np.full(1000, 0.1), 3)
        assert (found.min <= found.mean).all()
        assert (found.mean <= found.max).all()


class TestColumnMeans:
    def test_leave_out_what_is_not_finite(self):
        values = np.array([[1.0, np.nan], [3.0, np.inf], [5.0, 6.0], [7.0, 8.0]])
        steps, means = column_means(np.array([0, 1, 2, 3]), values, 2)
        assert steps.tolist() == [0, 2]
        np.testing.assert_array_equal(means, [[2.0, np.nan], [6.0, 7.0]])

    def test_of_nothing_are_nothing(self):
        steps, means = column_means(np.empty(0, int), np.empty((0, 3)), 5)
        assert (len(steps), means.shape) == (0, (0, 3))


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
            ({"metric": "token_similarity", "layer": -1}, 404, "unknown_layer", "has the layers 0 to 2, got -1"),
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
        assert (found["metric"], found["layers"], found["step"]) == ("token_similarity", 3, [2, 7, 12, 17])
        assert found["values"] == [[mean, mean + 0.25, mean + 0.5] for mean in (2.0, 7.0, 12.0, 17.0)]

    def test_is_cut_to_its_range(self, api, run_id):
        found = api.get(f"/runs/{run_id}/heatmap", metric="token_similarity", from_step=3, to_step=4)
        assert found["step"] == [3, 4]

    def test_of_a_known_metric_that_was_not_recorded_is_empty(self, api, run_id):
        found = api.get(f"/runs/{run_id}/heatmap", metric="hidden_rms")
        assert found == {"metric": "hidden_rms", "step": [], "layers": 3, "values": []}

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

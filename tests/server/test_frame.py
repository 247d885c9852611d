"""One frame, as it was recorded."""

import math

import pytest

from tests.server.conftest import loss_frame
from tsemon.wire import Array, Frame
from tsemon_server.store import Store
from tsemon_server.store.ledger.retention import Retention
from tsemon_server.store.series.settling import Sizes

NAN, INF = math.nan, math.inf


def full_frame(step, seq=None):
    """Of a model of two blocks."""
    layers = {"token_similarity": Array.of([step, NAN, INF]), "grad_norm": Array.of([-INF, 0.5])}
    heads = {"attention_entropy": Array.of([0.25, NAN, 0.75, INF], (2, 2))}
    return Frame(step if seq is None else seq, step, 1000.5 + step, {"loss": NAN, "mine": step / 4}, layers, heads)


def expected(step, attempt=1):
    return {
        "attempt": attempt,
        "step": step,
        "time": 1000.5 + step,
        "scalars": {"loss": None, "mine": step / 4},
        "layers": {"token_similarity": [step, None, None], "grad_norm": [None, 0.5]},
        "heads": {"attention_entropy": [[0.25, None], [0.75, None]]},
    }


def settle(api, segment=4, kept=0):
    store = Store(api.database.url)
    store.settle(sizes=Sizes(segment=segment, kept=kept))
    store.close()


@pytest.fixture(params=["hot", "settled in part"])
def run_id(api, request):
    """A run of steps 0, 10, ... 190; where it has settled, segments have four frames each."""
    run_id = api.register()
    api.send_ok(run_id, [full_frame(step) for step in range(0, 200, 10)])
    if request.param != "hot":
        settle(api, kept=9)
    return run_id


class TestAFrame:
    def test_is_as_it_was_recorded_and_null_where_not_finite(self, api, run_id):
        for step in (0, 30, 110, 190):
            assert api.get(f"/runs/{run_id}/frame", step=step) == expected(step)

    def test_is_the_newest_without_a_step(self, api, run_id):
        assert api.get(f"/runs/{run_id}/frame") == expected(190)

    def test_is_the_nearest_and_of_two_the_earlier(self, api, run_id):
        asked = {4: 0, 5: 0, 6: 10, 74: 70, 75: 70, 76: 80, 115: 110, 116: 120, 2**53: 190}
        assert {step: api.get(f"/runs/{run_id}/frame", step=step)["step"] for step in asked} == asked

    def test_is_not_one_that_a_later_attempt_hides_unless_that_attempt_is_asked_for(self, api, run_id):
        api.register(resume_step=100)
        assert api.get(f"/runs/{run_id}/frame", step=180)["step"] == 90
        assert api.get(f"/runs/{run_id}/frame", step=180, attempt=1)["step"] == 180
        api.send_ok(run_id, [full_frame(90, seq=0), full_frame(140, seq=1)], attempt=2)
        assert api.get(f"/runs/{run_id}/frame", step=180) == expected(140, attempt=2)
        assert api.get(f"/runs/{run_id}/frame", step=90)["attempt"] == 2
        assert api.get(f"/runs/{run_id}/frame", step=0, attempt=2)["step"] == 90
        assert api.get(f"/runs/{run_id}/frame", attempt=1)["step"] == 190

    def test_is_put_together_of_what_several_writers_sent(self, api, run_id):
        first = Frame(900, 900, 1.0, {"loss": 1.0}, {"grad_norm": Array.of([0.5, NAN]), "a": Array.of([1, 2])})
        second = Frame(
            900, 900, 2.0, {"loss": 2.0, "b": 3.0}, {"grad_norm": Array.of([9.0, 0.25]), "a": Array.of([3, 4, 5])}
        )
        api.send_ok(run_id, [second], writer="stage1")
        api.send_ok(run_id, [first], writer="stage0")
        found = api.get(f"/runs/{run_id}/frame", step=900)
        assert (found["time"], found["scalars"]) == (1.0, {"loss": 1.0, "b": 3.0})
        assert found["layers"] == {"grad_norm": [0.5, 0.25], "a": [1.0, 2.0]}

    def test_is_one_of_those_that_retention_has_left(self, api):
        run_id = api.register()
        api.send_ok(run_id, [full_frame(step) for step in range(0, 200, 10)])
        settle(api, kept=4)
        store = Store(api.database.url, clock=lambda: 1e10)
        with store.write() as writer:
            writer.retention.keep(Retention("default", samples_s=3600.0))
        store.expire()
        store.close()
        assert api.get(f"/runs/{run_id}/frame", step=0) == expected(160)

    def test_that_there_is_not_is_told(self, api):
        run_id = api.register()
        assert api.get(f"/runs/{run_id}/frame")[:2] == (404, "unknown_frame")
        api.send_ok(run_id, [loss_frame(0)])
        api.register()
        assert api.get(f"/runs/{run_id}/frame", step=0)[:2] == (404, "unknown_frame")
        assert api.get(f"/runs/{run_id}/frame", step=0, attempt=2)[:2] == (404, "unknown_frame")
        assert api.get(f"/runs/{run_id}/frame", step=0, attempt=1)["scalars"] == {"loss": 1.0}

    def test_is_refused_where_the_question_is_wrong(self, api):
        run_id, wrong = api.register(), (422, "invalid_argument")
        for number in (0, 2):
            assert api.get(f"/runs/{run_id}/frame", attempt=number)[:2] == (404, "unknown_attempt")
        for step in (-1, 2**53 + 1, "newest"):
            assert api.get(f"/runs/{run_id}/frame", step=step)[:2] == wrong
        assert api.get("/runs/nope/frame")[:2] == (404, "unknown_run")

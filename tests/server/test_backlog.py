"""Bodies of frames that wait to be stored: who may come, and when others should come again."""

import ctypes
import gzip
from contextlib import ExitStack

import psutil
import pytest

from tsemon.errors import Busy
from tsemon.wire import frames_to_body
from tsemon_server.limits.backlog import ARRIVAL_S, BODY_BYTES, FIRST_BYTES_PER_S, LARGE_BYTES, LONGEST_S, Backlog
from tsemon_server.limits.memory import give_back
from tsemon_server.limits.values import Limits

from .conftest import loss_frame, problem

PATIENCE_S = 4.0
SECOND = FIRST_BYTES_PER_S - BODY_BYTES
"""A body that the server takes a second for, as far as it knows at first."""


class Body:
    """One that was announced."""

    def __init__(self, backlog, num_bytes):
        self._stack = ExitStack()
        self.turn = self._stack.enter_context(backlog.turn(num_bytes))

    def store(self):
        self._stack.close()

    def fail(self, error):
        self._stack.__exit__(type(error), error, None)


class Bodies:
    """A backlog whose time is told, and the bodies in it."""

    def __init__(self):
        self.now, self.num_rests = 100.0, 0
        self.backlog = Backlog(PATIENCE_S, on_rest=self.note_rest, clock=lambda: self.now)
        self.all = []

    def note_rest(self):
        self.num_rests += 1

    def announce(self, num_bytes=SECOND):
        self.all.append(Body(self.backlog, num_bytes))
        return self.all[-1]

    def come(self, num_bytes=SECOND):
        body = self.announce(num_bytes)
        body.turn.come(num_bytes)
        return body

    def refused_for(self, num_bytes=SECOND):
        """Seconds after which a body that is refused should come again."""
        with pytest.raises(Busy, match=r"bodies that take about .* are before this one") as refusal:
            self.come(num_bytes)
        return refusal.value.retry_after_s


@pytest.fixture
def bodies():
    return Bodies()


class TestABacklog:
    def test_takes_what_is_stored_before_its_client_loses_patience(self, bodies):
        waiting = [bodies.come() for _ in range(4)]
        assert bodies.backlog.wait_s == pytest.approx(4.0)
        bodies.refused_for()
        waiting[0].store()
        bodies.come()

    def test_counts_bodies_and_not_bytes_alone(self, bodies):
        for _ in range(4 * FIRST_BYTES_PER_S // BODY_BYTES):
            bodies.come(0)
        bodies.refused_for(0)

    def test_takes_anything_where_nothing_waits(self, bodies):
        bodies.come(100 * SECOND)
        bodies.refused_for(1)

    def test_knows_how_fast_bodies_were_stored_of_late(self, bodies):
        for _ in range(20):
            body = bodies.come()
            bodies.now += 0.25
            body.store()
        assert bodies.backlog.bytes_per_s == pytest.approx(4 * FIRST_BYTES_PER_S, rel=0.2)
        for _ in range(40):
            body = bodies.come()
            bodies.now += 2.0
            body.store()
        assert bodies.backlog.bytes_per_s == pytest.approx(FIRST_BYTES_PER_S / 2, rel=0.01)

    def test_learns_nothing_while_nothing_waits(self, bodies):
        before = bodies.backlog.bytes_per_s
        bodies.now += 3600
        assert bodies.backlog.bytes_per_s == before

    def test_learns_no_speed_from_what_was_not_stored(self, bodies):
        before = bodies.backlog.bytes_per_s
        bodies.come().fail(Busy("the database is locked"))
        assert (bodies.backlog.bytes_per_s, bodies.backlog.wait_s) == (before, 0)

    def test_notes_that_nothing_is_stored_any_more(self, bodies):
        bodies.come(), bodies.come()
        bodies.now += 2.0
        assert bodies.backlog.wait_s == pytest.approx(2.0), "not late yet"
        bodies.now += 5.0
        assert bodies.backlog.wait_s > PATIENCE_S
        bodies.refused_for()


class TestABodyThatIsAnnounced:
    def test_keeps_its_place_until_it_should_be_here(self, bodies):
        for _ in range(4):
            bodies.announce()
        bodies.refused_for()
        bodies.now += ARRIVAL_S
        bodies.come()

    def test_is_refused_when_it_comes_late_and_others_came_before_it(self, bodies):
        slow = bodies.announce()
        bodies.now += ARRIVAL_S
        for _ in range(4):
            bodies.come()
        with pytest.raises(Busy):
            slow.turn.come(SECOND)

    def test_that_never_comes_leaves_nothing_behind(self, bodies):
        bodies.announce().fail(Busy("it went away"))
        assert bodies.backlog.wait_s == 0


class TestWhoIsRefused:
    def test_is_told_to_come_when_there_is_room_and_each_at_another_time(self, bodies):
        for _ in range(4):
            bodies.come()
        waits = [bodies.refused_for() for _ in range(5)]
        assert waits == pytest.approx([2.0, 3.0, 4.0, 5.0, 6.0], abs=0.1)

    def test_is_never_told_to_stay_away_for_long_and_does_not_come_with_all_others(self, bodies):
        for _ in range(4):
            bodies.come()
        waits = [bodies.refused_for() for _ in range(200)]
        assert max(waits) <= LONGEST_S
        last = waits[100:]
        assert min(last) >= LONGEST_S / 2
        assert len({round(wait, 1) for wait in last}) > 20

    def test_has_no_turn_after_those_that_have_passed(self, bodies):
        for _ in range(4):
            bodies.come()
        for _ in range(5):
            bodies.refused_for()
        bodies.now += 60
        assert bodies.refused_for() <= LONGEST_S


class TestTheRestAfterABurst:
    def test_is_told_once_all_of_it_is_stored(self, bodies):
        burst = [bodies.come(LARGE_BYTES // 2) for _ in range(2)]
        burst[0].store()
        assert bodies.num_rests == 0
        burst[1].store()
        assert bodies.num_rests == 1

    def test_is_not_told_of_what_comes_every_day(self, bodies):
        for _ in range(3):
            bodies.come(LARGE_BYTES // 2).store()
        assert bodies.num_rests == 0

    @pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another library of C")
    def test_gives_memory_back_that_lies_below_what_is_in_use(self):
        memory = psutil.Process().memory_info
        burst = [bytes(4000) for _ in range(25_000)]
        kept = burst[::1000]
        burst.clear()
        before = memory().rss
        assert give_back()
        assert before - memory().rss > 50_000_000
        assert len(kept) == 25


class TestTheService:
    @pytest.fixture
    def api(self, start):
        return start(limits=Limits(wait_s=2))

    def test_refuses_a_body_that_would_wait_for_too_long_before_it_reads_it(self, api):
        run_id, backlog = api.register(), api.app.state.parts.backlog
        good = frames_to_body("w", 1, [loss_frame(0).to_json()])
        with backlog.turn(0) as before:
            before.come(10 * FIRST_BYTES_PER_S)
            replies = [
                api.http.post(f"/api/v1/runs/{run_id}/frames", content=content, headers=headers)
                for content, headers in (
                    (good, {}),
                    (b"no JSON", {}),
                    (gzip.compress(good), {"Content-Encoding": "gzip"}),
                    (b"no gzip", {"Content-Encoding": "gzip"}),
                )
            ]
        assert [problem(reply)[:2] for reply in replies] == [(503, "busy")] * 4
        waits = [int(reply.headers["Retry-After"]) for reply in replies]
        assert waits == sorted(waits)
        assert 9 <= waits[0] <= waits[-1] <= LONGEST_S
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0
        assert api.send_ok(run_id, [loss_frame(0)])["accepted"] == 1

    def test_hears_heartbeats_all_the_same(self, api):
        run_id, backlog = api.register(), api.app.state.parts.backlog
        with backlog.turn(0) as before:
            before.come(10 * FIRST_BYTES_PER_S)
            beat = {"writer": "w", "attempt": 1, "step": 3}
            assert api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json=beat).status_code == 200

    def test_forgets_a_body_that_it_refuses_for_another_reason(self, api):
        run_id = api.register()
        assert api.post_raw(run_id, b"no JSON").status_code == 422
        assert api.app.state.parts.backlog.wait_s == 0


class TestTheShortWayOfFramesAndHeartbeats:
    @pytest.mark.parametrize("what", ["frames", "heartbeat"])
    def test_refuses_what_every_route_refuses(self, api, what):
        run_id = api.register()
        unknown = api.http.post(f"/api/v1/runs/{run_id}/{what}?attemt=1", content=b"{}")
        assert problem(unknown)[:2] == (422, "invalid_argument")
        assert "unknown parameter 'attemt'" in unknown.json()["detail"]
        long = api.http.post(f"/api/v1/runs/{'x' * 65}/{what}", content=b"{}")
        assert (problem(long)[:2], "run_id" in long.json()["detail"]) == ((422, "invalid_argument"), True)
        other = api.http.get(f"/api/v1/runs/{run_id}/{what}")
        assert (other.status_code, other.headers["Allow"]) == (405, "POST")

    def test_is_counted_as_every_route_is(self, api):
        api.send_ok(api.register(), [loss_frame(0)])
        text = api.http.get("/metrics").text
        assert 'tsemon_http_requests_total{method="POST",route="/api/v1/runs/{run_id}/frames",status="200"} 1' in text

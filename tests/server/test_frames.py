import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.asking import loop
from tsemon.wire import MAX_BODY_BYTES, Array, Frame, frames_to_body
from tsemon_server.routes.frames import LOOK_EVERY_S, SMALL_BYTES

from .conftest import loss_frame, problem

GOOD = json.loads(Frame(1, 1, 1.0, {"loss": 2.0}, {"token_similarity": Array.of([0.1, 0.2, 0.3])}).to_json())
CRC = GOOD.pop("crc")
"""Most tests change something of the frame, as if by hand."""


def body_of(*frames, **fields):
    return json.dumps({"writer": "w", "attempt": 1, "frames": list(frames)} | fields).encode()


@pytest.fixture
def run_id(api):
    """A run of two blocks that has one frame."""
    run_id = api.register(num_blocks=2)
    api.send_ok(run_id, [loss_frame(0)])
    return run_id


class TestFrames:
    def test_are_there_before_the_reply(self, api, run_id):
        assert api.send_ok(run_id, [loss_frame(5, 2.5)]) == {
            "accepted": 1,
            "duplicates": 0,
            "last_seq": 5,
            "alerts": [],
            "incidents": [],
            "live_attempts": [],
        }
        assert api.losses(run_id) == {0: 1.0, 5: 2.5}

    def test_sent_twice_are_stored_once(self, api, run_id):
        frames = [loss_frame(step) for step in range(1, 4)]
        api.send_ok(run_id, frames)
        again = api.send_ok(run_id, [*frames, loss_frame(4)])
        assert (again["accepted"], again["duplicates"], again["last_seq"]) == (1, 3, 4)
        assert api.get(f"/runs/{run_id}")["num_frames"] == 5

    def test_that_stand_twice_in_a_body_are_stored_once_as_the_first_of_them(self, api, run_id):
        reply = api.send_ok(run_id, [loss_frame(1, 5.0), loss_frame(1, 6.0)])
        assert (reply["accepted"], reply["duplicates"]) == (1, 1)
        assert api.losses(run_id)[1] == 5.0

    def test_of_two_writers_are_different_frames(self, api, run_id):
        for writer in ("a", "b"):
            assert api.send_ok(run_id, [loss_frame(1)], writer=writer)["accepted"] == 1

    def test_may_come_in_any_order(self, api, run_id):
        api.send_ok(run_id, [loss_frame(step, float(step)) for step in (9, 3, 6)])
        assert list(api.losses(run_id)) == [0, 3, 6, 9]
        assert api.get(f"/runs/{run_id}")["last_step"] == 9

    def test_that_are_more_than_a_query_has_parameters_for_are_taken(self, api, run_id):
        frames = [loss_frame(step) for step in range(1, 1203)]
        assert api.send_ok(run_id, frames)["accepted"] == 1202
        assert api.send_ok(run_id, frames)["duplicates"] == 1202

    def test_may_have_integers_that_are_written_with_a_fraction_of_zero(self, api, run_id):
        packed = GOOD["layers"]["token_similarity"] | {"shape": [3.0]}
        frame = {"seq": 7.0, "step": 531.0, "time": 1, "layers": {"token_similarity": packed}, "scalars": {"loss": 2}}
        body = json.dumps({"writer": "w", "attempt": 1.0, "frames": [frame]})
        assert '"step": 531.0' in body
        assert api.post_raw(run_id, body).json()["last_seq"] == 7
        assert api.losses(run_id, from_step="531.0") == {531: 2.0}
        status, _, detail = problem(api.post_raw(run_id, body.replace("531.0", "531.5")))
        assert (status, "step: Input should be a valid integer, got 531.5" in detail) == (422, True)

    def test_may_be_none(self, api, run_id):
        assert api.send_ok(run_id, [])["last_seq"] is None

    def test_keep_a_listed_number_beyond_float32_as_an_infinity(self, api, run_id):
        body = body_of(GOOD | {"seq": 2, "step": 2, "layers": {"token_similarity": [0.5, 1e39, -1e39]}})
        assert api.post_raw(run_id, body).status_code == 200
        series = api.get(f"/runs/{run_id}/series", metric="token_similarity", layer=1)
        assert (series["mean"], series["nonfinite"]) == ([None], [1])

    def test_keep_every_kind_of_number(self, api, run_id):
        frame = GOOD | {
            "scalars": {"nan": None, "nan2": "NaN", "inf": "Infinity", "minus": "-Infinity", "pi": math.pi, "int": 3},
            "layers": {"token_similarity": [0.5, None, "Infinity"], "mine/x": {"shape": [2], "f32": "AACAPwAAAEA="}},
            "heads": {"attention_entropy": [[0.25, 0.5], [0.75, "NaN"]]},
        }
        assert api.post_raw(run_id, body_of(frame)).status_code == 200
        at = {"from_step": 1, "points": 3}
        for name in ("nan", "nan2", "inf", "minus"):
            series = api.get(f"/runs/{run_id}/series", metric=name, **at)
            assert (series["mean"], series["nonfinite"]) == ([None], [1])
        assert api.get(f"/runs/{run_id}/series", metric="pi", **at)["mean"] == [math.pi]
        assert api.get(f"/runs/{run_id}/series", metric="int", **at)["mean"] == [3.0]
        assert api.get(f"/runs/{run_id}/heatmap", metric="token_similarity")["values"] == [[0.5, None, None]]
        assert api.get(f"/runs/{run_id}/heatmap", metric="mine/x")["values"] == [[1.0, 2.0]]
        head = api.get(f"/runs/{run_id}/series", metric="attention_entropy", layer=1, head=0, **at)
        assert (head["mean"], head["head"]) == ([0.75], 0)
        assert api.get(f"/runs/{run_id}")["metrics"]["heads"] == {"attention_entropy": [2, 2]}


def changed(**fields):
    return body_of(GOOD | fields)


BAD = {
    "a broken body": (b'{"writer": "w", "att', "expected JSON"),
    "an empty body": (b"", "expected JSON"),
    "text that is not UTF-8": (b'{"writer": "\xff"}', "expected JSON"),
    "an unknown key": (body_of(GOOD, extra=1), "extra: Extra inputs are not permitted, got 1"),
    "an unknown key of a frame": (changed(extra=1), r"frame seq 1 .*extra: Extra inputs are not permitted, got 1"),
    "no writer": (b'{"attempt": 1, "frames": []}', "writer: Field required"),
    "a writer with a blank": (body_of(GOOD, writer="a b"), "writer: .* got 'a b'"),
    "a NaN literal": (
        changed(scalars={"loss": math.nan}),
        "frame seq 1 .*scalars 'loss': expected a finite .* got nan",
    ),
    "a number that overflows": (
        changed(scalars={"loss": 7}).replace(b": 7}", b": 1e999}"),
        "frame seq 1 .*scalars 'loss': expected a finite number.* got inf",
    ),
    "a word for a number": (changed(scalars={"loss": "low"}), "frame seq 1 .*'loss': expected a finite .* got 'low'"),
    "a NaN literal in a list": (
        changed(layers={"token_similarity": [1, math.nan, 1]}),
        "frame seq 1 .*layers 'token_similarity': expected a finite number.* got nan",
    ),
    "a negative step": (changed(step=-1), "frame seq 1 .*step: .* greater than or equal to 0, got -1"),
    "a step that is no integer": (changed(step=1.5), "frame seq 1 .*step: .* got 1.5"),
    "a step beyond every integer": (changed(step=2**70), "frame seq 1 .*step: "),
    "a negative seq": (changed(seq=-1), "frame seq -1 .*seq: .*got -1"),
    "an endless seq": (b'{"writer":"w","attempt":1,"frames":[{"seq":' + b"9" * 5000 + b"}]}", "number out of range"),
    "a time before time": (changed(time=-1), "frame seq 1 .*time: .* got -1"),
    "an over-long name": (changed(scalars={"x" * 200: 1}), "at most 128 characters"),
    "a name with a quote": (changed(scalars={'a"b': 1}), "String should match pattern"),
    "broken base64": (
        changed(layers={"token_similarity": {"shape": [3], "f32": "@@@"}}),
        "frame seq 1, layers 'token_similarity': expected base64 .*got text that is not base64",
    ),
    "base64 that ends early": (
        changed(layers={"token_similarity": {"shape": [3], "f32": "AACAPwAAAE"}}),
        "frame seq 1, layers 'token_similarity': expected base64",
    ),
    "fewer bytes than the shape says": (
        changed(layers={"token_similarity": {"shape": [3], "f32": "AACAPwAAAEA="}}),
        r"frame seq 1, layers 'token_similarity': expected 12 bytes for shape \[3\], got 8",
    ),
    "a negative shape": (changed(layers={"x": {"shape": [-3], "f32": ""}}), "frame seq 1 .*got -3"),
    "an array that is a number": (
        changed(layers={"x": 5}),
        "frame seq 1 .*layers 'x': Input should be an object, got 5",
    ),
    "too few layers": (
        changed(layers={"token_similarity": [1, 2]}),
        r"frame seq 1, layers 'token_similarity': expected shape \[3\] \(2 blocks, .*one entry more\), got \[2\]",
    ),
    "too many blocks": (
        changed(layers={"grad_norm": [1, 2, 3]}),
        r"frame seq 1, layers 'grad_norm': expected shape \[2\] \(2 blocks, one entry per block\), got \[3\]",
    ),
    "an unknown metric of neither length": (
        changed(layers={"mine": [1]}),
        r"frame seq 1, layers 'mine': expected shape \[2\] or \[3\] .*got \[1\]",
    ),
    "layers with two axes": (changed(layers={"mine": [[1, 2], [3, 4]]}), r"expected shape \[2\] or .*got \[2, 2\]"),
    "heads with one axis": (changed(heads={"x": [1, 2]}), r"heads 'x': expected shape \[2, heads\] .*got \[2\]"),
    "heads of too few blocks": (changed(heads={"x": [[1]]}), r"expected shape \[2, heads\] .*got \[1, 1\]"),
    "no heads": (changed(heads={"x": [[], []]}), r"expected shape \[2, heads\] .*got \[2, 0\]"),
    "ragged heads": (
        changed(heads={"x": [[1], [1, 2]]}),
        r"heads 'x': expected rows of one length, got lengths \[1, 2\]",
    ),
    "rows mixed with numbers": (changed(heads={"x": [[1], 1]}), "heads 'x': expected rows of one length"),
}


class TestABodyThatIsWrong:
    @pytest.mark.parametrize(("body", "detail"), BAD.values(), ids=BAD)
    def test_is_refused_with_its_reason_and_loses_nothing(self, api, run_id, body, detail):
        status, error, told = problem(api.post_raw(run_id, body))
        assert (status, error) == (422, "invalid_frame")
        assert re.search(detail, told), told
        assert "nothing of this body is stored" in told
        assert api.losses(run_id) == {0: 1.0}
        assert api.send_ok(run_id, [loss_frame(1)])["accepted"] == 1

    def test_is_refused_as_a_whole(self, api, run_id):
        wrong = GOOD | {"seq": 7, "step": 7, "layers": {"token_similarity": [1]}}
        status, error, told = problem(api.post_raw(run_id, body_of(GOOD, wrong, GOOD | {"seq": 8, "step": 8})))
        assert (status, error) == (422, "invalid_frame")
        assert "frame seq 7" in told
        assert api.get(f"/runs/{run_id}")["num_frames"] == 1

    @pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip", "x"])
    def test_is_refused_when_it_is_compressed_in_another_way_than_gzip(self, api, run_id, encoding):
        reply = api.post_raw(run_id, body_of(GOOD), **{"Content-Encoding": encoding})
        assert problem(reply)[:2] == (415, "unsupported_encoding")
        assert api.losses(run_id) == {0: 1.0}

    def test_is_taken_when_its_encoding_is_identity(self, api, run_id):
        assert api.post_raw(run_id, body_of(GOOD), **{"Content-Encoding": "identity"}).status_code == 200

    def test_is_refused_when_it_is_too_large(self, api, run_id):
        status, error, detail = problem(api.post_raw(run_id, b" " * (MAX_BODY_BYTES + 1)))
        assert (status, error) == (413, "body_too_large")
        assert f"at most {MAX_BODY_BYTES} bytes" in detail
        assert api.losses(run_id) == {0: 1.0}

    def test_is_taken_at_the_limit(self, api, run_id):
        body = frames_to_body("w", 1, [loss_frame(1).to_json()])
        assert api.post_raw(run_id, body + b" " * (MAX_BODY_BYTES - len(body))).status_code == 200

    def test_is_counted(self, api, run_id):
        api.post_raw(run_id, b"{")
        assert "tsemon_refused_bodies_total 1.0" in api.http.get("/metrics").text


class TestABodyWhoseClientHasLeft:
    @pytest.fixture
    def busy_writer(self, api, run_id):
        """Holds the thread that writes for the run until the test ends."""
        released = threading.Event()
        began = threading.Event()
        held = api.parts.store.write_soon(run_id, lambda writer: (began.set(), released.wait(60)))
        assert began.wait(30)
        yield released
        released.set()
        held.result(30)

    def test_is_not_stored_if_its_work_had_not_begun(self, api, run_id, busy_writer):
        assert self.send_and_leave(api, run_id, body_of(GOOD)) == 503
        busy_writer.set()
        api.send_ok(run_id, [loss_frame(9)])
        assert api.losses(run_id) == {0: 1.0, 9: 1.0}

    def test_is_stored_if_its_client_waits(self, api, run_id, busy_writer):
        with ThreadPoolExecutor(1) as other:
            sent = other.submit(api.post_raw, run_id, body_of(GOOD))
            time.sleep(2.5 * LOOK_EVERY_S)
            assert not sent.done()
            busy_writer.set()
            assert sent.result(30).json()["accepted"] == 1

    def test_is_not_read_if_it_is_large(self, api, run_id):
        large = body_of(GOOD) + b" " * SMALL_BYTES
        assert self.send_and_leave(api, run_id, large) == 503
        assert api.losses(run_id) == {0: 1.0}

    def send_and_leave(self, api, run_id, body):
        """The status that nobody reads."""
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope |= {"path": f"/api/v1/runs/{run_id}/frames", "query_string": b"", "headers": [(b"host", b"127.0.0.1")]}
        scope |= {"client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80), "root_path": "", "raw_path": None}
        coming = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent = []

        async def receive():
            return next(coming, {"type": "http.disconnect"})

        async def send(message):
            sent.append(message)

        loop().run(api.app(scope, receive, send))
        return sent[0]["status"]


def beat(api, run_id, step, attempt=1):
    body = {"writer": "w", "attempt": attempt, "step": step}
    assert api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json=body).status_code == 200


def whereabouts(api, run_id):
    """Where the process is, and the time of day since when."""
    run = api.get(f"/runs/{run_id}")
    return run["process_step"], run["stepped_at"] and run["stepped_at"][11:19]


class TestAFrame:
    def test_tells_where_the_process_is_as_a_heartbeat_does(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(20), loss_frame(10)])
        assert whereabouts(api, run_id) == (20, "00:16:40")
        now[0] = 1100.0
        api.send_ok(run_id, [loss_frame(15)])  # late, as after an outage
        assert whereabouts(api, run_id) == (20, "00:16:40")
        api.send_ok(run_id, [loss_frame(30)])
        assert whereabouts(api, run_id) == (30, "00:18:20")

    def test_of_an_older_attempt_does_not(self, api):
        run_id = api.register()
        api.register(resume_step=50)
        beat(api, run_id, 51, attempt=2)
        before = whereabouts(api, run_id)
        api.send_ok(run_id, [loss_frame(60)], attempt=1)
        assert whereabouts(api, run_id) == before


class TestAHeartbeat:
    def test_says_that_the_run_is_alive(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        now[0] = 2000.0
        reply = api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 3})
        assert reply.json() == {"alerts": [], "incidents": [], "live_attempts": []}
        assert api.get(f"/runs/{run_id}")["updated_at"] == "1970-01-01T00:33:20Z"

    def test_tells_where_the_process_is_and_since_when(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        assert whereabouts(api, run_id) == (None, None)
        seen = []
        for now[0], step in ((1000.0, 3), (1030.0, 3), (1060.0, 5), (1090.0, 4)):
            beat(api, run_id, step)
            seen.append(whereabouts(api, run_id))
        assert seen == [(3, "00:16:40"), (3, "00:16:40"), (5, "00:17:40"), (5, "00:17:40")]
        (listed,) = api.get("/runs")["runs"]
        assert (listed["process_step"], listed["stepped_at"]) == (5, "1970-01-01T00:17:40Z")

    def test_of_an_older_attempt_tells_nothing_of_the_run_but_that_it_is_live(self, start):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id = api.register()
        beat(api, run_id, 7)
        api.register()
        assert whereabouts(api, run_id) == (None, None)
        beat(api, run_id, 2, attempt=2)
        before = api.get(f"/runs/{run_id}")
        now[0] = 2000.0
        beat(api, run_id, 900, attempt=1)
        after = api.get(f"/runs/{run_id}")
        assert [[one.pop("is_live") for one in run["attempts"]] for run in (before, after)] == [
            [True, True],
            [True, False],
        ]
        assert after == before

    def test_of_an_unknown_attempt_is_refused(self, api):
        run_id = api.register()
        reply = api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 9, "step": 3})
        assert problem(reply)[:2] == (404, "unknown_attempt")

"""Limits on what comes: packed bodies, sizes, rates, and how much may be under way. Connections are in tests/faults."""

import asyncio
import gzip
import json
import resource
import subprocess
import sys
import threading
import time
import zlib
from functools import partial

import httpx
import pytest
from starlette.testclient import TestClient

from tests.databases import SqliteFile
from tsemon.errors import Busy, InvalidArgument, LimitReached
from tsemon.wire import MAX_BODY_BYTES, MAX_CONFIG_BYTES, MAX_FRAMES, Frame, frames_to_body
from tsemon_server.access.tokens import new_token
from tsemon_server.limits import rates
from tsemon_server.limits.admission import Admission, Visit
from tsemon_server.limits.buckets import MAX_KEYS, Buckets
from tsemon_server.limits.rates import Failures, Rates, address_of
from tsemon_server.limits.values import Limits, limits_from
from tsemon_server.main import create_app
from tsemon_server.services.trials import MAX_TRIED_FRAMES
from tsemon_server.settings import Settings, settings_from_environment
from tsemon_server.store import Store
from tsemon_server.store.ledger import runs as store_runs
from tsemon_server.store.series.sql import adding

from .conftest import loss_frame, problem

GZIP = {"Content-Encoding": "gzip"}
STRANGER = ("203.0.113.7", 50000)


@pytest.fixture
def database(tmp_path):
    """What is told here does not depend on the engine, unless a class says so."""
    return SqliteFile(tmp_path / "tsemon.db")


@pytest.fixture
def serve(database):
    """A service with limits of its own, and how whoever is at an address sees it."""
    opened = []

    def serve(client=STRANGER, **limits):
        app = create_app(Settings(database=database.url, limits=Limits(**limits)), rules=())
        opened.append(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False, client=client))
        return opened[-1].__enter__()

    yield serve
    for http in opened:
        http.__exit__(None, None, None)


@pytest.fixture
def run_id(api):
    return api.register()


def body(*steps):
    return frames_to_body("w", 1, [loss_frame(step).to_json() for step in steps])


class TestABodyInGzip:
    def test_is_taken(self, api, run_id):
        assert api.post_raw(run_id, gzip.compress(body(1, 2)), **GZIP).json()["accepted"] == 2
        assert api.losses(run_id) == {1: 1.0, 2: 1.0}

    def test_is_taken_by_every_route_that_takes_one(self, api):
        packed = gzip.compress(json.dumps({"run": "packed"}).encode())
        assert api.http.post("/api/v1/runs", content=packed, headers=GZIP).status_code == 200

    @pytest.mark.parametrize("level", [0, 1, 9])
    def test_may_be_of_any_level_up_to_the_last_byte_that_one_may_have(self, api, run_id, level):
        full = body(1) + b" " * (MAX_BODY_BYTES - len(body(1)))
        sent = gzip.compress(full, level)[:MAX_BODY_BYTES] if level else gzip.compress(full[: MAX_BODY_BYTES // 2], 0)
        assert api.post_raw(run_id, sent, **GZIP).status_code == 200

    def test_that_would_be_too_large_is_refused_while_it_is_unpacked(self, api, run_id):
        bomb = gzip.compress(b" " * 2**28, 9)  # a quarter of a gigabyte in a quarter of a megabyte
        assert len(bomb) < 300_000
        status, error, detail = problem(api.post_raw(run_id, bomb, **GZIP))
        assert (status, error) == (413, "body_too_large")
        assert f"at most {MAX_BODY_BYTES} bytes in a body, got at least " in detail
        assert int(detail.split("at least ")[1].split()[0]) < MAX_BODY_BYTES + 2**19

    def test_of_one_byte_too_many_is_refused(self, api, run_id):
        packed = gzip.compress(body(1) + b" " * (MAX_BODY_BYTES - len(body(1)) + 1))
        assert problem(api.post_raw(run_id, packed, **GZIP))[:2] == (413, "body_too_large")

    @pytest.mark.parametrize("cut", [1, 4, 8, 12, 40])
    def test_that_is_torn_is_refused(self, api, run_id, cut):
        status, error, detail = problem(api.post_raw(run_id, gzip.compress(body(1))[:-cut], **GZIP))
        assert (status, error) == (422, "invalid_argument")
        assert "gzip, which ends too early" in detail
        assert api.losses(run_id) == {} or api.get(f"/runs/{run_id}")["num_frames"] == 0

    @pytest.mark.parametrize(
        ("sent", "told"),
        [
            (gzip.compress(body(1)) + gzip.compress(body(2)), "one gzip member, got more behind it"),
            (gzip.compress(body(1)) + b"x", "one gzip member, got more behind it"),
            (gzip.compress(b"") * 1000, "one gzip member, got more behind it"),
            (body(1), "expected gzip, got something else"),
            (zlib.compress(body(1)), "expected gzip, got something else"),
            (gzip.compress(body(1))[:-8] + b"\0" * 8, "expected gzip, got something else"),
            (b"", "ends too early"),
        ],
        ids=["two members", "a byte behind it", "empty members", "no gzip", "zlib", "a wrong checksum", "nothing"],
    )
    def test_that_is_not_one_whole_member_is_refused(self, api, run_id, sent, told):
        status, error, detail = problem(api.post_raw(run_id, sent, **GZIP))
        assert (status, error) == (422, "invalid_argument")
        assert told in detail
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0

    def test_may_come_byte_by_byte(self, api, run_id):
        packed = gzip.compress(body(1))
        reply = api.http.post(
            f"/api/v1/runs/{run_id}/frames", content=(packed[at : at + 1] for at in range(len(packed))), headers=GZIP
        )
        assert reply.json()["accepted"] == 1


class TestSizes:
    def test_of_bodies_are_small_where_little_is_to_be_said(self, api, run_id):
        long = json.dumps({"writer": "w", "attempt": 1, "step": 1}).encode() + b" " * 2**16
        reply = api.http.post(f"/api/v1/runs/{run_id}/heartbeat", content=long)
        status, error, detail = problem(reply)
        assert (status, error) == (413, "body_too_large")
        assert "at most 65536 bytes" in detail

    def test_that_are_announced_with_thousands_of_digits_are_read_as_large(self, api, run_id):
        reply = api.post_raw(run_id, b"x", **{"Content-Length": "9" * 5000})
        assert problem(reply)[:2] == (413, "body_too_large")

    def test_of_a_config_end_at_one_mebibyte(self, api):
        fits = {"x": "ü" * ((MAX_CONFIG_BYTES - 10) // 2)}
        api.register(config=fits)
        reply = api.http.post("/api/v1/runs", json={"run": "r", "config": {"x": "ü" * (MAX_CONFIG_BYTES // 2)}})
        status, error, detail = problem(reply)
        assert (status, error) == (422, "invalid_argument")
        assert f"config: It should take at most {MAX_CONFIG_BYTES} bytes" in detail

    def test_of_a_body_of_frames_end_at_so_many_frames(self, api, run_id):
        frames = [Frame(seq, 0, 1.0).to_json() for seq in range(MAX_FRAMES + 1)]
        assert api.post_raw(run_id, frames_to_body("w", 1, frames[:-1])).json()["accepted"] == MAX_FRAMES
        status, error, detail = problem(api.post_raw(run_id, frames_to_body("w", 1, frames)))
        assert (status, error) == (422, "invalid_frame")
        assert f"at most {MAX_FRAMES} items" in detail

    @pytest.mark.parametrize(
        ("layers", "num"),
        [('"x":' * 2**18, "262144 keys"), ("[" * (2**18 + 1), "262144 lists"), ("1," * (2**21 + 1), "2097152 values")],
    )
    def test_of_bodies_are_told_by_what_they_hold_too(self, api, run_id, layers, num):
        status, error, detail = problem(api.post_raw(run_id, b'{"a":' + layers.encode()))
        assert (status, error) == (413, "body_too_large")
        assert f"at most {num} in a body, got about" in detail

    def test_of_a_trial_of_rules_end_at_so_many_frames(self, api):
        frames = [{"seq": seq, "step": seq, "time": 1} for seq in range(MAX_TRIED_FRAMES + 1)]
        status, error, detail = problem(api.http.post("/api/v1/rules/test", json={"frames": frames}))
        assert (status, error) == (422, "invalid_argument")
        assert f"at most {MAX_TRIED_FRAMES} items" in detail
        assert api.http.post("/api/v1/rules/test", json={"frames": frames[:-1]}).json()["num_frames"] == len(frames) - 1

    def test_of_a_trial_on_a_stored_run_too(self, api, run_id, monkeypatch):
        api.send_ok(run_id, [loss_frame(step) for step in range(3)])
        monkeypatch.setattr("tsemon_server.services.trials.MAX_TRIED_STORED_FRAMES", 2)
        status, error, detail = problem(api.http.post("/api/v1/rules/test", json={"run_id": run_id}))
        assert (status, error) == (422, "invalid_argument")
        assert "a run of at most 2 frames, got one of 3" in detail
        assert "tsemon replay" in detail

    def test_of_a_heat_map_of_a_deep_model_are_paid_with_columns(self, api):
        run_id = api.register(num_blocks=10_000)
        layers = {"grad_norm": [1.0] * 10_000}
        for start in (0, 100):
            frames = [json.dumps({"seq": s, "step": s, "time": 1, "layers": layers}) for s in range(start, start + 100)]
            assert api.post_raw(run_id, frames_to_body("w", 1, frames)).status_code == 200
        found = api.get(f"/runs/{run_id}/heatmap", metric="grad_norm", columns=200)
        assert found["layers"] == 10_000
        assert 10 <= len(found["step"]) <= 2**18 // 10_000

    @pytest.mark.parametrize(
        ("path", "status", "error"),
        [
            ("/runs?project=" + "x" * 15_000, 200, None),
            ("/runs?project=" + "x" * 17_000, 414, "uri_too_long"),
            ("/runs/" + "x" * 17_000, 414, "uri_too_long"),
            ("/runs?" + "project=&" * 1023, 200, None),
            ("/runs?" + "project=&" * 1024, 414, "uri_too_long"),
            ("/runs?limit=1001", 422, "invalid_argument"),
            ("/runs?limit=0", 422, "invalid_argument"),
            ("/runs?limit=" + "9" * 5000, 422, "invalid_argument"),
            ("/alerts?cursor=" + "x" * 1001, 422, "invalid_argument"),
        ],
    )
    def test_of_urls_and_pages_are_bounded(self, api, path, status, error):
        reply = api.http.get(f"/api/v1{path}")
        assert reply.status_code == status
        assert error is None or problem(reply)[1] == error
        assert reply.headers["x-content-type-options"] == "nosniff"

    def test_of_heads_are_bounded(self, api):
        headers = {f"X-{number}": "x" * 1000 for number in range(70)}
        assert problem(api.http.get("/api/v1/runs", headers=headers))[:2] == (431, "headers_too_large")


class TestWhatATokenForFramesCannotFill:
    @pytest.fixture
    def database(self, request, tmp_path):
        return SqliteFile(tmp_path / "tsemon.db")

    def test_metrics_of_a_run_have_at_most_so_many_names(self, api, run_id, monkeypatch):
        monkeypatch.setattr(adding, "MAX_METRICS", 3)
        sent = [Frame(seq, seq, 1.0, {f"m{seq}": 1.0}) for seq in range(5)]
        api.send_ok(run_id, sent[:3])
        status, error, detail = problem(api.send(run_id, sent[3:]))
        assert (status, error) == (422, "invalid_frame")
        assert "at most 3 different names in a run, got 5" in detail
        assert api.send_ok(run_id, sent[:3])["duplicates"] == 3
        assert api.send_ok(run_id, [Frame(9, 9, 1.0, {"m0": 2.0, "m2": 3.0})])["accepted"] == 1
        assert api.get(f"/runs/{run_id}")["metrics"]["scalars"] == ["m0", "m1", "m2"]

    def test_frames_of_a_run_have_at_most_so_many_sets_of_them(self, api, run_id, monkeypatch):
        monkeypatch.setattr(adding, "MAX_SLOTS", 5)
        api.send_ok(run_id, [Frame(0, 0, 1.0, {"a": 1.0, "b": 1.0}), Frame(1, 1, 1.0, {"a": 1.0, "c": 1.0})])
        status, error, detail = problem(api.send(run_id, [Frame(2, 2, 1.0, {"b": 1.0, "c": 1.0})]))
        assert (status, error) == (422, "invalid_frame")
        assert "together they have 6 entries, at most 5 are kept" in detail
        assert api.send_ok(run_id, [Frame(3, 3, 1.0, {"a": 2.0, "b": 2.0})])["accepted"] == 1

    def test_writers_of_an_attempt_are_at_most_so_many(self, api, run_id, monkeypatch):
        monkeypatch.setattr(adding, "MAX_WRITERS", 2)
        for writer in ("a", "b", "a"):
            api.send(run_id, [loss_frame(1)], writer=writer)
        status, error, detail = problem(api.send(run_id, [loss_frame(1)], writer="c"))
        assert (status, error) == (409, "limit_reached")
        assert "has 2 writers" in detail
        assert api.send_ok(run_id, [loss_frame(2)], writer="b")["accepted"] == 1
        assert api.get(f"/runs/{run_id}")["num_frames"] == 3

    def test_attempts_of_a_run_are_at_most_so_many(self, api, monkeypatch):
        monkeypatch.setattr(store_runs, "MAX_ATTEMPTS", 2)
        for key in ("one", "two", "one"):
            api.register(attempt_key=key)
        reply = api.http.post("/api/v1/runs", json={"run": "gpt", "attempt_key": "three"})
        assert problem(reply)[:2] == (409, "limit_reached")
        assert api.get(f"/runs/{api.register(attempt_key='two')}")["attempt"] == 2

    def test_runs_are_at_most_so_many_until_some_are_deleted(self, serve):
        http = serve(client=("testclient", 1), runs=2)
        first, second, third = (http.post("/api/v1/runs", json={"run": name}) for name in "abc")
        assert (first.status_code, second.status_code) == (200, 200)
        status, error, detail = problem(third)
        assert (status, error) == (409, "limit_reached")
        assert "TSEMON_LIMIT_RUNS" in detail
        assert http.post("/api/v1/runs", json={"run": "a"}).json()["attempt"] == 2
        http.delete(f"/api/v1/runs/{first.json()['run_id']}")
        assert http.post("/api/v1/runs", json={"run": "c"}).status_code == 200

    def test_runs_of_one_project_leave_room_for_those_of_others(self, serve):
        http = serve(client=("127.0.0.1", 1), runs=10, project_runs=2)

        def register(project, run):
            return http.post("/api/v1/runs", json={"project": project, "run": run})

        assert [register("a", name).status_code for name in "xyx"] == [200, 200, 200]
        status, error, detail = problem(register("a", "z"))
        assert (status, error) == (409, "limit_reached")
        assert "the project 'a' has 2 runs" in detail
        assert "TSEMON_LIMIT_PROJECT_RUNS" in detail
        assert register("b", "x").status_code == 200
        assert register("a", "x").json()["attempt"] == 3

    def test_what_a_process_remembers_of_them_is_forgotten_beyond_a_number(self, database, monkeypatch):
        monkeypatch.setattr(adding, "MOST_KNOWN", 2)
        store = Store(database.url)
        with store.write() as writer:
            given = {"blocks": [], "config": None, "tags": None, "resume_step": None, "attempt_key": None}
            run_id = writer.runs.register("p", "r", **given).run_id
        for seq in range(7):
            with store.write() as writer:
                assert len(writer.frames.add(run_id, 1, f"w{seq}", [Frame(seq, seq, 1.0, {f"m{seq}": 1.0})]).frames)
            assert len(store._series._stored.layouts) <= 2
            assert len(store._series._stored.streams) <= 2
        store.close()


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class TestABucket:
    @pytest.fixture
    def clock(self):
        return Clock()

    def test_gives_what_it_holds_and_then_what_comes(self, clock):
        buckets = Buckets(2, 3, clock)
        assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
        clock.now += 0.5
        assert [buckets.take("a"), buckets.take("a")] == [0, 0.5]
        clock.now += 100
        assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]

    def test_is_each_ones_own(self, clock):
        buckets = Buckets(1, 1, clock)
        assert [buckets.take("a"), buckets.take("b"), buckets.take("a")] == [0, 0, 1]

    def test_can_be_in_debt_up_to_what_it_holds(self, clock):
        buckets = Buckets(1, 10, clock)
        buckets.charge("a", 1e6)
        assert buckets.take("a") == 11
        clock.now += 11
        assert buckets.take("a") == 0

    def test_is_forgotten_where_there_are_many_and_it_was_used_long_ago(self, clock):
        buckets = Buckets(1, 1, clock)
        for number in range(MAX_KEYS + 5):
            buckets.take(str(number))
            buckets.take("often")
        assert len(buckets._levels) == MAX_KEYS
        assert buckets.take("often") > 0
        assert buckets.take("0") == 0


class TestRates:
    def test_are_counted_for_each_address(self, serve):
        http = serve(reads_per_s=1)
        replies = [http.get("/api/v1/runs") for _ in range(30)]
        refused = [reply for reply in replies if reply.status_code != 200]
        assert 10 <= len(replies) - len(refused) < 25
        status, error, detail = problem(refused[0])
        assert (status, error) == (429, "too_many_requests")
        assert "203.0.113.7 asks too often; come again in" in detail
        assert refused[0].headers["retry-after"] == "1"

    def test_of_reading_and_writing_do_not_get_in_each_others_way(self, serve):
        http = serve(reads_per_s=1)
        assert any(http.get("/api/v1/runs").status_code == 429 for _ in range(300))
        assert http.post("/api/v1/runs", json={"run": "r"}).status_code == 200

    def test_count_frames_and_bytes_when_they_have_come(self, serve):
        http = serve(writes_per_s=10)
        run_id = http.post("/api/v1/runs", json={"run": "r"}).json()["run_id"]
        frames = f"/api/v1/runs/{run_id}/frames"
        assert http.post(frames, content=body(*range(150))).json()["accepted"] == 150
        refused = http.post(frames, content=body(1000))
        assert problem(refused)[:2] == (429, "too_many_requests")
        assert 3 <= int(refused.headers["retry-after"]) <= 6  # 1 + 1 + 149 of 100, at 10 a second

    def test_count_nobody_on_this_machine(self, serve):
        for client in (("127.0.0.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1)):
            http = serve(client=client, reads_per_s=1)
            assert {http.get("/api/v1/runs").status_code for _ in range(30)} == {200}

    @pytest.mark.parametrize(
        ("host", "known_as"),
        [
            ("203.0.113.7", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("127.0.0.1", ""),
            ("::1", ""),
            ("203.0.113.7:5678", "203.0.113.7"),
            ("[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2:3:4:5:6]", "2001:db8:1:2::/64"),
            ("127.0.0.1:80", ""),
            ("[::1]:80", ""),
            ("", ""),
            ("unknown", "unknown"),
            ("203.0.113.7, 203.0.113.8", "203.0.113.7, 203.0.113.8"),
            ("x" * 500, "x" * 100),
        ],
    )
    def test_know_an_address_of_the_new_kind_by_its_network(self, host, known_as):
        assert address_of({"client": (host, 1)}) == known_as

    def test_count_whoever_has_an_address_that_is_none(self, serve):
        http = serve(client=("unknown", 1), reads_per_s=1)
        assert 429 in {http.get("/api/v1/runs").status_code for _ in range(30)}

    def test_of_50_runs_at_5_frames_a_second_are_never_met(self):
        clock, defaults = Clock(), Limits()
        buckets = Buckets(defaults.writes_per_s, defaults.writes_per_s * 10, clock)
        for _ in range(60 * 250):  # a minute of frames of 300 KiB each, and of a heartbeat after each
            assert buckets.take("t") == 0
            buckets.charge("t", 300 * 1024 // 2**16)
            assert buckets.take("t") == 0
            clock.now += 1 / 250

    def test_are_those_of_a_token_where_there_is_one(self):
        class Access:
            def __init__(self, token_id):
                self.token_id = token_id

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        counted = Rates(app, Limits(reads_per_s=1))

        async def ask(token_id):
            said = []

            async def send(message):
                said.append(message.get("status"))

            state = {"access": Access(token_id), "visit": Visit(Admission(app, Limits()))}
            scope = {"type": "http", "method": "GET", "client": ("127.0.0.1", 1), "state": state}
            await counted(scope, None, send)
            return said[0]

        statuses = [asyncio.run(ask("a")) for _ in range(30)]
        assert (statuses[0], statuses[-1]) == (200, 429)
        assert asyncio.run(ask("b")) == 200


class TestWrongTokens:
    @pytest.fixture
    def http(self, database, monkeypatch):
        """A service that asks for tokens, as somebody sees it who has none. All comes in the same moment."""
        monkeypatch.setattr(rates, "Buckets", partial(Buckets, clock=lambda: 0.0))
        app = create_app(Settings(database=database.url, tokens=True, limits=Limits(failures_per_s=1)), rules=())
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False, client=STRANGER) as http:
            yield http

    @pytest.fixture
    def good(self, http):
        token = new_token()
        http.app.state.parts.store.tokens.add(
            token.token_id, name="x", digest=token.digest, scopes=("read",), project=None, expires_at=None
        )
        return token.text

    def ask(self, http, text=None):
        return http.get("/api/v1/runs", headers={} if text is None else {"Authorization": f"Bearer {text}"})

    def exhaust(self, http):
        while (reply := self.ask(http, new_token().text)).status_code == 401:
            pass
        return reply

    def test_are_answered_otherwise_after_a_while(self, http):
        answers = [self.ask(http, new_token().text) for _ in range(100)]
        assert [reply.status_code for reply in answers] == [401] * 60 + [429] * 40
        refused = answers[60:]
        status, error, detail = problem(refused[0])
        assert (status, error) == (429, "too_many_requests")
        assert "too many requests without a valid token from 203.0.113.7" in detail
        assert refused[0].headers["retry-after"] == "1"

    def test_are_not_even_looked_up_then(self, http, monkeypatch):
        self.exhaust(http)
        monkeypatch.setattr(http.app.state.parts.store.tokens, "find", None)
        assert self.ask(http, new_token().text).status_code == 429
        assert self.ask(http, "nonsense").status_code == 429

    def test_shut_out_nobody_with_a_token_that_was_good_before(self, http, good):
        assert self.ask(http, good).status_code == 200
        self.exhaust(http)
        assert self.ask(http, good).status_code == 200
        assert http.get("/healthz").status_code == 200
        assert http.get("/").status_code == 200

    def test_shut_out_nobody_with_a_token_that_this_process_has_not_seen(self, http, good):
        """After a restart, or in another worker, nobody behind one address would get in while somebody floods."""
        self.exhaust(http)
        assert {self.ask(http, new_token().text).status_code for _ in range(50)} == {429}
        assert self.ask(http, good).status_code == 200

    def test_shut_out_a_token_that_was_just_made_for_a_second_at_most(self, http, monkeypatch):
        self.exhaust(http)
        tokens = http.app.state.parts.store.tokens
        monkeypatch.setattr(rates, "IDS_KEPT_S", 3600)
        assert self.ask(http, new_token().text).status_code == 429
        made = new_token()
        tokens.add(made.token_id, name="x", digest=made.digest, scopes=("read",), project=None, expires_at=None)
        assert self.ask(http, made.text).status_code == 429
        monkeypatch.setattr(rates, "IDS_KEPT_S", 0)
        assert self.ask(http, made.text).status_code == 200

    def test_read_the_ids_of_all_tokens_once_a_second_at_most(self):
        reads = []

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 401, "headers": []})

        def ids():
            reads.append(time.monotonic())
            return {"good"}

        failures = Failures(app, Limits(), lambda headers: headers["authorization"], ids)
        limits = Admission(failures, Limits())

        async def send(_):
            pass

        async def flood():
            for number in range(500):
                headers = [(b"authorization", b"%d" % number)]
                path = {"path": "/", "query_string": b""}
                await limits({"type": "http", "client": STRANGER, "headers": headers, **path}, None, send)

        asyncio.run(flood())
        assert len(reads) <= 2 + reads[-1] - reads[0]

    def test_are_counted_in_a_body_too(self, http, monkeypatch):
        def sign_in():
            return http.post("/api/v1/session", json={"token": new_token().text}).status_code

        assert [sign_in() for _ in range(100)] == [401] * 60 + [429] * 40
        monkeypatch.setattr(http.app.state.parts.store.tokens, "find", None)
        assert sign_in() == 429

    def test_do_not_keep_others_from_signing_in(self, http, good):
        self.exhaust(http)
        assert http.post("/api/v1/session", json={"token": good}).status_code == 200

    def test_shut_out_no_other_address(self, http, good):
        self.exhaust(http)
        other = TestClient(http.app, base_url="http://127.0.0.1", client=("203.0.113.8", 1))
        assert self.ask(other, good).status_code == 200
        assert self.ask(other, new_token().text).status_code == 401

    def test_do_not_let_in_a_good_id_with_another_secret(self, http, good):
        assert self.ask(http, good).status_code == 200
        self.exhaust(http)
        assert self.ask(http, good[:-4] + "AAAA").status_code == 429

    def test_that_are_none_are_counted_too(self, http):
        assert [self.ask(http).status_code for _ in range(100)].count(429) >= 20


class TestWhatIsUnderWay:
    """Requests that hang, because a body does not end or a database does not answer."""

    @pytest.fixture
    def hang(self):
        """How many of the requests that never end are answered at once, and with what."""

        async def statuses(app, path, number, client=STRANGER, chunk=b" ", headers=None):
            statuses, release, num_hanging = [], asyncio.Event(), 0

            async def endless():
                nonlocal num_hanging
                yield chunk
                num_hanging += 1
                await release.wait()

            transport = httpx.ASGITransport(app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

                async def ask():
                    reply = await http.post(path, content=endless(), headers=headers)
                    statuses.append((reply.status_code, reply.json().get("error")))

                asked = [asyncio.ensure_future(ask()) for _ in range(number)]
                async with asyncio.timeout(60):
                    while len(statuses) + num_hanging < number:
                        await asyncio.sleep(0.01)
                answered = list(statuses)
                healthy = (await http.get("/healthz")).status_code
                release.set()
                await asyncio.gather(*asked)
                after = (await http.post("/api/v1/runs", json={"run": "after"})).status_code
            return answered, healthy, after

        return lambda *args, **kwargs: asyncio.run(statuses(*args, **kwargs))

    def app(self, database, **limits):
        return create_app(Settings(database=database.url, limits=Limits(**limits)), rules=())

    def test_is_at_most_so_many_requests(self, database, hang):
        answered, healthy, after = hang(self.app(database, requests=5, requests_of_one=100), "/api/v1/runs", 8)
        assert answered == [(503, "busy")] * 3
        assert (healthy, after) == (200, 200)

    def test_is_at_most_so_many_of_one_address(self, database, hang):
        answered, _, after = hang(self.app(database, requests_of_one=5), "/api/v1/runs", 8)
        assert answered == [(429, "too_many_requests")] * 3
        assert after == 200

    def test_is_at_most_half_of_the_trials_of_rules_of_one_address(self, database, hang):
        answered, _, _ = hang(self.app(database, slow_requests=6), "/api/v1/rules/test", 5)
        assert answered == [(429, "too_many_requests")] * 2

    def test_holds_at_most_so_many_bytes(self, database, hang):
        app = self.app(database, bytes_held=3 * 2**20 + 1000)
        answered, _, after = hang(app, "/api/v1/runs", 5, chunk=b" " * 2**20, client=("127.0.0.1", 1))
        assert answered == [(503, "busy")] * 2
        assert after == 200

    def test_holds_at_most_half_of_them_for_one_address(self, database, hang):
        app = self.app(database, bytes_held=4 * 2**20 + 1000)
        answered, _, after = hang(app, "/api/v1/runs", 5, chunk=b" " * 2**20)
        assert answered == [(503, "busy")] * 3
        assert after == 200

    def test_holds_what_is_announced_before_it_comes(self, database, hang):
        app = self.app(database, bytes_held=2500)
        announced = {"headers": {"Content-Length": "1000"}, "client": ("127.0.0.1", 1)}
        answered, _, after = hang(app, "/api/v1/runs", 5, **announced)
        assert answered == [(503, "busy")] * 3
        assert after == 200

    def test_for_which_there_is_never_room_are_to_be_smaller(self, serve):
        """Whoever is told that the service is busy sends the same again, for ever."""
        http = serve(client=("testclient", 1), bytes_held=1000)
        refused = http.post("/api/v1/runs", content=b" " * 501)
        assert problem(refused)[:2] == (413, "body_too_large")
        assert "expected at most 500 bytes in a body" in refused.json()["detail"]
        assert http.post("/api/v1/runs", json={"run": "r"}).status_code == 200

    def test_waits_for_the_database_in_a_short_queue(self, serve, database):
        http = serve(client=("testclient", 1), commits=2)
        run_id = http.post("/api/v1/runs", json={"run": "r"}).json()["run_id"]
        frames = f"/api/v1/runs/{run_id}/frames"
        http.post(frames, content=body(0))
        gate, began = threading.Event(), threading.Event()

        def block(_):
            began.set()
            gate.wait(20)

        store = http.app.state.parts.store
        store.write_soon(run_id, block)
        assert began.wait(20)
        waiting = [store.write_soon(run_id, lambda _: None) for _ in range(2)]
        refused = http.post(frames, content=body(1))
        assert problem(refused)[:2] == (503, "busy")
        assert refused.headers["retry-after"] == "1"
        assert http.get(f"/api/v1/runs/{run_id}").status_code == 200
        gate.set()
        for one in waiting:
            one.result(20)
        assert http.post(frames, content=body(1)).json()["accepted"] == 1

    def test_shares_transactions_of_a_bounded_size(self, database):
        """So that a writer with many frames does not let others wait for more than a few of its bodies."""
        store = Store(database.url)
        gate, began, num_begun = threading.Event(), threading.Event(), []

        def block(_):
            began.set()
            gate.wait(20)

        def note(writer):
            num_begun.append(writer)  # not its id, which the next one may have

        store.write_soon("a", block)
        assert began.wait(20)
        done = [store.write_soon("a", note, 600) for _ in range(4)]
        gate.set()
        for one in done:
            one.result(20)
        assert [num_begun.count(writer) for writer in dict.fromkeys(num_begun)] == [2, 2]
        store.close()


class TestLimits:
    def test_come_from_the_environment(self):
        found = settings_from_environment({"TSEMON_LIMIT_CONNECTIONS": "7", "TSEMON_LIMIT_BYTES_HELD": "1000000"})
        assert found.limits == Limits(connections=7, bytes_held=1_000_000)

    @pytest.mark.parametrize("value", ["", "0", "-1", "x", "1.5", "9" * 5000, "٣"])
    def test_refuse_what_is_no_number(self, value):
        with pytest.raises(InvalidArgument, match="TSEMON_LIMIT_RUNS must be a whole number from 1"):
            limits_from({"TSEMON_LIMIT_RUNS": value})

    def test_refuse_a_name_that_is_none(self):
        with pytest.raises(InvalidArgument, match=r"no limit TSEMON_LIMIT_RUN; there are TSEMON_LIMIT_CONNECTIONS, "):
            limits_from({"TSEMON_LIMIT_RUN": "1"})

    def test_of_connections_fit_the_files_that_a_process_may_open(self):
        code = (
            "import resource, sys\n"
            "from tsemon_server.limits.connections import num_connections\n"
            "from tsemon_server.limits.values import Limits\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
            "print(num_connections(Limits()), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        )

        def found(soft, hard):
            done = subprocess.run([sys.executable, "-c", code, soft, hard], capture_output=True, text=True, check=True)
            return done.stdout.split(), done.stderr

        assert found("256", "4096") == (["1000", "1768"], "")
        (num_connections, soft), told = found("256", "1024")
        assert (num_connections, soft) == ("256", "1024")
        assert "1024 open files are allowed: at most 256 connections are taken, not 1000" in told
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024  # of this process


class TestErrors:
    def test_tell_what_to_do_with_them(self):
        assert (Busy("x").status, Busy("x").retry_after_s, LimitReached("x").status) == (503, 1.0, 409)

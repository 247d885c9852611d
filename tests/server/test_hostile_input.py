"""Whatever a client sends is stored and given back as it is, or refused with a sentence; on either engine."""

import base64
import json
import time
from urllib.parse import quote

import psutil
import pytest

from tests.databases import SqliteFile
from tsemon.wire import MAX_BODY_BYTES, frames_to_body

from .conftest import loss_frame, problem

TEXTS = {
    "SQL": "x'; DROP TABLE run; --",
    "more SQL": '") UNION SELECT digest FROM token /*',
    "patterns": "%_*?[a-z]\\",
    "HTML": "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;",
    "a format": "%s%n{0}{run.__class__}${jndi:ldap://x}",
    "a path": "../../../../etc/passwd",
    "letters beyond the first plane": "\U0001f9e8\U00010ffff",
    "letters that turn the line": "\u202eabc\u2066",
    "letters that join": "e\u0301\u200d\ufeff",
    "a zero": "a\x00b",
    "control characters": "a\r\nSet-Cookie: x=1\x1b[31m\x7f",
    "separators of lines": "a\u2028b\u2029c\x85d",
    "half a character": "a\ud800b",
    "the other half": "\udfff",
    "many characters": "x" * 5000,
    "nothing": "",
}


@pytest.fixture(params=TEXTS.values(), ids=TEXTS)
def text(request):
    return request.param


def sent(body):
    """JSON in which half a character is an escape, as JSON allows and Unicode does not."""
    return json.dumps(body).encode()


def is_whole(text):
    return text == text.encode("utf-8", "ignore").decode()


def as_query(text):
    return quote(text, safe="", errors="surrogatepass")


def check_refused(reply, *statuses):
    status, _, detail = problem(reply)
    assert status in statuses, (status, detail)
    assert len(detail) < 1000


class TestTextInABody:
    def test_of_a_registration_is_given_back_or_refused(self, api, text):
        fields = {
            "project": lambda run: run["project"],
            "run": lambda run: run["run"],
            "tags": lambda run: run["tags"][0],
            "blocks": lambda run: run["blocks"][0],
            "config": lambda run: run["config"]["key"],
            "config key": lambda run: next(iter(run["config"])),
            "config depth": lambda run: run["config"]["a"][0]["b"],
            "attempt_key": None,
        }
        given = {
            "tags": [text],
            "blocks": [text],
            "config": {"key": text},
            "config key": {text: 1},
            "config depth": {"a": [{"b": text}]},
        }
        for number, (field, of) in enumerate(fields.items()):
            body = {"run": f"r{number}", field.split()[0]: given.get(field, text)}
            reply = api.http.post("/api/v1/runs", content=sent(body))
            if reply.status_code != 200:
                check_refused(reply, 422)
                assert not is_whole(text) or field not in ("config", "config depth"), "a config holds any text"
                continue
            found = api.get(f"/runs/{reply.json()['run_id']}")
            assert of is None or of(found) == text
        assert isinstance(api.get("/runs")["runs"], list)

    def test_of_a_change_is_given_back_or_refused(self, api, text):
        run_id = api.register()
        for field, value in (("tags", [text]), ("config", {text: text}), ("state", text)):
            reply = api.http.patch(f"/api/v1/runs/{run_id}", content=sent({field: value}))
            if reply.status_code == 200:
                assert api.get(f"/runs/{run_id}")[field] == value
            else:
                check_refused(reply, 422)

    def test_of_frames_is_refused(self, api, text):
        """Names are of few kinds of characters, so none of these is one."""
        run_id = api.register()
        good = {"seq": 0, "step": 0, "time": 1}
        for frames in (
            {"writer": text, "attempt": 1, "frames": [good]},
            {"writer": "w", "attempt": 1, "frames": [good | {"scalars": {text: 1}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"scalars": {"loss": text}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"layers": {text: [1, 1]}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"layers": {"x": [text, 1]}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"heads": {text: [[1], [1]]}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"heads": {"x": {"shape": [1, 1], "f32": text}}}]},
            {"writer": "w", "attempt": 1, "frames": [good | {text: 1}]},
            {"writer": "w", "attempt": 1, "frames": [good | {"seq": text}]},
            {"writer": "w", "attempt": 1, "frames": [text]},
            {"writer": "w", "attempt": text, "frames": []},
            {text: 1},
            text,
        ):
            check_refused(api.post_raw(run_id, sent(frames)), 422)
        heartbeat = {"writer": text, "attempt": 1, "step": 1}
        check_refused(api.http.post(f"/api/v1/runs/{run_id}/heartbeat", content=sent(heartbeat)), 422)
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0

    def test_of_people_is_given_back_or_refused(self, api, text):
        alert_id = api.open_alert(api.register())
        for field in ("by", "note"):
            body = {"by": "me"} | {field: text}
            reply = api.http.post(f"/api/v1/alerts/{alert_id}/ack", content=sent(body))
            if reply.status_code == 200:
                assert reply.json()[{"by": "acknowledged_by", "note": "note"}[field]] == text
                api.http.delete(f"/api/v1/alerts/{alert_id}/ack")
            else:
                check_refused(reply, 422)
        good = {"rule": "x", "until": "2999-01-31T12:00:00Z", "created_by": "me"}
        for field in ("rule", "run", "project", "family", "until", "created_by", "reason"):
            reply = api.http.post("/api/v1/silences", content=sent(good | {field: text}))
            if reply.status_code == 200:
                assert reply.json()[field] == text
                assert text in [silence[field] for silence in api.get("/silences")["silences"]]
                assert isinstance(api.get("/alerts")["alerts"], list)  # each is held against each silence
            else:
                check_refused(reply, 422)

    def test_of_rules_is_given_back_or_refused(self, api, text):
        check_refused(api.http.post("/api/v1/rules/test", content=sent({"run_id": text})), 404, 422)
        check_refused(api.http.post("/api/v1/rules/test", content=sent({"frames": [], "rules": text})), 422)
        check_refused(api.http.put("/api/v1/rules", content=text.encode(errors="surrogatepass")), 422)
        check_refused(api.http.put("/api/v1/rules/x", content=sent({"name": "x", "family": text})), 422)
        check_refused(api.http.put("/api/v1/rules/x", content=sent({text: text})), 422)


class TestTextInAUrl:
    def test_of_a_query_finds_nothing_or_is_refused(self, api, text):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(1)])
        api.open_alert(run_id)
        asked = {
            "/runs": ("project", "run", "state", "order", "limit", "cursor"),
            "/alerts": (
                "state", "run", "project", "rule", "family", "severity", "acknowledged", "silenced", "since",
                "limit", "cursor",
            ),
            f"/runs/{run_id}/series": ("metric", "layer", "head", "from_step", "to_step", "points", "attempt"),
            f"/runs/{run_id}/heatmap": ("metric", "columns", "from_step", "attempt"),
            f"/runs/{run_id}/export": ("format", "metric", "attempt"),
            "/compare": ("run", "metric", "layer"),
            "/notifications": ("receiver", "status", "limit", "cursor"),
        }  # fmt: skip
        for path, names in asked.items():
            for name in names:
                rest = "" if name == "metric" or ("series" not in path and "compare" not in path) else "&metric=loss"
                rest += f"&run={run_id}" if path == "/compare" and name != "run" else ""
                reply = api.http.get(f"/api/v1{path}?{name}={as_query(text)}{rest}")
                assert reply.status_code in (200, 404, 422), (path, name, reply.text)
                if reply.status_code != 200:
                    problem(reply)
        assert isinstance(api.get("/runs")["runs"], list)

    def test_of_a_path_is_not_found_or_refused(self, api, text):
        at = as_query(text) or "%20"
        for method, path in (
            ("GET", f"/runs/{at}"),
            ("PATCH", f"/runs/{at}"),
            ("DELETE", f"/runs/{at}"),
            ("POST", f"/runs/{at}/frames"),
            ("POST", f"/runs/{at}/heartbeat"),
            ("GET", f"/runs/{at}/series?metric=loss"),
            ("GET", f"/runs/{at}/export"),
            ("GET", f"/runs/{at}/rules"),
            ("GET", f"/alerts/{at}"),
            ("POST", f"/alerts/{at}/ack"),
            ("DELETE", f"/silences/{at}"),
            ("GET", f"/rules/{at}"),
            ("DELETE", f"/rules/{at}"),
            ("GET", f"/{at}"),
        ):
            content = {
                "frames": frames_to_body("w", 1, [loss_frame(0).to_json()]),
                "heartbeat": sent({"writer": "w", "attempt": 1, "step": 1}),
                "ack": sent({"by": "me"}),
            }.get(path.rpartition("/")[2], b"{}")
            reply = api.http.request(method, f"/api/v1{path}", content=content if method in ("POST", "PATCH") else None)
            check_refused(reply, 404, 405, 422)

    def test_of_headers_is_no_matter(self, api):
        for name in ("Content-Type", "Accept", "Cookie", "Authorization", "If-None-Match", "X-Request-Id", "Forwarded"):
            for value in (b"\xff\xfe", b"'; DROP TABLE run; --", b"<script>", b"%s%n", b"=;=;\x7f"):
                headers = [(name.encode(), value), (b"Host", b"localhost")]
                assert api.http.get("/api/v1/runs", headers=headers).status_code in (200, 400)


HUGE = "9" * 4000
NUMBERS = [
    "1e999",
    "-1e999",
    HUGE,
    f"-{HUGE}",
    "9" * 400_000,
    f"0.{HUGE}",
    "1e-400000",
    str(2**63),
    str(-(2**63) - 1),
    "-0",
]


class TestNumbers:
    @pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number[:8]}({len(number)})")
    def test_of_any_size_are_kept_or_refused(self, api, number):
        run_id = api.register()
        frame = '{"writer":"w","attempt":%s,"frames":[{"seq":%s,"step":%s,"time":%s,"scalars":{"loss":%s}}]}'
        for place in range(5):
            parts = ["1"] * 5
            parts[place] = number
            reply = api.post_raw(run_id, (frame % tuple(parts)).encode())
            if reply.status_code != 200:
                check_refused(reply, 404, 422)
        layers = '{"writer":"w","attempt":1,"frames":[{"seq":7,"step":7,"time":1,"layers":{"x":[%s,1]}}]}'
        assert api.post_raw(run_id, (layers % number).encode()).status_code in (200, 422)
        shape = (
            '{"writer":"w","attempt":1,"frames":[{"seq":8,"step":8,"time":1,"layers":{"x":{"shape":[%s],"f32":""}}}]}'
        )
        assert api.post_raw(run_id, (shape % number).encode()).status_code == 422
        for body in (
            '{"run":"n","resume_step":%s}',
            '{"run":"n","config":{"n":%s}}',
            '{"run":"n","frozen_blocks":[%s]}',
        ):
            reply = api.http.post("/api/v1/runs", content=(body % number).encode())
            if reply.status_code == 200:
                assert api.get(f"/runs/{reply.json()['run_id']}")["run"] == "n"
            else:
                check_refused(reply, 422)
        beat = f'{{"writer":"w","attempt":1,"step":{number}}}'
        assert api.http.post(f"/api/v1/runs/{run_id}/heartbeat", content=beat.encode()).status_code in (200, 413, 422)
        tried = f'{{"frames":[],"num_blocks":{number},"frozen_blocks":[{number}]}}'
        assert api.http.post("/api/v1/rules/test", content=tried.encode()).status_code in (200, 422)
        assert isinstance(api.get("/runs")["runs"], list)
        assert api.http.get("/metrics").status_code == 200

    @pytest.mark.parametrize("number", ["9" * 4000, str(2**31), str(2**53 + 1), str(2**64), "-1", "1e3", "NaN", "٣"])
    def test_in_a_query_are_refused_or_find_nothing(self, api, number):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(1)])
        for path in (
            "/runs?limit={}",
            "/runs/{run}/series?metric=loss&layer={}",
            "/runs/{run}/series?metric=loss&from_step={}",
            "/runs/{run}/series?metric=token_similarity&layer={}",
            "/runs/{run}/series?metric=attention_entropy&layer=0&head={}",
            "/runs/{run}/series?metric=loss&points={}",
            "/runs/{run}/series?metric=loss&attempt={}",
            "/runs/{run}/heatmap?metric=token_similarity&columns={}",
            "/compare?run={run}&metric=loss&layer={}",
            "/compare?run={run}&metric=token_similarity&layer={}",
            "/compare?run={run}&metric=attention_entropy&layer=0&head={}",
            "/alerts/{}",
            "/alerts?since={}",
            "/incidents?attempt={}",
            "/incidents/{}",
        ):
            reply = api.http.get("/api/v1" + path.format(quote(number), run=run_id))
            assert reply.status_code in (200, 404, 422), (path, reply.text)
        assert api.http.delete(f"/api/v1/silences/{quote(number)}").status_code in (404, 422)

    @pytest.mark.parametrize(
        "since", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "-1e300", "1e300", "99999999999999999"]
    )
    def test_of_times_at_the_edge_of_the_calendar_too(self, api, since):
        assert api.http.get(f"/api/v1/alerts?since={quote(since)}").status_code in (200, 422)


def cursor_of(parts, what="runs -updated"):
    text = parts if isinstance(parts, str) else json.dumps([what, *parts])
    return base64.urlsafe_b64encode(text.encode()).decode()


class TestACursorThatIsForged:
    FORGED = (
        [], [1], [1, 2], ["x", "y"], [True, "x"], [None, "x"], [1.0, "x", "y"], [[], "x"], [{}, "x"], [1e300, "x"],
        [2**60, "x"], [1.5, "a\x00b"], [1.5, "\ud800"], [float("nan"), "x"], [float("inf"), "x"],
        [1.5, "'; DROP TABLE run; --"], [1.5, "x" * 600], ["a\x00b", "x"], ["\ud800", "x"],
    )  # fmt: skip

    @pytest.mark.parametrize("key", FORGED, ids=repr)
    def test_is_refused_or_is_a_place_like_any_other(self, api, key):
        api.register()
        for order in ("live", "-updated", "updated", "name", "-name"):
            reply = api.http.get("/api/v1/runs", params={"order": order, "cursor": cursor_of(key, f"runs {order}")})
            assert reply.status_code in (200, 422)

    @pytest.mark.parametrize(
        "key", [[True], [False], [None], ["1"], [1.0], [-1], [2**53], [10**30], [[1]], [1, 2], []], ids=repr
    )
    def test_of_a_number_is_a_number(self, api, key):
        api.open_alert(api.register())
        for what in ("alerts", "notifications"):
            reply = api.http.get(f"/api/v1/{what}", params={"cursor": cursor_of(key, what)})
            assert reply.status_code == (200 if key == [-1] else 422)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "x",
            "{}",
            "5",
            "null",
            '"runs"',
            "[" * 700,
            '{"a":' * 130,
            "9" * 700,
            "\xff",
            '["runs -updated",1,"\\ud800"]',
        ],
    )
    def test_that_is_something_else_is_refused(self, api, text):
        assert problem(api.http.get("/api/v1/runs", params={"cursor": cursor_of(text)}))[:2] == (
            422,
            "invalid_argument",
        )

    @pytest.mark.parametrize("cursor", ["%", "a", "\u00e9", "====", "A" * 999])
    def test_that_is_not_even_base64_is_refused(self, api, cursor):
        assert problem(api.http.get("/api/v1/runs", params={"cursor": cursor}))[:2] == (422, "invalid_argument")


MANY = 1_000_000


class TestBodiesThatAreMuchOfOneThing:
    """Each takes a moment and some memory, and changes nothing."""

    BODIES = {  # noqa: RUF012
        "lists in lists": lambda: b"[" * 15_000_000,
        "objects in objects": lambda: b'{"a":' * 3_000_000,
        "a config of lists in lists": lambda: b'{"run":"r","config":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        "1e6 keys of a config": lambda: (
            b'{"run":"r","config":{' + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}}"
        ),
        "1e6 tags": lambda: b'{"run":"r","tags":[' + b'"x",' * MANY + b'"x"]}',
        "1e6 blocks": lambda: b'{"run":"r","blocks":[' + b'"x",' * MANY + b'"x"]}',
        "1e6 frozen blocks": lambda: b'{"run":"r","blocks":["x"],"frozen_blocks":[' + b"0," * MANY + b"0]}",
        "1e6 unknown keys": lambda: b'{"run":"r",' + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}",
        "the same key 1e6 times": lambda: b"{" + b'"run":"r",' * MANY + b'"x":1}',
    }

    FRAMES = {  # noqa: RUF012
        "1e6 scalars": lambda: b'"scalars":{' + b",".join(b'"m%d":1' % n for n in range(MANY)) + b"}",
        "1e6 layered metrics": lambda: b'"layers":{' + b",".join(b'"m%d":[]' % n for n in range(MANY)) + b"}",
        "5e6 values": lambda: b'"layers":{"m":[' + b"1," * 5_000_000 + b"1]}",
        "1e6 rows": lambda: b'"heads":{"m":[' + b"[1]," * MANY + b"[1]]}",
        "5e6 heads": lambda: b'"heads":{"m":[[' + b"1," * 5_000_000 + b"1],[1]]}",
        "rows in rows": lambda: b'"heads":{"m":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    }

    @pytest.fixture(params=["sqlite"])
    def database(self, request, tmp_path):
        return SqliteFile(tmp_path / "tsemon.db")

    def check(self, api, send):
        memory = psutil.Process()
        before_bytes, start = memory.memory_info().rss, time.perf_counter()
        check_refused(send(), 413, 422)
        took_s, grown_bytes = time.perf_counter() - start, memory.memory_info().rss - before_bytes
        print(f"{took_s:.2f} s, {grown_bytes / 2**20:.0f} MiB more")
        assert took_s < 10
        assert grown_bytes < 2**30
        assert api.http.get("/readyz").status_code == 200

    @pytest.mark.parametrize("kind", BODIES)
    def test_of_a_registration_are_refused(self, api, kind):
        body = self.BODIES[kind]()
        assert len(body) <= MAX_BODY_BYTES
        self.check(api, lambda: api.http.post("/api/v1/runs", content=body))
        assert api.get("/runs")["runs"] == []

    @pytest.mark.parametrize("kind", FRAMES)
    def test_of_frames_are_refused(self, api, kind):
        run_id = api.register()
        body = b'{"writer":"w","attempt":1,"frames":[{"seq":0,"step":0,"time":1,' + self.FRAMES[kind]() + b"}]}"
        assert len(body) <= MAX_BODY_BYTES
        self.check(api, lambda: api.post_raw(run_id, body))
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0

    def test_of_frames_that_are_empty_are_refused(self, api):
        run_id = api.register()
        body = b'{"writer":"w","attempt":1,"frames":[' + b"{}," * 5_000_000 + b"{}]}"
        self.check(api, lambda: api.post_raw(run_id, body))

    def test_of_rules_are_refused(self, api):
        for text in (
            "[" * 10_000,
            "- " * 10_000,
            "rules:\n" + "- {}\n" * 10_000,
            "&a [*a]",
            "a: &x [1]\nb: [*x, *x]",
            "{" * 10_000,
        ):
            self.check(api, lambda text=text: api.http.put("/api/v1/rules", content=text.encode()))

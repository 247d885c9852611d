import time

import pytest
from starlette.datastructures import Headers

from tsemon_server.access.gate import token_of

OURS = {"Origin": "http://127.0.0.1"}


def sign_in(guarded, token, **headers):
    guarded.http.cookies.clear()
    return guarded.http.post("/api/v1/session", json={"token": token}, headers=headers)


class TestSigningIn:
    def test_keeps_the_token_where_no_script_and_no_page_elsewhere_reaches_it(self, guarded):
        reply = sign_in(guarded, guarded.token("read", project="a"), **OURS)
        expected = {"needs_token": True, "scopes": ["read"], "project": "a", "name": "t"}
        assert (reply.status_code, reply.json()) == (200, expected)
        flags = {part.strip().lower() for part in reply.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= flags
        assert "secure" not in flags
        assert guarded.http.get("/api/v1/runs").status_code == 200
        assert guarded.http.get("/api/v1/session").json() == expected

    def test_over_tls_keeps_it_for_tls(self, guarded):
        reply = guarded.http.post("https://127.0.0.1/api/v1/session", json={"token": guarded.token("read")})
        assert "secure" in reply.headers["set-cookie"].lower()

    def test_with_a_wrong_token_is_refused_and_keeps_nothing(self, guarded):
        reply = sign_in(guarded, "tsm_0123456789abcdef_" + "A" * 43, **OURS)
        assert reply.status_code == 401
        assert "set-cookie" not in reply.headers

    def test_is_over_when_one_signs_out(self, guarded):
        sign_in(guarded, guarded.token("read"), **OURS)
        assert guarded.http.delete("/api/v1/session").status_code == 204
        assert guarded.http.get("/api/v1/runs").status_code == 401
        assert guarded.http.get("/api/v1/session").json() == {
            "needs_token": True,
            "scopes": [],
            "project": None,
            "name": None,
        }

    @pytest.mark.parametrize(
        "origin", ["http://[", "[", "http://", "://", "http://[::1", "http://127.0.0.1:99999999", "\xff"]
    )
    def test_is_refused_for_an_origin_that_is_none(self, guarded, origin):
        token = guarded.token("admin")
        assert sign_in(guarded, token, Origin=origin.encode("latin-1")).status_code == 403
        sign_in(guarded, token, **OURS)
        assert guarded.http.delete("/api/v1/runs/x", headers={"Origin": origin.encode("latin-1")}).status_code == 403

    def test_is_refused_for_a_page_elsewhere(self, guarded):
        reply = sign_in(guarded, guarded.token("read"), Origin="http://elsewhere.example")
        assert (reply.status_code, "set-cookie" in reply.headers) == (403, False)


class TestACookie:
    @pytest.mark.parametrize(
        "origin", [None, "null", "http://127.0.0.1:81", "http://elsewhere.example", "http://a.127.0.0.1"]
    )
    def test_changes_nothing_for_a_page_elsewhere(self, guarded, origin):
        run_id = guarded.run("a")
        sign_in(guarded, guarded.token("admin"), **OURS)
        headers = {} if origin is None else {"Origin": origin}
        assert guarded.http.delete(f"/api/v1/runs/{run_id}", headers=headers).status_code == 403
        assert guarded.http.get(f"/api/v1/runs/{run_id}").status_code == 200

    def test_changes_what_our_page_asks_for(self, guarded):
        run_id = guarded.run("a")
        sign_in(guarded, guarded.token("admin"), **OURS)
        assert guarded.http.delete(f"/api/v1/runs/{run_id}", headers=OURS).status_code == 204

    @pytest.mark.parametrize("value", ['"' + '\\"' * 30_000 + '"', "\\" * 60_000, '"' + "\\1" * 30_000, "a;" * 30_000])
    def test_that_is_nasty_takes_no_time(self, value):
        headers = Headers({"cookie": f"tsemon_token={value}"})
        before = time.process_time()
        token_of(headers)
        assert time.process_time() - before < 0.5, "http.cookies takes seconds"

    def test_that_is_broken_is_none(self, guarded):
        for cookie in ('tsemon_token="', "\x7f", "tsemon_token=", "=;;;", "a=b; tsemon_token=x"):
            assert guarded.http.get("/api/v1/runs", headers={"Cookie": cookie}).status_code == 401

import time

from tsemon_server.access import keeper
from tsemon_server.access.tokens import new_token, parts_of


def await_use(guarded, token_id, when):
    """It is kept while the request goes on, and may come a little later."""
    deadline = time.perf_counter() + 30
    while (used := guarded.tokens.find(token_id).last_used_at) is None or used.timestamp() != when:
        assert time.perf_counter() < deadline, used
        time.sleep(0.01)


class TestAToken:
    def test_is_kept_as_a_digest_alone(self, guarded, database):
        text = guarded.token("read")
        secret = parts_of(text)[1]
        stored = guarded.tokens.find(parts_of(text)[0])
        assert len(stored.digest) == 64
        assert secret not in repr(stored)
        assert secret.encode() not in b"".join(str(row).encode() for row in database.execute("SELECT * FROM token"))

    def test_is_another_each_time_and_of_the_form_that_is_read(self):
        made = [new_token() for _ in range(100)]
        assert len({token.text for token in made}) == 100
        assert all(parts_of(token.text)[0] == token.token_id for token in made)

    def test_ends_when_it_expires(self, guarded, clock):
        text = guarded.token("read", expires_at=clock.now + 10)
        assert guarded.ask("GET", "/runs", text).status_code == 200
        clock.now += 10
        reply = guarded.ask("GET", "/runs", text)
        assert reply.status_code == 401
        assert "has expired" in reply.json()["detail"]

    def test_ends_when_it_is_revoked_once_that_is_known(self, guarded, monkeypatch):
        monkeypatch.setattr(keeper, "BELIEVED_S", 0.0)
        text = guarded.token("read")
        assert guarded.ask("GET", "/runs", text).status_code == 200
        assert guarded.tokens.revoke(parts_of(text)[0])
        reply = guarded.ask("GET", "/runs", text)
        assert reply.status_code == 401
        assert "was revoked" in reply.json()["detail"]

    def test_is_believed_for_a_few_seconds_without_asking_the_database(self, guarded, monkeypatch):
        text = guarded.token("read")
        assert guarded.ask("GET", "/runs", text).status_code == 200
        guarded.tokens.revoke(parts_of(text)[0])
        assert guarded.ask("GET", "/runs", text).status_code == 200
        now = time.monotonic()
        monkeypatch.setattr(keeper.time, "monotonic", lambda: now + keeper.BELIEVED_S)
        assert guarded.ask("GET", "/runs", text).status_code == 401

    def test_tells_when_it_was_last_used_to_the_minute(self, guarded, clock, monkeypatch):
        token_id = parts_of(text := guarded.token("read"))[0]
        assert guarded.tokens.find(token_id).last_used_at is None
        guarded.ask("GET", "/runs", text)
        await_use(guarded, token_id, first := clock.now)
        clock.now += 30
        guarded.ask("GET", "/runs", text)
        await_use(guarded, token_id, first)
        now = time.monotonic()
        monkeypatch.setattr(keeper.time, "monotonic", lambda: now + keeper.USE_EVERY_S)
        guarded.ask("GET", "/runs", text)
        await_use(guarded, token_id, clock.now)


class TestATokenOfOneProject:
    def test_sees_its_runs_and_no_others(self, guarded):
        mine, theirs = guarded.run("a"), guarded.run("b")
        token = guarded.token("admin", project="a")
        assert [run["run_id"] for run in guarded.ask("GET", "/runs", token).json()["runs"]] == [mine]
        assert guarded.ask("GET", "/runs?project=b", token).status_code == 403
        for path in ("", "/series?metric=loss", "/heatmap?metric=token_similarity", "/frame", "/export", "/rules"):
            assert guarded.ask("GET", f"/runs/{mine}{path}", token).status_code == 200, path
            reply = guarded.ask("GET", f"/runs/{theirs}{path}", token)
            assert (reply.status_code, reply.json()["error"]) == (404, "unknown_run"), path
        assert guarded.ask("GET", f"/compare?run={mine}&metric=loss", token).status_code == 200
        assert len(guarded.ask("GET", f"/glances?run={mine}", token).json()["glances"]) == 1
        assert guarded.ask("GET", f"/glances?run={mine}&run={theirs}", token).status_code == 404
        for run_id, tag in ((mine, "mine"), (theirs, "theirs")):
            guarded.ask("PATCH", f"/runs/{run_id}", guarded.token("admin"), json={"tags": [tag]})
        assert guarded.ask("GET", "/tags", token).json() == {"tags": [{"tag": "mine", "runs": 1}]}
        assert guarded.ask("GET", "/runs?q=GPT&condition=running", token).json()["total"] == 1
        assert guarded.ask("GET", f"/compare?run={mine}&run={theirs}&metric=loss", token).status_code == 404

    def test_sees_rows_of_its_runs_and_of_no_others(self, guarded):
        mine, theirs = guarded.run("a"), guarded.run("b")
        token = guarded.token("read", project="a")
        assert [row["run_id"] for row in guarded.ask("GET", "/rows/runs", token).json()["rows"]] == [mine]
        paths = ("/rows/runs?", "/rows/metrics?kind=scalars", "/rows/series?metric=loss")
        heatmap = "/rows/heatmap?metric=token_similarity"
        for path in (*paths, heatmap):
            reply = guarded.ask("GET", f"{path}&run={mine}", token)
            assert (reply.status_code, len(reply.json()["rows"]) > 0) == (200, True), path
            asked = [f"run={theirs}", f"run={mine}&run={theirs}", f"run={mine},{theirs}", f"run=,{theirs}", "run=nope"]
            for runs in asked:
                reply = guarded.ask("GET", f"{path}&{runs}", token)
                assert (reply.status_code, reply.json()["error"]) == (404, "unknown_run"), (path, runs)
        assert guarded.ask("GET", f"/rows/runs?run={theirs}&project=b", token).status_code == 403
        everyone = guarded.token("read")
        for path in paths:
            assert len(guarded.ask("GET", f"{path}&run={mine},{theirs}", everyone).json()["rows"]) > 0

    def test_writes_to_its_runs_and_no_others(self, guarded):
        mine, theirs = guarded.run("a"), guarded.run("b")
        token = guarded.token("ingest", "admin", project="a")
        registration = {"run": "new", "blocks": []}
        assert guarded.ask("POST", "/runs", token, json=registration | {"project": "a"}).status_code == 200
        assert guarded.ask("POST", "/runs", token, json=registration | {"project": "b"}).status_code == 403
        for method, path, body in (("PATCH", "", {"state": "failed"}), ("POST", "/frames", {}), ("DELETE", "", None)):
            assert guarded.ask(method, f"/runs/{theirs}{path}", token, json=body).status_code == 404
        assert guarded.ask("DELETE", f"/runs/{mine}", token).status_code == 204
        assert guarded.ask("GET", f"/runs/{theirs}", guarded.token("read")).json()["state"] == "running"

    def test_sees_to_its_alerts_and_no_others(self, guarded):
        mine, theirs = guarded.alert(guarded.run("a")), guarded.alert(guarded.run("b"))
        token = guarded.token("admin", project="a")
        assert [alert["alert_id"] for alert in guarded.ask("GET", "/alerts", token).json()["alerts"]] == [mine]
        for alert_id, status in ((mine, 200), (theirs, 404)):
            assert guarded.ask("GET", f"/alerts/{alert_id}", token).status_code == status
            assert guarded.ask("POST", f"/alerts/{alert_id}/ack", token, json={"by": "me"}).status_code == status
            assert guarded.ask("DELETE", f"/alerts/{alert_id}/ack", token).status_code == status
            assert guarded.ask("POST", f"/alerts/{alert_id}/resolve", token, json={"by": "me"}).status_code == status

    def test_silences_its_project_alone(self, guarded):
        token, everyone = guarded.token("admin", project="a"), guarded.token("admin")
        body = {"rule": "x", "until": "2099-01-01T00:00:00Z", "created_by": "me"}
        made = {
            project: guarded.ask("POST", "/silences", everyone, json=body | {"project": project}).json()["silence_id"]
            for project in ("a", "b", None)
        }
        assert guarded.ask("POST", "/silences", token, json=body | {"project": "b"}).status_code == 403
        assert guarded.ask("POST", "/silences", token, json=body).status_code == 403
        assert [found["silence_id"] for found in guarded.ask("GET", "/silences", token).json()["silences"]] == [
            made["a"]
        ]
        statuses = [
            guarded.ask("DELETE", f"/silences/{made[project]}", token).status_code for project in ("b", None, "a")
        ]
        assert statuses == [404, 404, 204]

    def test_tries_rules_on_its_runs_alone(self, guarded):
        mine, theirs = guarded.run("a"), guarded.run("b")
        token = guarded.token("read", project="a")
        replies = [guarded.ask("POST", "/rules/test", token, json={"run_id": run}) for run in (mine, theirs, "none")]
        assert [reply.status_code for reply in replies] == [200, 404, 404]
        assert replies[1].json()["detail"].replace(theirs, "none") == replies[2].json()["detail"]

    def test_changes_nothing_that_concerns_all(self, guarded):
        token = guarded.token("admin", project="a")
        for method, path in (("PUT", "/rules"), ("DELETE", "/rules/x"), ("GET", "/notifications"), ("GET", "/metrics")):
            assert guarded.ask(method, path, token).status_code == 403

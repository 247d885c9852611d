"""Alerts of which nobody is told for a while."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.server.conftest import problem
from tsemon_server.store import Store
from tsemon_server.store.ledger.notices import is_muted

LATER = "1970-01-01T01:00:00Z"


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def api(start, clock):
    return start(clock=clock)


def add(api, **fields):
    reply = api.http.post("/api/v1/silences", json={"until": LATER, "created_by": "on-call"} | fields)
    return reply.json() if reply.status_code == 200 else problem(reply)


def is_silenced(api, alert_id):
    return api.get(f"/alerts/{alert_id}")["silenced"]


class TestASilence:
    def test_is_over_rest_what_was_asked_for(self, api):
        made = add(api, rule="stall", reason="known")
        assert made == {
            "silence_id": "1",
            "rule": "stall",
            "run": None,
            "project": None,
            "family": None,
            "until": LATER,
            "created_at": "1970-01-01T00:16:40Z",
            "created_by": "on-call",
            "reason": "known",
        }
        assert api.get("/silences") == {"silences": [made]}

    @pytest.mark.parametrize(
        ("fields", "is_one"),
        [
            ({"rule": "high-loss"}, True),
            ({"rule": "high-lo"}, False),
            ({"rule": "high-*"}, False),
            ({"family": "loss"}, True),
            ({"family": "tse"}, False),
            ({"project": "default"}, True),
            ({"project": "Default"}, False),
            ({"rule": "high-loss", "project": "default", "family": "loss", "run": "*"}, True),
            ({"rule": "high-loss", "project": "other"}, False),
        ],
    )
    def test_is_of_alerts_that_fit_all_that_is_given(self, api, fields, is_one):
        alert_id = api.open_alert(api.register())
        add(api, **fields)
        assert is_silenced(api, alert_id) == is_one

    @pytest.mark.parametrize(
        ("pattern", "run", "is_one"),
        [
            ("gpt-*", "gpt-82m", True),
            ("gpt-*", "gpt-", True),
            ("gpt-*", "my gpt-82m", False),
            ("*82?", "gpt-82m", True),
            ("*82?", "gpt-82", False),
            ("GPT*", "gpt", False),
            ("a%", "abc", False),
            ("a%", "a%", True),
            ("a_c", "abc", False),
            ("a_c", "a_c", True),
            ("[a]*", "a", False),
            ("[a]*", "[a] try", True),
            (r"a\*", r"a\b", True),
            (r"a\*", "a*", False),
        ],
    )
    def test_knows_only_two_signs_in_the_name_of_a_run(self, api, pattern, run, is_one):
        alert_id = api.open_alert(api.register(run))
        add(api, run=pattern)
        assert is_silenced(api, alert_id) == is_one

    def test_is_seen_by_whoever_asks_about_alerts(self, api):
        run_id = api.register()
        alert_id = api.open_alert(run_id)
        add(api, run="gpt")
        with api.app.state.parts.store.read() as reader:
            (told,) = reader.alerts.to_tell(run_id, 1)
            assert told.silenced
            assert is_muted(reader.alerts.get(told.alert_id))
        assert api.get("/alerts", silenced=True)["alerts"][0]["alert_id"] == alert_id

    def test_ends_by_itself(self, api, clock):
        alert_id = api.open_alert(api.register())
        add(api, run="gpt")
        clock.now = 3599.0
        assert is_silenced(api, alert_id)
        clock.now = 3600.0
        assert not is_silenced(api, alert_id)
        assert api.get("/silences") == {"silences": []}

    def test_ends_when_it_is_removed(self, api):
        alert_id = api.open_alert(api.register())
        first, second = (add(api, run="gpt", until=f"1970-01-0{day}T00:00:00Z") for day in (3, 2))
        assert api.get("/silences") == {"silences": [second, first]}
        for silence, is_left in ((first, True), (second, False)):
            assert api.http.delete(f"/api/v1/silences/{silence['silence_id']}").status_code == 204
            assert is_silenced(api, alert_id) == is_left
            reply = api.http.delete(f"/api/v1/silences/{silence['silence_id']}")
            assert problem(reply)[:2] == (404, "unknown_silence")

    @pytest.mark.parametrize("fields", [{}, {"rule": ""}, {"run": "g", "until": "1970-01-02T00:00:00"}, {"rul": "a"}])
    def test_says_of_what_and_until_when(self, api, fields):
        assert add(api, **fields)[:2] == (422, "invalid_argument")
        assert api.get("/silences") == {"silences": []}

    @pytest.mark.parametrize("until", ["1970-01-01T00:16:40Z", "1960-01-01T00:00:00Z"])
    def test_ends_later_than_now(self, api, until):
        status, _, detail = add(api, rule="stall", until=until)
        assert status == 422
        assert "expected `until` later than now, which is 1970-01-01T00:16:40+00:00 here" in detail
        assert api.get("/silences") == {"silences": []}

    @pytest.mark.parametrize(
        "until", ["9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00+14:00"]
    )
    def test_ends_within_the_calendar(self, api, until):
        status, _, detail = add(api, rule="stall", until=until)
        assert status == 422
        assert "body, until: The time should be in the years 1 to 9999 of UTC" in detail
        assert api.get("/silences") == {"silences": []}

    def test_may_be_for_ever_as_far_as_people_are_concerned(self, api):
        assert add(api, rule="stall", until="9999-12-31T00:00:00-01:00")["until"] == "9999-12-31T01:00:00Z"

    def test_is_kept_where_several_processes_make_one_at_once(self, api):
        def make(store):
            with store.write() as writer:
                made = writer.silences.add(
                    rule=None, run="gpt", project=None, family=None, until=9e9, created_by="on-call", reason=""
                )
                return made.silence_id

        with ExitStack() as held, ThreadPoolExecutor(4) as threads:
            stores = [held.enter_context(closing(Store(api.database.url))) for _ in range(4)]
            made = [*threads.map(make, stores)]
        assert {silence["silence_id"] for silence in api.get("/silences")["silences"]} == {*made}
        assert len({*made}) == 4


class TestAnAlertOfWhichNobodyIsTold:
    def test_is_silenced_or_somebody_has_seen_to_it(self, api):
        run_id = api.register()
        store, told = api.app.state.parts.store, {}
        for rule in ("loud", "silenced", "seen"):
            told[rule] = api.get(f"/alerts/{api.open_alert(run_id, rule)}")
        add(api, rule="silenced")
        api.http.post(f"/api/v1/alerts/{told['seen']['alert_id']}/ack", json={"by": "on-call"})
        with store.read() as reader:
            muted = {alert.rule for alert in reader.alerts.find() if is_muted(alert)}
        assert muted == {"silenced", "seen"}

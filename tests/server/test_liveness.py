"""Silent, stuck, slow, or well: what the service says of processes by its own clock."""

import json
import time
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from tests.databases import SqliteFile
from tests.server.conftest import Api, loss_frame
from tsemon.errors import StoreError
from tsemon_server.alerts import ActiveRules
from tsemon_server.alerts.liveness import LISTEN_S, LOOK_EVERY_S, Liveness
from tsemon_server.main import create_app
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.settings import Settings
from tsemon_server.store import Store
from tsemon_server.store.ledger.progress import Progress

LOOK_S = 15.0
"""Between two looks in most of these tests; a server looks oftener."""
COMMON = """
    family: liveness
    severity: warning
    on: clock
    for: {samples: 1}
    advice: Look at it.
    source: Nobody.
    origin: Convention.
"""
DOCUMENT = f"""
rules:
  - name: silent
    title: Nothing is heard
    when: {{value: [{{scalar: silent_seconds}}], at_least: 120}}
{COMMON}
  - name: stuck
    title: No step is made
    when:
      all:
        - {{value: [{{scalar: stuck_seconds}}], at_least: 120}}
        - not: {{value: [{{scalar: longest_pause_seconds}}, {{times: 2}}], above: [{{scalar: stuck_seconds}}]}}
{COMMON}
  - name: slow
    title: The pace is not its own
    when: {{value: [{{scalar: step_seconds}}, {{over: [{{scalar: usual_step_seconds}}]}}], at_least: 3}}
{COMMON.replace("samples: 1", "samples: 4, steps: 60")}
"""
RULES = load(DOCUMENT)


class Clock:
    """One that people set, and one that nobody does."""

    def __init__(self):
        self.wall, self.steady = 1.8e9, 1000.0

    def __call__(self):
        return self.wall

    def monotonic(self):
        return self.steady

    def advance(self, seconds):
        self.wall += seconds
        self.steady += seconds


class Process:
    """A training process as the service hears of it."""

    def __init__(self, api, name, project="default", attempt=1):
        self.api, self.attempt, self.step = api, attempt, 0
        self.run_id = api.register(run=name, project=project)

    def beat(self, steps=0):
        self.step += steps
        body = {"writer": "w", "attempt": self.attempt, "step": self.step}
        reply = self.api.http.post(f"/api/v1/runs/{self.run_id}/heartbeat", json=body)
        assert reply.status_code == 200, reply.text
        return [(alert["rule"], alert["state"]) for alert in reply.json()["alerts"]]

    def end(self, state):
        body = {"state": state, "attempt": self.attempt}
        assert self.api.http.patch(f"/api/v1/runs/{self.run_id}", json=body).status_code == 200

    @property
    def alerts(self):
        found = self.api.get("/alerts", run=self.run_id)["alerts"]
        return [(a["rule"], a["state"], a["pending_step"], a["firing_step"], a["resolved_step"]) for a in found]


class Service:
    """A service that looks when the test says so."""

    def __init__(self, api, clock, rules=RULES):
        self.api, self.clock, self.rules = api, clock, rules
        self.start()

    def start(self):
        self.store = Store(self.api.database.url, self.clock)
        self.liveness = Liveness(self.store, ActiveRules(self.rules), clock=self.clock, monotonic=self.clock.monotonic)

    def restart(self):
        self.store.close()
        self.start()

    def watch(self, seconds, *, beating=(), steps=0):
        """Look again and again; before each look `beating` processes are heard of, so many steps on."""
        for _ in range(round(seconds / LOOK_S)):
            self.clock.advance(LOOK_S)
            for process in beating:
                process.beat(steps)
            self.liveness.look()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def api(tmp_path, clock):
    with closing(Api(SqliteFile(tmp_path / "tsemon.db"), clock=clock)) as api:
        yield api


@pytest.fixture
def process(api):
    return Process(api, "gpt")


@pytest.fixture
def service(api, clock):
    service = Service(api, clock)
    yield service
    service.store.close()


class TestASilentProcess:
    @pytest.fixture(autouse=True)
    def goes_silent(self, process, service):
        service.watch(300, beating=[process], steps=10)

    def test_is_told_once_it_was_silent_for_long(self, process, service):
        service.watch(105)
        assert process.alerts == []
        service.watch(30)
        assert process.alerts == [("silent", "firing", 200, 200, None)]

    def test_is_well_as_soon_as_it_is_heard_of(self, process, service):
        service.watch(300)
        assert process.beat(5) == [("silent", "firing")]
        service.watch(15)
        assert process.alerts == [("silent", "resolved", 200, 200, 205)]

    def test_is_not_called_stuck_or_slow_too(self, process, service):
        service.watch(3600)
        assert [rule for rule, *_ in process.alerts] == ["silent"]

    def test_is_told_apart_from_others(self, api, process, service):
        other = Process(api, "other")
        service.watch(600, beating=[other], steps=10)
        assert (len(process.alerts), other.alerts) == (1, [])

    def test_shows_for_how_long(self, api, process, service):
        service.watch(300)
        (alert,) = api.get("/alerts", run=process.run_id)["alerts"]
        assert "silent_seconds is 120 (at least 120)" in alert["summary"]
        assert alert["evidence"]["step"] == 200
        assert alert["evidence"]["held"] == {"samples": 1, "seconds": 0}
        assert [row["seconds"] for row in alert["evidence"]["window"][-3:]] == [-30, -15, 0]

    def test_is_heard_of_by_frames_too(self, api, process, service):
        for step in range(240, 1440, 40):
            api.send_ok(process.run_id, [loss_frame(step)])
            service.watch(60)
        assert process.alerts == []


class TestAKilledProcessByTheBuiltInRules:
    """Heartbeats come every 30 s at most, from a thread."""

    LOOK_TAKES_S = 0.1
    HEARTBEAT_S = 30.0

    @pytest.fixture
    def looks(self, api, clock):
        with closing(Store(api.database.url, clock)) as store:
            self.clock, self.look_at = clock, clock.steady
            self.liveness = Liveness(store, ActiveRules(PACK), clock=clock, monotonic=clock.monotonic)
            yield

    def watch_until(self, at):
        """Look as the server does, until then; when it first told of a silent process, or None."""
        while self.look_at <= at:
            self.clock.advance(self.look_at - self.clock.steady)
            self.liveness.look()
            told_at, self.look_at = self.look_at, self.look_at + LOOK_EVERY_S + self.LOOK_TAKES_S
            if any(state == "firing" for _, state, *_ in self.process.alerts):
                return told_at
        self.clock.advance(at - self.clock.steady)
        return None

    def beat(self, num, every_s=HEARTBEAT_S):
        for _ in range(num):
            assert self.watch_until(self.clock.steady + every_s) is None
            self.process.beat(1)

    @pytest.fixture(params=[0.0, 5.0, 9.9])
    def delay_s(self, request):
        """Of the first heartbeat: looks come at any time after a sign of life."""
        return request.param

    @pytest.fixture(autouse=True)
    def trains(self, api, looks, delay_s):
        self.process = Process(api, "gpt")
        self.watch_until(self.clock.steady + delay_s)
        self.beat(8)

    def test_is_told_within_120_seconds(self):
        last_sign_at = self.clock.steady
        told_at = self.watch_until(last_sign_at + 600)
        assert 95 <= told_at - last_sign_at <= 120

    def test_is_told_as_soon_where_it_sent_many_frames(self):
        self.beat(40, every_s=2.0)
        last_sign_at = self.clock.steady
        assert 95 <= self.watch_until(last_sign_at + 600) - last_sign_at <= 120

    def test_is_told_within_120_seconds_where_it_had_just_begun(self, api):
        self.process = Process(api, "new")
        self.process.beat(0)
        began_at = self.clock.steady
        assert 95 <= self.watch_until(began_at + 600) - began_at <= 120

    def test_is_none_whose_threads_stood_still_for_a_minute(self):
        for _ in range(3):
            assert self.watch_until(self.clock.steady + self.HEARTBEAT_S + 60) is None
            self.process.beat(1)
            self.beat(4)

    def test_is_none_that_sends_no_heartbeats_and_a_frame_now_and_then(self, api):
        self.process = Process(api, "by hand")
        for _ in range(4):
            self.beat(1, every_s=90)
        self.beat(1, every_s=600)


class TestTheVerdictOfAnIncident:
    @pytest.fixture
    def api(self, tmp_path, clock):
        rules = load("rules: [{name: high-loss, when: loss > 10 for 1 sample, severity: warning}]")
        with closing(Api(SqliteFile(tmp_path / "tsemon.db"), rules, clock=clock)) as api:
            yield api

    def is_settled(self, api, process):
        """As the list, the training process and the receivers of messages are told."""
        incident = next(one for one in api.get("/incidents")["incidents"] if one["rule"] == "high-loss")
        number = int(incident["incident_id"])
        with api.parts.store.read() as reader:
            told = {one.incident_id: one for one in reader.incidents.to_tell(process.run_id, 1, [])}
            noticed = reader.incidents.told([number])[number]
        assert incident["is_settled"] == told[str(number)].is_settled == (noticed.settles_step is None)
        return incident["is_settled"]

    def test_is_settled_while_the_process_is_silent(self, api, process, clock):
        service = Service(api, clock, PACK)
        with closing(service.store):
            service.watch(60, beating=[process])
            api.send_ok(process.run_id, [loss_frame(0, 20.0)])
            assert not self.is_settled(api, process)
            service.watch(120)
            assert self.is_settled(api, process)
            service.watch(30, beating=[process])
            assert not self.is_settled(api, process)


class TestSeveralProcessesOfARun:
    """Each by the built-in rules, and as soon as one alone."""

    @pytest.fixture
    def service(self, api, clock):
        service = Service(api, clock, PACK)
        yield service
        service.store.close()

    @pytest.fixture
    def first(self, api, service):
        first = Process(api, "gpt")
        service.watch(300, beating=[first], steps=10)
        return first

    @pytest.fixture
    def second(self, api, first):
        return Process(api, "gpt", attempt=2)

    @pytest.fixture
    def both(self, first, second, service):
        service.watch(60, beating=[first, second], steps=10)
        return first, second

    def told(self, api):
        return [(a["attempt"], a["rule"], a["state"]) for a in api.get("/alerts")["alerts"]]

    def states(self, api, run_id):
        run = api.get(f"/runs/{run_id}")
        return run["state"], [attempt["state"] for attempt in run["attempts"]]

    def test_are_told_of_where_the_earlier_one_is_killed(self, api, both, service):
        first, second = both
        service.watch(120, beating=[second], steps=10)
        assert self.told(api) == [(1, "process-silent", "firing")]
        service.watch(600, beating=[second], steps=10)
        assert self.told(api) == [(1, "process-silent", "resolved")]
        assert self.states(api, first.run_id) == ("running", ["replaced", "running"])

    def test_are_told_of_where_the_earlier_one_is_killed_after_the_later_one_has_ended(self, api, both, service):
        first, second = both
        second.end("finished")
        service.watch(600, beating=[first], steps=10)
        assert self.told(api) == []
        service.watch(120)
        assert self.told(api) == [(1, "process-silent", "firing")]
        assert self.states(api, first.run_id) == ("running", ["running", "finished"])
        service.watch(600)
        assert self.states(api, first.run_id) == ("finished", ["replaced", "finished"])

    def test_are_told_of_after_a_time_in_which_the_service_was_away(self, api, both, service, clock):
        clock.advance(3600)
        service.restart()
        service.watch(150, beating=both[1:], steps=10)
        assert self.told(api) == [(1, "process-silent", "firing")]

    def test_are_told_of_where_the_later_one_is_killed(self, api, both, service):
        service.watch(75, beating=both[:1], steps=10)
        both[0].end("finished")
        service.watch(45)
        assert self.told(api) == [(2, "process-silent", "firing")]

    def test_are_well_as_soon_as_they_are_heard_of(self, api, both, service):
        service.watch(900, beating=both[1:], steps=10)
        service.watch(30, beating=both, steps=10)
        assert self.told(api) == [(1, "process-silent", "resolved")]
        assert self.states(api, both[0].run_id) == ("running", ["running", "running"])

    def test_are_not_called_stuck_where_no_step_is_known(self, api, both, service):
        service.watch(3600, beating=both, steps=10)
        assert self.told(api) == []

    @pytest.mark.parametrize("silent_s", [0, 60, 90, 180])
    def test_are_a_restart_where_the_earlier_one_was_silent_before(self, api, first, service, silent_s):
        service.watch(silent_s)
        second = Process(api, "gpt", attempt=2)
        service.watch(900, beating=[second], steps=10)
        assert self.told(api) == [(1, "process-silent", "resolved")] * (silent_s > 120)
        assert self.states(api, first.run_id) == ("running", ["replaced", "running"])

    def test_are_a_restart_by_a_rule_that_is_quicker_than_the_lease(self, api, clock, first):
        service = Service(api, clock, load(DOCUMENT.replace("120", "60")))
        service.watch(75, beating=[first], steps=10)
        service.watch(15)
        second = Process(api, "gpt", attempt=2)
        service.watch(300, beating=[second], steps=10)
        service.store.close()
        assert self.told(api) == []

    def test_are_a_restart_where_the_later_one_ends_soon(self, api, first, second, service):
        service.watch(30, beating=[second], steps=10)
        second.end("finished")
        service.watch(300)
        assert self.told(api) == []
        assert self.states(api, first.run_id) == ("finished", ["replaced", "finished"])

    def test_are_in_the_order_in_which_runs_are_locked(self, api, both, service):
        """Another order would lock transactions that store frames against each other."""
        for number in range(20):
            api.register(run=f"run {number}")
        with service.store.read() as reader:
            found = [(one.run_id, one.attempt) for one in reader.liveness.running(0)]
        assert len(found) == 22
        assert found == sorted(found)

    def test_have_each_their_own_frames_that_were_not_evaluated(self, api, both, service):
        with service.store.write() as writer:
            writer.progress.keep(both[0].run_id, 1, Progress(read_to=70, num_skipped=7))
        service.watch(60, beating=both, steps=10)
        (alert,) = api.get("/alerts")["alerts"]
        assert (alert["rule"], alert["attempt"], alert["firing_step"]) == ("unevaluated-frames", 1, 70)


class TestTheThresholdOfAProject:
    def test_is_its_own(self, api, clock):
        strict, lax, others = (Process(api, name, project=name) for name in ("strict", "lax", "others"))
        for project, seconds in (("strict", 60), ("lax", 600)):
            rule = json.dumps({"name": "silent", "on": "clock", "when": f"silent_seconds >= {seconds} for 1 sample"})
            reply = api.http.put(f"/api/v1/rules/silent?project={project}", content=rule)
            assert reply.status_code == 200, reply.text
        service = Service(api, clock)
        service.watch(300, beating=[strict, lax, others], steps=10)
        told = {}
        for seconds in range(15, 900, 15):
            service.watch(15)
            for process in (strict, lax, others):
                if process.alerts:
                    told.setdefault(process, seconds)
        service.store.close()
        assert [told[process] for process in (strict, lax, others)] == [60, 600, 120]
        assert {api.get("/alerts", run=p.run_id)["alerts"][0]["rule_version"] for p in (strict, lax)} == {1, 2}

    def test_counts_from_the_next_look_on_and_what_fired_goes_on(self, api, clock):
        mine, theirs = (Process(api, name, project=name) for name in ("mine", "theirs"))
        service = Service(api, clock)
        service.watch(300, beating=[mine, theirs], steps=10)
        service.watch(150)
        rule = json.dumps({"name": "silent", "on": "clock", "when": "silent_seconds >= 6000 for 1 sample"})
        assert api.http.put("/api/v1/rules/silent?project=mine", content=rule).status_code == 200
        service.watch(30)
        service.store.close()
        assert [process.alerts[0][1] for process in (mine, theirs)] == ["resolved", "firing"]


class TestARunThatEnded:
    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_is_never_silent(self, state, process, service):
        service.watch(300, beating=[process], steps=10)
        process.end(state)
        service.watch(3600)
        assert process.alerts == []

    def test_is_looked_at_again_as_a_new_attempt(self, api, process, service):
        service.watch(300, beating=[process], steps=10)
        service.watch(300)
        api.register(run="gpt", resume_step=100)
        service.watch(105)
        assert [state for _, state, *_ in process.alerts] == ["resolved"]
        service.watch(30)
        assert [state for _, state, *_ in process.alerts] == ["firing", "resolved"]


class TestAStuckProcess:
    @pytest.fixture(autouse=True)
    def gets_stuck(self, process, service):
        service.watch(300, beating=[process], steps=10)

    def test_is_told_while_it_is_heard_of(self, process, service):
        service.watch(105, beating=[process])
        assert process.alerts == []
        service.watch(30, beating=[process])
        assert process.alerts == [("stuck", "firing", 200, 200, None)]

    def test_is_well_with_its_next_step(self, process, service):
        service.watch(300, beating=[process])
        service.watch(15, beating=[process], steps=1)
        assert process.alerts == [("stuck", "resolved", 200, 200, 201)]

    def test_stays_stuck_when_it_falls_silent(self, process, service):
        service.watch(150, beating=[process])
        service.watch(300)
        assert {(rule, state) for rule, state, *_ in process.alerts} == {("stuck", "firing"), ("silent", "firing")}

    def test_is_not_what_a_pause_of_the_usual_length_is(self, process, service):
        service.watch(150, beating=[process])  # the first evaluation
        service.watch(300, beating=[process], steps=10)
        service.watch(240, beating=[process])
        assert [state for _, state, *_ in process.alerts] == ["resolved"]
        service.watch(90, beating=[process])
        assert [state for _, state, *_ in process.alerts] == ["firing", "resolved"]


class TestASlowProcess:
    def test_is_told_where_its_own_pace_has_changed(self, process, service):
        service.watch(900, beating=[process], steps=10)
        service.watch(300, beating=[process], steps=2)
        assert [(rule, state) for rule, state, *_ in process.alerts] == [("slow", "firing")]

    def test_is_none_that_was_slow_from_the_start(self, process, service):
        for _ in range(20):
            service.watch(45, beating=[process])
            service.watch(15, beating=[process], steps=1)
        assert process.alerts == []

    def test_is_none_that_makes_a_pause(self, process, service):
        for _ in range(4):
            service.watch(600, beating=[process], steps=10)
            service.watch(105, beating=[process])
        assert process.alerts == []


class TestAServiceThatWasAway:
    @pytest.fixture
    def others(self, api):
        return [Process(api, f"other{i}") for i in range(3)]

    @pytest.fixture(autouse=True)
    def watches(self, process, others, service):
        service.watch(300, beating=[process, *others], steps=10)

    def test_calls_nobody_silent_who_speaks_again(self, process, others, service, clock):
        clock.advance(3600)
        service.restart()
        service.watch(15)
        service.watch(600, beating=[process, *others], steps=10)
        assert [run.alerts for run in (process, *others)] == [[]] * 4

    def test_listens_before_it_judges(self, process, service, clock):
        service.watch(60)
        clock.advance(3600)
        service.restart()
        service.watch(LISTEN_S)
        assert process.alerts == []

    def test_calls_those_silent_who_do_not(self, process, others, service, clock):
        clock.advance(3600)
        service.restart()
        service.watch(150, beating=others, steps=10)
        assert process.alerts == [("silent", "firing", 200, 200, None)]
        assert [run.alerts for run in others] == [[]] * 3

    def test_forgets_no_alert(self, process, service, clock):
        service.watch(600)
        clock.advance(3600)
        service.restart()
        service.watch(900)
        assert process.alerts == [("silent", "firing", 200, 200, None)]
        service.watch(15, beating=[process])
        assert process.alerts == [("silent", "resolved", 200, 200, 200)]

    def test_forgets_no_alert_of_a_stuck_process(self, process, service, clock):
        service.watch(600, beating=[process])
        clock.advance(3600)
        service.restart()
        service.watch(900, beating=[process])
        assert process.alerts == [("stuck", "firing", 200, 200, None)]
        service.watch(30, beating=[process], steps=1)
        assert [state for _, state, *_ in process.alerts] == ["resolved"]

    def test_is_no_other_where_it_stood_still_itself(self, process, others, service, clock):
        service.watch(60, beating=[process, *others], steps=10)
        clock.advance(3600)
        service.watch(15)
        service.watch(600, beating=[process, *others], steps=10)
        assert [run.alerts for run in (process, *others)] == [[]] * 4

    def test_is_no_other_where_its_database_was(self, process, service, clock, monkeypatch):
        def fail():
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(service.store, "read", fail)
            for _ in range(240):
                clock.advance(LOOK_S)
                with pytest.raises(StoreError):
                    service.liveness.look()
        service.watch(15)
        service.watch(600, beating=[process], steps=10)
        assert process.alerts == []


class TestALookThatIsNotWrittenDown:
    @pytest.fixture(autouse=True)
    def goes_silent(self, process, service, clock):
        service.watch(300, beating=[process], steps=10)
        service.watch(105)
        clock.advance(LOOK_S)

    def test_loses_no_alert_where_the_database_failed(self, process, service, monkeypatch):
        def fail():
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(service.store, "write", fail)
            with pytest.raises(StoreError):
                service.liveness.look()
        service.watch(300)
        assert process.alerts == [("silent", "firing", 200, 200, None)]

    def test_loses_no_alert_where_it_was_stopped(self, process, service):
        service.liveness.look(lambda: True)
        service.watch(300)
        assert process.alerts == [("silent", "firing", 200, 200, None)]


class TestAClockThatIsSet:
    @pytest.mark.parametrize("seconds", [3600, -3600, 3 * 86_400, -3 * 86_400])
    def test_changes_nothing(self, seconds, api, process, service, clock):
        dead = Process(api, "dead")
        service.watch(300, beating=[process, dead], steps=10)
        service.watch(300, beating=[process], steps=10)
        clock.wall += seconds
        service.watch(600, beating=[process], steps=10)
        assert process.alerts == []
        assert dead.alerts == [("silent", "firing", 200, 200, None)]


class TestTheService:
    RULES = load(
        """
rules:
  - name: silent
    title: Nothing is heard
    when: {value: [{scalar: silent_seconds}], at_least: 0.5}
"""
        + COMMON
    )

    def test_looks_by_itself(self, database):
        app = create_app(Settings(database=database.url), rules=self.RULES, look_every_s=0.02, listen_s=0.1)
        with TestClient(app, base_url="http://127.0.0.1") as http:
            http.post("/api/v1/runs", json={"run": "gpt"})
            deadline = time.monotonic() + 60
            while not (alerts := http.get("/api/v1/alerts").json()["alerts"]):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert (alerts[0]["rule"], alerts[0]["state"]) == ("silent", "firing")


class TestWhatIsRemembered:
    def test_is_written_rarely_of_a_run_that_is_well(self, api, process, service):
        service.watch(150, beating=[process], steps=10)
        before = kept(api)
        service.watch(120, beating=[process], steps=10)
        assert kept(api) == before
        service.watch(300, beating=[process], steps=10)
        assert kept(api) != before

    def test_goes_with_the_run(self, api, process, service):
        service.watch(150, beating=[process], steps=10)
        assert len(kept(api)) == 1
        api.http.delete(f"/api/v1/runs/{process.run_id}")
        service.watch(300)
        assert kept(api) == []


def kept(api):
    return [json.loads(row[0]) for row in api.database.execute("SELECT pulse FROM watched")]

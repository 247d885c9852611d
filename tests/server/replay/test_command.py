"""`tsemon replay`, as a user starts it."""

import gzip
import json
import subprocess
import sys
from contextlib import closing
from typing import NamedTuple

import httpx
import pytest

from tests.clients.command_line import SEQUENCES
from tests.databases import SqliteFile
from tests.server.conftest import Api
from tests.server.replay.runs import FOLDER, RecordedRun, replayed
from tests.service import ServiceProcess
from tsemon.__main__ import main
from tsemon.transport import Spool
from tsemon.wire import frames_to_body
from tsemon_server.rules import PACK
from tsemon_server.services.replay.many import replay_files

FAILING = FOLDER / "tse_post6_warm-s0.jsonl.gz"
HEALTHY = FOLDER / "vit_pre4-s0.jsonl.gz"
RULES = """
rules:
  - name: loss-is-high
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 4.5}
    for: {samples: 1}
    advice: Wait.
    source: Nobody.
    origin: Convention.
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def start(monkeypatch, capsys):
    """The command, in this process: what it prints, and how it ends."""

    def start(*arguments):
        monkeypatch.setattr(sys, "argv", ["tsemon", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        if isinstance(end.value.code, str):
            return Done(1, printed.out, f"{printed.err}{end.value.code}\n")
        return Done(end.value.code or 0, printed.out, printed.err)

    return start


@pytest.fixture
def alerts_of(start):
    def alerts_of(*arguments):
        done = start(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return {result["run"]: result["alerts"] for result in json.loads(done.stdout)}

    return alerts_of


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


class TestReplay:
    def test_prints_the_alerts_of_each_run_as_json(self, alerts_of):
        found = alerts_of(FAILING, HEALTHY)
        assert found["vit_pre4-s0"] == []
        escalation = next(alert for alert in found["tse_post6_warm-s0"] if alert["family"] == "tse")
        assert set(escalation) == {
            "rule", "family", "severity", "pending_step", "firing_step", "resolved_step", "summary"
        }  # fmt: skip
        assert escalation["pending_step"] < escalation["firing_step"] < escalation["resolved_step"]

    def test_adds_evidence_and_advice_where_they_are_asked_for(self, alerts_of):
        alert = alerts_of(FAILING, "--evidence")["tse_post6_warm-s0"][0]
        assert alert["evidence"]["window"]
        assert alert["advice"]["source"]

    def test_prints_a_line_for_each_incident_and_counts_them(self, start):
        lines = start(FAILING, HEALTHY).stdout.splitlines()
        heading, first, *_, counts = lines
        names = ["run", "state", "severity", "family", "rule", "where", "since", "fired", "title", "also", "fired"]
        assert heading.split() == names
        whole = [
            "tse_post6_warm-s0",
            "ended",
            "critical",
            "tse",
            "token-similarity-escalation",
            "blocks",
            "1",
            "to",
            "5",
        ]
        assert first.split()[: len(whole)] == whole
        assert first.split()[len(whole) : len(whole) + 2] == ["15", "25"]
        assert first.endswith(
            "token-rank-collapse, batch-rank-collapse, attention-logits-blow-up, vanishing-gradient, samples-collapse"
        )
        assert "Tokens become the same over depth  " in first
        assert sum(line.startswith("tse_post6_warm-s0") for line in lines) == 1
        assert counts.startswith("runs: 2, with incidents: 1; frames: 130; incidents: 1; alerts: ")

    def test_prints_incidents_with_what_else_fired_below_them_on_a_terminal(self, start, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "100")
        lines = SEQUENCES.sub("", start(FAILING).stdout).splitlines()
        assert lines[:3] == [
            "tse_post6_warm-s0  ended  critical  tse  blocks 1 to 5  since step 15  fired at 25",
            "       token-similarity-escalation: Tokens become the same over depth",
            "       also fired: token-rank-collapse, batch-rank-collapse, attention-logits-blow-up,",
        ]

    def test_prints_a_line_for_each_alert_where_they_are_asked_for(self, rules, start):
        shown = start(FAILING, HEALTHY, "--rules", rules, "--alerts").stdout
        *_, row, counts = [line for line in shown.splitlines() if "never evaluated" not in line]
        assert row.split()[:5] == ["tse_post6_warm-s0", "loss-is-high", "warning", "0", "5"]
        assert counts == "runs: 2, with incidents: 1; frames: 130; incidents: 1; alerts: 1 (1 warning)"

    def test_prints_a_line_for_each_alert_that_belongs_to_no_incident(self, rules, start):
        rules.write_text(RULES.replace("severity: warning", "severity: info"))
        *_, row, counts = start(FAILING, "--rules", rules).stdout.splitlines()
        assert row.split()[:3] == ["tse_post6_warm-s0", "loss-is-high", "info"]
        assert counts == "runs: 1, with incidents: 0; frames: 80; incidents: 0; alerts: 1 (1 info)"

    def test_shows_evidence_and_advice_to_people_too(self, rules, start):
        shown = start(FAILING, "--rules", rules, "--evidence").stdout
        assert "Wait." in shown
        assert '"conditions"' in shown

    def test_uses_the_rules_of_a_file_in_place_of_the_built_in_ones(self, rules, alerts_of):
        assert {a["rule"] for a in alerts_of(FAILING, "--rules", rules)["tse_post6_warm-s0"]} == {"loss-is-high"}

    def test_says_the_same_in_one_process_and_in_several(self):
        few = sorted(FOLDER.glob("tse_*"))
        assert [*replay_files(few, None, jobs=2, share=2)] == [*replay_files(few, None, jobs=1)]

    def test_reads_traces_and_spools_in_a_folder(self, tmp_path, alerts_of):
        (tmp_path / FAILING.name).write_bytes(FAILING.read_bytes())
        spool(RecordedRun(HEALTHY), tmp_path / "spools")
        assert list(alerts_of(tmp_path, tmp_path / "spools")) == ["tse_post6_warm-s0", "vit_pre4-s0"]

    def test_needs_no_torch(self):
        code = "import sys; sys.modules['torch'] = None; from tsemon.__main__ import main; main()"
        command = [sys.executable, "-c", code, "replay", FAILING]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class TestASpooledRun:
    def test_is_replayed_as_it_was_sent(self, tmp_path, alerts_of):
        run = RecordedRun(FAILING)
        folder = spool(run, tmp_path)
        assert [alert["firing_step"] for alert in alerts_of(folder)[run.name]] == [a[0] for a in replayed(run)]

    def test_begins_anew_with_each_attempt_which_ends_what_fires(self, tmp_path, alerts_of):
        run = RecordedRun(FAILING)
        first = next(alert[0] for alert in replayed(run))
        middle = run.frames[len(run.frames) // 2].step
        earlier = spool(run, tmp_path, key="1", frames=[frame for frame in run.frames if frame.step <= first])
        spool(
            run, tmp_path, key="2", frames=[frame for frame in run.frames if frame.step >= middle], resume_step=middle
        )
        before, *_ = alerts_of(tmp_path)[run.name]
        assert (before["firing_step"], before["resolved_step"]) == (first, middle)
        (earlier / "end.json").write_text('{"state": "failed"}')
        before, *_ = alerts_of(tmp_path)[run.name]
        assert (before["firing_step"], before["resolved_step"]) == (first, first)

    def test_says_what_the_service_would_refuse_and_reads_the_rest(self, tmp_path, start):
        run = RecordedRun(HEALTHY)
        run.num_blocks += 1
        done = start(spool(run, tmp_path))
        assert done.returncode == 0
        assert "frames: 0" in done.stdout
        assert "would refuse it" in done.stderr


def spool(run, root, key="1", frames=None, **more):
    """The frames of a run in a spool, as `attach` would have left it."""
    blocks = [f"h.{i}" for i in range(run.num_blocks)]
    registration = {"project": "default", "run": run.name, "blocks": blocks, "attempt_key": key} | more
    written = Spool.create(root, registration, f"rank0-{key}")
    for frame in run.frames if frames is None else frames:
        written.append(frame.to_json())
    written.close()
    return written.folder


class TestARunThatIsTooShort:
    @pytest.fixture
    def short(self, tmp_path):
        with gzip.open(FAILING, "rt") as file:
            lines = [next(file) for _ in range(3)]
        assert [json.loads(line)["t"] for line in lines] == ["run", "loss", "frame"]
        path = tmp_path / "short.jsonl"
        path.write_text("".join([*lines, '{"t": "end"}\n']))
        return path

    def test_names_the_rules_that_could_not_fire(self, start, short):
        (told,) = [line for line in start(short).stdout.splitlines() if line.startswith("rules that could not fire")]
        assert told.startswith("rules that could not fire on some of these runs: batch-repeats needs ")
        assert told.endswith(" others; --json lists them")

    def test_has_a_reason_for_each_rule_but_those_that_fire_at_once(self, start, short):
        (found,) = json.loads(start(short, "--json").stdout)
        assert all(bool(one["lacks"]) != bool(one["waits_for"]) for one in found["not_judged"])
        waiting = {one["rule"]: one["waits_for"] for one in found["waiting"]}
        assert waiting["vanishing-gradient"] == "2 more samples and 10 more steps"
        told = {one["rule"] for one in found["not_judged"]} | {*waiting}
        at_once = {rule.name for rule in PACK if rule.on == "frame" and rule.name not in told}
        assert at_once == {"loss-changes-sign", "loss-not-finite", "non-finite-update"}


class TestAStoredRun:
    @pytest.fixture
    def run(self):
        return RecordedRun(FAILING)

    @pytest.fixture
    def stored(self, run, tmp_path):
        """A database that holds the run, and the run's id."""
        database = SqliteFile(tmp_path / "tsemon.db")
        with closing(Api(database)) as api:
            run_id = api.register(**run.registration())
            api.send_ok(run_id, run.frames)
        return database.url, run_id

    def test_is_replayed_by_its_name_or_its_id(self, run, stored, alerts_of):
        database, run_id = stored
        by_name, by_id = (alerts_of("--database", database, "--run", name) for name in (run.name, run_id))
        assert by_name == by_id == {run.name: alerts_of(FAILING)[run.name]}

    def test_is_replayed_by_the_service_that_holds_it(self, run, alerts_of, tmp_path):
        with ServiceProcess(tmp_path / "served.db") as service, httpx.Client(base_url=f"{service.url}/api/v1") as http:
            blocks = [f"h.{i}" for i in range(run.num_blocks)]
            run_id = http.post("/runs", json={"run": run.name, "blocks": blocks}).json()["run_id"]
            body = frames_to_body("w", 1, [frame.to_json() for frame in run.frames])
            http.post(f"/runs/{run_id}/frames", content=body).raise_for_status()
            rules = tmp_path / "rules.yaml"
            rules.write_text(RULES)
            expected = [alerts_of(FAILING, *more)[run.name] for more in ((), ("--rules", rules))]
            for name in (run.name, run_id):
                served = ("--server", service.url, "--run", name)
                assert [alerts_of(*served, *more)[run.name] for more in ((), ("--rules", rules))] == expected

    def test_of_a_name_that_two_projects_have_is_told_by_its_id(self, run, stored, start):
        database, _ = stored
        with closing(Api(SqliteFile(database.removeprefix("sqlite:///")))) as api:
            api.register(**run.registration(), project="other")
        done = start("--database", database, "--run", run.name)
        assert done.returncode == 2
        assert "projects other and default have one each; give its id" in done.stderr

    def test_is_told_where_there_is_none_of_that_name(self, stored, start):
        done = start("--database", stored[0], "--run", "other")
        assert (done.returncode, done.stdout) == (2, "")
        assert "no run has the id 'other'" in done.stderr


class TestTheEndOfARun:
    @pytest.fixture
    def run(self):
        return RecordedRun(FAILING)

    @pytest.fixture
    def ends_of(self, start):
        def ends_of(*arguments):
            (found,) = json.loads(start(*arguments, "--json").stdout)
            return [(one["state"], one["ended_step"]) for one in found["incidents"]]

        return ends_of

    @pytest.fixture
    def ended(self, run):
        return [("ended", run.frames[-1].step)]

    def test_ends_the_incidents_of_a_trace(self, ends_of, ended, tmp_path):
        assert ends_of(FAILING) == ended
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(gzip.decompress(FAILING.read_bytes()).rpartition(b'{"t": "end"')[0])
        assert ends_of(cut) == [("open", None)]

    def test_ends_those_of_a_spool(self, run, ends_of, ended, tmp_path):
        folder = spool(run, tmp_path)
        assert ends_of(folder) == [("open", None)]
        (folder / "end.json").write_text('{"state": "finished"}')
        assert ends_of(folder) == ended

    def test_ends_those_of_a_stored_run_as_on_the_server(self, run, ends_of, ended, tmp_path):
        database = SqliteFile(tmp_path / "tsemon.db")
        with closing(Api(database, rules=PACK)) as api:
            run_id = api.register(**run.registration())
            api.send_ok(run_id, run.frames)
            assert ends_of("--database", database.url, "--run", run_id) == [("open", None)]
            api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
            (served,) = api.get("/incidents", run=run_id)["incidents"]
        assert [(served["state"], served["ended_step"])] == ended
        assert ends_of("--database", database.url, "--run", run_id) == ended


class TestWhatCannotBeReplayed:
    @pytest.mark.parametrize(
        ("arguments", "code", "text"),
        [
            ((), 2, "expected files to replay"),
            (("no-such.jsonl",), 1, "no-such.jsonl is not there"),
            ((".",), 1, "expected traces (.jsonl or .jsonl.gz) or spools in ., which has neither"),
            (("--run", "gpt"), 2, "expected it with either --server or --database"),
            ((FAILING, "--database", "sqlite:///x.db"), 2, "expected it with either --server or --database"),
            (("--run", "gpt", "--server", "http://127.0.0.1:9"), 1, "no answer from http://127.0.0.1:9"),
            (("--database", "sqlite:///no-such.db", "--run", "gpt"), 1, "no-such.db"),
        ],
    )
    def test_is_told_in_one_line(self, arguments, code, text, tmp_path, start, monkeypatch):
        monkeypatch.chdir(tmp_path)
        done = start(*arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert text in done.stderr
        assert done.stderr.startswith("tsemon: ")
        assert done.stderr.count("\n") == 1, done.stderr

    def test_is_told_beside_what_can(self, tmp_path, start):
        broken = tmp_path / "broken.jsonl"
        broken.write_text("nonsense\n")
        done = start(FAILING, broken, "--json")
        assert done.returncode == 1
        assert [result["run"] for result in json.loads(done.stdout)] == ["tse_post6_warm-s0"]
        assert done.stderr == f"tsemon: {broken}, line 1: Invalid JSON: expected ident at line 1 column 2\n"

    @pytest.mark.parametrize("recorded", [(FAILING,), ("--server", "http://127.0.0.1:9", "--run", "gpt")])
    def test_names_the_line_of_a_wrong_rule(self, tmp_path, start, recorded):
        wrong = tmp_path / "rules.yaml"
        wrong.write_text(RULES.replace("above: 4.5", "over: 4.5"))
        done = start(*recorded, "--rules", wrong)
        assert done.returncode == 1
        assert f"{wrong} line 7" in done.stderr

    def test_is_read_as_far_as_it_goes_where_it_breaks_off(self, tmp_path, start):
        whole = gzip.decompress(FAILING.read_bytes())
        broken = tmp_path / "broken.jsonl"
        broken.write_bytes(whole[: len(whole) // 2])
        done = start(broken)
        assert done.returncode == 0
        assert "breaks off" in done.stderr

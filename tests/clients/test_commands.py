"""`tsemon runs`, `series` and `alerts`, in a pipe and on a terminal, against a real service."""

import csv
import io
import json
import subprocess
import sys

import httpx
import pytest

from tests.clients.command_line import (
    DEPTH,
    NAN,
    Terminal,
    change,
    environment,
    filled_service,
    frame,
    in_this_process,
    on_terminal,
    open_alert,
    register,
    resolve_alerts,
    send,
)
from tsemon.wire import API
from tsemon_answers.alerts import Alert
from tsemon_client.commands.alerts import state_of
from tsemon_client.commands.incidents import NONE_OPEN
from tsemon_client.commands.sub_step import first_zoom


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with filled_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run(service, monkeypatch, capsys):
    return in_this_process(service, monkeypatch, capsys)


def in_bash(service, line):
    script = f'set -o pipefail; tsemon() {{ "{sys.executable}" -m tsemon "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", script], env=environment(service), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def brief_id(service):
    """A run of the project brief, which is gone again for the other tests."""
    run_id = register(service.url, "brief", "brief")
    yield run_id
    httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


class TestRuns:
    def test_are_listed_in_aligned_columns(self, run):
        code, shown, told = run("runs", "--order", "name", "--project", "demo")
        assert (code, told) == (0, "")
        head, line = shown.splitlines()
        assert head.split() == ["condition", "run", "step", "loss", "incident", "heard", "of", "id"]
        assert line.split()[:5] == ["running", "demo/gpt", "190", "1.2", "entropy-collapse"]
        assert line.index("demo/gpt") == head.index("run")

    def test_are_listed_as_json_and_csv(self, run, service):
        code, shown, _ = run("runs", "--json", "--order", "name")
        by_json = json.loads(shown)
        assert code == 0
        assert {record["run_id"] for record in by_json} == set(service.ids.values())
        by_csv = rows_of(run("runs", "--csv", "--order", "name")[1])
        assert [row["run_id"] for row in by_csv] == [record["run_id"] for record in by_json]
        assert next(row for row in by_csv if row["run"] == "vit")["tags"] == '["sweep", "big"]'

    def test_give_a_spreadsheet_no_formula_to_run(self, run, service):
        run_id = register(service.url, "-2", "=1+1")
        try:
            (row,) = rows_of(run("runs", "--csv", "--match", "=1+1")[1])
            assert (row["project"], row["run"]) == ("'=1+1", "'-2")
        finally:
            httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()

    @pytest.mark.parametrize(
        ("filters", "names"),
        [
            (("--match", "VI"), ["vit"]),
            (("--tag", "sweep"), ["gpt", "vit"]),
            (("--tag", "sweep", "--tag", "big"), ["vit"]),
            (("--condition", "finished"), ["vit"]),
            (("--state", "finished"), ["vit"]),
            (("--project", "demo"), ["gpt"]),
            (("--match", "nothing like it"), []),
        ],
    )
    def test_are_chosen_by_filters(self, run, filters, names):
        code, shown, _ = run("runs", *filters, "--order", "name", "--json")
        assert (code, [record["run"] for record in json.loads(shown)]) == (0, names)

    def test_that_are_more_than_the_limit_are_told_of(self, run):
        _, shown, told = run("runs", "--limit", "2")
        assert len(shown.splitlines()) == 1 + 2
        assert "there are more than these 2" in told

    def test_of_which_there_are_none_are_told_on_stderr(self, run):
        assert run("runs", "--match", "nothing like it") == (0, "", "no runs match\n")

    def test_have_curves_on_a_terminal(self, run):
        code, shown, _ = run("runs", "--project", "demo", columns=140)
        assert code == 0
        assert "█" in shown
        assert "▁" in shown

    def test_name_the_worst_layer(self, run, service, brief_id):
        send(service.url, brief_id, [frame(0, token_diversity=[0.9, 0.8, 0.7, 0.6, 0.5])])
        _, line = run("runs", "--project", "brief", columns=140)[1].splitlines()
        assert "4: token_diversity 0.5" in line

    @pytest.mark.parametrize("metric", ["nonfinite", "nonfinite_entries"])
    def test_with_values_that_are_not_finite_say_in_which_layer(self, run, service, brief_id, metric):
        send(service.url, brief_id, [frame(0, **{metric: [0.0, 0.0, 0.125, 0.0, 0.0]})])
        _, line = run("runs", "--project", "brief", columns=140)[1].splitlines()
        assert " 2: not finite " in line

    def test_are_cut_to_a_narrow_terminal(self, run):
        _, shown, _ = run("runs", "--project", "demo", columns=70)
        assert max(map(len, shown.splitlines())) <= 70


class TestARun:
    @pytest.mark.parametrize("name", ["gpt", "demo/gpt", "id"])
    def test_is_shown_by_name_and_id(self, run, service, name):
        code, shown, _ = run("runs", service.ids["demo/gpt"] if name == "id" else name)
        assert code == 0
        for text in ("demo/gpt", service.ids["demo/gpt"], "token_similarity", "5 layers", "model.depth", "loss is 20"):
            assert text in shown

    def test_is_shown_as_json(self, run):
        assert json.loads(run("runs", "gpt", "--json")[1])["config"] == {"lr": 0.1, "model": {"depth": DEPTH}}

    def test_has_an_old_alert_that_fires_behind_many_that_are_over(self, run, service, brief_id):
        open_alert(service.database, brief_id, "dead-units")
        resolve_alerts(service.database, brief_id, 51)
        shown = run("runs", "brief")[1]
        assert "dead-units: loss is 20" in shown
        assert "over at once" not in shown

    def test_of_an_ambiguous_name_is_asked_for(self, run):
        code, shown, told = run("runs", "twin")
        assert (code, shown) == (2, "")
        assert told.startswith("tsemon: expected one run named 'twin', but there are several: ")
        assert "a/twin" in told
        assert "b/twin" in told
        assert run("runs", "b/twin")[0] == 0

    def test_is_not_one_with_the_project_and_name_of_another(self, run, service):
        run_id = register(service.url, "b/twin", "a")
        try:
            assert "b/twin" in run("runs", "b/twin").out.splitlines()[0]
            assert json.loads(run("runs", "b/twin", "--json")[1])["project"] == "b"
            assert json.loads(run("runs", "a/b/twin", "--json")[1])["run_id"] == run_id
        finally:
            httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()

    @pytest.mark.parametrize(
        ("name", "hint"), [("gtp", "demo/gpt"), ("demo/gptt", "demo/gpt"), ("xyzzy", "the latest are")]
    )
    def test_of_an_unknown_name_is_told_with_the_nearest(self, run, name, hint):
        code, _, told = run("runs", name)
        assert code == 2
        assert f"no run has the name or id '{name}'" in told
        assert hint in told
        assert told.count("\n") == 1


class TestSeries:
    def test_are_a_table_in_a_pipe(self, run):
        code, shown, _ = run("series", "gpt", "loss", "--to", "20")
        assert code == 0
        assert [line.split() for line in shown.splitlines()] == [
            ["step", "min", "mean", "max", "nonfinite"],
            ["0", "5", "5", "5", "0"],
            ["10", "4.8", "4.8", "4.8", "0"],
            ["20", "4.6", "4.6", "4.6", "0"],
        ]

    def test_are_json_and_csv(self, run):
        assert json.loads(run("series", "gpt", "loss", "--from", "180", "--json")[1])["step"] == [180, 190]
        (row,) = rows_of(run("series", "gpt", "score", "--from", "60", "--to", "60", "--csv")[1])
        assert row == {"step": "60", "min": "", "mean": "", "max": "", "nonfinite": "1"}

    def test_of_a_layer_and_a_head(self, run):
        asked = json.loads(run("series", "gpt", "token_similarity", "--layer", "-1", "--json")[1])
        assert (asked["layer"], asked["mean"][0]) == (4, pytest.approx(0.4))
        asked = json.loads(run("series", "gpt", "attention_entropy", "--layer", "1", "--head", "1", "--json")[1])
        assert (asked["layer"], asked["head"]) == (1, 1)

    def test_of_all_layers(self, run):
        rows = rows_of(run("series", "gpt", "token_similarity", "--csv", "--to", "10")[1])
        assert [(row["step"], row["layer"]) for row in rows] == [(s, str(i)) for s in ("0", "10") for i in range(5)]
        head, first, *_ = run("series", "gpt", "token_similarity")[1].splitlines()
        assert (head.split(), first.split()) == (["step", *"01234"], ["0", "0", "0.1", "0.2", "0.3", "0.4"])

    def test_are_named_where_none_is_asked_for(self, run):
        lines = [line.split() for line in run("series", "gpt")[1].splitlines()]
        assert ["loss"] in lines
        assert ["token_similarity", "5"] in lines
        assert ["attention_entropy", "4", "2"] in lines

    def test_are_a_curve_on_a_terminal(self, run):
        code, shown, _ = run("series", "gpt", "score", columns=60)
        assert code == 0
        assert "⠀" in shown, "braille"
        assert "1 samples are not finite, the first about step 60" in shown
        assert "newest 1.2, least 1.2, largest 5" in shown
        assert max(map(len, shown.splitlines())) <= 60

    def test_of_all_layers_are_a_line_each_on_a_terminal(self, run):
        _, shown, _ = run("series", "gpt", "token_similarity", columns=80)
        rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()[:1].isdigit()}
        assert "▁▁▁" in rows["0"]
        assert "███" in rows["4"]
        assert rows["0"].rstrip().endswith("input")
        assert rows["4"].rstrip().endswith("h.3")

    def test_say_what_is_wrong_with_the_metric(self, run):
        code, _, told = run("series", "gpt", "los")
        assert code == 2
        assert "did you mean 'loss'" in told

    @pytest.mark.parametrize("layer", [(), ("--layer", "0")])
    def test_that_were_never_recorded_are_told(self, run, layer):
        code, _, told = run("series", "gpt", "spectral_gap", *layer)
        assert code == 2
        assert "demo/gpt has no 'spectral_gap'; `tsemon series " in told

    def test_of_a_run_without_samples_are_empty(self, run):
        assert run("series", "a/twin", "loss") == (0, "", "a/twin: loss: no samples\n")

    def test_have_steps_in_a_pipe_that_a_program_can_read(self, run, service):
        run_id = register(service.url, "long")
        send(service.url, run_id, [frame(12_345, seq=0)])
        for asked in ("loss", "token_similarity"):
            assert run("series", "long", asked)[1].splitlines()[1].split()[0] == "12345"
            assert run("series", "long", asked, "--table", columns=100)[1].splitlines()[1].split()[0] == "12,345"
        assert " 12345 " in run("runs", "--match", "long")[1]
        assert " 12,345 " in run("runs", "--match", "long", columns=200)[1]
        httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()


class TestAlerts:
    def test_are_listed(self, run):
        code, shown, _ = run("alerts", "--run", "gpt")
        assert code == 0
        head, *lines = shown.splitlines()
        assert head.split() == ["id", "state", "severity", "rule", "run", "step", "changed", "summary"]
        assert [line.split()[1:5] for line in lines] == [
            ["superseded", "critical", "entropy-collapse", "demo/gpt"],
            ["firing", "warning", "loss-spike", "demo/gpt"],
        ]

    @pytest.mark.parametrize(
        ("filters", "rules"),
        [
            (("--state", "resolved"), ["entropy-collapse"]),
            (("--severity", "warning"), ["loss-spike"]),
            (("--rule", "loss-spike"), ["loss-spike"]),
            (("--family", "entropy"), ["entropy-collapse"]),
            (("--project", "demo"), ["entropy-collapse", "loss-spike"]),
            (("--since", "1h", "--project", "demo"), ["entropy-collapse", "loss-spike"]),
            (("--since", "2999-01-31T12:00:00Z"), []),
            (("--since", "2999-01-31"), []),
        ],
    )
    def test_are_chosen_by_filters(self, run, filters, rules):
        code, shown, _ = run("alerts", *filters, "--json")
        assert (code, [record["rule"] for record in json.loads(shown)]) == (0, rules)

    def test_that_fire_exit_3(self, run):
        code, shown, _ = run("alerts", "--firing", "--csv")
        assert code == 3
        assert [row["rule"] for row in rows_of(shown)] == ["loss-spike"]
        assert run("alerts", "--firing", "--json")[0] == 3
        assert run("alerts", "--firing", "--severity", "critical") == (0, "", "nothing fires\n")

    def test_that_are_silenced_do_not_exit_3(self, run, service):
        run_id = register(service.url, "quiet", "quiet")
        open_alert(service.database, run_id, "hushed", severity="info")
        assert run("alerts", "--firing", "--project", "quiet")[0] == 3
        api = f"{service.url}{API}"
        silence = {"project": "quiet", "until": "2999-01-01T00:00:00Z", "created_by": "ann", "reason": "a sweep"}
        httpx.post(f"{api}/silences", json=silence).raise_for_status()
        assert [record["silenced"] for record in json.loads(run("alerts", "--project", "quiet", "--json")[1])] == [True]
        assert run("alerts", "--firing", "--project", "quiet") == (0, "", "nothing fires\n")

    def test_of_a_project_that_has_no_runs_are_none_and_that_is_told(self, run):
        told = "the service has no runs of project 'typo'\nnothing fires\n"
        assert run("alerts", "--firing", "--project", "typo") == (0, "", told)

    def test_that_somebody_has_seen_to_do_not_exit_3(self, run, service, brief_id):
        open_alert(service.database, brief_id)
        (alert,) = json.loads(run("alerts", "--project", "brief", "--json")[1])
        assert run("alerts", "--firing", "--project", "brief")[0] == 3
        httpx.post(f"{service.url}{API}/alerts/{alert['alert_id']}/ack", json={"by": "ann"}).raise_for_status()
        assert run("alerts", "--firing", "--project", "brief") == (0, "", "nothing fires\n")

    def test_exit_1_where_nobody_answers(self, run):
        code, shown, told = run("alerts", "--firing", "--server", "http://127.0.0.1:9")
        assert (code, shown) == (1, "")
        assert told.startswith("tsemon: no answer from http://127.0.0.1:9")

    def test_are_shown_one_with_evidence_and_advice(self, run):
        (record,) = json.loads(run("alerts", "--rule", "loss-spike", "--json")[1])
        _, shown, _ = run("alerts", record["alert_id"])
        assert "Lower the rate." in shown
        assert '"value": 20.0' in shown
        assert json.loads(run("alerts", record["alert_id"], "--json")[1]) == record

    def test_have_their_summary_below_them_on_a_terminal(self, run):
        code, shown, _ = run("alerts", "--firing", columns=60)
        assert code == 3
        assert "loss is 20 (loss-spike)" in shown
        assert max(map(len, shown.splitlines())) <= 60


class TestTheStateOfAnAlert:
    @pytest.mark.parametrize(("superseded", "word"), [(True, "superseded"), (False, "resolved")])
    def test_is_superseded_while_its_incident_lasts(self, superseded, word):
        over = {"state": "resolved", "resolved_reason": "clear", "silenced": False}
        assert state_of(Alert.model_construct(**over, superseded=superseded))[0] == word


class TestIncidents:
    def test_are_listed_with_their_place_and_what_else_fired(self, run):
        code, shown, _ = run("incidents", "--run", "gpt")
        assert code == 0
        head, line = shown.splitlines()
        assert head.split() == [
            *("id", "state", "severity", "family", "rule", "run", "where", "since", "step", "changed"),
            *("summary", "also", "fired"),
        ]
        assert line.split()[1:9] == ["open", "critical", "entropy", "entropy-collapse", "demo/gpt", "-", "20", "40"]
        assert line.endswith("loss-spike")

    @pytest.mark.parametrize(
        ("filters", "rules"),
        [
            (("--state", "open"), ["entropy-collapse"]),
            (("--state", "recovered"), []),
            (("--severity", "warning"), []),
            (("--severity", "critical"), ["entropy-collapse"]),
            (("--rule", "entropy-collapse"), ["entropy-collapse"]),
            (("--rule", "loss-spike"), []),
            (("--family", "entropy"), ["entropy-collapse"]),
            (("--project", "vision"), []),
            (("--run", "demo/gpt", "--since", "1h"), ["entropy-collapse"]),
            (("--since", "2999-01-31T12:00:00Z"), []),
        ],
    )
    def test_are_chosen_by_filters(self, run, filters, rules):
        code, shown, _ = run("incidents", *filters, "--json")
        assert (code, [record["rule"] for record in json.loads(shown)]) == (0, rules)

    def test_that_are_open_exit_3(self, run):
        code, shown, _ = run("incidents", "--open", "--csv")
        assert code == 3
        assert [row["rule"] for row in rows_of(shown)] == ["entropy-collapse"]
        assert run("incidents", "--open", "--project", "vision") == (0, "", f"{NONE_OPEN}\n")

    def test_that_somebody_has_acknowledged_do_not_exit_3(self, run, service, brief_id):
        open_alert(service.database, brief_id)
        (alert,) = json.loads(run("alerts", "--project", "brief", "--json")[1])
        assert run("incidents", "--open", "--project", "brief")[0] == 3
        httpx.post(f"{service.url}{API}/alerts/{alert['alert_id']}/ack", json={"by": "ann"}).raise_for_status()
        assert run("incidents", "--open", "--project", "brief") == (0, "", f"{NONE_OPEN}\n")
        assert "open, acknowledged" in run("incidents", "--project", "brief").out

    def test_that_are_more_than_the_limit_are_told_of(self, run, service, brief_id):
        open_alert(service.database, brief_id)
        assert run("incidents", "--limit", "1").err == "there are more than these 1; --limit shows more\n"

    def test_of_a_project_that_has_no_runs_are_none_and_that_is_told(self, run):
        told = "the service has no runs of project 'typo'\nno incidents\n"
        assert run("incidents", "--project", "typo") == (0, "", told)

    def test_are_shown_one_with_advice_and_the_state_of_its_consequences(self, run):
        (record,) = json.loads(run("incidents", "--run", "gpt", "--json")[1])
        _, shown, _ = run("incidents", record["incident_id"])
        assert "Lower the rate. (A paper.)" in shown
        assert "step 20" in shown
        assert shown.splitlines()[-2].split() == ["alert", "state", "rule", "fired", "over"]
        assert shown.splitlines()[-1].split()[1:] == ["firing", "loss-spike", "40", "-"]
        detail = json.loads(run("incidents", record["incident_id"], "--json")[1])
        assert detail.pop("within")["text"].startswith("The sub-step is unknown")
        assert detail.pop("sequences") == []
        assert detail == record

    def test_say_until_which_step_the_verdict_may_change(self, run, service, brief_id):
        open_alert(service.database, brief_id, evidence={"blocks": [1, 2], "left_step": 10})
        (record,) = json.loads(run("incidents", "--project", "brief", "--json")[1])
        shown = run("incidents", record["incident_id"]).out
        assert "may still change until step 100" in shown
        assert "blocks 1 to 2" in shown
        send(service.url, brief_id, [frame(100)])
        assert "settled" in run("incidents", record["incident_id"]).out

    def test_that_are_not_there_are_an_error(self, run, service):
        run_id = register(service.url, "gone", "gone")
        open_alert(service.database, run_id)
        (record,) = json.loads(run("incidents", "--project", "gone", "--json")[1])
        httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()
        for gone in (record["incident_id"], "999999"):
            code, shown, told = run("incidents", gone)
            assert (code, shown) == (2, "")
            assert told.startswith(f"tsemon: no incident has the id '{gone}'; ")
        code, shown, told = run("incidents", "--run", run_id)
        assert (code, shown) == (2, "")
        assert f"no run has the name or id '{run_id}'" in told

    def test_have_their_summary_below_them_on_a_terminal(self, run):
        code, shown, _ = run("incidents", "--open", columns=60)
        assert code == 3
        assert "entropy-collapse: loss is 20" in shown
        assert "also fired: loss-spike" in shown
        assert max(map(len, shown.splitlines())) <= 60


class TestASubStep:
    def test_after_a_zoom_waits_only_for_so_long(self, run, service, brief_id):
        send(service.url, brief_id, [frame(0)])
        code, out, err = run("sub-step", "brief/brief", "--zoom", "--timeout", "0")
        assert (code, out) == (1, "")
        assert "tsemon: the run has sent 0 of 4 close samples within 0 s" in err

    def test_after_a_zoom_has_no_step_of_its_own(self, run):
        code, _, err = run("sub-step", "demo/gpt", "--zoom", "--step", 3)
        assert (code, "--zoom reads the newest samples" in err) == (2, True)

    def test_after_a_zoom_leaves_quietly_at_ctrl_c(self, service, brief_id):
        send(service.url, brief_id, [frame(0)])
        terminal = Terminal(service, "sub-step", "brief/brief", "--zoom")
        terminal.read_until("waiting for close samples of brief/brief: 0 of 4")
        terminal.interrupt()
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.shown
        shown = terminal.output.decode()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is shown again"

    def test_of_a_run_that_is_over_is_of_the_stored_samples(self, run, service, brief_id):
        send(service.url, brief_id, [frame(0)])
        change(service.url, brief_id, "finished")
        code, out, err = run("sub-step", "brief/brief", "--zoom")
        assert (code, out.startswith("Newest values up to step 0: ")) == (0, True)
        assert "cannot zoom in: it is finished; this is from its stored samples" in err

    def test_after_a_zoom_is_of_the_stored_samples_if_the_run_ends_before(self, service, brief_id):
        send(service.url, brief_id, [frame(0)])
        terminal = Terminal(service, "sub-step", "brief/brief", "--zoom")
        terminal.read_until("waiting for close samples")
        change(service.url, brief_id, "failed")
        assert terminal.wait() == 0
        assert "the run has failed; this is from its stored samples" in terminal.shown
        assert "Newest values up to step 0: The sub-step is unknown" in terminal.shown

    @pytest.mark.parametrize(
        ("steps", "zoom"),
        [
            ([], ([], False)),
            ([1000], ([1000], False)),
            ([1000, 1500, 1504, 1509], ([1500, 1504, 1509], False)),
            ([1000, 1500, 1504, 1509, 1513], ([1500, 1504, 1509, 1513], True)),
            ([1000, 1500, 1504, 1552], ([1500, 1504], True)),
            ([7, 8, 9, 10, 11], ([7, 8, 9, 10], True)),
        ],
    )
    def test_is_read_from_the_first_samples_that_are_close(self, steps, zoom):
        assert first_zoom(steps) == zoom


@pytest.fixture(scope="class")
def burnt_id(service):
    run_id = register(service.url, "burnt", "burnt")
    send(service.url, run_id, [frame(step, NAN if step > 30 else 1.0) for step in range(0, 60, 10)])
    change(service.url, run_id, "failed")
    yield run_id
    httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()  # it is gone again for the other tests


@pytest.mark.usefixtures("burnt_id")
class TestARunThatEndedWithALossThatIsNotFinite:
    def test_is_told_so_in_the_list(self, run):
        _, line = run("runs", "--project", "burnt")[1].splitlines()
        assert line.split("  ")[0] == "failed"
        for text in ("not finite", "loss-not-finite"):
            assert text in line

    def test_has_a_mark_in_its_curve_where_the_loss_is_not_finite(self, run):
        _, line = run("runs", "--project", "burnt", columns=160)[1].splitlines()
        assert "▁▁▁▁xx" in line

    def test_is_told_so_by_itself(self, run, burnt_id):
        shown = run("runs", burnt_id)[1]
        assert "loss                        not finite" in shown
        assert "1 at the end" in shown
        assert "fired to the end  critical  burnt/burnt" in shown

    def test_has_one_word_for_what_fired_to_its_end(self, run, burnt_id):
        (alert,) = json.loads(run("alerts", "--run", burnt_id, "--json")[1])
        assert ["state", "fired", "to", "the", "end"] in [
            line.split() for line in run("alerts", alert["alert_id"])[1].splitlines()
        ]
        assert 'alert="fired to the end" severity=critical rule=loss-not-finite step=40 ' in run("tail", burnt_id)[1]
        assert (
            "ended critical loss-not-finite  since step 40  The loss is not finite"
            in run("tail", burnt_id, columns=100)[1]
        )

    def test_is_found_by_what_fired_to_its_end(self, run):
        code, shown, _ = run("alerts", "--at-end", "--project", "burnt", "--csv")
        assert (code, [row["rule"] for row in rows_of(shown)]) == (3, ["loss-not-finite"])
        assert run("alerts", "--at-end", "--project", "demo") == (0, "", "nothing fired to the end of a run\n")

    def test_is_found_by_an_incident_that_did_not_recover(self, run):
        code, shown, _ = run("incidents", "--at-end", "--project", "burnt", "--csv")
        assert (code, [row["rule"] for row in rows_of(shown)]) == (3, ["loss-not-finite"])
        assert run("incidents", "--at-end", "--project", "demo") == (0, "", "no incidents that did not recover\n")

    def test_is_not_passed_over_where_nothing_fires(self, run):
        code, shown, told = run("alerts", "--firing", "--project", "burnt")
        assert (code, shown) == (0, "")
        assert told.splitlines() == [
            "runs that have ended are left out; --at-end shows what fired to their end",
            "nothing fires",
        ]


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("runs", "--json", "--csv"), "--json or --csv, got both"),
            (("runs", "gpt", "--state", "running"), "a run or filters"),
            (("runs", "--condition", "gone"), "--condition must be one of running, silent"),
            (("alerts", "--severity", "awful"), "--severity must be one of info"),
            (("alerts", "--since", "yesterday"), "--since takes 30m"),
            (("alerts", "--since", "999999w"), "in the years 1 to 9999, got '999999w'"),
            (("alerts", "--firing", "--state", "resolved"), "--firing or --state"),
            (("alerts", "--firing", "--at-end"), "--firing or --at-end"),
            (("alerts", "--firing", "--rule", "loss-not-finit"), "did you mean 'loss-not-finite'?"),
            (("alerts", "--follow", "--family", "nonsense"), "no family is named 'nonsense'; known are 'data', 'dead'"),
            (("alerts", "3", "--firing"), "an ALERT or --firing"),
            (("alerts", "3", "--run", "gpt"), "an ALERT or --run"),
            (("alerts", "demo/gpt"), "the id of an alert, a number, got 'demo/gpt'; --run lists the alerts of a run"),
            (("incidents", "--open", "--state", "ended"), "--open or --state"),
            (("incidents", "--open", "--at-end"), "--at-end, --open or --state"),
            (("incidents", "--follow", "--csv"), "--follow with --json"),
            (("incidents", "3", "--follow"), "an INCIDENT or --follow"),
            (("incidents", "--since", "yesterday"), "--since takes 30m"),
            (("incidents", "--rule", "loss-not-finit"), "did you mean 'loss-not-finite'?"),
            (("incidents", "--state", "firing"), "--state must be one of open"),
            (("incidents", "--severity", "info"), "--severity must be one of warning"),
            (("incidents", "--family", "nonsense"), "no family is named 'nonsense'"),
            (("incidents", "3", "--open"), "an INCIDENT or --open"),
            (("incidents", "demo/gpt"), "the id of an incident, a number, got 'demo/gpt'"),
            (("rules", "disable", "loss-spike", "--project", ""), "project: expected at least one character"),
            (("series", "gpt", "attention_entropy", "--head", "1"), "--layer with --head"),
            (("series", "gpt", "loss", "--from", "10", "--to", "5"), "swap them"),
            (("series", "gpt", "loss", "--layer", "3"), "'loss' is one number per step"),
            (("series", "gpt", "token_similarity", "--layer", "99"), "layers 0 to 4, got 99"),
            (("rules", "show", "loss-spyke"), "did you mean 'loss-spike'"),
            (("admin", "check", "--database", "tsemon.db"), "expected a database URL"),
            (("runs", "--server", "nonsense"), "http://"),
        ],
    )
    def test_exits_2_with_one_line(self, run, arguments, text):
        code, shown, told = run(*arguments)
        assert (code, shown) == (2, "")
        assert told.startswith("tsemon: ")
        assert text in told
        assert told.count("\n") == 1

    def test_exits_2_for_an_option_that_is_none(self, run):
        assert run("runs", "--nonsense")[0] == 2


class TestOutput:
    def test_that_nobody_reads_to_its_end_ends_quietly(self, service):
        done = in_bash(service, "tsemon runs --csv | head -1")
        assert done.stdout.startswith("run_id,")
        assert done.stderr == ""

    @pytest.mark.parametrize("arguments", ["runs", "runs gpt --json"], ids=["is short", "is long"])
    def test_that_nobody_reads_ends_as_if_by_sigpipe(self, service, arguments):
        done = in_bash(service, f"tsemon {arguments} | true")
        assert (done.returncode, done.stdout, done.stderr) == (141, "", "")

    @pytest.mark.parametrize("arguments", ["runs", "runs gpt --json", "tail gpt --once"])
    def test_that_a_full_disk_does_not_take_is_told_in_one_line(self, service, arguments):
        done = in_bash(service, f"tsemon {arguments} > /dev/full")
        assert (done.returncode, done.stderr) == (1, "tsemon: No space left on device\n")

    def test_may_have_what_the_encoding_has_not(self, service):
        code, shown = on_terminal(service, "series", "gpt", "token_similarity", PYTHONIOENCODING="ascii")
        assert code == 0
        assert "@@@" in shown
        shown = in_bash(service, "PYTHONIOENCODING=ascii tsemon series gpt loss --plot").stdout
        assert "***" in shown
        assert "\\u" not in shown

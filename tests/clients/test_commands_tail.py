"""`tsemon tail`, `tsemon alerts --follow` and `tsemon incidents --follow`: what goes on, as it goes on."""

import functools
import json
import subprocess
import threading
from contextlib import contextmanager

import pytest

from tests.clients.command_line import (
    NAN,
    Terminal,
    change,
    environment,
    filled_service,
    frame,
    in_this_process,
    open_alert,
    register,
    resolve_alerts,
    send,
)
from tests.processes import start_python, start_tsemon
from tsemon_client import Client
from tsemon_client.commands.alerts import state_of
from tsemon_client.commands.tail import Lines, Watched


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with filled_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run(service, monkeypatch, capsys):
    return in_this_process(service, monkeypatch, capsys)


@pytest.fixture
def going_on(service, request):
    """The name and id of a run with two samples."""
    name = request.node.name
    run_id = register(service.url, name)
    send(service.url, run_id, [frame(0, 3.0), frame(10, 2.5)])
    return name, run_id


@contextmanager
def piped(service, *arguments, start=start_tsemon):
    """The command while it runs, its output in a pipe."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(*arguments, environment=environment(service), **streams)
    too_late = threading.Timer(240, process.kill)  # else a line that does not come is waited for without an end
    too_late.start()
    try:
        yield process
        process.wait(timeout=120)
    finally:
        too_late.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def broken(service):
    """A run whose last layer but one breaks after a while, and its loss once; its first layer was never measured."""
    run_id = register(service.url, "broken", "broken")
    grad_norms = [[NAN, 3.0, 3.0, 5.0]] * 3 + [[NAN, 3.0, NAN, 5.0]] * 20
    losses = [1.0] * 12 + [NAN] + [1.0] * 10
    frames = [frame(10 * i, losses[i], grad_norm=values) for i, values in enumerate(grad_norms)]
    send(service.url, run_id, frames)
    return run_id


class TestTailInAPipe:
    def test_prints_a_line_for_each_sample_incident_and_alert_and_ends_with_the_run(self, service, going_on):
        name, run_id = going_on
        with piped(service, "tail", name) as process:
            assert process.stdout.readline().startswith(
                "step=0 loss=3 attention_entropy.0=0.5 attention_entropy.1=0.5 "
            )
            assert process.stdout.readline().startswith("step=10 loss=2.5 ")
            send(service.url, run_id, [frame(20, NAN)])
            assert process.stdout.readline().startswith("step=20 loss=nan ")
            incident = process.stdout.readline()
            assert incident.startswith(
                'incident=open severity=critical rule=loss-not-finite since=20 step=20 summary="The loss is not finite'
            )
            alert = process.stdout.readline()
            assert alert.startswith("alert=firing severity=critical rule=loss-not-finite step=20 summary=")
            send(service.url, run_id, [frame(30, 2.0), frame(40, 1.5)])
            change(service.url, run_id, "finished")
            assert process.stdout.readline().startswith("step=30 loss=2 ")
            assert process.stdout.readline().startswith("step=40 loss=1.5 ")
            assert process.stdout.readline().startswith("incident=ended severity=critical rule=loss-not-finite ")
            assert process.stdout.readline().startswith(
                'alert="fired to the end" severity=critical rule=loss-not-finite '
            )
            assert process.stdout.readline() == "run=finished step=40\n"
        assert process.returncode == 0

    def test_goes_back_with_a_new_attempt(self, service, going_on):
        name, run_id = going_on
        with piped(service, "tail", name, "--lines", "1") as process:
            assert process.stdout.readline().startswith("step=10 ")
            register(service.url, name, resume_step=5)
            send(service.url, run_id, [frame(6, 9.0, seq=0)], attempt=2)
            assert process.stdout.readline().startswith("step=6 loss=9 ")
            change(service.url, run_id, "failed")
            assert process.stdout.readline() == "run=failed step=6\n"

    def test_waits_with_a_sample_that_comes_while_it_asks(self, service, going_on, capsys, monkeypatch):
        _, run_id = going_on
        ask = Client.series

        def series(client, *args, **kwargs):
            found = ask(client, *args, **kwargs)
            send(service.url, run_id, [frame(20, 2.0)])
            return found

        with Client(service.url) as client:
            lines = Lines(Watched(client, run_id, ("token_similarity",), 1), num_first=10, as_json=False)
            with monkeypatch.context() as patched:
                patched.setattr(Client, "series", series)
                lines.look()
            lines.tell()
            assert [line.split(" token")[0] for line in capsys.readouterr().out.splitlines()] == [
                "step=0 loss=3",
                "step=10 loss=2.5",
            ]
            lines.look()
            lines.tell()
            assert capsys.readouterr().out.startswith("step=20 loss=2 token_similarity.0-4=")

    def test_tells_how_alerts_ended_with_a_run_that_ends_while_it_asks(self, service, going_on, monkeypatch):
        _, run_id = going_on
        send(service.url, run_id, [frame(20, NAN)])
        ask = Client.run

        def end_and_ask(client, *args):
            change(service.url, run_id, "finished")
            return ask(client, *args)

        with Client(service.url) as client:
            watched = Watched(client, run_id, (), 1)
            watched.look()
            assert {one.state for one in watched.incidents} == {"open"}
            monkeypatch.setattr(Client, "run", end_and_ask)
            watched.look()
        assert {state_of(one)[0] for one in watched.alerts} == {"fired to the end"}
        assert {one.state for one in watched.incidents} == {"ended"}

    def test_prints_json_lines(self, run):
        done = run("tail", "vision/vit", "--json", "--groups", "2", "--metric", "token_similarity")
        sample, end = map(json.loads, done.out.splitlines())
        assert sample["token_similarity"] == {"0-1": pytest.approx(0.05), "2-4": pytest.approx(0.3)}
        assert end == {"run": "finished", "step": 0}

    def test_begins_with_the_last_samples(self, run):
        done = run("tail", "demo/gpt", "--once", "--lines", "3", "--metric", "attention_entropy")
        lines = [line for line in done.out.splitlines() if line.startswith("step=")]
        assert [line.split()[0] for line in lines] == ["step=170", "step=180", "step=190"]
        assert "attention_entropy.0=0.5" in lines[0]

    def test_says_that_a_layer_of_a_group_is_not_finite(self, run, broken):
        shown = run("tail", broken, "--once", "--groups", "2", "--metric", "grad_norm", "--lines", "21").out
        first, *_, newest = [line.partition(" grad_norm")[2] for line in shown.splitlines() if line.startswith("step=")]
        assert (first, newest) == (".0-1=3 grad_norm.2-3=4", ".0-1=3 grad_norm.2-3=nan")

    def test_does_not_forget_a_layer_that_was_not_finite_before(self, run, broken):
        shown = run("tail", broken, "--once", "--groups", "2", "--metric", "grad_norm", "--lines", "1").out
        assert "grad_norm.0-1=3 grad_norm.2-3=nan" in shown

    def test_tells_that_an_old_alert_is_over_behind_many_newer_ones(self, service, going_on):
        name, run_id = going_on
        send(service.url, run_id, [frame(20, NAN)])
        resolve_alerts(service.database, run_id, 51)
        with piped(service, "tail", name, "--lines", "1") as process:
            assert process.stdout.readline().startswith("step=20 ")
            told = [process.stdout.readline() for _ in range(52)]
            assert told[0].startswith("incident=open severity=critical rule=loss-not-finite ")
            assert told[1].startswith("alert=firing severity=critical rule=loss-not-finite ")
            change(service.url, run_id, "finished")
            assert process.stdout.readlines()[-2].startswith(
                'alert="fired to the end" severity=critical rule=loss-not-finite '
            )

    def test_names_the_metrics_there_are(self, run):
        done = run("tail", "demo/gpt", "--metric", "grad_norm")
        assert done.code == 2
        assert "it has attention_entropy, token_similarity" in done.err


class TestTailOnATerminal:
    def test_shows_the_run_as_it_goes_on_and_leaves_quietly_at_ctrl_c(self, service, going_on):
        name, run_id = going_on
        terminal = Terminal(service, "tail", name, "--metric", "token_similarity")
        shown = terminal.read_until("no incidents")
        assert all(text in shown for text in (f"demo/{name}", "running", "step 10", "layers 2-3"))
        send(service.url, run_id, [frame(20, 2.25)])
        terminal.read_until("2.25")
        open_alert(service.database, run_id)
        send(service.url, run_id, [frame(30, 2.125)])
        terminal.read_until("open warning  loss-spike  since step 20  loss is 20")
        terminal.interrupt()
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.shown
        assert terminal.output.endswith((b"\x1b[?25h", b"\x1b[?25h\r\n", b"\r\n\x1b[?25h")), "the cursor is back"

    def test_marks_where_a_layer_of_a_group_is_not_finite(self, run, broken):
        lines = run("tail", broken, "--once", "--groups", "2", "--metric", "grad_norm", columns=100)[1].splitlines()
        (whole,) = [line.split() for line in lines if "layers 0-1" in line]
        (hurt,) = [line.split() for line in lines if "layers 2-3" in line]
        assert (whole[2], whole[-1]) == ("▁" * 23, "3")
        assert hurt[2].lstrip("▁▂▃▄▅▆▇█") == "x" * 20
        assert hurt[-2:] == ["not", "finite"]

    def test_shows_token_diversity_by_its_logarithm_first(self, run, service):
        run_id = register(service.url, "fading", "fading")
        diversities = [[1.0, 1.0, 1.0, 1.0, 10.0**-i] for i in range(8)]
        send(service.url, run_id, [frame(10 * i, token_diversity=values) for i, values in enumerate(diversities)])
        lines = run("tail", run_id, "--once", "--groups", "5", columns=100)[1].splitlines()
        assert "token_diversity  below the healthy band, block 3" in lines
        (curve,) = [line.split()[2] for line in lines if "layer 4" in line]
        assert curve == "█▇▆▅▄▃▂▁"

    @pytest.mark.parametrize(
        ("diversities", "line"),
        [
            ([0.1, 0.2, 0.2, 0.1, 0.1], "token_diversity"),
            ([0.9, 1e-3, 1e-6, 1e-5, NAN], "token_diversity  below the healthy band, block 1"),
            ([1e-3, 0.9, 0.9, 0.9, 0.9], "token_diversity  below the healthy band, the input"),
        ],
    )
    def test_names_the_block_that_is_farthest_below_the_range_of_healthy_runs(self, run, service, diversities, line):
        run_id = register(service.url, f"band-{diversities[1]}", "band")
        # Of the samples only the newest counts.
        frames = [frame(0, token_diversity=[1e-9] * 5), frame(10, token_diversity=diversities)]
        send(service.url, run_id, frames)
        assert line in run("tail", run_id, "--once", columns=100)[1].splitlines()

    def test_marks_where_one_of_several_losses_is_not_finite(self, run, broken):
        shown = run("tail", broken, "--once", columns=50)[1]
        (curve, newest) = next(line for line in shown.splitlines() if line.startswith("loss ")).split()[1:]
        assert len(curve) < 12, "not one for each sample"
        assert curve.strip("▁") == "x"
        assert newest == "1"

    def test_shows_an_old_incident_that_is_open_before_many_alerts_that_are_over(self, run, service, going_on):
        name, run_id = going_on
        open_alert(service.database, run_id)
        resolve_alerts(service.database, run_id, 51)
        assert "  loss-spike  since step 20  loss is 20" in run("tail", name, "--once", columns=100)[1]

    def test_shows_an_incident_with_its_blocks_and_the_alerts_that_belong_to_none(self, run, service, going_on):
        name, run_id = going_on
        evidence = {"conditions": [{"value": 1.0}], "blocks": [2, 3], "left_step": 10}
        open_alert(service.database, run_id, "dead-units", family="dead", evidence=evidence)
        open_alert(service.database, run_id)
        open_alert(service.database, run_id, "token-rank-collapse", state="pending", firing_step=None)
        shown = run("tail", name, "--once", columns=130)[1].splitlines()
        assert shown[-2:] == [
            "open    warning  dead-units  blocks 2 to 3, since step 10  loss is 20 (dead-units); also fired: loss-spike",
            "pending warning  token-rank-collapse  step 20  loss is 20 (token-rank-collapse)",
        ]

    def test_shows_the_end_of_the_run(self, service, going_on):
        name, run_id = going_on
        terminal = Terminal(service, "tail", name)
        terminal.read_until("running")
        change(service.url, run_id, "failed")
        terminal.read_until("failed")
        assert terminal.wait() == 0

    def test_goes_on_when_the_service_is_away_for_a_while(self, tmp_path):
        with filled_service(tmp_path) as service:
            terminal = Terminal(service, "tail", "demo/gpt", columns=200)
            terminal.read_until("step 190")
            service.kill()
            terminal.read_until("no answer from")
            service.start()
            send(service.url, service.ids["demo/gpt"], [frame(200, 0.75)])
            terminal.read_until("step 200")
            terminal.interrupt()
            assert terminal.wait() == 0

    @pytest.mark.parametrize(("columns", "lines"), [(40, 12), (100, 40), (200, 60)])
    def test_fits_the_terminal(self, run, monkeypatch, columns, lines):
        monkeypatch.setenv("LINES", str(lines))
        code, shown, _ = run("tail", "demo/gpt", "--once", columns=columns)
        assert code == 0
        assert "attention_entropy" in shown
        assert max(map(len, shown.splitlines())) <= columns
        assert len(shown.splitlines()) <= lines

    def test_needs_no_name_for_the_run_that_was_heard_of_last(self, run, going_on):
        _, shown, _ = run("tail", "--once", columns=100)
        assert f"demo/{going_on[0]}" in shown

    def test_shows_a_run_without_samples(self, run, service):
        register(service.url, "empty")
        code, shown, _ = run("tail", "empty", "--once", columns=100)
        assert (code, "no samples yet" in shown) == (0, True)


class TestWhatGoesOn:
    @pytest.mark.parametrize("arguments", [("tail", "demo/gpt"), ("alerts", "--run", "demo/gpt", "--follow")])
    def test_outlives_a_failure_of_the_services_database(self, tmp_path, arguments):
        with filled_service(tmp_path) as service, piped(service, *arguments) as process:
            assert any("loss is 20 (loss-spike)" in line for line in process.stdout)
            elsewhere = (tmp_path / "tsemon.db").rename(tmp_path / "elsewhere.db")
            assert "was deleted, moved or replaced" in process.stderr.readline()
            elsewhere.rename(tmp_path / "tsemon.db")
            open_alert(service.database, service.ids["demo/gpt"], "later")
            assert any("loss is 20 (later)" in line for line in process.stdout)
            process.send_signal(2)
        assert process.returncode == 0


class TestIncidentsThatAreFollowed:
    def test_are_a_line_when_they_open_and_when_they_are_over(self, service, going_on):
        name, run_id = going_on
        with piped(service, "incidents", "--run", name, "--follow", "--open") as process:
            send(service.url, run_id, [frame(20, NAN)])
            line = process.stdout.readline()
            assert "  open               critical " in line
            assert f"demo/{name}  step 20  loss-not-finite: The loss is not finite" in line
            change(service.url, run_id, "failed")
            assert "  ended              critical " in process.stdout.readline()
            process.send_signal(2)
        assert process.returncode == 0


class TestAlertsThatAreFollowed:
    def test_are_a_line_for_each_change(self, service, going_on):
        name, run_id = going_on
        with piped(service, "alerts", "--run", name, "--follow", "--json") as process:
            open_alert(service.database, run_id)
            send(service.url, run_id, [frame(20, NAN)])
            told = {json.loads(process.stdout.readline())["rule"] for _ in range(2)}
            assert told == {"loss-spike", "loss-not-finite"}
            change(service.url, run_id, "finished")
            assert json.loads(process.stdout.readline())["state"] == "resolved"
            process.send_signal(2)
        assert process.returncode == 0

    def test_are_told_as_in_the_list_where_they_fire_to_the_end(self, service, going_on):
        name, run_id = going_on
        with piped(service, "alerts", "--run", name, "--follow") as process:
            send(service.url, run_id, [frame(20, NAN)])
            assert "  firing           critical " in process.stdout.readline()
            change(service.url, run_id, "finished")
            assert f"  fired to the end critical demo/{name}  step 20  The loss" in process.stdout.readline()
            process.send_signal(2)

    def test_go_on_when_the_service_is_away_for_a_while(self, tmp_path):
        with (
            filled_service(tmp_path) as service,
            piped(service, "alerts", "--follow", "--json", "--project", "demo") as process,
        ):
            told = {json.loads(process.stdout.readline())["rule"] for _ in range(2)}
            assert told == {"loss-spike", "entropy-collapse"}
            service.kill()
            assert "no answer from" in process.stderr.readline()
            service.start()
            send(service.url, service.ids["demo/gpt"], [frame(200, NAN)])
            assert json.loads(process.stdout.readline())["rule"] == "loss-not-finite"
            process.send_signal(2)
        assert process.returncode == 0

    def test_are_told_whatever_the_clock_of_this_machine_says(self, service, going_on, tmp_path):
        """It is two hours ahead."""
        name, run_id = going_on
        code = (
            "import datetime\n"
            "from tsemon_client.commands import listing\n"
            "class Ahead(datetime.datetime):\n"
            "    @classmethod\n"
            "    def now(cls, tz=None): return datetime.datetime.now(tz) + datetime.timedelta(hours=2)\n"
            "listing.datetime = Ahead\n"
            "from tsemon.__main__ import main\n"
            "main()\n"
        )
        (program := tmp_path / "program.py").write_text(code)
        ahead = functools.partial(start_python, program)
        with piped(service, "alerts", "--run", name, "--follow", "--json", start=ahead) as process:
            send(service.url, run_id, [frame(20, NAN)])
            assert json.loads(process.stdout.readline())["state"] == "firing"
            change(service.url, run_id, "finished")
            assert json.loads(process.stdout.readline())["state"] == "resolved"
            process.send_signal(2)

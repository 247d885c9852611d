import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import mean

import httpx
import pytest
import torch
from typer.testing import CliRunner

from tests.service import ServiceProcess
from tsemon.errors import InvalidArgument, MissingData, ServerRefused
from tsemon.tools.cli import app
from tsemon.transport import SpoolReader, find_spools, sync


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


class Proxy(BaseHTTPRequestHandler):
    """In front of the service; answers by itself where `status_of` has a status for a request."""

    protocol_version = "HTTP/1.1"

    def do_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if status := self.server.status_of(self.command, self.path):
            self._answer(status, b"{}")
        else:
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            reply = httpx.request(self.command, self.server.behind + self.path, content=body, headers=headers)
            self._answer(reply.status_code, reply.content)

    do_GET = do_POST = do_PATCH = do_any

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def proxied(service, status_of):
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.behind, proxy.status_of = service.url, status_of
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


@pytest.fixture
def busy_url(service):
    """Puts off each request once."""
    seen = set()

    def status_of(*request):
        is_new = request not in seen
        seen.add(request)
        return 503 if is_new else None

    with proxied(service, status_of) as url:
        yield url


@pytest.fixture
def full_url(service):
    """Takes one body of frames and refuses all others."""
    num_bodies = itertools.count()

    def status_of(_, path):
        return 403 if path.endswith("/frames") and next(num_bodies) else None

    with proxied(service, status_of) as url:
        yield url


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TSEMON_SERVER", raising=False)


def scan(*arguments):
    result = CliRunner().invoke(app, ["scan", *map(str, arguments)], env={"COLUMNS": "60"}, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def scan_json(*arguments):
    return json.loads(scan(*arguments, "--json"))


def frames_of(spool):
    return [json.loads(text) for batch in SpoolReader(spool).new_frames() for text in batch]


class Service:
    def __init__(self, service):
        self.url = f"{service.url}/api/v1"

    def run(self, run_id):
        return httpx.get(f"{self.url}/runs/{run_id}").raise_for_status().json()

    def named(self, run):
        [found] = httpx.get(f"{self.url}/runs", params={"run": run}).raise_for_status().json()["runs"]
        return found

    def series(self, run_id, metric):
        return httpx.get(f"{self.url}/runs/{run_id}/series", params={"metric": metric}).raise_for_status().json()

    def heatmap(self, run_id, metric):
        return httpx.get(f"{self.url}/runs/{run_id}/heatmap", params={"metric": metric}).raise_for_status().json()

    def alerts(self, run_id):
        return httpx.get(f"{self.url}/alerts", params={"run": run_id}).raise_for_status().json()["alerts"]

    def train(self, run):
        """One frame of a training by this name; the run's id."""
        known = httpx.post(f"{self.url}/runs", json={"run": run}).raise_for_status().json()
        body = {"writer": "w", "attempt": known["attempt"], "frames": [{"seq": 0, "step": 0, "time": 1.0}]}
        httpx.post(f"{self.url}/runs/{known['run_id']}/frames", json=body).raise_for_status()
        return known["run_id"]


def save_norms(folder, norms):
    """A checkpoint of two blocks for each step, whose parameters have this norm."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, norm in norms.items():
        block = torch.full((2, 2), norm / 2 / 2**0.5)
        torch.save({f"h.{n}.attn.q.weight": block.clone() for n in range(2)}, folder / f"step_{step}.pt")


def norms_of(service, run_id):
    found = Service(service).series(run_id, "total_param_norm")
    return dict(zip(found["step"], map(round, found["mean"]), strict=True))


class TestWhatIsThereAlready:
    """What is printed is what the run has, whatever an earlier scan of that name left there."""

    def test_of_another_folder_is_not_hidden(self, service, tmp_path):
        save_norms(tmp_path / "a" / "checkpoints", {1: 1, 2: 2})
        save_norms(tmp_path / "b" / "checkpoints", {1: 7, 2: 8})
        first = scan_json(tmp_path / "a" / "checkpoints", "--server", service.url)
        with pytest.raises(
            InvalidArgument, match=r"(?s)scan of another folder, .*/a/checkpoints, .* choose another --run"
        ):
            scan(tmp_path / "b" / "checkpoints", "--server", service.url)
        assert norms_of(service, first["run_id"]) == {1: 1, 2: 2}
        other = scan_json(tmp_path / "b" / "checkpoints", "--server", service.url, "--run", "b")
        assert norms_of(service, other["run_id"]) == {1: 7, 2: 8}

    def test_of_another_folder_is_not_hidden_in_a_spool_folder(self, tmp_path):
        save_norms(tmp_path / "a" / "checkpoints", {1: 1})
        save_norms(tmp_path / "b" / "checkpoints", {1: 7})
        scan(tmp_path / "a" / "checkpoints")
        with pytest.raises(InvalidArgument, match="is the scan of another folder"):
            scan(tmp_path / "b" / "checkpoints")
        assert len(find_spools(tmp_path / ".tsemon")) == 1

    def test_is_hidden_from_where_a_training_was_repeated(self, service, tmp_path):
        place = (tmp_path / "c", "--run", "repeated", "--server", service.url)
        save_norms(tmp_path / "c", {1: 1, 2: 2, 3: 3, 4: 4})
        scan(*place)
        save_norms(tmp_path / "c", {3: 30, 4: 40})
        found = scan_json(*place)
        assert (found["frames"]["new"], found["frames"]["known"], found["overwritten_from"]) == (2, 2, 3)
        assert norms_of(service, found["run_id"]) == {1: 1, 2: 2, 3: 30, 4: 40}
        assert Service(service).run(found["run_id"])["not_measured"] == found["not_measured"]
        save_norms(tmp_path / "c", {5: 50})
        again = scan_json(*place)
        assert (again["frames"]["new"], again["frames"]["known"], again["overwritten_from"]) == (1, 4, None)
        assert norms_of(service, found["run_id"]) == {1: 1, 2: 2, 3: 30, 4: 40, 5: 50}
        run = Service(service).run(found["run_id"])
        assert [attempt["resume_step"] for attempt in run["attempts"]] == [None, 3]
        assert run["state"] == "finished"

    def test_is_told_where_it_was_overwritten(self, service, tmp_path):
        place = (tmp_path / "c", "--run", "told", "--server", service.url)
        save_norms(tmp_path / "c", {1: 1, 2: 2})
        scan(*place)
        save_norms(tmp_path / "c", {2: 20})
        shown = scan(*place)
        assert "the checkpoints from step 2 on are others than at an earlier scan" in shown
        assert "run default/told" in shown
        assert "1 new frames, 1 were there already" in shown

    def test_is_known_though_all_was_copied_with_its_times(self, service, tmp_path):
        place = (tmp_path / "c", "--run", "copied", "--server", service.url)
        save_norms(tmp_path / "c", {1: 1, 2: float("nan")})
        scan(*place)
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "d").rename(tmp_path / "c")
        assert scan_json(*place)["frames"] == {"new": 0, "known": 2, "refused": 0}

    def test_is_hidden_in_a_spool_folder_as_well(self, service, tmp_path):
        save_norms(tmp_path / "c", {1: 1, 2: 2, 3: 3})
        scan(tmp_path / "c", "--run", "spooled")
        save_norms(tmp_path / "c", {2: 20, 3: 30})
        found = scan_json(tmp_path / "c", "--run", "spooled")
        assert (found["frames"]["new"], found["frames"]["known"], found["overwritten_from"]) == (2, 1, 2)
        again = scan_json(tmp_path / "c", "--run", "spooled")
        assert again["frames"] == {"new": 0, "known": 3, "refused": 0}
        sync(tmp_path / ".tsemon", service.url)
        run = Service(service).named("spooled")
        assert norms_of(service, run["run_id"]) == {1: 1, 2: 20, 3: 30}
        assert run["state"] == "finished"

    def test_is_hidden_though_the_spools_were_synced(self, service, tmp_path):
        for norms in ({1: 1, 2: 2}, {1: 10, 2: 20}):
            save_norms(tmp_path / "c", norms)
            scan(tmp_path / "c", "--run", "synced")
            sync(tmp_path / ".tsemon", service.url)
        run = Service(service).named("synced")
        assert norms_of(service, run["run_id"]) == {1: 10, 2: 20}

    def test_of_other_settings_gives_way_to_what_was_scanned_last(self, service, trained):
        place = (trained[0] / "t5", "--run", "settings", "--server", service.url)
        for options, has_saturation in (((), True), (("--no-saturation",), False), ((), True), ((), True)):
            found = scan_json(*place, *options)
            assert bool(Service(service).heatmap(found["run_id"], "saturation")["values"]) == has_saturation
        assert found["frames"]["new"] == 0
        assert Service(service).run(found["run_id"])["attempt"] == 3

    def test_of_another_text_of_that_name_gives_way(self, service, trained, tmp_path):
        place = (trained[0] / "gpt2", "--run", "text", "--server", service.url, "--tokens", tmp_path / "ids.json")
        shown = []
        for ids in ([1, 2, 3, 4], [9, 8, 7, 6]):
            (tmp_path / "ids.json").write_text(json.dumps(ids))
            found = scan_json(*place)
            shown.append(Service(service).heatmap(found["run_id"], "saturation")["values"][-1])
            assert shown[-1] == pytest.approx(found["checkpoints"][-1]["layers"]["saturation"], rel=1e-6)
        assert shown[0] != shown[1]

    def test_is_told_where_a_token_may_not_compare(self, tmp_path, monkeypatch):
        save_norms(tmp_path / "c", {1: 1})
        with ServiceProcess(tmp_path / "guarded.db", "--tokens") as service:
            create = ["token", "create", "writer", "--scope", "ingest", "--database", service.database]
            token = CliRunner().invoke(app, create, catch_exceptions=False).stdout.strip()
            monkeypatch.setenv("TSEMON_TOKEN", token)
            arguments = ["scan", str(tmp_path / "c"), "--server", service.url]
            assert "nobody can tell" not in CliRunner().invoke(app, arguments, catch_exceptions=False).stderr
            save_norms(tmp_path / "c", {1: 10})
            again = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert "nobody can tell whether checkpoints were overwritten" in again.stderr


class TestScan:
    def test_stores_a_run_at_the_service(self, service, trained):
        found = scan_json(trained[0] / "t5", "--run", "t5", "--project", "scans", "--server", service.url)
        run = Service(service).run(found["run_id"])
        norms = Service(service).series(found["run_id"], "total_param_norm")
        cosines = Service(service).heatmap(found["run_id"], "direction_cosine")
        saturation = Service(service).heatmap(found["run_id"], "saturation")
        assert (run["run"], run["project"], run["state"], run["tags"]) == ("t5", "scans", "finished", ["scan"])
        assert run["blocks"] == found["blocks"] == [f"{p}.block.{n}" for p in ("encoder", "decoder") for n in range(2)]
        assert run["config"]["scan"]["saturation_on"] == "random tokens (seed 0)"
        assert norms["step"] == [*range(0, 110, 10)]
        told = [checkpoint["total_param_norm"] for checkpoint in found["checkpoints"]]
        assert norms["mean"] == pytest.approx(told, rel=1e-6)
        assert cosines["values"][-1] == pytest.approx(found["checkpoints"][-1]["layers"]["direction_cosine"], rel=1e-6)
        assert saturation["values"][-1] == pytest.approx(found["checkpoints"][-1]["layers"]["saturation"], rel=1e-6)

    def test_stores_it_once(self, service, trained):
        place = ("--run", "twice", "--server", service.url)
        assert scan_json(trained[0] / "gpt2-pt", *place)["frames"]["new"] == 11
        again = scan_json(trained[0] / "gpt2-pt", *place)
        assert again["frames"]["new"] == 0
        assert Service(service).run(again["run_id"])["attempt"] == 1

    def test_goes_on_where_it_was_though_the_oldest_are_gone(self, service, trained, tmp_path):
        place = (tmp_path / "c", "--run", "rotated", "--server", service.url)
        (tmp_path / "c").mkdir()
        for step in (0, 1, 2):
            shutil.copy(trained[0] / "gpt2-pt" / f"m{step}.pt", tmp_path / "c")
        assert scan_json(*place)["frames"]["new"] == 3
        (tmp_path / "c" / "m0.pt").unlink()
        shutil.copy(trained[0] / "gpt2-pt" / "m3.pt", tmp_path / "c")
        found = scan_json(*place)
        assert found["frames"]["new"] == 1
        assert Service(service).series(found["run_id"], "total_param_norm")["step"] == [0, 10, 20, 30]
        assert Service(service).series(found["run_id"], "direction_cosine")["step"] == [10, 20, 30]

    def test_tells_the_service_why_something_is_not_measured(self, service, trained):
        found = scan_json(trained[0] / "gpt2-pt", "--run", "reasons", "--server", service.url)
        assert Service(service).run(found["run_id"])["not_measured"] == found["not_measured"]
        assert "no config.json" in found["not_measured"]["saturation"]

    def test_shows_the_block_with_parameters_that_are_not_finite(self, service, tmp_path):
        w = torch.ones(3, 4)
        torch.save({"h.0.attn.w": w, "h.1.attn.w": w / 0}, tmp_path / "step-1.pt")
        run_id = scan_json(tmp_path, "--server", service.url, "--run", "not-finite")["run_id"]
        [glance] = httpx.get(f"{service.url}/api/v1/glances", params={"run": run_id}).json()["glances"]
        worst = glance["worst"]
        assert (worst["metric"], worst["layer"], worst["value"]) == ("nonfinite_entries", 1, 12.0)

    def test_raises_no_alert_over_a_healthy_training(self, service, trained):
        for name in ("t5", "gpt2"):
            found = scan_json(trained[0] / name, "--run", f"healthy {name}", "--server", service.url)
            alerts = Service(service).alerts(found["run_id"])
            assert [alert["rule"] for alert in alerts if alert["severity"] != "info"] == []

    def test_writes_a_spool_folder_without_a_service(self, trained, tmp_path):
        scan(trained[0] / "gpt2-pt")
        [spool] = find_spools(tmp_path / ".tsemon")
        reader = SpoolReader(spool)
        assert (reader.registration["run"], reader.end_state()) == ("gpt2-pt-scan", "finished")
        assert [frame["step"] for frame in frames_of(spool)] == [*range(0, 110, 10)]

    def test_shows_a_table_and_what_it_says(self, trained, tmp_path):
        (tmp_path / "c").mkdir()
        for path in (trained[0] / "gpt2-pt").iterdir():
            shutil.copy(path, tmp_path / "c")
        (tmp_path / "c" / "half.pt").write_bytes(b"PK")
        shown = scan(tmp_path / "c", "--spool", tmp_path / "spool").splitlines()
        assert shown[0].split() == ["step", "norm", "distance", "cosine", "alignment", "exponent"]
        assert [line.split()[0] for line in shown[1:12]] == [str(step) for step in range(0, 110, 10)]
        rest = "\n".join(shown[12:])
        assert "the norm grows like t^" in rest or "no growth law" in rest
        assert "3 blocks, transformer.h.0 to transformer.h.2" in rest
        assert (
            "not measured: saturation, positions_attended, saturated_positions_attended, token_diversity and 18 more: "
            "the model is not known" in rest
        )
        assert "left out: half.pt: it cannot be read, is it half-written?" in rest
        assert f"run default/c-scan in the folder {tmp_path / 'spool'}: 11 new frames" in rest

    def test_shows_to_how_many_tokens_the_model_attends(self, trained, tmp_path):
        place = (trained[0] / "gpt2", "--spool", tmp_path / "spool")
        shown = scan(*place).splitlines()
        assert shown[0].split()[-3:] == ["saturation", "attended", "x1024"]
        last = scan_json(*place)["checkpoints"][-1]
        attended = ("positions_attended", "saturated_positions_attended")
        cells = [
            f"{last['layers']['saturation'][-1]:.3f}",
            *(f"{mean(mean(row) for row in last['heads'][name]):.2f}" for name in attended),
        ]
        assert shown[11].split()[-3:] == cells
        assert "attended: tokens to which a query gives more than 1e-5 of its attention" in "\n".join(shown[12:])

    def test_tells_of_a_folder_without_checkpoints(self, tmp_path):
        torch.save({"f": print}, tmp_path / "step-1.pt")
        with pytest.raises(MissingData, match=r"(?s)no checkpoint was found in .*step-1\.pt: .*could run code"):
            scan(tmp_path, "--spool", tmp_path / "spool")

    def test_gives_a_terminal_no_orders_from_names(self, trained, tmp_path):
        place = tmp_path / "c"
        place.mkdir()
        shutil.copy(trained[0] / "gpt2-pt" / "m0.pt", place)
        (place / "\x1b[2J[red]step-1.pt").write_bytes(b"PK")
        found = scan(place, "--run", "odd", "--spool", tmp_path / "spool")
        assert "\x1b" not in found
        assert r"left out: \x1b[2J[red]step-1.pt: " in found
        assert scan_json(place, "--run", "odd", "--spool", tmp_path / "spool")["frames"]["new"] == 0

    def test_does_not_hide_a_training(self, service, trained):
        run_id = Service(service).train("mine")
        with pytest.raises(InvalidArgument, match="'mine' in project 'default' that is no scan"):
            scan(trained[0] / "gpt2-pt", "--run", "mine", "--server", service.url)
        assert Service(service).run(run_id)["attempt"] == 1

    def test_outlasts_a_service_that_is_busy_for_a_moment(self, trained, busy_url):
        place = (trained[0] / "gpt2-pt", "--no-saturation", "--run", "busy", "--server", busy_url)
        assert scan_json(*place)["frames"]["new"] == 11

    def test_that_gives_up_has_failed(self, service, full_url, tmp_path):
        save_norms(tmp_path / "c", {1: 10, 2: 20})
        with pytest.raises(ServerRefused, match="403"):
            scan(tmp_path / "c", "--no-saturation", "--run", "given up", "--server", full_url)
        found = Service(service).named("given up")
        assert (found["num_frames"], found["state"]) == (1, "failed")

    def test_writes_to_one_place(self, trained, tmp_path):
        with pytest.raises(InvalidArgument, match="got both"):
            scan(trained[0] / "gpt2", "--server", "http://127.0.0.1:1", "--spool", tmp_path)

    def test_follows_a_folder_and_waits_for_a_service(self, trained, tmp_path):
        (tmp_path / "c").mkdir()
        for step in range(3):
            shutil.copy(trained[0] / "gpt2-pt" / f"m{step}.pt", tmp_path / "c")
        service = ServiceProcess(tmp_path / "late.db")
        command = [sys.executable, "-m", "tsemon", "scan", "c", "--no-saturation", "--follow", "--json"]
        process = subprocess.Popen(
            [*command, "--server", service.url],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert "what was measured waits here" in process.stderr.readline()
            with service:
                await_steps(service, [0, 10, 20])
                shutil.copy(trained[0] / "gpt2-pt" / "m3.pt", tmp_path / "c")
                await_steps(service, [0, 10, 20, 30])
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0
        found = json.loads(output)
        assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [0, 10, 20, 30]
        assert found["frames"]["new"] in (3, 4)  # the interrupt may come before the reply to the last one
        assert found["left_out"] == {}
        assert "what was measured waits here" not in errors  # it was told once


def await_steps(service, steps):
    for _ in range(1200):
        [*runs] = httpx.get(f"{service.url}/api/v1/runs").json()["runs"]
        if runs and runs[0]["num_frames"] == len(steps) and runs[0]["state"] == "finished":
            assert Service(service).series(runs[0]["run_id"], "total_param_norm")["step"] == steps
            return
        time.sleep(0.05)
    raise AssertionError(f"not {steps} in a minute")

"""A folder of spools, shown by the service as it lies there."""

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

import tsemon
from tests import zoo
from tests.frames import frames_in, values_of
from tests.processes import start_tsemon
from tsemon.errors import InvalidArgument, SpoolError
from tsemon.transport import Spool, SpoolReader
from tsemon.transport.spool import parse_records
from tsemon_server.main import create_app
from tsemon_server.settings import Settings, settings_from_environment

from .conftest import layer_frame, loss_frame, problem
from .test_built_in_rules import recorded, replayed

SEGMENT_BYTES = 1000
KEYS = itertools.count()


class Show:
    """A service that shows a folder."""

    def __init__(self, folder):
        app = create_app(Settings(spool=str(folder)))
        self.http = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        self.http.__enter__()

    def close(self):
        self.http.__exit__(None, None, None)

    def get(self, path, **params):
        return self.http.get(f"/api/v1{path}", params=params).raise_for_status().json()

    def run(self, name="gpt"):
        """The run of this name; None where there is none."""
        return next(iter(self.get("/runs", run=name)["runs"]), None)

    def losses(self, name="gpt", **params):
        series = self.get(f"/runs/{self.run(name)['run_id']}/series", metric="loss", **params)
        return dict(zip(series["step"], series["mean"], strict=True))

    def spools(self, name="gpt"):
        return self.get(f"/runs/{self.run(name)['run_id']}/spools")["spools"]

    def await_run(self, name="gpt", **fields):
        """Wait until the run is as told."""
        return until(lambda: (run := self.run(name)) and fields.items() <= run.items() and run, lambda: self.run(name))


def until(is_so, found=lambda: None):
    deadline = time.monotonic() + 20
    while not (so := is_so()):
        assert time.monotonic() < deadline, f"still not so: {found()}"
        time.sleep(0.02)
    return so


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spools"


@pytest.fixture
def show(folder):
    """Start showing the folder."""
    shown = []

    def show():
        folder.mkdir(exist_ok=True)
        shown.append(Show(folder))
        return shown[-1]

    yield show
    for one in shown:
        one.close()


@pytest.fixture
def write(folder):
    """Start a spool as a training process does, with frames in it."""
    spools = []

    def write(*frames, run="gpt", writer="w", blocks=2, **registration):
        body = {"project": "default", "run": run, "blocks": [f"h.{i}" for i in range(blocks)]} | registration
        body = {"attempt_key": f"key-{next(KEYS)}"} | body
        spools.append(Spool.create(folder, body, writer, segment_bytes=SEGMENT_BYTES))
        for frame in frames:
            spools[-1].append(frame.to_json())
        return spools[-1]

    yield write
    for spool in spools:
        spool.close()


def end(spool, state="finished"):
    spool.finish(state)
    spool.close()


def record_of(frame):
    data = frame.to_json().encode()
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


def append_raw(spool, data):
    newest = max(spool.folder.glob("*.seg"))
    with open(newest, "ab") as file:
        file.write(data)


def listing(folder):
    """Everything that a change of the folder would change; reading it changes nothing of that."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[path] = (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, content)
    return found


class TestATrainingThatWasMonitored:
    def test_is_shown_as_it_was_measured(self, folder, show):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="vit", project="lab", every=1, config={"lr": 0.1}, spool_dir=folder) as monitor:
            for step in range(4):
                forward()
                monitor.step(loss=step / 2)
        service = show()
        run = service.await_run("vit", num_frames=4, state="finished", project="lab")
        assert service.losses("vit") == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
        heatmap = service.get(f"/runs/{run['run_id']}/heatmap", metric="token_similarity")
        written = [values_of(frame, "token_similarity") for frame in frames_in(folder)]
        assert heatmap["values"] == written
        assert service.get(f"/runs/{run['run_id']}")["config"].items() >= {"lr": 0.1}.items()

    def test_is_dated_by_its_own_clock(self, write, show):
        spool = write(loss_frame(1))
        created_at = json.loads((spool.folder / "run.json").read_text())["created_at"]
        end(spool)
        run_json = json.loads((spool.folder / "run.json").read_text()) | {"created_at": created_at - 86400.0}
        (spool.folder / "run.json").write_text(json.dumps(run_json))
        run = show().await_run(state="finished")
        assert run["created_at"] == run["updated_at"], "the frame's own clock is before that: it was not heard of since"
        shown_at = datetime.fromisoformat(run["created_at"]).timestamp()
        assert shown_at == pytest.approx(created_at - 86400.0, abs=1e-5)  # records show microseconds

    def test_that_failed_has_its_alerts(self, write, show):
        frames = list(recorded())
        spool = write(*frames, blocks=len(frames[0].layers["token_diversity"].data) // 4 - 1)
        service = show()
        service.await_run(num_frames=len(frames), state="running")
        found = service.get("/alerts")["alerts"]
        fired = {(a["rule"], a["pending_step"], a["firing_step"]) for a in found if a["firing_step"] is not None}
        assert fired == set(replayed(frames)) != set()
        end(spool, "failed")
        service.await_run(state="failed")

    def test_that_lives_is_in_the_metrics_for_prometheus(self, write, show):
        write(layer_frame(3, [0.1, 0.2, 0.3], "token_diversity"))
        service = show()
        run_id = service.await_run(num_frames=1)["run_id"]
        assert f'tsemon_layer_token_diversity{{layer="02",run_id="{run_id}"}} 0.3' in service.http.get("/metrics").text

    def test_is_on_the_page(self, write, show):
        end(write(loss_frame(0)))
        page = show().http.get("/")
        assert page.status_code == 200
        assert "app.js" in page.text


class TestATrainingThatGoesOn:
    def test_grows_as_it_is_written(self, write, show):
        spool = write(loss_frame(0))
        service = show()
        service.await_run(num_frames=1, state="running")
        for step in range(1, 40):
            spool.append(loss_frame(step, float(step)).to_json())
        service.await_run(num_frames=40, last_step=39)
        assert service.losses() == {0: 1.0} | {step: float(step) for step in range(1, 40)}
        end(spool)
        service.await_run(state="finished")

    def test_may_start_while_the_folder_is_shown(self, write, show):
        service = show()
        assert service.run() is None
        write(loss_frame(0))
        service.await_run(num_frames=1)

    def test_that_was_killed_has_failed_with_all_that_it_wrote(self, folder, show):
        code = (
            "import sys, time\n"
            "from tsemon.transport import Spool\n"
            "spool = Spool.create(sys.argv[1], {'project': 'p', 'run': 'gpt', 'attempt_key': 'k'}, 'w')\n"
            "spool.append(sys.argv[2])\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)\n"
        )
        command = [sys.executable, "-c", code, folder, loss_frame(7).to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout.readline() == b"ready\n"
            service = show()
            service.await_run(state="running", last_step=7)
            trainer.kill()
        service.await_run(state="failed", last_step=7)

    def test_has_a_half_written_frame_once_it_is_whole(self, write, show):
        spool = write(loss_frame(0))
        record = record_of(loss_frame(1))
        append_raw(spool, record[:20])
        write(loss_frame(0), run="other")  # read after the first, in the same round
        service = show()
        service.await_run("other", num_frames=1)
        assert [(spool["num_frames"], spool["damaged"]) for spool in service.spools()] == [(1, [])]
        append_raw(spool, record[20:])
        service.await_run(num_frames=2)
        assert service.losses() == {0: 1.0, 1: 1.0}

    def test_that_was_killed_in_the_middle_of_a_frame_tells_so(self, write, show):
        spool = write(loss_frame(0))
        append_raw(spool, record_of(loss_frame(1))[:20])
        service = show()
        service.await_run(num_frames=1, state="running")
        spool.close()
        service.await_run(num_frames=1, state="failed")
        assert service.spools()[0]["damaged"] == ["00000001.seg"]

    def test_stays_as_it_was_read_when_it_is_delivered_and_deleted(self, write, show):
        spool = write(*map(loss_frame, range(30)))
        service = show()
        service.await_run(num_frames=30)
        batch = spool.next_batch()
        spool.acknowledge(batch.ends[20])
        assert "00000001.seg" not in {path.name for path in spool.folder.iterdir()}
        spool.append(loss_frame(30).to_json())
        service.await_run(num_frames=31)
        spool.acknowledge(spool.next_batch().ends[-1])
        spool.discard()
        assert not spool.folder.exists()
        service.await_run(num_frames=31, state="finished")
        assert list(service.losses()) == list(range(31))

    def test_that_was_delivered_before_is_shown_from_there_on(self, write, show):
        spool = write(*map(loss_frame, range(30)))
        spool.acknowledge(spool.next_batch().ends[20])
        kept = [json.loads(text)["seq"] for frames in SpoolReader(spool.folder).new_frames() for text in frames]
        assert 0 < kept[0] <= 21
        service = show()
        service.await_run(last_step=29)
        assert list(service.losses()) == kept

    def test_whose_folder_is_deleted_and_made_again_goes_on(self, write, show):
        spool = write(loss_frame(0))
        service = show()
        service.await_run(num_frames=1)
        for path in spool.folder.iterdir():
            path.unlink()
        spool.folder.rmdir()
        service.await_run(state="finished")
        spool.append(loss_frame(1).to_json())
        service.await_run(state="running", num_frames=2)


class TestSpoolsOfOneRun:
    def test_are_attempts_in_the_order_in_which_they_began(self, write, show):
        end(write(*(loss_frame(step, 1.0) for step in range(6)), attempt_key="z"), "failed")
        write(*(loss_frame(step, 2.0) for step in range(3, 5)), attempt_key="a", resume_step=3)
        service = show()
        run = service.await_run(attempt=2, num_frames=8, state="running")
        assert service.losses() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
        assert service.losses(attempt=1) == dict.fromkeys(range(6), 1.0)
        attempts = service.get(f"/runs/{run['run_id']}")["attempts"]
        assert [attempt["resume_step"] for attempt in attempts] == [None, 3]
        assert [spool["attempt"] for spool in service.spools()] == [1, 2]

    def test_hide_nothing_before_it_is_known_from_where_they_go_on(self, write, show):
        write(*(loss_frame(step, 1.0) for step in range(6)))
        service = show()
        service.await_run(num_frames=6)
        second, other = write(), write(run="other")
        service.await_run("other", attempt=1)  # so the folder was looked through
        assert service.run()["attempt"] == 1
        second.resume_at(4)
        service.await_run(attempt=2)
        second.append(loss_frame(4, 2.0).to_json())
        service.await_run(num_frames=7)
        assert service.losses() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
        end(other)

    def test_let_the_newest_attempt_say_how_the_run_is(self, write, show):
        first = write(loss_frame(0))
        service = show()
        service.await_run(state="running")
        end(first, "failed")
        service.await_run(state="failed")
        second = write(loss_frame(1), resume_step=1)
        service.await_run(state="running", attempt=2)
        end(second, "finished")
        service.await_run(state="finished", attempt=2)

    def test_are_attempts_in_that_order_wherever_they_lie(self, write, show):
        writers = [f"w{number}" for number in range(8)]
        for step, writer in enumerate(writers):
            end(write(loss_frame(step), writer=writer, attempt_key=f"{step * 5 % 8}", resume_step=step))
        service = show()
        service.await_run(attempt=8, num_frames=8)
        assert [(spool["writer"], spool["attempt"]) for spool in service.spools()] == list(
            zip(writers, range(1, 9), strict=True)
        )

    def test_say_anew_how_the_run_is_when_an_attempt_is_copied_into_the_folder(self, folder, write, show, tmp_path):
        end(write(loss_frame(0)), "failed")
        copied = write(loss_frame(1), resume_step=1)
        end(copied, "failed")
        copied.folder.rename(tmp_path / "elsewhere")
        service = show()
        service.await_run(state="failed", attempt=1)
        (tmp_path / "elsewhere").rename(copied.folder)
        service.await_run(state="failed", attempt=2)

    def test_with_one_attempt_key_are_writers_of_one_attempt(self, write, show):
        ended = write(loss_frame(0, 1.0), writer="rank0", attempt_key="same")
        living = write(loss_frame(1, 2.0), writer="rank1", attempt_key="same")
        end(ended, "failed")
        service = show()
        service.await_run(attempt=1, num_frames=2, state="running")
        end(living)
        service.await_run(state="failed")


class TestDamage:
    def test_in_the_middle_costs_what_stands_behind_it_in_that_segment(self, write, show, caplog):
        spool = write(*map(loss_frame, range(40)))
        first, second, *others = sorted(spool.folder.glob("*.seg"))
        assert len(others) > 1
        data = bytearray(second.read_bytes())
        records = list(parse_records(bytes(data)))
        lost_with = [json.loads(text)["seq"] for text, _ in records]
        data[records[2][1] - 1] ^= 1  # the last byte of the third record
        second.write_bytes(data)
        service = show()
        service.await_run(last_step=39)
        assert list(service.losses()) == [step for step in range(40) if step not in lost_with[2:]]
        assert service.spools()[0]["damaged"] == ["00000002.seg"]
        assert f"{second} is damaged" in caplog.text
        assert first.name not in caplog.text

    def test_of_run_json_costs_that_spool_alone(self, write, show, caplog):
        broken = write(loss_frame(0), run="broken")
        (broken.folder / "run.json").write_text("{")
        write(loss_frame(0))
        service = show()
        service.await_run(num_frames=1)
        assert service.run("broken") is None
        assert f"{broken.folder} is not shown" in caplog.text

    @pytest.mark.parametrize("bad", ["no json", '{"seq": 1}', '{"seq":1,"step":1,"time":1e999}', "[" * 10_000])
    def test_of_a_frame_costs_that_frame_alone(self, bad, write, show, caplog):
        spool = write(*map(loss_frame, range(3)))
        spool.append(bad)
        spool.append(loss_frame(9).to_json())
        service = show()
        service.await_run(num_frames=4)
        until(lambda: service.spools()[0]["num_refused"] == 1)
        assert list(service.losses()) == [0, 1, 2, 9]
        assert "frames are left out" in caplog.text

    def test_of_a_registration_costs_that_spool_alone(self, write, show, caplog):
        write(loss_frame(0), run="x" * 1000)
        write(loss_frame(0))
        service = show()
        service.await_run(num_frames=1)
        assert len(service.get("/runs")["runs"]) == 1
        assert "cannot be shown" in caplog.text


class TestTheFolder:
    def test_is_left_as_it_is(self, folder, write, show):
        end(write(*map(loss_frame, range(40)), run="ended"))
        write(loss_frame(0), run="killed").close()
        living = write(loss_frame(0), run="living")
        (living.folder / "refused.jsonl").write_text("not a run\n")
        before = listing(folder)
        service = show()
        for run, state in (("ended", "finished"), ("killed", "failed"), ("living", "running")):
            service.await_run(run, state=state)
        service.close()
        assert listing(folder) == before

    def test_is_free_for_whoever_delivers_it(self, write, show):
        spool = write(loss_frame(0))
        spool.close()
        show().await_run(state="failed")
        Spool.open(spool.folder).close()

    def test_that_someone_delivers_has_no_living_writer_again(self, write):
        spool = write(loss_frame(0))
        reader = SpoolReader(spool.folder)
        assert reader.is_living()
        spool.close()
        assert not reader.is_living()
        delivered = Spool.open(spool.folder)
        assert not reader.is_living()
        delivered.close()

    def test_may_be_empty(self, show):
        service = show()
        assert service.get("/runs")["runs"] == []
        assert service.http.get("/readyz").status_code == 200

    def test_may_hold_other_things(self, folder, write, show):
        (folder / "a/b/c").mkdir(parents=True)
        (folder / "a/b/c/run.json").write_text("[]")
        (folder / "a/b/d").write_text("")
        write(loss_frame(0)).append(loss_frame(1).to_json())
        service = show()
        service.await_run(num_frames=2)
        assert len(service.get("/runs")["runs"]) == 1

    @pytest.mark.parametrize("name", ["nowhere", "file"])
    def test_has_to_be_one(self, name, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SpoolError, match=f"expected a spool folder, .*{name} is not there or is no folder"):
            create_app(Settings(spool=str(tmp_path / name)))


QUESTIONS = {"/api/v1/rules/test", "/api/v1/rules/check"}
"""That are too long for an address."""


class TestWriting:
    def test_is_refused_on_every_route(self, write, show):
        write(loss_frame(0))
        service = show()
        run_id = service.await_run(num_frames=1)["run_id"]
        asked = []
        for path, methods in service.http.get("/openapi.json").json()["paths"].items():
            for method in set(methods) - {"get", "head"} if path not in QUESTIONS else ():
                reply = service.http.request(method, path.replace("{run_id}", run_id), json={"run": "new"})
                status, code, detail = problem(reply)
                assert (status, code) == (403, "read_only")
                assert "shows the folder" in detail
                asked.append(path)
        assert "/api/v1/runs" in asked
        assert [run["run"] for run in service.get("/runs")["runs"]] == ["gpt"]

    def test_is_not_what_trying_rules_does(self, write, show):
        write(loss_frame(0))
        service = show()
        run_id = service.await_run(num_frames=1)["run_id"]
        tried = service.http.post("/api/v1/rules/test", json={"run_id": run_id})
        assert (tried.status_code, tried.json()["num_frames"]) == (200, 1)
        checked = service.http.post("/api/v1/rules/check", json={"name": "mine", "when": "loss > 1"})
        assert (checked.status_code, checked.json()["mistakes"]) == (200, [])


class TestTheSpoolsOfARun:
    def test_are_told_where_they_lie(self, folder, write, show):
        spool = write(loss_frame(0))
        service = show()
        service.await_run(num_frames=1, state="running")
        told = {"attempt": 1, "writer": "w", "num_frames": 1, "num_refused": 0, "damaged": []}
        assert service.spools() == [{"folder": str(spool.folder.relative_to(folder)), **told}]

    def test_have_a_route_that_is_documented(self, show):
        text = (Path(__file__).parents[2] / "docs/rest-api.md").read_text()
        fields = show().http.get("/openapi.json").json()["components"]["schemas"]["ShownSpool"]["properties"]
        assert "### GET /runs/{run_id}/spools\n" in text
        assert [field for field in fields if f'"{field}":' not in text] == []

    def test_are_asked_of_a_run_that_there_is(self, show):
        assert problem(show().http.get("/api/v1/runs/nobody/spools"))[:2] == (404, "unknown_run")


class Process:
    """`tsemon serve --spool` with a TMPDIR of its own."""

    def __init__(self, folder, scratch, *arguments):
        arguments = ["serve", "--port", "0", "--spool", folder, "--log-level", "warning", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = start_tsemon(*arguments, environment=os.environ | {"TMPDIR": str(scratch)}, **streams)
        self.greeting = self.process.stdout.readline()

    def stop(self, number):
        self.process.send_signal(number)
        return self.process.communicate(timeout=30)[1]


class TestTheIndex:
    def test_is_gone_however_the_service_ended(self, folder, write, tmp_path):
        end(write(loss_frame(0)))
        (scratch := tmp_path / "scratch").mkdir()
        killed = Process(folder, scratch)
        url = killed.greeting.split()[2]
        assert killed.greeting == f"tsemon serves {url} from the folder {folder}, read-only\n"
        until(lambda: httpx.get(f"{url}/api/v1/runs").json()["runs"])
        killed.stop(signal.SIGKILL)
        (left,) = scratch.iterdir()
        assert left.stat().st_mode & 0o077 == 0
        first = Process(folder, scratch)
        assert not left.exists(), "the next start cleans up"
        second = Process(folder, scratch)
        assert len(list(scratch.iterdir())) == 2, "but leaves what is in use"
        assert first.stop(signal.SIGTERM) == ""
        assert second.stop(signal.SIGINT) == ""
        assert list(scratch.iterdir()) == []

    def test_is_nothing_when_the_service_cannot_start(self, folder, tmp_path):
        folder.mkdir()
        (scratch := tmp_path / "scratch").mkdir()
        refused = Process(folder, scratch, "--host", "127.0.0.1.1.1")
        assert refused.stop(signal.SIGTERM).startswith("tsemon: ")
        assert list(scratch.iterdir()) == []

    def test_leaves_a_folder_of_its_name_that_is_somebody_elses(self, show, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (precious := tmp_path / "tsemon-index-of-mine").mkdir()
        (precious / "frames").write_text("all there is")
        show().close()
        assert (precious / "frames").read_text() == "all there is"

    def test_leaves_links_of_its_name_and_where_they_point(self, show, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "precious").mkdir()
        (tmp_path / "tsemon-index-link").symlink_to(tmp_path / "precious")
        show().close()
        assert (tmp_path / "tsemon-index-link").is_symlink()
        assert (tmp_path / "precious").is_dir()


class TestTheSetting:
    def test_is_read_from_the_environment(self):
        assert settings_from_environment({"TSEMON_SPOOL": "x"}).spool == "x"

    def test_does_not_go_with_a_database(self):
        with pytest.raises(InvalidArgument, match="TSEMON_DATABASE or TSEMON_SPOOL, got both"):
            settings_from_environment({"TSEMON_SPOOL": "x", "TSEMON_DATABASE": "sqlite:///x.db"})

"""The service as a process of its own: killed, terminated, and given more than it takes."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path

import httpx
import psutil
import pytest

from tests.databases import SqliteFile
from tests.processes import start_tsemon
from tsemon.wire import MAX_BODY_BYTES, frames_to_body
from tsemon_server.main import _listen
from tsemon_server.main import serve as serve_forever
from tsemon_server.settings import Settings

from .conftest import loss_frame
from .test_built_in_rules import recorded, replayed


class Process:
    """`tsemon serve`, forked (tests/processes.py) unless it is to have an `interpreter` of its own."""

    def __init__(self, database, port=0, workers=1, interpreter=False):
        arguments = ["serve", "--port", str(port), "--database", database, "--log-level", "warning"]
        arguments += ["--workers", str(workers)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if interpreter:
            self.process = subprocess.Popen([sys.executable, "-m", "tsemon", *arguments], text=True, **streams)
        else:
            self.process = start_tsemon(*arguments, **streams)
        self._said = None
        self.greeting = self.process.stdout.readline()
        if self.greeting:
            self.port = int(self.greeting.split()[2].rpartition(":")[2])
            self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api/v1", timeout=60)

    def register(self, run="gpt"):
        reply = self.http.post("/runs", json={"run": run, "attempt_key": "one"})
        return reply.raise_for_status().json()["run_id"]

    def frames_url(self, run_id):
        return f"http://127.0.0.1:{self.port}/api/v1/runs/{run_id}/frames"

    def send(self, run_id, frame):
        body = frames_to_body("w", 1, [frame.to_json()])
        return self.http.post(f"/runs/{run_id}/frames", content=body).raise_for_status().json()

    def stop(self, number=signal.SIGTERM):
        """End the process; its exit status and what it said on stderr."""
        if hasattr(self, "http"):
            self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        if self._said is None:
            _, self._said = self.process.communicate(timeout=120)
        return self.process.returncode, self._said


@pytest.fixture
def serve(database):
    started = []

    def serve(port=0, **options):
        started.append(Process(database.url, port, **options))
        return started[-1]

    yield serve
    for process in started:
        process.stop(signal.SIGKILL)


class TestAServiceThatIsKilledMidIngest:
    def test_has_everything_that_it_acknowledged(self, serve):
        service = serve()
        run_id = service.register()
        acknowledged, enough = [], threading.Event()

        def send_until_it_dies():
            http = httpx.Client(base_url=service.http.base_url, timeout=60)
            for seq in range(100_000):
                body = frames_to_body("w", 1, [loss_frame(seq, float(seq)).to_json()])
                try:
                    http.post(f"/runs/{run_id}/frames", content=body).raise_for_status()
                except httpx.TransportError:
                    break
                acknowledged.append(seq)
                if len(acknowledged) == 50:
                    enough.set()
            http.close()

        sender = threading.Thread(target=send_until_it_dies)
        sender.start()
        assert enough.wait(60)
        os.kill(service.process.pid, signal.SIGKILL)
        sender.join(60)
        assert not sender.is_alive()

        again = serve()
        stored = again.http.get(f"/runs/{run_id}/series", params={"metric": "loss", "points": 10_000}).json()
        assert set(acknowledged) <= set(stored["step"])
        assert len(stored["step"]) - len(acknowledged) in (0, 1)  # one may have been committed without its reply
        assert stored["step"] == stored["mean"]
        assert again.http.get(f"/runs/{run_id}").json()["num_frames"] == len(stored["step"])


class TestTwoServicesOnOneDatabase:
    @pytest.fixture
    def services(self, serve):
        return [serve(), serve()]

    def test_read_each_frame_with_the_rules_once_whichever_it_comes_to(self, services):
        frames = list(recorded())
        run_id = register_deep(services[0], frames)
        for frame, service in zip(frames, cycle(services), strict=False):
            service.send(run_id, frame)
        assert alerts_of(services[0]) == alerts_of(services[1]) == sorted(replayed(frames))

    def test_store_a_frame_that_comes_to_both_at_once_and_tell_of_it_once(self, services):
        frames = list(recorded())
        run_id = register_deep(services[0], frames)
        with ThreadPoolExecutor(2) as pool:
            for frame in frames:
                replies = list(pool.map(lambda service: service.send(run_id, frame), services))  # noqa: B023
                assert sorted(reply["accepted"] for reply in replies) == [0, 1]
        assert services[0].http.get(f"/runs/{run_id}").json()["num_frames"] == len(frames)
        assert alerts_of(services[1]) == sorted(replayed(frames))

    def test_register_a_run_once_that_comes_to_both_at_once(self, services):
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda number: services[number % 2].register(f"run{number // 4}"), range(32)))
        assert len(found) == 8


def wait_for_both(service):
    """Until both workers write their numbers: one may be starting, and their folder has no others'."""
    kinds = "counter", "histogram", "gauge_livesum"
    names = {f"{kind}_{number}.db" for kind in kinds for number in range(2)}
    while {path.name for path in folder_of(service).iterdir()} != names:
        time.sleep(0.02)


class TestWorkers:
    @pytest.fixture
    def database(self, tmp_path):
        """Whether they are one service's workers or several services is all the same to a PostgreSQL."""
        return SqliteFile(tmp_path / "tsemon.db")

    def test_answer_on_one_port_what_any_of_them_stored(self, serve):
        service = serve(workers=2)
        run_ids = [service.register(name) for name in ("a", "b")]
        for seq, run_id in product(range(10), run_ids):
            httpx.post(
                service.frames_url(run_id), content=body_of(seq)
            ).raise_for_status()  # each on its own connection
        pages = [httpx.get(f"http://127.0.0.1:{service.port}/metrics").text for _ in range(20)]
        of_runs = {"".join(line for line in page.splitlines(True) if "run_id=" in line) for page in pages}
        assert len(of_runs) == 1
        assert of_runs.pop().count("tsemon_run_step{") == 2
        assert [service.http.get(f"/runs/{run_id}").json()["num_frames"] for run_id in run_ids] == [10, 10]

    def test_are_replaced_when_they_end(self, serve):
        service = serve(workers=2)
        service.register()
        killed = workers_of(service)
        for worker in killed:
            worker.kill()
        psutil.wait_procs(killed, 30)
        assert service.register() == service.register()  # the port stays open meanwhile, so this waits
        while len(workers_of(service)) < 2:
            time.sleep(0.02)
        assert not set(killed) & set(workers_of(service))

    def test_count_together_what_any_of_them_does(self, serve):
        service = serve(workers=2)
        run_id = service.register()
        for seq in range(20):
            httpx.post(service.frames_url(run_id), content=body_of(seq)).raise_for_status()
        pages = [scraped(service) for _ in range(20)]
        for name in ('tsemon_frames_total{outcome="accepted"}', "tsemon_ingest_seconds_count"):
            assert {page[name] for page in pages} == {20.0}
        assert {page['tsemon_queue_depth{queue="commits"}'] for page in pages} == {0.0}
        scrapes = [
            page.get('tsemon_http_requests_total{method="GET",route="/metrics",status="200"}', 0) for page in pages
        ]
        assert scrapes == list(range(20))

    def test_count_on_where_those_were_that_they_replace(self, serve):
        service = serve(workers=2)
        run_id = service.register()
        for seq in range(10):
            httpx.post(service.frames_url(run_id), content=body_of(seq)).raise_for_status()
        for round_number in range(2):
            killed = workers_of(service)
            for worker in killed:
                worker.kill()
            psutil.wait_procs(killed, 30)
            assert service.register() == run_id  # which waits for the new ones
            httpx.post(service.frames_url(run_id), content=body_of(10 + round_number)).raise_for_status()
            assert {scraped(service)['tsemon_frames_total{outcome="accepted"}'] for _ in range(10)} == {
                11.0 + round_number
            }
        wait_for_both(service)

    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGKILL]
    )
    def test_end_with_the_service(self, serve, number):
        service = serve(workers=2)
        service.register()
        wait_for_both(service)
        workers, folder = workers_of(service), folder_of(service)
        service.process.send_signal(number)
        assert psutil.wait_procs(workers, 30)[1] == []
        _, errors = service.stop()
        assert errors == ""
        assert not folder.exists()


def workers_of(service):
    children = psutil.Process(service.process.pid).children()
    return [child for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]


def scraped(service):
    """Samples of a page, on a connection of its own, as {line without the value: value}."""
    lines = httpx.get(f"http://127.0.0.1:{service.port}/metrics").text.splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def folder_of(service):
    """Where the workers have what they share."""
    paths = {Path(mapped.path).parent for worker in workers_of(service) for mapped in worker.memory_maps()}
    (folder,) = [path for path in paths if path.name.startswith("tsemon-workers-")]
    return folder


def body_of(seq):
    return frames_to_body("w", 1, [loss_frame(seq, float(seq)).to_json()])


def register_deep(service, frames):
    num_blocks = len(frames[0].layers["token_diversity"].data) // 4 - 1
    reply = service.http.post("/runs", json={"run": "deep", "blocks": [f"h.{i}" for i in range(num_blocks)]})
    return reply.raise_for_status().json()["run_id"]


def alerts_of(service):
    alerts = service.http.get("/alerts").json()["alerts"]
    return sorted((a["rule"], a["pending_step"], a["firing_step"]) for a in alerts if a["firing_step"] is not None)


class TestStopping:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_is_quiet(self, serve, number):
        service = serve(interpreter=True)
        status, errors = service.stop(number)
        assert errors == ""
        assert status in (0, -number)


class TestStarting:
    def test_prints_one_line_with_the_address(self, serve, database):
        service = serve()
        expected = f"tsemon serves http://127.0.0.1:{service.port} from {database.url}\n"
        assert service.greeting == expected

    def test_prints_no_password(self, postgresql):
        service = Process(postgresql.url.replace("tsemon@", "tsemon:secret@"))
        assert service.stop()[0] in (0, -signal.SIGTERM)
        assert service.greeting.endswith(f" from {postgresql.url.replace('tsemon@', 'tsemon:***@')}\n")

    def test_on_a_port_that_is_taken_fails_with_a_sentence(self, serve):
        taken = serve().port
        status, errors = serve(taken).stop()
        assert status == 1
        assert errors.startswith(f"tsemon: cannot listen on 127.0.0.1 port {taken}: ")
        assert "Traceback" not in errors

    def test_on_a_host_that_is_none_says_so(self, tmp_path):
        settings = Settings(host="no host", insecure=True, database=f"sqlite:///{tmp_path}/x.db")
        with pytest.raises(SystemExit) as exit_:
            serve_forever(settings)
        assert re.match("tsemon: cannot listen on host 'no host': .*; expected an address", str(exit_.value))
        assert "port" not in str(exit_.value)

    def test_without_a_database_fails_with_a_sentence(self, tmp_path):
        command = [sys.executable, "-m", "tsemon", "serve", "--database", f"sqlite:///{tmp_path}/nowhere/tsemon.db"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("tsemon: the database sqlite:///")
        assert "Traceback" not in done.stderr


def answer_of(connection):
    """Status and body of the reply on a raw connection that the service closes."""
    with connection.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


class TestABodyOf100Megabytes:
    def head(self, run_id, length):
        return f"POST /api/v1/runs/{run_id}/frames HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()

    def test_is_refused_while_it_streams_and_leaves_memory_alone(self, serve):
        service = serve()
        run_id = service.register()
        service.http.post(f"/runs/{run_id}/frames", content=frames_to_body("w", 1, [loss_frame(0).to_json()]))
        memory = psutil.Process(service.process.pid)
        before_bytes = memory.memory_info().rss
        chunk, sent_bytes = b"x" * 2**20, 0
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(self.head(run_id, "Transfer-Encoding: chunked"))
            while sent_bytes < 100 * 2**20 and not select.select([connection], [], [], 0)[0]:
                try:
                    connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                except ConnectionError:
                    break
                sent_bytes += len(chunk)
            assert MAX_BODY_BYTES <= sent_bytes < 100 * 2**20
        # The body that was read so far and, while a bytearray grows, its copy; not the 100 MB.
        assert memory.memory_info().rss - before_bytes < 3 * MAX_BODY_BYTES
        assert service.http.get(f"/runs/{run_id}").json()["num_frames"] == 1

    def test_is_refused_before_it_is_sent_when_it_says_its_length(self, serve):
        service = serve()
        run_id = service.register()
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(self.head(run_id, f"Content-Length: {100 * 2**20}"))
            status, body = answer_of(connection)
        assert (status, body["error"]) == (413, "body_too_large")


class TestAReply:
    def test_does_not_wait_for_a_delayed_acknowledgement(self):
        async def is_nodelay_set():
            accepted = asyncio.get_running_loop().create_future()
            listener = _listen("127.0.0.1", 0)
            server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted
            is_set = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for end in (client, writer):
                end.close()
                await end.wait_closed()
            server.close()
            return is_set

        assert asyncio.run(is_nodelay_set())

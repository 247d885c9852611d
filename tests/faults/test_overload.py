"""More than the service takes at once: it says so, stays small, and trainers bring all of it later."""

import asyncio
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.faults.counting import assert_all_arrived, stored_frames
from tests.faults.processes import REGISTRATION, await_true, known_frame
from tsemon.transport import HttpDelivery, Outbox, Spool
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.access.tokens import new_token
from tsemon_server.limits.values import Limits
from tsemon_server.store import Store


@pytest.fixture
def database(sqlite_file):
    return sqlite_file


@pytest.fixture
def token(database):
    token, store = new_token(), Store(database.url)
    store.tokens.add(token.token_id, name="x", digest=token.digest, scopes=("ingest",), project=None, expires_at=None)
    store.close()
    return token.text


@contextmanager
def locked(database):
    """Another process writes, and does not come to an end."""
    connection = sqlite3.connect(database.path, isolation_level=None, timeout=30)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.rollback()
    connection.close()


def asked_again(http):
    """Whether a body of the same token is refused, because it comes too often."""
    reply = http.post("/runs/x/heartbeat", json={"writer": "w", "attempt": 1, "step": 0})
    if reply.status_code != 429:
        return False
    assert reply.json()["error"] == "too_many_requests"
    assert 1 <= int(reply.headers["retry-after"]) <= 20
    return True


class TestATrainerThatSendsTooOften:
    def test_is_told_so_and_loses_nothing(self, database, serve, train, token):
        service = serve(tokens=True, limits=Limits(writes_per_s=100))
        trainer = train(service.url, token=token, frames_per_s=600)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=10) as http:
            await_true(lambda: asked_again(http), "it is too often")
            made = trainer.told.num_made
            assert trainer.told.num_sent < made
        assert trainer.finish() >= made
        assert stored_frames(database.url, "rank0") == list(range(trainer.told.num_made))


class TestBodiesThatWaitForTheDatabase:
    def test_are_few_and_others_are_answered_at_once(self, database, serve, train):
        service = serve(f"{database.url}?timeout=30", limits=Limits(commits=2))
        trainers = [train(service.url, f"rank{number}", frames_per_s=100) for number in range(3)]
        for trainer in trainers:
            trainer.await_sent(20)
        with httpx.Client(base_url=f"{service.url}/api/v1", timeout=60) as http, ThreadPoolExecutor(16) as pool:
            run_id = http.get("/runs").json()["runs"][0]["run_id"]
            body = frames_to_body("witness", 1, [known_frame("witness", 0).to_json()])
            with locked(database):
                sent = [pool.submit(http.post, f"/runs/{run_id}/frames", content=body) for _ in range(16)]
                await_true(lambda: any(one.done() for one in sent), "one did not wait for the database")
                (reply, *_) = (one.result() for one in sent if one.done())
                assert (reply.status_code, reply.json()["error"], reply.headers["retry-after"]) == (503, "busy", "1")
                assert http.get(f"/runs/{run_id}").status_code == 200
                for trainer in trainers:
                    trainer.await_made(50)
            num_frames = {trainer.writer: trainer.finish() for trainer in trainers}
            http.post(f"/runs/{run_id}/frames", content=body).raise_for_status()
        assert_all_arrived(service, num_frames | {"witness": 1})


class TestSignsOfLife:
    def test_of_many_that_wait_for_the_database_leave_reading_alone(self, database, serve):
        """Each would hold a thread for as long as the database is locked, and there are 40 of them."""
        service = serve(f"{database.url}?timeout=30")
        with httpx.Client(base_url=f"{service.url}/api/v1", timeout=30) as http:
            run_id = http.post("/runs", json=REGISTRATION).json()["run_id"]

        async def beat_and_read():
            num_sent = 0

            async def count_sent(event, _):
                nonlocal num_sent
                num_sent += event == "http11.send_request_body.complete"

            async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", timeout=90) as http:
                beat = {"json": {"writer": "w", "attempt": 1, "step": 1}, "extensions": {"trace": count_sent}}
                with locked(database):
                    beats = [asyncio.ensure_future(http.post(f"/runs/{run_id}/heartbeat", **beat)) for _ in range(80)]
                    while num_sent < len(beats):
                        await asyncio.sleep(0.01)
                    assert (await http.get(f"/runs/{run_id}")).status_code == 200
                    assert not any(one.done() for one in beats)
                return {reply.status_code for reply in await asyncio.gather(*beats)}

        assert asyncio.run(beat_and_read()) == {200}


class TestBodiesThatAreHeld:
    @pytest.mark.parametrize(("num_sent", "num_held"), [(50, 4), pytest.param(200, 32, marks=pytest.mark.thorough)])
    def test_take_no_more_memory_than_is_allowed(self, database, serve, num_sent, num_held):
        """Each body is 1 MiB. While the database is locked, no more are held than allowed; the others are refused."""
        service = serve(f"{database.url}?timeout=60", limits=Limits(bytes_held=num_held * 2**20))
        with httpx.Client(base_url=f"{service.url}/api/v1", timeout=10) as http:
            run_id = http.post("/runs", json=REGISTRATION).json()["run_id"]
        values = Array.of([0.5] * 3)
        frames = [Frame(seq, seq, 1.0, {}, {"token_similarity": values}).to_json() for seq in range(1000)]
        body = frames_to_body("w", 1, frames)
        body += b" " * (2**20 - len(body))
        memory = psutil.Process(service.pid)
        before_bytes = memory.memory_info().rss

        async def send_all():
            async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=200)) as http:
                sent = (http.post(f"{service.url}/api/v1/runs/{run_id}/frames", content=body) for _ in range(num_sent))
                tasks = [asyncio.ensure_future(one) for one in sent]
                most = 0
                with locked(database):
                    while sum(task.done() for task in tasks) < num_sent - num_held:
                        await asyncio.sleep(0.05)
                        most = max(most, memory.memory_info().rss)
                    refused = [task.result() for task in tasks if task.done()]
                return refused, await asyncio.gather(*tasks), most - before_bytes

        refused, replies, grown_bytes = asyncio.run(send_all())
        print(f"{len(refused)} of {num_sent} refused at first, {grown_bytes / 2**20:.0f} MiB more")
        assert {(reply.status_code, reply.json()["error"]) for reply in refused} == {(503, "busy")}
        assert len(refused) < num_sent
        assert {(reply.status_code, reply.json().get("error")) for reply in replies} == {(200, None), (503, "busy")}
        assert grown_bytes < num_sent * 2**20
        reply = httpx.post(f"{service.url}/api/v1/runs/{run_id}/frames", content=body)
        assert (reply.json()["accepted"], reply.json()["duplicates"]) == (0, 1000)

    def test_are_sent_again_until_there_is_room(self, database, serve, train):
        service = serve(limits=Limits(bytes_held=20_000))
        trainers = [train(service.url, f"rank{number}", frames_per_s=100) for number in range(4)]
        for trainer in trainers:
            trainer.await_sent(10)
        assert_all_arrived(service, {trainer.writer: trainer.finish() for trainer in trainers})


@pytest.fixture
def outbox(serve, tmp_path):
    """A writer in this process, with all that the service says to it."""
    service, told = serve(), []
    spool = Spool.create(tmp_path / "spool", REGISTRATION, "rank0")
    outbox = Outbox(spool, HttpDelivery(service.url), on_warning=told.append, first_retry_s=0.01)
    outbox.told = told
    yield outbox
    outbox.close(5)


def stored_seqs(database):
    return [seq for (seq,) in database.execute("SELECT seq FROM frame ORDER BY seq")]


class TestBodiesThatAreTooLarge:
    def test_are_halved_until_they_fit(self, outbox, database):
        """Batches of 4 MiB whose frames have 1600 keys each: more keys than a body may have."""
        scalars = {f"s{number}": 1.0 for number in range(1000)}
        layers = {f"l{number}": Array.of([1.0, 1.0]) for number in range(200)}
        for _ in range(300):
            outbox.put(lambda seq: Frame(seq, seq, 1.0, scalars, layers))
        await_true(lambda: outbox.stats().num_sent == 300, "all arrive")
        assert outbox.stats().num_refused == 0
        assert outbox.told == []
        assert stored_seqs(database) == list(range(300))

    def test_of_one_frame_are_set_aside_and_do_not_hold_up_others(self, outbox, database):
        large = Array.of([1.0] * 4_500_000)
        for layers in ({}, {"x": large}, {}):
            outbox.put(lambda seq, layers=layers: Frame(seq, seq, 1.0, {"loss": 1.0}, layers))
        await_true(lambda: outbox.stats().num_sent == 2 and outbox.stats().num_refused == 1, "two arrive, one does not")
        assert stored_seqs(database) == [0, 2]
        (text,) = outbox.told
        assert "413 (body_too_large: expected at most 16777216 bytes in a body" in text
        (refused,) = outbox.stats().spool_folder.glob("refused.jsonl")
        assert json.loads(json.loads(refused.read_text())["frame"])["seq"] == 1

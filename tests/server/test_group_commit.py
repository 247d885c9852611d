"""Work that shares transactions, on a list instead of a database; and bodies that share one on each engine."""

import asyncio
import re
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import pytest

from tests.databases import SqliteFile
from tsemon.errors import StoreError, UnknownRun
from tsemon.wire import frames_to_body
from tsemon_server.limits.values import Limits
from tsemon_server.services.ingest.schemas import Registration
from tsemon_server.services.ingest.service import key_of
from tsemon_server.store import Store
from tsemon_server.store.group_commit import MOST, GroupCommit

from .conftest import Api, loss_frame, problem


class Commits:
    """Transactions on a list: what is appended in one is there when it ends, or nothing of it."""

    def __init__(self):
        self.committed = []
        self.gate = threading.Event()
        self.fails_to_commit = False
        self.num_begun = 0

    @contextmanager
    def begin(self):
        self.num_begun += 1
        written = []
        yield written
        assert self.gate.wait(30)
        if self.fails_to_commit:
            raise StoreError("the disk is full")
        self.committed.append(written)


@pytest.fixture
def commits():
    return Commits()


@pytest.fixture
def group(commits):
    group = GroupCommit(commits.begin, num_threads=1)
    yield group
    commits.gate.set()
    group.close()


def append(item):
    def work(written):
        written.append(item)
        return item

    return work


def fail(written):
    written.append("half done")
    raise UnknownRun("gone")


def begin_one(group, commits):
    """A transaction that is under way, so that what comes now has to wait."""
    first = group.do("a", append("first"))
    while first.running() is False and not first.done():
        pass
    return first


class TestWorkThatComesWhileATransactionIsUnderWay:
    def test_shares_the_next_one(self, group, commits):
        begin_one(group, commits)
        later = [group.do("a", append(number)) for number in range(5)]
        commits.gate.set()
        assert [future.result(30) for future in later] == [0, 1, 2, 3, 4]
        assert commits.committed == [["first"], [0, 1, 2, 3, 4]]

    def test_is_ordered_by_key_and_within_a_key_as_it_came(self, group, commits):
        begin_one(group, commits)
        later = [group.do(key, append((key, number))) for number, key in enumerate("cabca")]
        commits.gate.set()
        assert [future.result(30) for future in later] == [("c", 0), ("a", 1), ("b", 2), ("c", 3), ("a", 4)]
        assert commits.committed[1] == [("a", 1), ("a", 4), ("b", 2), ("c", 0), ("c", 3)]

    def test_is_not_more_than_one_transaction_should_hold(self, group, commits):
        begin_one(group, commits)
        later = [group.do("a", append(number)) for number in range(MOST + 1)]
        commits.gate.set()
        assert later[-1].result(30) == MOST
        assert [len(written) for written in commits.committed] == [1, MOST, 1]

    def test_is_done_although_other_work_of_its_transaction_fails(self, group, commits):
        begin_one(group, commits)
        good, bad, fine = group.do("a", append("good")), group.do("b", fail), group.do("c", append("fine"))
        commits.gate.set()
        assert (good.result(30), fine.result(30)) == ("good", "fine")
        with pytest.raises(UnknownRun, match="gone"):
            bad.result(30)
        assert commits.committed == [["first"], ["good"], ["fine"]]

    def test_fails_at_once_where_the_database_does_and_waits_for_it_no_more(self, group, commits):
        commits.fails_to_commit = True
        first = begin_one(group, commits)
        later = [group.do("a", append(number)) for number in range(5)]
        commits.gate.set()
        for future in (first, *later):
            with pytest.raises(StoreError, match="disk is full"):
                future.result(30)
        assert commits.num_begun == 2

    def test_is_not_begun_when_nobody_waits_for_it_any_more(self, group, commits):
        begin_one(group, commits)
        left, kept = group.do("a", append("left")), group.do("a", append("kept"))
        assert left.cancel()
        commits.gate.set()
        assert kept.result(30) == "kept"
        assert commits.committed == [["first"], ["kept"]]


class TestWork:
    def test_is_not_answered_before_it_is_committed(self, group, commits):
        first = begin_one(group, commits)
        assert not first.done()
        commits.gate.set()
        assert first.result(30) == "first"

    def test_fails_where_its_commit_does(self, group, commits):
        commits.fails_to_commit = True
        commits.gate.set()
        with pytest.raises(StoreError, match="disk is full"):
            group.do("a", append(1)).result(30)
        commits.fails_to_commit = False
        assert group.do("a", append(2)).result(30) == 2
        assert commits.committed == [[2]]

    def test_that_waits_is_done_before_the_end(self, group, commits):
        begin_one(group, commits)
        last = group.do("a", append("last"))
        closing = threading.Thread(target=group.close)
        closing.start()
        commits.gate.set()
        closing.join(30)
        assert not closing.is_alive()
        assert last.result(0) == "last"

    def test_of_one_key_is_done_in_order_whatever_the_number_of_threads(self, commits):
        commits.gate.set()
        group = GroupCommit(commits.begin, num_threads=3)
        seen = {key: [] for key in "abcdefgh"}
        futures = [group.do(key, lambda _, n=n, key=key: seen[key].append(n)) for n in range(30) for key in seen]
        assert all(isinstance(future, Future) and future.result(30) is None for future in futures)
        group.close()
        assert all(numbers == list(range(30)) for numbers in seen.values())


class TestBodiesThatComeAtOnce:
    def test_are_each_answered_for_themselves(self, start):
        """Good ones, one that comes twice, one for a run that was deleted while the service knew it."""
        api = start()
        kept, deleted = [api.register(f"run{number}") for number in range(5)], api.register("deleted")
        for run_id in (*kept, deleted):
            api.send_ok(run_id, [loss_frame(0)])
        elsewhere = Store(api.database.url)
        with elsewhere.write() as writer:
            writer.runs.delete(deleted)
        elsewhere.close()
        body = frames_to_body("w", 1, [loss_frame(1).to_json()])

        async def send_all():
            transport = httpx.ASGITransport(api.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1/runs") as http:
                sent = (http.post(f"/{run_id}/frames", content=body) for run_id in (*kept, deleted, kept[0]))
                return await asyncio.gather(*sent)

        *replies, gone, again = asyncio.run(send_all())
        assert gone.status_code == 404
        accepted = [reply.json()["accepted"] for reply in (*replies, again)]
        assert (accepted[1:-1], accepted[0] + accepted[-1]) == ([1] * 4, 1)
        assert [api.get(f"/runs/{run_id}")["num_frames"] for run_id in kept] == [2] * 5


def asking(api, ask):
    """What `ask` returns, which gets a client that may send many requests at a time."""

    async def do():
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as http:
            return await ask(http)

    return asyncio.run(do())


class TestRegistrationsThatComeAtOnce:
    @pytest.fixture
    def api(self, tmp_path):
        """On SQLite, whose writers wait for each other, but not for long."""
        file = SqliteFile(tmp_path / "tsemon.db")
        file.migrate()
        file.url += "?timeout=0.3"
        api = Api(file)
        yield api
        api.close()

    def test_all_succeed_beside_ingest_that_takes_longer_than_a_writer_waits(self, api):
        run_id, store, gate = api.register("ingest"), api.app.state.parts.store, threading.Event()
        body = frames_to_body("w", 1, [loss_frame(1).to_json()])

        async def ask(http):
            store.write_soon(run_id, lambda _: gate.wait(30))
            registrations = [
                asyncio.create_task(http.post("/runs", json={"run": f"run {number}"})) for number in range(200)
            ]
            frames = asyncio.create_task(http.post(f"/runs/{run_id}/frames", content=body))
            await asyncio.sleep(1)  # three times as long as a writer waits
            listed = await http.get("/runs")
            gate.set()
            return listed, await frames, await asyncio.gather(*registrations)

        listed, frames, replies = asking(api, ask)
        assert [run["run"] for run in listed.json()["runs"]] == ["ingest"], "who reads does not wait for them"
        assert frames.json()["accepted"] == 1
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["run_id"] for reply in replies}) == 200


class TestRegistrationsThatShareATransaction:
    @pytest.mark.both_engines
    def test_are_each_answered_for_themselves(self, start):
        api = start(limits=Limits(project_runs=1))
        first = api.register(project="full", run="first", attempt_key="a")
        asked = [
            {"project": "full", "run": "first", "attempt_key": "b"},
            *({"project": "full", "run": f"run {number}"} for number in range(3)),
            *({"project": "roomy", "run": "same", "attempt_key": key} for key in ("a", "a", "b")),
            {"run": ""},
        ]

        async def ask(http):
            return await asyncio.gather(*(http.post("/runs", json=body) for body in asked))

        known, *full, one, again, other, wrong = asking(api, ask)
        assert (known.json()["run_id"], known.json()["attempt"]) == (first, 2)
        assert [problem(reply)[1] for reply in full] == ["limit_reached"] * 3
        assert [one.json()[name] for name in ("run_id", "attempt")] == [
            again.json()[name] for name in ("run_id", "attempt")
        ]
        assert {one.json()["attempt"], other.json()["attempt"]} == {1, 2}
        assert problem(wrong)[:2] == (422, "invalid_argument")
        assert api.get("/runs", project="full")["total"] == 1

    def test_lock_their_runs_in_the_order_of_ids_as_all_others_do(self, start):
        api = start()
        run_id, store = api.register("known"), api.app.state.parts.store
        assert key_of(store, Registration(run="known")) == run_id
        assert key_of(store, Registration(run="new")) > "f" * 16
        assert re.fullmatch("[0-9a-f]{16}", run_id)

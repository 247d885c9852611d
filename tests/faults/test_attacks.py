"""Strangers who have connections to spare: they say nothing, say it slowly, never end, or never listen."""

import asyncio
import contextlib
import json
import select
import socket
import sqlite3
import time
from functools import partial

import httpx
import psutil
import pytest

from tests.faults.counting import assert_all_arrived
from tests.faults.processes import await_true
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.access.tokens import new_token
from tsemon_server.limits.values import Limits
from tsemon_server.main import create_app
from tsemon_server.settings import Settings
from tsemon_server.store import Store

QUICK = Limits(connections=100, head_s=1, body_s=1, send_s=1)
"""What takes seconds takes one."""
FRAMES_HEAD = "POST /api/v1/runs/{}/frames HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"


@pytest.fixture
def database(sqlite_file):
    return sqlite_file


@pytest.fixture
def service(serve):
    return serve(limits=QUICK)


@pytest.fixture
def connect(service):
    """Opens connections that nobody closes before the test ends."""
    with contextlib.ExitStack() as opened:

        def connect(said=b""):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=20))
            connection.sendall(said)
            return connection

        yield connect


def is_over(connection):
    """Whether the service has hung up. Reads what it has said."""
    try:
        while connection.recv(2**16, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def all_it_says(connection):
    """Up to when it hangs up."""
    said = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            said += part
    return bytes(said)


def answer_of(connection):
    head, _, body = all_it_says(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def is_well(service):
    return httpx.get(f"{service.url}/readyz", timeout=5).status_code == 200


def dribble(connections, byte=b"x"):
    """A byte on each of them that is still open."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(byte)
    time.sleep(0.1)


class TestAHeadThatNeverEnds:
    def test_is_not_waited_for_though_it_goes_on(self, service, connect):
        slow = [connect(b"GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nX: ") for _ in range(50)]
        until = time.monotonic() + 10
        while not all(select.select([connection], [], [], 0)[0] for connection in slow):
            assert time.monotonic() < until
            dribble(slow)
            assert is_well(service)
        assert {answer_of(connection) for connection in slow} == {(408, "too_slow")}

    def test_is_not_waited_for_on_a_connection_that_was_good_before(self, service, connect):
        kept = connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(2**16).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /hea")
        assert answer_of(kept) == (408, "too_slow")

    @pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\nX"])
    def test_is_refused_once_it_is_long(self, service, connect, start):
        long = connect(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(160):
                long.sendall(b"x" * 2**16)  # 10 MiB
            pytest.fail("10 MiB of a head were read")
        assert is_over(long)

    def test_may_hold_many_headers_up_to_a_point(self, service, connect):
        for num_bytes, status in ((60_000, b"200"), (70_000, b"431")):
            headers = "".join(f"X-{number}: {'x' * 90}\r\n" for number in range(num_bytes // 96))
            sent = connect(f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
            assert sent.recv(2**16).split()[1] == status


class TestABodyThatComesSlowly:
    def test_is_not_waited_for(self, service, connect, http):
        head = FRAMES_HEAD.format(http.run_id, 10_000).encode()
        slow = [connect(head) for _ in range(20)]
        until = time.monotonic() + 10
        while not all(select.select([connection], [], [], 0)[0] for connection in slow):
            assert time.monotonic() < until
            dribble(slow)
        assert {answer_of(connection) for connection in slow} == {(408, "too_slow")}
        assert http.send([0]) == (1, 0)

    def test_is_waited_for_while_it_comes_at_a_fair_pace(self, service, connect, http):
        body = frames_to_body("w", 1, [Frame(0, 0, 1.0, {"loss": 1.0}).to_json()])
        body += b" " * (100_000 - len(body))
        slow = connect(FRAMES_HEAD.format(http.run_id, len(body)).encode())
        for start in range(0, len(body), 5000):
            slow.sendall(body[start : start + 5000])
            time.sleep(0.1)  # two seconds in all
        assert slow.recv(2**16).startswith(b"HTTP/1.1 200")

    def test_ends_what_was_begun_with_it(self, service, connect, http):
        """Whatever was refused early is read to its end, but not at any pace."""
        head = FRAMES_HEAD.format(http.run_id, 2**30).encode()
        slow = connect(head)
        assert slow.recv(2**16).startswith(b"HTTP/1.1 413")
        await_true(lambda: dribble([slow]) or is_over(slow), "it is cut")


class TestStrangersWhoSignInWithoutEnd:
    @pytest.fixture
    def service(self, serve):
        return serve(tokens=True)  # as it comes otherwise

    @pytest.fixture
    def admin(self, service):
        made, store = new_token(), Store(service.database)
        store.tokens.add(made.token_id, name="t", digest=made.digest, scopes=("admin",), project=None, expires_at=None)
        store.close()
        return {"Authorization": f"Bearer {made.text}"}

    def test_leave_room_for_those_with_tokens_and_for_a_look_at_its_health(self, service, connect, admin):
        begun = b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        slow = [connect(begun) for _ in range(520)]
        refused = slow[-1].recv(2**16)
        assert refused.split()[1] == b"503"
        assert is_well(service)
        assert httpx.get(f"{service.url}/api/v1/runs", headers=admin, timeout=5).status_code == 200

    def test_are_waited_for_only_briefly(self, service, connect):
        began = time.monotonic()
        slow = connect(b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        said = slow.recv(2**16)
        took_s = time.monotonic() - began
        said += b"".join(iter(lambda: slow.recv(2**16), b""))  # the body may come by itself
        assert said.split()[1] == b"408"
        assert b"too_slow" in said
        assert took_s < 10


class TestWrongTokensWhoseAnswersNobodyReads:
    def test_take_no_place_among_those_that_are_under_way(self, database):
        app = create_app(Settings(database=database.url, tokens=True, limits=Limits(requests=2)), rules=())

        async def ask():
            begun, never = [], asyncio.Event()

            async def deaf(message):
                begun.append(message.get("status"))
                await never.wait()

            def scope():
                headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {new_token().text}".encode())]
                path = {"path": "/api/v1/runs", "raw_path": b"/api/v1/runs", "query_string": b""}
                client = {"client": ("203.0.113.7", 1), "server": ("localhost", 80), "scheme": "http"}
                return {"type": "http", "method": "GET", "http_version": "1.1", "headers": headers, **path, **client}

            asked = [asyncio.ensure_future(app(scope(), None, deaf)) for _ in range(2)]
            while len(begun) < 2:
                await asyncio.sleep(0.01)
            asked += [asyncio.ensure_future(app(scope(), None, deaf))]
            while len(begun) < 3:
                await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return begun

        assert asyncio.run(ask()) == [401, 401, 401]


class TestConnectionsThatSayNothing:
    def test_are_cut(self, service, connect):
        idle = [connect() for _ in range(50)]
        await_true(lambda: all(map(is_over, idle)), "all are cut")

    def test_are_cut_after_a_request_too(self, service, connect):
        idle = [connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(50)]
        await_true(lambda: all(map(is_over, idle)), "all are cut")

    @pytest.mark.parametrize("number", [2000, pytest.param(10_000, marks=pytest.mark.thorough)])
    def test_and_are_thousands_leave_the_service_to_others(self, serve, train, number):
        service = serve(limits=Limits())  # as it comes
        trainer = train(service.url)
        trainer.await_sent(20)
        memory = psutil.Process(service.pid)
        before_bytes, most = memory.memory_info().rss, 0
        with contextlib.ExitStack() as opened:
            for count in range(1, number + 1):
                opened.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=20))
                if count % 1000 == 0:
                    assert is_well(service)
                    trainer.await_sent(1)
                    most = max(most, memory.num_fds())
            grown_bytes = memory.memory_info().rss - before_bytes
        assert most < 1000 + 512 + 100, "those that are taken, those that are just coming, and files"
        assert grown_bytes < 100 * 2**20
        print(f"{number:,} connections: {most} descriptors, {grown_bytes / 2**20:.1f} MiB more")
        assert_all_arrived(service, {"rank0": trainer.finish()})


class TestOneConnectionTooMany:
    @pytest.fixture
    def service(self, serve):
        return serve(limits=Limits(connections=1))

    def test_is_told_to_come_again_where_no_other_keeps_the_server_waiting(self, connect):
        listener = connect(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert listener.recv(12) == b"HTTP/1.1 200"
        said = all_it_says(connect())
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in said
        assert b'"error":"busy"' in said


class TestManyRequestsAtOnceOnOneConnection:
    def test_are_answered_in_order_up_to_a_point(self, service, connect):
        few = connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
        said = b""
        while said.count(b"200 OK") < 8:
            said += few.recv(2**16)

    def test_are_refused_beyond_it(self, service, connect):
        memory = psutil.Process(service.pid)
        before_bytes = memory.memory_info().rss
        for _ in range(20):
            many = connect()
            with contextlib.suppress(ConnectionError):
                many.sendall(b"GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000)
            await_true(partial(is_over, many), "it hangs up")
        assert memory.memory_info().rss - before_bytes < 20 * 2**20
        assert is_well(service)


@pytest.fixture
def large_run(service):
    """A run of which every answer is too large for the buffers on the way: 300 steps of 1000 layers."""
    with httpx.Client(base_url=f"{service.url}/api/v1", timeout=60) as http:
        blocks = [f"h.{number}" for number in range(1000)]
        run_id = http.post("/runs", json={"run": "large", "blocks": blocks}).json()["run_id"]
        values = Array.of(number / 1000 for number in range(1000))
        for start in range(0, 300, 100):
            frames = [Frame(seq, seq, 1.0, {}, {"grad_norm": values}).to_json() for seq in range(start, start + 100)]
            http.post(f"/runs/{run_id}/frames", content=frames_to_body("w", 1, frames)).raise_for_status()
    return run_id


class TestAnAnswerThatNobodyReads:
    @pytest.mark.parametrize(
        "question", [pytest.param("heatmap?metric=grad_norm&columns=250", marks=pytest.mark.thorough), "export"]
    )
    def test_is_not_kept_for_long(self, service, connect, large_run, question):
        memory = psutil.Process(service.pid)
        ask = f"GET /api/v1/runs/{large_run}/{question} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        deaf = [connect(ask) for _ in range(4)]
        await_true(lambda: len(memory.net_connections()) > 4, "they are there")
        await_true(lambda: len(memory.net_connections()) <= 1, "they are cut")  # the port itself is one
        for connection in deaf:
            with contextlib.suppress(ConnectionError):
                assert not connection.recv(2**26).endswith(b"0\r\n\r\n")
        assert is_well(service)

    def test_is_whole_where_it_is_read_slowly(self, service, connect, large_run):
        slow = connect(f"GET /api/v1/runs/{large_run}/export HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        said, until = bytearray(), time.monotonic() + 3
        while part := slow.recv(2**20 if time.monotonic() > until else 2**16):
            said += part
            if time.monotonic() < until:
                time.sleep(0.05)  # about 1 MiB a second: three times as long as one may be deaf
        assert said.count(b"\n") > 300_000


class TestAnExportThatIsReadForEver:
    """Before, it held a state of the database for as long as somebody read 48 KiB in 30 s."""

    @pytest.fixture
    def service(self, serve):
        return serve(limits=Limits(export_s=2))

    def test_is_cut_off_and_leaves_the_database(self, service, connect, large_run):
        def holds_a_state():
            """Whether some reader keeps the log from being emptied."""
            with contextlib.closing(sqlite3.connect(service.database.removeprefix("sqlite:///"))) as database:
                database.execute("PRAGMA busy_timeout = 0")
                return database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 1

        slow = connect(f"GET /api/v1/runs/{large_run}/export HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        said, held, until = bytearray(), [], time.monotonic() + 4
        while time.monotonic() < until:  # a pace at which nobody counts as deaf
            said += slow.recv(2**14)
            held.append(holds_a_state())
            time.sleep(0.2)
        assert any(held)
        began = time.monotonic()
        await_true(lambda: not holds_a_state(), "nobody holds a state of the database")
        assert time.monotonic() - began < 10, "it did so before it was cut for being deaf"
        said += all_it_says(slow)
        assert said.startswith(b"HTTP/1.1 200")
        assert not said.endswith(b"0\r\n\r\n")
        assert is_well(service)


class TestExportsAtOnce:
    def test_are_few_and_others_are_told_to_come_again(self, service, connect, large_run):
        ask = f"GET /api/v1/runs/{large_run}/export HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        busy = [connect(ask) for _ in range(4)]
        for connection in busy:
            assert connection.recv(12) == b"HTTP/1.1 200"
        reply = httpx.get(f"{service.url}/api/v1/runs/{large_run}/export")
        assert (reply.status_code, reply.json()["error"], reply.headers["retry-after"]) == (503, "busy", "1")
        assert httpx.get(f"{service.url}/api/v1/runs/{large_run}").status_code == 200
        for connection in busy:
            connection.close()
        await_true(
            lambda: httpx.get(f"{service.url}/api/v1/runs/{large_run}/export?metric=grad_norm&to_step=1").is_success,
            "there is room again",
        )

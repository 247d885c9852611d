"""Connections that break, and bodies that come twice, late or at the same time."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.faults.counting import assert_all_arrived, stored_frames
from tests.faults.processes import await_true
from tests.faults.proxy import Cut, Proxy


@pytest.fixture
def proxy(service):
    proxy = Proxy(service.port)
    yield proxy
    proxy.close()


def num_duplicates(service):
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith('tsemon_frames_total{outcome="duplicate"}'))


class TestConnectionsThatAreCut:
    @pytest.mark.parametrize("num_cuts", [16, pytest.param(40, marks=pytest.mark.thorough)])
    def test_in_either_direction_lose_and_double_no_frame(self, service, train, proxy, num_cuts):
        rng = random.Random(0)
        # A request of one frame has some 600 bytes, a reply 200: cuts fall into heads, bodies, and behind the first few.
        for direction, most in [("request", 2000), ("reply", 800)] * (num_cuts // 2):
            proxy.cuts.append(Cut(direction, rng.randrange(most), is_reset=rng.random() < 0.5))
        trainer = train(proxy.url)
        await_true(lambda: proxy.num_cut == num_cuts, "all connections were cut")
        assert_all_arrived(service, {"rank0": trainer.finish()})

    @pytest.mark.parametrize("is_reset", [False, True])
    def test_between_a_commit_and_its_reply_count_the_frames_once(self, service, train, proxy, is_reset):
        trainer = train(proxy.url)
        trainer.await_sent(1)
        before = num_duplicates(service)
        # The connection under way is kept alive; those that follow are cut at the first byte of what they ask.
        proxy.cuts.extend([Cut("reply", 0, is_reset)] * 5)
        proxy.end_all()
        await_true(lambda: proxy.num_cut == 5, "five replies were lost")
        trainer.await_sent(1)
        assert num_duplicates(service) - before >= 5
        assert_all_arrived(service, {"rank0": trainer.finish()})


def at_once(*calls):
    """What the calls return, all of them made at the same moment."""
    barrier = threading.Barrier(len(calls))

    def call(make):
        barrier.wait()
        return make()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


class TestABody:
    def test_that_arrives_twice_is_stored_once(self, service, http):
        assert [http.send(range(10)), http.send(range(10))] == [(10, 0), (0, 10)]
        assert_all_arrived(service, {"rank0": 10})

    def test_that_overtakes_others_finds_its_place(self, service, http):
        bodies = [range(start, start + 7) for start in range(0, 700, 7)]
        random.Random(0).shuffle(bodies)
        assert [http.send(seqs) for seqs in bodies] == [(7, 0)] * 100
        assert_all_arrived(service, {"rank0": 700})

    def test_on_many_connections_at_once_is_stored_once(self, service, http):
        for start in range(0, 100, 10):
            replies = at_once(*[partial(http.send, range(start, start + 10))] * 4)
            assert sorted(replies) == [(0, 10)] * 3 + [(10, 0)]
        assert_all_arrived(service, {"rank0": 100})

    def test_that_overlaps_another_at_the_same_moment_adds_what_is_missing(self, service, http):
        for start in range(0, 200, 20):
            first, second = range(start, start + 15), range(start + 5, start + 20)
            (added, _), (also, _) = at_once(partial(http.send, first), partial(http.send, second))
            assert added + also == 20
        assert_all_arrived(service, {"rank0": 200})


class TestWritersAtOnce:
    def test_do_not_get_in_each_others_way(self, service, http):
        def write(writer):
            return [http.send([seq], writer) for seq in range(50)]

        writers = [f"rank{number}" for number in range(4)]
        assert at_once(*(partial(write, writer) for writer in writers)) == [[(1, 0)] * 50] * 4
        assert stored_frames(service.database, "rank3") == list(range(50))
        assert_all_arrived(service, dict.fromkeys(writers, 50))

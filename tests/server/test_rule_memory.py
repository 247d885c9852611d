"""What the store keeps for the rules between two frames."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.server.conftest import loss_frame
from tsemon_server.store import Store
from tsemon_server.store.ledger.progress import REACH, Checkpoint, Progress, Seen
from tsemon_server.store.ledger.rules import Definition


@pytest.fixture
def store(api):
    return api.app.state.parts.store


@pytest.fixture
def run_id(api):
    return api.register()


class TestTheProgressOfTheRules:
    def test_is_what_was_kept_last(self, store, run_id):
        with store.write() as writer:
            assert writer.progress.of(run_id, 1) is None
        for progress in (
            Progress(7, 5, 2, {"w": Seen(5, 1.5)}, 3.0, 2, 4, 1, 9, 13.0),
            Progress(8, 2**60, 3, {"w": Seen(5, 1.5), "v": Seen(7, 2.5)}),
        ):
            with store.write() as writer:
                writer.progress.keep(run_id, 1, progress)
            with store.read() as reader:
                assert reader.progress.of(run_id, 1) == progress

    def test_is_of_one_attempt_and_goes_with_the_run(self, store, api, run_id):
        with store.write() as writer:
            writer.progress.keep(run_id, 1, Progress(1))
            for step in (1, 2):
                writer.progress.keep_checkpoint(run_id, 1, Checkpoint(step, step, b"a"))
            assert writer.progress.of(run_id, 2) is None
        api.fall_silent(run_id)
        api.register(resume_step=3)
        with store.write() as writer:
            assert writer.progress.of(run_id, 1) == Progress(1)
            assert writer.progress.checkpoint_steps(run_id, 1) == [(2, 2)]
        api.http.delete(f"/api/v1/runs/{run_id}")
        with store.write() as writer:
            assert writer.progress.of(run_id, 1) is None

    def test_says_which_attempts_are_due_and_what_was_never_read(self, store, api, run_id):
        other = api.register("other")
        with store.write() as writer:
            writer.progress.keep(run_id, 1, Progress(due_at=20.0, num_skipped=2))
            writer.progress.keep(run_id, 2, Progress(due_at=10.0, num_skipped=3))
            writer.progress.keep(other, 1, Progress())
        with store.read() as reader:
            assert reader.progress.due(9.0, 10) == []
            assert reader.progress.due(20.0, 10) == [(run_id, 2), (run_id, 1)]
            assert reader.progress.due(20.0, 1) == [(run_id, 2)]
            assert reader.progress.num_skipped([run_id, other]) == {run_id: 5}


class TestCheckpointsOfTheRules:
    def keep(self, store, run_id, *steps, attempt=1):
        for step in steps:
            with store.write() as writer:
                writer.progress.keep_checkpoint(run_id, attempt, Checkpoint(step, step, b"at %d" % step))

    def steps(self, store, run_id, attempt=1):
        with store.read() as reader:
            return [step for step, _ in reader.progress.checkpoint_steps(run_id, attempt)]

    def test_are_fewer_the_older_they_are(self, store, run_id):
        for newest in range(16, 16 * 400, 16):
            self.keep(store, run_id, newest)
            ages = [(newest - step) // 16 for step in self.steps(store, run_id)]
            assert len(ages) <= 12
            for age in range(newest // 16):  # going back, at most four times as many steps are read again as are late
                assert min((older for older in ages if older > age), default=newest // 16) <= 4 * age + 2

    def test_that_nobody_can_come_late_to_are_gone(self, store, run_id):
        self.keep(store, run_id, *range(0, 10 * REACH, REACH // 4))
        assert REACH <= 10 * REACH - REACH // 4 - self.steps(store, run_id)[-1] <= 4 * REACH

    def test_are_found_before_a_step(self, store, run_id):
        self.keep(store, run_id, 10, 30)
        with store.read() as reader:
            found = [reader.progress.before(run_id, 1, step).step for step in (31, 30, 11, 10)]
            assert found == [30, 10, 10, -1]
            assert reader.progress.before(run_id, 1, 31).state == b"at 30"

    def test_are_written_anew_from_a_step_on(self, store, run_id):
        self.keep(store, run_id, 10, 20, 19)
        assert self.steps(store, run_id) == [19, 10]
        self.keep(store, run_id, 19)
        assert self.steps(store, run_id) == [19, 10]
        self.keep(store, run_id, 5)
        assert self.steps(store, run_id) == [5]

    def test_are_of_one_attempt_of_one_run(self, store, api, run_id):
        other = api.register("other")
        self.keep(store, other, 7)
        self.keep(store, run_id, 10, 200)
        self.keep(store, run_id, 15, attempt=2)
        assert (self.steps(store, run_id), self.steps(store, run_id, 2)) == ([200, 10], [15])
        assert self.steps(store, other) == [7]


class TestFrozenBlocks:
    def test_are_those_of_each_attempt(self, store, api):
        run_id = api.register(num_blocks=3, frozen_blocks=[2, 0])
        api.register(num_blocks=3)
        api.send_ok(run_id, [loss_frame(0)], attempt=2)
        with store.write() as writer:
            assert [writer.runs.model(run_id, attempt).frozen for attempt in (1, 2)] == [{0, 2}, set()]


class TestVersionsOfRules:
    def add(self, store, name="a", digest="d", **options):
        with store.write() as writer:
            writer.rules.add_versions([Definition(name, digest, {"name": name})], "edited", **options)

    def test_count_up_and_the_newest_is_the_one(self, store):
        for number in range(3):
            self.add(store, digest=f"d{number}", enabled=number != 2)
        self.add(store, "B")
        with store.read() as reader:
            newest = reader.rules.newest()
            assert [(v.name, v.version, v.enabled, v.digest) for v in newest] == [
                ("B", 1, True, "d"),
                ("a", 3, False, "d2"),
            ]
            assert [v.version for v in reader.rules.versions("a")] == [3, 2, 1]
            assert reader.rules.versions("c") == []
            assert reader.rules.num_versions() == 4

    def test_are_new_where_they_say_what_one_before_the_last_said(self, store):
        for digest in ("one", "two", "one"):
            self.add(store, digest=digest)
        with store.read() as reader:
            found = [(version.version, version.digest) for version in reader.rules.versions("a")]
        assert found == [(3, "one"), (2, "two"), (1, "one")]

    def told(self, store, project=None):
        with store.read() as reader:
            return [(v.name, v.version, v.project, v.digest) for v in reader.rules.newest(project)]

    def test_of_a_project_count_there_in_place_of_the_servers(self, store):
        self.add(store)
        self.add(store, digest="of p", project="p")
        self.add(store, "b", digest="of p", project="p")
        self.add(store, digest="of q", project="q")
        self.add(store, digest="later")
        assert self.told(store) == [("a", 4, None, "later")]
        assert self.told(store, "p") == [("a", 2, "p", "of p"), ("b", 1, "p", "of p")]
        assert self.told(store, "q") == [("a", 3, "q", "of q")]
        assert self.told(store, "r") == self.told(store)
        with store.read() as reader:
            assert (reader.rules.projects(), reader.rules.projects("b")) == (["p", "q"], ["p"])
            assert [v.version for v in reader.rules.versions("a")] == [4, 1]
            assert [v.version for v in reader.rules.versions("a", "p")] == [2, 4, 1]
            assert reader.rules.versions("b") == []
            assert reader.rules.num_versions() == 5

    def test_of_a_project_count_until_it_follows_the_server_again(self, store):
        self.add(store)
        self.add(store, digest="of p", project="p")
        with store.write() as writer:
            writer.rules.add_versions([Definition("a", "d", {})], "server", project="p")
        assert self.told(store, "p") == [("a", 1, None, "d")]
        with store.read() as reader:
            assert (reader.rules.projects(), reader.rules.own("p")) == ([], [])
            assert [v.version for v in reader.rules.versions("a", "p")] == [1, 3, 2]
        self.add(store, digest="of p", project="p")
        assert self.told(store, "p") == [("a", 4, "p", "of p")]

    def test_of_a_project_are_added_though_the_server_says_the_same(self, store):
        for _ in range(2):
            self.add(store)
            self.add(store, project="p")
        with store.read() as reader:
            assert [(v.version, v.project) for v in reader.rules.versions("a", "p")] == [(2, "p"), (1, None)]

    def test_are_not_added_where_they_say_nothing_new(self, store):
        for _ in range(2):
            self.add(store)
        self.add(store, enabled=False)
        with store.read() as reader:
            assert [(v.version, v.enabled) for v in reader.rules.versions("a")] == [(2, False), (1, True)]

    @pytest.mark.parametrize(("is_the_same", "num_kept"), [(True, 1), (False, 20)])
    def test_are_all_kept_where_several_processes_add_one_at_once(self, api, is_the_same, num_kept):
        def add(store):
            for number in range(5):
                self.add(store, digest="same" if is_the_same else f"{stores.index(store)} {number}")

        with ExitStack() as held, ThreadPoolExecutor(4) as threads:
            stores = [held.enter_context(closing(Store(api.database.url))) for _ in range(4)]
            assert [*threads.map(add, stores)] == [None] * 4
        with api.app.state.parts.store.read() as reader:
            assert [v.version for v in reader.rules.versions("a")] == [*range(num_kept, 0, -1)]

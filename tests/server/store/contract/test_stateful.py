"""Whatever is done to a store and in which order: it answers as a dict of frames would."""

import random
import tempfile
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, event

from tests.server.conftest import Api
from tests.server.naive import NaiveRun
from tests.server.store.bench import Bench, opened
from tsemon.errors import UnknownRun
from tsemon.wire import MAX_STEP, Array, Frame, frames_to_body
from tsemon_server.store.series.settling import Sizes

NUMBERS = (0.0, 1.0, -2.5, 0.1, float("nan"), float("inf"), float("-inf"), 1e-45, 3e38, -3e38)
SIZES = Sizes(segment=8, kept=2)
"""So small that a dozen frames are a chunk."""


class Crash(Exception):
    """The process ends here."""


class Refused(Exception):
    """What is wrong with a body is found after its frames were stored."""


class InProcess:
    """The store, asked without HTTP."""

    def __init__(self, engine, clock):
        self._engine, self._clock = engine, clock
        self.reopen()

    def close(self):
        self._bench.store.close()

    def reopen(self):
        if hasattr(self, "_bench"):
            self.close()
        self._bench = Bench(self._engine, self._engine.open(self._clock))

    def register(self, run, depth, resume_step, key):
        with self._bench.store.write() as writer:
            about = {"config": None, "tags": None, "resume_step": resume_step, "attempt_key": key}
            found = writer.runs.register("p", run, blocks=[f"h.{number}" for number in range(depth)], **about)
        return found.run_id, found.attempt

    def post(self, run_id, attempt, writer, frames):
        """The number of frames that were new."""
        return self._bench.send(run_id, frames, writer=writer, attempt=attempt)

    def post_what_is_refused(self, run_id, attempt, writer, frames):
        with suppress(Refused), self._bench.store.write() as write:
            write.frames.add(run_id, attempt, writer, frames)
            raise Refused

    def finish(self, run_id):
        self._bench.end(run_id)

    def delete(self, run_id):
        self._bench.delete(run_id)

    def detail(self, run_id):
        try:
            return self._bench.detail(run_id)
        except UnknownRun:
            return None

    def series(self, run_id, metric, **where):
        return self._bench.series(run_id, metric, **where)

    def heatmap(self, run_id, metric, **where):
        return self._bench.heatmap(run_id, metric, **where)


class OverHttp:
    """The service, asked as clients ask."""

    def __init__(self, engine, clock):
        self._database, self._clock = engine.database, clock
        self._api = Api(self._database, clock=clock)

    def close(self):
        self._api.close()

    def reopen(self):
        self.close()
        self._api = Api(self._database, clock=self._clock)

    def register(self, run, depth, resume_step, key):
        body = {"project": "p", "run": run, "blocks": [f"h.{number}" for number in range(depth)]}
        reply = self._api.http.post("/api/v1/runs", json=body | {"resume_step": resume_step, "attempt_key": key})
        return reply.json()["run_id"], reply.json()["attempt"]

    def post(self, run_id, attempt, writer, frames):
        reply = self._api.send_ok(run_id, frames, writer=writer, attempt=attempt)
        assert reply["accepted"] + reply["duplicates"] == len(frames)
        return reply["accepted"]

    def post_what_is_refused(self, run_id, attempt, writer, frames):
        bad = frames[0].to_json().replace('"step":', '"stop":')
        body = frames_to_body(writer, attempt, [*(frame.to_json() for frame in frames), bad])
        assert self._api.post_raw(run_id, body).status_code == 422

    def finish(self, run_id):
        assert self._api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"}).status_code == 200

    def delete(self, run_id):
        assert self._api.http.delete(f"/api/v1/runs/{run_id}").status_code == 204

    def detail(self, run_id):
        found = self._api.get(f"/runs/{run_id}")
        return found if isinstance(found, dict) else None

    def series(self, run_id, metric, **where):
        return self._api.get(f"/runs/{run_id}/series", metric=metric, **where)

    def heatmap(self, run_id, metric, **where):
        return self._api.get(f"/runs/{run_id}/heatmap", metric=metric, **where)


@contextmanager
def before_each_statement(action):
    """Call `action(number, connection)` before each SQL statement of this thread, among them the BEGIN of a transaction."""
    thread, numbers = threading.get_ident(), iter(range(10**9))

    def listen(connection, *_):
        if threading.get_ident() == thread:
            action(next(numbers), connection)

    hooks = "begin", "before_cursor_execute"
    for hook in hooks:
        event.listen(Engine, hook, listen)
    try:
        yield
    finally:
        for hook in hooks:
            event.remove(Engine, hook, listen)


def frames_of(depth, seqs, steps, layout, seed):
    """Frames in one of five layouts, with values as awkward as they come."""
    draw = random.Random(seed)

    def some(*shape):
        number = shape[0] * (shape[1] if len(shape) > 1 else 1)
        return Array.of([draw.choice((*NUMBERS, draw.random())) for _ in range(number)], shape)

    for seq, step in zip(seqs, steps, strict=True):
        scalars = {"loss": draw.choice((*NUMBERS, 1.7e308, -1.7e308, draw.random()))}
        similarity = {"token_similarity": some(depth + 1)}
        scalars, layers, heads = (
            (scalars, {}, {}),
            (scalars, similarity, {}),
            ({}, {**similarity, "param_norm": some(depth)}, {"attention_entropy": some(depth, 2)}),
            ({}, {}, {}),
            (scalars | {"mine": draw.random()}, {"mine": some(depth + seq % 2)}, {"mine": some(depth, 1 + seq % 3)}),
        )[layout]
        yield Frame(seq, step, seq + draw.random(), scalars, layers, heads)


class StoreStory(RuleBasedStateMachine):
    """Posts, retries, crashes, compaction, rewinds and reads, on the store and on plain dicts."""

    Driver = InProcess

    @staticmethod
    @contextmanager
    def opened():
        with tempfile.TemporaryDirectory() as folder, opened("sqlite", Path(folder)) as engine:
            yield engine

    @initialize(data=st.data())
    def begin(self, data):
        self.held = ExitStack()
        self.engine, self.now = self.held.enter_context(self.opened()), 1e9
        self.driver = self.Driver(self.engine, lambda: self.now)
        self.other, self.third = (
            self.engine.open(lambda: self.now) for _ in range(2)
        )  # of other processes: they compact
        self.runs, self.sent, self.late = {}, [], []
        self.register(data, "a", 2, None)
        self.post(data)

    def teardown(self):
        if hasattr(self, "driver"):
            self.check_everything()
            self.other.settle(sizes=SIZES)
            self.check_everything()
            for store in (self.other, self.third, self.driver):
                store.close()
            self.held.close()

    # -- what writers do

    @rule(data=st.data(), name=st.sampled_from("aab"), depth=st.integers(0, 3), key=st.none() | st.sampled_from("kl"))
    def register(self, data, name, depth, key):
        steps = {frame.step for known, run in self.runs.values() if known == name for frame in run.frames.values()}
        resume_step = data.draw(st.sampled_from([*sorted(steps, reverse=True), 70, None]))
        run_id, attempt = self.driver.register(name, depth, resume_step, key)
        known = [known_id for known_id, (known_name, _) in self.runs.items() if known_name == name]
        assert known in ([], [run_id])
        assert (
            self.runs.setdefault(run_id, (name, NaiveRun(lambda: self.now)))[1].register(depth, resume_step, key)
            == attempt
        )

    @rule(data=st.data())
    def post(self, data):
        for _ in range(data.draw(st.integers(1, 4))):
            self.deliver(self.draw_body(data))

    @rule(data=st.data())
    def post_later(self, data):
        self.late.append(self.draw_body(data))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def post_what_is_late(self, data):
        self.deliver(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def retry(self, data):
        *where, frames = self.sent[data.draw(st.integers(0, len(self.sent) - 1))]
        start = data.draw(st.integers(0, len(frames) - 1))
        self.deliver((*where, frames[start:]))

    @rule(data=st.data())
    def post_what_is_refused(self, data):
        run_id, attempt, writer, frames = self.draw_body(data)
        self.driver.post_what_is_refused(run_id, attempt, writer, frames)
        if not self.engine.shares_transactions:  # they are stored, and the ledger hears of it when they come again
            self.runs[run_id][1].add_unnoted(attempt, writer, frames)
            assert self.driver.post(run_id, attempt, writer, frames) == 0

    @rule(data=st.data())
    def finish(self, data):
        run_id = data.draw(st.sampled_from(list(self.runs)))
        self.driver.finish(run_id)
        self.runs[run_id][1].finish()

    @precondition(lambda self: len(self.runs) > 1)
    @rule(data=st.data())
    def delete(self, data):
        run_id = data.draw(st.sampled_from(list(self.runs)))
        self.driver.delete(run_id)
        del self.runs[run_id]
        self.late = [body for body in self.late if body[0] != run_id]
        self.sent = [body for body in self.sent if body[0] != run_id]
        assert self.driver.detail(run_id) is None

    # -- what the service does by itself, and what befalls it

    @rule(most=st.integers(1, 3) | st.just(1000))
    def settle(self, most):
        so_far = iter(range(most))
        assert self.other.settle(lambda: next(so_far, None) is None, sizes=SIZES) <= most

    @rule(number=st.integers(0, 40))
    def crash_while_settling(self, number):
        def crash(at, _):
            if at == number:
                raise Crash

        with suppress(Crash), before_each_statement(crash):
            self.other.settle(sizes=SIZES)

    @rule(data=st.data(), deed=st.sampled_from(["post", "retry", "register", "delete", "settle_beside"]))
    def settle_while_something_happens(self, data, deed):
        """Between the packing of the first segment and its transaction, which is the first statement that writes."""
        is_due = True

        def act(_, connection):
            nonlocal is_due
            if is_due and connection.get_execution_options().get("writes"):
                is_due = False
                self.do(deed, data)

        with before_each_statement(act):
            self.other.settle(sizes=SIZES)

    def do(self, deed, data):
        if deed == "settle_beside":
            self.third.settle(sizes=SIZES)
        elif deed == "register":
            self.register(data, data.draw(st.sampled_from("aab")), data.draw(st.integers(0, 3)), None)
        elif (deed != "retry" or self.sent) and (deed != "delete" or len(self.runs) > 1):
            getattr(self, deed)(data)

    @rule()
    def reopen(self):
        self.driver.reopen()

    @rule(hours=st.sampled_from([0.01, 2]))
    def wait(self, hours):
        self.now += 3600 * hours

    # -- what is asked

    @invariant()
    def tells_how_the_runs_are(self):
        for run_id, (_, run) in getattr(self, "runs", {}).items():
            run.check_detail(self.driver.detail(run_id))

    @precondition(lambda self: any(run.shapes() for _, run in self.runs.values()))
    @rule(data=st.data())
    def read(self, data):
        run_id = data.draw(st.sampled_from([run_id for run_id, (_, run) in self.runs.items() if run.shapes()]))
        run = self.runs[run_id][1]
        steps = st.none() | st.sampled_from(sorted({frame.step for frame in run.frames.values()}))
        where = {
            "from_step": data.draw(steps),
            "to_step": data.draw(steps),
            "attempt": data.draw(st.none() | st.sampled_from(list(run.depths))),
        }
        if None not in (where["from_step"], where["to_step"]) and where["from_step"] > where["to_step"]:
            where["from_step"], where["to_step"] = where["to_step"], where["from_step"]
        (kind, metric), shape = data.draw(st.sampled_from(sorted(run.shapes().items())))
        self.check(run_id, kind, metric, shape, where, data.draw(st.integers(3, 40)), data.draw(st.randoms()))

    def check_everything(self):
        for run_id, (_, run) in self.runs.items():
            run.check_detail(self.driver.detail(run_id))
            draw, steps = random.Random(0), [frame.step for frame in run.frames.values()]
            for attempt in (None, draw.choice(list(run.depths))):
                for (kind, metric), shape in run.shapes().items():
                    first, last = sorted(draw.choices(steps, k=2))
                    for from_step, to_step, points in ((None, None, 5), (first, last, 1000)):
                        where = {"from_step": from_step, "to_step": to_step, "attempt": attempt}
                        self.check(run_id, kind, metric, shape, where, points, draw)

    def check(self, run_id, kind, metric, shape, where, points, draw):
        run = self.runs[run_id][1]
        with self.other.read() as reader:
            run.check_samples(reader.frames.metric(run_id, kind, metric, **where).samples(), kind, metric, **where)
        if 0 in shape:
            return
        layer = None if kind == "scalars" else draw.randrange(shape[0])
        head = draw.randrange(shape[1]) if kind == "heads" else None
        entry = where | {"layer": layer, "head": head, "points": points}
        run.check_series(self.driver.series(run_id, metric, **entry), kind, metric, **entry)
        if kind == "layers":
            columns = where | {"columns": max(1, points - 2)}
            run.check_heatmap(self.driver.heatmap(run_id, metric, **columns), metric, **columns)

    # -- how bodies come to be

    def deliver(self, body):
        run_id, attempt, writer, frames = body
        new = self.runs[run_id][1].add(attempt, writer, frames)
        assert self.driver.post(run_id, attempt, writer, frames) == len(new)
        self.sent.append(body)

    def draw_body(self, data):
        """Most follow those before them; some come again under their number, some from the end of all numbers."""
        run_id = data.draw(st.sampled_from(list(self.runs)))
        run = self.runs[run_id][1]
        attempt, writer = data.draw(st.sampled_from(list(run.depths)[::-1])), data.draw(st.sampled_from("vw"))
        number = data.draw(st.integers(1, 30))
        before = [(seq, frame.step) for (a, w, seq), frame in run.frames.items() if (a, w) == (attempt, writer)]
        seq, step = max(before, default=(-1, -1))
        first_seq = data.draw(
            st.sampled_from([seq + 1, seq + 1, seq + 1, seq + 3, max(0, seq - 2), 505, MAX_STEP - 40])
        )
        stride = data.draw(st.sampled_from([1, 1, 0, 2, 3, 50, 1000]))
        steps = sorted({step + 1, *(frame.step for frame in run.frames.values())})
        first_step = data.draw(st.just(step + 1) | st.sampled_from(steps) | st.sampled_from([0, 70, MAX_STEP - 20_000]))
        first_seq = min(first_seq, MAX_STEP)
        seqs = range(first_seq, min(first_seq + number, MAX_STEP + 1))
        steps = [min(first_step + stride * index, MAX_STEP) for index in range(len(seqs))]
        layout, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 9))
        if layout == 4 and not run.depths[attempt]:
            layout = 0
        frames = list(frames_of(run.depths[attempt], seqs, steps, layout, seed))
        if data.draw(st.booleans()):
            random.Random(seed).shuffle(frames)
        return run_id, attempt, writer, frames


class StoryInMemory(StoreStory):
    @staticmethod
    @contextmanager
    def opened():
        with tempfile.TemporaryDirectory() as folder, opened("memory", Path(folder)) as engine:
            yield engine


class StoryOverHttp(StoreStory):
    Driver = OverHttp


def settings_of(max_examples):
    return settings(
        max_examples=max_examples,
        stateful_step_count=30,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


TestTheStore = StoreStory.TestCase
TestTheStore.settings = settings_of(15)
TestTheStoreInMemory = pytest.mark.thorough(StoryInMemory.TestCase)
TestTheStoreInMemory.settings = settings_of(15)
TestTheService = StoryOverHttp.TestCase
TestTheService.settings = settings_of(4)


@pytest.mark.parametrize(
    "story",
    [StoreStory, pytest.param(StoryOverHttp, marks=pytest.mark.thorough)],
    ids=["the store", "the service"],
)
def test_on_postgresql(story, postgresql_server):
    class Story(story):
        opened = staticmethod(lambda: opened("postgresql", None, postgresql_server))

    run_state_machine_as_test(Story, settings=settings_of(3))

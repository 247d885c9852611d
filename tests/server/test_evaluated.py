"""Whatever is sent in which order, and whatever befalls the servers: the rules read every stored frame, or it is counted."""

import math
import random
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.server.store.bench import opened
from tests.server.store.contract.test_stateful import before_each_statement, settings_of
from tsemon.errors import StoreError
from tsemon.wire import Frame
from tsemon_answers.alerts import AlertsQuery
from tsemon_server.alerts import ActiveRules, Watch, recall
from tsemon_server.alerts import watch as watching
from tsemon_server.alerts.eras import eras_after, handed_over
from tsemon_server.alerts.recall import past_of, state_now
from tsemon_server.alerts.rulebook import Rulebook
from tsemon_server.alerts.watch import DELAY_S
from tsemon_server.rules.documents import load
from tsemon_server.rules.views import views_in_order
from tsemon_server.services.ingest import schemas
from tsemon_server.services.ingest.service import Batch, Kept, change
from tsemon_server.store.ledger import progress

WRITERS, NUM_FRAMES, MOST_ATTEMPTS = "vwx", 34, 3
FRAMES = frozenset(f"{writer}{seq}" for writer in WRITERS for seq in range(NUM_FRAMES))
"""Every frame has a scalar of its own, and there is a rule for each of them: its alert tells that the frame was read."""
ORDINARY = {
    "not-finite": {"when": "nonfinite(loss) for 1 sample", "clear": "finite(loss) for 1 sample"},
    "high": {"when": "loss > 10 for 2 samples", "clear": "loss < 10 for 2 samples"},
    "rising": {
        "when": "loss > mean(loss, samples=5) and loss > 2 * lowest(loss) for 1 sample",
        "clear": "loss <= mean(loss, samples=5) for 1 sample",
    },
}
"""Rules whose alerts depend on the order of the frames before."""
EDITED = "{name: high, when: 'loss > %d for 2 samples', clear: 'loss < 10 for 2 samples'}"


def as_rules():
    lines = [f"{{name: {name}, when: 'scalar(\"{name}\") > 0 for 1 sample'}}" for name in sorted(FRAMES)]
    lines += [f"{{name: {name}, when: '{told['when']}', clear: '{told['clear']}'}}" for name, told in ORDINARY.items()]
    return load("rules:\n" + "".join(f"  - {line}\n" for line in lines))


RULES = as_rules()
SMALL = {
    "SPACING": 2,
    "FRAMES_AT_ONCE": 3,
    "AT_ONCE": 4,
    "REACH": 4,
    "MOST_REREAD": 16,
    "KNOWN_ATTEMPTS": 2,
}
"""So that a dozen frames have checkpoints at all ages, and some of them are too late."""
REST_S = 75
"""All frames are evaluated or counted after this time, which docs/rules.md names."""


class Killed(StoreError):
    """The process ends here."""


class Server:
    """A process of the service: what it remembers goes with it."""

    def __init__(self, name, engine, clock):
        self._name, self._engine, self._clock = name, engine, clock
        self.start()

    def __repr__(self):
        return self._name

    def start(self):
        self.store = self._engine.open(self._clock)
        self.watch = Watch(ActiveRules(RULES))

    def restart(self):
        self.close()
        self.start()

    def close(self):
        self.store.close()

    def look(self):
        self.watch.look(self.store, self._clock())


def name_of(frame):
    (name,) = FRAMES & {*frame.scalars}
    return name


def replayed(frames, eras):
    """The state after rules have read these frames in order, each the steps of its era, and the alerts that fired: rule
    and steps."""
    views = [*views_in_order(frames, frozenset())]
    before, state, fired = eras[0].rules, eras[0].rules.evaluator.start(), {}
    for rules, until in eras:
        state, before = handed_over(state, before, rules), rules
        for event in rules.evaluator.read([(state, [view for view in views if until is None or view.step <= until])])[
            0
        ]:
            if event.kind in ("firing", "resolved"):
                steps = event.pending_step, event.firing_step, event.resolved_step
                fired[event.rule.name, event.firing_step] = (event.rule.name, *steps)
    return state, [*fired.values()]


def meet(alert, other):
    """Whether there is a step at which both are, as far as is known."""
    (rule, first, _, last), (other_rule, other_first, _, other_last) = alert, other
    is_after = last is not None and last < other_first
    is_before = other_last is not None and other_last < first
    return rule == other_rule and not is_after and not is_before


class EvaluatedStory(RuleBasedStateMachine):
    """Writers, attempts, kills, edits, the clock and its rounds, on two servers of one database."""

    @staticmethod
    @contextmanager
    def opened():
        with tempfile.TemporaryDirectory() as folder, opened("sqlite", Path(folder)) as engine:
            yield engine

    @initialize(is_edited=st.booleans())
    def set_up(self, is_edited):
        self.held = ExitStack()
        patch = self.held.enter_context(pytest.MonkeyPatch.context())
        for module in (watching, recall, progress):
            for name in SMALL.keys() & vars(module).keys():
                patch.setattr(module, name, SMALL[name])
        engine, self.now = self.held.enter_context(self.opened()), 1e9
        self.servers = [Server(name, engine, lambda: self.now) for name in ("one", "two")]
        self.rulebook = Rulebook(RULES)
        self.rulebook.register(self.servers[0].store)
        self.may_edit = is_edited
        self.run_ids = {}
        self.stored, self.in_reach, self.heard_at, self.far_back = {}, {}, {}, set()
        self.sent, self.held_back = [], []
        self.meanwhile = self.looking = None
        patch.setattr(watching, "past_of", self.past_of)
        for run in "ab":
            self.begin(run, None)

    def teardown(self):
        if hasattr(self, "held"):
            try:
                self.come_to_rest()
            finally:
                for server in self.servers:
                    server.close()
                self.held.close()

    # -- what writers do

    @precondition(lambda self: len(self.stored) < 2 * MOST_ATTEMPTS)
    @rule(run=st.sampled_from("ab"), resume_step=st.none() | st.integers(0, 40))
    def begin(self, run, resume_step):
        with self.servers[0].store.write() as writer:
            about = {"blocks": ["h.0"], "config": None, "tags": None}
            found = writer.runs.register("p", run, **about, resume_step=resume_step, attempt_key=None)
        self.run_ids[run] = found.run_id
        self.stored[run, found.attempt], self.in_reach[run, found.attempt] = {}, set()

    @rule(data=st.data(), number=st.integers(1, 3))
    def post(self, data, number):
        for _ in range(number):
            self.deliver(data, [self.draw_body(data)])

    @rule(data=st.data())
    def post_of_all_writers(self, data):
        which = data.draw(st.sampled_from([*self.stored]))
        for writer in WRITERS:
            self.deliver(data, [self.draw_body(data, which, writer=writer)])

    @rule(data=st.data())
    def post_to_both_runs(self, data):
        """In one transaction: the rules read both together."""
        newest = {run: (run, attempt) for run, attempt in self.stored}
        self.deliver(data, [self.draw_body(data, which) for which in newest.values()])

    @rule(data=st.data())
    def post_late(self, data):
        which = max(self.stored, key=lambda which: len(self.stored[which]))
        steps = sorted({*self.stored[which].values()})[-SMALL["MOST_REREAD"] : -SMALL["AT_ONCE"]]
        if steps:
            self.deliver(data, [self.draw_body(data, which, data.draw(st.sampled_from(steps)))])

    @rule(data=st.data())
    def hold_back(self, data):
        self.held_back.append(self.draw_body(data))

    @precondition(lambda self: self.held_back)
    @rule(data=st.data())
    def post_what_was_held_back(self, data):
        self.deliver(data, [self.held_back.pop(data.draw(st.integers(0, len(self.held_back) - 1)))])

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data):
        which, writer, frames = data.draw(st.sampled_from(self.sent))
        start = data.draw(st.integers(0, len(frames) - 1))
        self.deliver(data, [(which, writer, frames[start:])])

    @rule(data=st.data())
    def end(self, data):
        run, attempt = data.draw(st.sampled_from([*self.stored]))
        server, body = self.draw_server(data), schemas.RunChange(state="finished", attempt=attempt)
        with server.store.write() as writer:
            change(writer, self.run_ids[run], body, server.watch)

    # -- what the servers do by themselves, and what befalls them

    @rule(seconds=st.sampled_from([0.5, 4, 11, 61, 100, -3600]))
    def wait(self, seconds):
        self.now += seconds

    @rule(data=st.data(), seconds=st.sampled_from([0, 1, 61]))
    def look(self, data, seconds):
        self.now += seconds
        self.draw_server(data).look()

    DEEDS = (
        "post",
        "post_late",
        "post_late",
        "look",
        "claim_and_die",
        "post_what_was_held_back",
        "repeat",
        "end",
        "edit",
    )

    @rule(data=st.data(), before=st.booleans(), deeds=st.lists(st.sampled_from(DEEDS), max_size=3), dies=st.booleans())
    def look_while_something_happens(self, data, before, deeds, dies):
        """Between the claim of late frames and what comes of it. `before` they are read, or afterwards."""

        def meanwhile(*arguments):
            self.meanwhile = None
            past = None if before else past_of(*arguments)
            for deed in deeds:
                self.do(data, deed)
            if dies:
                raise Killed
            return past_of(*arguments) if before else past

        self.post_late(data)
        self.now += 11
        self.looking = self.draw_server(data)
        self.look_and(self.looking, meanwhile)
        self.looking = None

    def claim_and_die(self, data):
        """The other server, while one reads late frames again."""

        def die(*_):
            raise Killed

        self.now += 1
        self.look_and(next(server for server in self.servers if server is not self.looking), die)

    def look_and(self, server, meanwhile):
        self.meanwhile = meanwhile
        try:
            server.look()
        except Killed:
            server.restart()
        finally:
            self.meanwhile = None

    @rule(data=st.data(), deed=st.sampled_from(DEEDS), number=st.integers(0, 60))
    def kill(self, data, deed, number):
        """Before a statement of a transaction."""

        def kill(at, _):
            if at >= number:
                raise Killed

        with suppress(Killed), before_each_statement(kill):
            self.do(data, deed)
        for server in self.servers:
            server.restart()

    @rule(data=st.data())
    def restart(self, data):
        self.draw_server(data).restart()

    @precondition(lambda self: self.may_edit)
    @rule(data=st.data(), above=st.integers(5, 30))
    def edit(self, data, above):
        self.rulebook.put_one(self.draw_server(data).store, "high", f"rules:\n  - {EDITED % above}\n")

    # -- what must be so

    @rule()
    def come_to_rest(self):
        for _ in range(5):
            self.now += REST_S / 5
            self.servers[0].look()
        counted = Counter()
        for which in self.stored:
            counted[which[0]] += self.check(*which)
        with self.servers[1].store.read() as reader:
            for run, run_id in self.run_ids.items():
                assert reader.runs.detail(run_id).unevaluated_frames == counted[run]

    def check(self, run, attempt):
        """That each frame of an attempt was evaluated in its place, or counted; how many were counted."""
        run_id, which = self.run_ids[run], (run, attempt)
        stored = self.stored[which]
        with self.servers[1].store.read() as reader:
            active, found = self.servers[1].watch.active, reader.progress.of(run_id, attempt)
            state = state_now(reader, active, run_id, attempt, found or progress.Progress())
            eras = eras_after(-1, reader, active, run_id, attempt, found or progress.Progress())
            frames = [*reader.frames.after(run_id, attempt, -1)]
            alerts = [alert for alert in reader.alerts.find(AlertsQuery(run_id=run_id)) if alert.attempt == attempt]
            is_running = reader.runs.detail(run_id).attempts[attempt - 1].state == "running"
        assert {name_of(frame): frame.step for frame in frames} == stored
        if found is None:
            assert not stored
            return 0
        assert (found.waiting_since, found.late_from, found.num_late, found.claimed_from) == (None, None, 0, None)

        told = {alert.rule: alert.firing_step for alert in alerts if alert.rule in FRAMES}
        assert len(told) == sum(alert.rule in FRAMES for alert in alerts)
        assert told.items() <= stored.items()
        unread = stored.keys() - told.keys()
        assert not unread & self.in_reach[which]
        assert len(unread) <= found.num_skipped <= len(stored) - len(self.in_reach[which])
        if (run_id, attempt) not in self.far_back:
            assert found.num_skipped == len(unread)
        assert (found.read_to, found.num_read) == (max(told.values()), len({*told.values()}))

        expected, fired = replayed([frame for frame in frames if name_of(frame) in told], eras)
        self.check_state(eras[-1].rules.evaluator, run_id, attempt, found, state, expected)
        self.check_alerts(alerts, is_running, fired)
        return found.num_skipped

    def check_state(self, evaluator, run_id, attempt, found, state, expected):
        """The state on which the next frame builds, as the database and as the servers have it."""
        known = [server.watch.known.get((run_id, attempt)) for server in self.servers]
        known = [one for one in known if one is not None and one.revision == found.revision]
        dumped = [
            evaluator.dump(state),
            *(one.rules.evaluator.dump(one.state) for one in known if one.rules.evaluator is evaluator),
        ]
        assert {*dumped} == {evaluator.dump(expected)}

    def check_alerts(self, alerts, is_running, fired):
        """The alerts that people see are those of a replay of what was evaluated."""
        rules = ORDINARY.keys()
        told = [
            (alert.rule, alert.pending_step, alert.firing_step, alert.resolved_step)
            for alert in alerts
            if alert.rule in rules and alert.firing_step is not None
        ]
        fired = [alert for alert in fired if alert[0] in rules]
        if is_running:
            # What fired only because a frame was late stays, over where it fired. No replay has it.
            assert sorted((alert for alert in told if alert[2] != alert[3]), key=str) == sorted(fired, key=str)
        else:  # what fired at the end is over, and stays so
            assert all(any(meet(alert, other) for other in told) for alert in fired)

    # -- how it comes about

    def past_of(self, reader, evaluator, run_id, attempt, *others):
        # From there on frames may be read that were counted.
        self.far_back.add((run_id, attempt))
        return (self.meanwhile or past_of)(reader, evaluator, run_id, attempt, *others)

    def do(self, data, deed):
        if deed == "post":
            self.post(data, 1)
        elif deed == "look":
            self.look(data, data.draw(st.sampled_from([1, 61])))
        elif deed == "edit":
            if self.may_edit:
                self.edit(data, data.draw(st.integers(5, 30)))
        elif getattr(self, {"post_what_was_held_back": "held_back", "repeat": "sent"}.get(deed, "stored")):
            getattr(self, deed)(data)

    def draw_server(self, data):
        return data.draw(st.sampled_from(self.servers))

    def deliver(self, data, bodies):
        server = self.draw_server(data)
        before = {which: self.progress_of(which) for which, *_ in bodies}
        with server.store.write() as write:
            batches = sorted(Batch(self.run_ids[run], attempt, *body) for (run, attempt), *body in bodies)
            Kept.finish([Kept(write, batch, server.watch) for batch in batches])
        for body in bodies:
            self.note(*body)
            self.sent.append(body)
        for which, known in before.items():
            self.check_waiting(which, known)

    def progress_of(self, which):
        run, attempt = which
        with self.servers[1].store.read() as reader:
            return reader.progress.of(self.run_ids[run], attempt) or progress.Progress()

    def check_waiting(self, which, before):
        """That no step was read which a live writer has not passed, unless some step waited before."""
        heard = {
            writer: at for (of, writer), at in self.heard_at.items() if of == which and abs(self.now - at) < DELAY_S
        }
        passed = [max(step for name, step in self.stored[which].items() if name[0] == writer) for writer in heard]
        if passed and before.waiting_since is None:
            assert self.progress_of(which).read_to <= max(before.read_to, min(passed))

    def note(self, which, writer, frames):
        steps = {*self.stored[which].values()}
        new = {name_of(frame): frame.step for frame in frames if name_of(frame) not in self.stored[which]}
        near = {name for name, own in new.items() if sum(step > own for step in steps) <= SMALL["REACH"]}
        self.stored[which] |= new
        if new:
            self.heard_at[which, writer] = self.now
        self.in_reach[which] |= near

    def draw_body(self, data, which=None, late_step=None, writer=None):
        """Most go on where their writer was; some come again, and one from `late_step` on is short."""
        which = which or data.draw(st.sampled_from([*self.stored][::-1]))
        writer = writer or data.draw(st.sampled_from(WRITERS))
        stored = self.stored[which]
        seqs = [int(name[1:]) for name in stored if name[0] == writer]
        number = data.draw(st.sampled_from([1, 1, 2, 3, 5, 12, 24] if late_step is None else [1, 2]))
        first_seq = max(seqs, default=-1) + (
            1 if late_step is not None else data.draw(st.sampled_from([1, 1, 1, 3, -1]))
        )
        seqs = range(min(max(first_seq, 0), NUM_FRAMES - 1), min(max(first_seq, 0) + number, NUM_FRAMES))
        own = max((step for name, step in stored.items() if name[0] == writer), default=-1) + 1
        newest = max(stored.values(), default=-1) + 1
        steps = [own, own, own, newest, newest // 2, max(newest - 3, 0), 0] if late_step is None else [late_step]
        step, stride = data.draw(st.sampled_from(steps)), data.draw(st.sampled_from([1, 1, 1, 0, 2, 3]))
        draw = random.Random(data.draw(st.integers(0, 9)))
        frames = [frame_of(writer, seq, step + stride * place, draw) for place, seq in enumerate(seqs)]
        if data.draw(st.booleans()):
            draw.shuffle(frames)
        return which, writer, frames


def frame_of(writer, seq, step, draw):
    loss = draw.choice([1.0, 1.0, 3.0, 7.0, 20.0, 20.0, math.nan, None])
    scalars = {f"{writer}{seq}": 1.0} | ({} if loss is None else {"loss": loss})
    return Frame(seq, step, 1000.0 + step, scalars)


def of_20_steps(max_examples):
    return settings(settings_of(max_examples), stateful_step_count=20)


TestEveryFrame = EvaluatedStory.TestCase
TestEveryFrame.settings = of_20_steps(25)


@pytest.mark.thorough
def test_more_of_it():
    run_state_machine_as_test(EvaluatedStory, settings=of_20_steps(300))


def test_on_postgresql(postgresql_server):
    class Story(EvaluatedStory):
        opened = staticmethod(lambda: opened("postgresql", None, postgresql_server))

    run_state_machine_as_test(Story, settings=of_20_steps(3))

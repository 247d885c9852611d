"""A whole alert story, told as a list of numbers: the diversity of the last block, sample by sample."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import read_all

from tsemon_server.rules import RULES, Hold, TokenSimilarityEscalation, Track, View, advance
from tsemon_server.rules.engine import WINDOW_SAMPLES

MET, BETWEEN, CLEAR, UNKNOWN = 1e-5, 3e-3, 0.3, float("nan")


def view(step, last, blocks=12):
    return View(
        step,
        layers={
            "token_diversity": np.geomspace(0.7, last, blocks + 1),
            "centred_token_similarity": np.linspace(0.1, 0.99, blocks + 1),
        },
    )


def tell(samples, rule=RULES[0], every=5, track=None):
    """The events of a run that is sampled every `every` steps from step 0."""
    track, events = track or Track(), []
    for i, last in enumerate(samples):
        track, event = advance(rule, track, view(i * every, last))
        events += [event] if event else []
    return events


def kinds(samples, **options):
    return [(e.kind, e.resolved_step or e.firing_step or e.pending_step) for e in tell(samples, **options)]


class TestAnAlert:
    def test_is_pending_at_once_and_fires_after_three_samples(self):
        assert kinds([CLEAR, MET, MET, MET, MET]) == [("pending", 5), ("firing", 15)]

    def test_fires_after_ten_steps_where_every_step_is_sampled(self):
        assert kinds([MET] * 30, every=1) == [("pending", 0), ("firing", 10)]

    def test_fires_after_three_samples_where_they_are_far_apart(self):
        assert kinds([MET] * 5, every=500) == [("pending", 0), ("firing", 1000)]

    def test_needs_samples_in_a_row(self):
        assert kinds([MET, MET, BETWEEN, MET, MET, CLEAR, MET, MET]) == [("pending", 0)]

    def test_counts_anew_after_a_sample_that_did_not_meet(self):
        assert kinds([MET, MET, BETWEEN, MET, MET, MET]) == [("pending", 0), ("firing", 25)]

    def test_is_withdrawn_when_it_is_not_met_any_more(self):
        assert kinds([MET, BETWEEN, CLEAR, BETWEEN, CLEAR]) == [("pending", 0), ("withdrawn", 15)]

    def test_keeps_firing_between_the_thresholds(self):
        assert kinds([MET] * 3 + [BETWEEN] * 20) == [("pending", 0), ("firing", 10)]

    def test_keeps_firing_through_a_clear_sample_or_two(self):
        assert kinds([MET] * 3 + [CLEAR, CLEAR, BETWEEN] * 5) == [("pending", 0), ("firing", 10)]

    def test_is_resolved_after_three_clear_samples(self):
        events = tell([MET] * 3 + [CLEAR] * 4)
        assert [e.kind for e in events] == ["pending", "firing", "resolved"]
        assert (events[-1].pending_step, events[-1].firing_step, events[-1].resolved_step) == (0, 10, 25)

    def test_can_come_again(self):
        assert [kind for kind, _ in kinds(([MET] * 3 + [CLEAR] * 3) * 2)] == ["pending", "firing", "resolved"] * 2

    def test_fires_on_the_first_sample_where_no_hold_is_asked(self):
        rule = replace(TokenSimilarityEscalation(), hold=Hold(samples=1, steps=0))
        events = tell([MET], rule=rule)
        assert [(e.kind, e.pending_step, e.firing_step) for e in events] == [("firing", 0, 0)]


class TestAFrameThatCannotBeRead:
    @pytest.mark.parametrize("story", [[CLEAR, MET, MET, MET], [MET] * 3 + [CLEAR] * 3, [MET] + [BETWEEN] * 3])
    def test_changes_nothing_wherever_it_stands(self, story):
        expected = [e.kind for e in tell(story)]
        for position in range(len(story) + 1):
            assert [e.kind for e in tell([*story[:position], UNKNOWN, *story[position:]])] == expected

    def test_is_said_in_the_window_of_the_next_event(self):
        (event,) = tell([CLEAR, UNKNOWN, MET])
        assert [sample["last_token_diversity"] for sample in event.evidence["window"]] == [0.3, None, 1e-5]


class TestStepsThatDoNotRise:
    def test_the_same_step_is_not_counted_twice(self):
        track, events = Track(), []
        for step in (0, 0, 0, 10, 10):
            track, event = advance(RULES[0], track, view(step, MET))
            events += [event.kind] if event else []
        assert events == ["pending"]

    def test_an_earlier_step_changes_nothing(self):
        track, _ = advance(RULES[0], Track(), view(100, MET))
        assert advance(RULES[0], track, view(50, CLEAR)) == (track, None)


class TestTheWindow:
    def test_holds_the_last_samples_up_to_the_event(self):
        event = tell([CLEAR] * 20 + [MET])[0]
        assert [sample["step"] for sample in event.evidence["window"]] == list(range(65, 105, 5))
        assert len(event.evidence["window"]) == WINDOW_SAMPLES

    def test_shows_what_decided(self):
        assert tell([MET])[0].evidence["window"] == [
            {"step": 0, "last_token_diversity": 1e-5, "last_centred_token_similarity": 0.99}
        ]


class TestATrack:
    def test_is_fresh_where_nothing_was_stored(self):
        assert Track.from_json(None) == Track()

    @pytest.mark.parametrize(
        "trace", [t for t in read_all() if t.family in ("tse", "rank") or t.is_gray], ids=lambda t: t.name
    )
    def test_survives_storage_at_every_frame(self, trace):
        kept, stored, events, again = Track(), None, [], []
        for frame in trace.views:
            kept, event = advance(RULES[0], kept, frame)
            events.append(event)
            track, event = advance(RULES[0], Track.from_json(stored and json.loads(stored)), frame)
            again.append(event)
            stored = json.dumps(track.to_json(), allow_nan=False)
            assert Track.from_json(json.loads(stored)) == kept
        assert events == again


class TestAnyStory:
    SAMPLES = st.lists(st.tuples(st.integers(1, 700), st.sampled_from([MET, BETWEEN, CLEAR, UNKNOWN, 1e-14, 1.0])))

    @given(SAMPLES)
    @settings(max_examples=100, deadline=None)
    def test_goes_from_pending_to_its_end_and_holds_in_between(self, samples):
        track, step, last = Track(), 0, None
        for distance, diversity in samples:
            step += distance
            track, event = advance(RULES[0], track, view(step, diversity))
            if event is None:
                continue
            before = last.kind if last else None
            after = {"firing": ("pending",), "withdrawn": ("pending",), "resolved": ("firing",)}
            assert before in after.get(event.kind, (None, "resolved", "withdrawn"))
            if event.kind != "pending":
                held = event.evidence["held"]
                assert held["samples"] >= 3
                assert held["steps"] >= 10
                assert event.pending_step == last.pending_step
            last = event

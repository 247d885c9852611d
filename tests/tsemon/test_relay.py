import dataclasses

import pytest
import torch

from tests.tsemon.test_actions import alert, incident_as_json
from tsemon.errors import InvalidArgument
from tsemon.relay import NUM_NUMBERS, Relay
from tsemon.wire import Incident

NOTHING = [0.0] * NUM_NUMBERS


def heard(sender, receiver, numbers):
    """What rank 0 and another rank make of the largest numbers of all ranks, as float32."""
    largest = torch.tensor([numbers, receiver.next_numbers()]).float().amax(dim=0).tolist()
    sender.confirm()
    receiver.confirm()
    return sender.received(largest), receiver.received(largest)


class TestRelay:
    def test_brings_one_alert_a_sample_in_order_and_whole_to_who_sent_it(self):
        sender, receiver = Relay(), Relay()
        first = alert("a", evidence={"layers": [1]}, advice={"text": "rest"}, summary="Schichten ≈ gleich")
        second = alert("b", "resolved", firing_step=None)
        sender.put(first)
        sender.put(second)
        bare = {"evidence": {}, "advice": {}}
        assert heard(sender, receiver, sender.next_numbers()) == (first, dataclasses.replace(first, **bare))
        assert heard(sender, receiver, sender.next_numbers()) == (second, dataclasses.replace(second, **bare))
        assert heard(sender, receiver, sender.next_numbers()) == (None, None)

    def test_brings_the_incident_of_an_alert(self):
        sender, receiver = Relay(), Relay()
        for each in (alert("a", incident_id="12"), alert("b")):
            sender.put(each)
        told = [heard(sender, receiver, sender.next_numbers()) for _ in range(2)]
        assert [(own.incident_id, other.incident_id) for own, other in told] == [("12", "12"), (None, None)]

    def test_brings_an_incident_without_its_advice(self):
        sender, receiver = Relay(), Relay()
        opened = Incident.from_json(incident_as_json(blocks=[0, 3], advice={"text": "rest"}))
        sender.put(opened)
        assert heard(sender, receiver, sender.next_numbers()) == (opened, dataclasses.replace(opened, advice={}))

    def test_brings_incidents_before_alerts(self):
        sender, receiver = Relay(), Relay()
        opened, changed = (
            Incident.from_json(incident_as_json(blocks=[0, 3], advice={}, rule=rule)) for rule in ("a", "b")
        )
        for each in (alert("1"), opened, alert("2"), changed):
            sender.put(each)
        told = [heard(sender, receiver, sender.next_numbers())[0] for _ in range(4)]
        assert told == [opened, changed, alert("1"), alert("2")]

    def test_sends_nothing_where_there_is_nothing_to_say(self):
        assert Relay().next_numbers() == NOTHING

    def test_sends_again_what_went_into_a_sample_that_was_lost(self):
        sender, receiver = Relay(), Relay()
        sender.put(alert("a"))
        sender.next_numbers()  # and nobody agreed on it
        sender.put(alert("a", "resolved"))
        for state in ("firing", "resolved"):
            own, other = heard(sender, receiver, sender.next_numbers())
            assert own.state == other.state == state
        assert sender.next_numbers() == NOTHING

    def test_gives_the_sender_what_the_others_have_though_it_could_not_read_an_earlier_one(self):
        sender, receiver = Relay(), Relay()
        for state in ("firing", "resolved"):
            sender.put(alert("a", state, evidence={"layers": [1]}))
        sender.next_numbers()
        sender.confirm()  # and what came of it was not read
        own, other = heard(sender, receiver, sender.next_numbers())
        assert own.state == other.state == "resolved"
        assert own.evidence == {"layers": [1]}

    def test_tells_the_verdicts_of_an_incident_apart_when_it_could_not_read_an_earlier_one(self):
        sender, receiver = Relay(), Relay()
        for rule in ("states-collapse", "dead-units"):
            sender.put(Incident.from_json(incident_as_json(rule=rule)))
        sender.next_numbers()
        sender.confirm()  # and what came of it was not read
        own, other = heard(sender, receiver, sender.next_numbers())
        assert own.rule == other.rule == "dead-units"

    def test_gives_back_in_order_what_nobody_has_received(self):
        sender = Relay()
        alerts = [alert("a"), alert("b"), alert("c")]
        for each in alerts:
            sender.put(each)
        sender.next_numbers()
        sender.confirm()
        assert sender.take_back() == alerts
        assert sender.take_back() == []
        assert sender.next_numbers() == NOTHING

    def test_cuts_a_summary_that_has_no_room(self):
        sender, receiver = Relay(), Relay()
        long = alert("a", summary="ä" * 5000)
        sender.put(long)
        whole, cut = heard(sender, receiver, sender.next_numbers())
        assert whole == long
        assert 100 < len(cut.summary) < 400
        assert long.summary.startswith(cut.summary)

    def test_refuses_names_that_have_no_room_and_goes_on(self):
        sender = Relay()
        with pytest.raises(InvalidArgument, match="too long to be told to other ranks"):
            sender.put(alert("a", rule="r" * 1000))
        assert sender.next_numbers() == NOTHING

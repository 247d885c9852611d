"""Alerts are replied to rank 0; two processes that train together act on them at the same step."""

import contextlib
import json

import pytest

from tests import processes
from tests.tsemon import acting
from tests.tsemon.test_actions import as_json, incident_as_json
from tests.tsemon.transport.conftest import Peer
from tsemon.suspicion import SHARE_EVERY

SIZE = 2
TSE = as_json("tse", evidence={"layers": {"last": 8}}, summary="Ähnlichkeit " * 200, incident_id="1")
AGAIN = as_json("again", incident_id="1")


def steps_of(peer):
    return sorted(frame["step"] for frame in peer.frames.values())


def burst_in(steps):
    """The steps that were sampled one after the other."""
    return [step for step in steps if step + 1 in steps or step - 1 in steps]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each rank saw, and the service that they delivered to."""
    folder = tmp_path_factory.mktemp("acting")
    with contextlib.ExitStack() as stack:
        peer = Peer().start()
        stack.callback(peer.stop)
        with processes.ranks(acting.main, SIZE, folder, peer.url) as ranks:
            wait_for(peer, ranks, lambda: len(peer.frames) >= 4)
            peer.alerts, peer.incidents = [TSE], [incident_as_json()]
            wait_for(peer, ranks, lambda: len(burst_in(steps_of(peer))) == acting.BURST)
            peer.alerts = [TSE, AGAIN, as_json("loss", family="loss", severity="critical")]
    return processes.seen_by_ranks(SIZE, folder), peer


def wait_for(peer, ranks, is_true):
    """Until that is so, unless a rank has ended."""
    with peer.changed:
        while not is_true():
            ended = [rank.communicate()[1] for rank in ranks if rank.poll() is not None]
            assert not ended, ended
            peer.changed.wait(0.5)


class TestRanksThatTrainTogether:
    def test_are_told_of_an_alert_at_the_same_step(self, trained):
        (first, second), _ = trained
        told = [[note[:3] for note in seen["told"]] for seen in (first, second)]
        assert told[0] == told[1]
        assert [note[:2] for note in told[0]] == [["tse", "firing"], ["again", "firing"], ["loss", "firing"]]
        assert first["alerts"] == second["alerts"] == ["tse", "again", "loss"]

    def test_are_told_of_an_incident_at_the_same_step(self, trained):
        (first, second), _ = trained
        assert [note[:2] + note[3:] for note in second["incidents"]] == [["1", "open", ["1"]]]
        assert first["incidents"][:1] == second["incidents"]

    def test_are_not_told_of_what_comes_after_the_last_sample_but_on_rank_0(self, trained):
        (first, _), _ = trained
        assert [note[:2] + note[3:] for note in first["incidents"][1:]] == [["1", "ended", []]]

    def test_have_its_evidence_on_rank_0_alone(self, trained):
        (first, second), _ = trained
        assert (first["told"][0][3], second["told"][0][3]) == (1, 0)

    def test_keep_equal_learning_rates(self, trained):
        (first, second), _ = trained
        assert first["rates"] == second["rates"]
        lowered_at = first["told"][0][2]
        wanted = [0.1 * 0.999**step * (0.5 if step >= lowered_at else 1) for step in range(len(first["rates"]))]
        assert first["rates"] == pytest.approx(wanted)

    def test_stop_at_the_same_step(self, trained):
        (first, second), _ = trained
        assert len(first["rates"]) == len(second["rates"]) == first["told"][2][2] < acting.MAX_STEPS

    def test_sample_the_same_steps_of_a_burst_though_an_action_before_it_failed_on_one(self, trained):
        (first, second), peer = trained
        begins = first["told"][0][2]
        first_step = (begins // SHARE_EVERY + 2) * SHARE_EVERY
        assert burst_in(steps_of(peer)) == list(range(first_step, first_step + acting.BURST))
        assert first["saved"] == second["saved"] == [["tse", begins]]
        assert first["faults"] == []
        assert len(second["faults"]) == 1
        assert "no space left" in second["faults"][0]

    def test_act_once_for_all_alerts_of_an_incident(self, trained):
        for seen in trained[0]:
            assert [alert_id for alert_id, _ in seen["saved"]] == ["tse"]

    def test_begin_only_with_the_same_actions(self, trained):
        for seen in trained[0]:
            assert "attach(on_alert=) is the same on all ranks of process_group" in seen["error"]
            assert "Stop() from warning on" in seen["error"]

    def test_tell_the_blocks_that_are_frozen(self, trained):
        registered = [json.loads(body) for body in trained[1].bodies if b'"frozen_blocks"' in body]
        assert [body["frozen_blocks"] for body in registered] == [[1]]

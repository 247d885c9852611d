import json
import os
import shutil
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tsemon.errors import SpoolError
from tsemon.transport import HttpDelivery, MemorySpool, Outbox, Spool, find_spools, sync
from tsemon.wire import Frame


@pytest.fixture
def open_outbox(tmp_path, registration):
    """Opens outboxes whose retries are quick, and closes what a test has left open."""
    opened = []

    def of(url=None, spool=None, key="key-1", timeout_s=20, delivery=None, **options):
        spool = spool or Spool.create(tmp_path, registration(key), "rank0")
        delivery = delivery or (HttpDelivery(url, timeout_s) if url else None)
        warnings = []
        options = {"first_retry_s": 0.01, "max_retry_s": 0.05} | options
        outbox = Outbox(spool, delivery, on_warning=warnings.append, **options)
        outbox.warnings = warnings
        opened.append(outbox)
        return outbox

    yield of
    for outbox in opened:
        outbox.close(0.0)
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"tsemon-exporter", "tsemon-sender"}


def alert(alert_id, state):
    known = {"rule": "tse", "family": "tse", "severity": "warning", "summary": "s", "evidence": {}, "advice": {}}
    steps = {"pending_step": 1, "firing_step": 2, "resolved_step": 3}
    return {"alert_id": alert_id, "state": state, **known, **steps}


class TestOutbox:
    def test_delivers_every_sample_and_leaves_nothing(self, peer, tmp_path, open_outbox, sample):
        outbox = open_outbox(peer.url)
        for step in range(20):
            assert outbox.put(sample(step * 10))
        outbox.close(20)
        assert peer.seqs() == list(range(20))
        assert [frame["step"] for _, frame in sorted(peer.frames.items())] == [step * 10 for step in range(20)]
        assert peer.state() == "finished"
        assert find_spools(tmp_path) == []
        stats = outbox.stats()
        assert (stats.num_sent, stats.num_pending, stats.num_dropped, stats.num_refused) == (20, 0, 0, 0)
        assert outbox.warnings == []

    def test_holds_no_file_or_socket_once_closed(self, peer, open_outbox, sample):
        def held():
            process = psutil.Process()
            files = [file.path for file in process.open_files() if "/default/gpt/" in file.path]
            return files + [c for c in process.net_connections() if c.raddr and c.raddr.port == peer.port]

        for url, key in ((peer.url, "a"), (None, "b")):
            outbox = open_outbox(url, key=key)
            outbox.put(sample(0))
            while not outbox._spool.num_unsent and not outbox.stats().num_sent:
                threading.Event().wait(0.001)
            assert held()
            outbox.close(20)
            assert not held()

    def test_registers_the_run_with_its_first_sample(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        assert not outbox.stats().connected
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        assert peer.requests[0] == "POST /api/v1/runs"
        assert outbox.stats().connected

    def test_registers_a_run_that_is_closed_without_a_sample(self, peer, tmp_path, open_outbox):
        outbox = open_outbox(peer.url)
        outbox.close(20)
        assert peer.state() == "finished"
        assert find_spools(tmp_path) == []

    def test_keeps_all_in_the_folder_without_a_server(self, tmp_path, open_outbox, sample):
        outbox = open_outbox()
        for step in range(5):
            outbox.put(sample(step))
        outbox.close(20, "failed")
        (folder,) = find_spools(tmp_path)
        spool = Spool.open(folder)
        assert [json.loads(frame)["seq"] for frame in spool.next_batch().frames] == list(range(5))
        assert spool.end_state == "failed"
        spool.close()

    def test_numbers_frames_without_gaps_though_samples_fail(self, peer, open_outbox, sample):
        def fails(_seq):
            raise RuntimeError("CUDA error: device-side assert triggered")

        outbox = open_outbox(peer.url)
        for make_frame in (sample(0), fails, sample(2), fails, sample(4)):
            outbox.put(make_frame)
        outbox.close(20)
        assert peer.seqs() == [0, 1, 2]
        assert outbox.stats().num_failed_samples == 2
        assert len(outbox.warnings) == 1
        assert "device-side assert" in outbox.warnings[0]

    def test_drops_the_oldest_waiting_samples_and_counts_them(self, peer, open_outbox, sample):
        is_busy, go_on = threading.Event(), threading.Event()

        def slow(seq):
            is_busy.set()
            assert go_on.wait(20)
            return sample(0)(seq)

        outbox = open_outbox(peer.url, max_waiting=3)
        outbox.put(slow)
        assert is_busy.wait(20)
        for step in range(1, 11):
            assert outbox.put(sample(step))
        assert outbox.stats().num_dropped == 7
        go_on.set()
        outbox.close(20)
        assert [frame["step"] for _, frame in sorted(peer.frames.items())] == [0, 8, 9, 10]

    def test_takes_nothing_after_close_and_in_a_forked_child(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        child = os.fork()
        if not child:
            silent = outbox.put(sample(1)) is False and outbox.take_events() == []
            outbox.close()
            os._exit(0 if silent else 1)
        assert os.waitpid(child, 0)[1] == 0
        outbox.close(20)
        assert outbox.put(sample(2)) is False
        assert peer.seqs() == [0]

    def test_contains_a_warning_that_raises(self, peer, open_outbox, sample):
        peer.faults.append((500, {}, {}))
        outbox = open_outbox(peer.url)
        outbox.warnings = None

        def angry(text):
            raise ValueError(text)

        outbox._on_warning = angry
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]


class TestAServiceOnABadDay:
    @pytest.mark.parametrize(
        "faults",
        [
            [(500, {}, {})] * 5,
            [(503, {"error": "store_unavailable", "detail": ""}, {"Retry-After": "0"})],
            [(429, {}, {})],
            [(200, b"<html>", {})],
            [(200, {"accepted": 0, "duplicates": 0, "last_seq": 0, "alerts": []}, {})],
            [(401, {"error": "unauthorized", "detail": "no token"}, {})],
            ["drop", "drop"],
        ],
        ids=["500", "503", "429", "not json", "unconfirmed", "401", "reply lost"],
    )
    def test_gets_every_frame_once_it_is_well(self, peer, open_outbox, sample, faults):
        peer.faults.extend(faults)
        outbox = open_outbox(peer.url)
        for step in range(10):
            outbox.put(sample(step))
        outbox.close(20)
        assert peer.seqs() == list(range(10))
        assert outbox.stats().num_sent == 10
        assert outbox.stats().num_refused == 0

    def test_may_get_a_frame_twice_when_its_reply_was_lost(self, peer, open_outbox, sample):
        peer.faults.append("drop")
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        outbox.close(20)
        assert (peer.seqs(), peer.num_duplicates, outbox.stats().num_sent) == ([0], 1, 1)

    def test_may_be_down_at_first_and_is_said_to_be_once(self, peer, open_outbox, sample):
        port = peer.port
        peer.stop()
        outbox = open_outbox(f"http://127.0.0.1:{port}")
        for step in range(3):
            outbox.put(sample(step))
        while not outbox.stats().last_error:
            threading.Event().wait(0.01)
        assert not outbox.stats().connected
        peer.start(port)
        peer.wait_until(lambda: len(peer.frames) == 3)
        outbox.close(20)
        assert len(outbox.warnings) == 1
        assert "frames are kept" in outbox.warnings[0]

    def test_does_not_keep_samples_from_the_disk_while_it_hangs(self, peer, tmp_path, open_outbox, sample):
        peer.faults.extend(["hang"] * 3)
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        peer.wait_until(lambda: "POST /api/v1/runs/default%2Fgpt/frames" in peer.requests)
        for step in range(1, 6):
            outbox.put(sample(step))
        outbox.close(0.2)
        (folder,) = find_spools(tmp_path)
        spool = Spool.open(folder)
        assert spool.num_unsent == 6
        spool.close()
        peer.released.set()
        peer.faults.clear()
        assert [synced.num_sent for synced in sync(tmp_path, peer.url)] == [6]
        assert peer.state() == "finished"

    def test_that_is_never_there_leaves_all_in_the_spool(self, peer, tmp_path, open_outbox, sample):
        peer.stop()
        outbox = open_outbox(peer.url)
        for step in range(3):
            outbox.put(sample(step))
        outbox.close(0.1)
        assert outbox.stats().num_pending == 3
        peer.start(peer.port)
        (synced,) = sync(tmp_path, peer.url)
        assert (synced.num_sent, synced.num_remaining, synced.error) == (3, 0, None)
        assert (peer.seqs(), peer.state()) == ([0, 1, 2], "finished")

    def test_that_lost_its_database_gets_the_run_again(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        with peer.changed:
            peer.runs.clear()
            peer.frames.clear()
        outbox.put(sample(1))
        outbox.close(20)
        assert peer.seqs() == [1]
        assert [text for text in outbox.warnings if "its earlier frames are gone" in text]


class TestHeartbeats:
    def test_tell_the_step_while_there_is_no_frame(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        for step in (1, 700):
            outbox.step = step
            peer.wait_until(lambda step=step: ("rank0", 1, step) in peer.beats)
        num_beats = len(peer.beats)
        # Stuck: the same step again and again.
        peer.wait_until(lambda: peer.beats[num_beats:].count(("rank0", 1, 700)) >= 3)
        outbox.close(20)
        assert outbox.warnings == []

    def test_are_not_sent_while_frames_are(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=1000)
        for step in range(3):
            outbox.put(sample(step))
            peer.wait_until(lambda step=step: len(peer.frames) == step + 1)
            outbox._has_work.set()
            while outbox._has_work.is_set():  # until it is done with that frame
                threading.Event().wait(0.001)
        outbox.close(20)
        assert peer.beats == []

    def test_make_a_run_known_whose_first_step_takes_long(self, peer, open_outbox):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        peer.wait_until(lambda: ("rank0", 1, 0) in peer.beats)
        assert outbox.stats().connected

    def test_hide_nothing_before_the_first_step(self, peer, open_outbox, registration, sample):
        first = open_outbox(peer.url)
        first.put(sample(0))
        first.close(20)
        num_requests = len(peer.requests)
        outbox = open_outbox(peer.url, key="key-2", heartbeat_s=0.02)
        peer.wait_until(lambda: len(peer.requests) >= num_requests + 3)
        assert set(peer.requests[num_requests:]) == {LOOK}
        assert peer.runs["default/gpt"]["attempts"] == ["key-1"]
        outbox.step = 1  # its first step is done, whether or not that could be measured
        peer.wait_until(lambda: ("rank0", 2, 1) in peer.beats)

    def test_bring_alerts(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        peer.alerts = [alert("a", "firing")]
        while not (events := outbox.take_events()):
            threading.Event().wait(0.001)
        assert [(event.alert_id, event.state) for event in events] == [("a", "firing")]

    def test_tell_a_service_that_lost_its_database_of_the_run(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        with peer.changed:
            peer.runs.clear()
            peer.beats.clear()
        peer.wait_until(lambda: ("rank0", 1, 0) in peer.beats)
        assert [text for text in outbox.warnings if "its earlier frames are gone" in text]

    def test_that_are_refused_hold_up_no_frame(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        peer.faults_of_beats.extend([(422, {"error": "invalid_argument", "detail": "step"}, {})] * 1000)
        while not outbox.warnings:
            threading.Event().wait(0.001)
        outbox.put(sample(1))
        peer.wait_until(lambda: peer.seqs() == [0, 1])
        assert "a heartbeat was refused" in outbox.warnings[0]


FRAMES = "POST /api/v1/runs/default%2Fgpt/frames"
BEAT = "POST /api/v1/runs/default%2Fgpt/heartbeat"
RULES = "GET /api/v1/runs/default%2Fgpt/rules"
LOOK = "GET /api/v1/runs?project=default&run=gpt"
BUSY = (503, {"error": "store_unavailable", "detail": ""}, {})


class TestTheRulesThatWait:
    @pytest.mark.parametrize(
        ("status", "reply", "why"),
        [
            (
                403,
                {"error": "forbidden", "detail": "the token may not read"},
                "403 (forbidden: the token may not read)",
            ),
            (404, {"error": "not_found", "detail": "no such route"}, "404 (not_found: no such route)"),
            (200, {"rules": [{"name": "of another kind"}]}, "'rule'"),
        ],
    )
    def test_hold_up_no_frame_where_the_server_does_not_say(self, peer, open_outbox, sample, status, reply, why):
        outbox = open_outbox(peer.url)
        peer.faults_of_rules.append((status, reply, {}))
        outbox.ask_for_rules()
        outbox.put(sample(0))
        peer.wait_until(lambda: RULES in peer.requests)
        outbox.ask_for_rules()
        outbox.put(sample(1))
        peer.wait_until(lambda: peer.seqs() == [0, 1])
        assert outbox.waiting_rules.problem.startswith("the server does not say: ")
        assert outbox.waiting_rules.problem.endswith(why)
        assert peer.requests.count(RULES) == 1, "asked again within ten seconds"
        assert not outbox.warnings

    def test_are_not_known_after_the_end(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        outbox.close()
        outbox.ask_for_rules()
        assert outbox.waiting_rules.problem == "the server was not asked for them in time"
        assert RULES not in peer.requests


class TestAServiceThatIsDownForLong:
    def test_gets_no_batch_until_a_small_request_was_answered(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=1000)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        with peer.changed:
            peer.requests.clear()
            peer.faults.extend([BUSY] * 5)
            peer.faults_of_beats.extend([BUSY] * 1000)
        outbox.put(sample(1))
        peer.wait_until(lambda: len(peer.requests) == 5 + 4)
        assert outbox.stats().num_failures >= 8
        assert not outbox.stats().connected
        with peer.changed:
            peer.faults_of_beats.clear()
        peer.wait_until(lambda: peer.seqs() == [0, 1])
        num_beats = peer.requests.count(BEAT)
        assert peer.requests == [FRAMES] * 5 + [BEAT] * num_beats + [FRAMES]
        while outbox.stats().num_failures:
            threading.Event().wait(0.001)
        assert outbox.stats().connected
        outbox.put(sample(2))
        peer.wait_until(lambda: peer.seqs() == [0, 1, 2])
        assert peer.requests[-1] == FRAMES
        assert peer.requests.count(BEAT) == num_beats

    def test_does_not_get_what_an_earlier_attempt_left_either(self, peer, tmp_path, open_outbox, registration, sample):
        left = Spool.create(tmp_path, registration("old"), "rank0")
        left.append(sample(0)(0).to_json())
        left.close()
        peer.faults.extend([BUSY] * 5)
        peer.faults_of_reads.extend([BUSY] * 3)
        open_outbox(peer.url, key="new", heartbeat_s=1000)
        peer.wait_until(lambda: peer.seqs() == [0])
        asked = [request for request in peer.requests if request in (FRAMES, LOOK)]
        assert asked[:10] == [FRAMES] * 5 + [LOOK] * 4 + [FRAMES]

    def test_is_left_alone_for_as_long_as_it_asks(self, peer, open_outbox, sample, monkeypatch):
        outbox = open_outbox(peer.url, heartbeat_s=1000, max_retry_s=1.0)
        pauses = []
        monkeypatch.setattr(outbox._closing, "wait", pauses.append)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        with peer.changed:
            peer.faults.extend([BUSY] * 5)
            peer.faults_of_beats.append((503, {}, {"Retry-After": "7"}))
        outbox.put(sample(1))
        peer.wait_until(lambda: peer.seqs() == [0, 1])
        assert pauses[5:] == [7.0]
        assert max(pauses[:5]) <= 1.0


class TestResuming:
    def test_registers_at_once_from_where_it_goes_on(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        outbox.resume_at(700)
        peer.wait_until(lambda: peer.runs.get("default/gpt", {}).get("resumed") == [700])
        outbox.put(sample(700))
        outbox.close(20)
        assert peer.runs["default/gpt"]["resumed"] == [700]
        assert peer.seqs() == [0]

    def test_is_another_attempt_where_the_run_is_registered_already(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url, heartbeat_s=0.02)
        peer.wait_until(lambda: peer.beats)
        outbox.resume_at(700)
        peer.wait_until(lambda: ("rank0", 2, 700) in peer.beats)
        outbox.put(sample(700))
        outbox.close(20)
        assert peer.runs["default/gpt"]["resumed"] == [None, 700]
        assert [(attempt, frame["step"]) for (_, attempt, _, _), frame in peer.frames.items()] == [(2, 700)]

    def test_is_kept_for_who_sends_the_spool(self, peer, tmp_path, open_outbox, sample):
        outbox = open_outbox()
        outbox.resume_at(700)
        outbox.put(sample(700))
        outbox.close(20)
        sync(tmp_path, peer.url)
        assert peer.runs["default/gpt"]["resumed"] == [700]

    def test_goes_through_memory_where_there_is_no_folder(self, peer, open_outbox, registration, sample):
        outbox = open_outbox(peer.url, spool=MemorySpool(registration(), "rank0"))
        outbox.resume_at(700)
        outbox.put(sample(700))
        outbox.close(20)
        assert peer.runs["default/gpt"]["resumed"] == [700]
        assert peer.seqs() == [0]

    def test_is_never_preceded_by_what_would_hide_the_run(self, peer, open_outbox, sample):
        first = open_outbox(peer.url)
        first.put(sample(0))
        first.close(20)
        second = open_outbox(peer.url, key="key-2")  # fails before it has loaded its checkpoint
        second.close(20, "failed")
        assert peer.runs["default/gpt"]["attempts"] == ["key-1"]
        assert second.stats().spool_folder.exists() is False


class LastTries(HttpDelivery):
    """Counts the requests that are tried once the outbox closes, and calls `before_try` with the count."""

    outbox = None
    num = 0

    def before_try(self, num):
        pass

    def _request(self, *arguments):
        if self.outbox is not None and self.outbox._closing.is_set():
            self.num += 1
            self.before_try(self.num)
        return super()._request(*arguments)


class TestClosing:
    def open(self, open_outbox, url, **options):
        delivery = LastTries(url, 20)
        delivery.outbox = open_outbox(delivery=delivery, **options)
        return delivery.outbox, delivery

    def test_leaves_all_to_the_next_time_where_nobody_listens(self, peer, tmp_path, open_outbox, sample):
        peer.stop()
        outbox, delivery = self.open(open_outbox, peer.url)
        outbox.put(sample(0))
        outbox.close(20)
        assert delivery.num in (3, 4), "3, and one that was under way"
        assert outbox.stats().num_pending == 1
        (folder,) = find_spools(tmp_path)
        assert (folder / "end.json").exists()

    def test_says_what_is_left_where_and_how_to_send_it(self, peer, tmp_path, open_outbox, sample):
        peer.stop()
        outbox = open_outbox(peer.url)
        for step in range(3):
            outbox.put(sample(step))
        outbox.close(0.1)
        (folder,) = find_spools(tmp_path)
        assert outbox.warnings[-1] == (
            f"3 frames and the end of the run were not delivered and wait in {folder}; "
            f"`tsemon sync {tmp_path} --server URL` sends them"
        )

    def test_says_that_the_end_alone_is_left(self, peer, tmp_path, open_outbox):
        peer.stop()
        outbox = open_outbox(peer.url)
        outbox.close(0.1)
        (folder,) = find_spools(tmp_path)
        assert outbox.warnings[-1] == (
            f"the end of the run was not delivered and waits in {folder}; `tsemon sync {tmp_path} --server URL` sends it"
        )

    def test_goes_on_where_frames_would_be_lost(self, peer, open_outbox, registration, sample):
        peer.stop()
        outbox, delivery = self.open(open_outbox, peer.url, spool=MemorySpool(registration(), "rank0"))
        delivery.before_try = lambda num: peer.start(peer.port) if num == 8 else None
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]
        assert outbox.warnings[1:] == []

    def test_goes_on_where_someone_answers(self, peer, open_outbox, sample):
        peer.faults_of_register.extend([(503, {"error": "store_unavailable", "detail": ""}, {})] * 1000)
        outbox, delivery = self.open(open_outbox, peer.url)
        delivery.before_try = lambda num: peer.faults_of_register.clear() if num == 8 else None
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]
        assert peer.state() == "finished"


class TestARefusedFrame:
    def test_is_set_aside_and_holds_up_no_other(self, peer, tmp_path, open_outbox, sample):
        port = peer.port
        peer.stop()
        peer.is_refused = lambda frame: frame["step"] in (3, 7)
        outbox = open_outbox(f"http://127.0.0.1:{port}")
        for step in range(10):
            outbox.put(sample(step))
        peer.start(port)
        outbox.close(20)
        assert peer.seqs() == [0, 1, 2, 4, 5, 6, 8, 9]
        assert (outbox.stats().num_refused, outbox.stats().num_sent) == (2, 8)
        (refused,) = tmp_path.rglob("refused.jsonl")
        lines = [json.loads(line) for line in refused.read_text().splitlines()]
        assert [json.loads(line["frame"])["step"] for line in lines] == [3, 7]
        assert "invalid_frame: a frame of this kind is not taken" in lines[0]["reason"]
        assert [text for text in outbox.warnings if "refused.jsonl" in text]
        assert peer.state() == "finished"
        assert find_spools(tmp_path) == []

    def test_is_sent_once_more_because_it_may_have_been_altered_on_its_way(self, peer, open_outbox, sample):
        peer.faults.append((422, {"error": "invalid_frame", "detail": "crc must be 1, got 2"}, {}))
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]
        assert (outbox.stats().num_sent, outbox.stats().num_refused) == (1, 0)

    def test_is_not_a_body_that_was_too_large(self, peer, open_outbox, sample):
        port = peer.port
        peer.stop()
        outbox = open_outbox(f"http://127.0.0.1:{port}")
        for step in range(16):
            outbox.put(sample(step))
        while outbox._spool.num_unsent < 16:  # a frame that goes alone cannot be halved
            threading.Event().wait(0.001)
        peer.faults.extend([(413, {"error": "body_too_large", "detail": "1 MiB"}, {})] * 2)
        peer.start(port)
        outbox.close(20)
        assert peer.seqs() == list(range(16))
        assert outbox.stats().num_refused == 0


class TestAFolderThatFails:
    def test_lets_frames_go_through_memory(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        peer.wait_until(lambda: peer.seqs() == [0])
        folder = outbox.stats().spool_folder
        shutil.rmtree(folder)
        folder.write_text("in the way")
        for step in (1, 2):
            outbox.put(sample(step))
        peer.wait_until(lambda: peer.seqs() == [0, 1, 2])
        assert outbox.stats().spool_folder is None
        outbox.close(20)
        assert peer.state() == "finished"
        assert [text for text in outbox.warnings if "frames wait in memory" in text]

    def test_is_made_again_when_it_was_deleted(self, tmp_path, open_outbox, sample):
        outbox = open_outbox()
        for step in range(5):
            outbox.put(sample(step))
        while outbox.stats().spool_folder is None or outbox._spool.num_unsent < 5:
            threading.Event().wait(0.001)
        shutil.rmtree(outbox.stats().spool_folder)
        for step in range(5, 10):
            outbox.put(sample(step))
        outbox.close(20)
        assert (outbox.stats().num_pending, outbox.stats().num_dropped) == (5, 5)
        assert [text for text in outbox.warnings if "was deleted: unsent frames are lost" in text]
        (folder,) = find_spools(tmp_path)
        again = Spool.open(folder)
        assert [json.loads(frame)["seq"] for frame in again.next_batch().frames] == [5, 6, 7, 8, 9]
        again.close()

    def test_is_used_again_when_it_has_recovered(self, open_outbox, registration, tmp_path, sample):
        spool = Spool.create(tmp_path, registration(), "rank0")
        outbox = open_outbox(spool=spool)
        obstacle = spool.folder / "00000001.seg"
        obstacle.mkdir()  # no segment of this name can be made
        outbox.put(sample(0))
        while outbox.stats().spool_folder is not None:
            threading.Event().wait(0.01)
        obstacle.rmdir()
        outbox.put(sample(1))
        outbox.close(20)
        again = Spool.open(spool.folder)
        assert [json.loads(frame)["seq"] for frame in again.next_batch().frames] == [0, 1]
        again.close()

    def test_can_be_done_without_from_the_start(self, peer, open_outbox, registration, sample):
        outbox = open_outbox(peer.url, spool=MemorySpool(registration(), "rank0"))
        for step in range(5):
            outbox.put(sample(step))
        outbox.close(20)
        assert peer.seqs() == list(range(5))
        assert outbox.warnings == []

    def test_says_what_is_lost_with_the_memory(self, peer, open_outbox, registration, sample):
        peer.stop()
        outbox = open_outbox(peer.url, spool=MemorySpool(registration(), "rank0"))
        outbox.put(sample(0))
        outbox.close(0.1)
        assert "1 frames were in memory alone, could not be delivered, and are lost" in outbox.warnings


class TestAClockThatIsSetBack:
    def test_loses_and_reorders_nothing(self, peer, open_outbox, monkeypatch):
        now = [5000.0]
        monkeypatch.setattr(time, "time", lambda: now[0])
        outbox = open_outbox(peer.url)
        peer.faults.append(BUSY)
        for step in range(6):
            now[0] = 5000.0 + step - 4000 * (step >= 3)
            outbox.put(lambda seq, step=step, at=now[0]: Frame(seq=seq, step=step, time=at))
        outbox.close(20)
        frames = [frame for _, frame in sorted(peer.frames.items())]
        assert [(frame["step"], frame["time"]) for frame in frames] == [
            (step, at) for step, at in enumerate([5000.0, 5001.0, 5002.0, 1003.0, 1004.0, 1005.0])
        ]


class TestMemorySpool:
    def test_drops_the_oldest_frames_beyond_either_bound(self, registration):
        spool = MemorySpool(registration(), "rank0", max_frames=3, max_bytes=100)
        for frame in "abcd":
            spool.append(frame)
        assert (spool.next_batch().frames, spool.num_dropped) == (("b", "c", "d"), 1)
        spool.append("e" * 99)
        assert (spool.next_batch().frames, spool.num_dropped) == (("d", "e" * 99), 3)

    def test_is_not_confused_by_word_about_frames_it_dropped(self, registration):
        spool = MemorySpool(registration(), "rank0", max_frames=2)
        spool.append("a")
        position = spool.next_batch().ends[0]
        for frame in "bc":
            spool.append(frame)
        spool.acknowledge(position)
        assert spool.next_batch().frames == ("b", "c")


class TestAlerts:
    def tell(self, peer, outbox, sample, *alerts):
        """The outbox has read a reply with these alerts."""
        num_sent = outbox.stats().num_sent
        peer.alerts = list(alerts)
        outbox.put(sample(0))
        while outbox.stats().num_sent == num_sent or [a.alert_id for a in outbox.alerts()] != [
            a["alert_id"] for a in alerts
        ]:
            threading.Event().wait(0.001)
        # Events come before the list of the same reply.
        return [(event.alert_id, event.state) for event in outbox.take_events()]

    def test_become_events_once_when_they_fire_and_once_when_they_are_resolved(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        assert self.tell(peer, outbox, sample, alert("a", "pending")) == []
        assert self.tell(peer, outbox, sample, alert("a", "firing"), alert("b", "pending")) == [("a", "firing")]
        assert self.tell(peer, outbox, sample, alert("a", "firing")) == []
        assert self.tell(peer, outbox, sample, alert("a", "resolved"), alert("c", "firing")) == [
            ("a", "resolved"),
            ("c", "firing"),
        ]
        assert self.tell(peer, outbox, sample) == [("c", "resolved")]
        assert outbox.alerts() == ()

    def test_fire_on_while_somebody_has_seen_to_them(self, peer, open_outbox, sample):
        outbox = open_outbox(peer.url)
        assert self.tell(peer, outbox, sample, alert("a", "firing"), alert("b", "pending")) == [("a", "firing")]
        assert self.tell(peer, outbox, sample, alert("a", "acknowledged"), alert("b", "acknowledged")) == [
            ("b", "acknowledged")
        ]
        assert self.tell(peer, outbox, sample, alert("a", "firing"), alert("b", "acknowledged")) == []
        assert [alert.is_active for alert in outbox.alerts()] == [True, True]
        assert self.tell(peer, outbox, sample, alert("b", "resolved")) == [("b", "resolved"), ("a", "resolved")]

    def test_that_cannot_be_read_do_not_hold_up_frames(self, peer, open_outbox, sample):
        peer.alerts = [{"alert_id": "a"}]
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]
        assert [text for text in outbox.warnings if "alerts cannot be read" in text]


def incident(incident_id, state="open", **more):
    cause = {"family": "tse", "rule": "onset", "severity": "critical", "summary": "tokens grow alike", "advice": {}}
    place = {"step": 20, "left_step": 10, "blocks": [3, 5], "is_settled": False}
    return {"incident_id": incident_id, "state": state, **cause, **place, **more}


class TestIncidents:
    def told(self, peer, open_outbox, sample, incidents, alerts=()):
        """What an outbox knows after a reply with these, and its warnings."""
        peer.incidents, peer.alerts = incidents, list(alerts)
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        while outbox.stats().num_sent == 0:
            threading.Event().wait(0.001)
        outbox.close(20)
        return outbox

    def test_are_those_that_are_open_in_the_last_reply_and_end_with_the_run(self, peer, open_outbox, sample):
        peer.incidents = [incident("2", something_new=1), incident("1", "recovered")]
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        while not outbox.incidents():
            threading.Event().wait(0.001)
        (known,) = outbox.incidents()
        assert (known.incident_id, known.rule, known.blocks, known.is_settled) == ("2", "onset", [3, 5], False)
        outbox.close(20)
        *others, last = [(one.incident_id, one.state, one.is_settled) for one in outbox.take_events()]
        assert others == [("2", "open", False), ("1", "recovered", False)]
        assert last == ("2", "ended", True)
        assert outbox.incidents() == []

    def test_are_none_with_a_server_that_has_none(self, peer, open_outbox, sample):
        outbox = self.told(peer, open_outbox, sample, None, [alert("a", "firing")])
        assert (outbox.incidents(), outbox.warnings) == ([], [])
        assert [(one.alert_id, one.incident_id) for one in outbox.alerts()] == [("a", None)]

    def test_of_a_run_that_was_deleted_are_gone_without_an_end(self, peer, open_outbox, sample):
        peer.incidents, peer.alerts = [incident("1")], [alert("a", "firing")]
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        while not (events := outbox.take_events()):
            threading.Event().wait(0.001)
        with peer.changed:
            peer.runs.clear()
            peer.incidents, peer.alerts = [], []
        outbox.put(sample(1))
        outbox.close(20)
        events += outbox.take_events()
        assert [event.state for event in events] == ["firing", "open"]
        assert (outbox.incidents(), outbox.alerts()) == ([], ())

    def test_that_cannot_be_read_hold_up_neither_frames_nor_alerts(self, peer, open_outbox, sample):
        outbox = self.told(peer, open_outbox, sample, [{"incident_id": "1"}], [alert("a", "firing")])
        assert [one.alert_id for one in outbox.alerts()] == ["a"]
        assert [text for text in outbox.warnings if "incidents cannot be read" in text]

    def test_that_cannot_be_compared_do_not_hide_the_alerts_of_the_reply(self, peer, open_outbox, sample):
        peer.incidents, peer.alerts = [incident(["1"])], [alert("a", "firing")]
        outbox = open_outbox(peer.url)
        outbox.put(sample(0))
        while outbox.stats().last_error is None:
            threading.Event().wait(0.001)
        assert outbox.has_news
        assert [event.alert_id for event in outbox.take_events()] == ["a"]


class TestLeftovers:
    def leave(self, tmp_path, registration, sample, key, num_frames, state=None, writer="rank0", **more):
        spool = Spool.create(tmp_path, registration(key, **more), writer)
        for seq in range(num_frames):
            spool.append(sample(seq)(seq).to_json())
        if state:
            spool.finish(state)
        spool.close()
        return spool.folder

    def test_of_the_same_run_are_delivered_as_the_earlier_attempt(
        self, peer, tmp_path, open_outbox, registration, sample
    ):
        self.leave(tmp_path, registration, sample, "old", 3)
        other = self.leave(tmp_path, registration, sample, "other", 1, run="another")
        outbox = open_outbox(peer.url, key="new")
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.runs["default/gpt"]["attempts"] == ["old", "new"]
        assert sorted((attempt, seq) for _, attempt, _, seq in peer.frames) == [(1, 0), (1, 1), (1, 2), (2, 0)]
        assert peer.state() == "finished"
        assert find_spools(tmp_path) == [other]

    def test_that_are_damaged_do_not_stop_the_new_run(self, peer, tmp_path, open_outbox, registration, sample):
        folder = self.leave(tmp_path, registration, sample, "old", 3)
        (folder / "run.json").write_text("{")
        outbox = open_outbox(peer.url, key="new")
        outbox.put(sample(0))
        outbox.close(20)
        assert peer.seqs() == [0]
        assert [text for text in outbox.warnings if "is damaged" in text]

    def test_that_are_damaged_are_each_told(self, peer, tmp_path, open_outbox, registration, sample):
        folders = [self.leave(tmp_path, registration, sample, key, 3) for key in "ab"]
        for folder in folders:
            (segment,) = folder.glob("*.seg")
            segment.write_bytes(segment.read_bytes()[:-1])
        peer.faults.append(BUSY)
        outbox = open_outbox(peer.url, key="new")
        outbox.put(sample(0))
        outbox.close(20)
        assert len(peer.frames) == 2 + 2 + 1
        for folder in folders:
            assert [text for text in outbox.warnings if text.startswith(f"{folder} had 1 damaged segments: what stood")]

    def test_that_are_damaged_are_told_by_sync(self, peer, tmp_path, registration, sample):
        (segment,) = self.leave(tmp_path, registration, sample, "a", 3).glob("*.seg")
        segment.write_bytes(segment.read_bytes()[:-1])
        (synced,) = sync(tmp_path, peer.url)
        assert str(synced) == ("default/gpt: 2 frames sent, 1 damaged segments, what stood behind the damage is lost")

    def test_without_a_frame_hide_nothing(self, peer, tmp_path, registration, sample):
        self.leave(tmp_path, registration, sample, "a", 1)
        sync(tmp_path, peer.url)
        self.leave(tmp_path, registration, sample, "b", 0)
        sync(tmp_path, peer.url)
        assert peer.runs["default/gpt"]["attempts"] == ["a"]
        assert find_spools(tmp_path) == []

    def test_are_synced_oldest_first_with_the_state_they_ended_in(self, peer, tmp_path, registration, sample):
        folders = [
            self.leave(tmp_path, registration, sample, "b", 2, "finished", run="one"),
            self.leave(tmp_path, registration, sample, "a", 300, run="two"),
        ]
        done = sync(tmp_path, peer.url)
        assert [(synced.folder, synced.num_sent, synced.num_remaining) for synced in done] == [
            (folders[0], 2, 0),
            (folders[1], 300, 0),
        ]
        assert (peer.state("default/one"), peer.state("default/two")) == ("finished", "failed")
        assert find_spools(tmp_path) == []

    def test_do_not_end_a_run_that_a_newer_attempt_has_taken_over(self, peer, tmp_path, registration, sample):
        peer.register(registration("old"))
        peer.register(registration("newer"))
        self.leave(tmp_path, registration, sample, "old", 1)
        sync(tmp_path, peer.url)
        assert (peer.seqs(), peer.state()) == ([0], "running")

    def test_are_left_alone_while_their_writer_lives(self, peer, tmp_path, open_outbox, sample):
        outbox = open_outbox()
        outbox.put(sample(0))
        assert sync(tmp_path, peer.url) == []
        assert peer.requests == []

    def test_stay_when_nobody_answers(self, peer, tmp_path, registration, sample):
        peer.stop()
        for key in "ab":
            self.leave(tmp_path, registration, sample, key, 2)
        done = sync(tmp_path, peer.url)
        assert [(synced.num_sent, synced.num_remaining) for synced in done] == [(0, 2), (0, 2)]
        assert all("does not answer" in str(synced.error) for synced in done)
        assert len(find_spools(tmp_path)) == 2

    def test_are_told_in_a_readable_line_each(self, peer, tmp_path, registration, sample):
        self.leave(tmp_path, registration, sample, "a", 2)
        assert [str(synced) for synced in sync(tmp_path, peer.url)] == ["default/gpt: 2 frames sent"]
        self.leave(tmp_path, registration, sample, "b", 2)
        peer.stop()
        (synced,) = sync(tmp_path, peer.url)
        assert str(synced) == f"default/gpt: 0 frames sent, 2 remain: {synced.error}"

    def test_are_not_looked_for_where_there_is_no_folder(self, peer, tmp_path):
        with pytest.raises(SpoolError, match="is not there"):
            sync(tmp_path / "nowhere", peer.url)

    def test_of_two_processes_under_one_run_name_do_not_mix(self, peer, tmp_path, registration):
        code = (
            "import json, os, sys\n"
            "from tsemon.transport.spool import Spool\n"
            "from tsemon.wire import Frame\n"
            "spool = Spool.create(sys.argv[1], json.loads(sys.argv[2]), 'rank0')\n"
            "for i in range(50): spool.append(Frame(seq=i, step=i, time=1.0).to_json())\n"
            "os._exit(9)\n"
        )
        trainers = [
            subprocess.Popen([sys.executable, "-c", code, tmp_path, json.dumps(registration(key))]) for key in "ab"
        ]
        assert [trainer.wait() for trainer in trainers] == [9, 9]
        assert [synced.num_sent for synced in sync(tmp_path, peer.url)] == [50, 50]
        assert len(peer.frames) == 100


class TestATrainerThatDoesNotClose:
    @pytest.mark.parametrize("end", ["pass", "os._exit(0)", "raise SystemExit(0)"])
    def test_ends_at_once_and_loses_nothing_spooled(self, peer, tmp_path, registration, end):
        peer.faults.extend(["hang"] * 5)
        code = (
            "import json, os, sys, time\n"
            "from tsemon.transport import HttpDelivery, Outbox, Spool\n"
            "from tsemon.wire import Frame\n"
            "spool = Spool.create(sys.argv[1], json.loads(sys.argv[2]), 'rank0')\n"
            "outbox = Outbox(spool, HttpDelivery(sys.argv[3], 60), on_warning=print)\n"
            "for i in range(20): outbox.put(lambda seq: Frame(seq=seq, step=seq, time=1.0))\n"
            "while spool.num_unsent < 20: time.sleep(0.001)\n"
            f"{end}\n"
        )
        command = [sys.executable, "-c", code, tmp_path, json.dumps(registration()), peer.url]
        assert subprocess.run(command, timeout=30, check=False).returncode == 0
        peer.released.set()
        with peer.changed:
            peer.faults.clear()
        (synced,) = sync(tmp_path, peer.url)
        assert synced.num_remaining == 0
        assert (peer.seqs(), peer.state()) == (list(range(20)), "failed")

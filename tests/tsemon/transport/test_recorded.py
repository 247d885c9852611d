import json
from contextlib import suppress

import pytest

from tsemon.errors import InvalidArgument, ServerUnreachable
from tsemon.transport import Spool, SpoolReader, attempt_key, find_spools, run_writer, sync
from tsemon.wire import Frame


@pytest.fixture
def known_run(registration):
    return registration(key=attempt_key("scan", "/ckpt"), run="known", tags=["scan"])


def frames(*steps):
    return [Frame(seq=step, step=step, time=1732100000.0 + step, scalars={"total_param_norm": 1.5}) for step in steps]


def check(there):
    if "scan" not in (there.get("tags") or ()):
        raise InvalidArgument("no scan")


def write(registration, *steps, end=True, **place):
    with run_writer(registration, check=check, **place) as writer:
        for frame in frames(*steps):
            writer.put("scan", frame)
        writer.finish() if end else writer.flush()
        return writer.num_new


def interrupt(registration, *steps, **place):
    """Ctrl-C, when the frames have been sent."""
    with suppress(KeyboardInterrupt), run_writer(registration, check=check, **place) as writer:
        for frame in frames(*steps):
            writer.put("scan", frame)
        writer.flush()
        raise KeyboardInterrupt


def steps_in(spool):
    return [json.loads(text)["step"] for batch in SpoolReader(spool).new_frames() for text in batch]


class TestAttemptKey:
    def test_follows_from_what_it_is_given(self):
        assert attempt_key("scan", {"a": 1, "b": [2]}) == attempt_key("scan", {"b": [2], "a": 1})
        assert attempt_key("scan", "x") != attempt_key("scan", "y")

    def test_fits_the_service(self):
        assert len(attempt_key("x" * 10_000)) == 32


class TestRunWriter:
    def test_delivers_to_a_service_and_ends_the_run(self, peer, known_run):
        assert write(known_run, 0, 100, 200, server=peer.url) == 3
        assert peer.seqs("default/known") == [0, 100, 200]
        assert peer.state("default/known") == "finished"

    def test_writes_nothing_twice_to_a_service(self, peer, known_run):
        write(known_run, 0, 100, server=peer.url)
        assert write(known_run, 0, 100, 200, server=peer.url) == 1
        assert peer.seqs("default/known") == [0, 100, 200]
        assert len(peer.runs["default/known"]["attempts"]) == 1

    def test_is_seen_again_after_another_attempt_of_the_same_run(self, peer, known_run):
        other = known_run | {"attempt_key": "other"}
        for registration in (known_run, other, known_run, known_run, other, known_run):
            write(registration, 0, 100, server=peer.url)
        key = known_run["attempt_key"]
        assert peer.runs["default/known"]["attempts"] == [key, "other", f"{key}.1", "other.1", f"{key}.2"]
        assert {attempt for _, attempt, _, _ in peer.frames} == {1, 2, 3, 4, 5}

    def test_leaves_the_attempt_hidden_that_its_followers_hide(self, peer, known_run):
        for _ in range(2):
            with run_writer(known_run, check=check, server=peer.url, followers=1) as first:
                first.finish()
            with run_writer(known_run | {"attempt_key": "2nd"}, check=check, server=peer.url) as second:
                second.finish()
            assert (first.attempt, second.attempt, first.edition) == (1, 2, 0)

    def test_says_that_the_run_failed_when_it_is_given_up(self, peer, known_run):
        interrupt(known_run, 0, server=peer.url)
        assert peer.state("default/known") == "failed"
        write(known_run, 0, 1, server=peer.url)
        assert peer.state("default/known") == "finished"

    def test_leaves_a_run_as_it_ended_when_nothing_new_came(self, peer, known_run):
        write(known_run, 0, server=peer.url)
        interrupt(known_run, server=peer.url)
        assert peer.state("default/known") == "finished"

    def test_goes_on_with_a_run_that_has_ended(self, peer, known_run):
        write(known_run, 0, server=peer.url)
        with run_writer(known_run, check=check, server=peer.url) as writer:
            writer.put("scan", frames(1)[0])
            writer.flush()
            assert peer.state("default/known") == "running"
            writer.finish()
            assert peer.state("default/known") == "finished"
            writer.put("scan", frames(2)[0])
            writer.flush()
            assert peer.state("default/known") == "running"

    def test_lets_a_run_rest_while_all_is_known(self, peer, known_run):
        write(known_run, *range(600), server=peer.url)
        peer.bodies.clear()
        assert write(known_run, *range(600), server=peer.url) == 0
        assert b'{"state": "running"}' not in peer.bodies
        assert write(known_run, *range(601), server=peer.url) == 1
        assert peer.bodies.count(b'{"state": "running"}') == 1

    def test_delivers_more_than_fits_into_a_batch(self, peer, known_run):
        assert write(known_run, *range(600), server=peer.url) == 600
        assert peer.seqs("default/known") == [*range(600)]

    def test_loses_nothing_to_a_service_that_is_away_for_a_while(self, peer, known_run):
        peer.faults.append((503, {"error": "busy", "detail": "later"}, {}))
        with pytest.raises(ServerUnreachable, match="later"):
            write(known_run, 0, 100, server=peer.url)
        assert write(known_run, 0, 100, server=peer.url) == 2

    def test_does_not_hide_the_frames_of_a_training(self, peer, registration, known_run):
        with run_writer(registration(run="known", tags=["x"]), check=check, server=peer.url) as training:
            training.put("w", frames(0)[0])
            training.flush()
        with pytest.raises(InvalidArgument, match="no scan"):
            run_writer(known_run, check=check, server=peer.url)
        assert len(peer.runs["default/known"]["attempts"]) == 1

    def test_writes_a_spool_folder_that_sync_delivers(self, peer, tmp_path, known_run):
        assert write(known_run, 0, 100, spool=tmp_path) == 2
        [synced] = sync(tmp_path, peer.url)
        assert synced.error is None
        assert peer.seqs("default/known") == [0, 100]
        assert peer.state("default/known") == "finished"

    def test_writes_nothing_twice_to_a_spool_folder(self, tmp_path, known_run):
        write(known_run, 0, 100, spool=tmp_path)
        assert write(known_run, 0, 100, 200, spool=tmp_path) == 1
        [spool] = find_spools(tmp_path)
        assert steps_in(spool) == [0, 100, 200]

    def test_is_seen_again_after_another_attempt_in_a_spool_folder(self, peer, tmp_path, known_run):
        other = known_run | {"attempt_key": "other"}
        for registration in (known_run, other, known_run, known_run):
            write(registration, 0, 100, spool=tmp_path)
        sync(tmp_path, peer.url)
        key = known_run["attempt_key"]
        assert peer.runs["default/known"]["attempts"] == [key, "other", f"{key}.1"]

    def test_says_in_a_spool_that_the_run_failed_when_it_is_given_up(self, tmp_path, known_run):
        interrupt(known_run, 0, spool=tmp_path)
        assert SpoolReader(find_spools(tmp_path)[0]).end_state() == "failed"

    def test_leaves_a_spool_as_it_ended_when_it_is_given_up_after_that(self, tmp_path, known_run):
        with suppress(KeyboardInterrupt), run_writer(known_run, check=check, spool=tmp_path) as writer:
            writer.put("scan", frames(1)[0])
            writer.finish()
            raise KeyboardInterrupt
        assert SpoolReader(find_spools(tmp_path)[0]).end_state() == "finished"

    def test_leaves_no_end_to_a_spool_that_goes_on(self, tmp_path, known_run):
        write(known_run, 0, spool=tmp_path)
        write(known_run, 0, 1, end=False, spool=tmp_path)
        assert SpoolReader(find_spools(tmp_path)[0]).end_state() is None

    def test_does_not_hide_a_training_in_a_spool_folder(self, tmp_path, registration, known_run):
        Spool.create(tmp_path, registration(run="known"), "trainer").close()
        with pytest.raises(InvalidArgument, match="no scan"):
            run_writer(known_run, check=check, spool=tmp_path)

    def test_needs_one_place(self, tmp_path, known_run):
        with pytest.raises(InvalidArgument, match="a server or a spool folder"):
            run_writer(known_run, check=check)
        with pytest.raises(InvalidArgument, match="a server or a spool folder"):
            run_writer(known_run, check=check, server="http://127.0.0.1:1", spool=tmp_path)

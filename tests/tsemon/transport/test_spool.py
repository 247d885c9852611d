import hashlib
import json
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tsemon.errors import InvalidArgument, SpoolError, SpoolInUse
from tsemon.transport.folders import find_siblings, find_spools, quoted
from tsemon.transport.reading import SpoolReader
from tsemon.transport.spool import Spool, make_record, parse_records

REGISTRATION = {"project": "default", "run": "gpt", "blocks": ["h.0"], "attempt_key": "key-1"}


@pytest.fixture
def spool(tmp_path):
    spool = Spool.create(tmp_path, REGISTRATION, "rank0", segment_bytes=100)
    yield spool
    spool.close()


def unsent(spool):
    """All unsent frames, taken the way a sender takes them, acknowledged."""
    frames = []
    while (batch := spool.next_batch(max_frames=3)) is not None:
        frames += batch.frames
        spool.acknowledge(batch.ends[-1])
    return frames


def letters(number):
    """40 letters that cannot be compressed."""
    return hashlib.sha256(str(number).encode()).hexdigest()[:40]


def segments(spool):
    return sorted(path.name for path in spool.folder.glob("*.seg"))


class TestSpool:
    def test_gives_frames_back_in_order(self, spool):
        frames = [f"frame {i}" for i in range(50)]
        for frame in frames:
            spool.append(frame)
        assert spool.num_unsent == 50
        assert unsent(spool) == frames
        assert spool.is_drained

    def test_offers_a_frame_until_it_is_acknowledged(self, spool):
        spool.append("a")
        assert spool.next_batch() == spool.next_batch()
        spool.acknowledge(spool.next_batch().ends[0])
        assert spool.next_batch() is None

    def test_bounds_a_batch_by_frames_and_by_bytes_but_never_to_nothing(self, spool):
        for frame in ("a" * 40, "b" * 40, "c" * 400):
            spool.append(frame)
        assert len(spool.next_batch(max_frames=2).frames) == 2
        assert len(spool.next_batch(max_bytes=81).frames) == 1
        assert len(spool.next_batch(max_bytes=82).frames) == 2
        spool.acknowledge(spool.next_batch(max_frames=2).ends[-1])
        assert spool.next_batch(max_bytes=1).frames == ("c" * 400,)

    def test_deletes_a_segment_once_it_is_wholly_acknowledged(self, spool):
        for i in range(6):
            spool.append(letters(i))  # two records of 48 bytes fill a segment of 100
        assert segments(spool) == ["00000001.seg", "00000002.seg", "00000003.seg"]
        batch = spool.next_batch()
        spool.acknowledge(batch.ends[2])
        assert segments(spool) == ["00000002.seg", "00000003.seg"]
        spool.acknowledge(batch.ends[0])  # a late word about an earlier frame changes nothing
        assert spool.num_unsent == 3

    def test_goes_on_in_another_process_where_the_last_acknowledgement_was(self, spool):
        for i in range(6):
            spool.append(f"{i}" * 40)
        spool.acknowledge(spool.next_batch().ends[2])
        spool.close()
        again = Spool.open(spool.folder)
        assert again.registration == REGISTRATION
        assert again.writer == "rank0"
        again.append("new")
        assert unsent(again) == ["3" * 40, "4" * 40, "5" * 40, "new"]
        again.close()

    def test_sends_again_what_it_cannot_know_to_be_acknowledged(self, spool):
        spool.append("a")
        spool.append("b")
        spool.acknowledge(spool.next_batch().ends[0])
        spool.close()
        (spool.folder / "acked.json").write_bytes(b"\0" * 20)
        again = Spool.open(spool.folder)
        assert unsent(again) == ["a", "b"]
        again.close()

    def test_remembers_how_the_run_ended(self, spool):
        assert spool.end_state is None
        spool.finish("finished")
        assert spool.end_state == "finished"

    def test_keeps_refused_frames_when_it_is_discarded(self, tmp_path):
        spool = Spool.create(tmp_path, REGISTRATION, "rank0")
        spool.set_aside('{"seq":1}', "too odd")
        spool.discard()
        assert sorted(path.name for path in spool.folder.iterdir()) == ["delivered.json", "refused.jsonl"]
        assert json.loads((spool.folder / "refused.jsonl").read_text()) == {"reason": "too odd", "frame": '{"seq":1}'}
        assert find_spools(tmp_path) == []

    def test_leaves_nothing_behind_when_all_was_taken(self, tmp_path):
        spool = Spool.create(tmp_path, REGISTRATION, "rank0")
        spool.append("a")
        unsent(spool)
        spool.discard()
        assert not spool.folder.exists()

    def test_is_left_alone_while_its_writer_lives(self, spool):
        with pytest.raises(SpoolInUse, match="in use by a living process"):
            Spool.open(spool.folder)
        spool.close()
        Spool.open(spool.folder).close()

    def test_says_where_the_training_goes_on_as_another_attempt(self, spool):
        spool.resume_at(700)
        assert (spool.registration["resume_step"], spool.registration["attempt_key"] != "key-1") == (700, True)
        spool.append("a")
        spool.close()
        again = Spool.open(spool.folder)
        assert again.registration == spool.registration
        assert again.writer == "rank0"
        assert unsent(again) == ["a"]
        again.close()

    def test_knows_whether_it_ever_had_a_frame(self, spool):
        assert not spool.has_frames
        for frame in ("a" * 60, "b" * 60):
            spool.append(frame)
        assert spool.has_frames
        unsent(spool)
        spool.close()
        again = Spool.open(spool.folder)
        assert (again.has_frames, again.num_unsent) == (True, 0)
        again.close()

    def test_needs_a_writer_of_its_own(self, tmp_path):
        for writer in ("rank0", "rank1"):
            Spool.create(tmp_path, REGISTRATION, writer).close()
        with pytest.raises(SpoolError, match="File exists"):
            Spool.create(tmp_path, REGISTRATION, "rank0")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"attempt_key": None}, "needs an attempt_key"),
            ({"config": {"model": object()}}, "must be plain JSON"),
            ({"config": {"lr": float("nan")}}, "must be plain JSON"),
            ({"run": ""}, "at least one character"),
        ],
    )
    def test_refuses_a_registration_that_could_not_be_sent(self, tmp_path, change, text):
        with pytest.raises(InvalidArgument, match=text):
            Spool.create(tmp_path, {**REGISTRATION, **change}, "rank0")
        assert list(tmp_path.iterdir()) == []

    def test_are_listed_in_their_order_though_the_clock_was_set_back(self, tmp_path, monkeypatch):
        made = []
        for key, now in (("b", 2000.0), ("c", 1000.0), ("a", 1000.0)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            spool = Spool.create(tmp_path, REGISTRATION | {"attempt_key": key}, "rank0")
            made.append(spool.folder)
            spool.close()
        assert find_spools(tmp_path) == made
        assert find_siblings(made[1]) == [made[0], made[2]]

    def test_lists_spools_by_age(self, tmp_path):
        folders = []
        for key in "cab":
            spool = Spool.create(tmp_path, {**REGISTRATION, "attempt_key": key}, "rank0")
            spool.close()
            folders.append(spool.folder)
        other = Spool.create(tmp_path, {**REGISTRATION, "run": "other"}, "rank0")
        other.close()
        assert find_spools(tmp_path) == [*folders, other.folder]
        assert find_siblings(folders[1]) == [folders[0], folders[2]]


def frame(seq, *metrics, **more):
    return json.dumps({"seq": seq, "scalars": dict.fromkeys(metrics or ("loss",), 1.0), "noise": letters(seq)} | more)


def seqs(frames):
    return [json.loads(text)["seq"] for text in frames]


class TestAFullSpool:
    @pytest.fixture
    def full(self, tmp_path):
        """Holds about 60 frames, in segments of 15."""
        spool = Spool.create(tmp_path, REGISTRATION, "rank0", max_bytes=8000, segment_bytes=1000)
        yield spool
        spool.close()

    def test_keeps_frames_of_the_whole_run_at_even_distances(self, full):
        for seq in range(1000):
            full.append(frame(seq))
            assert sum(path.stat().st_size for path in full.folder.glob("*.seg")) <= 8000
        kept = seqs(full.next_batch().frames)
        distances = [after - before for before, after in pairwise(kept)]
        assert len(kept) > 30
        assert kept[0] < 40
        assert kept[-1] == 999
        assert max(distances) <= 64, "16 or 32 frames, and twice as many where two segments meet"

    def test_thins_out_segments_of_a_single_frame_too(self, tmp_path):
        spool = Spool.create(tmp_path, REGISTRATION, "rank0", max_bytes=2000, segment_bytes=100)
        for seq in range(300):
            spool.append(frame(seq))
        kept = seqs(spool.next_batch().frames)
        assert kept[0] == 0
        assert kept[-1] == 299
        assert len(kept) == len(segments(spool)) > 10
        spool.close()

    def test_counts_the_frames_that_went_and_remembers_their_number(self, full):
        for seq in range(300):
            full.append(frame(seq))
        num_dropped = 300 - full.num_unsent
        assert full.num_dropped == num_dropped > 200
        full.close()
        again = Spool.open(full.folder)
        assert (again.num_dropped, again.num_unsent, again.num_damaged) == (num_dropped, 300 - num_dropped, 0)
        assert len(unsent(again)) == 300 - num_dropped
        again.close()

    def test_keeps_the_metrics_that_few_frames_have(self, full):
        for seq in range(1000):
            full.append(frame(seq, "loss", "effective_rank") if seq % 4 == 1 else frame(seq))
        slow = [seq for seq in seqs(full.next_batch().frames) if seq % 4 == 1]
        assert len(slow) >= 5
        assert slow[0] < 100
        assert slow[-1] > 900

    def test_keeps_every_frame_that_says_why_metrics_are_not_measured(self, full):
        for seq in range(500):
            full.append(frame(seq, not_measured={"saturation": "why"}) if seq in (0, 77, 78, 301) else frame(seq))
        assert {0, 77, 78, 301} <= {*seqs(full.next_batch().frames)}

    def test_leaves_alone_the_frames_that_are_on_their_way(self, full):
        for seq in range(40):
            full.append(frame(seq))
        batch = full.next_batch(max_frames=20)
        for seq in range(40, 400):
            full.append(frame(seq))
        assert full.next_batch(max_frames=20) == batch
        full.acknowledge(batch.ends[9])
        assert seqs(full.next_batch(max_frames=10).frames) == list(range(10, 20))
        full.acknowledge(batch.ends[-1])
        rest = seqs(unsent(full))
        assert rest == sorted({*rest} - {*range(20)})
        assert 20 + len(rest) + full.num_dropped == 400

    def test_drops_the_oldest_where_no_frame_may_go(self, full):
        for seq in range(300):
            full.append(frame(seq, not_measured={}))
        kept = seqs(full.next_batch().frames)
        assert kept == list(range(300 - len(kept), 300))
        assert full.num_dropped == 300 - len(kept)

    def test_reads_a_segment_no_second_time_if_none_of_its_frames_may_go(self, tmp_path, monkeypatch):
        reads, read_segment = list[int](), Spool._read_segment
        monkeypatch.setattr(Spool, "_read_segment", lambda *args: reads.append(args[1]) or read_segment(*args))
        spool = Spool.create(tmp_path, REGISTRATION, "rank0", max_bytes=8000, segment_bytes=1000)
        for seq in range(300):
            spool.append(frame(seq, not_measured={}))
        spool.close()
        assert len(reads) > 10
        assert len(reads) == len({*reads})

    def test_forgets_a_half_that_a_killed_process_had_not_put_in_its_place(self, full):
        full.append(frame(0))
        full.close()
        (full.folder / "00000001.seg.new").write_bytes(b"half")
        again = Spool.open(full.folder)
        assert seqs(unsent(again)) == [0]
        again.discard()
        assert not full.folder.exists()

    def test_is_read_beside_its_writer_without_damage(self, full):
        reader, found = SpoolReader(full.folder), set()
        for seq in range(500):
            full.append(frame(seq))
            if seq % 10 == 9:
                found |= {seq for texts in reader.new_frames() for seq in seqs(texts)}
        full.close()
        reader.is_living()
        assert [text for texts in reader.new_frames() for text in texts] == []
        assert (found, reader.damaged()) == ({*range(500)}, [])

    def test_is_thinned_out_though_its_disk_has_no_room_for_a_copy(self, full):
        for seq in range(90):
            full.append(frame(seq))
        (full.folder / "00000002.seg.new").mkdir()  # no file of this name can be written
        for seq in range(90, 200):
            full.append(frame(seq))
        assert seqs(full.next_batch().frames)[-1] == 199
        assert full.num_unsent + full.num_dropped == 200
        (full.folder / "00000002.seg.new").rmdir()


class TestARecord:
    def test_is_smaller_than_the_frame_and_reads_as_it_was(self):
        text = json.dumps({"layers": {f"metric_{i}": [0.25] * 48 for i in range(20)}, "name": "é"})
        record = make_record(text)
        assert len(record) < len(text) / 4
        assert list(parse_records(record)) == [(text, len(record))]

    def test_that_cannot_be_compressed_is_kept_as_it_is(self):
        assert make_record("é")[8:] == "é".encode()

    @pytest.mark.parametrize(
        "data",
        [b"no stream", zlib.compress(b"{}")[:-1], zlib.compress(b"{}") + b"more", zlib.compress(b" " * (2**24 + 1))],
        ids=["no stream", "cut", "more", "too large"],
    )
    def test_of_no_sound_stream_is_damaged(self, data):
        record = struct.pack("<II", len(data) | 1 << 31, zlib.crc32(data)) + data
        assert list(parse_records(make_record("sound") + record)) == [("sound", 13)]

    def test_that_is_too_large_for_a_body_is_kept_too(self):
        text = " " * (2**24 + 1)
        assert [found for found, _ in parse_records(make_record(text))] == [text]


class TestNamesInPaths:
    @given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
    def test_stay_distinct_short_and_in_their_folder(self, names):
        parts = [quoted(name) for name in names]
        assert parts[0] != parts[1]
        for part in parts:
            assert len(part) <= 100
            assert "/" not in part
            assert not part.startswith(".")

    def test_cannot_climb_out_of_the_root(self, tmp_path):
        body = {**REGISTRATION, "project": "..", "run": "../../etc", "attempt_key": "x" * 5000}
        spool = Spool.create(tmp_path / "root", body, "/")
        spool.close()
        assert spool.folder.resolve().is_relative_to((tmp_path / "root").resolve())
        assert spool.folder.relative_to(tmp_path / "root").parts[:2] == ("%2E.", "%2E.%2F..%2Fetc")


class TestADamagedSpool:
    def test_loses_the_torn_record_alone_wherever_it_was_cut(self, tmp_path):
        spool = Spool.create(tmp_path, REGISTRATION, "rank0")
        spool.append("first")
        whole = (spool.folder / "00000001.seg").read_bytes()
        spool.append("the last one, é")
        data = (spool.folder / "00000001.seg").read_bytes()
        spool.close()
        for size in range(len(whole), len(data)):
            (spool.folder / "00000001.seg").write_bytes(data[:size])
            again = Spool.open(spool.folder)
            assert (again.num_unsent, again.num_damaged) == (1, size > len(whole))
            assert again.next_batch().frames == ("first",)
            again.close()

    def test_goes_on_with_the_next_segment(self, spool):
        for i in range(6):
            spool.append(letters(i))
        spool.close()
        path = spool.folder / "00000002.seg"
        data = bytearray(path.read_bytes())
        data[60] ^= 1  # in the second record's payload
        path.write_bytes(data)
        again = Spool.open(spool.folder)
        assert again.num_damaged == 1
        assert unsent(again) == [letters(i) for i in (0, 1, 2, 4, 5)]
        assert again.is_drained
        again.close()

    def test_does_not_take_the_zeros_of_a_power_cut_for_frames(self, spool):
        spool.append("a")
        spool.close()
        with open(spool.folder / "00000001.seg", "ab") as file:
            file.write(b"\0" * 64)
        again = Spool.open(spool.folder)
        assert unsent(again) == ["a"]
        assert again.is_drained
        again.close()

    @given(st.binary(max_size=200), st.binary(max_size=100))
    def test_never_fails_to_open(self, segment, acked):
        with tempfile.TemporaryDirectory() as root:
            spool = Spool.create(root, REGISTRATION, "rank0")
            spool.close()
            (spool.folder / "00000001.seg").write_bytes(segment)
            (spool.folder / "acked.json").write_bytes(acked)
            again = Spool.open(spool.folder)
            unsent(again)
            assert again.is_drained
            again.close()

    @given(st.binary(max_size=200))
    def test_yields_records_that_end_within_the_data(self, data):
        ends = [end for _, end in parse_records(data)]
        assert ends == sorted(set(ends))
        assert all(8 < end <= len(data) for end in ends)

    @pytest.mark.parametrize(
        "text",
        ["{", "[" * 5000, "[]", '{"writer": "w", "created_at": 1}', '{"writer": 1, "created_at": 1, "run": "x"}'],
    )
    def test_says_so_when_nobody_knows_whose_it_is(self, spool, text):
        spool.close()
        (spool.folder / "run.json").write_text(text)
        with pytest.raises(SpoolError, match=r"run.json is damaged"):
            Spool.open(spool.folder)

    @pytest.mark.parametrize(
        "acked",
        ["[" * 5000, '{"segment": 1, "offset": -1, "num_before": 0, "num_dropped": 0}',
         '{"segment": 1, "offset": 3, "num_before": 1, "num_dropped": 0}',
         '{"segment": 1e999, "offset": 0, "num_before": 0, "num_dropped": 0}',
         '{"segment": 1, "offset": 1' + 30 * "0" + ', "num_before": 0, "num_dropped": 0}'],
    )  # fmt: skip
    def test_offers_all_again_where_nobody_knows_what_was_acknowledged(self, spool, acked):
        spool.append("a")
        spool.append("b")
        spool.close()
        (spool.folder / "acked.json").write_text(acked)
        again = Spool.open(spool.folder)
        assert unsent(again) == ["a", "b"]
        again.close()

    @pytest.mark.parametrize("name", ["copy", "00000001 (1)", "1", "-5", "\u0663"])
    def test_leaves_files_alone_that_are_no_segments(self, spool, name):
        spool.append("a")
        spool.close()
        foreign = spool.folder / f"{name}.seg"
        foreign.write_bytes(b"of somebody else")
        again = Spool.open(spool.folder)
        assert unsent(again) == ["a"]
        assert (again.num_damaged, foreign.read_bytes()) == (0, b"of somebody else")
        again.close()


class SpoolStory(RuleBasedStateMachine):
    """Whatever is appended, acknowledged, reopened and in which order: what was not acknowledged is there, in order."""

    @initialize()
    def create(self):
        self.root = tempfile.TemporaryDirectory()
        self.spool = Spool.create(self.root.name, REGISTRATION, "rank0", segment_bytes=64)
        self.expected = []

    @rule(frame=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=80))
    def append(self, frame):
        self.spool.append(frame)
        self.expected.append(frame)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), max_frames=st.integers(1, 10))
    def acknowledge(self, data, max_frames):
        batch = self.spool.next_batch(max_frames=max_frames)
        assert list(batch.frames) == self.expected[: len(batch.frames)]
        num_arrived = data.draw(st.integers(1, len(batch.frames)))
        self.spool.acknowledge(batch.ends[num_arrived - 1])
        del self.expected[:num_arrived]

    @rule()
    def reopen(self):
        self.spool.close()
        self.spool = Spool.open(self.spool.folder, segment_bytes=64)

    @invariant()
    def holds_what_was_not_acknowledged(self):
        assert self.spool.num_unsent == len(self.expected)
        batch = self.spool.next_batch(max_frames=1000)
        assert (list(batch.frames) if batch else []) == self.expected

    def teardown(self):
        self.spool.close()
        self.root.cleanup()


TestSpoolStory = SpoolStory.TestCase
TestSpoolStory.settings = settings(max_examples=40, stateful_step_count=25)


class FullSpoolStory(RuleBasedStateMachine):
    """However small the spool: each frame is acknowledged, there, or counted as dropped, and their order stays."""

    @initialize()
    def create(self):
        self.root = tempfile.TemporaryDirectory()
        self.spool = Spool.create(self.root.name, REGISTRATION, "rank0", max_bytes=1200, segment_bytes=200)
        self.num_appended = self.num_arrived = 0

    @rule(more=st.integers(1, 12), is_noted=st.booleans())
    def append(self, more, is_noted):
        for seq in range(self.num_appended, self.num_appended + more):
            self.spool.append(frame(seq, not_measured={}) if is_noted and seq % 5 == 0 else frame(seq))
        self.num_appended += more

    @precondition(lambda self: self.spool.num_unsent)
    @rule(data=st.data(), max_frames=st.integers(1, 6))
    def acknowledge(self, data, max_frames):
        batch = self.spool.next_batch(max_frames=max_frames)
        num_arrived = data.draw(st.integers(1, len(batch.frames)))
        self.spool.acknowledge(batch.ends[num_arrived - 1])
        self.num_arrived += num_arrived

    @rule()
    def reopen(self):
        self.spool.close()
        self.spool = Spool.open(self.spool.folder, max_bytes=1200, segment_bytes=200)

    @invariant()
    def knows_where_each_frame_is(self):
        batch = self.spool.next_batch(max_frames=1000)
        found = seqs(batch.frames) if batch else []
        assert found == sorted({*found})
        assert self.num_arrived + len(found) + self.spool.num_dropped == self.num_appended
        assert len(found) == self.spool.num_unsent

    def teardown(self):
        self.spool.close()
        self.root.cleanup()


TestFullSpoolStory = FullSpoolStory.TestCase
TestFullSpoolStory.settings = settings(max_examples=30, stateful_step_count=25)


class TestAFolderThatCannotBeWritten:
    def test_is_named_with_the_reason_and_what_to_do(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            SpoolError, match=r"cannot make the spool folder .*file/default.*: Not a directory; .*spool_dir"
        ):
            Spool.create(tmp_path / "file", REGISTRATION, "rank0")

    def test_keeps_a_half_written_record_out_of_the_way(self, spool):
        """A full disk takes the first half of a record; a file size limit does the same."""
        spool.append("a")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        try:
            with pytest.raises(SpoolError, match=r"cannot write to the spool folder .*: File too large"):
                spool.append("does not fit")
            with pytest.raises(SpoolError):
                spool.append("does not fit any better")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        spool.append("b")
        assert unsent(spool) == ["a", "b"]
        spool.close()
        assert Path(spool.folder, "00000001.seg").exists() is False

    def test_is_told_when_the_spool_is_closed(self, spool):
        spool.close()
        with pytest.raises(SpoolError, match="it is closed"):
            spool.append("a")


class TestAFolderThatIsDeletedUnderWay:
    def test_is_made_again_and_what_went_with_it_is_counted(self, spool):
        for i in range(5):
            spool.append(f"{i}" * 40)
        spool.acknowledge(spool.next_batch().ends[0])
        run_json = (spool.folder / "run.json").read_text()
        shutil.rmtree(spool.folder)
        for frame in ("new", "newer"):
            spool.append(frame)
        assert (spool.num_unsent, spool.num_dropped) == (2, 4)
        with pytest.raises(SpoolInUse):
            Spool.open(spool.folder)
        spool.close()
        assert (spool.folder / "run.json").read_text() == run_json
        again = Spool.open(spool.folder)
        assert unsent(again) == ["new", "newer"]
        again.close()

    @pytest.mark.parametrize("num_arrived", [1, 3])
    def test_loses_no_frame_that_was_on_its_way(self, spool, num_arrived):
        for i in range(4):
            spool.append(f"{i}" * 40)
        batch = spool.next_batch()
        shutil.rmtree(spool.folder)
        spool.append("new")
        assert spool.num_dropped == 4
        spool.acknowledge(batch.ends[num_arrived - 1])
        assert (spool.num_unsent, spool.num_dropped) == (1, 4 - num_arrived)
        assert unsent(spool) == ["new"]
        assert spool.num_dropped == 4 - num_arrived

    def test_is_made_again_to_say_how_the_run_ended(self, spool):
        spool.append("a")
        shutil.rmtree(spool.folder)
        spool.finish("failed")
        assert (spool.end_state, spool.num_unsent, spool.num_dropped) == ("failed", 0, 1)
        assert find_spools(spool.folder.parents[2]) == [spool.folder]

    def test_is_made_again_for_a_refused_frame(self, spool):
        shutil.rmtree(spool.folder)
        spool.set_aside("{}", "too odd")
        assert sorted(path.name for path in spool.folder.iterdir()) == ["lock", "refused.jsonl", "run.json"]

    def test_may_stay_away(self, spool):
        spool.append("a")
        shutil.rmtree(spool.folder)
        spool.folder.write_text("in the way")
        with pytest.raises(SpoolError, match="File exists"):
            spool.append("b")
        spool.folder.unlink()
        spool.append("b")
        assert (unsent(spool), spool.num_dropped) == (["b"], 1)


class TestAKilledProcess:
    def test_loses_no_appended_frame(self, tmp_path):
        code = (
            "import json, os, sys\n"
            "from tsemon.transport.spool import Spool\n"
            "spool = Spool.create(sys.argv[1], json.loads(sys.argv[2]), 'rank0')\n"
            "for i in range(100): spool.append(f'frame {i}')\n"
            "os._exit(9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, tmp_path, json.dumps(REGISTRATION)], check=False)
        assert done.returncode == 9
        (folder,) = find_spools(tmp_path)
        spool = Spool.open(folder)
        assert spool.end_state is None
        assert unsent(spool) == [f"frame {i}" for i in range(100)]
        spool.close()

    def test_leaves_a_free_spool_though_a_forked_child_lives_on(self, tmp_path):
        code = (
            "import json, os, sys\n"
            "from tsemon.transport.spool import Spool\n"
            "spool = Spool.create(sys.argv[1], json.loads(sys.argv[2]), 'rank0')\n"
            "if os.fork(): os._exit(9)\n"
            "print('forked', flush=True)\n"
            "sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code, tmp_path, json.dumps(REGISTRATION)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout.readline() == "forked\n"
            assert trainer.wait() == 9
            (folder,) = find_spools(tmp_path)
            Spool.open(folder).close()

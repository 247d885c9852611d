"""A spool is read as far as it is sound, whatever has befallen it; nothing else comes out of it."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.cases import ANY_JSON, AWKWARD, PAYLOADS, altered, compressed_record, record
from tsemon.errors import TsemonError
from tsemon.transport import Spool, SpoolReader, find_spools
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.spools import SpooledRun

REGISTRATION = {"project": "default", "run": "gpt", "blocks": ["h.0", "h.1"], "attempt_key": "key-1"}


@st.composite
def damaged(draw):
    """How records are made, payloads of segments, and the bytes of each, of which one is altered."""
    make = draw(st.sampled_from([record, compressed_record]))
    payloads = draw(st.lists(PAYLOADS, min_size=1, max_size=3))
    segments = [b"".join(map(make, kept)) for kept in payloads]
    place = draw(st.integers(0, len(segments) - 1))
    segments[place] = draw(altered(st.just(segments[place])) | st.binary(max_size=100))
    return make, payloads, segments


def sound_before(make, payloads, segment):
    """The payloads that stand whole at the start of a segment, as they were written."""
    found, whole = [], b""
    for payload in payloads:
        whole += make(payload)
        if not segment.startswith(whole) or not is_text(payload):
            break
        found.append(payload.decode())
    return found


def is_text(payload):
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def make_spool(root, segments, **files):
    spool = Spool.create(root, REGISTRATION, "rank0")
    spool.close()
    for number, data in enumerate(segments, start=1):
        (spool.folder / f"{number:08d}.seg").write_bytes(data)
    for name, data in files.items():
        (spool.folder / f"{name}.json").write_bytes(data)
    return spool.folder


def read_beside(folder):
    """As a service does that shows the folder."""
    reader = SpoolReader(folder)
    reader.is_living()
    frames = [text for texts in reader.new_frames() for text in texts]
    reader.damaged()
    return frames


def take_over(folder):
    """As the process does that delivers it."""
    spool = Spool.open(folder)
    frames = []
    while (batch := spool.next_batch(max_frames=2)) is not None:
        frames += batch.frames
        spool.acknowledge(batch.ends[-1])
    assert spool.is_drained
    spool.close()
    return frames


@pytest.mark.parametrize("read", [read_beside, take_over])
class TestSegments:
    def test_give_what_was_written_and_no_more(self, look, read):
        def check(case):
            make, payloads, segments = case
            with tempfile.TemporaryDirectory() as root:
                frames = read(make_spool(root, segments))
            written = {payload.decode() for kept in payloads for payload in kept if is_text(payload)}
            assert set(frames) <= written
            sound = [sound_before(make, kept, segment) for kept, segment in zip(payloads, segments, strict=True)]
            rest = iter(frames)
            assert all(text in rest for kept in sound for text in kept), "what is sound comes, in its order"

        look(check, damaged(), 200)

    def test_of_any_bytes_and_names_are_read_past(self, look, read):
        def check(case):
            segment, name = case
            with tempfile.TemporaryDirectory() as root:
                folder = make_spool(root, [segment, record(b"whole")])
                (folder / f"{name}.seg").write_bytes(b"of somebody else")
                assert read(folder)[-1:] == ["whole"]

        names = st.sampled_from(["copy", "1", "00000001 (1)", "-5", "+7", "0x10", "1e3", "²", "٣", "0", "9" * 30])
        look(check, st.tuples(st.binary(max_size=100), names), 60)


FILES = ("acked", "end", "run")
TEXTS = ANY_JSON.map(lambda found: json.dumps(found).encode()) | st.binary(max_size=60) | st.sampled_from(AWKWARD)
STATES = st.fixed_dictionaries(
    {
        name: st.integers(-3, 3) | st.integers() | ANY_JSON
        for name in (
            "segment",
            "offset",
            "num_before",
            "num_dropped",
            "state",
            "created_at",
            "writer",
            "run",
            "project",
        )
    }
).map(lambda fields: json.dumps(REGISTRATION | fields).encode())


@pytest.mark.parametrize("name", FILES)
class TestAFileBesideThem:
    def test_of_any_content_is_told_or_read_past(self, look, name):
        def check(content):
            with tempfile.TemporaryDirectory() as root:
                folder = make_spool(root, [record(b"a"), record(b"b") + record(b"c")], **{name: content})
                assert find_spools(root) == [folder]
                for read in (read_beside, take_over):
                    try:
                        frames = read(folder)
                    except TsemonError:
                        assert name == "run"
                    else:
                        assert set(frames) <= {"a", "b", "c"}
                if name == "end":
                    assert SpoolReader(folder).end_state() in (None, "running", "finished", "failed")
                with suppress(TsemonError):
                    replay(SpooledRun([Path(folder)]), Evaluator([]))

        look(check, TEXTS | STATES, 200)

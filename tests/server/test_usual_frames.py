"""Bodies in JSON as writers usually send them: read in one pass, with nothing that the schema would read in another way."""

import json
from dataclasses import replace

import pytest

from tsemon.errors import InvalidFrame
from tsemon.stacks import Stacks
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.services.ingest.schemas import read_frames
from tsemon_server.services.ingest.usual import UsualFrames, read_json

BLOCKS = Stacks.of(2)
FRAME = Frame(
    7,
    3,
    1.5,
    {"loss": 0.25, "nothing": float("nan"), "much": float("inf"), "little": float("-inf")},
    {"own": Array.of([1, 2]), "token_similarity": Array.of([1, 2, 3])},
    {"own_heads": Array.of(range(6), (2, 3))},
    {"head_dim": "no attention"},
)


def body_of(*frames, writer="w", attempt=1):
    return {"writer": writer, "attempt": attempt, "frames": [json.loads(frame.to_json()) for frame in frames]}


def raw_of(body):
    return json.dumps(body, separators=(",", ":")).encode()


def read(reader, raw, stacks=BLOCKS):
    """What comes of a body: its frames, or its error."""
    try:
        body = reader(raw)
        frames = body.to_frames(stacks)
    except InvalidFrame as error:
        return str(error)
    return body.writer, body.attempt, [(frame.to_json(), frame.crc) for frame in frames]


class TestABodyAsWritersSendIt:
    def test_is_read_without_the_schema(self):
        raw = frames_to_body("w", 1, [FRAME.to_json(), FRAME.to_json()])
        assert type(read_json(raw)) is UsualFrames
        assert read(read_json, raw) == read(read_frames, raw)
        assert len(read(read_json, raw)[2]) == 2

    def test_may_have_whole_numbers_where_the_frame_has_floats(self):
        body = body_of(FRAME)
        body["frames"][0]["scalars"] = {"tokens": 4096, "debt": -3}
        assert type(read_json(raw_of(body))) is UsualFrames
        assert read(read_json, raw_of(body)) == read(read_frames, raw_of(body))

    def test_may_have_colons_in_its_reasons(self):
        raw = frames_to_body("w", 1, [replace(FRAME, not_measured={"cosine": "first sample: none before"}).to_json()])
        assert type(read_json(raw)) is UsualFrames
        assert read(read_json, raw) == read(read_frames, raw)


def change(*place, to):
    def apply(body):
        *way, last = place
        for key in way:
            body = body[key]
        body[last] = to

    return apply


FIRST = ("frames", 0)
OWN = (*FIRST, "layers", "own")
UNUSUAL = {
    "another key": change("extra", to=1),
    "a wrong writer": change("writer", to="a b"),
    "no text as the writer": change("writer", to=1),
    "attempt 0": change("attempt", to=0),
    "attempt true": change("attempt", to=True),
    "attempt 1.0": change("attempt", to=1.0),
    "no list of frames": change("frames", to=""),
    "no object as a frame": change(*FIRST, to=[]),
    "another key in a frame": change(*FIRST, "extra", to=1),
    "seq true": change(*FIRST, "seq", to=True),
    "seq below 0": change(*FIRST, "seq", to=-1),
    "seq beyond all": change(*FIRST, "seq", to=2**53),
    "step 3.5": change(*FIRST, "step", to=3.5),
    "a whole time": change(*FIRST, "time", to=3),
    "a time below 0": change(*FIRST, "time", to=-1.0),
    "crc true": change(*FIRST, "crc", to=True),
    "crc beyond all": change(*FIRST, "crc", to=2**32),
    "scalars null": change(*FIRST, "scalars", to=None),
    "scalars as a list": change(*FIRST, "scalars", to=[]),
    "a scalar true": change(*FIRST, "scalars", "loss", to=True),
    "a scalar as text": change(*FIRST, "scalars", "loss", to="1.5"),
    "a scalar beyond all integers": change(*FIRST, "scalars", "loss", to=10**400),
    "a name with a space": change(*FIRST, "scalars", "a b", to=1.0),
    "a name with a line end": change(*FIRST, "scalars", "loss\n", to=1.0),
    "an array as a list": change(*OWN, to=[1.0, 2.0]),
    "an array with another key": change(*OWN, "extra", to=1),
    "an array without a shape": change(*OWN, to={"f32": ""}),
    "a shape true": change(*OWN, "shape", to=[True]),
    "a shape of three lengths": change(*OWN, "shape", to=[1, 1, 2]),
    "a shape of another model": change(*OWN, to={"shape": [5], "f32": "AAAAAAAAAAAAAAAAAAAAAAAAAAA="}),
    "a shape of more values": change(*OWN, "shape", to=[3]),
    "a shape below 0": change(*OWN, "shape", to=[-2]),
    "no base64": change(*OWN, "f32", to="AACAPwAAAE?="),
    "base64 with more behind": change(*OWN, "f32", to="AACAPwAAAEA=AAAA"),
    "heads with one axis": change(*FIRST, "heads", "own_heads", to={"shape": [2], "f32": "AACAPwAAAEA="}),
    "a reason that is none": change(*FIRST, "not_measured", "head_dim", to=1),
    "a reason without end": change(*FIRST, "not_measured", "head_dim", to="x" * 301),
    "reasons as a list": change(*FIRST, "not_measured", to=[]),
}


class TestAnyOtherBody:
    @pytest.mark.parametrize("what", UNUSUAL)
    def test_is_what_the_schema_says(self, what):
        body = body_of(FRAME, FRAME)
        UNUSUAL[what](body)
        assert read(read_json, raw_of(body)) == read(read_frames, raw_of(body))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b'"loss":0.25', b'"loss":"bad","loss":0.25'),
            (b'"loss":0.25', b'"loss":1e999'),
            (b'"loss":0.25', b'"loss":NaN'),
            (b'"time":1.5', b'"time":1e999'),
            (b'"shape":[2]', b'"shape":[9],"shape":[2]'),
            (b'"attempt":1', b'"attempt":0,"attempt":1'),
            (b'"frames":[', b'"frames":[['),
            (b'"writer":"w"', b'"writer":"\xff"'),
        ],
    )
    def test_that_json_dumps_would_not_write_is_so_too(self, old, new):
        raw = frames_to_body("w", 1, [FRAME.to_json()])
        assert old in raw
        assert read(read_json, raw.replace(old, new, 1)) == read(read_frames, raw.replace(old, new, 1))

    def test_with_an_escaped_colon_and_a_name_twice_is_so_too(self):
        raw = frames_to_body("w", 1, [replace(FRAME, not_measured={"cosine": "first: none"}).to_json()])
        twice = raw.replace(b"first: none", b"first\\u003a none").replace(b'"loss":0.25', b'"loss":"bad","loss":0.25')
        assert read(read_json, twice) == read(read_frames, twice)

    def test_whose_later_frame_has_another_shape_is_so_too(self):
        body = body_of(FRAME, FRAME)
        body["frames"][1]["layers"]["own"] = {"shape": [True, 2], "f32": "AACAPwAAAEA="}
        assert read(read_json, raw_of(body)) == read(read_frames, raw_of(body))

    def test_of_a_model_with_one_block_is_so_too(self):
        body = body_of(Frame(0, 0, 0.0, {}, {"own": Array.of([1])}), Frame(1, 1, 0.0, {}, {"own": Array.of([1])}))
        for shape in ([1], [True], [1.0]):
            body["frames"][1]["layers"]["own"]["shape"] = shape
            raw = raw_of(body)
            assert read(read_json, raw, Stacks.of(1)) == read(read_frames, raw, Stacks.of(1))

"""Whatever a body holds, it is taken or refused; what is taken is given back as it came."""

import base64
import csv
import io
import json
import math
import struct
from contextlib import closing, suppress

import pytest
from hypothesis import strategies as st

from tests.databases import SqliteFile
from tests.fuzz.cases import ANY_JSON, AWKWARD, BODIES, METRICS, NAMES, STEPS, altered
from tests.server.conftest import Api, loss_frame, problem
from tsemon.errors import InvalidArgument
from tsemon.stacks import Stacks
from tsemon.transport.packing import pack_frames
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.bodies import read_body
from tsemon_server.routes import ROUTES
from tsemon_server.routes.openapi import body_of
from tsemon_server.services.ingest.packed import read_packed
from tsemon_server.services.ingest.schemas import FramesBody, read_frames, to_frame
from tsemon_server.services.ingest.usual import read_json

OTHERS = sorted({body_of(route) for route in ROUTES} - {None, FramesBody}, key=lambda body: body.__name__)


def decode(raw):
    try:
        body = read_frames(raw)
        frames = [to_frame(sent, Stacks.of(2)) for sent in body.frames]
    except InvalidArgument:
        return
    assert values_taken(body.writer, frames) == values_of(json.loads(raw))


def outcome(reader, raw):
    try:
        body = reader(raw)
        return body.writer, body.attempt, [(frame.to_json(), frame.crc) for frame in body.to_frames(Stacks.of(2))]
    except InvalidArgument as error:
        return str(error)


def read_both_ways(raw):
    assert outcome(read_json, raw) == outcome(read_frames, raw)


class TestABodyOfFrames:
    def test_is_decoded_or_refused(self, look):
        look(decode, BODIES, 400)

    def test_is_read_in_one_pass_as_the_schema_reads_it(self, look):
        written = st.lists(PACKABLE, max_size=3).map(lambda frames: [frame.to_json() for frame in frames])
        usual = written.map(lambda texts: frames_to_body("w", 1, texts))
        look(read_both_ways, BODIES | usual | altered(usual), 400)

    @pytest.mark.parametrize("awkward", AWKWARD, ids=lambda awkward: repr(awkward[:8]))
    def test_that_is_awkward_is_refused(self, awkward):
        for raw in (awkward, b'{"writer":"w","attempt":1,"frames":[' + awkward, b'{"frames":' + awkward + b"}"):
            with pytest.raises(InvalidArgument):
                read_frames(raw)

    def test_that_is_taken_is_given_back_as_it_came(self, tmp_path, look):
        with closing(Api(SqliteFile(tmp_path / "tsemon.db"))) as api:
            num_taken = iter(range(10**9))

            def send(raw):
                run_id = api.register(f"run-{next(num_taken)}", num_blocks=2)
                reply = api.post_raw(run_id, raw)
                if reply.status_code != 200:
                    assert problem(reply)[0] in (404, 413, 422)
                    assert values_in(api, run_id) == {}
                    return
                assert values_in(api, run_id) == values_of(json.loads(raw))

            look(send, BODIES, 120)
            assert api.send_ok(api.register("after"), [loss_frame(1)])["accepted"] == 1


def values_in(api, run_id):
    """{(writer, seq, step, time, metric, layer, head): value}, as the service exports them."""
    text = api.http.get(f"/api/v1/runs/{run_id}/export").text
    return {
        (row["writer"], int(row["seq"]), int(row["step"]), float(row["time"]), row["metric"], row["layer"], row["head"]):
        comparable(float(row["value"])) for row in csv.DictReader(io.StringIO(text))
    }  # fmt: skip


def values_taken(writer, frames):
    """The same, as the service has decoded them."""
    found = {}
    for frame in {frame.seq: frame for frame in reversed(frames)}.values():
        place = writer, frame.seq, frame.step, frame.time
        for metric, value in frame.scalars.items():
            found[*place, metric, "", ""] = comparable(value)
        for metric, array in frame.layers.items():
            assert array.shape == (len(array.data) // 4,)
            for layer, value in enumerate(array.tolist()):
                found[*place, metric, str(layer), ""] = comparable(value)
        for metric, array in frame.heads.items():
            assert array.shape[0] * array.shape[1] == len(array.data) // 4
            for index, value in enumerate(array.tolist()):
                layer, head = divmod(index, array.shape[1])
                found[*place, metric, str(layer), str(head)] = comparable(value)
    return found


def values_of(body):
    """The same, read from a body as docs/wire.md describes it."""
    found, seen = {}, set()
    for frame in body["frames"]:
        if frame["seq"] in seen:
            continue  # the first of them is stored
        seen.add(frame["seq"])
        place = body["writer"], frame["seq"], frame["step"], float(frame["time"])
        for metric, value in frame.get("scalars", {}).items():
            found[*place, metric, "", ""] = comparable(number(value))
        for metric, values in frame.get("layers", {}).items():
            for layer, value in enumerate(unpacked(values)[1]):
                found[*place, metric, str(layer), ""] = comparable(value)
        for metric, values in frame.get("heads", {}).items():
            shape, flat = unpacked(values)
            for index, value in enumerate(flat):
                found[*place, metric, str(index // shape[1]), str(index % shape[1])] = comparable(value)
    return found


def unpacked(array):
    if isinstance(array, dict):
        data = base64.b64decode(array["f32"])
        return array["shape"], struct.unpack(f"<{len(data) // 4}f", data)
    rows = array if array and isinstance(array[0], list) else [array]
    return [len(rows), len(rows[0])], [as_float32(number(value)) for row in rows for value in row]


def number(value):
    return math.nan if value is None else float(value)


def as_float32(value):
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def comparable(value):
    return "NaN" if value != value else value


def altered_bodies():
    """Packed bodies, most of them with bytes that are altered."""
    frames = st.lists(PACKABLE, max_size=3).map(lambda frames: [frame.to_json() for frame in frames])
    return frames.flatmap(lambda texts: altered(st.just(pack_frames("w", 1, texts))))


SOME = st.lists(st.floats(width=32), min_size=2, max_size=2)
PACKABLE = st.builds(
    Frame,
    STEPS,
    STEPS,
    st.floats(0, 2e9),
    st.dictionaries(NAMES, st.floats(), max_size=2),
    st.dictionaries(METRICS, SOME.map(Array.of), max_size=2),
    st.dictionaries(METRICS, SOME.map(lambda values: Array.of(values, (2, 1))), max_size=1),
)


class TestAPackedBody:
    def test_is_read_or_refused(self, look):
        def check(raw):
            try:
                body = read_packed(raw)
                frames = body.to_frames(Stacks.of(2))
            except InvalidArgument:
                return
            assert all(len(array.data) == 4 * math.prod(array.shape) for frame in frames for array in arrays_of(frame))
            assert sum(sizes_of(frame) for frame in frames) == len(body.values)

        look(check, altered_bodies() | st.binary(max_size=100).map(lambda rest: b"TSF1" + rest), 400)

    def test_that_is_whole_holds_the_frames_of_the_json_body(self, look):
        def check(frames):
            texts = [frame.to_json() for frame in frames]
            packed = read_packed(pack_frames("w", 1, texts)).to_frames(Stacks.of(2))
            plain = read_frames(frames_to_body("w", 1, texts)).to_frames(Stacks.of(2))
            assert [frame.to_json() for frame in packed] == [frame.to_json() for frame in plain] == texts

        look(check, st.lists(PACKABLE, max_size=3), 200)


def arrays_of(frame):
    return [*frame.layers.values(), *frame.heads.values()]


def sizes_of(frame):
    return 8 * len(frame.scalars) + sum(len(array.data) for array in arrays_of(frame))


class TestAnyOtherBody:
    @pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.__name__)
    def test_is_read_or_refused(self, look, body):
        def read(raw):
            with suppress(InvalidArgument):
                read_body(body, raw)

        fields = st.dictionaries(st.sampled_from([*body.model_fields]), ANY_JSON)
        plain = fields.map(lambda fields: json.dumps(fields).encode())
        look(read, plain | altered(plain) | st.binary(max_size=200), 100)

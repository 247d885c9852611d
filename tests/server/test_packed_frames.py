import json
import math
import re
import struct
import zlib

import pytest
import torch

import tsemon
from tests.frames import frames_in
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.transport.packing import pack_frames
from tsemon.wire import HISTORY, MAX_BODY_BYTES, PACKED, Array, Frame, frames_to_body

from .conftest import loss_frame, problem

LAYOUT = {"scalars": ["loss"], "layers": {"token_similarity": [3]}, "heads": {"attention_entropy": [2, 1]}}
FRAME = {"layout": 0, "seq": 1, "step": 1, "time": 1.0}
VALUES = struct.pack("<d5f", 2.0, *range(5))


def packed(*frames, layouts=(LAYOUT,), values=VALUES, **fields):
    header = {"writer": "w", "attempt": 1, "layouts": list(layouts), "frames": list(frames)} | fields
    return around(json.dumps(header).encode(), values)


def around(header, values=b""):
    return b"TSF1" + struct.pack("<I", len(header)) + header + values


@pytest.fixture
def run_id(api):
    """A run of two blocks that has one frame."""
    run_id = api.register(num_blocks=2)
    api.send_ok(run_id, [loss_frame(0)])
    return run_id


def post(api, run_id, body, kind=PACKED, **headers):
    return api.post_raw(run_id, body, **{"Content-Type": kind} | headers)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Frames of a training, with metrics that few of them have, and the names of its blocks."""
    folder = tmp_path_factory.mktemp("spool")
    torch.manual_seed(0)
    model = CausalLanguageModel(CausalLanguageModelConfig(vocab=16, context=8, depth=3, width=16, heads=2, ffn=16))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_BT = torch.randint(16, (2, 9))
    with tsemon.attach(model, optimizer, run="small", every=1, spool_dir=folder) as monitor:
        for _ in range(12):
            logits_BTV = model(tokens_BT[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss, odd=math.nan)
        blocks = list(monitor.status.blocks)
    return blocks, [json.dumps(frame) for frame in frames_in(folder)]


class TestPackedFrames:
    def test_are_stored_byte_for_byte_as_those_of_json(self, api, recorded):
        blocks, frames = recorded
        assert len({len(json.loads(frame)["layers"]) for frame in frames}) > 1
        kept = []
        for run, body, kind in (
            ("plain", frames_to_body("w", 1, frames), "application/json"),
            ("packed", pack_frames("w", 1, frames), PACKED),
        ):
            run_id = api.register(run, blocks=blocks)
            reply = post(api, run_id, body, kind)
            assert reply.json()["accepted"] == len(frames) == 12, reply.text
            rows = api.database.execute(
                f"SELECT seq, step, time, layout_id, blob, crcs FROM frame WHERE run_id = '{run_id}' ORDER BY seq"
            )
            kept.append(([tuple(map(_plain, row)) for row in rows], api.get(f"/runs/{run_id}")["not_measured"]))
        assert len(kept[0][0]) == 12
        assert kept[0] == kept[1]

    def test_are_duplicates_of_those_that_came_as_json(self, api, run_id):
        frames = [loss_frame(step).to_json() for step in range(5)]
        reply = post(api, run_id, pack_frames("w", 1, frames)).json()
        assert (reply["accepted"], reply["duplicates"], reply["last_seq"]) == (4, 1, 4)

    @pytest.mark.parametrize("kind", [f"{PACKED}; version=1", PACKED.upper()])
    def test_are_known_by_their_content_type(self, api, run_id, kind):
        assert post(api, run_id, packed(FRAME), kind).json()["accepted"] == 1

    def test_may_be_compressed(self, api, run_id):
        compressor = zlib.compressobj(wbits=31)
        body = compressor.compress(packed(FRAME)) + compressor.flush()
        assert post(api, run_id, body, **{"Content-Encoding": "gzip"}).json()["accepted"] == 1

    def test_may_be_none(self, api, run_id):
        assert post(api, run_id, packed(layouts=(), values=b"")).json()["last_seq"] is None

    def test_may_have_values_whose_bytes_look_like_keys_of_json(self, api, run_id):
        """0x3a, a colon, is the first byte of many a small number."""
        frames = [
            Frame(seq, seq, 1.0, {}, {}, {"mine": Array((2, 5000), b"::::" * 10_000)}).to_json() for seq in range(1, 9)
        ]
        assert pack_frames("w", 1, frames).count(b":") > 2**18
        assert post(api, run_id, pack_frames("w", 1, frames)).json()["accepted"] == 8

    def test_are_announced_in_the_reply_to_a_registration(self, api):
        reply = api.http.post("/api/v1/runs", json={"run": "new"}).json()
        assert reply["accepts"] == ["application/json", PACKED, HISTORY]


def _plain(value):
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def layout(**fields):
    return packed(FRAME, layouts=[LAYOUT | fields])


BAD = {
    "nothing": (b"", "expected b'TSF1' and the length of the header at the start, got b''"),
    "JSON": (b'{"writer": "w"}', "expected b'TSF1'"),
    "a start that is cut": (b"TSF1\1\0", "expected b'TSF1'"),
    "a header that is cut": (packed(FRAME)[:50], r"expected a header of \d+ bytes, got 42 bytes"),
    "a header as long as can be said": (b"TSF1" + b"\xff" * 4 + b"{}", "expected a header of 4294967295 bytes, got 2"),
    "a header that is no JSON": (around(b"TSF1"), "body of frames: expected JSON"),
    "a header that is a list": (around(b"[]"), "Input should be an object"),
    "a header nested without end": (around(b"[" * 5000), "expected JSON"),
    "an unknown key": (packed(FRAME, run="x"), "body of frames, run: Extra inputs are not permitted"),
    "an unknown key of a frame": (packed(FRAME | {"loss": 1}), r"frame seq 1 \(number 1 .*loss: Extra inputs"),
    "no writer": (around(b'{"attempt":1,"layouts":[],"frames":[]}'), "writer: Field required"),
    "a negative seq": (packed(FRAME | {"seq": -1}), "seq: Input should be greater than or equal to 0, got -1"),
    "a time that is not finite": (
        around(b'{"writer":"w","attempt":1,"layouts":[],"frames":[{"layout":0,"seq":1,"step":1,"time":1e999}]}'),
        r"frame seq 1 .*: expected a finite number, .* got inf",
    ),
    "too many frames": (packed(*[FRAME] * 4097), "frames: List should have at most 4096 items"),
    "no such layout": (
        packed(FRAME | {"layout": 1}),
        r"frame seq 1 \(number 1 in the body\), layout: expected the index of one of the 1 layouts, got 1",
    ),
    "a negative layout": (packed(FRAME | {"layout": -1}), "layout: Input should be greater than or equal to 0"),
    "a name that is none": (layout(scalars=["a b"]), "layouts.0.scalars.0: String should match pattern"),
    "a name that is too long": (layout(layers={"x" * 129: [2]}), "String should have at most 128 characters"),
    "a name twice": (layout(scalars=["loss", "loss"]), "layouts.0.scalars: Each name should be there once"),
    "too many scalars": (layout(scalars=[f"s{i}" for i in range(1001)]), "at most 1000 items"),
    "three axes": (layout(heads={"x": [2, 1, 1]}), "at most 2 items"),
    "a negative length": (layout(layers={"x": [-1]}), "greater than or equal to 0"),
    "values that end early": (
        packed(FRAME, values=VALUES[:-1]),
        "expected 28 bytes of values behind the header, as the layouts say, got 27",
    ),
    "values that go on": (packed(FRAME, values=VALUES + b"\0"), "expected 28 bytes .*, got 29"),
    "lengths beyond all bytes": (layout(heads={"x": [2**24, 2**24]}), r"expected \d+ bytes of values .*, got 28"),
    "lengths of thousands of digits": (layout(heads={"x": [10**2500, 10**2500]}), "less than or equal to 16777216"),
    "too few layers": (
        packed(FRAME, layouts=[{"layers": {"token_similarity": [2]}}], values=bytes(8)),
        r"frame seq 1, layers 'token_similarity': expected shape \[3\] \(2 blocks, .*one entry more\), got \[2\]",
    ),
    "heads of too few blocks": (
        packed(FRAME, layouts=[{"heads": {"x": [1, 1]}}], values=bytes(4)),
        r"frame seq 1, heads 'x': expected shape \[2, heads\] .*got \[1, 1\]",
    ),
    "another checksum": (packed(FRAME | {"crc": 1}), "frame seq 1.*crc"),
}


class TestAPackedBodyThatIsWrong:
    @pytest.mark.parametrize(("body", "detail"), BAD.values(), ids=BAD)
    def test_is_refused_with_its_reason_and_loses_nothing(self, api, run_id, body, detail):
        status, error, told = problem(post(api, run_id, body))
        assert (status, error) == (422, "invalid_frame")
        assert re.search(detail, told), told
        assert api.losses(run_id) == {0: 1.0}
        assert post(api, run_id, packed(FRAME)).json()["accepted"] == 1

    def test_is_refused_when_it_is_too_large(self, api, run_id):
        status, error, _ = problem(post(api, run_id, packed(FRAME, values=bytes(MAX_BODY_BYTES))))
        assert (status, error) == (413, "body_too_large")

    def test_cannot_make_much_of_little(self, api):
        """Arrays of a model without blocks take no bytes, and each is an object of the server."""
        run_id = api.register("no blocks", num_blocks=0)
        frames = [FRAME | {"seq": seq} for seq in range(300)]
        wide = {"layers": {f"m{i}": [0] for i in range(1000)}}
        status, error, detail = problem(post(api, run_id, packed(*frames, layouts=[wide], values=b"")))
        assert (status, error) == (413, "body_too_large")
        assert "at most 262144 metrics in all frames of a body, got 300000" in detail

    def test_whose_header_has_too_many_keys_is_refused(self, api, run_id):
        status, error, detail = problem(post(api, run_id, around(b":" * (2**18 + 1))))
        assert (status, error) == (413, "body_too_large")
        assert "keys" in detail

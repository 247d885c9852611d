import base64
import json
import math
import struct
import zlib
from dataclasses import replace

import pytest

from tsemon.wire import Alert, Array, Frame, crc_of, frames_to_body


class TestArray:
    def test_packs_little_endian_float32(self):
        assert Array.of([1.0, -2.5]).data == struct.pack("<2f", 1.0, -2.5)

    def test_keeps_nan_and_infinities(self):
        kept = Array.of([math.nan, math.inf, -math.inf]).tolist()
        assert math.isnan(kept[0])
        assert kept[1:] == [math.inf, -math.inf]

    def test_refuses_a_shape_of_another_size(self):
        with pytest.raises(ValueError, match=r"shape \(2, 2\) holds 4 values, got 3"):
            Array.of([1, 2, 3], (2, 2))


class TestFrame:
    frame = Frame(
        seq=17,
        step=800,
        time=1732100000.25,
        scalars={"loss": 2.31, "bad": math.nan, "worse": -math.inf},
        layers={"token_similarity": Array.of([0.5, 0.75])},
        heads={"attention_entropy": Array.of([0.1, 0.2], (1, 2))},
    )

    def test_reads_as_the_wire_format_says(self):
        obj = json.loads(self.frame.to_json())
        assert (obj["seq"], obj["step"], obj["time"]) == (17, 800, 1732100000.25)
        assert obj["scalars"] == {"loss": 2.31, "bad": None, "worse": "-Infinity"}
        assert obj["layers"]["token_similarity"]["shape"] == [2]
        assert base64.b64decode(obj["layers"]["token_similarity"]["f32"]) == struct.pack("<2f", 0.5, 0.75)
        assert obj["heads"]["attention_entropy"]["shape"] == [1, 2]

    def test_is_strict_json_even_with_nan(self):
        json.loads(self.frame.to_json(), parse_constant=lambda literal: pytest.fail(f"found {literal}"))

    def test_goes_into_a_body_unchanged(self):
        body = json.loads(frames_to_body('rank"0', 2, [self.frame.to_json()] * 2))
        assert body == {"writer": 'rank"0', "attempt": 2, "frames": [json.loads(self.frame.to_json())] * 2}


class TestTheCrcOfAFrame:
    frame = Frame(
        seq=17,
        step=800,
        time=1732100000.25,
        scalars={"loss": 2.31, "bad": math.nan, "a": -math.inf},
        layers={"token_similarity": Array.of([0.5, 0.75]), "grad_norm": Array.of([1.0])},
        heads={"attention_entropy": Array.of([0.1, 0.2], (1, 2))},
    )

    def test_is_of_the_bytes_that_the_wire_format_lists(self):
        names = "scalars a 1 1\nscalars bad 1 1\nscalars loss 1 1\n"
        names += "layers grad_norm 1 1\nlayers token_similarity 2 1\nheads attention_entropy 1 2\n"
        place = struct.pack("<qqd", 17, 800, 1732100000.25)
        values = struct.pack("<3d", -math.inf, math.nan, 2.31) + struct.pack("<5f", 1.0, 0.5, 0.75, 0.1, 0.2)
        assert crc_of(self.frame) == zlib.crc32(names.encode() + place + values)
        assert json.loads(self.frame.to_json())["crc"] == crc_of(self.frame)

    def test_is_the_same_in_every_version(self):
        assert crc_of(Frame(0, 0, 1.0, {"loss": 2.5})) == 931260237
        assert crc_of(Frame(0, 0, 1.0)) == zlib.crc32(struct.pack("<qqd", 0, 0, 1.0))

    @pytest.mark.parametrize(
        "change",
        [
            {"seq": 18},
            {"step": 801},
            {"time": 1732100000.5},
            {"scalars": frame.scalars | {"loss": 2.32}},
            {"scalars": {"lost" if name == "loss" else name: value for name, value in frame.scalars.items()}},
            {"layers": frame.layers | {"grad_norm": Array.of([1.5])}},
            {"heads": {"attention_entropy": Array.of([0.1, 0.2], (2, 1))}},
            {"layers": {}},
        ],
    )
    def test_is_another_where_anything_is(self, change):
        assert crc_of(replace(self.frame, **change)) != crc_of(self.frame)

    def test_does_not_depend_on_the_order_of_names_or_on_the_bits_of_a_nan(self):
        nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
        again = dict(reversed((self.frame.scalars | {"bad": nan}).items()))
        assert crc_of(replace(self.frame, scalars=again)) == crc_of(self.frame)


class TestAlert:
    def test_of_a_server_without_incidents_belongs_to_none(self):
        known = dict.fromkeys(Alert.__slots__, None)
        del known["incident_id"]
        assert Alert.from_json(known).incident_id is None
        assert Alert.from_json(known | {"incident_id": "7"}).incident_id == "7"

    def test_ignores_keys_of_a_newer_service(self):
        known = dict.fromkeys(Alert.__slots__, None)
        assert Alert.from_json(known | {"rule": "tse", "something_new": 1}).rule == "tse"

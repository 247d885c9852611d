import math
import struct
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsemon.errors import InvalidFrame
from tsemon.stacks import Stacks
from tsemon.wire import Array, Frame, crc_of
from tsemon_server.services.ingest import schemas
from tsemon_server.services.ingest.schemas import FrameBody, to_frame
from tsemon_server.store.series.packing import Layout, are_pages_sound, layout_id, pack, unpack

names = st.text("abcdefgh_/", max_size=8).map(lambda name: f"m{name}")
float32s = st.floats(width=32)
layers = st.lists(float32s, min_size=1, max_size=6).map(Array.of)
heads = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(float32s, min_size=width, max_size=width), min_size=1, max_size=3).map(
        lambda rows: Array.of([value for row in rows for value in row], (len(rows), width))
    )
)
frames = st.builds(
    Frame,
    seq=st.just(0),
    step=st.just(0),
    time=st.just(0.0),
    scalars=st.dictionaries(names, st.floats(), max_size=4),
    layers=st.dictionaries(names, layers, max_size=4),
    heads=st.dictionaries(names, heads, max_size=3),
)


def id_of(frame):
    return layout_id(pack(frame)[0].slots)


class TestABlob:
    @given(frames)
    def test_gives_back_every_bit(self, frame):
        layout, blob, _ = pack(frame)
        found = unpack(layout, blob)
        assert {name: struct.pack("<d", value) for name, value in found["scalars"].items()} == {
            name: struct.pack("<d", value) for name, value in frame.scalars.items()
        }
        for kind, sent in (("layers", frame.layers), ("heads", frame.heads)):
            assert {name: (values.shape, values.tobytes()) for name, values in found[kind].items()} == {
                name: (values.shape, values.data) for name, values in sent.items()
            }

    @given(frames)
    def test_holds_the_values_and_nothing_else(self, frame):
        layout, blob, _ = pack(frame)
        arrays = [*frame.layers.values(), *frame.heads.values()]
        assert len(blob) == 8 * len(frame.scalars) + 4 * sum(math.prod(values.shape) for values in arrays)
        assert sum(slot.size_bytes for slot in layout.slots) == layout.size_bytes == len(blob)

    def test_is_little_endian_scalars_first(self):
        frame = Frame(0, 0, 0.0, {"b": 2.0, "a": 1.0}, {"x": Array.of([3.0])}, {"x": Array.of([4.0], (1, 1))})
        assert pack(frame)[1] == struct.pack("<ddff", 1.0, 2.0, 3.0, 4.0)


class TestALayout:
    def test_is_shared_by_frames_of_the_same_shape_whatever_the_order_of_names(self):
        one = Frame(0, 0, 0.0, {"a": 1.0, "b": 2.0}, {"x": Array.of([1])})
        two = Frame(1, 1, 1.0, {"b": 3.0, "a": np.nan}, {"x": Array.of([7])})
        assert id_of(one) == id_of(two)

    def test_differs_where_a_shape_or_a_kind_does(self):
        ids = {
            id_of(frame)
            for frame in (
                Frame(0, 0, 0.0, {}, {"x": Array.of([1])}),
                Frame(0, 0, 0.0, {}, {"x": Array.of([1, 2])}),
                Frame(0, 0, 0.0, {}, {}, {"x": Array.of([1], (1, 1))}),
                Frame(0, 0, 0.0, {"x": 1.0}),
            )
        }
        assert len(ids) == 4

    def test_id_is_the_same_in_every_version(self):
        assert id_of(Frame(0, 0, 0.0, {"loss": 1.0}, {"x": Array.of([1, 2])})) == 5923813451827408593

    @given(frames)
    def test_is_the_same_from_slots_in_any_order(self, frame):
        """As a database may give them."""
        layout = pack(frame)[0]
        assert Layout.of(reversed(layout.slots)) == layout


def row_of(frame):
    """The row of the table `frame`."""
    layout, blob, crcs = pack(frame)
    return layout, SimpleNamespace(seq=frame.seq, step=frame.step, time=frame.time, blob=blob, crcs=crcs)


def altered(data, at, by=0x10):
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


class TestTheChecksumsOfAFrame:
    frame = Frame(
        7, 800, 1e9 + 0.25, {"loss": 2.5}, {"x": Array.of(range(100))}, {"y": Array.of(range(300), (100, 3))}
    )  # three pages and a bit

    @given(frames)
    def test_end_with_what_the_writer_has_sent(self, frame):
        """Whatever JSON makes of its numbers."""
        sent = FrameBody.model_validate_json(frame.to_json())
        with patch.object(schemas, "check_layers"), patch.object(schemas, "check_heads"):  # shapes are another matter
            received = to_frame(sent, Stacks.of(1))
        assert pack(received)[2][-4:] == struct.pack("<I", sent.crc) == struct.pack("<I", crc_of(frame))

    def test_find_every_byte_that_is_another(self):
        layout, row = row_of(self.frame)
        assert layout.is_sound(row)
        for column in ("blob", "crcs"):
            sound = getattr(row, column)
            for at in range(len(sound)):
                setattr(row, column, altered(sound, at))
                assert not layout.is_sound(row), (column, at)
            for at in range(1, len(sound)):
                setattr(row, column, altered(altered(sound, at - 1), at, 0xFF))
                assert not layout.is_sound(row), (column, at)
            setattr(row, column, sound)

    @pytest.mark.parametrize(("column", "value"), [("seq", 8), ("step", 801), ("time", 1e9)])
    def test_find_a_frame_in_another_place(self, column, value):
        layout, row = row_of(self.frame)
        setattr(row, column, value)
        assert not layout.is_sound(row)

    def test_find_a_name_or_a_shape_that_is_another(self):
        layout, row = row_of(self.frame)
        for old, new in ((layout.slots[0], {"metric": "less"}), (layout.slots[2], {"num_rows": 150, "num_columns": 2})):
            slots = [slot._replace(**new) if slot is old else slot for slot in layout.slots]
            assert not Layout.of(slots).is_sound(row)

    def test_check_any_of_its_pages_by_themselves(self):
        _, row = row_of(self.frame)
        num_pages = -(-len(row.blob) // 512)
        assert (num_pages, len(row.crcs)) == (4, 4 * 5)
        for first in range(num_pages):
            for end in range(first + 1, num_pages + 1):
                pages, crcs = row.blob[512 * first : 512 * end], row.crcs[4 * first : 4 * end + 4]
                changed = altered(pages, len(pages) // 2)
                assert are_pages_sound([pages, changed, pages], [crcs] * 3).tolist() == [True, False, True]
                assert are_pages_sound([pages], [crcs[:-1]]).tolist() == [False]
                assert are_pages_sound([pages], [altered(crcs, 1)]).tolist() == [False]

    def test_are_not_asked_of_a_frame_that_was_stored_before_there_were_any(self):
        layout, row = row_of(self.frame)
        row.crcs = None
        assert layout.is_sound(row)
        assert are_pages_sound([row.blob[:512]] * 2, [None] * 2).tolist() == [True, True]
        row.blob = row.blob[:-1]
        assert not layout.is_sound(row)

    def test_refuse_a_frame_of_which_the_writer_says_otherwise(self):
        crc = crc_of(self.frame)
        pack(replace(self.frame, crc=crc))
        with pytest.raises(InvalidFrame, match=rf"frame seq 7: crc must be {crc}, .* got {crc ^ 1}; the frame changed"):
            pack(replace(self.frame, crc=crc ^ 1))

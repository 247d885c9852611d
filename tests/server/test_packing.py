import math
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tsemon.wire import Array, Frame
from tsemon_server.store.series.packing import layout_id, pack, unpack

names = st.text("abcdefgh_/", min_size=1, max_size=8)
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


class TestABlob:
    @given(frames)
    def test_gives_back_every_bit(self, frame):
        found = unpack(*pack(frame))
        assert {name: struct.pack("<d", value) for name, value in found["scalars"].items()} == {
            name: struct.pack("<d", value) for name, value in frame.scalars.items()
        }
        for kind, sent in (("layers", frame.layers), ("heads", frame.heads)):
            assert {name: (values.shape, values.tobytes()) for name, values in found[kind].items()} == {
                name: (values.shape, values.data) for name, values in sent.items()
            }

    @given(frames)
    def test_holds_the_values_and_nothing_else(self, frame):
        slots, blob = pack(frame)
        arrays = [*frame.layers.values(), *frame.heads.values()]
        assert len(blob) == 8 * len(frame.scalars) + 4 * sum(math.prod(values.shape) for values in arrays)
        assert sum(slot.size_bytes for slot in slots) == len(blob)

    def test_is_little_endian_scalars_first(self):
        frame = Frame(0, 0, 0.0, {"b": 2.0, "a": 1.0}, {"x": Array.of([3.0])}, {"x": Array.of([4.0], (1, 1))})
        assert pack(frame)[1] == struct.pack("<ddff", 1.0, 2.0, 3.0, 4.0)


class TestALayout:
    def test_is_shared_by_frames_of_the_same_shape_whatever_the_order_of_names(self):
        one = Frame(0, 0, 0.0, {"a": 1.0, "b": 2.0}, {"x": Array.of([1])})
        two = Frame(1, 1, 1.0, {"b": 3.0, "a": np.nan}, {"x": Array.of([7])})
        assert layout_id(pack(one)[0]) == layout_id(pack(two)[0])

    def test_differs_where_a_shape_or_a_kind_does(self):
        ids = {
            layout_id(pack(frame)[0])
            for frame in (
                Frame(0, 0, 0.0, {}, {"x": Array.of([1])}),
                Frame(0, 0, 0.0, {}, {"x": Array.of([1, 2])}),
                Frame(0, 0, 0.0, {}, {}, {"x": Array.of([1], (1, 1))}),
                Frame(0, 0, 0.0, {"x": 1.0}),
            )
        }
        assert len(ids) == 4

    def test_id_is_the_same_in_every_version(self):
        assert layout_id(pack(Frame(0, 0, 0.0, {"loss": 1.0}, {"x": Array.of([1, 2])}))[0]) == 5923813451827408593

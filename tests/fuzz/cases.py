"""Bytes that others may send or leave behind: any, and those that are nearly right, where the trouble is."""

import json
import zlib
from math import prod

from hypothesis import strategies as st

from tsemon.wire import Array, Frame

NUMBERS = st.floats(width=32) | st.sampled_from([0, 1, -1, 2**53, -(2**53) - 1, 10**40, 1.8e308, 5e-324])
STEPS = st.integers(0, 2**53 - 1) | st.integers(0, 5)
METRICS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./:-]{0,10}", fullmatch=True)
NAMES = METRICS | st.sampled_from(["loss", "grad_norm"])
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["NaN", "AACAPw=="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def altered(draw, data, max_changes=4):
    """These bytes with some left out, put in, turned, doubled, or cut off."""
    data = bytearray(draw(data))
    for _ in range(draw(st.integers(0, max_changes))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 20)))
        match draw(st.sampled_from(["drop", "put", "turn", "double", "cut"])):
            case "drop":
                del data[start:end]
            case "put":
                data[start:start] = draw(st.binary(min_size=1, max_size=20) | st.sampled_from(AWKWARD))
            case "turn" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "double":
                data[end:end] = data[start:end]
            case "cut":
                del data[start:]
    return bytes(data)


AWKWARD = (b"\0", b"\xff", b"\xed\xa0\x80", b"[" * 5000, b'{"a":' * 2000, b"9" * 5000, b"NaN", b"-Infinity", b"1e999")


@st.composite
def arrays(draw, shapes):
    """Packed or plain, of one of these shapes; now and then of another, or of one and said to be of another."""
    is_right = draw(st.integers(0, 15)) > 0
    shape = draw(st.sampled_from(shapes) if is_right else st.lists(st.integers(0, 4), max_size=3))
    size = prod(shape)
    values = draw(st.lists(st.floats(width=32), min_size=size, max_size=size))
    if len(shape) != 2 and draw(st.booleans()):
        return [_plain(value) for value in values]
    if len(shape) == 2 and draw(st.booleans()):
        return [
            [_plain(value) for value in values[start : start + shape[1]]] for start in range(0, size, shape[1] or 1)
        ]
    packed = json.loads(Frame(0, 0, 0.0, {}, {"x": Array.of(values)}).to_json())["layers"]["x"]
    others = st.sampled_from([*shapes, []]) | st.lists(st.integers(-1, 2**70), max_size=3)
    return {"shape": shape if draw(st.integers(0, 7)) else draw(others), "f32": packed["f32"]}


def _plain(value):
    if value != value:
        return None
    return {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)


@st.composite
def bodies(draw):
    """Bodies of frames of a model of two blocks: right more often than not, and JSON."""
    layers, heads = arrays([[2], [3]]), arrays([[2, 1], [2, 3]])
    frames = [
        {
            "seq": draw(STEPS),
            "step": draw(STEPS),
            "time": draw(st.floats(0, 2e9) | st.integers(0, 2**53)),
            "scalars": draw(st.dictionaries(NAMES, NUMBERS.map(_plain), max_size=3)),
            "layers": draw(st.dictionaries(METRICS, layers, max_size=2)),
            "heads": draw(st.dictionaries(METRICS, heads, max_size=1)),
        }
        for _ in range(draw(st.integers(0, 3)))
    ]
    body = {"writer": "w", "attempt": 1, "frames": frames}
    if not draw(st.integers(0, 3)):
        _replace_somewhere(draw, body)
    return json.dumps(body).encode()


@st.composite
def replaced(draw, data):
    """JSON with anything else in place of something in it."""
    data = json.loads(json.dumps(draw(data)))
    _replace_somewhere(draw, data)
    return data


def _replace_somewhere(draw, node):
    """Anything else in place of something."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not draw(st.integers(0, 3)):
            if isinstance(node, dict) and draw(st.booleans()):
                node[draw(st.text(max_size=8))] = node.pop(key)
            else:
                node[key] = draw(ANY_JSON)
            return
        node = node[key]


BODIES = bodies() | altered(bodies()) | st.binary(max_size=300)


def record(payload, flag=0):
    """As it stood in a segment of a spool before segments were compressed, and as what is short still does."""
    return (len(payload) | flag).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def compressed_record(payload):
    return record(zlib.compress(payload, 1), flag=1 << 31)


FRAME = st.builds(lambda seq, step: Frame(seq, step, 1e9, {"loss": 1.0}).to_json().encode(), STEPS, STEPS)
PAYLOADS = st.lists(FRAME | st.binary(min_size=1, max_size=40), max_size=5)

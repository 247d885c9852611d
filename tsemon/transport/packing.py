"""Makes packed bodies of frames: `docs/wire.md` describes them byte by byte."""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from tsemon.wire import PACKED_MAGIC, parted


def pack_frames(writer: str, attempt: int, texts: Iterable[str]) -> bytes:
    """The packed body for frames and rows that are JSON already, as `Frame.to_json` and `Rows.to_json` make it.

    Raises ValueError, LookupError, TypeError, AttributeError or OverflowError for frames of another form, such as lists of
    numbers.
    """
    layouts: dict[tuple[Any, ...], int] = {}
    rows: list[dict[str, Any]] = []
    values: list[bytes] = []
    frames, history = parted(texts)
    for text in frames:
        frame: dict[str, Any] = json.loads(text)
        scalars, layers, heads = (frame.pop(kind) for kind in ("scalars", "layers", "heads"))
        layout = tuple(scalars), _shapes(layers), _shapes(heads)
        rows.append({"layout": layouts.setdefault(layout, len(layouts)), **frame})
        values.append(struct.pack(f"<{len(scalars)}d", *(_float(value) for value in scalars.values())))
        values += [binascii.a2b_base64(array["f32"]) for arrays in (layers, heads) for array in arrays.values()]
    body = {
        "writer": writer,
        "attempt": attempt,
        "layouts": [
            {"scalars": scalars, "layers": dict(layers), "heads": dict(heads)} for scalars, layers, heads in layouts
        ],
        "frames": rows,
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    header = (f'{text[:-1]},"history":[{",".join(history)}]}}' if history else text).encode()
    return b"".join([PACKED_MAGIC, struct.pack("<I", len(header)), header, *values])


def _shapes(arrays: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(array["shape"])) for name, array in arrays.items())


def _float(value: float | str | None) -> float:
    return float("nan") if value is None else float(value)

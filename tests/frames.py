"""Reading what monitors wrote to a folder."""

import base64
import json
from array import array

from tsemon.transport import SpoolReader, find_spools
from tsemon.wire import is_rows


def frames_in(folder):
    """The frames that monitors wrote to this folder, in order."""
    return [json.loads(text) for text in _texts_in(folder) if not is_rows(text)]


def rows_in(folder):
    """The rows of scalars beside them: step and scalars of each."""
    rows = [json.loads(text)["history"] for text in _texts_in(folder) if is_rows(text)]
    return [
        (step, {name: column[index] for name, column in some["scalars"].items()})
        for some in rows
        for index, step in enumerate(some["step"])
    ]


def scalars_in(folder, name):
    """The values of a scalar that monitors wrote to this folder, in frames and rows, by step."""
    found = [(frame["step"], frame["scalars"]) for frame in frames_in(folder)] + rows_in(folder)
    return {step: scalars[name] for step, scalars in sorted(found, key=lambda row: row[0]) if name in scalars}


def _texts_in(folder):
    for path in find_spools(folder):
        for texts in SpoolReader(path).new_texts():
            yield from texts


def values_of(frame, metric, group="layers"):
    values = array("f")
    values.frombytes(base64.b64decode(frame[group][metric]["f32"]))
    return values.tolist()

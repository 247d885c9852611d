"""Reading what monitors wrote to a folder."""

import base64
import json
from array import array

from tsemon.transport import Spool, find_spools


def frames_in(folder):
    """What the monitors that wrote to this folder delivered there, in order."""
    frames = []
    for path in find_spools(folder):
        spool = Spool.open(path)
        while (batch := spool.next_batch()) is not None:
            frames += [json.loads(frame) for frame in batch.frames]
            spool.acknowledge(batch.ends[-1])
        spool.close()
    return frames


def values_of(frame, metric, group="layers"):
    values = array("f")
    values.frombytes(base64.b64decode(frame[group][metric]["f32"]))
    return values.tolist()

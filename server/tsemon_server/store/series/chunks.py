"""How the settled samples of one metric are packed, and the two rollups beside them.

Samples and fine rollups are laid out so that like bytes come together (entry by entry, then all first bytes, all second
bytes, ...) and compressed by Zstandard with its checksum. The coarse rollup is plain, because a chart over a long run
reads one of every chunk; it has its CRC-32 in a column of its own.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from tsemon_server.store.series.cells import Cells, Floats, Ints, rolled_up
from tsemon_server.store.series.packing import Kind, item_bytes, item_type

FINE_BITS, COARSE_BITS = 4, 7
"""A cell of a rollup has about 16 or about 128 samples."""
_LEVEL = 3
_SPAN_BYTES = 3 * 8


class DamagedChunk(Exception):
    """What is stored cannot be what was written."""


class PackedChunk(NamedTuple):
    """The columns of a chunk that hold values."""

    num_samples: int
    first_step: int
    last_step: int
    coarse_shift: int
    fine_shift: int
    coarse_crc: int
    coarse_cells: bytes
    coarse: bytes
    fine: bytes
    samples: bytes


def pack_chunk(kind: Kind, steps: Ints, values_CE: Floats) -> PackedChunk:
    """Pack samples whose steps never fall."""
    num_samples, (first, last) = len(steps), (int(steps[0]), int(steps[-1]))
    # Cadences differ by a factor of 500, and rollups are to shrink all of them alike.
    bits_of_gap = max(0, round(np.log2((last - first + 1) / num_samples)))
    coarse = rolled_up(steps, values_CE, bits_of_gap + COARSE_BITS)
    fine = rolled_up(steps, values_CE, bits_of_gap + FINE_BITS)
    coarse_cells, coarse_stats = pack_coarse(coarse, kind)
    return PackedChunk(
        num_samples=num_samples,
        first_step=first,
        last_step=last,
        coarse_shift=bits_of_gap + COARSE_BITS,
        fine_shift=bits_of_gap + FINE_BITS,
        coarse_crc=crc_of(coarse_cells, coarse_stats),
        coarse_cells=coarse_cells,
        coarse=coarse_stats,
        fine=_compressed(_shuffled(fine.spans.T), _shuffled(_stored(fine.stats, kind).transpose(2, 1, 0))),
        samples=_compressed(pack_steps(steps), _shuffled(_stored(values_CE, kind).T)),
    )


def unpack_samples(blob: bytes, kind: Kind, num_samples: int, num_entries: int) -> tuple[Ints, Floats]:
    """Steps (C,) and values (C, E). Raises DamagedChunk."""
    width = item_bytes(kind)
    data = _exactly(num_samples * (8 + num_entries * width), blob)
    steps = unpack_steps(data[: 8 * num_samples])
    values = _unshuffled(data[8 * num_samples :], item_type(kind)).reshape(num_entries, num_samples)
    return steps, values.T


def unpack_fine(blob: bytes, kind: Kind, num_samples: int, num_entries: int) -> Cells:
    """The cells of a fine rollup. Raises DamagedChunk."""
    cell_bytes = _SPAN_BYTES + 4 * num_entries * item_bytes(kind)
    data = _decompressed(blob, num_samples * cell_bytes)
    num_cells, rest = divmod(len(data), cell_bytes)
    if rest or not num_cells:
        raise DamagedChunk
    spans = _unshuffled(data[: _SPAN_BYTES * num_cells], np.dtype("<i8")).reshape(3, num_cells)
    stats = _unshuffled(data[_SPAN_BYTES * num_cells :], item_type(kind)).reshape(4, num_entries, num_cells)
    return Cells(spans.T, stats.transpose(2, 1, 0))


def pack_coarse(cells: Cells, kind: Kind) -> tuple[bytes, bytes]:
    """The spans and the values."""
    return cells.spans.astype("<i8").tobytes(), _stored(cells.stats, kind).tobytes()


def unpack_coarse(cells: bytes, stats: bytes, kind: Kind, num_entries: int) -> Cells:
    """The cells of coarse rollups, of one or of many chunks one after the other, that `crc_of` has found sound."""
    values: Floats = np.frombuffer(stats, item_type(kind))
    return Cells(np.frombuffer(cells, "<i8").reshape(-1, 3), values.reshape(-1, num_entries, 4))


def crc_of(coarse_cells: bytes, coarse: bytes) -> int:
    return zlib.crc32(coarse, zlib.crc32(coarse_cells))


class Frames(NamedTuple):
    """What is known of the frames of a segment besides their values; one entry per frame, in the order of steps."""

    seqs: Ints
    steps: Ints
    times: NDArray[np.float64]


def pack_frames(frames: Frames) -> bytes:
    return _compressed(*(pack_steps(part.view("<i8")) for part in frames))


def unpack_frames(blob: bytes, num_frames: int) -> Frames:
    """Raises DamagedChunk."""
    data = _exactly(3 * 8 * num_frames, blob)
    seqs, steps, times = (unpack_steps(data[8 * num_frames * part :][: 8 * num_frames]) for part in range(3))
    return Frames(seqs, steps, times.view("<f8"))


def pack_steps(steps: NDArray[Any]) -> bytes:
    """Integers by their differences, which are the same for most: they shrink to nothing."""
    return _shuffled(np.diff(steps.astype("<i8"), prepend=np.int64(0)))


def unpack_steps(data: bytes) -> Ints:
    steps: Ints = np.cumsum(_unshuffled(data, np.dtype("<i8")))
    return steps


def _stored(values: Floats, kind: Kind) -> Floats:
    with np.errstate(over="ignore"):  # never: they came as such numbers
        return values.astype(item_type(kind))


def _shuffled(values: NDArray[Any]) -> bytes:
    packed = np.ascontiguousarray(values)
    return packed.view(np.uint8).reshape(-1, packed.itemsize).T.tobytes()


def _unshuffled(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    rows = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(rows.T).view(dtype).reshape(-1)


def _compressed(*parts: bytes) -> bytes:
    return zstandard.ZstdCompressor(_LEVEL, write_checksum=True).compress(b"".join(parts))


def _exactly(size_bytes: int, blob: bytes) -> bytes:
    data = _decompressed(blob, size_bytes)
    if len(data) != size_bytes:
        raise DamagedChunk
    return data


def _decompressed(blob: bytes, most_bytes: int) -> bytes:
    """What was compressed, if it is at most so much: a damaged header can claim any size."""
    try:
        if not 0 <= zstandard.frame_content_size(blob) <= most_bytes:
            raise DamagedChunk
        return zstandard.ZstdDecompressor().decompress(blob)
    except zstandard.ZstdError as error:
        raise DamagedChunk from error

"""A spool that a killed trainer left, and that something has happened to since."""

import json
import struct
import zlib

import pytest

from tests.faults.counting import stored_frames
from tsemon.transport import find_spools, sync
from tsemon_client import Client


def records_of(segment):
    """The seq of each record with its place in the file, read as docs/delivery.md describes it."""
    data, start = segment.read_bytes(), 0
    while start < len(data):
        length, crc = struct.unpack_from("<II", data, start)
        is_compressed, length = length >= 1 << 31, length % (1 << 31)
        payload = data[start + 8 : start + 8 + length]
        if len(payload) < length:
            return  # torn by the kill
        assert zlib.crc32(payload) == crc
        frame = json.loads(zlib.decompress(payload) if is_compressed else payload)
        yield frame["seq"], start, start + 8 + length
        start += 8 + length


def flip(data, start, end):
    middle = (start + end) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def truncate(data, start, end):
    return data[: (start + end) // 2]


def fill_with_zeros(data, start, _end):
    return data[:start] + bytes(len(data) - start)


def flip_length(data, start, _end):
    return data[: start + 1] + b"\xff" + data[start + 2 :]


class TestADamagedSegment:
    @pytest.fixture
    def database(self, sqlite_file):
        return sqlite_file

    @pytest.mark.parametrize(
        "damage",
        [
            flip,
            truncate,
            *(pytest.param(damage, marks=pytest.mark.thorough) for damage in (fill_with_zeros, flip_length)),
        ],
    )
    def test_is_found_and_told_and_the_rest_is_delivered(self, service, train, tmp_path, damage):
        service.kill()
        trainer = train(service.url, segment_bytes=8192, frames_per_s=2000)
        trainer.await_made(200)
        trainer.kill()
        segments = sorted(trainer.folder.glob("*.seg"))
        assert len(segments) > 3
        records = list(records_of(segments[1]))
        lost = [seq for seq, *_ in records[10:]]
        _, start, end = records[10]
        left = [seq for segment in segments for seq, *_ in records_of(segment) if seq not in lost]
        segments[1].write_bytes(damage(segments[1].read_bytes(), start, end))

        service.start()
        (synced,) = sync(tmp_path / "spool", service.url)
        assert (synced.num_sent, synced.num_damaged, synced.error) == (len(left), 1, None)
        assert "1 damaged segments, what stood behind the damage is lost" in str(synced)
        assert stored_frames(service.database, "rank0") == left
        with Client(service.url) as client:
            assert client.find_run("gpt").num_frames == len(left)
        assert find_spools(tmp_path / "spool") == []

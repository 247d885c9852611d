import pytest

from tsemon_client import Connected, RunDeleted
from tsemon_client.live import LONGEST_PAUSE_S, Stream

READY = b"retry: 500\nevent: ready\ndata: {}\n\n"
DELETED = 'event: deleted\ndata: {"run_id": "é\u2028"}\n\n'.encode()


@pytest.fixture
def stream():
    return Stream(None)


def fed(stream, *parts):
    return [event for part in parts for event in stream.feed(part)]


class TestAStreamOfEvents:
    def test_is_the_same_wherever_it_is_cut_into_parts(self, stream):
        text = READY + b": alive\n\n" + DELETED
        expected = [Connected(), RunDeleted(run_id="é\u2028")]
        assert fed(stream, text) == expected
        assert fed(stream, *(bytes([byte]) for byte in text)) == expected
        assert fed(stream, text.replace(b"\n", b"\r\n")) == expected

    def test_forgets_what_was_cut_off_with_its_connection(self, stream):
        assert fed(stream, READY, DELETED[:-1]) == [Connected()]
        stream.pause_s()
        assert fed(stream, b"\n", READY) == [Connected()]

    def test_leaves_out_what_it_cannot_read(self, stream):
        newer = b'event: weather\ndata: {}\n\nevent: deleted\ndata: {"id": 1}\n\nevent: run\ndata: {"run_id": \n\n'
        assert fed(stream, newer, b"data: {}\n\n", DELETED) == [RunDeleted(run_id="é\u2028")]

    def test_comes_back_after_longer_and_longer_until_it_speaks(self, stream):
        fed(stream, READY)
        for _ in range(2):
            pauses = [stream.pause_s() for _ in range(4)]
            assert all(0.25 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(pauses))
            fed(stream, READY)
        assert max(stream.pause_s() for _ in range(20)) <= LONGEST_PAUSE_S
        fed(stream, b"retry: 99999999\n")
        fed(stream, DELETED)
        assert stream.pause_s() <= LONGEST_PAUSE_S

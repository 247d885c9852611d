import json
import math
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.cases import METRICS, STEPS
from tsemon.errors import ServerRefused, UnknownRun
from tsemon.transport import HttpDelivery, MemorySpool
from tsemon.transport.courier import Courier
from tsemon.transport.packing import pack_frames
from tsemon.wire import HISTORY, MAX_ROWS, PACKED, Array, Frame, Rows, frames_to_body

from .conftest import unpacked

ARRAYS = st.lists(st.floats(width=32), max_size=4).map(Array.of)
FRAMES = st.builds(
    Frame,
    STEPS,
    STEPS,
    st.floats(0, 2e9),
    st.dictionaries(METRICS, st.floats(), max_size=3),
    st.dictionaries(METRICS, ARRAYS, max_size=3),
    st.dictionaries(METRICS, ARRAYS.map(lambda array: Array((1, *array.shape), array.data)), max_size=2),
    st.none() | st.dictionaries(METRICS, st.text(max_size=5), max_size=2),
)
REFUSED = {"error": "invalid_frame", "detail": "expected JSON"}


class TestPackedFrames:
    @given(st.lists(FRAMES, max_size=4))
    def test_are_those_of_the_json_body(self, frames):
        texts = [frame.to_json() for frame in frames]
        assert unpacked(pack_frames("w", 3, texts)) == json.loads(frames_to_body("w", 3, texts))

    def test_of_one_shape_share_their_layout(self):
        texts = [Frame(seq, seq, 1.0, {"loss": 2.0}).to_json() for seq in range(50)]
        one, more = (pack_frames("w", 1, texts[:count]) for count in (1, 50))
        assert more.count(b"loss") == one.count(b"loss") == 1


@pytest.fixture
def courier(peer, registration):
    with closing(HttpDelivery(peer.url, timeout_s=20)) as delivery:
        yield Courier(delivery, registration(), "rank0")


@pytest.fixture
def spool(registration):
    return MemorySpool(registration(), "rank0")


def fill(spool, *seqs):
    for seq in seqs:
        layers = {"token_similarity": Array.of([0.5, math.nan])}
        spool.append(Frame(seq, seq, 1.0, {"loss": math.inf}, layers, not_measured={"a": "b"}).to_json())


def kinds(peer):
    """The content types of the bodies of frames so far."""
    sent = zip(peer.requests, peer.headers, strict=True)
    return [headers["Content-Type"] for request, headers in sent if request.endswith("/frames")]


class TestACourier:
    def test_sends_packed_bodies_to_a_server_that_reads_them(self, peer, courier, spool):
        peer.accepts = ["application/json", PACKED]
        fill(spool, 0, 1)
        courier.send_next(spool)
        assert (kinds(peer), peer.seqs(), courier.num_sent) == ([PACKED], [0, 1], 2)

    @pytest.mark.parametrize("accepts", [None, [], ["application/json"], "all", 5, {PACKED: 1}, [None, {}]])
    def test_sends_json_to_any_other(self, peer, courier, spool, accepts):
        peer.accepts = accepts
        fill(spool, 0)
        courier.send_next(spool)
        assert (kinds(peer), peer.seqs()) == (["application/json"], [0])

    @pytest.mark.parametrize("accepts", [[HISTORY], [HISTORY, PACKED]])
    def test_sends_rows_in_their_order_with_frames(self, peer, courier, spool, accepts):
        peer.accepts = accepts
        spool.append(Rows(0, [1, 2], [1.0, 2.0], {"loss": [0.5, 0.25]}).to_json())
        fill(spool, 0)
        courier.send_next(spool)
        assert (peer.seqs(), courier.num_sent) == ([0], 1)
        assert peer.rows == [{"seq": 0, "step": [1, 2], "time": [1.0, 2.0], "scalars": {"loss": [0.5, 0.25]}}]
        assert spool.is_drained

    def test_leaves_rows_out_for_a_server_that_does_not_take_them_and_says_so_once(self, peer, spool, registration):
        peer.accepts, told = [PACKED], []
        courier = Courier(HttpDelivery(peer.url), registration(), "w", on_warning=told.append)
        for seq in range(3):
            spool.append(Rows(seq, [seq], [1.0], {"loss": [0.5]}).to_json())
            courier.send_next(spool)
        fill(spool, 0)
        courier.send_next(spool)
        assert (peer.rows, peer.seqs(), spool.is_drained, len(told)) == ([], [0], True, 1)
        assert "scalars of sampled steps only" in told[0]

    def test_sends_few_rows_at_a_time(self, peer, courier, spool):
        peer.accepts = [HISTORY]
        for seq in range(0, 20_000, 250):
            steps = list(range(seq, seq + 250))
            spool.append(Rows(seq, steps, [1.0] * 250, {"a": [0.5] * 250}).to_json())
        while courier.send_next(spool):
            pass
        counts = [sum(len(rows["step"]) for rows in json.loads(body)["history"]) for body in peer.bodies[1:]]
        assert sum(counts) == 20_000
        assert 3000 < max(counts) <= MAX_ROWS

    @pytest.mark.parametrize("status", [400, 415, 422])
    def test_sends_json_from_then_on_if_a_packed_body_is_refused(self, peer, courier, spool, status):
        peer.accepts = [PACKED]
        peer.faults.append((status, REFUSED, {}))
        fill(spool, 0, 1, 2)
        courier.send_next(spool)
        assert (kinds(peer), peer.seqs()) == ([PACKED, "application/json"], [0, 1, 2])
        fill(spool, 3)
        courier.send_next(spool)
        assert kinds(peer)[2:] == ["application/json"]
        assert (peer.seqs(), courier.num_refused) == ([0, 1, 2, 3], 0)

    def test_sends_no_json_if_the_refusal_is_not_about_the_body(self, peer, courier, spool):
        peer.accepts = [PACKED]
        peer.faults.append((403, {"error": "forbidden", "detail": "this token may not write"}, {}))
        fill(spool, 0)
        with pytest.raises(ServerRefused):
            courier.send_next(spool)
        assert kinds(peer) == [PACKED]
        courier.send_next(spool)
        assert (kinds(peer), peer.seqs()) == ([PACKED, PACKED], [0])

    def test_sends_packed_bodies_again_after_a_frame_that_is_refused_either_way(self, peer, courier, spool):
        peer.accepts = [PACKED]
        peer.faults.extend([(422, REFUSED, {})] * 4)
        fill(spool, 0)
        courier.send_next(spool)
        fill(spool, 1)
        courier.send_next(spool)
        assert kinds(peer) == [PACKED, "application/json"] * 2 + [PACKED]
        assert (peer.seqs(), courier.num_refused) == ([1], 1)

    def test_asks_again_when_it_registers_again(self, peer, courier, spool):
        courier.register()
        peer.runs.clear()
        peer.accepts = [PACKED]
        fill(spool, 0)
        with pytest.raises(UnknownRun):
            courier.send_next(spool)
        courier.send_next(spool)
        assert kinds(peer) == ["application/json", PACKED]

    @pytest.mark.parametrize(
        "text",
        ['{"seq": 0, "step": 0, "time": 1, "layers": {"x": [1.5]}, "scalars": {}, "heads": {}}',
         '{"seq": 0, "step": 0, "time": 1, "scalars": {"loss": 1}}',
         f'{{"seq": 0, "step": 0, "time": 1, "scalars": {{"loss": 1{"0" * 400}}}, "layers": {{}}, "heads": {{}}}}'],
    )  # fmt: skip
    def test_sends_frames_of_another_client_as_they_are(self, peer, courier, spool, text):
        peer.accepts = [PACKED]
        spool.append(text)
        courier.send_next(spool)
        assert (kinds(peer), peer.seqs()) == (["application/json"], [0])

"""Chunks give back what was packed, or say that they are damaged."""

import logging
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tsemon_server.store import Store
from tsemon_server.store.series import chunks
from tsemon_server.store.series.cells import Cells, joined, merged, of_samples, rolled_up, smallest_shift, starts_of
from tsemon_server.store.series.chunks import DamagedChunk, Frames, pack_chunk, pack_frames, unpack_frames
from tsemon_server.store.series.settling import Sizes

from .conftest import loss_frame

MAX_STEP = 2**53 - 1
steps = st.lists(st.integers(0, MAX_STEP) | st.integers(0, 50), min_size=1, max_size=30).map(sorted)
bits = st.integers(0, 2**32 - 1) | st.sampled_from([0x7FC00001, 0xFF800001, 0x7F800000, 0xFF800000, 1, 0x80000000])
"""Any float32: also signalling NaN, both infinities, the smallest subnormal and -0."""


def values_of(data, num_samples, num_entries):
    size = num_samples * num_entries
    drawn = data.draw(st.lists(bits, min_size=size, max_size=size))
    return np.array(drawn, np.uint32).view("<f4").reshape(num_samples, num_entries)


def a_chunk(kind="layers", num_samples=40, num_entries=3):
    random = np.random.default_rng(0)
    values = random.normal(size=(num_samples, num_entries)).astype("<f8" if kind == "scalars" else "<f4")
    return pack_chunk(kind, np.cumsum(random.integers(1, 40, num_samples)), values)


def damages(blob):
    """Each byte changed in three ways, each end cut, and what is no compressed data at all."""
    for at in range(len(blob)):
        for flip in (1, 0x80, 0xFF):
            yield blob[:at] + bytes([blob[at] ^ flip]) + blob[at + 1 :]
        yield blob[:at]
    yield from (bytes(50), b"\xff" * 50, blob[::-1])


class TestTheSamplesOfAChunk:
    @given(steps, st.integers(1, 4), st.data())
    def test_come_back_to_the_last_bit(self, steps, num_entries, data):
        values = values_of(data, len(steps), num_entries)
        packed = pack_chunk("layers", np.array(steps), values)
        found_steps, found = chunks.unpack_samples(packed.samples, "layers", len(steps), num_entries)
        assert found_steps.tolist() == steps
        assert found.tobytes() == values.tobytes()

    @given(steps, st.data())
    def test_come_back_to_the_last_bit_of_float64(self, steps, data):
        drawn = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(steps), max_size=len(steps)))
        values = np.array(drawn, np.uint64).view("<f8")[:, None]
        packed = pack_chunk("scalars", np.array(steps), values)
        assert chunks.unpack_samples(packed.samples, "scalars", len(steps), 1)[1].tobytes() == values.tobytes()

    def test_are_the_same_or_told_to_be_damaged_wherever_a_byte_is(self):
        packed = a_chunk(num_samples=12)
        expected = chunks.unpack_samples(packed.samples, "layers", 12, 3)
        num_told = 0
        for damaged in damages(packed.samples):
            try:
                found = chunks.unpack_samples(damaged, "layers", 12, 3)
            except DamagedChunk:
                num_told += 1
            else:
                assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]
        # The rest are bits that mean nothing, and the flag that a checksum follows.
        assert num_told >= 4 * len(packed.samples) - 12

    def test_are_not_unpacked_into_more_memory_than_they_need(self):
        bomb = chunks._compressed(bytes(2**26))
        for unpack in (chunks.unpack_samples, chunks.unpack_fine):
            with pytest.raises(DamagedChunk):
                unpack(bomb, "layers", 512, 3)

    @example(b"\x28\xb5\x2f\xfd \x00")  # nothing, well compressed
    @given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda data: b"\x28\xb5\x2f\xfd" + data))
    @settings(max_examples=300)
    def test_are_not_found_in_what_is_none(self, data):
        for unpack in (chunks.unpack_samples, chunks.unpack_fine):
            with pytest.raises(DamagedChunk):
                unpack(data, "heads", 512, 12)


class TestTheRollupsOfAChunk:
    @given(steps, st.integers(1, 3), st.data())
    def test_are_those_of_its_samples(self, steps, num_entries, data):
        values = values_of(data, len(steps), num_entries)
        packed = pack_chunk("layers", np.array(steps), values)
        fine = chunks.unpack_fine(packed.fine, "layers", len(steps), num_entries)
        coarse = chunks.unpack_coarse(packed.coarse_cells, packed.coarse, "layers", num_entries)
        for found, shift in ((fine, packed.fine_shift), (coarse, packed.coarse_shift)):
            expected = rolled_up(np.array(steps), values, shift)
            np.testing.assert_array_equal(found.spans, expected.spans)
            np.testing.assert_array_equal(found.stats, expected.stats.astype("<f4"))
            assert len(set(found.spans[:, 0] >> shift)) == len(found.spans)
            assert ((found.spans[:, 0] >> shift) == (found.spans[:, 1] >> shift)).all()

    @pytest.mark.parametrize("stride", [1, 2, 50, 500, 2**40])
    def test_shrink_every_cadence_alike(self, stride):
        packed = pack_chunk("scalars", stride * np.arange(512), np.zeros((512, 1)))
        assert 20 <= len(chunks.unpack_fine(packed.fine, "scalars", 512, 1).spans) <= 65
        assert 3 <= len(packed.coarse_cells) / 24 <= 9

    def test_are_the_same_or_told_to_be_damaged_wherever_a_byte_is(self):
        packed = a_chunk()
        expected = chunks.unpack_fine(packed.fine, "layers", 40, 3)
        for damaged in damages(packed.fine):
            try:
                found = chunks.unpack_fine(damaged, "layers", 40, 3)
            except DamagedChunk:
                continue
            assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]

    def test_have_another_checksum_wherever_a_byte_is_damaged(self):
        packed = a_chunk()
        for damaged in damages(packed.coarse):
            assert chunks.crc_of(packed.coarse_cells, damaged) != packed.coarse_crc
        for damaged in damages(packed.coarse_cells):
            assert chunks.crc_of(damaged, packed.coarse) != packed.coarse_crc


class TestTheFramesOfASegment:
    @given(st.lists(st.tuples(st.integers(0, MAX_STEP), st.integers(0, MAX_STEP), st.floats(0, 1e12)), min_size=1))
    def test_come_back_to_the_last_bit(self, rows):
        seqs, steps, times = zip(*rows, strict=True)
        frames = Frames(np.array(seqs), np.array(steps), np.array(times, "<f8"))
        found = unpack_frames(pack_frames(frames), len(rows))
        assert [part.tobytes() for part in found] == [part.tobytes() for part in frames]

    def test_are_told_to_be_damaged_where_they_are_too_few(self):
        frames = Frames(np.arange(3), np.arange(3), np.zeros(3))
        with pytest.raises(DamagedChunk):
            unpack_frames(pack_frames(frames), 4)


def samples(*rows):
    """Cells of (step, value, ...)."""
    array = np.array(rows, np.float64)
    return of_samples(array[:, 0].astype(np.int64), array[:, 1:])


class TestCells:
    def test_of_samples_have_no_value_where_a_sample_is_not_finite(self):
        cells = samples((3, 1.5, math.nan), (4, math.inf, -2.0))
        assert cells.spans.tolist() == [[3, 3, 1], [4, 4, 1]]
        np.testing.assert_array_equal(cells.stats[0], [[1.5, 1.5, 1.5, 1], [math.nan] * 3 + [0]])
        np.testing.assert_array_equal(cells.stats[1], [[math.nan] * 3 + [0], [-2, -2, -2, 1]])

    def test_of_cells_weigh_means_by_finite_values(self):
        halves = merged(samples((0, 1.0), (1, 2.0), (2, 6.0), (3, math.nan)), np.array([0, 3]))
        whole = merged(halves, np.array([0]))
        assert whole.spans.tolist() == [[0, 3, 4]]
        assert whole.stats.tolist() == [[[1.0, 3.0, 6.0, 3.0]]]

    @pytest.mark.parametrize("values", [[2.0**1023] * 4, [2.0**1023] * 3 + [-(2.0**1023)]])
    def test_have_the_mean_of_values_whose_sum_is_too_large_for_a_number(self, values):
        cells = merged(samples(*enumerate(values)), np.array([0]))
        assert cells.stats[0, 0].tolist() == [min(values), sum(value / 4 for value in values), max(values), 4]

    def test_of_parts_are_in_the_order_of_steps_and_have_no_value_where_a_part_is_narrower(self):
        cells = joined([samples((5, 1.0)), samples((4, 2.0, 3.0), (6, 4.0, 5.0))])
        assert cells.spans[:, 0].tolist() == [4, 5, 6]
        np.testing.assert_array_equal(cells.stats[:, :, 1], [[2, 3], [1, math.nan], [4, 5]])
        assert cells.stats[:, :, 3].tolist() == [[1, 1], [1, 0], [1, 1]]

    def test_of_parts_are_as_wide_as_the_widest_that_has_any(self):
        nothing = Cells(np.empty((0, 3), np.int64), np.empty((0, 7, 4)))
        assert joined([nothing, samples((5, 1.0, 2.0))]).stats.shape == (1, 2, 4)
        assert joined([nothing]).stats.shape == (0, 1, 4)

    @given(st.lists(st.integers(0, 3), max_size=20).map(sorted))
    def test_start_where_an_id_is_new(self, ids):
        expected = [index for index, number in enumerate(ids) if number not in ids[:index]]
        assert starts_of(np.array(ids, np.int64)).tolist() == expected


class TestTheGridOfSteps:
    @given(st.integers(0, MAX_STEP), st.integers(0, MAX_STEP), st.integers(1, 10_000))
    def test_is_the_finest_with_few_enough_spans(self, one, other, most):
        first, last = sorted((one, other))
        shift = smallest_shift(first, last, most)
        assert (last >> shift) - (first >> shift) < most
        assert shift == 0 or (last >> shift - 1) - (first >> shift - 1) >= most


LEVELS = ("samples", "fine", "coarse", "coarse_cells")


@pytest.fixture
def run_id(api):
    """1000 frames of two metrics; those but the last are settled, in three segments."""
    run_id = api.register()
    for start in (0, 500):
        api.send_ok(run_id, [loss_frame(step, loss=step) for step in range(start, start + 500)])
    api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
    store = Store(api.database.url)
    assert store.settle(sizes=Sizes(segment=400, kept=0)) == 3
    store.close()
    return run_id


@pytest.fixture
def damage(api, run_id):
    """Damage a byte of some columns of the second segment or its chunks, past the store."""

    def damage(table, *columns):
        for column in columns:
            where = f"FROM {table} WHERE number = 1"
            blob = bytearray(api.database.execute(f"SELECT {column} {where}")[0][0])
            blob[len(blob) // 2] ^= 0x10
            api.database.execute(f"UPDATE {table} SET {column} = :blob WHERE number = 1", blob=bytes(blob))

    return damage


class TestADamagedChunk:
    @pytest.fixture(autouse=True)
    def _log(self, caplog):
        self.log = caplog
        caplog.set_level(logging.ERROR)

    def logged(self):
        found = [record.getMessage().split(" of ")[0] for record in self.log.records]
        self.log.clear()
        return found

    @pytest.mark.parametrize("points", [10_000, 100, 10])
    def test_is_left_out_and_counted_and_told_where_nothing_of_it_can_be_read(self, api, run_id, damage, points):
        damage("chunk", *LEVELS)
        series = api.get(f"/runs/{run_id}/series", metric="loss", points=points)
        assert series["damaged"] == 400
        assert (series["min"][0], series["max"][-1]) == (0, 999)
        assert not any(400 <= step < 800 for step in series["step"] if points > 10)
        assert self.logged().count("the samples") == 1

    @pytest.mark.parametrize(("points", "level"), [(10_000, "samples"), (100, "fine"), (10, "coarse")])
    @pytest.mark.parametrize("num_damaged_levels", [1, 2])
    def test_is_answered_from_another_level(self, api, run_id, damage, points, level, num_damaged_levels):
        before = api.get(f"/runs/{run_id}/series", metric="loss", points=points)
        damaged = [level, *(other for other in ("samples", "fine") if other != level)][:num_damaged_levels]
        damage("chunk", *damaged)
        series = api.get(f"/runs/{run_id}/series", metric="loss", points=points)
        assert series["damaged"] == 0
        assert (min(series["min"]), max(series["max"])) == (0, 999)
        assert self.logged() == [f"the {name}" for name in damaged]
        if level != "samples" and num_damaged_levels == 1:
            assert series == before

    def test_does_not_count_what_was_not_asked_for(self, api, run_id, damage):
        damage("chunk", *LEVELS)
        assert api.get(f"/runs/{run_id}/series", metric="loss", to_step=399)["damaged"] == 0
        assert self.logged() == []

    def test_counts_what_its_rollup_cannot_tell_apart_from_what_was_not_asked_for(self, api, run_id, damage):
        damage("chunk", "samples")
        series = api.get(f"/runs/{run_id}/series", metric="loss", from_step=500, to_step=600)
        assert series["damaged"] == 16 + 16  # one cell has the steps 496 to 511, one 592 to 607
        assert (min(series["min"]), max(series["max"])) == (512, 591)

    def test_leaves_its_metric_out_of_the_newest_frame(self, api, run_id, damage):
        damage("chunk", "samples")
        api.register(resume_step=600)
        assert api.get(f"/runs/{run_id}")["latest"] == {"step": 599, "time": 1599.0, "scalars": {}}


class TestADamagedSegment:
    def test_is_passed_over_by_a_run_that_goes_back_to_it(self, api, run_id, damage, caplog):
        damage("segment", "frames")
        api.register(resume_step=600)
        run = api.get(f"/runs/{run_id}")
        assert (run["last_step"], run["latest"]["scalars"]) == (399, {"loss": 399.0})
        assert "the list of frames of run" in caplog.text
        assert api.losses(run_id, points=10_000) == {step: step for step in range(600)}

    def test_does_not_make_its_frames_forgotten(self, api, run_id, damage):
        damage("segment", "frames")
        assert api.send_ok(run_id, [loss_frame(step) for step in range(1000)])["duplicates"] == 1000

    def test_hides_nothing_of_the_newest_frame_that_was_noted_before(self, api, run_id, damage):
        api.register(resume_step=600)
        damage("segment", "frames")
        assert api.get(f"/runs/{run_id}")["latest"] == {"step": 599, "time": 1599.0, "scalars": {"loss": 599.0}}

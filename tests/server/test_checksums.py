"""A frame whose row has changed since it was written is never shown as a number, on whichever way it is read."""

import json

import pytest

from tsemon.wire import Array, Frame
from tsemon_server.store import Store
from tsemon_server.store.series.settling import Sizes

from .conftest import problem
from .test_metrics import of_run

STEPS = range(0, 200, 10)
NUM_BLOCKS, NUM_HEADS = 2, 4
MANY = {f"scalar_{number:02}": float(number) for number in range(80)}
FIRST_PAGE, SECOND_PAGE = 3, 600
"""Places in the blob: in the loss, which comes first, and in the arrays, which come after 81 scalars."""


def frame_at(step):
    return Frame(
        step // 10,
        step,
        1000.0 + step,
        {"loss": 1.0 + step} | MANY,
        {"token_diversity": Array.of([0.5] * (NUM_BLOCKS + 1))},
        {"attention_entropy": Array.of([0.25] * NUM_BLOCKS * NUM_HEADS, (NUM_BLOCKS, NUM_HEADS))},
    )


@pytest.fixture
def run_id(api):
    run_id = api.register(num_blocks=NUM_BLOCKS)
    api.send_ok(run_id, [frame_at(step) for step in STEPS])
    return run_id


@pytest.fixture
def store(api):
    store = Store(api.database.url)
    yield store
    store.close()


def flip(api, seq, at):
    """Change two bytes of a stored frame, past the store."""
    (blob,) = api.database.execute("SELECT blob FROM frame WHERE seq = :seq", seq=seq)[0]
    blob = bytearray(blob)
    assert len(blob) == 8 * 81 + 4 * 3 + 4 * 8
    for place in (at, at + 1):
        blob[place] ^= 0x41
    api.database.execute("UPDATE frame SET blob = :blob WHERE seq = :seq", blob=bytes(blob), seq=seq)


def findings(store):
    found = []
    (checked,) = store.check(found.append)
    return checked.num_hot, [f"{finding.where}: {finding.what}" for finding in found]


class TestADamagedFrame:
    @pytest.mark.both_engines  # each cuts pages out of blobs in its own way
    def test_is_no_point_of_a_series(self, api, run_id, caplog):
        flip(api, 7, FIRST_PAGE)
        series = api.get(f"/runs/{run_id}/series", metric="loss")
        assert (series["step"], series["damaged"]) == ([step for step in STEPS if step != 70], 1)
        assert series["mean"] == [1.0 + step for step in series["step"]]
        assert f"1 frames of run {run_id} are damaged" in caplog.text

    @pytest.mark.both_engines
    @pytest.mark.parametrize(
        "chosen", [{"metric": "token_diversity", "layer": 2}, {"metric": "attention_entropy", "layer": 1, "head": 3}]
    )
    def test_is_no_point_of_a_series_of_a_layer_or_a_head(self, api, run_id, chosen):
        flip(api, 7, 689 if "head" in chosen else 657)
        series = api.get(f"/runs/{run_id}/series", **chosen)
        assert (series["step"], series["damaged"]) == ([step for step in STEPS if step != 70], 1)

    @pytest.mark.both_engines
    def test_is_no_column_of_a_heat_map(self, api, run_id):
        flip(api, 7, SECOND_PAGE + 52)
        found = api.get(f"/runs/{run_id}/heatmap", metric="token_diversity")
        assert (found["step"], found["damaged"]) == ([step for step in STEPS if step != 70], 1)
        assert found["values"] == [[0.5] * 3] * 19

    def test_is_no_point_where_runs_are_compared(self, api, run_id):
        flip(api, 7, FIRST_PAGE)
        (run,) = api.get("/compare", run=[run_id], metric="loss")["runs"]
        assert (run["step"], run["damaged"]) == ([step for step in STEPS if step != 70], 1)

    def test_has_no_values_at_its_step(self, api, run_id):
        flip(api, 7, SECOND_PAGE)
        found = api.get(f"/runs/{run_id}/frame", step=70)
        assert found["step"] == 70
        assert "0.5" not in json.dumps(found)
        assert api.get(f"/runs/{run_id}/frame", step=60)["scalars"]["loss"] == 61.0

    def test_is_no_row_of_an_export_which_says_so(self, api, run_id):
        flip(api, 7, SECOND_PAGE)
        header, *rows, missing = api.http.get(f"/api/v1/runs/{run_id}/export").text.splitlines()
        step = header.split(",").index("step")
        assert {int(row.split(",")[step]) for row in rows} == {*STEPS} - {70}
        assert missing == "# missing: 0 samples dropped by retention, 1 damaged"

    def test_has_no_values_where_rules_are_replayed(self, api, run_id):
        flip(api, 7, FIRST_PAGE)
        with api.app.state.parts.store.read() as reader:
            replay = reader.frames.export(run_id)
            assert [frame.step for frame in replay.frames() if "loss" in frame.scalars] == [s for s in STEPS if s != 70]
            assert replay.num_damaged == 1

    def test_changes_nothing_of_what_was_noted_as_the_newest(self, api, run_id):
        expected = api.get(f"/runs/{run_id}")["latest"]
        assert expected["scalars"]["loss"] == 191.0
        flip(api, len(STEPS) - 1, FIRST_PAGE)
        assert api.get(f"/runs/{run_id}")["latest"] == expected

    def test_has_no_values_where_a_run_goes_back_to_it(self, api, run_id):
        flip(api, 9, FIRST_PAGE)
        api.register(num_blocks=NUM_BLOCKS, resume_step=91)
        assert api.get(f"/runs/{run_id}")["latest"] == {"step": 90, "time": 1090.0, "scalars": {}}

    def test_is_not_on_the_page_for_prometheus(self, start, caplog):
        api = start(clock=lambda: 2000.0)
        run_id = api.register(num_blocks=NUM_BLOCKS)
        api.send_ok(run_id, [frame_at(step) for step in STEPS])
        assert of_run(api, run_id)["tsemon_run_loss",] == 191.0
        flip(api, len(STEPS) - 1, FIRST_PAGE)
        assert ("tsemon_run_loss",) not in of_run(api, run_id)
        assert f"a frame of run {run_id} is damaged" in caplog.text

    def test_is_not_in_the_list_of_runs(self, api, run_id):
        flip(api, len(STEPS) - 1, SECOND_PAGE)
        (glance,) = api.get("/glances", run=[run_id])["glances"]
        assert glance["worst"]["value"] == 0.5, "of the frame before it"

    @pytest.mark.both_engines
    def test_goes_into_no_chunk(self, api, store, run_id):
        flip(api, 7, SECOND_PAGE)
        assert store.settle(sizes=Sizes(segment=10, kept=0)) == 2
        series = api.get(f"/runs/{run_id}/series", metric="token_diversity", layer=0)
        assert (series["step"], series["damaged"]) == ([step for step in STEPS if step != 70], 1)
        assert findings(store) == (2, ["frames of attempt 1, writer w: 1 are damaged, the first is seq 7"])

    @pytest.mark.parametrize("at", [FIRST_PAGE, SECOND_PAGE, 690])
    def test_is_found_by_the_check(self, api, store, run_id, at):
        assert findings(store) == (20, [])
        flip(api, 7, at)
        assert findings(store) == (20, ["frames of attempt 1, writer w: 1 are damaged, the first is seq 7"])

    @pytest.mark.parametrize("change", ["step = 71", "time = 0", "layout_id = 1", "crcs = substr(crcs, 1, 4)"])
    def test_is_found_by_the_check_wherever_its_row_has_changed(self, api, store, run_id, change):
        api.database.execute(f"UPDATE frame SET {change} WHERE seq = 7")
        assert findings(store)[1] == ["frames of attempt 1, writer w: 1 are damaged, the first is seq 7"]
        assert store.settle(sizes=Sizes(segment=10, kept=0)) == 2
        assert api.database.execute("SELECT seq FROM frame WHERE seq = 7") == [(7,)]


class TestAFrameOfBeforeChecksumsWereKept:
    @pytest.mark.both_engines
    def test_is_as_good_as_ever(self, api, store, run_id):
        expected = api.losses(run_id)
        api.database.execute("UPDATE frame SET crcs = NULL WHERE seq % 3 > 0")
        assert api.losses(run_id) == expected
        assert api.get(f"/runs/{run_id}")["latest"]["scalars"]["loss"] == 191.0
        assert findings(store) == (20, [])
        assert store.settle(sizes=Sizes(segment=10, kept=0)) == 2
        assert api.losses(run_id) == expected


class TestTheChecksumThatComesWithAFrame:
    def test_is_the_one_that_is_stored(self, api, run_id):
        (crcs,) = api.database.execute("SELECT crcs FROM frame WHERE seq = 7")[0]
        assert int.from_bytes(bytes(crcs)[-4:], "little") == json.loads(frame_at(70).to_json())["crc"]

    def test_is_made_where_none_came(self, api, run_id):
        sent = json.loads(frame_at(200).to_json())
        crc = sent.pop("crc")
        body = json.dumps({"writer": "w", "attempt": 1, "frames": [sent]}).encode()
        assert api.post_raw(run_id, body).json()["accepted"] == 1
        (crcs,) = api.database.execute("SELECT crcs FROM frame WHERE seq = 20")[0]
        assert int.from_bytes(bytes(crcs)[-4:], "little") == crc

    def test_may_be_written_with_a_fraction_of_zero(self, api, run_id):
        sent = json.loads(frame_at(200).to_json())
        sent["crc"] = float(sent["crc"])
        body = json.dumps({"writer": "w", "attempt": 1, "frames": [sent]})
        assert f'"crc": {sent["crc"]:.1f}' in body
        assert api.post_raw(run_id, body.encode()).json()["accepted"] == 1

    @pytest.mark.parametrize(
        ("sound", "altered"),
        [
            ('"seq":20', '"seq":22'),
            ('"step":200', '"step":208'),
            ('"time":1200.0', '"time":1200.5'),
            ('"loss":201.0', '"loss":201.5'),
            ('"loss"', '"lost"'),
            ('"token_diversity"', '"token_similarity"'),
            ('"f32":"AAAAPw', '"f32":"AAAAPg'),
            ('"scalar_79":79.0', '"scalar_79":null'),
        ],
    )
    def test_refuses_a_frame_that_was_altered_on_its_way_and_stores_nothing_of_its_body(
        self, api, run_id, sound, altered
    ):
        text = frame_at(200).to_json()
        assert sound in text
        frames = ",".join((frame_at(210).to_json(), text.replace(sound, altered, 1)))
        body = f'{{"writer":"w","attempt":1,"frames":[{frames}]}}'.encode()
        status, error, detail = problem(api.post_raw(run_id, body))
        assert (status, error) == (422, "invalid_frame")
        assert "the frame changed on its way" in detail
        assert api.get(f"/runs/{run_id}")["num_frames"] == len(STEPS)

"""A run whose model has several stacks, from its registration to what readers see of it."""

import json

import pytest

from tsemon.transport import Spool, find_spools
from tsemon.wire import Array, Frame
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.spools import SpooledRun
from tsemon_server.services.replay.stored import StoredRun
from tsemon_server.services.replay.traces import Trace

from .conftest import layer_frame, problem
from .rules.definitions import AT_ONCE, rule

STACKS = [{"name": "encoder", "blocks": 4}, {"name": "decoder", "blocks": 4}]
BLOCKS = [f"{stack['name']}.{number}" for stack in STACKS for number in range(4)]
EVEN = [0.3] * 5
FLAT_LOW = [1e-4] * 5
COLLAPSE = [0.3, 0.03, 0.003, 0.0003, 0.00003]
FALL = rule(
    {
        "all": [
            {"value": [{"layers": "token_diversity"}, {"layers": "last"}], "below": 1e-3},
            {"value": [{"layers": "token_diversity"}, "log_odds", {"layers": "fall"}], "at_most": -0.03},
        ]
    },
    **{"for": AT_ONCE, "clear_for": AT_ONCE},
)


def register(api, run="t5", **fields):
    return api.register(run, **{"blocks": BLOCKS, "stacks": STACKS} | fields)


def frames(encoder, decoder, metric="token_diversity", num=3):
    return [layer_frame(step, [*encoder, *decoder], metric) for step in range(num)]


class TestRegistering:
    def test_keeps_the_stacks(self, api):
        run = api.get(f"/runs/{register(api)}")
        assert run["stacks"] == [
            {"name": "encoder", "blocks": 4, "first_block": 0, "first_state": 0},
            {"name": "decoder", "blocks": 4, "first_block": 4, "first_state": 5},
        ]

    def test_makes_one_stack_of_all_blocks_unless_it_is_told(self, api):
        run = api.get(f"/runs/{api.register(num_blocks=3)}")
        assert run["stacks"] == [{"name": "", "blocks": 3, "first_block": 0, "first_state": 0}]

    def test_keeps_those_of_each_attempt(self, api):
        run_id = register(api)
        register(api, stacks=[{"name": "all", "blocks": 8}])
        assert [stack["name"] for stack in api.get(f"/runs/{run_id}")["stacks"]] == ["all"]
        with api.parts.store.read() as reader:
            assert [len(reader.runs.stacks(run_id, attempt).each) for attempt in (1, 2)] == [2, 1]

    @pytest.mark.parametrize(
        ("stacks", "detail"),
        [
            ([{"name": "encoder", "blocks": 4}], "add up to the 8 blocks of the model, not to 4"),
            ([*STACKS, {"name": "third", "blocks": 1}], "add up to the 8 blocks of the model, not to 9"),
            ([{"name": "a", "blocks": 4}, {"name": "a", "blocks": 4}], "Each stack should have a name of its own"),
            ([{"name": "a", "blocks": 8}, {"name": "b", "blocks": 0}], "greater than or equal to 1"),
            ([{"name": "", "blocks": 8}], "name"),
            ([{"name": "a"}], "blocks: Field required"),
            ([{"name": "a", "blocks": 8, "depth": 8}], "depth: Extra inputs"),
            ([{"name": f"s{i}", "blocks": 1} for i in range(33)], "at most 32"),
        ],
    )
    def test_refuses_stacks_that_do_not_fit(self, api, stacks, detail):
        body = {"run": "t5", "blocks": BLOCKS, "stacks": stacks}
        status, error, told = problem(api.http.post("/api/v1/runs", json=body))
        assert (status, error) == (422, "invalid_argument")
        assert detail in told


class TestAFrame:
    def test_has_one_entry_per_block_and_of_activations_one_more_per_stack(self, api):
        run_id = register(api)
        layers = {"token_similarity": Array.of(range(10)), "grad_norm": Array.of(range(8)), "own": Array.of(range(10))}
        heads = {"attention_entropy": Array.of(range(16), (8, 2))}
        api.send_ok(run_id, [Frame(0, 0, 1.0, {}, layers, heads)])
        frame = api.get(f"/runs/{run_id}/frame")
        assert frame["layers"]["token_similarity"] == [float(i) for i in range(10)]
        assert api.get(f"/runs/{run_id}/heatmap", metric="token_similarity")["layers"] == 10

    @pytest.mark.parametrize(
        ("metric", "length", "expected"),
        [
            (
                "token_similarity",
                9,
                "expected shape [10] (8 blocks in 2 stacks, activations have one entry more per stack)",
            ),
            ("grad_norm", 10, "expected shape [8] (8 blocks in 2 stacks, one entry per block)"),
            ("own", 9, "expected shape [8] or [10] (8 blocks in 2 stacks)"),
        ],
    )
    def test_of_another_length_is_refused(self, api, metric, length, expected):
        reply = api.send(register(api), [layer_frame(0, [0.5] * length, metric)])
        status, error, told = problem(reply)
        assert (status, error) == (422, "invalid_frame")
        assert f"{expected}, got [{length}]" in told


class TestAlerts:
    def test_do_not_come_of_a_fall_that_only_exists_across_the_border(self, start):
        api = start(rules=(FALL,))
        run_id, as_one = register(api), api.register("one", blocks=BLOCKS)
        api.send_ok(run_id, frames(EVEN, FLAT_LOW))
        api.send_ok(as_one, frames(EVEN, FLAT_LOW[:4]))
        assert [alert["run"] for alert in api.get("/alerts")["alerts"]] == ["one"]

    def test_name_the_stack_and_its_layers(self, start):
        api = start(rules=(FALL,))
        api.send_ok(register(api), frames(EVEN, COLLAPSE))
        (alert,) = api.get("/alerts")["alerts"]
        assert alert["summary"].startswith("The loss is high (decoder): ")
        assert alert["evidence"]["stack"] == "decoder"
        assert alert["evidence"]["layers"]["token_diversity"]["last"]["label"] == "decoder 4"
        (incident,) = api.get("/incidents")["incidents"]
        assert (incident["stack"], incident["blocks"], incident["where"]) == (
            "decoder",
            [6, 7],
            "blocks 2 to 3 of the decoder",
        )

    def test_of_one_stack_after_the_other_are_two(self, start):
        api = start(rules=(FALL,))
        run_id = register(api)
        sent = [frames(COLLAPSE, EVEN), frames(COLLAPSE, COLLAPSE), frames(EVEN, COLLAPSE), frames(EVEN, EVEN)]
        api.send_ok(
            run_id,
            [
                layer_frame(step, one[0].layers["token_diversity"].tolist(), "token_diversity")
                for step, one in enumerate(sent)
            ],
        )
        found = [(a["evidence"]["stack"], a["firing_step"], a["resolved_step"]) for a in api.get("/alerts")["alerts"]]
        assert found == [("decoder", 2, 3), ("encoder", 0, 2)]

    def test_are_the_same_when_frames_come_late(self, start):
        api = start(rules=(FALL,))
        sent = [COLLAPSE + EVEN, COLLAPSE + COLLAPSE, EVEN + COLLAPSE, EVEN + COLLAPSE, EVEN + EVEN]
        sent = [layer_frame(step, values, "token_diversity") for step, values in enumerate(sent)]
        in_order, late = register(api, "in order"), register(api, "late")
        api.send_ok(in_order, sent)
        for frame in (sent[1], sent[3], sent[0], sent[4], sent[2]):
            api.send_ok(late, [frame])
        told = [
            [
                (a["evidence"]["stack"], a["firing_step"], a["resolved_step"])
                for a in api.get("/alerts", run=run_id)["alerts"]
            ]
            for run_id in (in_order, late)
        ]
        assert told[0] == told[1] == [("decoder", 2, 4), ("encoder", 0, 2)]

    def test_are_remembered_over_a_restart(self, start):
        api = start(rules=(FALL,))
        run_id = register(api)
        api.send_ok(run_id, frames(EVEN, COLLAPSE))
        api = start(rules=(FALL,))
        api.send_ok(run_id, [layer_frame(9, [*EVEN, *EVEN], "token_diversity")])
        assert [alert["state"] for alert in api.get("/alerts")["alerts"]] == ["resolved"]


class TestTryingRules:
    def body(self, **fields):
        sent = [json.loads(frame.to_json()) for frame in frames(EVEN, FLAT_LOW)]
        return {"frames": sent, "num_blocks": 8, "rules": json.dumps({"rules": [FALL.definition]})} | fields

    def test_on_frames_takes_the_stacks(self, api):
        assert api.http.post("/api/v1/rules/test", json=self.body(stacks=STACKS)).json()["alerts"] == []

    def test_on_frames_refuses_stacks_with_other_blocks(self, api):
        reply = api.http.post("/api/v1/rules/test", json=self.body(stacks=STACKS[:1]))
        assert "add up to the 8 blocks of the model, not to 4" in problem(reply)[2]

    def test_traces_the_stack_that_comes_nearest_and_names_its_layer(self, api):
        sent = [json.loads(frame.to_json()) for frame in frames(EVEN, COLLAPSE)]
        rules = json.dumps({"rules": [{"name": "low", "when": "any(token_diversity < 1e-4) for 1 sample"}]})
        body = self.body(frames=sent, rules=rules, stacks=STACKS, points=10)
        (trace,) = api.http.post("/api/v1/rules/test", json=body).json()["traces"]
        assert {point["layer"] for point in trace["comparisons"][0]["points"]} == {"decoder 4"}
        assert trace["spans"][0]["firing_step"] is not None

    def test_on_a_stored_run_knows_its_stacks(self, start):
        api = start(rules=(FALL,))
        run_id = register(api)
        api.send_ok(run_id, frames(EVEN, FLAT_LOW))
        assert api.http.post("/api/v1/rules/test", json={"run_id": run_id}).json()["alerts"] == []


class TestReplaying:
    def alerts(self, recording):
        return [alert.evidence["stack"] for alert in replay(recording, Evaluator([FALL])).alerts]

    @pytest.mark.parametrize(("decoder", "told"), [(FLAT_LOW, []), (COLLAPSE, ["decoder"])])
    def test_a_stored_run_keeps_its_stacks(self, api, decoder, told):
        run_id = register(api)
        api.send_ok(run_id, frames(EVEN, decoder))
        with api.parts.store.read() as reader:
            assert self.alerts(StoredRun(reader, run_id)) == told

    @pytest.mark.parametrize(("decoder", "told"), [(FLAT_LOW, []), (COLLAPSE, ["decoder"])])
    def test_a_spooled_run_keeps_its_stacks(self, tmp_path, decoder, told):
        body = {"project": "p", "run": "t5", "blocks": BLOCKS, "stacks": STACKS, "attempt_key": "a"}
        spool = Spool.create(tmp_path, body, "w")
        for frame in frames(EVEN, decoder):
            spool.append(frame.to_json())
        spool.close()
        assert self.alerts(SpooledRun(list(find_spools(tmp_path)))) == told

    @pytest.mark.parametrize(("decoder", "told"), [(FLAT_LOW, []), (COLLAPSE, ["decoder"])])
    def test_a_trace_keeps_its_stacks(self, tmp_path, decoder, told):
        header = {"t": "run", "format": "tsemon-trace/1", "name": "t5", "stacks": STACKS}
        lines = [{"t": "frame", "step": step, "layers": {"token_diversity": EVEN + decoder}} for step in range(3)]
        path = tmp_path / "t5.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in (header, *lines, {"t": "end"})))
        assert self.alerts(Trace(path)) == told


class TestAGlance:
    def test_names_the_worst_layer_by_its_stack(self, api):
        run_id = register(api)
        api.send_ok(run_id, frames([0.9] * 5, [0.8, 0.1, 0.7, 0.7, 0.7]))
        (glance,) = api.get("/glances", run=[run_id])["glances"]
        assert (glance["worst"]["layer"], glance["worst"]["label"]) == (6, "decoder 1")


class TestMetrics:
    def samples(self, api, run_id):
        lines = api.http.get("/metrics").text.splitlines()
        return [line for line in lines if run_id in line and line.startswith(("tsemon_layer_", "tsemon_layers_"))]

    def test_have_a_label_for_the_stack_if_there_are_several(self, api):
        run_id = register(api)
        api.send_ok(run_id, frames(EVEN, [0.5, 0.6, 0.7, 0.8, 0.9], "token_diversity"))
        found = self.samples(api, run_id)
        assert f'tsemon_layer_token_diversity{{layer="04",run_id="{run_id}",stack="decoder"}} 0.899999976' in found
        assert f'tsemon_layer_token_diversity{{layer="00",run_id="{run_id}",stack="encoder"}} 0.300000012' in found
        assert f'tsemon_layers_token_diversity_last{{run_id="{run_id}",stack="decoder"}} 0.899999976' in found
        assert f'tsemon_layers_token_diversity_argmax{{run_id="{run_id}",stack="decoder"}} 4' in found
        assert len([line for line in found if line.startswith("tsemon_layer_")]) == 10

    def test_have_none_if_there_is_one(self, api):
        run_id = api.register(num_blocks=2)
        api.send_ok(run_id, [layer_frame(0, [0.1, 0.2, 0.3])])
        assert self.samples(api, run_id)
        assert not [line for line in self.samples(api, run_id) if "stack=" in line]

    def test_have_a_name_with_any_sign_as_a_label(self, api):
        name = '100% "deep"'
        run_id = register(api, stacks=[{"name": name, "blocks": 4}, {"name": "decoder", "blocks": 4}])
        api.send_ok(run_id, frames(EVEN, EVEN, "token_similarity"))
        assert any(r'stack="100% \"deep\""} 0.3' in line for line in self.samples(api, run_id))

    def test_take_an_input_of_zeros_for_no_trouble(self, api):
        run_id = register(api)
        nan = float("nan")

        def num_nonfinite(step, decoder):
            api.send_ok(run_id, [layer_frame(step, [*EVEN, *decoder], "token_similarity")])
            lines = api.http.get("/metrics").text.splitlines()
            (line,) = [line for line in lines if line.startswith(f'tsemon_run_nonfinite_values{{run_id="{run_id}"}}')]
            return int(line.rpartition(" ")[2])

        assert num_nonfinite(0, [nan, 0.5, 0.5, 0.5, 0.5]) == 0
        assert num_nonfinite(1, [nan] * 5) == 4

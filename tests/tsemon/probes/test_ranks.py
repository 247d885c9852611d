"""Several processes against one: each scenario of `parallel` runs once, and is looked at from here."""

import math
import subprocess

import pytest
import torch

from tests.processes import Program
from tests.tsemon.probes import parallel
from tests.tsemon.test_monitor import frames_in, values_of
from tsemon.errors import InvalidArgument
from tsemon.probes.ranks import arrange

OF_ITS_OWN_BATCH = {"centred_token_similarity", "global_diversity", "batch_similarity", "batch_rank"}
OF_ITS_OWN_BATCH |= {"output_variation", "dead_units", "distinct_inputs"}
"""Metrics that compare the samples of a batch with each other: a rank has only its own."""
OF_ITS_OWN_BATCH |= {"saturation", "saturation_scale"}  # of a few sequences that each rank holds
OF_ITS_OWN_STAGE = {"effective_rank", "value_top_eigenvalue"}
"""Metrics that are finished on the host, where the blocks of other stages are not."""
OF_WHOLE_WEIGHTS = {"value_output_growth"}
"""Metrics that no rank can compute from its shard of the weights."""
OF_ITS_OWN_PROCESS = {"overhead_ratio", "contained_faults", "dropped_frames"}
OVER_ALL_LOSSES = {"loss_min", "loss_max", "loss_std"}
"""Of the losses of each rank, not of their mean."""


class Results:
    """What the ranks of one run returned, and where rank 0 put its frames."""

    def __init__(self, folder, size):
        self.size = size
        self._folder = folder
        self._frames = {}
        ranks = [Program(parallel.main, rank, size, folder, stderr=subprocess.PIPE) for rank in range(size)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors

    def of(self, scenario):
        results = [torch.load(self._folder / f"{scenario}.{rank}.pt", weights_only=False) for rank in range(self.size)]
        for result in results:
            assert not isinstance(result, str), result  # a traceback
        return results

    def frames(self, scenario):
        if scenario not in self._frames:  # one that was read is gone from its spool
            self._frames[scenario] = frames_in(self._folder / scenario)
        return self._frames[scenario]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Frames of one process that has the whole batch, by the kind of optimizer."""

    def frames_of(name, make_optimizer):
        folder = tmp_path_factory.mktemp(name)
        model = parallel.language_model()
        optimizer = make_optimizer(model.parameters())
        with parallel.attached(model, optimizer, folder, process_group=None) as monitor:
            parallel.train(model, optimizer, monitor)
        return frames_in(folder)

    return {
        "adamw": frames_of("adamw", parallel.adamw),
        "sgd": frames_of("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    }


def assert_same(frames, expected, leaving_out=frozenset()):
    """The same numbers in all frames, but for what the order of additions changes."""
    assert len(frames) == len(expected) == parallel.STEPS
    for frame, other in zip(frames, expected, strict=True):
        for group in ("layers", "heads"):
            names = set(other[group]) - OF_ITS_OWN_BATCH - leaving_out
            assert names <= set(frame[group])
            for name in names:
                got, wanted = (torch.tensor(values_of(f, name, group)) for f in (frame, other))
                torch.testing.assert_close(
                    got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                )
        names = set(other["scalars"]) - OF_ITS_OWN_PROCESS - OF_ITS_OWN_BATCH - OVER_ALL_LOSSES - leaving_out
        assert names <= set(frame["scalars"])
        for name in names:
            got, wanted = (math.nan if f["scalars"][name] is None else f["scalars"][name] for f in (frame, other))
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5, nan_ok=True), name


def assert_unchanged(results):
    for result in results:
        plain, watched = result["states"]
        assert all(torch.equal(plain[name], watched[name]) for name in plain)


class TestDataParallel:
    def test_measures_what_one_process_with_the_whole_batch_measures(self, two, alone):
        # A parameter of block 0 is frozen there.
        assert_same(two.frames("ddp"), alone["adamw"], leaving_out={"trained_update_ratio"})

    def test_changes_no_bit_of_training(self, two):
        assert_unchanged(two.of("ddp"))
        assert all(plain == watched for plain, watched in (result["losses"] for result in two.of("ddp")))

    def test_needs_no_collective_where_rank_0_attaches_by_itself(self, two):
        assert two.of("ddp_of_rank_0") == [[], []]
        assert len(two.frames("ddp_of_rank_0")) == parallel.STEPS


class TestShardedParameters:
    def test_are_measured_as_if_they_were_whole(self, two, alone):
        assert [result["rows_of_lone"] for result in two.of("fsdp")] == [1, 0], "one shard is empty"
        assert_same(two.frames("fsdp"), alone["adamw"], leaving_out=OF_WHOLE_WEIGHTS)
        for result in two.of("fsdp"):
            assert "weights are sharded (DTensor)" in result["not_measured"]["value_output_growth"]

    @pytest.mark.thorough
    def test_may_be_of_unequal_size(self, three, alone):
        assert_same(three.frames("fsdp"), alone["adamw"], leaving_out=OF_WHOLE_WEIGHTS)

    def test_have_the_update_of_sgd(self, two, alone):
        assert_same(two.frames("fsdp_sgd"), alone["sgd"], leaving_out=OF_WHOLE_WEIGHTS)

    @pytest.mark.parametrize("scenario", ["fsdp", "fsdp_sgd"])
    def test_train_the_same_to_the_bit(self, two, scenario):
        assert_unchanged(two.of(scenario))

    @pytest.mark.thorough
    def test_count_once_where_several_ranks_hold_the_same(self, three):
        model = parallel.language_model()
        left_out = {id(p) for m in (model.embed, model.positions) for p in m.parameters()}
        expected = torch.cat([p.detach().flatten() for p in model.parameters() if id(p) not in left_out]).norm()
        for norms in three.of("hybrid"):
            for norm in norms.values():
                torch.testing.assert_close(norm, expected)

    def test_are_not_measured_without_a_group(self, two):
        for result in two.of("fsdp_alone"):
            assert "attach(process_group=...)" in result["not_measured"]["param_norm"]

    def test_are_not_measured_by_a_group_that_lacks_some(self, two):
        for result in two.of("part_of_a_mesh"):
            assert "hold only some of the shards" in result["not_measured"]["param_norm"]


class TestTheUsersOwnQuantities:
    NAMES = ("energy", "highest", "lowest", "parameter_squares", "gradient_squares")

    @pytest.fixture(scope="class")
    def of_one(self, tmp_path_factory):
        """Frames of one process with the whole batch and the whole model."""
        folder = tmp_path_factory.mktemp("own")
        model = parallel.language_model()
        optimizer = parallel.adamw(model.parameters())
        own = parallel.own_quantities()
        with parallel.attached(model, optimizer, folder, process_group=None, measures=own) as monitor:
            parallel.train(model, optimizer, monitor)
        return frames_in(folder)

    @pytest.mark.parametrize("scenario", ["quantities_of_ddp", "quantities_of_fsdp", "quantities_of_pipeline"])
    def test_are_merged_to_what_one_process_finds_in_the_whole(self, two, of_one, scenario):
        for frame, whole in zip(two.frames(scenario), of_one, strict=True):
            for name in self.NAMES:
                got, want = (torch.tensor(values_of(each, name)) for each in (frame, whole))
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert frame["scalars"]["deviation"] == pytest.approx(whole["scalars"]["deviation"], rel=1e-4)

    @pytest.mark.parametrize("scenario", ["quantities_of_ddp", "quantities_of_fsdp"])
    def test_of_parameters_count_what_every_rank_holds_once(self, two, scenario):
        for frame in two.frames(scenario):
            for name, norm in (("parameter_squares", "param_norm"), ("gradient_squares", "grad_norm")):
                got, norms = (torch.tensor(values_of(frame, each)) for each in (name, norm))
                torch.testing.assert_close(got, norms.square(), rtol=1e-4, atol=1e-9)

    @pytest.mark.parametrize("scenario", ["quantities_of_ddp", "quantities_of_fsdp"])
    def test_that_fail_in_one_rank_are_of_no_rank(self, two, scenario):
        """The sum over the others would be a made-up number."""
        assert all(all(map(math.isnan, values_of(frame, "fails"))) for frame in two.frames(scenario))
        first, second = two.of(scenario)
        assert first["faults"] == []
        assert "AttributeError" in second["not_measured"]["fails"]

    def test_are_the_same_on_all_ranks(self, two):
        for result in two.of("quantities_that_differ"):
            assert "attach(measures=) is the same on all ranks" in result["text"]


class TestPipeline:
    @pytest.mark.parametrize("scenario", ["pipeline", "pipeline_with_clashing_names"])
    def test_measures_what_one_process_with_the_whole_model_measures(self, two, alone, scenario):
        assert_same(two.frames(scenario), alone["adamw"], leaving_out=OF_ITS_OWN_STAGE)

    @pytest.mark.parametrize("scenario", ["pipeline", "pipeline_with_clashing_names"])
    def test_changes_no_bit_of_training(self, two, scenario):
        assert_unchanged(two.of(scenario))

    def test_misses_no_end_that_another_stage_has(self, two):
        for result in two.of("pipeline"):
            assert not any(name.startswith(("embedding_", "head_")) for name in result["not_measured"])
            assert "output_variation" not in result["not_measured"]

    @pytest.mark.parametrize(
        ("scenario", "names"),
        [
            ("pipeline", ["early.0", "early.1", "late.0", "late.1"]),
            (
                "pipeline_with_clashing_names",
                ["stage0.blocks.0", "stage0.blocks.1", "stage1.blocks.0", "stage1.blocks.1"],
            ),
        ],
    )
    def test_has_all_blocks_on_every_rank(self, two, scenario, names):
        assert [result["blocks"] for result in two.of(scenario)] == [names, names]


class TestArrange:
    def test_takes_equal_names_for_one_stage(self):
        assert arrange([(None, ["a", "b"])] * 3, 1) == (["a", "b"], 0, 3, [0])

    def test_takes_ranks_with_the_same_names_for_the_same_stage(self):
        ranks = [(None, ["a", "b"]), (None, ["c"]), (None, ["a", "b"]), (None, ["c"])]
        assert arrange(ranks, 3) == (["a", "b", "c"], 2, 2, [0, 1])

    def test_goes_by_the_numbers_that_the_user_gave(self):
        assert arrange([(1, ["a"]), (0, ["a"])], 0) == (["stage0.a", "stage1.a"], 1, 1, [1, 0])

    def test_asks_for_a_number_from_all_or_none(self):
        with pytest.raises(InvalidArgument, match="on all ranks"):
            arrange([(1, ["a"]), (None, ["a"])], 0)


class TestRanks:
    def test_meet_in_one_collective_at_each_sample_and_in_none_between(self, two):
        one = ["all_gather"]
        expected = [["all_gather_object", *one], [], [], one, [], [], one, [], [], one]
        assert two.of("number_of_collectives") == [expected, expected]

    @pytest.mark.parametrize("size", ["two", pytest.param("three", marks=pytest.mark.thorough)])
    def test_sample_the_same_steps_however_different_their_speed(self, size, request):
        first, *others = [result["steps"] for result in request.getfixturevalue(size).of("cadence")]
        assert all(steps == first for steps in others)
        assert len(parallel.gaps_of(first)) > 1, "the interval followed the run"

    def test_go_on_when_one_of_them_has_trouble(self, two):
        frames = two.frames("trouble_in_one_rank")
        norms = [frame["scalars"]["total_param_norm"] for frame in frames]
        gradients = [frame["scalars"]["total_grad_norm"] for frame in frames]
        is_known = [[value is not None and math.isfinite(value) for value in values] for values in (norms, gradients)]
        assert is_known == [
            [True, True, False, True, True],  # a fault in the third
            [True, False, False, True, True],  # no step in the second
        ]
        assert all(values_of(frame, "token_similarity")[0] > 0 for frame in frames)

    def test_say_what_went_wrong_where_it_did(self, two):
        quiet, troubled = two.of("trouble_in_one_rank")
        assert quiet["faults"] == []
        assert len(troubled["faults"]) == 3

    def test_begin_no_collective_after_one_that_failed(self, two):
        for result in two.of("failing_collective"):
            assert result["num_calls"] == 2
            assert "connection closed by peer" in result["faults"][0]
        for frame in two.frames("failing_collective")[1:]:
            assert all(value > 0 for value in values_of(frame, "token_similarity")), "its own samples"
            assert all(math.isnan(value) for value in values_of(frame, "param_norm")), "half of a sum"

    def test_give_the_mean_of_a_scalar(self, two):
        assert [frame["scalars"]["loss"] for frame in two.frames("trouble_in_one_rank")] == [0.5] * 5

    def test_learn_of_a_scalar_that_one_of_them_gives_later(self, two):
        given = [frame["scalars"].get("late") for frame in two.frames("trouble_in_one_rank")]
        assert given[-1] == 3.0

    def test_go_on_together_from_a_checkpoint(self, two):
        assert [frame["step"] for frame in two.frames("checkpoint")] == [5, 6]
        for texts in two.of("checkpoint"):
            assert "resume=) is the same on all ranks of process_group" in texts[0]
            assert "load_state_dict() takes what state_dict() of a monitor returned, got str" in texts[1]

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ("model", "found no transformer blocks in Linear"),
            ("every", "is the same on all ranks of process_group, got"),
            ("layout", "attach(layout=) is the same on all ranks of process_group, got"),
            ("attention_rows", "attach(attention_rows=) is the same on all ranks of process_group, got"),
            ("resume", "is the same on all ranks of process_group, got"),
            ("stage", "stage= is given on all ranks"),
            ("run", "run is a name"),
        ],
    )
    def test_refuse_together_what_is_wrong_in_one(self, two, wrong, text):
        for texts in two.of("errors_of_attach"):
            assert text in texts[wrong]

"""The count of parameters that get a gradient, but are in no optimizer and stand still."""

import pytest
import torch
from torch.optim import SGD, AdamW

from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of, raise_fault
from tsemon.probes import Probe, find_blocks
from tsemon.probes.untrained import MAX_ENTRIES, Untrained

RARELY = {"lr": 1e-3}


def counts(model, forward, optimizers, num_samples=3, also=lambda: None):
    """The count in each sample. `also` runs after the steps of the optimizers, of which the probe knows the first."""
    probe = probe_of(model, optimizers[0])
    found = []
    for _ in range(num_samples):
        probe.arm(ALL)
        forward().float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        also()
        found.append(probe.collect().scalars.get("untrained_parameters"))
        probe.disarm()
    return [count if count is None else float(count) for count in found], probe


def split(model):
    """Parameters of the first block, and all others but the embeddings."""
    first = [*model.blocks[0].parameters()]
    ids = {id(p) for p in first}
    others = [
        p for name, p in model.named_parameters() if id(p) not in ids and not name.startswith(("embed", "positions"))
    ]
    return first, others


@pytest.fixture
def language_model():
    torch.manual_seed(0)
    return zoo.our_language_model()


class TestUntrainedParameters:
    def test_is_known_from_the_second_sample_on(self, language_model):
        model, forward = language_model
        found, probe = counts(model, forward, [AdamW(model.parameters(), **RARELY)])
        assert found == [None, 0, 0]
        assert "untrained_parameters" not in probe.not_measured

    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.RMSprop])
    def test_counts_what_no_optimizer_trains(self, language_model, kind):
        model, forward = language_model
        first, others = split(model)
        assert counts(model, forward, [kind(others, **RARELY)])[0] == [None, len(first), len(first)]

    def test_leaves_out_what_an_optimizer_trains_that_was_not_given(self, language_model):
        model, forward = language_model
        first, others = split(model)
        assert counts(model, forward, [AdamW(others), AdamW(first)])[0] == [None, 0, 0]
        assert counts(model, forward, [AdamW(others), AdamW(first[1:])])[0] == [None, 1, 1]

    def test_leaves_out_what_is_frozen_or_gets_no_gradient(self, language_model):
        model, forward = language_model
        first, others = split(model)
        model.unused = torch.nn.Linear(4, 4)
        for parameter in first[1:]:
            parameter.requires_grad_(False)
        assert counts(model, forward, [AdamW(others)])[0] == [None, 1, 1]

    def test_counts_if_only_the_second_optimizer_steps(self, language_model):
        model, forward = language_model
        first, others = split(model)
        second = AdamW(others[1:])
        probe = Probe(model, [AdamW(others[:1]), second], find_blocks(model), raise_fault)
        found = []
        for _ in range(3):
            probe.arm(ALL)
            forward().square().mean().backward()
            second.step()
            found.append(probe.collect().scalars.get("untrained_parameters"))
            probe.disarm()
        assert found[1:] == [len(first)] * 2

    def test_leaves_half_precision_out_because_another_optimizer_may_move_it_by_less_than_it_can_hold(
        self, language_model
    ):
        model, forward = language_model
        _, others = split(model)
        model.bfloat16()
        assert counts(model, forward, [AdamW(others)])[0] == [None, 0, 0]

    def test_is_not_measured_without_a_step(self, language_model):
        model, forward = language_model
        probe = probe_of(model, AdamW(model.parameters()))
        for _ in range(2):
            probe.arm(ALL)
            forward().square().mean().backward()
            reading = probe.collect()
            probe.disarm()
        assert "untrained_parameters" not in reading.scalars
        assert "made no step" in probe.not_measured["untrained_parameters"]


class TestUntrained:
    def test_says_nothing_of_empty_shards_and_of_other_parameters_than_before(self):
        empty, full, large = (torch.nn.Parameter(torch.ones(size)) for size in (0, 3, 5 * MAX_ENTRIES))
        untrained = Untrained()
        assert untrained.count([empty, full]).isnan()
        assert untrained.count([empty, full]) == 1
        assert untrained.count([empty, full, large]).isnan()
        with torch.no_grad():
            full += 1
        assert untrained.count([empty, full, large]) == 1
        assert untrained.count([]) == 0

    def test_takes_nan_for_a_change(self):
        parameter = torch.nn.Parameter(torch.full((3,), torch.nan))
        untrained = Untrained()
        untrained.count([parameter])
        assert untrained.count([parameter]) == 0

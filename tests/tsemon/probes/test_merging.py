"""Two processes, each with half of the batch: their sums must come to what one process finds in the whole of it."""

import pytest
import torch

from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of
from tsemon.probes.escalation import RANK_RATIOS

MERGES = {
    "sum": lambda values: values.sum(dim=0),
    "max": lambda values: values.amax(dim=0),
    "min": lambda values: values.amin(dim=0),
}
PER_PROCESS = {"centred_token_similarity", "batch_similarity", "global_diversity"}
"""About the mean of a batch, of which each process has its own."""
ON_HOST = {"effective_rank", "batch_rank", *RANK_RATIOS.values()}
"""Of one process's samples."""


def probe_after(model, ids):
    probe = probe_of(model)
    probe.arm(ALL)
    model(ids)
    return probe


def finished(name, *probes):
    """What a part makes of the sums of several processes."""
    shares = [probe._parts[name].collect() for probe in probes]
    sums = {
        key: MERGES[merge](torch.stack([share[key].value for share in shares])) for key, (_, merge) in shares[0].items()
    }
    return probes[0]._parts[name].finish(sums)


class TestTwoProcesses:
    @pytest.mark.parametrize("name", ["activations", "escalation", "feedforward"])
    def test_find_together_what_one_finds_in_the_whole_batch(self, name):
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        model.blocks[1].feed_forward.expand.weight.data[:20] = 0.0
        ids = zoo.ids(batch=8)
        halves, whole = [probe_after(model, ids[:3]), probe_after(model, ids[3:])], probe_after(model, ids)
        expected, got = finished(name, whole).layers, finished(name, *halves).layers
        assert set(got) == set(expected)
        for metric in expected.keys() - PER_PROCESS - ON_HOST:
            torch.testing.assert_close(got[metric], expected[metric], msg=metric)

    def test_are_averaged_where_each_looks_at_its_own_batch(self):
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        ids = zoo.ids(batch=8)
        halves = [probe_after(model, ids[:3]), probe_after(model, ids[3:])]
        for name, group, metric in (
            ("activations", "layers", "batch_similarity"),
            ("outputs", "scalars", "output_variation"),
        ):
            own = [getattr(finished(name, half), group)[metric] for half in halves]
            got = getattr(finished(name, *halves), group)[metric]
            torch.testing.assert_close(got, (own[0] + own[1]) / 2, msg=metric)

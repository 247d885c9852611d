"""Two processes, each with half of the batch: their sums must come to what one process finds in the whole of it."""

import torch

from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of

MERGES = {
    "sum": lambda values: values.sum(dim=0),
    "max": lambda values: values.amax(dim=0),
    "min": lambda values: values.amin(dim=0),
}
PER_PROCESS = {"centred_token_similarity", "batch_similarity", "global_diversity", "output_variation"}
"""About the mean of a batch, of which each process has its own."""


def parts_after(model, ids):
    probe = probe_of(model)
    probe.arm(ALL)
    model(ids)
    return probe


class TestTwoProcesses:
    def test_find_together_what_one_finds_in_the_whole_batch(self):
        torch.manual_seed(0)
        model, _ = zoo.our_language_model()
        model.blocks[1].feed_forward.expand.weight.data[:20] = 0.0
        ids = zoo.ids(batch=8)
        halves, whole = [parts_after(model, ids[:3]), parts_after(model, ids[3:])], parts_after(model, ids)
        for name in ("activations", "escalation", "feedforward", "outputs"):
            first, second = (half._parts[name].collect() for half in halves)
            merged = {
                key: MERGES[first[key].merge](torch.stack([first[key].value, second[key].value]).double())
                for key in first
            }
            part = whole._parts[name]
            expected = part.finish({key: partial.value for key, partial in part.collect().items()})
            got = part.finish(merged)
            for metric in {*part.METRICS} - PER_PROCESS - {"effective_rank", "batch_rank"}:
                values = got.layers[metric].float()
                torch.testing.assert_close(values, expected.layers[metric].float(), msg=metric)
        for metric in ("batch_similarity", "centred_token_similarity"):
            means = [probe._parts["activations"].finish(sums_of(probe)).layers[metric] for probe in halves]
            merged = whole._parts["activations"].finish(merged_sums(halves)).layers[metric]
            torch.testing.assert_close(
                merged.float(), weighed(metric, *means), msg=f"{metric}: mean over processes, or over their samples"
            )
        for probe in (*halves, whole):
            probe.disarm()


def sums_of(probe):
    return {key: partial.value for key, partial in probe._parts["activations"].collect().items()}


def merged_sums(probes):
    first, second = (probe._parts["activations"].collect() for probe in probes)
    return {key: MERGES[first[key].merge](torch.stack([first[key].value, second[key].value])) for key in first}


def weighed(metric, first, second):
    return (first + second) / 2 if metric == "batch_similarity" else (3 * first + 5 * second) / 8

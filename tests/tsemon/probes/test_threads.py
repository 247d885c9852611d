import threading

import torch

from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, probe_of

WITHOUT_EXTRA = ALL - {"saturation", "saturation_scale"}


def elsewhere(function):
    """Call it on another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def sampled(interruption):
    """A reading of a training pass, in the middle of which `interruption(model)` runs."""
    torch.manual_seed(0)
    model, _ = zoo.our_language_model()
    probe = probe_of(model)
    is_once = []

    def interrupt(*_):
        if not is_once:
            is_once.append(True)
            interruption(model)

    model.blocks[1].register_forward_hook(interrupt)
    probe.arm(WITHOUT_EXTRA)
    model(zoo.ids())
    reading = probe.collect()
    probe.disarm()
    assert num_hooks(model) == 1
    return reading, probe


def evaluate(model):
    with torch.no_grad():
        model(torch.zeros(4, 12, dtype=torch.long))


class TestAnotherThreadThatRunsTheModel:
    def test_is_not_measured(self):
        alone, _ = sampled(lambda model: None)
        reading, probe = sampled(lambda model: elsewhere(lambda: evaluate(model)))
        assert {"token_similarity", "attention_entropy", "escalation_rate", "dead_units"} <= set(alone.layers)
        assert reading.layers.keys() == alone.layers.keys()
        for name in ("token_similarity", "attention_entropy", "escalation_rate", "dead_units"):
            assert torch.equal(reading.layers[name], alone.layers[name])
        assert torch.equal(reading.scalars["output_variation"], alone.scalars["output_variation"])
        assert not any("did not" in why for why in probe.not_measured.values())

    def test_is_measured_where_it_is_the_one_that_trains(self):
        model, _ = zoo.our_language_model()
        probe = probe_of(model)
        for _ in range(2):
            probe.arm({"token_similarity", "output_variation"})
            elsewhere(lambda: model(zoo.ids()))
            reading = probe.collect()
            probe.disarm()
            assert "token_similarity" in reading.layers
            assert "output_variation" in reading.scalars

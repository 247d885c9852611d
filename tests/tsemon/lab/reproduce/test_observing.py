import copy

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce.observing import observe, recorded
from tsemon.measures import token_similarity
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"vocab": 50, "context": 16, "depth": 3, "width": 32, "heads": 4, "ffn": 64}
        return CausalLanguageModel(CausalLanguageModelConfig(**sizes))


TOKENS = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(1))


class TestObserve:
    def test_gives_what_the_measure_gives_on_the_blocks_outputs(self, model):
        outputs = []
        handles = [block.register_forward_hook(lambda _, __, output: outputs.append(output)) for block in model.blocks]
        frame = observe(model, lambda: discard(model(TOKENS)))
        for handle in handles:
            handle.remove()
        expected = [token_similarity(x_BTD).mean().item() for x_BTD in outputs]
        assert frame.layers["token_similarity"][1:] == pytest.approx(expected, rel=1e-5)  # sums in another order

    def test_gives_gradients_where_there_is_a_loss_and_changes_no_weight(self, model):
        before = copy.deepcopy(model.state_dict())
        frame = observe(model, lambda: model(TOKENS).square().mean(), measures=["grad_norm"])
        assert (frame.layers["grad_norm"] > 0).all()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_gives_heads_an_axis_of_their_own(self, model):
        frame = observe(model, lambda: discard(model(TOKENS)), measures=["attention_entropy"])
        assert frame.heads["attention_entropy"].shape == (3, 4)
        np.testing.assert_allclose(
            frame.heads["attention_entropy"].mean(1), frame.layers["attention_entropy"], rtol=1e-6
        )


class TestARecording:
    def test_has_the_series_of_a_run_and_of_a_layer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with recorded(model, optimizer, every=2) as recording:
            for _ in range(5):
                loss = model(TOKENS).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recording.monitor.step(loss)
                losses.append(loss.item())
        steps, values = recording.series("loss")
        assert steps.tolist() == [0, 2, 4]
        assert values == pytest.approx(losses[::2])
        assert len(recording.series("grad_norm", layer=-1)[1]) == 3

    def test_says_which_metric_it_does_not_have(self, model):
        with recorded(model, measures=["token_similarity"]) as recording:
            model(TOKENS)
            recording.monitor.step()
        with pytest.raises(KeyError, match="grad_norm"):
            recording.series("grad_norm", layer=0)


def discard(_):
    """The pass has run; nothing goes back from its output."""

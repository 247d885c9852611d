"""Training loops that misuse the monitor are told once, all others never."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import tsemon
from tests import zoo
from tests.setups.harness import Footprint, Training
from tsemon.probes.usage import MAX_STEPS_UNCALLED


class Loop:
    """A language model and the parts of a training step."""

    def __init__(self, folder, *, make_optimizer=AdamW, every=1, **options):
        torch.manual_seed(0)
        self.model, self.run_model = zoo.torch_encoder()
        self.optimizer = make_optimizer(self.model.parameters())
        self.before = self.footprint()
        self.monitor = tsemon.attach(
            self.model, self.optimizer, run="r", every=every, spool_dir=folder, measures=["update_norm"], **options
        )

    def footprint(self):
        return Footprint(Training(model=self.model, optimizer=self.optimizer, step=None))

    def forward(self):
        self.loss = self.run_model().square().mean()

    def backward(self):
        self.loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def call(self):
        self.monitor.step()

    def repeat(self, *parts, times=8):
        for _ in range(times):
            for part in parts:
                part()
        return self.told()

    def told(self):
        assert not any("contained" in text for text in self.monitor.status.faults)
        return list(self.monitor.status.faults)


@pytest.fixture
def loop(tmp_path):
    loops = []

    def make(**options):
        loops.append(Loop(tmp_path, **options))
        return loops[-1]

    yield make
    for each in loops:
        each.monitor.close()


class TestALoopThatNeverCallsStep:
    def test_is_told_while_it_trains(self, loop, caplog):
        loop = loop()
        loop.repeat(loop.forward, loop.backward, loop.step, times=MAX_STEPS_UNCALLED - 1)
        assert loop.told() == []
        with caplog.at_level(logging.WARNING, "tsemon"):
            (text,) = loop.repeat(loop.forward, loop.backward, loop.step, times=50)
        assert text.startswith(
            f"the optimizer made {MAX_STEPS_UNCALLED} steps since attach() without a call of monitor.step()"
        )
        assert [record.getMessage() for record in caplog.records] == [f"tsemon: {text}"]

    def test_is_told_at_its_end(self, loop):
        loop = loop()
        loop.repeat(loop.forward, loop.backward, loop.step, times=3)
        loop.monitor.close()
        assert "made 3 steps since attach() without a call" in loop.told()[0]

    def test_is_not_one_that_ends_before_its_first_call(self, loop):
        loop = loop()
        loop.repeat(loop.forward, loop.backward, loop.step, times=1)
        loop.monitor.close()
        assert loop.told() == []


@pytest.mark.parametrize("every", [1, 10])
class TestALoopThatCallsStepAtAnotherPlace:
    def test_is_told_where_it_is_before_the_backward_pass(self, loop, every):
        loop = loop(every=every)
        (text,) = loop.repeat(loop.forward, loop.call, loop.backward, loop.step, times=30)
        assert text.startswith("monitor.step() is called before the backward pass")

    def test_is_told_where_it_is_before_the_optimizers_step(self, loop, every):
        loop = loop(every=every)
        (text,) = loop.repeat(loop.forward, loop.backward, loop.call, loop.step, times=30)
        assert text.startswith("monitor.step() is called between the backward pass and optimizer.step()")

    @pytest.mark.parametrize("num_batches", [2, 4, 10])
    def test_is_told_where_it_is_after_every_micro_batch(self, loop, every, num_batches):
        loop = loop(every=every)
        batch = [loop.forward, loop.backward, loop.call]
        *others, call = batch * num_batches
        (text,) = loop.repeat(*others, loop.step, call, times=8)
        assert text.startswith(f"monitor.step() is called {num_batches} times per optimizer step")

    def test_is_told_where_it_is_twice_after_every_step(self, loop, every):
        loop = loop(every=every)
        (text,) = loop.repeat(loop.forward, loop.backward, loop.step, loop.call, loop.call)
        assert text.startswith("monitor.step() is called 2 times per optimizer step")


class TestALoopThatIsRight:
    def test_is_watched_for_two_steps_and_no_longer(self, loop):
        loop = loop(every=100)
        assert loop.repeat(loop.forward, loop.backward, loop.step, loop.call, times=1) == []
        assert loop.footprint().differs_from(loop.before) != []
        assert loop.repeat(loop.forward, loop.backward, loop.step, loop.call, times=1) == []
        assert loop.footprint().differs_from(loop.before) == []

    def test_may_accumulate_gradients(self, loop):
        loop = loop()
        assert loop.repeat(*[loop.forward, loop.backward] * 3, loop.step, loop.call) == []

    def test_may_evaluate_between_steps(self, loop):
        """Even with gradients."""
        loop = loop()
        parts = [loop.forward, loop.backward, loop.forward, loop.step, loop.forward, loop.call, loop.forward]
        assert loop.repeat(*parts) == []

    def test_may_go_on_from_a_checkpoint(self, loop):
        loop = loop(resume=100)
        assert loop.repeat(loop.forward, loop.backward, loop.step, loop.call) == []

    def test_may_skip_its_first_steps(self, loop):
        loop = loop()
        loop.repeat(loop.forward, loop.backward, loop.optimizer.zero_grad, loop.call, times=1)
        assert loop.repeat(loop.forward, loop.backward, loop.step, loop.call, times=70) == []

    def test_may_have_a_scaler_that_skips_steps(self, loop):
        loop = loop()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-20)

        def step():
            for p in loop.model.parameters():
                p.grad = None
            loop.forward()
            scaler.scale(1e6 * loop.loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()

        assert loop.repeat(step, loop.call) == []
        assert scaler.get_scale() < 2.0**126, "steps were skipped"

    def test_may_train_its_adversary_five_times_as_often(self, loop):
        """Both are trained by one loop, which calls step after each; the monitor has one of them."""
        loop = loop()
        other = nn.Linear(3, 3)
        optimizer = SGD(other.parameters(), lr=0.1)

        def train_other():
            other(torch.randn(2, 3)).sum().backward()
            optimizer.step()

        parts = [train_other, loop.call] * 4
        assert loop.repeat(*parts, train_other, loop.forward, loop.backward, loop.step, loop.call) == []

    def test_may_have_a_closure(self, loop):
        loop = loop(make_optimizer=lambda params: torch.optim.LBFGS(params, max_iter=2))

        def closure():
            loop.optimizer.zero_grad()
            loop.forward()
            loop.backward()
            return loop.loss

        assert loop.repeat(lambda: loop.optimizer.step(closure), loop.call) == []

    def test_may_step_in_the_backward_pass(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizers = {p: SGD([p], lr=1e-3) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        options = {"run": "r", "every": 1, "spool_dir": tmp_path}
        with tsemon.attach(model, list(optimizers.values()), **options) as monitor:
            for _ in range(5):
                forward().square().mean().backward()
                monitor.step()
        assert monitor.status.faults == ()


class TestWhatWasReplacedAfterAttach:
    def train(self, loop):
        return loop.repeat(loop.forward, loop.backward, loop.step, loop.call, times=3)

    def test_is_told_of_the_optimizer(self, loop):
        loop = loop()
        assert self.train(loop) == []
        loop.optimizer = SGD(loop.model.parameters(), lr=0.1)
        (text,) = self.train(loop)
        assert "makes no steps, and SGD, which attach() was not given, trains" in text
        assert self.train(loop) == [text]

    def test_is_told_of_parameters(self, loop):
        loop = loop()
        assert self.train(loop) == []
        layer = loop.model.layers[1].linear1
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        (text,) = self.train(loop)
        assert text.startswith("1 of 36 parameters that the optimizer trains are no longer in the model")
        assert self.train(loop) == [text]

    def test_is_told_of_blocks(self, loop):
        loop = loop()
        assert self.train(loop) == []
        loop.model.layers[1] = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        text, of_parameters = self.train(loop)
        assert text.startswith("1 of 3 blocks are no longer in the model, the first is layers.1")
        assert "12 of 36 parameters" in of_parameters
        assert self.train(loop) == [text, of_parameters]

    def test_is_not_what_was_wrapped_or_added_or_is_trained_no_more(self, loop):
        class Wrapper(nn.Module):
            def __init__(self, block):
                super().__init__()
                self.block = block

            def forward(self, *args, **kwargs):
                return self.block(*args, **kwargs)

        loop = loop()
        assert self.train(loop) == []
        loop.model.layers[1] = Wrapper(loop.model.layers[1])
        loop.optimizer.add_param_group({"params": list(nn.Linear(3, 3).parameters())})
        loop.model.layers[0].requires_grad_(False)
        assert self.train(loop) == []

    def test_is_not_a_second_optimizer_beside_the_first(self, loop):
        loop = loop()
        first, second = loop.optimizer, SGD(loop.model.layers[0].parameters(), lr=0.1)
        assert loop.repeat(loop.forward, loop.backward, second.step, first.step, loop.call) == []

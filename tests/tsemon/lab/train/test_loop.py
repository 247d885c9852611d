import math

import pytest
import torch
from torch import nn

from tsemon.errors import InvalidArgument
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.tasks import RecurrentTask, cross_entropy

INPUTS, TARGETS = torch.eye(3), torch.tensor([0, 1, 2])


def linear():
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class TestTrainSteps:
    def test_yield_the_loss_from_before_each_step(self):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses = list(train_steps(model, optimizer, [(INPUTS, TARGETS)] * 5))
        torch.testing.assert_close(losses[0].item(), math.log(3), rtol=1e-6, atol=0)
        assert losses == sorted(losses, reverse=True)
        assert not losses[0].requires_grad

    def test_equal_gradient_descent_by_hand(self):
        model = linear()
        next(train_steps(model, torch.optim.SGD(model.parameters(), lr=0.5), [(INPUTS, TARGETS)]))
        # dL/dW of softmax cross entropy at zero logits: (1/3 - [i = j]) / 3 for one-hot inputs.
        torch.testing.assert_close(model.weight.detach(), -0.5 * (torch.full((3, 3), 1 / 3) - torch.eye(3)) / 3)

    def test_leave_the_gradients_of_the_step_to_be_seen(self):
        model = linear()
        next(train_steps(model, torch.optim.SGD(model.parameters(), lr=0.5), [(INPUTS, TARGETS)]))
        torch.testing.assert_close(model.weight.detach(), -0.5 * model.weight.grad)

    def test_leave_the_learning_rate_of_the_step_to_be_seen(self):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        steps = train_steps(model, optimizer, [(INPUTS, TARGETS)] * 3, schedule)
        assert [optimizer.param_groups[0]["lr"] for _ in steps] == [1.0, 0.5, 0.25]

    def test_go_on_from_the_mean_gradient_of_several_batches(self):
        whole, parts = linear(), linear()
        weights = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
        batch = (weights, TARGETS)
        next(train_steps(whole, torch.optim.SGD(whole.parameters(), lr=0.5), [batch]))
        singles = [(weights[i : i + 1], TARGETS[i : i + 1]) for i in range(3)]
        (loss,) = train_steps(parts, torch.optim.SGD(parts.parameters(), lr=0.5), singles, accumulation=3)
        torch.testing.assert_close(loss.item(), math.log(3), rtol=1e-6, atol=0)
        # The same sums in another order: float32 rounding.
        torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-6, atol=1e-7)

    def test_take_the_mean_of_a_last_step_that_has_fewer_batches(self):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = list(train_steps(model, optimizer, [(INPUTS, TARGETS)] * 3, accumulation=2))
        torch.testing.assert_close(torch.stack(losses), torch.full((2,), math.log(3)))

    def test_clip_the_gradient_to_its_norm(self):
        model = linear()
        next(train_steps(model, torch.optim.SGD(model.parameters(), lr=0.5), [(INPUTS, TARGETS)], clip_norm=0.01))
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        assert norm == pytest.approx(0.01, rel=1e-3)  # torch adds 1e-6 to the norm that it divides by

    def test_run_the_forward_pass_in_the_precision_asked_for(self):
        model, seen = linear(), []
        model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = next(train_steps(model, optimizer, [(INPUTS, TARGETS)], precision=torch.bfloat16))
        assert (seen, loss.dtype, model.weight.dtype) == ([torch.bfloat16], torch.float32, torch.float32)

    def test_train_in_train_mode_whatever_happened_between_steps(self):
        model, seen = linear(), []
        model.register_forward_hook(lambda module, _, __: seen.append(module.training))
        for _ in train_steps(model, torch.optim.SGD(model.parameters(), lr=0.5), [(INPUTS, TARGETS)] * 2):
            model.eval()
        assert seen == [True, True]

    def test_give_a_memory_back_with_the_next_batch(self):
        model, task = Remembering(), RecurrentTask()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(torch.full((1, 2, 3), float(i)), torch.tensor([[0, 1]])) for i in range(3)]
        for _ in train_steps(model, optimizer, batches, task=task):
            pass
        assert model.memories == [None, 0.0, 1.0]
        assert task.state_dict()["memory"][0].flatten()[0] == 2.0

    def test_need_at_least_one_batch_a_step(self):
        with pytest.raises(InvalidArgument, match="at least 1, got 0"):
            next(train_steps(linear(), torch.optim.SGD(linear().parameters()), [], accumulation=0))


class Remembering(nn.Module):
    """Returns its inputs as its memory, as Transformer-XL returns its hidden states, and notes what it was given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.memories = []

    def forward(self, x_BTD, memory, targets_BT):
        self.memories.append(memory and memory[0].flatten()[0].item())
        return cross_entropy(self.linear(x_BTD), targets_BT), [x_BTD]


class TestCrossEntropy:
    def test_is_the_mean_over_all_tokens(self):
        logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
        targets = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
        expected = -torch.stack([logits[b, t].log_softmax(0)[targets[b, t]] for b in range(2) for t in range(4)]).mean()
        torch.testing.assert_close(cross_entropy(logits, targets), expected)

import math

import torch
from torch import nn

from tsemon.train.loop import cross_entropy, train_steps

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


class TestCrossEntropy:
    def test_is_the_mean_over_all_tokens(self):
        logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
        targets = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
        expected = -torch.stack([logits[b, t].log_softmax(0)[targets[b, t]] for b in range(2) for t in range(4)]).mean()
        torch.testing.assert_close(cross_entropy(logits, targets), expected)

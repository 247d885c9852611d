"""Gradients before clipping, however the training loop clips."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.tsemon.probes.probing import ALL, raise_fault
from tsemon.probes import Probe, find_blocks

MAX_NORM = 0.01
"""Far below every gradient here."""


def with_torch(params):
    nn.utils.clip_grad_norm_(params, MAX_NORM)


def one_by_one(params):
    nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=False)


def by_a_name_of_its_own(params):
    imported_by_name(params, MAX_NORM)


def in_two_calls(params):
    norm = nn.utils.get_total_norm([p.grad for p in params])
    nn.utils.clip_grads_with_norm_(params, MAX_NORM, norm)


def by_value(params):
    nn.utils.clip_grad_value_(params, 1e-6)


def twice(params):
    nn.utils.clip_grad_norm_(params, 10 * MAX_NORM)
    nn.utils.clip_grad_norm_(params, MAX_NORM)


def by_hand(params):
    norm = torch.cat([p.grad.flatten() for p in params]).norm()
    for p in params:
        p.grad.mul_(MAX_NORM / norm)


def by_hand_on_data(params):
    for p in params:
        p.grad.data.mul_(1.37e-4)


def by_new_gradients(params):
    for p in params:
        p.grad = p.grad * 1.37e-4


CLIPS = [with_torch, one_by_one, by_a_name_of_its_own, in_two_calls, by_value, twice]
CLIPS += [by_hand, by_hand_on_data, by_new_gradients]


def squared(tensors):
    return sum(t.detach().double().square().sum() for t in tensors)


def norm(tensors):
    return squared(tensors).sqrt()


def gradients_of(params):
    return {p: p.grad.detach().clone() for p in params if p.grad is not None}


class Blocks:
    """The oracle: norms per block from copies of the gradients."""

    def __init__(self, model):
        self.blocks = [list(block.module.parameters()) for block in find_blocks(model)]
        embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        self.counted = [p for p in model.parameters() if id(p) not in embeddings and p.numel() > 1]

    def norms(self, gradients):
        return torch.stack([norm(gradients[p] for p in block) for block in self.blocks])

    def total(self, gradients):
        return norm(gradients[p] for p in self.counted)

    def assert_measured(self, reading, before, after):
        for prefix, gradients in (("", before), ("clipped_", after)):
            got = reading.layers[f"{prefix}grad_norm"].double()
            torch.testing.assert_close(got, self.norms(gradients), rtol=1e-5, atol=0)
            got = reading.scalars[f"total_{prefix}grad_norm"].double()
            torch.testing.assert_close(got, self.total(gradients), rtol=1e-5, atol=0)


@pytest.fixture
def armed():
    """Make a probe that watches the next step."""
    probes = []

    def make(model, *optimizers):
        probes.append(Probe(model, optimizers, find_blocks(model), raise_fault))
        probes[-1].arm(ALL)
        return probes[-1]

    yield make
    for probe in probes:
        probe.disarm()


def model_with_oracle():
    torch.manual_seed(0)
    model, forward = zoo.gpt2()
    return model, lambda: forward().square().mean(), Blocks(model)


class TestGradientsBeforeClipping:
    @pytest.mark.parametrize("clip", CLIPS)
    def test_are_those_that_the_backward_pass_made(self, armed, clip):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            probe = armed(model, optimizer)
            loss().backward()
            before = gradients_of(model.parameters())
            clip(list(model.parameters()))
            after = gradients_of(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            oracle.assert_measured(probe.collect(), before, after)
            assert probe.not_measured.keys().isdisjoint({"grad_norm", "total_grad_norm", "clipped_grad_norm"})
            probe.disarm()

    def test_are_what_clip_grad_norm_returns(self, armed):
        """Of a model without embeddings."""
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        optimizer = SGD(model.parameters(), lr=1e-3)
        probe = armed(model, optimizer)
        (1e4 * forward().square().mean()).backward()
        returned = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        reading = probe.collect()
        torch.testing.assert_close(reading.scalars["total_grad_norm"], returned)
        torch.testing.assert_close(reading.scalars["total_clipped_grad_norm"], torch.tensor(1.0))

    def test_of_queries_and_keys_and_ends_are_before_clipping_too(self, armed):
        readings = []
        for clip in (lambda _: None, with_torch):
            torch.manual_seed(0)
            model, forward = zoo.our_language_model()
            optimizer = AdamW(model.parameters())
            probe = armed(model, optimizer)
            forward().square().mean().backward()
            clip(list(model.parameters()))
            optimizer.step()
            readings.append(probe.collect())
        plain, clipped = readings
        assert torch.equal(clipped.layers["grad_norm_qk"], plain.layers["grad_norm_qk"])
        for name in ("embedding_grad_norm", "head_grad_norm"):
            assert clipped.scalars[name] == plain.scalars[name] > 0
        for name in ("gradient_alignment",):  # of a direction, which a common factor does not turn
            torch.testing.assert_close(clipped.layers[name], plain.layers[name], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("is_scaled", [False, True])
    @pytest.mark.parametrize("fused", [False, True])
    def test_are_exactly_those_after_it_where_nothing_clips(self, armed, is_scaled, fused):
        model, loss, _ = model_with_oracle()
        optimizer = AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, enabled=is_scaled)
        probe = armed(model, optimizer)
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        reading = probe.collect()
        assert torch.equal(reading.layers["grad_norm"], reading.layers["clipped_grad_norm"])
        assert torch.equal(reading.scalars["total_grad_norm"], reading.scalars["total_clipped_grad_norm"])
        assert (reading.layers["grad_norm"] > 0).all()

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("clip", [with_torch, by_hand])
    def test_are_without_the_loss_scale(self, armed, clip, fused):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        probe = armed(model, optimizer)
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        before = gradients_of(model.parameters())
        clip(list(model.parameters()))
        after = gradients_of(model.parameters())
        scaler.step(optimizer)
        oracle.assert_measured(probe.collect(), before, after)

    @pytest.mark.parametrize("fused", [False, True])
    def test_are_without_the_loss_scale_where_scaled_gradients_are_clipped(self, armed, fused):
        """A mistake that is often made."""
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=3e4)
        probe = armed(model, optimizer)
        scaler.scale(loss()).backward()
        before = {p: gradient / 3e4 for p, gradient in gradients_of(model.parameters()).items()}
        with_torch(list(model.parameters()))
        after = {p: gradient / 3e4 for p, gradient in gradients_of(model.parameters()).items()}
        scaler.step(optimizer)
        oracle.assert_measured(probe.collect(), before, after)

    @pytest.mark.parametrize("clip", [with_torch, by_hand])
    def test_are_the_sum_over_micro_batches(self, armed, clip):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probe = armed(model, optimizer)
        for _ in range(3):
            (loss() / 3).backward()
        before = gradients_of(model.parameters())
        clip(list(model.parameters()))
        after = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), before, after)

    @pytest.mark.parametrize("clip", [with_torch, by_hand])
    def test_of_several_optimizers_are_each_before_its_own_clipping(self, armed, clip):
        """The second backward pass comes after the first optimizer's step, as in adversarial training."""
        model, loss, oracle = model_with_oracle()
        first, others = list(model.transformer.h[0].parameters()), [*model.transformer.h[1:].parameters()]
        others += [p for name, p in model.named_parameters() if ".h." not in name and name != "lm_head.weight"]
        optimizers = [AdamW(first), AdamW(others)]
        probe = armed(model, *optimizers)
        before, after = {}, {}
        for optimizer, params in zip(optimizers, (first, others), strict=True):
            model.zero_grad()
            loss().backward()
            before |= gradients_of(params)
            clip(params)
            after |= gradients_of(params)
            optimizer.step()
        oracle.assert_measured(probe.collect(), before, after)

    @pytest.mark.parametrize("clip", [with_torch, by_hand])
    def test_of_a_closure_are_before_its_clipping(self, armed, clip):
        model, loss, oracle = model_with_oracle()
        optimizer = SGD(model.parameters(), lr=1e-3)
        probe, seen = armed(model, optimizer), []

        def closure():
            optimizer.zero_grad()
            value = loss()
            value.backward()
            seen.append(gradients_of(model.parameters()))
            clip(list(model.parameters()))
            seen.append(gradients_of(model.parameters()))
            return value

        optimizer.step(closure)
        oracle.assert_measured(probe.collect(), *seen)

    def test_are_read_once_under_reentrant_checkpointing(self, armed):
        """Each of its nested backward passes ends before the gradient of the next block is there."""
        torch.manual_seed(0)
        model, _ = zoo.torch_encoder()
        for layer in model.layers:
            layer.forward = lambda x, *args, run=layer.forward, **kwargs: checkpoint(run, x, use_reentrant=True)
        optimizer, oracle = AdamW(model.parameters()), Blocks(model)
        probe = armed(model, optimizer)
        x = torch.randn(2, 5, 32, requires_grad=True)
        model(x).square().mean().backward()
        before = gradients_of(model.parameters())
        by_hand(list(model.parameters()))
        optimizer.step()
        got = probe.collect().layers["grad_norm"].double()
        torch.testing.assert_close(got, oracle.norms(before), rtol=1e-5, atol=0)

    def test_are_seen_by_two_monitors_side_by_side(self, armed):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probes = [armed(model, optimizer) for _ in range(2)]
        loss().backward()
        before = gradients_of(model.parameters())
        with_torch(list(model.parameters()))
        after = gradients_of(model.parameters())
        optimizer.step()
        for probe in probes:
            oracle.assert_measured(probe.collect(), before, after)
            probe.disarm()

    def test_of_another_model_change_nothing(self, armed):
        model, loss, oracle = model_with_oracle()
        other, other_loss, _ = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probe = armed(model, optimizer)
        loss().backward()
        other_loss().backward()
        with_torch(list(other.parameters()))
        before = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), before, before)

    def test_that_are_not_finite_stay_so_whatever_clipping_makes_of_them(self, armed):
        model, loss, _ = model_with_oracle()
        optimizer = SGD(model.parameters(), lr=1e-3)
        probe = armed(model, optimizer)
        first = model.transformer.h[1].ln_1.weight
        first.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        loss().backward()
        for p in model.parameters():
            p.grad.nan_to_num_(posinf=0.0).clamp_(-1, 1)
        optimizer.step()
        reading = probe.collect()
        assert reading.layers["grad_norm"].isfinite().tolist() == [True, False, True]
        assert reading.scalars["total_grad_norm"] == math.inf
        assert reading.scalars["total_clipped_grad_norm"].isfinite()


class TestGradientsThatNoBackwardPassOfTheStepMade:
    @pytest.mark.parametrize("is_set_by_hand", [False, True])
    def test_have_no_norm_before_clipping_and_that_is_said(self, armed, is_set_by_hand):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        if is_set_by_hand:
            probe = armed(model, optimizer)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        else:
            loss().backward()
            probe = armed(model, optimizer)
        by_hand(list(model.parameters()))
        after = gradients_of(model.parameters())
        optimizer.step()
        reading = probe.collect()
        for name in ("grad_norm", "grad_norm_qk"):
            assert reading.layers[name].isnan().all()
        for name in ("grad_norm", "total_grad_norm", "grad_norm_qk"):
            assert "were not made by a backward pass since the last call" in probe.not_measured[name]
        torch.testing.assert_close(reading.layers["clipped_grad_norm"].double(), oracle.norms(after), rtol=1e-5, atol=0)
        assert "clipped_grad_norm" not in probe.not_measured

    def test_are_known_where_torch_clips_them(self, armed):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        loss().backward()
        probe = armed(model, optimizer)
        before = gradients_of(model.parameters())
        with_torch(list(model.parameters()))
        after = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), before, after)


def num_hooks_of(function):
    """Around its calls, of all probes that this process has."""
    return len(getattr(function, "before", ())) + len(getattr(function, "after", ()))


class TestHooksOnGradients:
    def test_are_gone_after_the_step(self, armed):
        model, _, _ = model_with_oracle()
        functions = (
            lambda: clip_grad._group_tensors_by_device_and_dtype,
            lambda: torch.amp.GradScaler._unscale_grads_,
        )
        kept = [function() for function in functions]
        num_hooks = [num_hooks_of(function) for function in kept]
        probes = [armed(model, AdamW(model.parameters())) for _ in range(2)]
        assert all(p._post_accumulate_grad_hooks for p in model.parameters())
        assert [num_hooks_of(function()) for function in functions] == [num + 2 for num in num_hooks]
        for probe in probes:
            probe.disarm()
        assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())
        assert [function() for function in functions] == kept
        assert [num_hooks_of(function) for function in kept] == num_hooks

    def test_leave_those_of_the_user_where_they_are(self, armed):
        model, loss, _ = model_with_oracle()
        called = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(called.append)
        armed(model, AdamW(model.parameters())).disarm()
        loss().backward()
        assert len(called) == len(list(model.parameters()))

    def test_change_no_bit_of_the_gradients(self, armed):
        gradients = []
        for is_watched in (False, True):
            model, loss, _ = model_with_oracle()
            if is_watched:
                armed(model, AdamW(model.parameters()))
            loss().backward()
            with_torch(list(model.parameters()))
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def divided(params, number):
    for p in params:
        p.grad.div_(number)


class TestGradientsThatTheLoopDivides:
    @pytest.mark.parametrize("number", [4, 65, 1023, 4095, 4096, 0.37])
    def test_are_measured_after_that_whatever_the_number_is(self, armed, number):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probe = armed(model, optimizer)
        (loss() * number).backward()
        divided(model.parameters(), number)
        after = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), after, after)

    def test_are_measured_before_it_if_each_tensor_has_a_number_of_its_own(self, armed):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probe = armed(model, optimizer)
        loss().backward()
        before = gradients_of(model.parameters())
        for number, p in enumerate(model.parameters(), 1):
            p.grad.div_(number / 3)
        after = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), before, after)

    def test_are_measured_after_that_if_torch_clips_some_of_them_then(self, armed):
        model, loss, oracle = model_with_oracle()
        optimizer = AdamW(model.parameters())
        probe = armed(model, optimizer)
        (loss() * 65).backward()
        divided(model.parameters(), 65)
        before = gradients_of(model.parameters())
        nn.utils.clip_grad_norm_(oracle.blocks[0], MAX_NORM)
        after = gradients_of(model.parameters())
        optimizer.step()
        oracle.assert_measured(probe.collect(), before, after)

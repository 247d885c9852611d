import math

import pytest
import torch
from torch.nn import functional as F

from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of, reading_of
from tsemon.probes import find_blocks


class TestParameters:
    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
            lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
            lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
        ],
        ids=["adamw", "adamw-amsgrad", "adamw-foreach", "adamw-fused", "adam", "sgd", "rmsprop"],
    )
    def test_updates_equal_the_difference_of_the_parameters(self, make_optimizer):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = make_optimizer(model.parameters())
        for _ in range(3):  # so that the moments are not those of a first step
            forward().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        reading, _ = reading_of(model, forward, optimizer)
        for layer, block in enumerate(find_blocks(model)):
            names = [f"{block.name}.{name}" for name, _ in block.module.named_parameters()]
            old = torch.cat([before[name].flatten() for name in names])
            new = torch.cat([model.get_parameter(name).detach().double().flatten() for name in names])
            gradient = torch.cat([model.get_parameter(name).grad.double().flatten() for name in names])
            expected = {
                "param_norm": new.norm(),
                "grad_norm": gradient.norm(),
                "update_norm": (new - old).norm(),
                "update_ratio": (new - old).norm() / old.norm(),
                "update_alignment": F.cosine_similarity(new - old, old, dim=0),
            }
            for name, value in expected.items():
                torch.testing.assert_close(reading.layers[name][layer].double(), value, rtol=1e-3, atol=1e-5, msg=name)

    def test_updates_are_measured_as_the_parameters_are_now(self):
        """After attach they may have become bfloat16, where the rebuilt update is not what rounding left."""
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        model.to(torch.bfloat16)
        before = torch.cat([p.detach().double().flatten() for p in model.transformer.h[0].parameters()])
        probe.arm(ALL)
        forward().square().mean().backward()
        optimizer.step()
        got = probe.collect().layers["update_norm"][0]
        after = torch.cat([p.detach().double().flatten() for p in model.transformer.h[0].parameters()])
        torch.testing.assert_close(got.double(), (after - before).norm(), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("overflows", [False, True])
    def test_gradients_and_updates_are_those_without_the_loss_scale(self, fused, overflows):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        block = model.transformer.h[0]
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        loss = forward().square().mean()
        plain = torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        scaler.scale(loss).backward()
        if overflows:
            next(block.parameters()).grad.fill_(torch.inf)
        before = torch.cat([p.detach().flatten().clone() for p in block.parameters()])
        scaler.step(optimizer)
        after = torch.cat([p.detach().flatten() for p in block.parameters()])
        reading = probe.collect()
        probe.disarm()
        if overflows and not fused:
            assert "made no step" in probe.not_measured["update_norm"]
            return
        torch.testing.assert_close(reading.layers["update_norm"][0], (after - before).norm(), rtol=1e-3, atol=1e-7)
        if not overflows:
            expected = torch.cat([g.flatten() for g in plain]).norm()
            torch.testing.assert_close(reading.layers["grad_norm"][0], expected, rtol=1e-3, atol=0)

    def test_gradients_of_a_closure_are_those_that_it_made(self):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        probe.arm(ALL)

        def closure():
            optimizer.zero_grad()
            loss = forward().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        reading = probe.collect()
        expected = torch.cat([p.grad.flatten() for p in model.layers[0].parameters()]).norm()
        torch.testing.assert_close(reading.layers["grad_norm"][0], expected)

    def test_a_nan_in_one_block_shows_there_and_in_the_total(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        forward().sum().backward()
        next(model.layers[1].parameters()).grad[0, 0] = math.nan
        optimizer.step()
        reading = probe.collect()
        assert reading.layers["grad_norm"].isnan().tolist() == [False, True, False]
        assert reading.layers["param_norm"].isnan().tolist() == [False, True, False]
        assert all(reading.scalars[name].isnan() for name in ("total_grad_norm", "total_param_norm", "step_size"))

    def test_of_a_frozen_block_there_is_no_gradient_and_that_is_said(self):
        model, forward = zoo.our_language_model()
        model.blocks[0].requires_grad_(False)
        reading, probe = reading_of(model, forward, torch.optim.AdamW(model.parameters()))
        assert reading.layers["grad_norm"].isnan().tolist() == [True, False, False]
        assert probe.not_measured == {"grad_norm": "1 of 3 blocks had no gradient (are they frozen?)"}

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_ratio_and_alignment_are_against_the_whole_block_when_part_of_it_is_frozen(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        for layer in model.layers:
            layer.linear1.requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=1e-1))
        delta = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()]) - before
        got = reading.layers["update_ratio"][0].double()
        torch.testing.assert_close(got, delta.norm() / before.norm(), rtol=1e-3, atol=0)
        got, alignment = reading.layers["update_alignment"][0].double(), F.cosine_similarity(delta, before, dim=0)
        torch.testing.assert_close(got, alignment, rtol=1e-3, atol=2e-5)

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_a_frozen_block_does_not_move_and_counts_in_the_whole(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        model.layers[0].requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=1e-1))
        delta = torch.cat([p.detach().double().flatten() for p in model.parameters()]) - before
        assert reading.layers["update_norm"][0] == 0
        assert reading.layers["update_ratio"][0] == 0
        assert reading.layers["update_alignment"][0].isnan(), "what does not move has no direction"
        got, expected = reading.scalars["update_alignment"].double(), F.cosine_similarity(delta, before, dim=0)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-5)

    def test_the_optimizer_inside_a_wrapper_is_watched(self):
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer

            def step(self):
                self.optimizer.step()

        model, forward = zoo.torch_encoder()
        reading, probe = reading_of(model, forward, Wrapper(torch.optim.AdamW(model.parameters())))
        assert (reading.layers["update_norm"] > 0).all()
        assert probe.not_measured == {}

    def test_several_steps_are_said_to_be_several(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        for _ in range(3):
            forward().sum().backward()
            optimizer.step()
        probe.collect()
        assert "the first of 3 optimizer steps" in probe.not_measured["update_norm"]

    def test_a_step_that_calls_the_step_it_extends_is_one(self):
        class Extended(torch.optim.AdamW):
            def step(self, closure=None):
                return super().step(closure)

        model, forward = zoo.torch_encoder()
        torch.optim.AdamW(model.parameters())  # from the first on, torch calls hooks around the step of its class
        reading, probe = reading_of(model, forward, Extended(model.parameters()))
        assert probe.not_measured == {}
        assert (reading.layers["update_norm"] > 0).all()

    def test_parameters_of_another_optimizer_are_said_to_be_missing(self):
        model, forward = zoo.torch_encoder()
        _, probe = reading_of(model, forward, torch.optim.AdamW(model.layers[0].parameters()))
        assert "which another optimizer must train" in probe.not_measured["update_norm"]

    def test_totals_leave_embeddings_out_and_count_tied_weights_once(self):
        model, forward = zoo.gpt2()
        reading, _ = reading_of(model, forward)
        counted = [p for name, p in model.named_parameters() if "wte" not in name and "wpe" not in name]
        expected = torch.cat([p.detach().flatten() for p in counted]).norm()
        torch.testing.assert_close(reading.scalars["total_param_norm"], expected, rtol=1e-5, atol=0)

    def test_the_learning_rate_is_the_one_that_was_used(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        forward().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1  # as a schedule does
        assert probe.collect().scalars["learning_rate"] == 0.5

    def test_gradients_are_seen_although_the_loop_clears_them(self):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (probe.collect().layers["grad_norm"] > 0).all()

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of, raise_fault, reading_of
from tsemon.measures import power_law_fit
from tsemon.models import ReparameterisationConfig, ReparameterisedAttention
from tsemon.probes import Probe, find_blocks, why_trains_nothing
from tsemon.probes.coordinates import MAX_COORDINATES, Coordinates, stride_of
from tsemon.probes.groups import sub_steps
from tsemon.probes.growth import MAX_POINTS, NormGrowth
from tsemon.probes.parameters import ParameterProbe as Parameters
from tsemon.probes.query_key import queries_and_keys


class TestTheWeightsOfSubSteps:
    def test_leave_out_cross_attention_and_norms(self):
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2)
        found = sub_steps(find_blocks(decoder))
        for layer in decoder.layers:
            named = {id(p): name for name, p in layer.named_parameters()}
            attention, feed_forward = (
                {named[i] for i in found[metric] & named.keys()}
                for metric in ("attention_param_norm", "feedforward_param_norm")
            )
            assert {name.split(".")[0] for name in attention} == {"self_attn"}
            assert {name.split(".")[0] for name in feed_forward} == {"linear1", "linear2"}


class TestParameters:
    @pytest.mark.parametrize("num_steps", [0, 3])  # the moments of a first step are not those of a later one
    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            (AdamW, {"weight_decay": 0.1}),
            (AdamW, {"amsgrad": True}),
            (AdamW, {"maximize": True}),
            (AdamW, {"foreach": True}),
            (AdamW, {"fused": True}),
            (AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
            (AdamW, {"lr": torch.tensor(1e-2), "fused": True, "weight_decay": 10.0}),
            (Adam, {"weight_decay": 0.1}),
            (Adam, {"decoupled_weight_decay": True, "weight_decay": 1.0, "maximize": True}),
            (SGD, {"lr": 0.1}),
            (SGD, {"lr": torch.tensor(0.1), "weight_decay": 0.1, "fused": True}),
            (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "fused": True}),
            (torch.optim.RMSprop, {"lr": 1e-3}),
            (torch.optim.NAdam, {"lr": 1e-3}),
        ],
        ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value) if value else "plain",
    )
    def test_updates_equal_the_difference_of_the_parameters(self, kind, settings, num_steps):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = kind(model.parameters(), **({"lr": 1e-2} | settings))
        for _ in range(num_steps):
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
                "trained_update_ratio": (new - old).norm() / old.norm(),
                "update_alignment": F.cosine_similarity(new - old, old, dim=0),
                "gradient_alignment": F.cosine_similarity(gradient, old, dim=0),
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

    @pytest.mark.parametrize("kind", [AdamW, SGD])
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("overflows", [False, True])
    @pytest.mark.parametrize("is_first_step", [False, True])
    def test_gradients_and_updates_are_those_without_the_loss_scale(self, kind, fused, overflows, is_first_step):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused)
        if not is_first_step:
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
        next(model.layers[1].parameters()).register_hook(lambda gradient: gradient.masked_fill(gradient > 0, math.nan))
        forward().square().mean().backward()
        optimizer.step()
        reading = probe.collect()
        assert reading.layers["grad_norm"].isnan().tolist() == [False, True, False]
        assert reading.layers["param_norm"].isnan().tolist() == [False, True, False]
        assert all(reading.scalars[name].isnan() for name in ("total_grad_norm", "total_param_norm", "step_size"))

    def test_of_a_frozen_block_there_is_no_gradient_and_that_is_said(self):
        model, forward = zoo.our_language_model()
        model.blocks[0].requires_grad_(False)
        reading, probe = reading_of(model, forward, torch.optim.AdamW(model.parameters()))
        for name in ("grad_norm", "grad_norm_qk", "gradient_alignment", "update_alignment", "trained_update_ratio"):
            assert reading.layers[name].isnan().tolist() == [True, False, False]
            assert probe.not_measured[name] == (
                "1 of 3 blocks are frozen: none of their parameters requires a gradient"
            )

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_do_not_count_what_frozen_parameters_have_left_over(self, kind):
        """As after pretraining in the same process: the optimizer does not have them, so nobody clears their gradients."""
        model, forward = zoo.our_language_model()
        model.blocks[:2].requires_grad_(False)
        readings = []
        for gradient in (None, torch.tensor(7.0)):
            for p in model.blocks[:2].parameters():
                p.grad = None if gradient is None else gradient.expand_as(p).clone()
            optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-9)
            model.zero_grad() if gradient is None else optimizer.zero_grad()
            reading, probe = reading_of(model, forward, optimizer)
            readings.append({name: value.item() for name, value in reading.scalars.items() if "grad" in name})
            assert reading.layers["grad_norm"].isnan().tolist() == [True, True, False]
            assert probe.not_measured["grad_norm"].startswith("2 of 3 blocks are frozen")
        assert readings[0] == pytest.approx(readings[1], rel=1e-5)  # the first step has moved the weights a little
        assert math.isfinite(readings[0]["total_grad_norm"])

    def test_of_a_block_that_the_loss_does_not_depend_on_there_is_no_gradient_and_that_is_said(self):
        model, forward = zoo.our_language_model()
        model.blocks[0].register_forward_hook(lambda _, args, output: output.detach())
        reading, probe = reading_of(model, forward, torch.optim.AdamW(model.parameters()))
        assert reading.layers["grad_norm"].isnan().tolist() == [True, False, False]
        assert probe.not_measured["grad_norm"] == (
            "1 of 3 blocks had no gradient when the optimizer stepped, although they are not frozen: the loss did not "
            "depend on them, or their gradients had been cleared"
        )

    def test_of_layers_that_share_them_count_in_the_first_and_that_is_said(self):
        model, forward = zoo.albert()
        reading, probe = reading_of(model, forward, torch.optim.AdamW(model.parameters()))
        for name in (
            "param_norm",
            "grad_norm",
            "grad_norm_qk",
            "gradient_alignment",
            "update_norm",
            "update_alignment",
        ):
            assert reading.layers[name].isnan().tolist() == [False, True, True]
            assert probe.not_measured[name].startswith("2 of 3 blocks have no parameters of their own")

    # The output is normalised, so its mean square hardly has a gradient: a small step would be lost in rounding.
    @pytest.mark.parametrize(("kind", "lr"), [(torch.optim.AdamW, 1e-1), (torch.optim.SGD, 1e5)])
    def test_ratio_and_alignment_are_against_the_whole_block_when_part_of_it_is_frozen(self, kind, lr):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        for layer in model.layers:
            layer.linear1.requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=lr))
        delta = torch.cat([p.detach().double().flatten() for p in model.layers[0].parameters()]) - before
        got = reading.layers["update_ratio"][0].double()
        torch.testing.assert_close(got, delta.norm() / before.norm(), rtol=1e-3, atol=0)
        got, alignment = reading.layers["update_alignment"][0].double(), F.cosine_similarity(delta, before, dim=0)
        torch.testing.assert_close(got, alignment, rtol=1e-3, atol=2e-5)

    # The output is normalised, so its mean square hardly has a gradient: a small step would be lost in rounding.
    @pytest.mark.parametrize(("kind", "lr"), [(torch.optim.AdamW, 1e-1), (torch.optim.SGD, 1e5)])
    def test_a_frozen_block_does_not_move_and_counts_in_the_whole(self, kind, lr):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        model.layers[0].requires_grad_(False)
        before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        reading, _ = reading_of(model, forward, kind(model.parameters(), lr=lr))
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
        assert probe.not_measured.keys().isdisjoint({"update_norm", "grad_norm"})

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
        assert "update_norm" not in probe.not_measured
        assert (reading.layers["update_norm"] > 0).all()

    def test_parameters_of_another_optimizer_are_said_to_be_missing(self):
        model, forward = zoo.torch_encoder()
        _, probe = reading_of(model, forward, torch.optim.AdamW(model.layers[0].parameters()))
        assert "if another optimizer trains them, give attach() all optimizers" in probe.not_measured["update_norm"]

    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.RMSprop])
    def test_updates_are_known_of_what_the_given_optimizer_trains_wholly(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        blocks = [block.module for block in find_blocks(model)]
        blocks[1].requires_grad_(False)
        trained = [*blocks[0].parameters(), *[*blocks[2].parameters()][:-1], *model.head.parameters()]
        whole, _ = reading_of(model, forward, kind(model.parameters(), lr=1e-9))
        reading, probe = reading_of(model, forward, kind(trained, lr=1e-2))
        for metric in ("update_norm", "update_ratio"):
            moves, stands, *unknown = reading.layers[metric]
            assert moves > 0
            assert stands == 0, "frozen"
            assert all(value.isnan() for value in unknown)
        assert reading.layers["update_alignment"].isfinite().tolist() == [True, False, *[False] * (len(blocks) - 2)]
        assert reading.scalars["head_update_norm"] > 0
        lost = {"step_size", "update_alignment", "embedding_update_norm"}
        assert lost <= whole.scalars.keys()
        assert lost.isdisjoint(reading.scalars)
        strangers = {name for name, why in probe.not_measured.items() if "if another optimizer trains them" in why}
        assert strangers == {*lost, "update_norm", "update_ratio", "trained_update_ratio"}
        assert whole.layers["grad_norm"].isfinite().tolist() == reading.layers["grad_norm"].isfinite().tolist()

    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.RMSprop])
    def test_updates_are_not_there_where_each_block_has_another_optimizer(self, kind):
        model, forward = zoo.our_language_model()
        reading, probe = reading_of(model, forward, kind(model.head.parameters(), lr=1e-2))
        assert reading.layers.keys().isdisjoint(Parameters.UPDATES_OF_BLOCKS)
        assert {name for name in Parameters.UPDATES if name in reading.scalars} == {"head_update_norm"}
        assert {*Parameters.UPDATES} - probe.not_measured.keys() == {"head_update_norm"}

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

    @pytest.mark.parametrize("clears_in_a_hook", [False, True])
    def test_gradients_are_seen_although_the_loop_clears_them(self, clears_in_a_hook):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        if clears_in_a_hook:
            optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reading = probe.collect()
        assert (reading.layers["grad_norm"] > 0).all()
        assert (reading.layers["update_norm"] > 0).all()


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


def counted(model):
    """The parameters that count in totals."""
    left_out = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [p for p in model.parameters() if id(p) not in left_out and p.numel() > 1]


class TestSeveralOptimizers:
    def test_are_measured_as_one(self):
        readings = []
        for split in (False, True):
            torch.manual_seed(0)
            model, forward = zoo.gpt2()
            params = list(model.parameters())
            optimizers = [AdamW(part, lr=1e-2) for part in ((params[::2], params[1::2]) if split else (params,))]
            probe = Probe(model, optimizers, find_blocks(model), raise_fault)
            for _ in range(2):
                probe.arm(ALL)
                forward().square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                reading = probe.collect()
                not_measured = probe.not_measured
                probe.disarm()
            assert not_measured.keys().isdisjoint({"update_norm", "grad_norm", "gradient_cosine"})
            readings.append(reading)
        one, several = readings
        for name in ("grad_norm", "update_norm", "update_ratio", "update_alignment", "gradient_alignment"):
            torch.testing.assert_close(several.layers[name], one.layers[name])
        for name in ("total_grad_norm", "step_size", "gradient_cosine", "direction_cosine"):
            torch.testing.assert_close(several.scalars[name], one.scalars[name])

    def test_may_each_step_in_the_backward_pass(self):
        """One optimizer per parameter, which steps and frees the gradient as soon as that is there."""
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        before = flat(counted(model))
        gradients = {}
        optimizers = {p: AdamW([p], lr=1e-2) for p in model.parameters()}

        def step(p):
            gradients[p] = p.grad.clone()
            optimizers[p].step()
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        probe = Probe(model, list(optimizers.values()), find_blocks(model), raise_fault)
        probe.arm(ALL)
        forward().square().mean().backward()
        reading = probe.collect()
        assert "update_norm" not in probe.not_measured
        expected = flat(gradients[p] for p in counted(model)).norm()
        torch.testing.assert_close(reading.scalars["total_grad_norm"].double(), expected, rtol=1e-5, atol=0)
        moved = flat(counted(model)) - before
        torch.testing.assert_close(reading.scalars["step_size"].double(), moved.norm(), rtol=1e-4, atol=0)

    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.RMSprop])
    def test_of_which_a_scaler_skips_one_move_what_they_move(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        halves = [list(model.transformer.h[0].parameters()), list(model.transformer.h[1:].parameters())]
        optimizers = [kind(half, lr=1e-2) for half in halves]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        probe = Probe(model, optimizers, find_blocks(model), raise_fault)
        probe.arm(ALL)
        scaler.scale(forward().square().mean()).backward()
        halves[0][0].grad.fill_(torch.inf)
        before = flat(halves[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        reading = probe.collect()
        assert reading.layers["update_norm"][0] == 0
        assert reading.layers["update_ratio"][0] == 0
        assert "1 of 2 optimizers" in probe.not_measured["grad_norm"]
        moved = (flat(halves[1]) - before).norm()
        torch.testing.assert_close(reading.layers["update_norm"][1:].double().norm(), moved, rtol=1e-4, atol=1e-9)


class TestAnOptimizerWithoutAParameterOfTheModel:
    def test_is_told(self):
        (model, _), (copy, _) = zoo.our_language_model(), zoo.our_language_model()
        text = why_trains_nothing(model, [AdamW(copy.parameters())])
        assert "the optimizer trains 0 of the model's" in text
        assert "was it made for another copy of the model?" in text
        several = why_trains_nothing(model, [AdamW(copy.embed.parameters()), SGD(copy.head.parameters())])
        assert "the optimizers train 0 of the model's" in several

    def test_is_not_told_where_one_of_them_trains_some(self):
        (model, _), (copy, _) = zoo.our_language_model(), zoo.our_language_model()
        optimizers = [AdamW(copy.parameters()), AdamW([model.head.bias])]
        assert why_trains_nothing(model, optimizers) is None

    def test_may_train_copies_of_them(self):
        model, _ = zoo.our_language_model()
        wide = [nn.Parameter(p.detach().double()) for p in model.parameters()]
        flat = [nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))]
        assert why_trains_nothing(model, [AdamW(flat)]) is None
        assert why_trains_nothing(model.bfloat16(), [AdamW(wide)]) is None

    def test_is_no_matter_where_nothing_is_to_be_trained(self):
        (model, _), (copy, _) = zoo.our_language_model(), zoo.our_language_model()
        optimizer = AdamW(copy.parameters())
        assert why_trains_nothing(model.requires_grad_(False), [optimizer]) is None
        assert why_trains_nothing(model.requires_grad_(True), []) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gives_no_updates(self, dtype):
        (model, _), (copy, forward) = zoo.torch_encoder(), zoo.torch_encoder()
        reading, probe = reading_of(model.to(dtype), forward, AdamW(copy.parameters()))
        assert {*reading.layers, *reading.scalars}.isdisjoint(Parameters.UPDATES)
        assert "trains 0 of the model's" in probe.not_measured["update_norm"]
        assert "trains copies of the parameters" in probe.not_measured["step_size"]
        assert "AdamW" not in probe.how["parameters"]


class TestClosures:
    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.RMSprop])
    def test_give_the_gradient_of_the_parameters_before_the_step(self, kind):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = kind(model.parameters(), lr=1e-2)
        before = flat(model.transformer.h[0].parameters())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)

        def closure():
            loss = forward().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        reading = probe.collect()
        gradient = flat(p.grad for p in model.transformer.h[0].parameters())
        expected = {
            "gradient_alignment": F.cosine_similarity(gradient, before, dim=0),
            "update_norm": (flat(model.transformer.h[0].parameters()) - before).norm(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(reading.layers[name][0].double(), value, rtol=1e-3, atol=1e-6)

    def test_of_lbfgs_give_the_whole_update_and_no_alignment_of_the_gradient(self):
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        model.register_parameter("out", nn.Parameter(torch.randn(32)))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        before = flat(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)

        def closure():
            optimizer.zero_grad()
            loss = (forward() @ model.out).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        reading = probe.collect()
        moved = (flat(model.parameters()) - before).norm()
        torch.testing.assert_close(reading.scalars["step_size"].double(), moved, rtol=1e-4, atol=0)
        assert "LBFGS" in probe.not_measured["gradient_alignment"]
        assert reading.layers["gradient_alignment"].isnan().all()


class TestEnds:
    def test_are_given_apart(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        ends = {
            "embedding": [model.embed.weight, model.positions.weight],
            "head": list(model.head.parameters()),
        }
        before = {end: flat(params) for end, params in ends.items()}
        reading, probe = reading_of(model, forward, AdamW(model.parameters(), lr=1e-2))
        for end, params in ends.items():
            gradient = flat(p.grad for p in params)
            for metric, value in (
                ("param", flat(params)),
                ("grad", gradient),
                ("update", flat(params) - before[end]),
            ):
                got = reading.scalars[f"{end}_{metric}_norm"].double()
                torch.testing.assert_close(got, value.norm(), rtol=1e-4, atol=1e-7)
        assert not any(name.startswith(("embedding_", "head_")) for name in probe.not_measured)

    def test_are_one_where_they_are_tied(self):
        model, forward = zoo.gpt2()
        reading, probe = reading_of(model, forward, AdamW(model.parameters()))
        expected = flat([model.transformer.wte.weight, model.transformer.wpe.weight]).norm()
        torch.testing.assert_close(reading.scalars["embedding_param_norm"].double(), expected, rtol=1e-5, atol=0)
        assert "head_param_norm" not in reading.scalars
        assert "tied to the embedding" in probe.not_measured["head_param_norm"]

    def test_may_be_positions_and_a_classifier(self):
        model, forward = zoo.vit()
        reading, _ = reading_of(model, forward, AdamW(model.parameters()))
        positions = model.vit.embeddings.position_embeddings.detach().norm()
        torch.testing.assert_close(reading.scalars["embedding_param_norm"], positions)
        head = flat(model.classifier.parameters()).float().norm()
        torch.testing.assert_close(reading.scalars["head_param_norm"], head)

    def test_count_in_the_totals_but_for_the_embeddings(self):
        model, forward = zoo.our_language_model()
        reading, _ = reading_of(model, forward, AdamW(model.parameters()))
        expected = flat(counted(model)).float().norm()
        torch.testing.assert_close(reading.scalars["total_param_norm"], expected)

    def test_do_not_have_what_is_inside_a_block(self):
        """Tables of relative positions and scalars there are the block's own."""
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        for block in model.blocks:
            block.relative_positions, block.temperature = nn.Embedding(50, 32), nn.Parameter(torch.full((), 3.0))
            add_to(block)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        before = [flat(block.parameters()) for block in model.blocks]
        reading, _ = reading_of(model, forward, optimizer)
        for layer, block in enumerate(model.blocks):
            whole = flat(block.parameters())
            expected = {
                "param_norm": whole.norm(),
                "grad_norm": flat(p.grad for p in block.parameters()).norm(),
                "update_norm": (whole - before[layer]).norm(),
            }
            for name, value in expected.items():
                torch.testing.assert_close(reading.layers[name][layer].double(), value, rtol=1e-5, atol=0)
        outside = flat([model.embed.weight, model.positions.weight])
        torch.testing.assert_close(reading.scalars["embedding_param_norm"].double(), outside.norm(), rtol=1e-6, atol=0)

    def test_keep_a_table_that_the_model_holds_and_blocks_use(self):
        model, forward = zoo.our_language_model()
        for block in model.blocks:
            block.shared = model.positions
        reading, _ = reading_of(model, forward, AdamW(model.parameters()))
        outside = flat([model.embed.weight, model.positions.weight])
        torch.testing.assert_close(reading.scalars["embedding_param_norm"].double(), outside.norm(), rtol=1e-6, atol=0)

    def test_say_that_a_sparse_gradient_is_left_out(self):
        model, forward = zoo.our_language_model()
        model.embed.sparse = True
        dense = [p for p in model.parameters() if p is not model.embed.weight]
        optimizers = [AdamW(dense), torch.optim.SparseAdam([model.embed.weight])]
        probe = Probe(model, optimizers, find_blocks(model), raise_fault)
        probe.arm(ALL)
        forward().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        reading = probe.collect()
        assert "sparse" in probe.not_measured["embedding_grad_norm"]
        assert reading.scalars["embedding_update_norm"] > 0


def add_to(block):
    """Let the block add a row of its table, times its scalar, to its output."""

    def adding(_, args, output):
        return output + block.temperature * block.relative_positions.weight[:12]

    block.register_forward_hook(adding)


class TestUpdatesOfWhatTrains:
    @pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.Adagrad])
    def test_are_relative_to_its_own_norm(self, kind):
        """As with LoRA: most of a block is frozen."""
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        model.requires_grad_(False)
        trained = []
        for block in model.blocks[:2]:
            block.attention.to_output = Adapted(block.attention.to_output)
            trained.append([block.attention.to_output.lora_A.weight, block.attention.to_output.lora_B.weight])
        before = [flat(params) for params in trained]
        whole = [flat(block.parameters()) for block in model.blocks]
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        reading, probe = reading_of(model, forward, optimizer)
        for layer, params in enumerate(trained):
            change = (flat(params) - before[layer]).norm()
            for name, size in (("trained_update_ratio", before[layer].norm()), ("update_ratio", whole[layer].norm())):
                torch.testing.assert_close(reading.layers[name][layer].double(), change / size, rtol=1e-3, atol=0)
        assert reading.layers["trained_update_ratio"][2].isnan()
        assert reading.layers["update_ratio"][2] == 0
        assert (
            probe.not_measured["trained_update_ratio"]
            == "1 of 3 blocks are frozen: none of their parameters requires a gradient"
        )


class Adapted(nn.Module):
    """As peft wraps a linear layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.in_features = base_layer, base_layer.in_features
        self.lora_A = nn.Linear(base_layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def settled_reading_of(model, forward):
    """Of the fourth sample: before, nothing may have shown which rows of a packed projection make values."""
    optimizer = SGD(model.parameters(), lr=1e-3)
    probe = probe_of(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        probe.arm(ALL)
        forward().float().square().mean().backward()
        optimizer.step()
        reading = probe.collect()
        probe.disarm()
        for note in reading.later:
            note.finish(note.raw)
    return reading, probe


class TestQueriesAndKeys:
    @pytest.mark.parametrize("make", [zoo.gpt2, zoo.torch_encoder, zoo.our_language_model])
    def test_are_the_first_two_thirds_of_a_packed_projection(self, make):
        torch.manual_seed(0)
        model, forward = make()
        reading, probe = settled_reading_of(model, forward)
        attention = find_blocks(model)[1].attention
        if make is zoo.gpt2:
            weight, bias = attention.c_attn.weight.grad.T, attention.c_attn.bias.grad
        elif make is zoo.torch_encoder:
            weight, bias = attention.in_proj_weight.grad, attention.in_proj_bias.grad
        else:
            weight, bias = attention.to_query_key_value.weight.grad, attention.to_query_key_value.bias.grad
        assert weight.shape == (96, 32)
        expected = flat([weight[:64], bias[:64]]).norm().float()
        torch.testing.assert_close(reading.layers["grad_norm_qk"][1], expected, rtol=1e-4, atol=0)
        assert "grad_norm_qk" not in probe.not_measured

    def test_are_all_of_a_projection_packed_without_values(self):
        attention = ReparameterisedAttention(32, 4, config=ReparameterisationConfig(reparameterisation="smoothing"))
        found = [found.parameter for found in queries_and_keys(attention)]
        assert found == [*attention.to_query_key.parameters()]

    @pytest.mark.parametrize(
        ("make", "names", "num_parameters"),
        [
            (zoo.bert, ("query", "key"), 4),
            (zoo.llama, ("q_proj", "k_proj"), 2),  # without biases
            (zoo.vit, ("q_proj", "k_proj"), 4),
            (zoo.t5, ("q", "k"), 2),
            (zoo.distilbert, ("q_lin", "k_lin"), 4),
        ],
    )
    def test_are_the_projections_that_are_named_so(self, make, names, num_parameters):
        torch.manual_seed(0)
        model, forward = make()
        reading, _ = reading_of(model, forward, SGD(model.parameters(), lr=1e-3))
        attention = find_blocks(model)[0].attention
        parameters = dict(attention.named_parameters())
        own = [p.grad for name, p in parameters.items() if name.split(".")[-2] in names]
        assert len(own) == num_parameters
        torch.testing.assert_close(reading.layers["grad_norm_qk"][0], flat(own).norm().float(), rtol=1e-4, atol=0)

    @pytest.mark.parametrize("make", [zoo.gpt_neox, zoo.bloom])
    def test_lie_head_by_head_in_an_interleaved_projection(self, make):
        torch.manual_seed(0)
        model, forward = make()
        reading, _ = settled_reading_of(model, forward)
        packed = find_blocks(model)[0].attention.query_key_value
        rows = packed.weight.grad.view(4, 3, 8, 32)[:, :2], packed.bias.grad.view(4, 3, 8)[:, :2]
        torch.testing.assert_close(reading.layers["grad_norm_qk"][0], flat(rows).norm().float(), rtol=1e-4, atol=0)

    def test_are_fewer_rows_where_heads_share_keys(self):
        attention = nn.Module()
        attention.num_heads, attention.num_key_value_heads = 4, 2
        attention.qkv_proj = nn.Linear(32, (4 + 2 * 2) * 8, bias=False)
        (found,) = queries_and_keys(attention)
        assert (found.axis, found.stretches) == (0, ((0, 48),))

    def test_are_told_apart_by_no_guess(self):
        attention = nn.Module()
        attention.qkv = nn.Linear(32, 80)
        assert queries_and_keys(attention) == "cannot tell queries and keys from values in qkv of Module"

    def test_say_where_they_were_not_found(self):
        model, _ = zoo.gpt2()
        for block in model.transformer.h:
            block.attn.c_attn = nn.Linear(32, 100)
        probe = probe_of(model, AdamW(model.parameters()))
        probe.arm(ALL)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        probe._parts["parameters"]._optimizers[0].step()
        reading = probe.collect()
        assert "c_attn of GPT2Attention" in probe.not_measured["grad_norm_qk"]
        assert "grad_norm_qk" not in reading.layers or reading.layers["grad_norm_qk"].isnan().all()


class TestDirections:
    def test_compare_with_the_sample_before(self):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        probe = probe_of(model, optimizer)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            probe.arm(ALL)
            forward().square().mean().backward()
            gradient = flat(p.grad for p in counted(model))
            optimizer.step()
            reading = probe.collect(step=step)
            seen.append((gradient, flat(counted(model)), flat(model.transformer.h[1].parameters())))
            if step == 0:
                assert "first sample" in probe.not_measured["direction_cosine"]
                assert "direction_cosine" not in reading.layers
            probe.disarm()
        gradient, weights, block = (F.cosine_similarity(*pair, dim=0).float() for pair in zip(*seen, strict=True))
        torch.testing.assert_close(reading.scalars["gradient_cosine"], gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reading.scalars["direction_cosine"], weights, rtol=1e-6, atol=0)
        torch.testing.assert_close(reading.layers["direction_cosine"][1], block, rtol=1e-6, atol=0)
        assert "direction_cosine" not in probe.not_measured

    def test_keep_no_more_than_so_many_coordinates(self):
        tensors = [torch.zeros(513, 768), torch.zeros(768)]
        stride = stride_of(tensors)
        coordinates = Coordinates()
        coordinates.compare(0, tensors, [1.0, 1.0], stride)
        (kept,) = coordinates._kept[0][0]
        assert MAX_COORDINATES * 0.8 < kept.numel() <= MAX_COORDINATES
        assert math.gcd(stride, 768) == 1, "or only some columns would ever be seen"

    def test_are_estimated_from_a_part_of_a_large_block(self):
        torch.manual_seed(0)
        before = [torch.randn(1000, 500), torch.randn(77)]
        now = [x + torch.randn_like(x) for x in before]
        coordinates, stride = Coordinates(), stride_of(before)
        assert stride > 1
        assert coordinates.compare("w", before, [1.0, 1.0], stride) is None
        coordinates.begin()
        dot, squared, other = coordinates.compare("w", now, [1.0, 1.0], stride)
        # Of 62,000 coordinates the standard deviation of a cosine is at most 0.004, that of a square 0.6 %.
        torch.testing.assert_close(dot / (squared * other).sqrt(), torch.tensor(0.5**0.5).double(), rtol=0, atol=0.012)
        torch.testing.assert_close(squared, flat(now).square().sum(), rtol=0.02, atol=0)


class TestNormGrowth:
    def test_finds_the_exponent(self):
        growth = NormGrowth()
        for step in range(100, 400, 5):
            norm = torch.tensor(50 + 0.3 * (step - 100) ** 0.6, dtype=torch.float64)
            exponent, r2 = growth.exponent(step, norm), growth.r2(step, norm)
        assert exponent.item() == pytest.approx(0.6, abs=1e-9)
        assert r2.item() == pytest.approx(1.0, abs=1e-9)

    def test_says_nothing_before_there_are_enough_points(self):
        growth = NormGrowth()
        known = [not growth.exponent(step, torch.tensor(1.0 + step)).isnan() for step in range(12)]
        assert known == [False] * 8 + [True] * 4

    def test_says_nothing_of_a_norm_that_shrinks(self):
        growth = NormGrowth()
        norms = [10.0, *([10.5] * 10), *([9.0] * 20)]
        found = [growth.exponent(step, torch.tensor(norm)) for step, norm in enumerate(norms)]
        assert not found[10].isnan()
        assert found[-1].isnan()

    def test_keeps_so_many_points_evenly_in_the_logarithm(self):
        growth, rising = NormGrowth(), range(3 * MAX_POINTS)
        for step in rising:
            growth.exponent(step, torch.tensor(1.0 + step**0.5, dtype=torch.float64))
        steps = [step for step, _ in growth._points]
        assert len(steps) == MAX_POINTS
        assert steps[:3] == [0, 1, 2]
        assert steps[-1] == rising[-1]
        gaps = [math.log(later / step) for step, later in itertools.pairwise(steps[200:])]
        assert max(gaps) < 4 * min(gaps)

    def test_is_the_fit_of_the_norms_in_the_frames(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        probe, norms = probe_of(model, optimizer), []
        for step in range(7, 40, 2):  # t counts from the first sample
            optimizer.zero_grad()
            probe.arm({"norm_growth_exponent", "norm_growth_r2"})
            forward().square().mean().backward()
            optimizer.step()
            scalars = probe.collect(step=step).scalars
            norms.append(flat(counted(model)).norm())
            exponent, r2 = (value.finish(value.raw) for value in scalars.values())
            probe.disarm()
        fit = power_law_fit(torch.arange(2, 2 * len(norms), 2), torch.stack(norms[1:]) - norms[0])
        torch.testing.assert_close(exponent, fit.exponent, rtol=1e-4, atol=0)
        torch.testing.assert_close(r2, fit.r2, rtol=1e-4, atol=0)


class TestAStepThatRaises:
    def test_and_is_called_again_counts_once(self):
        found = []
        for num_failures in (0, 1):
            torch.manual_seed(0)
            model, forward = zoo.our_language_model()
            optimizer = torch.optim.AdamW(model.parameters())
            probe = probe_of(model, optimizer)
            probe.arm(ALL)
            forward().square().mean().backward()
            errors = [torch.OutOfMemoryError] * num_failures

            def fail(*_, errors=errors):
                if errors:
                    raise errors.pop()

            optimizer.register_step_pre_hook(fail)
            for _ in range(num_failures):
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            optimizer.step()
            found.append(probe.collect())
            probe.disarm()
        for name in ("grad_norm", "clipped_grad_norm", "update_ratio", "update_alignment", "param_norm"):
            assert not found[0].layers[name].isnan().any()
            torch.testing.assert_close(found[1].layers[name], found[0].layers[name])


class TestAParameterOnTheMetaDevice:
    def test_is_left_out(self):
        model, forward = zoo.our_language_model()
        readings = []
        for _ in range(2):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            probe = probe_of(model, optimizer)
            probe.arm(ALL)
            forward().square().mean().backward()
            optimizer.step()
            readings.append(probe.collect().layers["param_norm"])
            probe.disarm()
            optimizer.zero_grad()
            model.register_parameter("unused", torch.nn.Parameter(torch.empty(3, 3, device="meta")))
        torch.testing.assert_close(*readings)

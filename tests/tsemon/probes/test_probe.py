import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, probe_of, reading_of
from tsemon.probes.hooks import ModuleHook


class TestNotMeasured:
    def test_says_that_updates_need_an_optimizer(self):
        _, probe = reading_of(*zoo.torch_encoder())
        assert probe.not_measured["update_norm"] == "no optimizer was given to attach()"

    def test_says_that_the_hooks_of_a_compiled_model_did_not_fire(self):
        model, _ = zoo.torch_encoder()
        compiled = torch.compile(model, backend="eager")
        x_TBD = torch.randn(12, 4, 32)
        compiled(x_TBD).sum().backward()
        reading, probe = reading_of(model, lambda: compiled(x_TBD))
        assert "token_similarity" not in reading.layers
        assert "through what torch.compile made of it" in probe.not_measured["token_similarity"]

    def test_only_what_was_asked_for_is_measured(self):
        model, forward = zoo.torch_encoder()
        reading, probe = reading_of(model, forward, measures={"token_similarity"})
        assert (set(reading.layers), set(reading.heads), set(reading.scalars)) == ({"token_similarity"}, set(), set())
        assert probe.not_measured == {}


class TestAGuest:
    def test_leaves_no_hook(self, any_model):
        model, forward = any_model
        optimizer = torch.optim.AdamW(model.parameters())
        before = num_hooks(model)
        reading_of(model, forward, optimizer)
        assert num_hooks(model) == before
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks

    def test_is_not_seen_by_selective_checkpointing(self):
        """Its cache would hand our tensors out for the model's, and gradients would be wrong without a word."""

        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = zoo.our_language_model()[0].blocks  # de-escalation divides and multiplies, as we do

            def forward(self, x):
                kept = [torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor]
                for block in self.blocks:
                    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
                    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
                return x

        def gradients(watched):
            torch.manual_seed(0)
            model = Checkpointed()
            x = torch.randn(3, 8, 32)
            probe = probe_of(model)
            if watched:
                probe.arm(ALL)
            (model(x) ** 2).mean().backward()
            probe.disarm()
            return [p.grad for p in model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))

    @pytest.mark.parametrize("attach_first", [True, False])
    def test_breaks_no_compiled_graph(self, attach_first):
        model, _ = zoo.our_language_model()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        if not attach_first:
            compiled(zoo.ids())
        probe = probe_of(model)
        for _ in range(3):
            probe.arm(ALL)
            compiled(zoo.ids()).sum().backward()  # raises where a graph breaks
            probe.collect()
            probe.disarm()

    def test_comes_out_of_the_model_after_an_interrupt_in_the_middle_of_that(self, monkeypatch):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        probe = probe_of(model, optimizer)
        probe.arm(ALL)
        remove, calls = ModuleHook.remove, []

        def interrupted(handle):
            calls.append(handle)
            if len(calls) == 5:
                raise KeyboardInterrupt
            remove(handle)

        monkeypatch.setattr(ModuleHook, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward()
        probe.disarm()
        assert num_hooks(model) == 0
        assert not optimizer._optimizer_step_pre_hooks
        assert all("forward" not in vars(module) for module in model.modules())

    @pytest.mark.parametrize("where", ["inside attention", "attention", "block", "model"])
    def test_leaves_what_is_compiled_in_parts_alone(self, where):
        torch._dynamo.reset()
        compiled = []

        def backend(graph, _):
            compiled.append(graph)
            return graph.forward

        model, _ = zoo.our_language_model()
        if where == "inside attention":
            core = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend=backend, fullgraph=True)
            model.blocks[0].attention.forward = lambda x_BTD, cache: core(x_BTD.unsqueeze(1)).squeeze(1)
        else:
            module = {"attention": model.blocks[0].attention, "block": model.blocks[0], "model": model}[where]
            module.forward = torch.compile(module.forward, backend=backend, fullgraph=True)
        probe = probe_of(model)
        for _ in range(6):
            model(zoo.ids()).sum().backward()
            probe.arm(ALL)
            model(zoo.ids()).sum().backward()
            probe.collect()
            probe.disarm()
        assert len(compiled) <= 2

    def test_contains_a_fault_and_measures_the_rest(self, monkeypatch):
        model, forward = zoo.torch_encoder()
        faults = []
        monkeypatch.setattr("tsemon.probes.attention.weigh", lambda *_: 1 / 0)
        reading, _ = reading_of(model, forward, on_fault=faults.append)
        assert {type(fault) for fault in faults} == {ZeroDivisionError}
        assert reading.layers["token_similarity"].isfinite().all()

    def test_does_not_come_along_when_the_model_is_copied_or_pickled(self):
        model, _ = zoo.torch_encoder()
        probe = probe_of(model)
        probe.arm(ALL)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.randn(12, 4, 32))
        assert "token_similarity" not in probe.collect().layers

    def test_reads_nothing_back_from_the_device(self):
        """On `meta` nothing has a value, so whatever would wait for the device raises."""
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="meta"), 3, enable_nested_tensor=False
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        reading, _ = reading_of(model, lambda: model(torch.empty(4, 12, 32, device="meta")), optimizer)
        assert reading.layers["token_similarity"].device.type == "meta"
        assert {"update_norm", "attention_entropy", "effective_rank", "escalation_rate", "dead_units"} <= set(
            reading.layers
        )

    def test_reads_nothing_back_from_the_device_where_there_are_masks_and_logits(self):
        from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

        class Masked(CausalLanguageModel):
            def forward(self, ids, attention_mask):
                return super().forward(ids)

        with torch.device("meta"):
            model = Masked(
                CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=32, heads=4, ffn=64, tau=0.5)
            )
            ids, mask = torch.zeros(4, 12, dtype=torch.long), torch.ones(4, 12)
        reading, _ = reading_of(model, lambda: model(ids, mask))
        expected = {"effective_rank", "batch_rank", "escalation_rate", "dead_units", "first_hidden_norm_ratio"}
        expected |= {"value_output_growth"}
        assert expected <= set(reading.layers)
        assert reading.scalars["output_variation"].device.type == "meta"

    def test_changes_no_bit_of_training(self, any_model):
        model, forward = any_model
        twin, start = copy.deepcopy(model.state_dict()), torch.get_rng_state()

        def trained(watched):
            model.load_state_dict(twin)
            model.zero_grad()
            torch.set_rng_state(start)
            optimizer = torch.optim.AdamW(model.parameters())
            probe = probe_of(model, optimizer)
            if watched:
                probe.arm(ALL)
            forward().float().square().mean().backward()
            optimizer.step()
            probe.collect()
            probe.disarm()
            return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

        (watched, watched_rng), (alone, rng) = trained(True), trained(False)
        assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
        assert torch.equal(watched_rng, rng)

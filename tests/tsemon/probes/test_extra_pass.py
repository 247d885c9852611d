"""What tsemon sees by running the model once more, and that nobody can tell that it did."""

import collections
import copy
import random
import threading
import types
import warnings
from collections import Counter, OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import tsemon
from tests import zoo
from tests.tsemon.probes.probing import ALL, num_hooks, probe_of, reading_of
from tsemon.errors import InvalidArgument
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.escalation import EscalationProbe
from tsemon.probes.feedforward import FeedForwardProbe
from tsemon.probes.outputs import OutputProbe
from tsemon.probes.reading import OnHost

PARTS = (ActivationProbe, AttentionProbe, EscalationProbe, FeedForwardProbe, OutputProbe)
FORWARD = {metric for part in PARTS for metric in part.METRICS}


def language_model():
    torch.manual_seed(0)
    return CausalLanguageModel(CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=32, heads=4, ffn=64))


class Everybodys(list):
    """One list for a module and all that stand in for it."""

    def __deepcopy__(self, memo):
        return self


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def whole(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def each_block(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def each_block_wrapped(model, **options):
    for name, block in list(model.blocks.named_children()):
        setattr(model.blocks, name, torch.compile(block, **options))
    return model


def forward_of_the_model(model, **options):
    model.forward = torch.compile(model.forward, **options)
    return model


SETUPS = (whole, in_place, each_block, each_block_wrapped, forward_of_the_model)
SOME = (whole, in_place, *(pytest.param(each, marks=pytest.mark.thorough) for each in SETUPS[2:]))
"""The blocks one by one are trained in tests/setups, too."""


class Counting:
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self, name="eager"):
        self.num_graphs = 0
        self._compile = lookup_backend(name)

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def sample(probe, step, measures=ALL):
    """One sampled training step."""
    probe.arm(measures)
    output = step()
    output.float().square().mean().backward()
    reading = probe.collect()
    probe.disarm()
    return reading


def values(reading):
    found = {name: value for name, value in (reading.layers | reading.scalars).items() if name in FORWARD}
    return {name: value.finish(value.raw) if isinstance(value, OnHost) else value for name, value in found.items()}


def expected(model, inputs):
    """What an eager twin of the model gives in eval mode."""
    reading, _ = reading_of(model.eval(), lambda: model(inputs), measures=FORWARD)
    return values(reading)


class TestACompiledModel:
    @pytest.mark.parametrize("is_called_first", [False, pytest.param(True, marks=pytest.mark.thorough)])
    @pytest.mark.parametrize("compile_model", SETUPS)
    def test_is_measured_on_the_first_four_sequences(self, compile_model, is_called_first):
        eager = language_model()
        backend = Counting()
        model = compile_model(copy.deepcopy(eager), backend=backend, fullgraph=True)
        if is_called_first:
            model(zoo.ids(8)).sum().backward()
        probe = probe_of(model)
        found = values(sample(probe, lambda: model(zoo.ids(8))))
        for _ in range(3):
            sample(probe, lambda: model(zoo.ids(8)))
        assert backend.num_graphs == 1
        wanted = expected(eager, zoo.ids(8)[:4])
        assert set(wanted) >= {"token_similarity", "attention_entropy"}
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert not FORWARD & {*probe.not_measured}
        assert "eager and in eval mode, over 4 held sequences, not of the current batch" in probe.how["extra pass"]

    @pytest.mark.parametrize("compile_model", SOME)
    def test_trains_bit_for_bit_as_if_nobody_watched(self, compile_model, tmp_path):
        def trained(is_watched):
            torch._dynamo.reset()
            backend = Counting("aot_eager" if compile_model is in_place else "eager")
            model = compile_model(WithDropout(), backend=backend)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if is_watched:
                monitor = tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path)
            for step in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(6, 5, 32)).square().mean()
                loss.backward()
                optimizer.step()
                if is_watched:
                    monitor.step(loss=loss)
                    expected_now = {"token_similarity", "attention_entropy", *(["saturation"] if step == 0 else [])}
                    assert expected_now <= set(monitor.status.measured)
                    assert "held sequences" in str(monitor.status)
                    assert monitor.status.faults == ()
            if is_watched:
                monitor.close()
            return [*model.state_dict().values()], torch.get_rng_state(), backend.num_graphs

        watched, alone = trained(True), trained(False)
        torch.testing.assert_close(watched[0], alone[0], rtol=0, atol=0)
        assert torch.equal(watched[1], alone[1])
        assert watched[2] == alone[2]

    @pytest.mark.parametrize("compile_model", [whole, in_place])
    def test_whose_blocks_are_further_inside_keeps_its_graph(self, compile_model):
        """The gate, which has hooks, is traced."""
        backend = Counting()
        model = compile_model(zoo.gpt2()[0], backend=backend)
        probe = probe_of(model)
        for _ in range(4):
            assert "token_similarity" in sample(probe, lambda: model(zoo.ids()).logits).layers
        assert backend.num_graphs == 1

    def test_of_inductor_is_measured(self):
        eager = language_model()
        model = torch.compile(copy.deepcopy(eager))
        probe = probe_of(model)
        found = sample(probe, lambda: model(zoo.ids(8)))
        torch.testing.assert_close(values(found), expected(eager, zoo.ids(8)[:4]), equal_nan=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        sample(probe, lambda: model(zoo.ids(8)))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before

    def test_that_was_compiled_after_it_was_attached_is_found_for_the_next_sample(self):
        model = language_model()
        probe = probe_of(model)
        backend = Counting()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert "token_similarity" not in sample(probe, lambda: compiled(zoo.ids())).layers
        assert "token_similarity" in sample(probe, lambda: compiled(zoo.ids())).layers
        assert not FORWARD & {*probe.not_measured}
        assert backend.num_graphs == 1

    def test_that_was_compiled_in_place_after_it_was_attached_is_found_for_the_next_sample(self):
        model = language_model()
        probe = probe_of(model)
        probe.arm(ALL)
        backend = Counting()
        model.compile(backend=backend, fullgraph=True)
        model(zoo.ids())
        probe.collect()
        probe.disarm()
        assert "token_similarity" in sample(probe, lambda: model(zoo.ids())).layers
        assert backend.num_graphs == 1

    def test_inside_a_compiled_function_needs_a_probe_batch(self):
        eager = language_model()
        model = copy.deepcopy(eager)
        compiled = torch.compile(lambda ids: model(ids) * 1, backend="eager", fullgraph=True)
        without, given = probe_of(model), probe_of(model, probe_batch=zoo.ids(2))
        sample(without, lambda: compiled(zoo.ids()))
        assert "give attach(..., probe_batch=...)" in without.not_measured["token_similarity"]
        found = sample(given, lambda: compiled(zoo.ids()))
        torch.testing.assert_close(values(found), expected(eager, zoo.ids(2)), equal_nan=True)
        assert "over 2 held sequences" in given.how["extra pass"]

    def test_keeps_the_graph_of_a_function_around_it_that_was_called_before(self):
        model, backend = language_model(), Counting()
        compiled = torch.compile(lambda ids: model(ids) * 1, backend=backend, fullgraph=True)
        compiled(zoo.ids())
        probe = probe_of(model)
        for _ in range(3):
            sample(probe, lambda: compiled(zoo.ids()))
        assert backend.num_graphs == 1

    @pytest.mark.parametrize("is_called_first", [False, True])
    def test_inside_a_compiled_function_is_compiled_once_more_at_the_most(self, is_called_first):
        """Compiled twice over, it is traced with the stand-in that waits for its call, and without."""
        backend = Counting()
        model = in_place(language_model(), backend=backend, fullgraph=True)
        compiled = torch.compile(lambda ids: model(ids) * 1, backend=backend, fullgraph=True)
        if is_called_first:
            compiled(zoo.ids())
        probe = probe_of(model)
        for _ in range(4):
            sample(probe, lambda: compiled(zoo.ids()))
        assert backend.num_graphs <= 2
        assert "probe_batch" in probe.not_measured["token_similarity"]

    def test_calls_nothing_of_ours_after_it_was_disarmed(self):
        model = in_place(language_model(), backend="eager")
        called = model._compiled_call_impl
        first, second = probe_of(model), probe_of(model)
        first.arm(ALL)
        second.arm(ALL)
        first.disarm()
        model(zoo.ids())
        assert "token_similarity" in second.collect().layers
        second.disarm()
        assert model._compiled_call_impl is called

    def test_keeps_an_eager_model_on_its_own_batch(self):
        model, forward = zoo.our_language_model()
        reading, probe = reading_of(model, forward, probe_batch=zoo.ids(1))
        alone, _ = reading_of(model, forward, measures=FORWARD)
        assert probe.how["extra pass"] == ""
        torch.testing.assert_close(values(reading), values(alone), equal_nan=True)


class Restless(nn.Module):
    """Changes whatever a forward can get hold of, in eval mode, too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32, max_norm=0.5)  # renormalises its weight
        self.norm = nn.BatchNorm1d(32)
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.layers = zoo.torch_encoder()[0].layers
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("newest", torch.zeros(32), persistent=False)
        self.alias = nn.Module()
        self.alias.register_buffer("num_calls", self.num_calls)
        self.python_calls = 0
        self.seen = []

    def forward(self, ids_TB, offset=None):
        self.num_calls += 1
        self.alias.num_calls.add_(1)
        self.python_calls += 1
        self.seen.append(self.training)
        self.scale.data.clamp_(max=2.0)
        offset = offset.add_(1)
        x = self.mix(self.norm(self.embed(ids_TB).flatten(0, 1)).view(*ids_TB.shape, 32)) * self.scale + offset
        x = x + 0.01 * torch.rand(()) + 0.01 * random.random()
        self.newest = x.detach()[0, 0]
        self.register_buffer("late", x.detach())
        for layer in self.layers:
            x = layer(x)
        self.last_output = x
        if not self.training:
            self.only_in_eval_mode = x
        return x


def state_of(model):
    """Everything that a pass could have changed, with its identity and its bits."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "tensors": [(id(tensor), tensor._version) for tensor in tensors],
        "values": [tensor.detach().clone() for tensor in tensors],
        "names": [*model.state_dict(), *(name for name, _ in model.named_buffers())],
        "attributes": [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
        "flags": [module.training for module in model.modules()],
        "random": (torch.get_rng_state(), random.getstate()),
        "process": (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.mha.get_fastpath_enabled(),
            torch._dynamo.eval_frame._stance.stance,
        ),
    }


def assert_same(after, before):
    torch.testing.assert_close(after.pop("values"), before.pop("values"), rtol=0, atol=0)
    (after_torch, after_python), (before_torch, before_python) = after.pop("random"), before.pop("random")
    assert torch.equal(after_torch, before_torch)
    assert after_python == before_python
    assert after == before
    assert after["process"] == (True, False, True, "default")


def held_probe(model, forward, **options):
    """A probe that has seen a training pass and is about to make the extra ones, which saturation needs."""
    probe = probe_of(model, **options)
    probe.arm({"saturation"})
    forward()
    return probe


class Remembering(nn.Module):
    """Keeps what it has seen in every way that a module can, and computes with it."""

    def __init__(self):
        super().__init__()
        self.model, _ = zoo.our_language_model()
        self.mean = torch.zeros(100)  # no buffer
        self.memories, self.bank, self.counts = [], collections.deque(maxlen=2), {"calls": 0}
        self.hidden = [nn.BatchNorm1d(100)]  # in no list of modules
        self.weights = {"scale": nn.Parameter(torch.ones(100))}
        self.own = (torch.Generator().manual_seed(1), random.Random(1))

    def forward(self, ids_BT):
        logits = self.model(ids_BT)
        self.mean.mul_(0.9).add_(logits.detach().mean(dim=(0, 1)))
        self.memories.append(logits.detach().mean())
        self.bank.append(logits.detach().std())
        self.counts["calls"] += 1
        self.weights["scale"].data.mul_(1.01)
        noise = torch.rand(100, generator=self.own[0]) + self.own[1].random() + np.random.rand() + random.random()
        seen = self.mean + sum(self.memories) + sum(self.bank) + self.counts["calls"] + 0.1 * noise
        return self.hidden[0]((logits * self.weights["scale"] + seen).mean(dim=1))


class TestTheModelAfterwards:
    @pytest.fixture
    def restless(self):
        torch.manual_seed(0)
        model = Restless()
        model.norm.eval()  # frozen, beside others that train
        return model, lambda: model(zoo.ids(), offset=torch.zeros(()))

    def test_is_what_it_was(self, restless):
        model, forward = restless
        probe = held_probe(model, forward)
        before = state_of(model)
        reading = probe.collect()
        assert_same(state_of(model), before)
        assert reading.layers["saturation"].isfinite().all()
        probe.disarm()
        assert num_hooks(model) == 0

    def test_shows_nothing_in_objects_that_it_shares_or_in_hooks_of_the_user(self, restless):
        model, forward = restless
        hooked = []
        model.layers[0].register_forward_hook(lambda *_: hooked.append(torch.is_grad_enabled()))
        held_probe(model, forward).collect()
        assert model.python_calls == 1
        assert model.seen == [True]
        assert hooked == [True]

    def test_keeps_its_memories_as_the_training_made_them(self):
        def losses(is_watched):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            model = Remembering()
            optimizer = torch.optim.AdamW(model.parameters())
            probe, found = probe_of(model, optimizer), []
            for _ in range(3):
                if is_watched:
                    probe.arm(ALL)
                loss = model(zoo.ids()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if is_watched:
                    reading = probe.collect()
                    probe.disarm()
                found.append(loss.item())
            assert not is_watched or "saturation" in reading.layers, probe.not_measured
            return found, random.random(), np.random.rand(), torch.rand(())

        assert losses(True) == losses(False)

    def test_is_not_changed_for_another_thread_meanwhile(self):
        torch.manual_seed(0)
        model, forward = zoo.our_language_model()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        probe, wrong, is_done = probe_of(model), [], threading.Event()

        def save():
            while not is_done.is_set():
                saved = copy.deepcopy(model.state_dict())
                wrong.extend(name for name, value in saved.items() if not torch.equal(value, weights[name]))
                wrong.extend(module for module in model.modules() if not module.training)

        saver = threading.Thread(target=save)
        saver.start()
        for _ in range(5):
            probe.arm(ALL)
            forward()
            probe.collect()
            probe.disarm()
        is_done.set()
        saver.join()
        assert wrong == []

    @pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), torch.OutOfMemoryError("no room")])
    def test_is_what_it_was_when_the_pass_broke_off(self, restless, error, monkeypatch):
        model, forward = restless
        faults = []
        probe = held_probe(model, forward, on_fault=faults.append)
        later = model.layers[2]

        forward_of_layer = type(later).forward

        def broken(self, *args, **kwargs):
            if not self.training:
                raise error
            return forward_of_layer(self, *args, **kwargs)

        monkeypatch.setattr(type(later), "forward", broken)
        before = state_of(model)
        if isinstance(error, Exception):
            reading = probe.collect()
            assert "saturation" not in reading.layers
            assert type(error).__name__ in probe.not_measured["saturation"]
            assert faults == [error]
        else:
            with pytest.raises(KeyboardInterrupt):
                probe.collect()
        assert_same(state_of(model), before)
        probe.disarm()
        assert num_hooks(model) == 0

    @pytest.mark.parametrize("make", [zoo.bert, zoo.torch_encoder])
    def test_goes_through_a_backward_that_was_pending(self, make):
        def gradients(is_watched):
            torch.manual_seed(0)
            model, forward = make()
            optimizer = torch.optim.AdamW(model.parameters())
            probe = probe_of(model, optimizer)
            if is_watched:
                probe.arm(ALL)
            loss = forward().float().square().mean()
            if is_watched:
                probe.collect()
                probe.disarm()
            loss.backward()
            return [p.grad for p in model.parameters() if p.grad is not None]

        torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)

    def test_was_not_run_in_the_users_contexts(self, monkeypatch):
        model, seen = zoo.our_language_model()[0], []
        forward = type(model.blocks[0]).forward

        def telling(*args):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return forward(*args)

        monkeypatch.setattr(type(model.blocks[0]), "forward", telling)
        model.blocks = model.blocks[:1]
        with torch.autocast("cpu", torch.bfloat16):
            reading = held_probe(model, lambda: model(zoo.ids())).collect()
        assert seen == [(True, True), (False, False), (False, False)]
        assert reading.layers["saturation"].isfinite().all()


class Warner(nn.Module):
    """Warns in every pass; and another thread does, which knows nothing of passes."""

    def __init__(self):
        super().__init__()
        self.model = language_model()
        self.passes = Everybodys()

    def forward(self, ids_BT):
        self.passes.append(ids_BT)
        warnings.warn("here", UserWarning, stacklevel=1)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(warnings.warn, "there", UserWarning, 1).result()
        return self.model(ids_BT)


class TestWhoIsWarned:
    def test_is_warned_of_the_passes_of_the_training_and_of_other_threads(self):
        model = Warner()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reading_of(model, lambda: model(zoo.ids()), measures={"saturation"})
        assert len(model.passes) == 3
        assert Counter(str(warning.message) for warning in caught) == {"here": 1, "there": 3}

    def test_is_not_warned_once_more_of_what_is_shown_once(self):
        model = Warner()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            before = [*warnings.filters]
            for _ in range(2):
                reading_of(model, lambda: model(zoo.ids()), measures={"saturation"})
            assert [*warnings.filters] == before
        assert Counter(str(warning.message) for warning in caught)["here"] == 1


class Fussy(nn.Module):
    """Raises in eval mode, as long as it is told to."""

    def __init__(self, complaint):
        super().__init__()
        self.layers = zoo.torch_encoder()[0].layers
        self.complaint = complaint
        self.calls = Everybodys()

    def forward(self, x):
        self.calls.append(self.training)
        if not self.training:
            self.complaint(x)
        for layer in self.layers:
            x = layer(x)
        return x


def boom(_):
    raise ValueError("not in eval mode, please")


class TestAPassThatFails:
    def test_is_given_up_after_three_samples(self):
        model, faults = Fussy(boom), []
        probe = probe_of(model, on_fault=faults.append)
        reasons = []
        for _ in range(5):
            reading = sample(probe, lambda: model(torch.randn(12, 4, 32)), {"saturation", "token_similarity"})
            assert reading.layers["token_similarity"].isfinite().all()
            reasons.append(probe.not_measured["saturation"])
        assert len(faults) == 3
        assert model.calls.count(False) == 3
        assert "raised ValueError: not in eval mode, please (the next sample tries again)" in reasons[0]
        assert "given up" in reasons[2]
        assert reasons[3] == reasons[2]

    def test_is_tried_with_the_whole_batch_where_its_beginning_does_not_run(self):
        def whole_batch_only(x):
            assert x.shape[0] == 6

        model = Fussy(whole_batch_only)
        for layer in model.layers:
            layer.self_attn.batch_first = True
        probe = probe_of(model)
        for _ in range(2):
            reading = sample(probe, lambda: model(torch.randn(6, 12, 32)), {"saturation"})
            assert reading.layers["saturation"].isfinite().all()
        assert model.calls.count(False) == 1 + 2 + 2  # the beginning, once; then two passes a sample

    def test_for_want_of_memory_is_not_tried_with_more(self):
        def no_room(x):
            raise torch.OutOfMemoryError("no room")

        model, faults = Fussy(no_room), []
        for layer in model.layers:
            layer.self_attn.batch_first = True
        probe = probe_of(model, on_fault=faults.append)
        sample(probe, lambda: model(torch.randn(6, 12, 32)), {"saturation"})
        assert model.calls.count(False) == 1
        assert "over 4 held sequences raised OutOfMemoryError: no room" in probe.not_measured["saturation"]

    def test_leaves_what_the_training_pass_gave(self):
        model = Fussy(boom)
        reading = sample(probe_of(model, on_fault=lambda _: None), lambda: model(torch.randn(12, 4, 32)))
        assert {"token_similarity", "attention_entropy"} <= set(reading.layers)

    def test_says_so_where_an_input_cannot_be_kept(self):
        class Batch:
            x = torch.randn(12, 4, 32)

        class TakesABatch(Fussy):
            def forward(self, batch):
                return super().forward(batch.x)

        model = TakesABatch(lambda _: None)
        _, probe = reading_of(model, lambda: model(Batch()))
        assert "a Batch among the model's inputs" in probe.not_measured["saturation"]

    def test_says_so_where_parameters_are_sharded(self, process_group):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        model, _ = zoo.our_language_model()
        mesh = init_device_mesh("cpu", (2,))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh))
        model.head.forward = lambda x: x
        _, probe = reading_of(model, lambda: model(zoo.ids()), measures={"saturation"})
        assert "sharded" in probe.not_measured["saturation"]

    def test_does_not_wait_for_other_processes(self, process_group):
        """Another process may not make this pass, for its own reasons."""
        calls = []

        def gather(x):
            calls.append(x)
            dist.all_reduce(x)
            calls.append("over")

        model, faults = Fussy(gather), []
        _, probe = reading_of(
            model, lambda: model(torch.randn(12, 4, 32)), measures={"saturation"}, on_fault=faults.append
        )
        assert "communicates between processes (c10d::allreduce_)" in probe.not_measured["saturation"]
        assert "over" not in calls


@pytest.fixture
def process_group():
    """Two processes as far as this one can tell."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


Pair = namedtuple("Pair", "ids label")


@dataclass
class Nested:
    ids: torch.Tensor
    label: torch.Tensor


class Taking(nn.Module):
    """Takes token numbers however they are wrapped, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.inner = language_model()
        self.given = Everybodys()

    def forward(self, *args, **kwargs):
        self.given.append((args, kwargs))
        (batch,) = (*args, *kwargs.values())[:1]
        while not isinstance(batch, torch.Tensor):
            batch = batch.ids if hasattr(batch, "ids") else batch["ids"] if hasattr(batch, "keys") else batch[0]
        return self.inner(batch)


WRAPPED = {
    "positional": lambda ids, label: ((ids, label), {}),
    "keyword": lambda ids, label: ((), {"ids": ids, "label": label, "flag": True}),
    "dict": lambda ids, label: (({"ids": ids, "label": label},), {}),
    "list in a tuple": lambda ids, label: ((([ids], None, label),), {}),
    "namedtuple": lambda ids, label: ((Pair(ids, label),), {}),
    "ordered dict": lambda ids, label: ((OrderedDict(ids=ids, label=label),), {}),
    "dataclass": lambda ids, label: ((Nested(ids, label),), {}),
}


class TestTheHeldBatch:
    @pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
    def test_is_the_beginning_of_the_first_training_batch(self, wrap):
        torch.manual_seed(0)
        model = Taking()
        args, kwargs = wrap(zoo.ids(8), torch.arange(8))
        reading, _ = reading_of(model, lambda: model(*args, **kwargs), measures={"saturation"})
        assert reading.layers["saturation"].isfinite().all()
        assert repr(model.given[1:]) == repr([wrap(zoo.ids(8)[:4], torch.arange(4))] * 2)

    def test_stays_the_same_whatever_becomes_of_the_batch(self):
        model = language_model()
        probe = probe_of(model)
        ids = zoo.ids(4)

        first = sample(probe, lambda: model(ids), {"saturation"}).layers["saturation"]
        ids.zero_()
        assert torch.equal(sample(probe, lambda: model(ids), {"saturation"}).layers["saturation"], first)

    def test_is_not_of_an_evaluation(self):
        model = Taking()
        probe = probe_of(model)
        probe.arm({"saturation"})
        with torch.no_grad():
            model(zoo.ids(3))
        model.eval()
        model(zoo.ids(2))
        model.train()
        model(zoo.ids(1))
        probe.collect()
        assert [len(args[0]) for args, _ in model.given] == [3, 2, 1, 1, 1]

    @pytest.mark.parametrize(
        ("given", "taken"),
        [
            (zoo.ids(7), ((zoo.ids(7),), {})),
            ((zoo.ids(7), None), ((zoo.ids(7), None), {})),
            (types.MappingProxyType({"ids": zoo.ids(7)}), ((), {"ids": zoo.ids(7)})),
        ],
        ids=["tensor", "tuple", "dict"],
    )
    def test_is_what_the_user_gave_where_the_user_gave_one(self, given, taken):
        model = Taking()
        reading, _ = reading_of(model, lambda: model(zoo.ids()), measures={"saturation"}, probe_batch=given)
        assert reading.layers["saturation"].isfinite().all()
        assert repr(model.given[1:]) == repr([taken] * 2)

    def test_reaches_a_model_inside_wrappers_of_torch(self, process_group):
        model = language_model()
        wrapped = nn.parallel.DistributedDataParallel(model)
        reading, _ = reading_of(wrapped, lambda: wrapped(zoo.ids()), measures={"saturation"})
        assert reading.layers["saturation"].isfinite().all()

    @pytest.mark.parametrize("given", ["text", [1, 2], 3, ({1, 2},)])
    def test_given_must_be_a_models_input(self, given, tmp_path):
        with pytest.raises(InvalidArgument, match="probe_batch"):
            tsemon.attach(language_model(), run="r", spool_dir=tmp_path, probe_batch=given)

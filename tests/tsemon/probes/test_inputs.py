"""Whether the loader brings anything new."""

import math

import pytest
import torch
from torch import nn

import tsemon
from tests import zoo
from tests.frames import frames_in
from tests.tsemon.probes.probing import probe_of
from tsemon import models
from tsemon.measures.inputs import MAX_SEQUENCES
from tsemon.probes.reading import Undefined

VOCABULARY = 90


def random(size, seed, dtype=torch.long):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) if dtype.is_floating_point else None
    return torch.randint(3, VOCABULARY, size, generator=generator) if values is None else values.to(dtype)


def overlaps(model, batches, forward=None, name="input_overlap", **options):
    """`input_overlap` of one step after the other, as the exporter's thread makes it."""
    probe, found = probe_of(model, **options), []
    for batch in batches:
        probe.arm({name})
        (forward or model)(batch)
        metric = probe.collect().scalars.get(name)
        found.append(None if metric is None else metric.finish(metric.raw.float()).item())
        probe.disarm()
    return found


class TestInputOverlap:
    @pytest.mark.parametrize(
        ("make", "size", "dtype"),
        [
            (zoo.gpt2, (4, 12), torch.long),
            (zoo.llama, (4, 12), torch.int32),
            (zoo.our_language_model, (4, 12), torch.long),
            (zoo.vit, (4, 3, 16, 16), torch.float32),
            (zoo.our_vision_transformer, (4, 1, 16, 16), torch.float32),
        ],
    )
    def test_is_one_where_the_batch_of_the_sample_before_comes_again_and_zero_where_all_is_new(self, make, size, dtype):
        model, _ = make()
        model.train()
        first, second = random(size, 1, dtype), random(size, 2, dtype)
        batches = [first, first.clone(), second, second[torch.randperm(4)], first]
        assert overlaps(model, batches) == [pytest.approx(math.nan, nan_ok=True), 1.0, 0.0, 1.0, 0.0]

    def test_counts_different_sequences_of_a_batch(self):
        model, _ = zoo.gpt2()
        batch = random((4, 12), 1)
        batches = [batch, batch[:1].expand(4, 12), batch[[0, 1, 1, 2]]]
        assert overlaps(model.train(), batches, name="distinct_inputs") == [4, 1, 3]
        with pytest.raises(Undefined, match="the batch has a single sequence"):
            overlaps(model, [batch[:1]], name="distinct_inputs")

    def test_does_not_look_at_the_memory_of_the_batches_before(self):
        config = models.TransformerXLConfig(
            vocab=VOCABULARY, context=12, memory=12, width=16, heads=2, ffn=32, depth=2, norm="pre", activation="relu"
        )
        model = models.TransformerXL(config)
        model.train()
        batches, memory = [random((4, 12), seed) for seed in (1, 1, 2, 2)], None

        def forward(batch):
            nonlocal memory
            _, memory = model(batch, memory)

        assert overlaps(model, batches, forward) == [pytest.approx(math.nan, nan_ok=True), 1.0, 0.0, 1.0]

    def test_reads_a_list_that_a_mask_follows(self):
        class OfPairs(nn.Module):
            def __init__(self):
                super().__init__()
                self.model, _ = zoo.gpt2()

            def forward(self, pair, mask):
                return self.model(pair[0])

        mask, model = torch.ones(4, 12), OfPairs()
        pairs = [[random((4, 12), seed), random((4, 3), seed)] for seed in (1, 1, 2)]
        assert overlaps(model, pairs, lambda pair: model(pair, mask))[1:] == [1.0, 0.0]

    def test_reads_a_list_that_stands_alone(self):
        class OfPairs(nn.Module):
            def __init__(self):
                super().__init__()
                self.model, _ = zoo.gpt2()

            def forward(self, pair):
                return self.model(pair[0])

        pairs = [[random((4, 12), seed), random((4, 3), seed)] for seed in (1, 1, 2)]
        assert overlaps(OfPairs(), pairs)[1:] == [1.0, 0.0]

    def test_is_the_share_of_sequences_that_come_again(self):
        model, _ = zoo.gpt2()
        first, second = random((4, 12), 1), random((4, 12), 2)
        assert overlaps(model, [first, torch.cat([second[:3], first[:1]])])[1] == 0.25

    def test_tells_sequences_apart_that_differ_in_one_element_or_in_their_order(self):
        model, _ = zoo.gpt2()
        first = random((3, 12), 1)
        changed = first.clone()
        changed[0, 5] += 1
        changed[1] = changed[1].flip(0)
        assert overlaps(model, [first, changed])[1] == pytest.approx(1 / 3)

    @pytest.mark.parametrize("order", [("attention_mask", "input_ids"), ("input_ids", "attention_mask")])
    def test_reads_all_that_the_model_is_given_by_keyword(self, order):
        model, _ = zoo.gpt2()
        first, second = ({"input_ids": random((4, 12), seed), "attention_mask": torch.ones(4, 12)} for seed in (1, 2))
        batches = [{name: batch[name] for name in order} for batch in (first, first, second)]
        assert overlaps(model, batches, lambda batch: model(**batch))[1:] == [1.0, 0.0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_takes_floats_of_every_width(self, dtype):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).to(dtype)
        first, second = random((4, 12, 32), 1, dtype), random((4, 12, 32), 2, dtype)
        assert overlaps(model, [first, first, second])[1:] == [1.0, 0.0]

    def test_is_of_a_few_sequences_of_a_large_batch_and_of_elements_spread_over_long_ones(self, monkeypatch):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        first, second = (random((MAX_SEQUENCES + 8, 2, 8), seed, torch.float32) for seed in (1, 2))
        assert overlaps(model, [first, torch.cat([first[:MAX_SEQUENCES], second[:8]])])[1] == 1.0
        monkeypatch.setattr("tsemon.measures.inputs.MAX_ELEMENTS", 256)
        first = random((2, 64, 8), 1, torch.float32)  # twice as many elements as are looked at
        late = first.clone()
        late[0, 32:] = 0
        assert overlaps(model, [first, late])[1] == 0.5

    def test_is_of_the_training_pass_and_not_of_an_evaluation(self):
        model, _ = zoo.gpt2()
        train, valid = random((4, 12), 1), random((4, 12), 2)

        def evaluate_and_train(batch):
            with torch.no_grad():
                model(valid)
            model.eval()(valid)
            model.train()(batch)
            model(valid)  # a second micro-batch

        assert overlaps(model, [train, train, random((4, 12), 3)], evaluate_and_train)[1:] == [1.0, 0.0]

    def test_is_told_of_a_compiled_model_and_not_of_the_batch_that_is_held_for_it(self):
        model, _ = zoo.our_language_model()
        compiled = torch.compile(model, backend="eager")
        first, second = random((4, 12), 1), random((4, 12), 2)
        assert overlaps(compiled, [first, second, second])[1:] == [0.0, 1.0]

    def test_is_missing_with_the_reason_where_the_inputs_have_no_axis_of_sequences(self):
        class Packed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = zoo.torch_encoder()[0]

            def forward(self, values):
                return self.inner(values.reshape(12, 4, 32))

        model = Packed()
        probe = probe_of(model)
        probe.arm({"input_overlap"})
        model(torch.ones(12 * 4 * 32))
        assert probe.collect().scalars == {}
        assert probe.not_measured == {"input_overlap": "Packed was given no tensor with an axis of sequences"}

    def test_draws_no_random_number(self):
        model, _ = zoo.gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        state = torch.get_rng_state()
        overlaps(model, [random((4, 12), 1)] * 2)
        assert torch.equal(torch.get_rng_state(), state)

    def test_is_in_the_frames_and_undefined_in_the_first(self, tmp_path):
        model, _ = zoo.gpt2()
        with tsemon.attach(model, run="r", every=2, spool_dir=tmp_path) as monitor:
            for seed in (1, 2, 1, 3, 4, 5):
                model(random((4, 12), seed))
                monitor.step()
        assert [frame["scalars"]["input_overlap"] for frame in frames_in(tmp_path)] == [None, 1.0, 0.0]

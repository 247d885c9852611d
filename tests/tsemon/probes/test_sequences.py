"""The sequences of the batch with the largest losses, and whether they came before."""

import copy
import math
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

import tsemon
from tests import zoo
from tests.frames import frames_in
from tests.tsemon.probes.probing import probe_of
from tsemon.measures import sequence_ids
from tsemon.measures.sequence_losses import sequence_loss_sums
from tsemon.probes import Given, Undefined
from tsemon.probes.sequences import MAX_REMEMBERED, NO_SUM, NOT_GIVEN, SEQUENCE_METRICS, Register

VOCABULARY = 90
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
MEAN = SEQUENCE_METRICS[-1]
LOSSES, IDS, SEEN = (SEQUENCE_METRICS[start : start + 4] for start in (0, 4, 8))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(seed, size=(6, 12)):
    return torch.randint(3, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))


def labelled(seed, size=(6, 12)):
    """Labels of which some do not count, and of one sequence none."""
    ids = random(seed, size)
    labels = ids.clone()
    labels[0, :5] = labels[2] = -100
    return {"input_ids": ids, "labels": labels}


def largest(logits_BTV, labels_BT):
    """The four largest mean losses of a sequence, by torch."""
    sums_B = F.cross_entropy(logits_BTV.detach().transpose(1, 2).float(), labels_BT, reduction="none").sum(dim=1)
    means_B = (sums_B / (labels_BT != -100).sum(dim=1)).tolist()
    return sorted((loss for loss in means_B if not math.isnan(loss)), reverse=True)[:4]


def next_token(output, batch):
    return largest(output.logits[:, :-1], batch["labels"][:, 1:])


class Tuple(nn.Module):
    """Returns logits, and the loss if it is asked for, from labels by position."""

    def __init__(self, has_loss=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.has_loss = has_loss

    def forward(self, ids, targets=None):
        x_BTD = self.embed(ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits = self.head(x_BTD)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1) if self.has_loss else None
        return logits, loss


def metrics_of(probe, forward, loss=None, step=0, **given):
    """Run a sampled step. Return its metrics of sequences, and the reasons why others are missing."""
    probe.arm({*SEQUENCE_METRICS, "input_overlap"})
    output = forward()
    reading = probe.collect(step=step, given={} if loss is None else {"loss": loss}, sequences=Given(**given))
    probe.disarm()
    found, reasons = {}, dict(probe.not_measured)
    for name, metric in reading.scalars.items():
        try:
            found[name] = metric.finish(metric.raw).item()
        except Undefined as reason:
            reasons[name] = str(reason)
    return output, found, reasons


def losses_in(found):
    return [found[name] for name in LOSSES if name in found]


class TestLossesFromLabels:
    def check(self, model, batch, want, rel=1e-5):
        output, found, reasons = metrics_of(probe_of(model), lambda: model(**batch))
        assert losses_in(found) == pytest.approx(want(output, batch), rel=rel)
        assert reasons == {}
        return found

    def test_are_those_of_the_next_token_in_a_causal_language_model(self):
        self.check(zoo.gpt2()[0], labelled(1), next_token)

    def test_are_those_of_masked_tokens(self):
        model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SMALL))
        self.check(model, labelled(1), lambda output, batch: largest(output.logits, batch["labels"]))

    def test_are_those_of_images(self):
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=7, **SMALL))
        images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        batch = {"pixel_values": images, "labels": torch.tensor([0, 3, 6, 1, 2])}
        self.check(model, batch, lambda output, _: largest(output.logits[:, None], batch["labels"][:, None]))

    def test_are_found_if_the_loss_is_divided_by_the_items_of_several_micro_batches(self):
        self.check(zoo.gpt2()[0], labelled(1) | {"num_items_in_batch": torch.tensor(1000)}, next_token)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_are_found_in_a_model_of_another_precision(self, dtype):
        self.check(zoo.gpt2()[0].to(dtype), labelled(1), next_token, rel=1e-4)

    def test_are_found_under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            self.check(zoo.gpt2()[0], labelled(1), next_token, rel=1e-4)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_are_found_with_checkpoints(self, use_reentrant):
        model, _ = zoo.gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        self.check(model, labelled(1), next_token)

    def test_are_found_by_position_beside_a_loss_in_a_tuple(self):
        model, ids, targets = Tuple(), random(1), random(2)
        targets[:, 9:] = -1
        (logits, _), found, _ = metrics_of(probe_of(model), lambda: model(ids, targets))
        assert losses_in(found) == pytest.approx(largest(logits, targets.where(targets >= 0, -100)), rel=1e-5)

    def test_are_found_if_only_monitor_step_gets_the_loss(self):
        model, ids, targets = Tuple(has_loss=False), random(1), random(2)
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten()).detach()
        (logits, _), found, _ = metrics_of(probe_of(model), lambda: model(ids, targets=targets), loss)
        assert losses_in(found) == pytest.approx(largest(logits, targets), rel=1e-5)
        assert found[MEAN] == pytest.approx(loss.item(), rel=1e-5)

    def test_are_found_if_the_loss_is_nearly_zero(self):
        model, ids = Tuple(), random(1)
        with torch.no_grad():
            model.head.bias[7] = 14.0  # every prediction is 7
        (_, loss), found, reasons = metrics_of(probe_of(model), lambda: model(ids, torch.full_like(ids, 7)))
        assert (loss < 1e-3, reasons) == (True, {})
        assert losses_in(found)[0] == pytest.approx(loss.item(), rel=0.5)

    @pytest.mark.parametrize("factor", [0.5, 1.02, 1.005, math.nan])
    def test_are_missing_with_the_reason_if_they_do_not_add_up_to_the_loss(self, factor):
        model, ids, targets = Tuple(has_loss=False), random(1), random(2)
        loss = factor * F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten()).item()
        _, found, reasons = metrics_of(probe_of(model), lambda: model(ids, targets), loss)
        assert losses_in(found) == []
        assert reasons == dict.fromkeys(SEQUENCE_METRICS, NO_SUM)

    def test_are_missing_if_the_loss_is_of_several_micro_batches_and_the_output_has_none(self):
        model = Tuple(has_loss=False)
        batches = [(random(1), random(2)), (random(3), model(random(3))[0].argmax(dim=-1))]  # the second is easy

        def forward():
            return [F.cross_entropy(model(*batch)[0].flatten(0, 1), batch[1].flatten()) for batch in batches]

        mean = torch.stack(forward()).mean().item()
        assert metrics_of(probe_of(model), forward, mean)[2] == dict.fromkeys(SEQUENCE_METRICS, NO_SUM)

    def test_are_of_the_first_micro_batch_if_the_output_has_its_loss(self):
        model, _ = zoo.gpt2()

        def forward():
            return [model(**labelled(seed)) for seed in (1, 2)]

        outputs, found, _ = metrics_of(probe_of(model), forward)
        assert losses_in(found) == pytest.approx(next_token(outputs[0], labelled(1)), rel=1e-5)

    def test_are_not_of_an_evaluation_before(self):
        model, _ = zoo.gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

        def forward():
            with torch.no_grad():
                model(**labelled(1))
            model.eval()(**labelled(2))
            return model.train()(**labelled(3))

        output, found, _ = metrics_of(probe_of(model), forward)
        assert losses_in(found) == pytest.approx(next_token(output, labelled(3)), rel=1e-5)

    def test_are_missing_if_the_pass_failed(self):
        model, _ = zoo.gpt2()

        def forward():
            handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**labelled(1))
            handle.remove()
            model(**labelled(2))

        _, found, reasons = metrics_of(probe_of(model), forward)
        assert losses_in(found) == []
        assert reasons[LOSSES[0]].startswith("the output of GPT2LMHeadModel was not seen")

    def test_rank_a_nan_first_and_name_its_sequence(self):
        model, _ = zoo.gpt2()
        is_spoiled = torch.arange(6) == 4
        model.lm_head.register_forward_hook(lambda *args: args[2].masked_fill(is_spoiled[:, None, None], math.nan))
        output, found, _ = metrics_of(probe_of(model), lambda: model(**labelled(1)))
        assert output.loss.isnan()
        first, *others = losses_in(found)
        assert math.isnan(first)
        assert sorted(others, reverse=True) == others == [loss for loss in others if math.isfinite(loss)]
        assert found[IDS[0]] == sequence_ids([*labelled(1).values()])[4]

    @pytest.mark.parametrize(
        ("call", "reason"),
        [
            (lambda model: model(random(1)), NOT_GIVEN),
            (lambda model: model(random(1, (300, 2)), random(1, (300, 2))), "300 sequences, more than 256"),
            (lambda model: model(random(1), random(1).flatten()), "do not match"),
            (lambda model: model(random(1), random(1) * 0.5), "not class numbers"),
        ],
    )
    def test_are_missing_with_the_reason(self, call, reason):
        model = Tuple(has_loss=False)
        _, _, reasons = metrics_of(probe_of(model), lambda: call(model), 4.5)
        assert reasons.keys() == {*SEQUENCE_METRICS}
        assert all(reason in why and "pass sequence_losses=" in why for why in reasons.values())

    def test_are_missing_with_the_reason_on_a_compiled_model(self):
        model = torch.compile(Tuple(), backend="eager")
        _, _, reasons = metrics_of(probe_of(model), lambda: model(random(1), targets=random(2)))
        assert "it runs compiled" in reasons[LOSSES[0]]

    def test_do_not_depend_on_how_many_logits_are_read_at_a_time(self, monkeypatch):
        logits, labels = torch.randn(5, 7, VOCABULARY), random(0, (5, 7))
        whole = sequence_loss_sums(logits, labels)
        for most in (1, 200, 1000):
            monkeypatch.setattr("tsemon.measures.sequence_losses.MAX_ON_CPU", most)
            torch.testing.assert_close(sequence_loss_sums(logits, labels), whole)


class TestGivenLosses:
    @pytest.mark.parametrize("make", [list, torch.tensor, lambda x: [torch.tensor(loss) for loss in x]])
    def test_are_ranked_with_nan_first(self, make):
        model = Tuple(has_loss=False)
        losses, ids = make([0.5, 3.0, math.inf, math.nan, 1.0, 2.0]), torch.arange(100, 106)
        _, found, reasons = metrics_of(probe_of(model), lambda: model(random(1)), losses=losses, ids=ids)
        assert losses_in(found) == pytest.approx([math.nan, math.inf, 3.0, 2.0], nan_ok=True)
        assert [found[name] for name in IDS] == [103, 102, 101, 105]
        assert found[MEAN] == (0.5 + 3 + 1 + 2) / 4
        assert reasons == {}

    def test_take_the_place_of_those_from_labels(self):
        model, _ = zoo.gpt2()
        _, found, _ = metrics_of(probe_of(model), lambda: model(**labelled(1)), losses=[6, 5, 4, 3, 2, 1])
        assert losses_in(found) == [6, 5, 4, 3]
        assert found[IDS[0]] == sequence_ids([*labelled(1).values()])[0]

    def test_have_a_mean_of_their_own_whatever_the_loss_of_the_step(self):
        model, _ = zoo.gpt2()
        _, found, _ = metrics_of(probe_of(model), lambda: model(random(1)), loss=0.5, losses=[6, 5, 4, 3, 2, 1])
        assert found[MEAN] == 3.5
        _, found, _ = metrics_of(probe_of(model), lambda: model(random(1)), losses=[math.nan] * 6)
        assert math.isnan(found[MEAN])

    def test_of_fewer_sequences_than_places_leave_the_others_out(self):
        model, _ = zoo.gpt2()
        _, found, reasons = metrics_of(probe_of(model), lambda: model(random(1, (2, 8))), losses=[1.0, 2.0])
        assert losses_in(found) == [2.0, 1.0]
        assert reasons[LOSSES[2]] == "fewer than 4 sequences have a loss"

    def test_of_several_micro_batches_have_no_hash(self):
        model, _ = zoo.gpt2()
        _, found, reasons = metrics_of(probe_of(model), lambda: model(random(1)), losses=torch.ones(12))
        assert (losses_in(found), IDS[0] in found) == ([1.0] * 4, False)
        assert "12 losses" in reasons[IDS[0]]
        assert "pass sequence_ids=" in reasons[IDS[0]]

    def test_of_the_last_of_several_equal_micro_batches_have_no_hash_of_the_first(self):
        model, _ = zoo.gpt2()

        def forward():
            with torch.no_grad():
                model(random(4))
            for seed in (1, 2, 3):
                model(random(seed, (3, 12)))

        _, found, reasons = metrics_of(probe_of(model), forward, losses=[1.0, 2.0, 3.0])
        assert (losses_in(found), IDS[0] in found, SEEN[0] in found) == ([3.0, 2.0, 1.0], False, False)
        assert reasons[IDS[0]] == reasons[SEEN[0]]
        assert reasons[IDS[0]].startswith("the step had 3 forward passes")
        assert reasons[LOSSES[3]] == "fewer than 4 sequences have a loss"
        _, found, _ = metrics_of(probe_of(model), forward, losses=[1.0, 2.0, 3.0], ids=[7, 8, 9])
        assert found[IDS[0]] == 9

    def test_have_a_hash_if_the_backward_pass_computes_the_forward_pass_again(self):
        model = Tuple(has_loss=False).train()

        def forward():
            checkpoint(model, random(1), use_reentrant=False)[0].sum().backward()

        _, found, _ = metrics_of(probe_of(model), forward, losses=[9.0, *[1.0] * 5])
        assert found[IDS[0]] == sequence_ids([random(1)])[0]

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (
                {"losses": ["a", "b"]},
                "sequence_losses must be a tensor or a list with one loss per sequence, got a list",
            ),
            ({"losses": "abc"}, "got a str"),
            ({"losses": 3.0}, r"got a float of shape \(\)"),
            ({"losses": torch.ones(2, 3)}, r"got a Tensor of shape \(2, 3\)"),
            ({"losses": [torch.tensor(1.0), 2.0]}, "must be a list of tensors or of numbers, got a list of both"),
            ({"losses": (3.0, torch.tensor(1.0, device="meta"))}, "got a tuple of both"),
            ({"losses": []}, r"1 to 65536 in one dimension"),
            ({"losses": torch.ones(3, dtype=torch.complex64)}, "must be real numbers"),
            ({"losses": [1.0, 2.0], "ids": [1]}, "must be of equal length, got 2 and 1"),
            ({"losses": [1.0], "ids": [1.0]}, "sequence_ids must be integers, got torch.float32"),
            (
                {"losses": [1.0], "ids": ["doc-1"]},
                "sequence_ids must be a tensor or a list with one integer per sequence",
            ),
            ({"losses": [1.0], "ids": [2**80]}, "sequence_ids must be a tensor or a list"),
            ({"losses": [1.0], "ids": [2**53]}, r"sequence_ids must be from 0 to 2\^53 - 1, got 9007199254740992"),
            ({"losses": [1.0], "ids": [-1]}, r"sequence_ids must be from 0 to 2\^53 - 1, got -1"),
        ],
    )
    def test_that_cannot_be_read_are_a_fault_that_says_what_was_expected(self, tmp_path, given, text):
        model, _ = zoo.gpt2()
        given = {f"sequence_{name}": value for name, value in given.items()}
        monitor = tsemon.attach(model, run="r", every=1, spool_dir=tmp_path)
        model(random(1))
        monitor.step(loss=1.0, **given)
        monitor.close()
        (fault,) = monitor.status.faults
        assert re.search(text, fault)
        (frame,) = frames_in(tmp_path)
        assert (frame["scalars"]["loss"], LOSSES[0] in frame["scalars"]) == (1.0, False)

    def test_are_in_the_frame_of_the_first_gradient_that_is_not_finite_though_samples_are_rare(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tsemon.attach(model, optimizer, run="r", budget=1e-9, spool_dir=tmp_path) as monitor:
            for step in range(48):
                factor = math.nan if step == 47 else 1.0
                loss = factor * forward().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss=loss, sequence_losses=[1.0, 2.0, factor, 3.0], sequence_ids=range(4))
        frame = {frame["step"]: frame["scalars"] for frame in frames_in(tmp_path)}[47]
        assert [frame[name] for name in (LOSSES[0], IDS[0], LOSSES[1], IDS[1])] == [None, 2, 3.0, 3]

    def test_are_not_read_between_samples(self, tmp_path):
        model, _ = zoo.gpt2()
        with tsemon.attach(model, run="r", every=2, spool_dir=tmp_path) as monitor:
            for losses in ([1.0] * 6, "not read"):
                model(random(1))
                monitor.step(sequence_losses=losses)
        assert monitor.status.num_faults == 0


class TestIds:
    def test_are_those_that_a_user_computes_from_the_inputs(self):
        model, _ = zoo.gpt2()
        batch = labelled(1)
        _, found, _ = metrics_of(probe_of(model), lambda: model(**batch), losses=[9.0, *[1.0] * 5])
        assert found[IDS[0]] == sequence_ids([batch["input_ids"], batch["labels"]])[0]
        assert 0 <= found[IDS[0]] < 2**53

    def test_of_a_million_sequences_differ(self):
        """With 53 bits the odds of a single pair are 1 in 16,000. With 24 bits there were 30,000 pairs."""
        texts = torch.randint(0, 50_000, (2**20, 6), generator=torch.Generator().manual_seed(0))
        assert len(set(sequence_ids([texts]).tolist())) == 2**20

    def test_come_with_the_newest_earlier_step_of_the_sequence(self):
        model, _ = zoo.gpt2()
        probe, seen = probe_of(model), []
        for step, rows in enumerate([[0, 1, 2], [3, 1, 4], [1, 0, 5]]):
            batch = random(1)[rows]
            _, found, _ = metrics_of(probe, lambda batch=batch: model(batch), step=step, losses=[9.0, 8.0, 7.0])
            seen += [found[name] for name in SEEN[:3]]
        nan = math.nan
        assert seen == pytest.approx([nan, nan, nan, nan, 0, nan, 1, 0, nan], nan_ok=True)

    def test_are_remembered_up_to_a_bound(self):
        register = Register()
        for step in range(MAX_REMEMBERED // 500 + 2):
            register.remember([0, *range(500 * step + 1, 500 * step + 501)], step)
        assert len(register._steps) == MAX_REMEMBERED
        seen = register.rank([4.0, 3.0, 2.0], [0, 1, 500 * step])
        assert [seen[name] for name in SEEN[:3]] == pytest.approx([step, math.nan, step - 1], nan_ok=True)


class TestTheRun:
    def test_is_the_same_bit_for_bit(self, tmp_path):
        torch.manual_seed(0)
        model, _ = zoo.gpt2()
        twin = copy.deepcopy(model)

        def train(model, monitor=None):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
            for step in range(6):
                loss = model(**labelled(step)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step(loss=loss, sequence_ids=range(6) if step % 2 else None)
            return torch.get_rng_state()

        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path) as monitor:
            state = train(model, monitor)
        assert torch.equal(state, train(twin))
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(own, other)
        assert monitor.status.num_faults == 0
        assert all({*SEQUENCE_METRICS} <= frame["scalars"].keys() for frame in frames_in(tmp_path))

    def test_keeps_no_logits_and_labels_alive(self):
        model, _ = zoo.gpt2()
        probe = probe_of(model)
        batch = labelled(1)
        probe.arm(SEQUENCE_METRICS)
        output = model(**batch)
        alive = [weakref.ref(output.logits), weakref.ref(batch["labels"])]
        del output, batch
        assert [reference() for reference in alive] == [None, None]
        probe.disarm()

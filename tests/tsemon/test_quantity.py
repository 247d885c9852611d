"""Metrics of the user's own: what their functions get, what becomes of it, and that they can do no harm."""

import itertools
import json
import math
import random
import time

import pytest
import torch
from torch.nn import functional as F

import tsemon
from tests import zoo
from tests.frames import frames_in, values_of
from tests.tsemon.probes.probing import hidden_states
from tsemon import Quantity
from tsemon.catalogue import TIERS
from tsemon.errors import InvalidArgument
from tsemon.schedule import SLOW_EVERY
from tsemon.transport import find_spools


def mean_square(x, valid):
    """Of the tokens of each sequence."""
    return x.square().sum(dim=(1, 2)) / valid.sum(dim=1) / x.shape[-1]


def quantity(function=mean_square, of="output", name="own", **fields):
    return Quantity(name=name, of=of, function=function, **fields)


def run(model, forward, *quantities, folder, steps=2, make_optimizer=None, **kwargs):
    """Train with these quantities alone; the frames and the monitor."""
    optimizer = (make_optimizer or torch.optim.SGD)(model.parameters(), lr=1e-2)
    kwargs = {"every": 1, "measures": ["loss", *quantities]} | kwargs
    with tsemon.attach(model, optimizer, run="r", spool_dir=folder, **kwargs) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = forward().float().square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    return frames_in(folder), monitor


def values(frames, name="own"):
    return [torch.tensor(values_of(frame, name)) for frame in frames]


def registered(folder):
    (path,) = find_spools(folder)
    return json.loads((path / "run.json").read_bytes())


@pytest.fixture
def lm():
    torch.manual_seed(0)
    return zoo.our_language_model()


class TestWhatAFunctionGets:
    @pytest.mark.parametrize("make", zoo.MODELS, ids=lambda make: make.__name__)
    def test_hidden_states_are_those_of_the_pass(self, make, tmp_path):
        torch.manual_seed(0)
        model, forward = make()
        model.eval()  # without dropout, so that two passes see the same states
        expected = torch.stack([x.square().mean() for x in hidden_states(model, forward)])
        own = [quantity(name=axis, axis=axis) for axis in ("activation", "block")]
        (frame, *_), monitor = run(model, forward, *own, folder=tmp_path)
        assert monitor.status.num_faults == 0
        torch.testing.assert_close(torch.tensor(values_of(frame, "activation")), expected.float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(values_of(frame, "block")), expected[1:].float(), rtol=1e-5, atol=0)

    def test_a_blocks_input_is_what_the_block_gets(self, lm, tmp_path):
        """After the de-escalation step that the block before ends with."""
        model, forward = lm
        seen = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: seen.append(args[0].square().mean()))
        frames, _ = run(model, forward, quantity(of="input"), folder=tmp_path)
        torch.testing.assert_close(values(frames)[0], torch.stack(seen[:3]), rtol=1e-5, atol=0)

    def test_padding_is_zero_and_is_told(self, tmp_path):
        torch.manual_seed(0)
        model, _ = zoo.bert()
        model.eval()
        ids, lengths = zoo.ids(), torch.tensor([12, 7, 3, 1])
        mask = (torch.arange(12) < lengths[:, None]).long()
        told = []

        def padded(x, valid):
            told.append((x.clone(), valid.clone()))
            return mean_square(x, valid)

        forward = lambda: model(ids, attention_mask=mask).logits  # noqa: E731
        states = hidden_states(model, forward)
        frames, _ = run(model, forward, quantity(padded, axis="activation"), folder=tmp_path, steps=1)
        assert all(torch.equal(valid, mask.bool()) for _, valid in told)
        assert all((x[~mask.bool()] == 0).all() for x, _ in told)
        of_samples = [[x[i, :n].square().mean() for i, n in enumerate(lengths)] for x in states]
        torch.testing.assert_close(values(frames)[0], torch.tensor(of_samples).float().mean(dim=1), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("rows", [64, 5, "all"])
    def test_attention_is_that_of_the_chosen_rows(self, lm, rows, tmp_path):
        model, forward = lm
        chosen = (torch.arange(5) * 2 + 1) * 12 // 10 if rows == 5 else torch.arange(12)
        qkv = torch.stack(
            model.blocks[0].attention.to_query_key_value(states_of_first(model, forward)).chunk(3, dim=-1)
        )
        query, key = qkv[:2].view(2, 4, 12, 4, 8).transpose(2, 3)
        expected = (query @ key.mT / 8**0.5).masked_fill(~torch.ones(12, 12).tril().bool(), -torch.inf).softmax(dim=-1)
        told = []
        keep = quantity(lambda p, valid: told.append((p.clone(), valid.clone())) or p.sum(), of="attention")
        run(model, forward, keep, folder=tmp_path, steps=1, attention_rows=rows)
        weights, valid = told[0]
        torch.testing.assert_close(weights, expected[:, :, chosen], rtol=1e-4, atol=1e-6)
        assert valid.all()
        assert valid.shape == (4, len(chosen))

    @pytest.mark.parametrize("of", ["queries", "keys", "values"])
    def test_attention_computes_with_queries_keys_and_values(self, lm, of, tmp_path):
        model, forward = lm
        qkv = model.blocks[0].attention.to_query_key_value(states_of_first(model, forward)).chunk(3, dim=-1)
        expected = qkv[("queries", "keys", "values").index(of)].square().mean()
        own = quantity(lambda x, valid: x.square().mean(), of=of)
        frames, monitor = run(model, forward, own, folder=tmp_path, steps=1)
        assert monitor.status.num_faults == 0
        torch.testing.assert_close(values(frames)[0][0], expected, rtol=1e-5, atol=0)

    def test_a_model_that_computes_its_scores_shows_no_queries_and_says_so(self, tmp_path):
        torch.manual_seed(0)
        model, forward = zoo.gpt2(attn_implementation="eager")
        own = [quantity(lambda x, _: x.sum(), of=of, name=of) for of in ("queries", "values")]
        (frame,), monitor = run(model, forward, *own, folder=tmp_path, steps=1)
        assert "queries" not in frame["layers"]
        assert "that tsemon does not see" in monitor.status.not_measured["queries"]
        assert all(map(math.isfinite, values_of(frame, "values")))

    @pytest.mark.parametrize("of", ["gradients", "parameters"])
    def test_parameters_and_gradients_are_lists_of_the_blocks_tensors(self, lm, of, tmp_path):
        model, forward = lm
        model.head.weight.requires_grad_(False)
        own = quantity(lambda tensors: sum(t.square().sum() for t in tensors), of=of, merge="sum")
        frames, _ = run(model, forward, own, folder=tmp_path, steps=1)
        tensors = [[p.grad if of == "gradients" else p for p in block.parameters()] for block in model.blocks]
        expected = torch.stack([sum(t.detach().square().sum() for t in of_block) for of_block in tensors])
        torch.testing.assert_close(values(frames)[0], expected, rtol=1e-5, atol=0)

    def test_gradients_are_those_of_several_optimizers_together(self, lm, tmp_path):
        model, forward = lm
        params = list(model.parameters())
        optimizers = [torch.optim.SGD(params[::2], lr=1e-2), torch.optim.AdamW(params[1::2], lr=1e-2)]
        own = quantity(lambda tensors: sum(t.square().sum() for t in tensors), of="gradients", merge="sum")
        with tsemon.attach(model, optimizers, run="r", every=1, measures=[own], spool_dir=tmp_path) as monitor:
            forward().square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            monitor.step()
        (frame,) = frames_in(tmp_path)
        expected = torch.stack([sum(p.grad.square().sum() for p in block.parameters()) for block in model.blocks])
        torch.testing.assert_close(torch.tensor(values_of(frame, "own")), expected, rtol=1e-5, atol=0)

    def test_half_precision_is_widened_and_nothing_is_autocast_or_has_a_gradient(self, tmp_path):
        torch.manual_seed(0)
        model, forward = zoo.llama()
        model.bfloat16()
        told = []

        def look(x, valid):
            told.append((x.dtype, (x @ x.mT).dtype, torch.is_grad_enabled(), x.requires_grad))
            return x.sum()

        def autocast():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward()

        run(model, autocast, quantity(look), folder=tmp_path, steps=1)
        assert set(told) == {(torch.float32, torch.float32, False, False)}

    def test_a_compiled_model_shows_its_tensors_in_the_extra_pass(self, lm, tmp_path):
        model, forward = lm
        expected = torch.stack([x.square().mean() for x in hidden_states(model, forward)]).float()
        model.compile(backend="eager")
        frames, monitor = run(model, forward, quantity(axis="activation"), folder=tmp_path, steps=1)
        assert monitor.status.not_measured == {}
        # The update of the step comes before the pass.
        torch.testing.assert_close(values(frames)[0], expected, rtol=0.1, atol=0)


def states_of_first(model, forward):
    """The first block's input."""
    return hidden_states(model, forward)[0].float()


class TestHowValuesMerge:
    @pytest.mark.parametrize(
        ("merge", "expected"), [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0)], ids=lambda value: str(value)
    )
    def test_over_what_a_function_returns(self, lm, merge, expected, tmp_path):
        returned = torch.tensor([3.0, math.nan, 1.0, 2.0])
        own = quantity(lambda x, valid: returned, merge=merge)
        frames, _ = run(*lm, own, folder=tmp_path, steps=1)
        assert values(frames)[0].tolist() == [expected] * 3

    def test_to_one_number_of_several_sums(self, lm, tmp_path):
        """A standard deviation: of sums of ranks it is made at the end."""

        def sums(x, valid):
            return torch.stack([valid.sum() * x.shape[-1], x.sum(), x.square().sum()])

        def deviation(sums):
            count, total, squares = sums.tolist()  # on the host it may take its time
            return math.sqrt(squares / count - (total / count) ** 2)

        model, forward = lm
        expected = torch.stack([x.std(unbiased=False) for x in hidden_states(model, forward)]).float()
        own = quantity(sums, merge="sum", finish=deviation, axis="activation")
        frames, monitor = run(model, forward, own, folder=tmp_path, steps=1)
        assert monitor.status.num_faults == 0
        torch.testing.assert_close(values(frames)[0], expected, rtol=1e-4, atol=0)

    @pytest.mark.parametrize(("merge", "over"), [("mean", torch.mean), ("max", torch.max), ("sum", torch.sum)])
    def test_over_blocks_to_a_metric_of_the_run(self, lm, merge, over, tmp_path):
        own = [quantity(name="run", axis="run", merge=merge), quantity(merge=merge)]
        (frame,), _ = run(*lm, *own, folder=tmp_path, steps=1)
        assert frame["scalars"]["run"] == pytest.approx(over(torch.tensor(values_of(frame, "own"))).item())

    @pytest.mark.parametrize("returned", [1, 0.5, True, torch.tensor(3), torch.tensor([True, False])])
    def test_of_numbers_of_any_kind(self, lm, returned, tmp_path):
        frames, _ = run(*lm, quantity(lambda *_: returned), folder=tmp_path, steps=1)
        assert values(frames)[0].tolist() == [torch.as_tensor(returned).float().mean().item()] * 3


def raises(x, valid):
    raise ValueError("no such thing")


def raises_in_one_block():
    calls = []

    def function(x, valid):
        calls.append(0)
        if len(calls) % 3 == 2:
            raise ValueError("only here")
        return x.sum()

    return function


def changes_its_shape():
    sizes = itertools.cycle([1, 2, 1])
    return lambda x, valid: x.new_ones(next(sizes))


class TestAFunctionThatFails:
    @pytest.mark.parametrize(
        ("function", "fields", "reason"),
        [
            (raises, {}, "failed at blocks.0: ValueError: no such thing"),
            (raises_in_one_block(), {}, "failed at blocks.1: ValueError: only here"),
            (lambda x, valid: None, {}, "must return a tensor of real numbers, or a number, got NoneType"),
            (lambda x, valid: x.to(torch.complex64), {}, "got a tensor of torch.complex64"),
            (lambda x, valid: x[:0], {}, "must return 1 or more elements, got shape (0, 12, 32)"),
            (lambda x: x, {}, "takes 1 positional argument but 2 were given"),
            (lambda x, valid: x, {"finish": torch.sum}, "must return 1 to 1024 elements, got shape (4, 12, 32)"),
            (changes_its_shape(), {"finish": torch.sum}, "must always return one shape, got (2,) after (1,)"),
            (lambda x, valid: x.sum().item(), {}, "must not wait for the device"),
            (lambda x, valid: x[valid].mean(), {}, "must not wait for the device"),
            (lambda x, valid: x.mean() if x.sum() > 0 else x.sum(), {}, "must not wait for the device"),
            (lambda x, valid: x.mul_(2).sum(), {}, "must not write into a tensor that it has not made"),
            (lambda x, valid: x[0].zero_().sum(), {}, "must not write into a tensor that it has not made"),
            (lambda x, valid: F.dropout(x).sum(), {}, "must not draw from the global random state"),
            (lambda x, valid: x @ torch.randn(32), {}, "must not draw from the global random state"),
        ],
    )
    def test_is_contained_and_its_metric_is_nan_with_the_reason(self, lm, function, fields, reason, tmp_path, caplog):
        own, fine = quantity(function, **fields), quantity(name="fine")
        frames, monitor = run(*lm, own, fine, folder=tmp_path, steps=4)
        status = monitor.status
        assert reason in status.not_measured["own"]
        assert "fine" not in status.not_measured
        assert all(torch.isfinite(x).all() for x in values(frames, "fine"))
        is_in_one_block = "only here" in reason or "one shape" in reason
        for frame in frames:
            if "own" in frame["layers"]:
                got = values_of(frame, "own")
                assert any(map(math.isnan, got))
                assert is_in_one_block == any(map(math.isfinite, got))
        assert status.num_faults == 4
        assert len([record for record in caplog.records if "own" in record.getMessage()]) <= 1, "it is logged once"
        assert reason in next(
            frame["not_measured"]["own"] for frame in frames if "own" in frame.get("not_measured", {})
        )

    @pytest.mark.parametrize(
        ("fields", "reason", "is_fault"),
        [
            ({"function": lambda x, valid: x.sum() * math.nan}, "its function returned NaN in 3 of 3", False),
            ({"finish": lambda sums: 1 / 0, "merge": "sum"}, "its finish raised ZeroDivisionError", True),
            ({"finish": lambda sums: "many", "merge": "sum"}, "its finish raised ValueError", True),
        ],
    )
    def test_on_the_host_is_told_at_the_next_sample(self, lm, fields, reason, is_fault, tmp_path):
        model, forward = lm
        with tsemon.attach(model, run="r", every=1, measures=[quantity(**fields)], spool_dir=tmp_path) as monitor:
            for _ in range(500):  # until the exporter's thread has made a frame
                forward().sum().backward()
                monitor.step()
                if "own" in monitor.status.not_measured:
                    break
                time.sleep(0.01)
            assert reason in monitor.status.not_measured["own"]
        assert (monitor.status.num_faults > 0) == is_fault
        assert all(map(math.isnan, torch.cat(values(frames_in(tmp_path)))))

    def test_leaves_the_training_bit_equal(self, tmp_path):
        """Whatever it tries: tensors, gradients and random states are as without it."""

        def bad(x, valid):
            with torch.enable_grad():
                return (torch.rand_like(x) * x.requires_grad_()).sum()

        def train(*own):
            torch.manual_seed(0)
            model, forward = zoo.gpt2()  # with dropout
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            folder = tmp_path / str(len(own))
            monitor = tsemon.attach(model, optimizer, run="r", every=1, measures=list(own), spool_dir=folder)
            for _ in range(5):
                loss = forward().square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
                optimizer.zero_grad()
            monitor.close()
            return [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), random.getstate()

        def writes(tensors):
            for tensor in tensors:
                tensor.zero_()
            return tensors[0].sum()

        hidden = [
            quantity(lambda x, _: x.zero_().sum(), of=of, name=of) for of in ("output", "input", "attention", "values")
        ]
        weights = [quantity(writes, of=of, name=of) for of in ("gradients", "parameters")]
        plain, watched = train(), train(quantity(bad, name="bad"), quantity(), *hidden, *weights)
        assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
        assert torch.equal(plain[1], watched[1])
        assert plain[2] == watched[2]

    def test_may_write_into_what_it_has_made_and_draw_from_a_generator_of_its_own(self, lm, tmp_path):
        def careful(x, valid):
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            return (x * 2).mul_(noise).abs_().amax(dim=(1, 2))

        frames, monitor = run(*lm, quantity(careful), folder=tmp_path)
        assert monitor.status.num_faults == 0
        assert all(torch.isfinite(x).all() for x in values(frames))


class TestAttach:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            (
                {"name": "token_similarity"},
                "is a metric of the catalogue; choose another name, such as 'my_token_similarity'",
            ),
            ({"name": "loss"}, "is a metric of the catalogue"),
            ({"name": "my kurtosis"}, "must be 1 to 128 letters, digits"),
            ({"name": 3}, "must be 1 to 128 letters, digits"),
            ({"of": "outputs"}, "of=.* must be one of 'output', 'input', 'attention', .*got 'outputs'"),
            ({"axis": "head"}, "axis=.* must be one of 'activation', 'block', 'run', got 'head'"),
            ({"of": "values", "axis": "activation"}, "axis=.* must be 'block' or 'run' unless of='output'"),
            ({"merge": "median"}, "merge=.* must be one of 'mean', 'sum', 'max', 'min', got 'median'"),
            ({"tier": "demand"}, "tier=.* must be one of 'every', 'slow'"),
            ({"function": 7}, "function=.* must be a function of tensors, got 7"),
            ({"finish": "mean"}, "finish=.* must be None, or a function of the merged result, got 'mean'"),
            ({"title": "a\nb"}, "title=.* must be text of at most 128 characters on one line"),
            ({"low": math.nan}, "low=.* must be None, or a finite number, got nan"),
            ({"low": 2, "high": 1}, "low=.* must be less than high=1, got 2"),
        ],
    )
    def test_refuses_what_cannot_be_measured_and_says_what_can(self, fields, text):
        with pytest.raises(InvalidArgument, match=text):
            Quantity(**{"name": "own", "of": "output", "function": mean_square} | fields)

    def test_refuses_two_of_one_name(self, lm, tmp_path):
        with pytest.raises(InvalidArgument, match="two quantities named 'own'"):
            tsemon.attach(lm[0], run="r", measures=[quantity(), quantity(of="values")], spool_dir=tmp_path)

    def test_measures_the_catalogue_too_unless_metrics_are_named(self, lm, tmp_path):
        model, _ = lm
        with tsemon.attach(model, run="r", measures=[quantity()], spool_dir=tmp_path / "a") as monitor:
            assert monitor._tiers.keys() == {name for name, tier in TIERS.items() if tier != "demand"} | {"own"}
        with tsemon.attach(model, run="r", measures=["hidden_rms", quantity()], spool_dir=tmp_path / "b") as monitor:
            assert monitor._tiers.keys() == {"hidden_rms", "own"}

    def test_describes_it_to_the_service(self, lm, tmp_path):
        own = quantity(title="mean square", equation="mean of x^2", unit="1", low=0.0, log_scale=True)
        with tsemon.attach(lm[0], run="r", measures=[own], spool_dir=tmp_path / "a"):
            pass
        described = {"name": "own", "axis": "block", "title": "mean square", "equation": "mean of x^2", "unit": "1"}
        assert registered(tmp_path / "a")["quantities"] == [described | {"low": 0.0, "high": None, "log_scale": True}]
        with tsemon.attach(lm[0], run="r", spool_dir=tmp_path / "b"):
            pass
        assert "quantities" not in registered(tmp_path / "b")

    def test_measures_the_slow_tier_at_every_tenth_sample_and_says_so(self, lm, tmp_path):
        frames, monitor = run(*lm, quantity(tier="slow"), folder=tmp_path, steps=SLOW_EVERY + 2)
        assert [frame["step"] for frame in frames if "own" in frame["layers"]] == [0, SLOW_EVERY]
        assert "\n  slow        at step 10: own\n" in str(monitor.status)

    def test_asks_nothing_of_a_step_that_is_not_sampled(self, lm, tmp_path):
        calls = []
        own = quantity(lambda x, valid: calls.append(0) or x.sum())
        run(*lm, own, folder=tmp_path, steps=7, every=3)
        assert len(calls) == 3 * 3

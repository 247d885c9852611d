import math

import pytest
import torch

import tsemon
from tests.tsemon.models import written_out
from tests.tsemon.probes.probing import reading_of
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import Cache, TransformerXL, TransformerXLConfig, generate
from tsemon.models.transformer_xl import AdaptiveSoftmax, relative_shift

# Two orders of float64 operations on numbers near 1, some hundreds of operations deep.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
# Weights as large as activations, so that attention is sharp and all four terms of its scores matter.
SIZES = {"vocab": 20, "context": 5, "memory": 4, "depth": 3, "width": 12, "heads": 3, "ffn": 24, "init_std": 0.3}
CUTOFFS = (6, 11)
TWINS = {
    "post-norm": {},
    "pre-norm": {"norm": "pre"},
    "branch-norm": {"norm": "branch"},
    "de-escalated": {"tau": 0.4, "tau_at": "feed_forward"},
    "de-escalated at its output": {"tau": 0.9},
    "learned": {"tau": 0.4, "tau_at": "attention", "learn_tau": True},
}


def build(seed=0, **sizes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TransformerXL(TransformerXLConfig(**SIZES | sizes)).double()


def text(num_tokens=5, seed=1):
    return torch.randint(20, (2, num_tokens), generator=torch.Generator().manual_seed(seed))


def distance_written_out(distance, width):
    angles = [distance / 10000 ** (2 * k / width) for k in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def scores_written_out(attention, head, x, remembered):
    """The four terms for one head and one sequence x (T, D) after the memory (M, D), number by number: T rows."""
    seen = torch.cat([remembered, x])
    size = x.shape[1] // attention.heads
    cut = slice(head * size, (head + 1) * size)
    w_query, w_key, w_position = (
        linear.weight[cut] for linear in (attention.to_query, attention.to_key, attention.to_position)
    )
    u, v = attention.u_HK[head], attention.v_HK[head]
    for i in range(len(x)):
        row = []
        for j in range(len(remembered) + i + 1):
            distance = w_position @ distance_written_out(len(remembered) + i - j, x.shape[1])
            query, key = w_query @ x[i], w_key @ seen[j]
            row.append((query @ key + query @ distance + u @ key + v @ distance) / math.sqrt(size))
        yield torch.stack(row)


def attention_written_out(attention, x, remembered):
    values = torch.cat([remembered, x]) @ attention.to_value.weight.T
    heads = []
    for head, value in enumerate(values.chunk(attention.heads, dim=1)):
        weights = [row.exp() / row.exp().sum() for row in scores_written_out(attention, head, x, remembered)]
        heads.append(torch.stack([row @ value[: len(row)] for row in weights]))
    return torch.cat(heads, dim=1) @ attention.to_output.weight.T


def model_written_out(model, tokens, memory, tau=None):
    """Post-norm, with the operator at the feed-forward network's input; of one sequence. Returns (T, V), new memory."""
    x = model.embed.weight[tokens] * math.sqrt(model.config.width)
    newest = []
    for block, remembered in zip(model.blocks, memory, strict=True):
        newest.append(torch.cat([remembered, x])[-model.config.memory :])
        y = written_out.norm(block.norm1, x + attention_written_out(block.attention, x, remembered))
        if tau is not None:
            y = y - tau * written_out.averaging_matrix(len(y), causal=True) @ y
        x = written_out.norm(block.norm2, y + written_out.feed_forward(block.feed_forward, y, "relu"))
    logits = x @ model.embed.weight.T + model.softmax.bias
    return logits - logits.exp().sum(1, keepdim=True).log(), newest


@pytest.mark.parametrize("path", ["sdpa", "materialised"])
@pytest.mark.parametrize("tau", [None, 0.4])
class TestTheModel:
    def test_equals_the_four_terms_written_out_over_three_segments(self, path, tau):
        twin = {} if tau is None else TWINS["de-escalated"]
        model = build(attention=path, activation="relu", **twin)
        memory, expected_memory = None, [[torch.zeros(0, 12, dtype=torch.float64)] * 3] * 2
        for seed in (1, 2, 3):
            log_probabilities, memory = model(text(3, seed), memory)
            for sequence, tokens in enumerate(text(3, seed)):
                expected, expected_memory[sequence] = model_written_out(model, tokens, expected_memory[sequence], tau)
                torch.testing.assert_close(log_probabilities[sequence], expected, **EXACT)
                for kept, expected_kept in zip(memory, expected_memory[sequence], strict=True):
                    torch.testing.assert_close(kept[sequence], expected_kept, **EXACT)
        assert memory[0].shape == (2, 4, 12)


class TestTheRelativeShift:
    def test_turns_distances_into_keys(self):
        queries, keys = 3, 5
        distances = torch.arange(keys - 1, -1, -1).expand(2, 1, queries, keys)
        shifted = relative_shift(distances)
        for i in range(queries):
            for j in range(keys - queries + i + 1):
                assert (shifted[:, :, i, j] == keys - queries + i - j).all()


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
class TestEveryTwin:
    def test_starts_with_the_weights_of_the_post_norm_model(self, twin):
        weights = build(**twin).state_dict()
        for name, weight in build().state_dict().items():
            assert torch.equal(weights.pop(name), weight)
        assert all(name.startswith("norm.") or name.endswith(".tau") for name in weights)

    def test_does_not_see_the_future(self, twin):
        assert moved_before(build(**twin), token=3) == 0.0

    def test_depends_on_the_segment_before(self, twin):
        model = build(**twin)
        after = [model(text(seed=2), model(text(seed=seed))[1])[0] for seed in (1, 3)]
        assert (after[0] - after[1]).abs().amax((0, 2)).min() > 1e-3

    def test_sends_no_gradient_into_the_memory(self, twin):
        model = build(**twin)
        memory = model(text())[1]
        assert not any(m.requires_grad for m in memory)
        memory = [m.requires_grad_() for m in memory]
        loss, newest = model.loss(text(seed=2), text(seed=3), memory)
        loss.backward()
        assert all(m.grad is None for m in memory)
        assert not any(m.requires_grad for m in newest)

    def test_gives_every_parameter_a_finite_gradient(self, twin):
        model = build(cutoffs=CUTOFFS, **twin)
        model.loss(text(), text(seed=2), model.loss(text(), text())[1])[0].backward()
        for parameter in model.parameters():
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().sum() > 0

    def test_writes_as_the_whole_text_says_while_all_fits_in_the_memory(self, twin):
        model = build(memory=9, **twin)
        written = generate(model.read, text(2), 8)
        for num_read in range(2, 10):
            whole = model(written[:, :num_read])[0]
            assert torch.equal(whole[:, -1].argmax(1), written[:, num_read])

    def test_reads_token_by_token_what_it_reads_at_once(self, twin):
        model, tokens, cache = build(memory=8, **twin), text(9), Cache()
        one_by_one = torch.cat([model.read(tokens[:, t : t + 1], cache) for t in range(9)], dim=1)
        torch.testing.assert_close(one_by_one, model(tokens)[0], **EXACT)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_runs_in_bfloat16(self, twin, autocast):
        model = build(init_std=0.1, **twin)
        memory = model(text())[1]
        exact = model(text(seed=2), memory)[0]
        model = model.float() if autocast else model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            rounded, newest = model(text(seed=2), model(text())[1])
        assert rounded.dtype == torch.float32  # the softmax is taken wide
        assert autocast or {m.dtype for m in newest} == {torch.bfloat16}
        # Some tens of roundings to 8 bits on the way to logits near 1.
        torch.testing.assert_close(rounded.double(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("twin", [{"norm": "pre"}, TWINS["de-escalated"]], ids=["pre-norm", "de-escalated"])
class TestACompiledModel:
    def test_is_one_graph_and_gives_the_same(self, twin):
        torch.compiler.reset()  # the models before would count as recompilations
        model = build(depth=1, **twin)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for memory in (None, model(text())[1]):
            expected = model.loss(text(), text(seed=2), memory)
            torch.testing.assert_close(compiled(text(), memory, text(seed=2)), expected, **EXACT)


class TestTheMemory:
    @pytest.mark.parametrize("norm", ["post", "pre"])
    def test_is_as_good_as_one_longer_context(self, norm):
        model = build(memory=5, norm=norm)
        tokens = text(8)
        whole = model(tokens)[0]
        first, memory = model(tokens[:, :5])
        second, _ = model(tokens[:, 5:], memory)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, **EXACT)

    def test_is_where_the_segment_gets_its_prefix_mean_anew(self):
        model = build(memory=5, **TWINS["de-escalated"])
        tokens = text(8)
        second, _ = model(tokens[:, 5:], model(tokens[:, :5])[1])
        assert (second - model(tokens)[0][:, 5:]).abs().max() > 1e-3

    def test_forgets_what_is_older_than_its_length(self):
        memory = build(memory=4)(text(9))[1]
        assert [m.shape for m in memory] == [(2, 4, 12)] * 3
        torch.testing.assert_close(memory[0], math.sqrt(12) * build(memory=4).embed(text(9)[:, 5:]), **EXACT)

    def test_grows_from_nothing(self):
        model, memory, lengths = build(memory=7), None, []
        for _ in range(4):
            memory = model(text(3), memory)[1]
            lengths.append(memory[0].shape[1])
        assert lengths == [3, 6, 7, 7]

    def test_may_be_left_out(self):
        model = build(memory=0)
        log_probabilities, memory = model(text())
        assert [m.shape for m in memory] == [(2, 0, 12)] * 3
        torch.testing.assert_close(model(text(), memory)[0], log_probabilities, **EXACT)

    @pytest.mark.parametrize(
        ("shapes", "words"), [([(2, 4, 12)] * 2, "got 2"), ([(1, 4, 12)] * 3, "1, 4, 12"), ([(2, 4, 6)] * 3, "2, 4, 6")]
    )
    def test_belongs_to_one_model_and_batch(self, shapes, words):
        with pytest.raises(ShapeError, match=words):
            build()(text(), [torch.zeros(shape, dtype=torch.float64) for shape in shapes])

    def test_bounds_what_writing_keeps(self):
        cache, model = Cache(), build(memory=4)
        model.read(text(9), cache)
        size_bytes = cache.size_bytes
        model.read(text(3), cache)
        assert cache.size_bytes == size_bytes == 3 * 2 * 4 * 12 * 8


@pytest.mark.parametrize("tau_at", ["output", "feed_forward", "attention"])
class TestTheMeanOfTheWholeSegment:
    def test_tells_early_tokens_about_late_ones(self, tau_at):
        assert moved_before(build(tau=0.4, tau_at=tau_at, full_mean=True), token=3) > 1e-3


class TestTheAdaptiveSoftmax:
    def test_gives_probabilities(self):
        softmax, x_BTD = adaptive(CUTOFFS)
        torch.testing.assert_close(softmax(x_BTD).exp().sum(-1), torch.ones(2, 7, dtype=torch.float64), **EXACT)

    def test_equals_its_definition_written_out(self):
        softmax, x_BTD = adaptive(CUTOFFS)
        x = x_BTD[0, 0]
        logits = softmax.weight @ x + softmax.bias
        clusters = softmax.to_clusters(x)
        total = logits[:6].exp().sum() + clusters.exp().sum()
        for word in range(20):
            if word < 6:
                expected = logits[word].exp() / total
            else:
                cluster, members = (0, slice(6, 11)) if word < 11 else (1, slice(11, 20))
                expected = clusters[cluster].exp() / total * logits[word].exp() / logits[members].exp().sum()
            torch.testing.assert_close(softmax(x_BTD)[0, 0, word].exp(), expected, **EXACT)

    @pytest.mark.parametrize("cutoffs", [(), CUTOFFS])
    @pytest.mark.parametrize("words", [range(20), range(6), range(6, 11), range(11, 20)])
    def test_finds_the_loss_in_the_clusters_of_the_targets_alone(self, cutoffs, words):
        softmax, x_BTD = adaptive(cutoffs)
        targets = torch.tensor(words).repeat(14)[:14]
        expected = torch.nn.functional.nll_loss(softmax(x_BTD).flatten(0, 1), targets)
        torch.testing.assert_close(softmax.loss(x_BTD.flatten(0, 1), targets), expected, **EXACT)

    @pytest.mark.parametrize("cutoffs", [(), CUTOFFS])
    @pytest.mark.parametrize("target", [-1, 20])
    def test_knows_no_words_beyond_the_vocabulary(self, cutoffs, target):
        softmax, x_BTD = adaptive(cutoffs)
        with pytest.raises(RuntimeError, match=r"out of bounds"):
            softmax.loss(x_BTD.flatten(0, 1), torch.full((14,), target))

    def test_shares_its_weight_with_the_embedding(self):
        model = build(cutoffs=CUTOFFS)
        assert model.softmax.weight is model.embed.weight

    def test_is_too_large_to_be_written_out_for_every_token(self):
        with pytest.raises(InvalidArgument, match=r"20\) log-probabilities .* loss\(tokens"):
            build(cutoffs=CUTOFFS)(text())

    def test_writes_text_all_the_same(self):
        model = build(cutoffs=CUTOFFS)
        written = generate(model.read, text(2), 3)
        assert torch.equal(model.read(text(2)).argmax(2), written[:, 2:3])


def adaptive(cutoffs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        softmax = AdaptiveSoftmax(torch.nn.Embedding(20, 12), cutoffs).double()
        torch.nn.init.normal_(softmax.bias)
        return softmax, torch.randn(2, 7, 12, dtype=torch.float64)


class TestThePresets:
    @pytest.mark.parametrize(
        ("name", "num_parameters"),
        [
            ("transformer-xl-16", 151_107_538),  # the paper says 151M
            ("transformer-xl-60", 200_987_338),  # about 201M
            ("transformer-xl-60-pre-norm", 200_987_338 + 2 * 410),
            ("transformer-xl-60-de-escalated", 200_987_338),
            ("transformer-xl-60-de-escalated-causal", 200_987_338),
        ],
    )
    def test_have_the_sizes_that_the_papers_tell(self, name, num_parameters):
        with torch.device("meta"):
            model = TransformerXL.from_preset(name)
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters

    def test_have_a_small_one_that_starts_near_the_uniform_guess(self):
        model = TransformerXL.from_preset("transformer-xl-bytes-32", depth=2)
        tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
        loss, _ = model.loss(tokens, tokens.flip(1))
        # Logits of a normed state spread by 0.05 sqrt(64) = 0.4, which adds half its square; a byte expects itself again,
        # by a logit of up to 0.05 * 64 = 3.2, as the weights are tied, which adds up to log(1 + exp(3.2) / 256) = 0.09.
        assert math.log(256) < loss.item() < math.log(256) + 0.25


class TestSizesThatDoNotFit:
    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"vocab": 0}, "vocab 0"),
            ({"context": 0}, "context 0"),
            ({"memory": -1}, "memory -1"),
            ({"depth": 0}, "got 0"),
            ({"heads": 5}, "5 heads"),
            ({"width": 9}, "even"),
            ({"ffn": 0}, "got 0"),
            ({"cutoffs": (5, 5)}, r"\(5, 5\)"),
            ({"cutoffs": (0,)}, r"\(0,\)"),
            ({"cutoffs": (20,)}, "vocabulary of 20"),
            ({"causal": False}, "causal=False"),
            ({"masking": "multiply"}, "masking='multiply'"),
            ({"reparameterisation": "smoothing"}, "smoothing"),
            ({"tau": 0.5, "norm": "pre"}, "post-norm"),
        ],
    )
    def test_are_refused(self, sizes, words):
        with pytest.raises(InvalidArgument, match=words):
            build(**sizes)

    @pytest.mark.parametrize("shape", [(5,), (2, 0), (2, 5, 1)])
    def test_a_text_has_two_axes_and_a_token(self, shape):
        with pytest.raises(ShapeError, match="at least one token"):
            build()(torch.zeros(shape, dtype=torch.int64))

    def test_the_input_has_the_width_of_the_attention(self):
        with pytest.raises(ShapeError, match=r"tokens, 12\), got \(2, 7, 8\)"):
            build().blocks[0].attention(torch.ones(2, 7, 8))


class TestTheMonitor:
    @pytest.mark.parametrize("path", ["sdpa", "materialised"])
    def test_sees_the_four_terms_and_the_memory_in_the_scores(self, path):
        model = build(attention=path)
        memory = model(text(4))[1]
        reading, _ = reading_of(
            model, lambda: model(text(seed=2), memory)[0], torch.optim.SGD(model.parameters(), lr=0.1)
        )
        attention, x_BTD = build().blocks[0].attention, math.sqrt(12) * build().embed(text(seed=2))
        for head in range(3):
            pairs = zip(x_BTD, memory[0], strict=True)
            rows = [row for pair in pairs for row in scores_written_out(attention, head, *pair)]
            entropies = [-(row.softmax(0) @ row.log_softmax(0)) / math.log(len(row)) for row in rows]
            expected = {
                "max_attention_logit": max(row.max() for row in rows),
                "attention_entropy": sum(entropies) / len(entropies),
            }
            for name, value in expected.items():
                # The probe's sums are in float32.
                torch.testing.assert_close(reading.heads[name][0][head].double(), value, rtol=1e-5, atol=1e-6)
        assert len(reading.layers["token_similarity"]) == 3 + 1

    @pytest.mark.parametrize("cutoffs", [(), CUTOFFS])
    def test_finds_the_blocks_in_a_step_of_training(self, cutoffs, tmp_path):
        model = build(cutoffs=cutoffs).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = model.loss(text(), text())[1]
        with tsemon.attach(model, optimizer, run="x", spool_dir=tmp_path, every=1) as monitor:
            loss, _ = model.loss(text(), text(seed=2), memory)
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            status = monitor.status
        assert list(status.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
        expected = {"token_similarity", "attention_entropy", "max_attention_logit", "grad_norm_qk", "saturation"}
        assert expected <= {*status.measured}


def moved_before(model, token):
    """How far changing this token of a second segment moves what the model says at earlier ones."""
    memory = model(text(seed=2))[1]
    tokens = text()
    changed = tokens.clone()
    changed[:, token] = (changed[:, token] + 1) % 20
    moved = (model(changed, memory)[0] - model(tokens, memory)[0]).abs()
    assert moved[:, token].amax(-1).min() > 0
    return moved[:, :token].max().item()

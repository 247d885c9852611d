import cmath
import math

import pytest
import torch
from torch.nn import functional as F

import tsemon
from tests.tsemon.probes.probing import reading_of
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.measures import first_value_norm_ratio
from tsemon.models import Cache, Llama, LlamaConfig, generate
from tsemon.models.llama import rotary_tables, rotate
from tsemon.models.presets import LLAMA_SIZES, VALUE_RULES

# Two orders of float64 operations on numbers near 1, some hundreds of operations deep.
EXACT = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {"vocab": 13, "context": 16, "depth": 5, "width": 16, "heads": 4, "ffn": 24, "rope_theta": 500.0}
EVERYTHING = {
    "value_source": "previous",
    "value_weights": (0.5, 0.25),
    "learn_value_weights": True,
    "query_weights": (0.75, 0.5),
    "key_weights": (0.5, 0.75),
    "value_every": 2,
    "key_every": 4,
    "neutreno": 0.3,
    "identity": True,
    "cross_layer": True,
    "dense": "blocks",
    "key_value_heads": 2,
}
each_rule = pytest.mark.parametrize("rule", VALUE_RULES)
each_rule_and_all_at_once = pytest.mark.parametrize("rule", [*VALUE_RULES, "everything"])


def fields_of(rule):
    return EVERYTHING if rule == "everything" else VALUE_RULES[rule]


def llama(rule="vanilla", *, seed=0, spread=None, **changes):
    """A small model; with a `spread`, its weights lie so wide that attention is far from uniform and no rule is idle."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Llama(LlamaConfig(**{**SMALL, **fields_of(rule), **changes}))
        if spread is not None:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, float(parameter.ndim == 1), spread)
    return model


def tokens(batch=2, length=12, seed=0):
    return torch.randint(SMALL["vocab"], (batch, length), generator=torch.Generator().manual_seed(seed))


# --- The paper, written out. Layers are counted from 1, as there; A, V, Q, K hold one head's (T, T) or (T, K) matrices. ---


def attention_matrix(query, *keys):
    """softmax(Q Concat(K, ...)' / sqrt(d)), each query up to its own token of each."""
    size = len(query)
    rows = torch.zeros(size, size * len(keys), dtype=query.dtype)
    for i in range(size):
        seen = [copy * size + j for copy in range(len(keys)) for j in range(i + 1)]
        weights = (torch.cat(keys)[seen] @ query[i] / math.sqrt(query.shape[1])).exp()
        rows[i, seen] = weights / weights.sum()
    return rows


def attended(rule, n, A, V, Q, K, learned):
    """U_n. "Standard attention is applied in the first layer"; Eq. 9 weighs it, too."""
    if n == 1 and rule != "denseformer-attention":
        return A[1] @ V[1]
    eye = torch.eye(len(A[n]), dtype=A[n].dtype)
    match rule:
        case (
            "vanilla"
            | "denseformer"
            | "query-residual"
            | "key-residual"
            | "query-pairs"
            | "key-pairs"
            | "one-query"
            | "one-key"
        ):
            return A[n] @ V[n]  # Eq. 1
        case "cla" | "value-pairs":
            return A[n] @ V[n if n % 2 else n - 1]  # layers 1 and 2, 3 and 4 ... share
        case "mean-values":
            return 1 / n * A[n] @ sum(V[i] for i in range(1, n + 1))  # Eq. 5
        case "resformer":
            return 1 / 2 * A[n] @ (V[n] + V[1])  # Eq. 7
        case "resformer-lambda":
            return A[n] @ (V[n] + 2 * V[1])  # Section 4.2
        case "resformer-learned":
            return A[n] @ (learned[0] * V[n] + learned[1] * V[1])
        case "resformer-previous":
            return 1 / 2 * A[n] @ (V[n] + V[n - 1])  # Eq. 4
        case "resformer-neutreno":
            mixed = 1 / 2 * (V[n] + V[1])
            return (A[n] - 0.2 * eye) @ mixed + 0.2 * V[1]
        case "svformer":
            return A[n] @ V[1]  # Eq. 10
        case "svformer-anchors":
            return A[n] @ V[1 if n < 5 else 5]
        case "neutreno":
            return (A[n] - 0.4 * eye) @ V[n] + 0.4 * V[1]  # Eq. 8
        case "denseformer-attention":
            return sum(learned[i - 1] * A[i] @ V[i] for i in range(1, n + 1))  # Eq. 9
        case "cross-layer":
            return attention_matrix(Q[n], K[n], K[1]) @ torch.cat([V[n], V[1]])  # Eq. 2
        case "cross-layer-previous":
            return attention_matrix(Q[n], K[n], K[n - 1]) @ torch.cat([V[n], V[n - 1]])
        case "identity":
            return A[n] @ V[n] + 1 / (n - 1) * sum(V[i] for i in range(1, n))  # Eq. 6


def attends_with(rule, n, Q, K):
    """The queries and keys of A_n."""
    pair = n if n % 2 else n - 1
    match rule:
        case "query-residual":
            return (Q[n] + Q[1]) / 2, K[n]  # Fig. 9: Eq. 7 for queries
        case "key-residual":
            return Q[n], (K[n] + K[1]) / 2
        case "query-pairs":
            return Q[pair], K[n]
        case "key-pairs" | "cla":
            return Q[n], K[pair]
        case "one-query":
            return Q[1], K[n]
        case "one-key":
            return Q[n], K[1]
    return Q[n], K[n]


def turned(x, theta):
    """Rotary positions: x_i + i x_(i + K/2) times exp(i p theta^(-2i / K)) at position p."""
    half = x.shape[1] // 2
    result = torch.empty_like(x)
    for position in range(len(x)):
        for pair in range(half):
            number = complex(x[position, pair], x[position, pair + half])
            number *= cmath.exp(1j * position * theta ** (-2 * pair / x.shape[1]))
            result[position, pair], result[position, pair + half] = number.real, number.imag
    return result


def rms(norm, x):
    return norm.weight * x / (x.square().mean(1, keepdim=True) + norm.eps).sqrt()


def swiglu(network, x):
    gate = x @ network.gate.weight.T
    return (gate / (1 + torch.exp(-gate)) * (x @ network.expand.weight.T)) @ network.contract.weight.T


def logits_written_out(model, rule, tokens_T):
    config = model.config
    size, groups = config.width // config.heads, config.heads // config.num_key_value_heads
    heads = [{name: {} for name in "QKVA"} for _ in range(config.heads)]
    x = model.embed.weight[tokens_T]
    states = [x]
    for n, block in enumerate(model.blocks, start=1):
        attention, normed, mixed = block.attention, rms(block.norm1, x), []
        for number, head in enumerate(heads):
            own, shared = (slice(h * size, (h + 1) * size) for h in (number, number // groups))
            if attention.to_query is not None:
                head["Q"][n] = turned(normed @ attention.to_query.weight[own].T, config.rope_theta)
            if attention.to_key is not None:
                head["K"][n] = turned(normed @ attention.to_key.weight[shared].T, config.rope_theta)
            if attention.to_value is not None:
                head["V"][n] = normed @ attention.to_value.weight[shared].T
            head["A"][n] = attention_matrix(*attends_with(rule, n, head["Q"], head["K"]))
            learned = attention.over_depth.alpha if rule == "denseformer-attention" else attention.value_weights
            mixed.append(attended(rule, n, learned=learned, **head))
        y = x + torch.cat(mixed, dim=1) @ attention.to_output.weight.T
        x = y + swiglu(block.feed_forward, rms(block.norm2, y))
        states.append(x)
        if rule == "denseformer":
            x = sum(block.over_depth.alpha[i] * states[i] for i in range(n + 1))
    return rms(model.norm, x) @ model.head.weight.T


@each_rule
@pytest.mark.parametrize(("path", "key_value_heads"), [("sdpa", 4), ("materialised", 2)])
class TestLogits:
    @torch.no_grad()
    def test_equal_the_equations_written_out(self, rule, path, key_value_heads):
        model = llama(rule, spread=0.4, attention=path, key_value_heads=key_value_heads).double()
        expected = torch.stack([logits_written_out(model, rule, tokens_T) for tokens_T in tokens()])
        torch.testing.assert_close(model(tokens()), expected, **EXACT)


class TestVanilla:
    @torch.no_grad()
    def test_equals_hugging_face_llama_with_the_same_weights(self):
        from transformers import LlamaConfig as HuggingFaceConfig
        from transformers import LlamaForCausalLM

        model = llama(spread=0.3, key_value_heads=2)
        config = HuggingFaceConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )
        theirs = LlamaForCausalLM(config)
        names = {
            "embed": "model.embed_tokens",
            "blocks": "model.layers",
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "attention": "self_attn",
            "to_query": "q_proj",
            "to_key": "k_proj",
            "to_value": "v_proj",
            "to_output": "o_proj",
            "feed_forward": "mlp",
            "gate": "gate_proj",
            "expand": "up_proj",
            "contract": "down_proj",
            "norm": "model.norm",
            "head": "lm_head",
        }
        weights = {
            ".".join(names.get(part, part) for part in name.split(".")): weight
            for name, weight in model.state_dict().items()
        }
        theirs.load_state_dict(weights)
        # Float32 on both sides, as theirs takes norms and angles in float32 whatever the model's type; logits near 1.
        torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-5)


@each_rule_and_all_at_once
class TestCausality:
    @pytest.mark.parametrize("path", ["sdpa", "materialised"])
    def test_no_logit_knows_a_later_token(self, rule, path):
        model = llama(rule, spread=0.4, attention=path)
        changed = tokens()
        changed[:, 7] = (changed[:, 7] + 1) % SMALL["vocab"]
        difference = (model(changed) - model(tokens())).abs().amax(dim=(0, 2))
        assert (difference[:7] == 0).all()
        assert (difference[7:] > 0).all()


@each_rule_and_all_at_once
class TestCache:
    @torch.no_grad()
    def test_gives_the_logits_of_the_whole_text(self, rule):
        model, cache = llama(rule, spread=0.4).double(), Cache()
        pieces = [model(piece, cache=cache) for piece in tokens().split([5, 1, 1, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens()), **EXACT)

    @torch.no_grad()
    def test_generates_what_the_likeliest_tokens_of_whole_texts_are(self, rule):
        model, expected = llama(rule, spread=0.4).double(), tokens(length=4)
        for _ in range(6):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(dim=2)], dim=1)
        assert generate(model, tokens(length=4), 6).tolist() == expected.tolist()


class TestCacheSize:
    @pytest.mark.parametrize(
        ("rule", "share"),
        [
            ("resformer", 1),
            ("cross-layer", 1),
            ("svformer", (5 + 1) / 10),
            ("svformer-anchors", 0.7),
            ("cla", 0.6),
            ("key-pairs", 0.8),
            ("value-pairs", 0.8),
            ("one-key", 0.6),
            ("one-query", 1),
        ],
    )
    def test_is_one_key_per_layer_and_one_value_per_layer_that_has_one(self, rule, share):
        sizes = {}
        for name in ("vanilla", rule):
            cache = Cache()
            llama(name)(tokens(), cache=cache)
            sizes[name] = cache.size_bytes
        assert sizes["vanilla"] == 5 * 2 * tokens().numel() * SMALL["width"] * 4
        assert sizes[rule] == share * sizes["vanilla"]

    def test_of_svformer_halves_again_with_half_the_key_and_value_heads(self):
        whole, half = Cache(), Cache()
        llama("svformer")(tokens(), cache=whole)
        llama("svformer", key_value_heads=2)(tokens(), cache=half)
        assert half.size_bytes == whole.size_bytes / 2


@each_rule_and_all_at_once
class TestTraining:
    def test_reaches_every_parameter(self, rule):
        model = llama(rule)
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten()).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []

    @pytest.mark.parametrize("how", ["bfloat16 weights", "autocast"])
    def test_is_finite_in_bfloat16_and_near_float32(self, rule, how):
        model = llama(rule)
        expected = model(tokens())
        model = model.bfloat16() if how == "bfloat16 weights" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            logits = model(tokens())
        assert logits.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits; five layers of two branches each round logits of about 0.1.
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.01)
        F.cross_entropy(logits.float().flatten(0, 1), tokens(seed=1).flatten()).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class TestACompiledModel:
    @pytest.mark.parametrize(
        "rule", [*(pytest.param(rule, marks=pytest.mark.thorough) for rule in VALUE_RULES), "everything"]
    )
    def test_is_one_graph(self, rule):
        torch.compiler.reset()
        model = llama(rule, depth=4)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert compiled(tokens()).equal(model(tokens()))


@each_rule_and_all_at_once
class TestEqualSeeds:
    def test_give_all_rules_the_weights_of_the_vanilla_model(self, rule):
        changes = {"key_value_heads": fields_of(rule).get("key_value_heads")}
        model, vanilla = llama(rule, **changes).state_dict(), llama(**changes).state_dict()
        assert [name for name in model if name in vanilla and not model[name].equal(vanilla[name])] == []
        assert {name.rpartition(".")[2] for name in model.keys() - vanilla} <= {"alpha", "value_weights"}


class TestRulesAtTheStart:
    @pytest.mark.parametrize(
        ("rule", "same_as"),
        [
            ("resformer-learned", "resformer"),
            ("denseformer", "vanilla"),
            ("denseformer-attention", "vanilla"),
        ],
    )
    def test_learned_weights_start_as_the_plain_rule(self, rule, same_as):
        torch.testing.assert_close(llama(rule)(tokens()), llama(same_as)(tokens()), rtol=0, atol=0)

    def test_all_differ_from_vanilla_otherwise(self):
        idle = [rule for rule in VALUE_RULES if llama(rule)(tokens()).equal(llama()(tokens()))]
        assert idle == ["vanilla", "denseformer", "denseformer-attention"]


class TestWeights:
    def test_start_as_the_paper_s_code_starts_them(self):
        model = llama(width=256, heads=4, vocab=100, depth=1)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                # A standard deviation of 25,600 numbers or more is 0.5 % off, with a few times that for room.
                assert parameter.std().item() == pytest.approx(0.02, rel=0.02), name
            else:
                assert (parameter == 1).all(), name


class TestPresets:
    @pytest.mark.parametrize(
        ("size", "num_parameters", "in_the_paper"),
        [
            ("2m", 1_623_856, 2),
            ("82m", 81_901_056, 82),
            ("180m", 179_874_048, 180),
            ("320m", 322_949_760, 320),
            ("468m", 467_921_920, 468),
        ],
    )
    def test_have_the_parameters_that_name_them(self, size, num_parameters, in_the_paper):
        with torch.device("meta"):
            model = Llama.from_preset(f"vanilla-{size}")
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
        # The paper's own name is rounded up for 2M; the sizes behind its 320M are not printed.
        assert num_parameters / 1e6 == pytest.approx(in_the_paper, rel={"2m": 0.2, "320m": 0.01}.get(size, 0.0015))

    def test_are_every_rule_in_every_size(self):
        assert set(LlamaConfig.PRESETS) == {f"{rule}-{size}" for rule in VALUE_RULES for size in LLAMA_SIZES}
        config = Llama.from_preset("resformer-2m", vocab=257, context=128, key_value_heads=1).config
        assert (config.value_weights, config.depth, config.vocab, config.num_key_value_heads) == ((0.5, 0.5), 4, 257, 1)

    def test_of_svformer_spare_all_value_projections_but_one(self):
        vanilla, svformer = (Llama.from_preset(f"{rule}-2m", vocab=257) for rule in ("vanilla", "svformer"))
        spared = sum(p.numel() for p in vanilla.parameters()) - sum(p.numel() for p in svformer.parameters())
        assert spared == 3 * 16 * 16

    def test_tell_the_nearest_name(self):
        with pytest.raises(InvalidArgument, match="resformer-82m"):
            Llama.from_preset("resformer-82")


class TestSizesThatDoNotFit:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"depth": 0}, "depth must be at least 1, got 0"),
            ({"heads": 0}, "heads must be at least 1, got 0"),
            ({"width": 18}, "width 18 and 4 heads"),
            ({"width": 12}, "heads of even width, got width 12 and 4 heads"),
            ({"key_value_heads": 3}, "key_value_heads must divide heads, got 3 and 4 heads"),
            ({"key_value_heads": 0}, "got 0 and 4 heads"),
            ({"value_every": 0}, "value_every counts layers, .* got 0"),
            ({"value_source": "last"}, "'first', 'previous' or 'all', got 'last'"),
            ({"value_weights": (1.0,)}, r"value_weights are two numbers, of V_n and of V_m, got \(1.0,\)"),
            ({"key_weights": (1.0,)}, r"key_weights are two numbers, of K_n and of K_m, got \(1.0,\)"),
            ({"key_weights": "mean"}, r"only value_weights may be 'mean', .* got key_weights='mean'"),
            ({"value_weights": "mean"}, r"with value_source='all' .* value_source='first'"),
            ({"value_weights": "mean", "value_source": "all", "learn_value_weights": True}, "learn_value_weights=True"),
            ({"value_weights": "sum", "value_source": "all"}, "are two numbers, .* got 'sum'"),
            ({"value_weights": ("a", "b")}, "value_weights are two numbers, of V_n and of V_m, got"),
            ({"query_every": 1.5}, "query_every counts layers, .* got 1.5"),
            ({"query_every": 0}, "query_every counts layers, .* got 0"),
            ({"value_every": 9}, "value_every counts layers, at most as many as the depth, got 9 and depth"),
            ({"query_every": 2, "key_every": 2, "value_every": None}, "one of query_every, key_every and value_every"),
            ({"dense": "layers"}, "None, 'blocks' or 'attention', got 'layers'"),
            ({"cross_layer": True, "value_source": "all"}, "must be 'first' or 'previous'"),
            ({"attention": "flash"}, "'sdpa' or 'materialised', got 'flash'"),
        ],
    )
    def test_are_refused_in_words(self, changes, message):
        with pytest.raises(InvalidArgument, match=message):
            LlamaConfig(**{**SMALL, **changes})

    def test_a_text_fits_the_context_together_with_what_the_cache_has_read(self):
        model, cache = llama(), Cache()
        with pytest.raises(ShapeError, match=r"at most 16 tokens, got \(2, 17\)"):
            model(tokens(length=17))
        model(tokens(length=12), cache=cache)
        with pytest.raises(ShapeError, match=r"got \(2, 5\) after 12 in the cache"):
            model(tokens(length=5), cache=cache)


class TestRotaryPositions:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        # Of numbers below 1: float64 and float32 round two products and their sum, bfloat16 but the result, from float32.
        [(torch.float64, 1e-15), (torch.float32, 2e-7), (torch.bfloat16, 2**-9)],
    )
    def test_are_as_exact_far_out_as_the_dtype(self, dtype, tolerance):
        x_K = torch.tensor([0.5, -0.25, 0.25, 0.75])
        x_TK = x_K.expand(64, 4).to(dtype)
        result_TK = rotate(x_TK, rotary_tables(60_000, 60_064, x_TK, 4, 10_000.0))
        assert result_TK.dtype == dtype
        for position, result_K in enumerate(result_TK.double(), start=60_000):
            pairs = complex(0.5, 0.25) * cmath.exp(1j * position), complex(-0.25, 0.75) * cmath.exp(1j * position / 100)
            expected_K = torch.tensor([*(p.real for p in pairs), *(p.imag for p in pairs)], dtype=torch.float64)
            torch.testing.assert_close(result_K, expected_K, rtol=0, atol=tolerance)

    def test_make_scores_depend_on_distances_alone(self):
        query, key = (
            torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
        )

        def score(query_at, key_at):
            turned_query = rotate(query, rotary_tables(query_at, query_at + 1, query, 8, 10_000.0))
            return (turned_query * rotate(key, rotary_tables(key_at, key_at + 1, key, 8, 10_000.0))).sum()

        torch.testing.assert_close(score(9, 4), score(1009, 1004), **EXACT)
        assert abs(score(9, 4) - score(9, 5)) > 0.01


class TestWhatTsemonSees:
    @pytest.mark.parametrize("rule", ["vanilla", "resformer", "svformer", "neutreno", "denseformer", "cross-layer"])
    def test_is_every_layer(self, rule, tmp_path):
        model = llama(rule)
        optimizer = torch.optim.AdamW(model.parameters())
        with tsemon.attach(model, optimizer, run="llama", spool_dir=tmp_path, every=1) as monitor:
            loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten())
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            status = monitor.status
        names = {
            "token_similarity",
            "attention_entropy",
            "importance_entropy",
            "first_value_norm_ratio",
            "value_top_eigenvalue",
        }
        assert (names - {*status.measured}, names & {*status.not_measured}, status.num_faults) == (set(), set(), 0)
        assert len(status.blocks) == len(status.attentions) == 5

    @pytest.mark.parametrize(
        ("rule", "met"),
        [
            ("vanilla", lambda V, n: V[n]),
            ("neutreno", lambda V, n: V[n]),
            ("resformer", lambda V, n: V[n] if n == 0 else (V[n] + V[0]) / 2),
            ("svformer", lambda V, n: V[0]),
            ("cross-layer", lambda V, n: V[n] if n == 0 else torch.cat([V[n], V[0]], dim=1)),
        ],
    )
    def test_of_values_are_those_that_the_weights_meet(self, rule, met):
        model, values = llama(rule), []
        for block in model.blocks:
            if block.attention.to_value is not None:
                block.attention.to_value.register_forward_hook(lambda *call: values.append(call[2].detach()))
        reading, _ = reading_of(model, lambda: model(tokens()), measures={"first_value_norm_ratio"})
        expected = torch.stack([first_value_norm_ratio(met(values, n)).mean() for n in range(5)])
        # Sums in float32 on both sides.
        torch.testing.assert_close(reading.layers["first_value_norm_ratio"], expected, rtol=1e-5, atol=0)

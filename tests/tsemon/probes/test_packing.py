"""Padding and packed documents: the numbers of a batch do not depend on how its sequences are laid out."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of
from tsemon.errors import InvalidArgument

WIDTH, NUM_SEQUENCES, TOKENS = 32, 4, 12
PER_TENSOR = ("output_variation", "dead_units")
"""Of all tokens, which are not fewer or more because of padding."""


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x, mask):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        if self.kind == "bool":
            y = F.scaled_dot_product_attention(query, key, value, mask)
        elif self.kind == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            y = F.scaled_dot_product_attention(query, key, value, mask)
        elif self.kind == "softmax":
            scores = (query @ key.mT / math.sqrt(WIDTH // 4)).masked_fill(~mask, -torch.inf)
            y = scores.softmax(dim=-1) @ value
        else:  # without a softmax: linear attention
            y = (query @ key.mT).masked_fill(~mask, 0.0) @ value / 10
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(kind), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        x = x + self.attn(self.norm_1(x), mask)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Gets ids (B, T) and makes masks of its own from whatever its further arguments say."""

    def __init__(self, kind="bool", causal=True):
        super().__init__()
        self.embedding, self.head, self.causal = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50), causal
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def mask(self, ids, seen):
        return seen & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() if self.causal else seen

    def run(self, ids, seen):
        x, mask = self.embedding(ids), self.mask(ids, seen)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

    def forward(self, ids):
        return self.run(ids, torch.ones(1, 1, 1, 1, dtype=torch.bool))


class Packed(Model):
    """Several documents in each row."""

    def forward(self, ids, documents):
        return self.run(ids, (documents[:, :, None] == documents[:, None])[:, None])


class WithPositions(Packed):
    def forward(self, ids, position_ids):
        return super().forward(ids, (position_ids == 0).cumsum(dim=-1))


class WithBoundaries(Packed):
    def forward(self, ids, cu_seqlens):
        documents = torch.searchsorted(cu_seqlens, torch.arange(ids.shape[1]), right=True)
        return super().forward(ids, documents.expand_as(ids))


class Mask(Model):
    """`mask` is true at tokens."""

    def forward(self, ids, mask):
        return self.run(ids, mask.bool()[:, None, None])


class PaddingMask(Model):
    """`padding_mask` is 1 at tokens, against the convention."""

    def forward(self, ids, padding_mask):
        return self.run(ids, padding_mask.bool()[:, None, None])


class HiddenMask(Model):
    """`attention_mask` is true at padding, against the convention."""

    def forward(self, ids, attention_mask):
        return self.run(ids, ~attention_mask[:, None, None])


@pytest.fixture
def measured(tmp_path):
    """The first frame of a training, and the status behind it."""

    def measured(model, *inputs, num_steps=1, **options):
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        options = {"attention_rows": "all", **options}
        with tsemon.attach(model, optimizer, run="packed", every=1, spool_dir=folder, **options) as monitor:
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(*inputs).mean().backward()
                optimizer.step()
                monitor.step()
        return frames_in(folder)[-1], monitor.status

    return measured


@pytest.fixture
def ids():
    return torch.randint(50, (NUM_SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def documents_of(rows):
    return torch.arange(NUM_SEQUENCES).repeat_interleave(TOKENS).view(rows, -1)


def assert_alike(frame, expected, without=()):
    names = {*expected["layers"]} - {*without}
    assert names <= {*frame["layers"]}
    for name in names:
        assert values_of(frame, name) == pytest.approx(values_of(expected, name), rel=1e-4, abs=1e-7, nan_ok=True), name


OF_GRADIENTS = (
    *("grad_norm", "clipped_grad_norm", "update_norm", "update_ratio", "trained_update_ratio", "grad_norm_qk"),
    *("update_alignment", "gradient_alignment"),
)
"""The loss is another mean if padding has a share in it."""


class TestPackedDocuments:
    @pytest.mark.parametrize("kind", ["bool", "float", "softmax"])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_give_the_numbers_of_a_batch(self, measured, ids, kind, rows):
        expected, _ = measured(Model(kind), ids)
        frame, status = measured(Packed(kind), ids.view(rows, -1), documents_of(rows))
        assert_alike(frame, expected)
        assert f"{4 // rows} documents a row, from the keys that attention hides" in status.how["layout"]

    def test_may_be_of_a_model_that_looks_both_ways(self, measured, ids):
        expected, _ = measured(Model(causal=False), ids)
        frame, _ = measured(Packed(causal=False), ids.view(2, -1), documents_of(2))
        assert_alike(frame, expected)

    def test_are_told_from_positions_where_attention_is_not_seen(self, measured, ids):
        expected, _ = measured(Model("linear"), ids)
        positions = torch.arange(TOKENS).repeat(NUM_SEQUENCES).view(2, -1)
        frame, status = measured(WithPositions("linear"), ids.view(2, -1), positions)
        assert_alike(frame, expected)
        assert "2 documents a row, from position_ids" in status.how["layout"]

    def test_are_told_from_boundaries_where_attention_is_not_seen(self, measured, ids):
        expected, _ = measured(Model("linear"), ids)
        boundaries = torch.arange(0, NUM_SEQUENCES * TOKENS + 1, TOKENS)
        frame, status = measured(WithBoundaries("linear"), ids.view(1, -1), boundaries, layout="BTC")
        assert_alike(frame, expected)
        assert "4 documents a row, from cu_seqlens" in status.how["layout"]

    def test_may_be_given(self, measured, ids):
        expected, _ = measured(Model("linear"), ids)
        frame, status = measured(
            Packed("linear"), ids.view(2, -1), documents_of(2), documents=lambda ids, documents: documents
        )
        assert_alike(frame, expected)
        assert "2 documents a row, from attach(documents=...)" in status.how["layout"]

    def test_may_have_padding_behind_them(self, measured, ids):
        """Tokens that belong to no document."""
        expected, _ = measured(Model("linear"), ids[:3])
        documents = documents_of(1).clone()
        documents[:, 3 * TOKENS :] = -1
        frame, status = measured(Packed("linear"), ids.view(1, -1), documents, documents=lambda ids, of: of)
        assert_alike(frame, expected, OF_GRADIENTS)
        assert "25% of tokens belong to none" in status.how["layout"]

    def test_may_have_padding_inside_their_rows(self, measured, ids):
        """At the beginning of a document, or in its middle."""
        is_token = torch.ones_like(ids, dtype=torch.bool)
        is_token[1, :3] = is_token[2, 4:6] = False
        rows = [measured(Model("linear"), row[mask][None])[0] for row, mask in zip(ids, is_token, strict=True)]
        expected = sum(values_of(frame, "token_similarity")[0] for frame in rows) / 4
        given = {"documents": lambda ids, of: of, "padding": lambda ids, of: is_token.view(2, -1)}
        frame, status = measured(Packed("linear"), ids.view(2, -1), documents_of(2), **given)
        assert values_of(frame, "token_similarity")[0] == pytest.approx(expected)
        assert "2 documents a row" in status.how["layout"]

    def test_of_one_token_that_are_given_are_not_contradicted(self, measured, ids, caplog):
        """In a mask they look like padding that sees itself."""
        documents = torch.tensor([0] * 5 + [1] + [2] * 5 + [3]).expand_as(ids)
        with caplog.at_level(logging.WARNING, "tsemon"):
            _, status = measured(Packed(), ids, documents, documents=lambda ids, documents: documents, num_steps=3)
        assert "4 documents a row, from attach(documents=...)" in status.how["layout"]
        assert not [record for record in caplog.records if "do not agree" in record.getMessage()]

    def test_that_are_given_are_contradicted_if_each_row_is_one(self, measured, ids, caplog):
        """The mask shows two in each row."""
        with caplog.at_level(logging.WARNING, "tsemon"):
            _, status = measured(
                Packed(), ids.view(2, -1), documents_of(2), documents=lambda ids, _: torch.zeros_like(ids), num_steps=3
            )
        assert "each row is one sequence, from attach(documents=...)" in status.how["layout"]
        warned = [record for record in caplog.records if "attach(documents=...) and" in record.getMessage()]
        assert len(warned) == 1

    @pytest.mark.parametrize("name", ["documents", "padding"])
    def test_of_one_row_are_not_those_of_all(self, measured, ids, name):
        frame, status = measured(Packed(), ids, torch.zeros_like(ids), **{name: lambda ids, _: torch.ones_like(ids[0])})
        assert "token_similarity" not in frame["layers"]
        assert (
            f"attach({name}=...) returned a tensor of shape ({TOKENS},) for" in status.not_measured["token_similarity"]
        )

    def test_must_not_be_written_by_the_function_that_gives_them(self, measured, ids):
        before = ids.clone()
        _, status = measured(Packed(), ids, torch.zeros_like(ids), documents=lambda ids, of: ids.zero_())
        assert torch.equal(ids, before)
        assert "must not write into a tensor" in status.not_measured["token_similarity"]

    def test_are_no_pattern_of_sparse_attention(self, measured, ids):
        """Every second key is hidden, and no two neighbors see each other: but all even tokens do."""

        class Sparse(Model):
            def forward(self, ids):
                places = torch.arange(ids.shape[1])
                return self.run(ids, ((places[:, None] - places) % 2 == 0)[None, None])

        frame, status = measured(Sparse(), ids)
        states, _ = measured(Model("linear"), ids)  # the same input
        assert "documents" not in status.how["layout"]
        assert values_of(frame, "token_similarity")[0] == pytest.approx(values_of(states, "token_similarity")[0])

    def test_that_attention_crosses_are_contradicted(self, measured, ids, caplog):
        class Crossing(Model):
            def forward(self, ids, position_ids):
                return Model.forward(self, ids)

            def mask(self, ids, seen):
                return None

        class Plain(Attention):
            def forward(self, x, mask):
                query, key, value = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                return self.out(y.transpose(1, 2).flatten(2))

        model = Crossing()
        for block in model.blocks:
            block.attn = Plain("bool")
        positions = torch.arange(TOKENS).repeat(NUM_SEQUENCES).view(2, -1)
        with caplog.at_level(logging.WARNING, "tsemon"):
            measured(model, ids.view(2, -1), positions, num_steps=3)
        told = [record.getMessage() for record in caplog.records if "position_ids" in record.getMessage()]
        assert len(told) == 1
        assert "position_ids restarts within rows, but attention sees all of a row" in told[0]


class TestPadding:
    @pytest.fixture
    def lengths(self):
        return torch.tensor([12, 7, 9, 5])

    @pytest.fixture
    def is_token(self, lengths):
        return torch.arange(TOKENS) < lengths[:, None]

    @pytest.fixture
    def expected(self, measured, ids, is_token):
        """The means over sequences that are measured one by one."""

        def expected(name, **options):
            of_each = [
                values_of(measured(Model(**options), row[mask][None])[0], name)
                for row, mask in zip(ids, is_token, strict=True)
            ]
            return torch.tensor(of_each).nanmean(dim=0).tolist()

        return expected

    @pytest.mark.parametrize(
        ("kind", "as_given"),
        [
            (Mask, lambda mask: mask),
            (Mask, lambda mask: mask.long()),
            (PaddingMask, lambda mask: mask.long()),
            (HiddenMask, lambda mask: ~mask),
        ],
    )
    @pytest.mark.parametrize("causal", [True, False])
    def test_is_what_attention_hides(self, measured, ids, is_token, expected, kind, as_given, causal):
        frame, status = measured(kind(causal=causal), ids, as_given(is_token))
        for name in ("token_similarity", "cosine_similarity", "attention_entropy", "sink_share", "importance_entropy"):
            assert values_of(frame, name) == pytest.approx(expected(name, causal=causal), rel=1e-4), name
        assert "31% of tokens are padding, from the keys that attention hides" in status.how["layout"]

    def test_may_lie_on_the_left(self, measured, ids, is_token, expected):
        frame, _ = measured(Mask(), ids.flip(-1), is_token.flip(-1))
        similarity = [
            values_of(measured(Model(), row[mask].flip(-1)[None])[0], "token_similarity")
            for row, mask in zip(ids, is_token, strict=True)
        ]
        assert values_of(frame, "token_similarity") == pytest.approx(
            torch.tensor(similarity).mean(0).tolist(), rel=1e-4
        )

    @pytest.mark.parametrize("kind", [PaddingMask, HiddenMask])
    @pytest.mark.parametrize("is_left", [False, True])
    def test_has_the_value_that_the_longest_row_lacks_where_attention_is_not_seen(
        self, measured, ids, is_token, kind, is_left
    ):
        side = (lambda x: x.flip(-1)) if is_left else (lambda x: x)
        named, _ = measured(kind("linear"), side(ids), side(is_token if kind is PaddingMask else ~is_token))
        given, _ = measured(Mask("linear"), side(ids), side(is_token), padding=lambda ids, mask: mask)
        assert_alike(named, given, OF_GRADIENTS)

    def test_may_be_given(self, measured, ids, is_token):
        _frame, status = measured(Mask("linear"), ids, is_token, padding=lambda ids, mask: mask)
        assert "31% of tokens are padding, from attach(padding=...)" in status.how["layout"]
        other, status = measured(Mask("linear"), ids, is_token)
        assert "token_similarity" not in other["layers"]
        assert "attention was not seen, and mask may show padding" in status.not_measured["token_similarity"]

    def test_is_seen_in_attention_whose_other_scores_are_nan(self, measured, ids, is_token, caplog):
        model = PaddingMask("softmax")
        model.blocks[0].attn.qkv.register_forward_hook(lambda _, args, output: output * math.nan)
        with caplog.at_level(logging.WARNING, "tsemon"):
            _, status = measured(model, ids, is_token, num_steps=3)
        assert "31% of tokens are padding, from the keys that attention hides" in status.how["layout"]
        assert not [record for record in caplog.records if "do not agree" in record.getMessage()]

    def test_that_is_given_wrongly_is_contradicted(self, measured, ids, is_token, caplog):
        with caplog.at_level(logging.WARNING, "tsemon"):
            measured(Mask(), ids, is_token, padding=lambda ids, mask: ~mask, num_steps=3)
        told = [record.getMessage() for record in caplog.records if "do not agree" in record.getMessage()]
        assert len(told) == 1
        assert "attach(padding=...) and the keys that attention hides" in told[0]

    def test_found_behind_the_first_blocks_leaves_states_unmeasured(self, measured, ids, is_token):
        """As in hybrids, whose first blocks have no attention: they were measured with the padding in them."""

        class Hybrid(Mask):
            def __init__(self):
                super().__init__()
                self.blocks[0].attn = Attention("linear")

        frame, status = measured(Hybrid(), ids, is_token.float(), layout="BTC")
        assert "token_similarity" not in frame["layers"]
        assert "came too late for the blocks before it" in status.not_measured["token_similarity"]
        given, _ = measured(Hybrid(), ids, is_token, layout="BTC", padding=lambda ids, mask: mask)
        assert "token_similarity" in given["layers"]

    def test_of_all_tokens_leaves_nothing(self, measured, ids):
        frame, _ = measured(Mask("linear"), ids, torch.zeros_like(ids), padding=lambda ids, mask: mask.bool())
        assert all(math.isnan(value) for value in values_of(frame, "token_similarity"))


class TestWhatIsGiven:
    @pytest.mark.parametrize("name", ["padding", "documents"])
    def test_must_be_a_function(self, measured, ids, name):
        with pytest.raises(
            InvalidArgument, match=rf"{name} must be a function that gets the model's inputs .* got Tensor"
        ):
            measured(Model(), ids, **{name: ids})

    @pytest.mark.parametrize("name", ["padding", "documents"])
    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda ids: ids[:, 1:], r"returned a tensor of shape \(4, 11\) for 4 rows of 12 tokens"),
            (
                lambda ids: ids.float(),
                r"must return a tensor \(batch, tokens\) of bool or int, returned a tensor of torch.f",
            ),
            (lambda ids: None, r"must return a tensor \(batch, tokens\) of bool or int, returned None"),
            (lambda ids: 1 / 0, r"raised ZeroDivisionError: division by zero"),
        ],
    )
    def test_that_does_not_fit_leaves_states_unmeasured(self, measured, ids, name, function, reason):
        frame, status = measured(Model(), ids, **{name: function})
        assert "token_similarity" not in frame["layers"]
        with pytest.raises(AssertionError, match=rf"attach\({name}=...\) {reason}"):
            raise AssertionError(status.not_measured["token_similarity"])
        assert not status.faults


class TestShapesAtTheEdge:
    @pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 12), (2, 2)])
    @pytest.mark.parametrize("kind", ["bool", "softmax"])
    def test_give_numbers_of_the_batch_or_none(self, measured, ids, shape, kind):
        some = ids[: shape[0], : shape[1]]
        frame, status = measured(Mask(kind), some, torch.ones_like(some), layout="BTC")
        expected, _ = measured(Model(kind), some, layout="BTC")
        assert_alike(frame, expected)
        assert not status.faults

    def test_of_no_tokens_are_not_measured(self, measured):
        frame, _ = measured(Model("linear"), torch.zeros(4, 0, dtype=torch.long), layout="BTC")
        assert "token_similarity" not in frame["layers"] or all(
            math.isnan(value) for value in values_of(frame, "token_similarity")
        )

"""Models whose evidence misleads: each number is that of a reference with plain hooks, or is missing with a reason."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of

WIDTH, HEADS = 32, 4
sdpa = F.scaled_dot_product_attention


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def causal(query, key, value, *_):
    return sdpa(query, key, value, is_causal=True)


def unknown_kernel(query, key, value, mask):
    """Attention that no function of PyTorch computes as a whole."""
    scores = (query @ key.mT / 3).masked_fill(~mask, -1e30)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return (weights / weights.sum(dim=-1, keepdim=True)) @ value


class Attention(nn.Module):
    def __init__(self, attend=sdpa):
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x, *others):
        y = self.attend(*map(heads, self.qkv(x).chunk(3, dim=-1)), *others)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, *others):
        x = x + self.attn(self.norm_1(x), *others)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Of ids (B, T); further arguments go to the attention."""

    block = Block

    def __init__(self, attention=Attention):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(self.block(attention()) for _ in range(3))

    def run(self, x, *others):
        for block in self.blocks:
            x = block(x, *others)
        return self.head(x)

    def forward(self, ids, *others):
        return self.run(self.embedding(ids), *others)


def made(model):
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    return model


def ids_of(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def measured(tmp_path):
    """Frames of a training that changes nothing, and the status behind it."""

    def measured(model, *inputs, **options):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        options = {"attention_rows": "all", **options}
        with tsemon.attach(model, optimizer, run="run", every=1, spool_dir=folder, **options) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                model(*inputs).square().mean().backward()
                optimizer.step()
                monitor.step()
        assert not monitor.status.faults
        return frames_in(folder), monitor.status

    return measured


def states(model, *inputs):
    """What goes into the first block and comes out of each."""
    seen = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))]
    hooks += [
        block.register_forward_hook(lambda _, args, output: seen.append(output.detach())) for block in model.blocks
    ]
    model(*inputs)
    for hook in hooks:
        hook.remove()
    return seen


def similarity(sequences):
    """Mean over sequences (T, D) of the token similarity, in float64."""
    found = []
    for x in sequences:
        x = x.double()
        found.append(len(x) * x.mean(dim=0).square().sum() / x.square().sum())
    return torch.stack(found).mean().item()


def assert_right_or_missing(frames, status, expected, name="token_similarity"):
    """In each frame; the last reason is known."""
    num_measured = 0
    for frame in frames:
        values = values_of(frame, name) if name in frame["layers"] else [math.nan] * len(expected)
        for value, right in zip(values, expected, strict=True):
            assert math.isnan(value) or value == pytest.approx(right, rel=1e-4), (
                values,
                expected,
                status.how["layout"],
            )
        num_measured += not any(map(math.isnan, values))
    if num_measured < len(frames) and (name not in frames[-1]["layers"] or any(map(math.isnan, values))):
        assert status.not_measured[name]
    return num_measured


def rows(x, valid=None):
    return x if valid is None else [row[is_token] for row, is_token in zip(x, valid, strict=True)]


class Windows(Attention):
    """Within windows of 16 tokens."""

    def forward(self, x, *_):
        query, key, value = map(heads, self.qkv(x.reshape(-1, 16, WIDTH)).chunk(3, dim=-1))
        return self.out(sdpa(query, key, value).transpose(1, 2).flatten(2)).reshape(x.shape)


class Transposing(nn.Module):
    """nn.MultiheadAttention with tokens first, in blocks with samples first."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.mha(x, x, x, need_weights=False)[0].transpose(0, 1)


class AlongFirst(nn.Module):
    """Mixes along the first axis, by no attention."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.mix(x).cumsum(dim=0) / 5


class TestTheLayout:
    def test_is_not_that_of_windows_as_long_as_there_are_samples(self, measured):
        model, ids = made(Model(Windows)), ids_of(16, 64)
        expected = [similarity(x) for x in states(model, ids)]
        assert assert_right_or_missing(*measured(model, ids), expected) >= 2

    @pytest.mark.parametrize("shape", [(8, 8), (4, 12)])
    @pytest.mark.parametrize("is_frozen", [False, True])
    def test_is_not_that_of_a_module_inside(self, measured, shape, is_frozen):
        model, ids = made(Model(Transposing)), ids_of(*shape)
        if is_frozen:
            model.blocks.eval().requires_grad_(False)
        expected = [similarity(x) for x in states(model, ids)]
        assert assert_right_or_missing(*measured(model, ids), expected) >= 2
        assert assert_right_or_missing(*measured(model, ids, measures=["token_similarity"]), expected) >= 2

    @pytest.mark.parametrize("layout", [None, "BTC", "TBC"])
    def test_without_attention_is_not_the_convention_of_inputs(self, measured, layout):
        class Recurrence(Model):
            class block(nn.Module):
                def __init__(self, _):
                    super().__init__()
                    self.norm, self.mixer = nn.LayerNorm(WIDTH), MambaMixer()

                def forward(self, x):
                    return x + self.mixer(self.norm(x))

        class MambaMixer(AlongFirst):
            pass

        model, ids = made(Recurrence()), ids_of(24, 4)
        expected = [similarity(x.transpose(0, 1)) for x in states(model, ids)]
        num = assert_right_or_missing(*measured(model, ids, layout=layout), expected)
        assert num >= (0 if layout == "BTC" else 2)

    def test_that_is_given_wrongly_is_contradicted_with_as_many_samples_as_tokens(self, measured):
        class First(Attention):
            def forward(self, x):
                return super().forward(x.transpose(0, 1)).transpose(0, 1)

        class TokensFirst(Model):
            def forward(self, ids):
                return self.run(self.embedding(ids).transpose(0, 1))

        model, ids = made(TokensFirst(lambda: First(causal))), ids_of(8, 8)
        expected = [similarity(x.transpose(0, 1)) for x in states(model, ids)]
        frames, status = measured(model, ids, layout="BTC", measures=["token_similarity"])
        assert assert_right_or_missing(frames, status, expected) == 0
        assert "attach(layout='BTC') says batch first, " in (why := status.not_measured["token_similarity"])
        assert " says tokens first" in why

    def test_of_several_sequences_a_sample_is_no_grid(self, measured):
        """As of the channels of a time series."""

        class Channels(Attention):
            def forward(self, x):
                return super().forward(x.flatten(0, 1)).view(x.shape)

        class Series(Model):
            def forward(self, ids):
                return self.run(self.embedding(ids))

        model, ids = made(Series(Channels)), ids_of(3, 5, 12)
        expected = [similarity(x.flatten(0, 1)) for x in states(model, ids)]
        assert assert_right_or_missing(*measured(model, ids), expected) == 3


class TestTheState:
    def test_is_not_a_table_of_positions(self, measured):
        class Rotated(Block):
            def forward(self, x, table):
                x = x + self.attn(self.norm_1(x)[None])[0]
                return x + self.mlp(self.norm_2(x))

        class Flat(Model):
            block = Rotated

            def forward(self, ids):
                return self.run(self.embedding(ids[0]), torch.ones(1, ids.shape[1], 8))

        model, ids = made(Flat(lambda: Attention(causal))), ids_of(1, 24)
        expected = [similarity([x]) for x in states(model, ids)]
        assert assert_right_or_missing(*measured(model, ids), expected) == 3

    def test_is_not_a_bias_of_attention(self, measured):
        class Grid(Block):
            def forward(self, x, bias):
                x = x + self.attn(self.norm_1(x).flatten(1, 2), bias).view(x.shape)
                return x + self.mlp(self.norm_2(x))

        class Vision(Model):
            block = Grid

            def __init__(self):
                super().__init__()
                self.patch, self.bias = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(HEADS, 16, 16))

            def forward(self, images):
                return self.run(self.patch(images).permute(0, 2, 3, 1), self.bias)

        model, images = made(Vision()), torch.randn(3, 3, 16, 16)
        expected = [similarity(x.flatten(1, 2)) for x in states(model, images)]
        assert assert_right_or_missing(*measured(model, images), expected) == 3


@pytest.fixture
def is_token():
    return torch.arange(12) < torch.tensor([12, 7, 9, 5])[:, None]


class TestPadding:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("is_left", [False, True])
    def test_may_see_itself(self, measured, is_token, is_causal, is_left):
        is_token = is_token.flip(-1) if is_left else is_token
        mask = is_token[:, None, None].expand(-1, -1, 12, -1)
        mask = (mask.tril() if is_causal else mask) | torch.eye(12, dtype=torch.bool)
        model, ids = made(Model()), ids_of(4, 12)
        expected = [similarity(rows(x, is_token)) for x in states(model, ids, mask)]
        assert assert_right_or_missing(*measured(model, ids, mask), expected) == 3

    def test_on_the_left_may_see_everything(self, measured, is_token):
        is_token = is_token.flip(-1)
        mask = is_token[:, None, None].expand(-1, -1, 12, -1).tril()
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        model, ids = made(Model()), ids_of(4, 12)
        expected = [similarity(rows(x, is_token)) for x in states(model, ids, mask)]
        assert assert_right_or_missing(*measured(model, ids, mask), expected) == 3

    @pytest.mark.parametrize("lengths", [[5], [5, 7, 9, 3], [12, 12]])
    def test_with_no_evidence_of_its_side_is_not_guessed(self, measured, lengths):
        class Ignoring(Model):
            def forward(self, ids, padding_mask):
                return super().forward(ids)

        is_token = torch.arange(12) < torch.tensor(lengths)[:, None]
        model, ids = made(Ignoring(lambda: Attention(causal))), ids_of(*is_token.shape)
        expected = [similarity(rows(x, is_token)) for x in states(model, ids, is_token.long())]
        num_measured = assert_right_or_missing(*measured(model, ids, is_token.long()), expected)
        assert num_measured == (3 if min(lengths) == 12 else 0)

    @pytest.mark.parametrize("heads_first", [False, True])
    def test_is_read_from_heads_among_the_rows(self, measured, is_token, heads_first):
        class Merged(Attention):
            def forward(self, x, mask):
                batch, tokens, _ = x.shape
                query, key, value = (
                    (y.transpose(0, 1) if heads_first else y).reshape(-1, tokens, WIDTH // HEADS)
                    for y in map(heads, self.qkv(x).chunk(3, dim=-1))
                )
                mask = mask.repeat(HEADS, 1) if heads_first else mask.repeat_interleave(HEADS, dim=0)
                scores = torch.bmm(query, key.mT).masked_fill(~mask[:, None], -torch.inf)
                y = torch.bmm(scores.softmax(dim=-1), value)
                shape = (HEADS, batch) if heads_first else (batch, HEADS)
                y = y.view(*shape, tokens, -1)
                y = y.permute(1, 2, 0, 3) if heads_first else y.permute(0, 2, 1, 3)
                return self.out(y.reshape(x.shape))

        model, ids = made(Model(Merged)), ids_of(4, 12)
        expected = [similarity(rows(x, is_token)) for x in states(model, ids, is_token)]
        assert assert_right_or_missing(*measured(model, ids, is_token), expected) == 3


ENDS = torch.tensor([0, 7, 16, 30, 48], dtype=torch.int32)


def documents(x):
    return [x.reshape(-1, WIDTH)[start:end] for start, end in itertools.pairwise(ENDS)]


class OneByOne(Attention):
    """Calls attention once per document."""

    def forward(self, x, cu_seqlens):
        sizes = cu_seqlens.diff().tolist()
        parts = [y.split(sizes, dim=2) for y in map(heads, self.qkv(x).chunk(3, dim=-1))]
        y = torch.cat([causal(*each) for each in zip(*parts, strict=True)], dim=2)
        return self.out(y.transpose(1, 2).flatten(2))


class WithBoundaries(Model):
    class block(Block):
        def forward(self, x, cu_seqlens):
            return super().forward(x, cu_seqlens)

    def forward(self, ids, cu_seqlens):
        return super().forward(ids, cu_seqlens)


class TestDocuments:
    def test_that_attention_gets_one_by_one(self, measured):
        model, ids = made(WithBoundaries(OneByOne)), ids_of(1, 48)
        expected = [similarity(documents(x)) for x in states(model, ids, ENDS)]
        frames, status = measured(model, ids, ENDS)
        assert assert_right_or_missing(frames, status, expected) == 3
        assert "attention_entropy" not in frames[-1]["layers"]
        assert "computes attention in several calls" in status.not_measured["attention_entropy"]

    def test_that_attention_gets_one_by_one_and_nothing_names(self, measured):
        class Hidden(WithBoundaries):
            def forward(self, ids, lengths):
                return super().forward(ids, torch.tensor([0, *lengths]).cumsum(dim=0))

        class block(Block):
            def forward(self, x, ends):
                return super().forward(x, ends)

        Hidden.block = block
        model, ids = made(Hidden(OneByOne)), ids_of(1, 48)
        lengths = ENDS.diff().tolist()
        expected = [similarity(documents(x)) for x in states(model, ids, lengths)]
        assert assert_right_or_missing(*measured(model, ids, lengths), expected) == 0

    def test_behind_keys_of_a_memory(self, measured):
        class Remembering(Attention):
            def __init__(self):
                super().__init__()
                self.memory = nn.Parameter(torch.zeros(2, 1, HEADS, 4, WIDTH // HEADS))

            def forward(self, x, mask):
                query, key, value = map(heads, self.qkv(x).chunk(3, dim=-1))
                key, value = (
                    torch.cat([memory.expand(len(x), -1, -1, -1), y], dim=2)
                    for memory, y in zip(self.memory, (key, value), strict=True)
                )
                return self.out(sdpa(query, key, value, mask).transpose(1, 2).flatten(2))

        number = torch.arange(48) // 12
        mask = (number[:, None] == number) & torch.ones(48, 48, dtype=torch.bool).tril()
        model, ids, mask = made(Model(Remembering)), ids_of(2, 48), F.pad(mask, (4, 0), value=True)
        expected = [similarity(x.reshape(-1, 12, WIDTH)) for x in states(model, ids, mask)]
        assert_right_or_missing(*measured(model, ids, mask), expected)

    def test_are_no_chunks_that_later_attention_ignores(self, measured):
        class Alternating(Model):
            def forward(self, ids):
                number = torch.arange(ids.shape[1]) // 8
                full = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
                x = self.embedding(ids)
                for block, mask in zip(self.blocks, (full & (number[:, None] == number),) * 2 + (full,), strict=True):
                    x = block(x, mask)
                return self.head(x)

        model, ids = made(Alternating()), ids_of(4, 32)
        expected = [similarity(x) for x in states(model, ids)]
        frames, status = measured(model, ids)
        assert assert_right_or_missing(frames, status, expected) == 2
        only_states, status = measured(model, ids, measures=["token_similarity"])
        assert assert_right_or_missing(only_states, status, expected) == 2

    def test_of_other_rows_are_found_beside_a_row_with_a_global_token(self, measured):
        number = torch.arange(48) // 12
        mask = ((number[:, None] == number) & torch.ones(48, 48, dtype=torch.bool).tril()).expand(4, 1, -1, -1).clone()
        mask[0, 0, :, 0] = True
        model, ids = made(Model()), ids_of(4, 48)
        expected = [similarity([x[0], *x[1:].reshape(-1, 12, WIDTH)]) for x in states(model, ids, mask)]
        assert assert_right_or_missing(*measured(model, ids, mask), expected) == 3

    def test_of_another_length_leave_nothing_that_depends_on_them(self, measured):
        model, ids = made(Model(lambda: Attention(causal))), ids_of(4, 12)
        frames, status = measured(model, ids, documents=lambda ids: ids[:, 1:])
        for name in ("token_similarity", "attention_entropy", "sink_share", "first_value_norm_ratio", "dead_units"):
            assert name not in frames[0]["layers"] or all(map(math.isnan, values_of(frames[0], name))), name
            assert "returned a tensor of shape (4, 11) for 4 rows of 12 tokens" in status.not_measured[name], name
        assert frames[0]["scalars"].get("output_variation") is None


class TestGradientsOfALossThatWasScaledByHand:
    @pytest.mark.parametrize("scale", [2.0**16, 3.0])
    def test_are_read_after_the_division(self, tmp_path, scale):
        found = []
        for factor in (1.0, scale):
            model, ids = made(Model(lambda: Attention(causal))), ids_of(4, 12)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            folder = tmp_path / str(factor)
            with tsemon.attach(model, optimizer, run="run", every=1, spool_dir=folder) as monitor:
                (model(ids).square().mean() * factor).backward()
                for p in model.parameters():
                    p.grad.div_(factor)
                optimizer.step()
                monitor.step()
            found.append(frames_in(folder)[-1]["scalars"])
        one, scaled = found
        for name in ("total_grad_norm", "total_clipped_grad_norm"):
            assert scaled[name] == pytest.approx(one[name], rel=1e-5)


class TestWhatIsUndefined:
    def test_has_a_reason(self, measured):
        model, mask = made(Model()), torch.zeros(4, 1, 12, 12, dtype=torch.bool)
        assert_each_nan_has_a_reason(*measured(model, ids_of(4, 12), mask))

    @pytest.mark.parametrize("shape", [(4, 1), (1, 12), (1, 1), (4, 4)])
    def test_of_few_sequences_or_tokens_has_a_reason(self, measured, shape):
        model = made(Model(lambda: Attention(causal)))
        assert_each_nan_has_a_reason(*measured(model, ids_of(*shape)))


def assert_each_nan_has_a_reason(frames, status):
    for name in frames[-1]["layers"]:
        if any(map(math.isnan, values_of(frames[-1], name))):
            assert status.not_measured.get(name), name

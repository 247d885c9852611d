"""Documents that a kernel keeps apart: each number is that of the same documents, computed one by one in float64."""

import dataclasses
import itertools
import sys
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tsemon
from tests.frames import frames_in, values_of

WIDTH, HEADS, DEPTH = 32, 4, 3
STARTS = torch.tensor([0, 5, 16, 18, 40], dtype=torch.int32)
"""Of four documents."""
NUM_TOKENS = int(STARTS[-1])


def attended(query, key, value, is_causal):
    """Of one document (N, H, K)."""
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, key, value)), is_causal=is_causal)


def one_by_one(query, key, value, starts, is_causal):
    parts = [
        attended(query[a:b], key[a:b], value[a:b], is_causal).transpose(0, 1)
        for a, b in itertools.pairwise(starts.tolist())
    ]
    return torch.cat([*parts, torch.zeros_like(query[int(starts[-1]) :])])


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """With the arguments of PyTorch's, which runs on GPUs alone."""
    with torch._C.DisableTorchFunction():  # as of a kernel, nothing is seen of what is inside
        return one_by_one(query, key, value, cu_seq_q, window_size[1] == 0)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    """With the arguments of flash-attn's, which runs on GPUs alone."""
    with torch._C.DisableTorchFunction():
        return one_by_one(q, k, v, cu_seqlens_q, causal)


def unknown(q, k, v, starts, is_causal):
    """A kernel of the model's own."""
    with torch._C.DisableTorchFunction():
        return one_by_one(q, k, v, starts, is_causal)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for package, function in (("flash_attn", flash_attn_varlen_func), ("torch.nn.attention.varlen", varlen_attn)):
        module = types.ModuleType(package)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, package, module)


def number_of(starts):
    return torch.searchsorted(starts, torch.arange(int(starts[-1])), right=True)


class Attention(nn.Module):
    """Of hidden states (N, D) or (1, N, D)."""

    def __init__(self, kernel, is_causal):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kernel, self.is_causal = kernel, is_causal

    def heads(self, x):
        return self.qkv(x).reshape(-1, 3, HEADS, WIDTH // HEADS).unbind(1)

    def forward(self, x, starts):
        query, key, value = self.heads(x)
        if self.kernel == "flex":
            # It has no gradients on a CPU.
            tensors = (y.detach().transpose(0, 1)[None] for y in (query, key, value))
            y = flex_attention(*tensors, block_mask=self.block_mask(starts))[0].transpose(0, 1)
        elif self.kernel == "varlen":
            window = (-1, 0) if self.is_causal else (-1, -1)
            y = varlen_attn(query, key, value, starts, starts, 40, 40, window_size=window)
        elif self.kernel == "flash":
            y = flash_attn_varlen_func(query, key, value, starts, starts, 40, 40, causal=self.is_causal)
        else:
            y = unknown(query, key, value, starts, self.is_causal)
        return self.out(y.flatten(1)).view(x.shape)

    def block_mask(self, starts):
        document, is_causal = number_of(starts), self.is_causal

        def mask_mod(b, h, q, k):
            is_same = document[q] == document[k]
            return is_same & (q >= k) if is_causal else is_same

        return create_block_mask(mask_mod, 1, None, len(document), len(document), device="cpu")


class Block(nn.Module):
    def __init__(self, kernel, is_causal):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(kernel, is_causal), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, starts):
        x = x + self.attn(self.norm_1(x), starts)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, kernel, is_causal, has_batch_axis):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block(kernel, is_causal) for _ in range(DEPTH))
        self.has_batch_axis = has_batch_axis
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))

    def run(self, ids, starts):
        x = self.embedding(ids)
        x = x[None] if self.has_batch_axis else x
        for block in self.blocks:
            x = block(x, starts)
        return self.head(x)

    def forward(self, ids, cu_seqlens):
        return self.run(ids, cu_seqlens)


class Packed(NamedTuple):
    ids: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclasses.dataclass
class PackedParams:
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int = 40


class OfDataclass(Model):
    def forward(self, ids, packed):
        return self.run(ids, packed.cu_seqlens_q)


class OfNamedTuple(Model):
    def forward(self, batch):
        return self.run(batch.ids, batch.cu_seqlens)


class OfDict(Model):
    def forward(self, batch):
        return self.run(batch["ids"], batch["of_attention"]["cu_seqlens"])


class OfNobody(Model):
    """No argument has a name that says what it is."""

    class Inner(Block):
        def forward(self, x, where):
            return super().forward(x, where)

    def __init__(self, *args):
        super().__init__(*args)
        for block in self.blocks:
            block.__class__ = self.Inner

    def forward(self, ids, where):
        return self.run(ids, where)


IDS = torch.randint(50, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
INPUTS = {
    Model: (IDS, STARTS),
    OfDataclass: (IDS, PackedParams(STARTS)),
    OfNamedTuple: (Packed(IDS, STARTS),),
    OfDict: ({"ids": IDS, "of_attention": {"cu_seqlens": STARTS}},),
}


@pytest.fixture
def measured(tmp_path):
    """The last frame of a training that changes nothing, and the status behind it."""

    def measured(model, inputs, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        options = {"attention_rows": "all", **options}
        with tsemon.attach(model, optimizer, run="run", every=1, spool_dir=folder, **options) as monitor:
            for _ in range(2):
                optimizer.zero_grad()
                model(*inputs).square().mean().backward()
                optimizer.step()
                monitor.step()
        assert not monitor.status.faults
        return frames_in(folder)[-1], monitor.status

    return measured


def expected_of(model, inputs, starts=STARTS):
    """Of each document by itself, in float64, by hooks of the test's own."""
    states, of_attention, handles = [], [], []
    for number, block in enumerate(model.blocks):
        if number == 0:
            handles.append(block.register_forward_pre_hook(lambda _, args: states.append(args[0])))
        handles.append(block.register_forward_hook(lambda *args: states.append(args[-1])))
        handles.append(block.attn.register_forward_hook(lambda a, args, _: of_attention.append((a, args[0]))))
    model(*inputs)
    for handle in handles:
        handle.remove()
    spans = [(a, b) for a, b in itertools.pairwise(starts.tolist()) if b > a]
    with torch.no_grad():
        similarity = [torch.stack([similarity_of(x.view(-1, WIDTH)[a:b].double()) for a, b in spans]) for x in states]
        entropies, largest = zip(*(of_scores(attn, x, spans) for attn, x in of_attention), strict=True)
    return {
        "token_similarity": [x.mean().item() for x in similarity],
        "attention_entropy": [x.nanmean(dim=0).mean().item() for x in entropies],
        "attention_entropy_min": [x.nanmean(dim=0).min().item() for x in entropies],
        "max_attention_logit": [x.item() for x in largest],
    }


def similarity_of(x):
    return len(x) * x.mean(dim=0).square().sum() / x.square().sum()


def of_scores(attn, x, spans):
    """The entropy of each document and head, and the largest score of all."""
    query, key, _ = (y.double() for y in attn.heads(x))
    entropies, largest = [], []
    for a, b in spans:
        scores = torch.einsum("thk,shk->hts", query[a:b], key[a:b]) / (WIDTH // HEADS) ** 0.5
        if attn.is_causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), -torch.inf)
        largest.append(scores.amax())
        num_keys = scores.isfinite().sum(dim=-1)
        share = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1) / num_keys.log()
        entropies.append(share.masked_fill(num_keys < 2, torch.nan).nanmean(dim=-1))
    return torch.stack(entropies), torch.stack(largest).amax()


def assert_right(frame, expected, names=None):
    for name in names or expected:
        assert values_of(frame, name) == pytest.approx(expected[name], rel=1e-5), name


def given_to(kernel):
    """Token ids of one axis do not tell which axis of (1, N, D) holds the tokens."""
    return {"layout": "BTC"} if kernel == "unknown" else {}


class TestDocuments:
    @pytest.mark.parametrize("has_batch_axis", [True, False])
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("kernel", ["flex", "varlen", "flash"])
    def test_of_a_kernel_are_measured_each_by_itself(self, measured, kernel, is_causal, has_batch_axis):
        model = Model(kernel, is_causal, has_batch_axis)
        frame, status = measured(model, INPUTS[Model])
        assert_right(frame, expected_of(model, INPUTS[Model]))
        assert "4 documents a row, from the keys that attention hides" in status.how["layout"]
        layout = "batch first" if has_batch_axis else "no batch axis"
        assert f"{layout}, from attention of 40 queries" in status.how["layout"]

    @pytest.mark.parametrize("kernel", ["varlen", "flash", "unknown"])
    @pytest.mark.parametrize("kind", [OfDataclass, OfNamedTuple, OfDict])
    def test_may_be_told_inside_an_argument(self, measured, kind, kernel):
        model = kind(kernel, is_causal=True, has_batch_axis=True)
        frame, status = measured(model, INPUTS[kind], **given_to(kernel))
        expected = expected_of(model, INPUTS[kind])
        if kernel == "unknown":
            assert_right(frame, expected, ["token_similarity"])
            assert "4 documents a row, from cu_seqlens" in status.how["layout"]
            assert "called no function that tsemon knows" in status.not_measured["attention_entropy"]
        else:
            assert_right(frame, expected)
            assert "4 documents a row, from the keys that attention hides" in status.how["layout"]

    @pytest.mark.parametrize("kernel", ["flex", "varlen", "flash", "unknown"])
    def test_without_tokens_are_none(self, measured, kernel):
        """Boundaries that repeat, as those of a batch that is filled up with empty documents."""
        starts = torch.tensor([0, 0, 5, 16, 16, 18, 40, 40], dtype=torch.int32)
        model, inputs = Model(kernel, is_causal=True, has_batch_axis=True), (IDS, starts)
        frame, status = measured(model, inputs, **given_to(kernel))
        assert "4 documents a row" in status.how["layout"]
        names = ["token_similarity"] if kernel == "unknown" else None
        assert_right(frame, expected_of(model, inputs, starts), names)

    @pytest.mark.parametrize("kernel", ["varlen", "flash", "unknown"])
    def test_of_a_single_token_are_documents(self, measured, kernel):
        """A mask alone cannot tell them from padding that sees itself."""
        starts = torch.tensor([0, 5, 16, 17, 39, 40], dtype=torch.int32)
        model, inputs = Model(kernel, is_causal=True, has_batch_axis=True), (IDS, starts)
        frame, status = measured(model, inputs, **given_to(kernel))
        assert "5 documents a row" in status.how["layout"]
        names = ["token_similarity"] if kernel == "unknown" else None
        assert_right(frame, expected_of(model, inputs, starts), names)

    @pytest.mark.parametrize("kernel", ["varlen", "flash"])
    def test_may_end_before_the_last_token(self, measured, kernel):
        """What is behind is padding."""
        ids = torch.cat([IDS, IDS[:6]])
        model = Model(kernel, is_causal=True, has_batch_axis=True)

        frame, status = measured(model, (ids, STARTS))
        assert "4 documents a row, 13% of tokens belong to none" in status.how["layout"]
        assert_right(frame, expected_of(model, (ids, STARTS)))

    def test_of_an_unknown_kernel_that_nothing_names_must_be_given(self, measured):
        model, inputs = OfNobody("unknown", True, True), (IDS, STARTS)
        _, status = measured(model, inputs, layout="BTC")
        for name in ("attention_entropy", "max_attention_logit", "sink_share"):
            assert status.not_measured[name].startswith("attention was not seen in 3 of 3 blocks: ")
        assert "attention was not seen in 3 of 3 blocks: " in str(status)
        assert "documents" not in status.how["layout"]
        given = {"documents": lambda ids, where: number_of(where)}
        frame, status = measured(model, inputs, layout="BTC", **given)
        assert_right(frame, expected_of(model, inputs), ["token_similarity"])
        assert "4 documents a row, from attach(documents=...)" in status.how["layout"]

"""What is trained: small models with their batches and their loss.

Axes: `B` batch, `T` tokens, `D` width, `K` numbers of an embedding, `S` image side, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tsemon import models
from tsemon.lab.train import digits, image_batches, standard_library_text, text_batches
from tsemon.lab.train.batches import Batch, generator
from tsemon.lab.train.tasks import RecurrentTask, cross_entropy
from tsemon.lab.train.text import text_streams
from tsemon.models.attention import SelfAttention

MASK, HIDDEN_RATIO = 255, 0.25
PADDING = 0


@dataclass
class Subject:
    """A model and what it learns from."""

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    blocks: list[str] | None = None
    """Names of the blocks, where they are not transformer blocks that are found."""


Make = Callable[[int], Subject]
"""Takes the seed of the batches; weights are drawn from the global generator."""


def classified(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets)


@cache
def text() -> Tensor:
    return standard_library_text(3_000_000)


def language(seed: int, *, batch: int = 12, context: int = 40, **sizes: Any) -> Subject:
    """The next byte of Python sources."""
    shape = dict[str, Any](depth=5, width=40, heads=4, ffn=112, norm="pre") | sizes
    model = models.CausalLanguageModel(models.CausalLanguageModelConfig(vocab=256, context=context, **shape))
    return Subject(model, text_batches(text(), context, batch, seed), classified)


def fine_tuning(seed: int, *, steps: int) -> Subject:
    """A language model that has learned from the first megabyte, and goes on with the last one."""
    subject = language(seed)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=2.5e-3)
    for inputs, targets in itertools.islice(text_batches(text()[:1_000_000], 40, 12, seed), steps):
        optimizer.zero_grad()
        classified(subject.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    subject.batches = text_batches(text()[2_000_000:], 40, 12, seed)
    return subject


def pretrained(make: Make, *, steps: int, rate: float) -> Make:
    """The same with a model that has trained for some steps already."""

    def made(seed: int) -> Subject:
        subject = make(seed)
        optimizer = torch.optim.AdamW(subject.model.parameters(), lr=rate)
        for inputs, targets in itertools.islice(subject.batches, steps):
            optimizer.zero_grad()
            subject.loss(subject.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return subject

    return made


def llama(seed: int, *, preset: str = "resformer-2m", **sizes: Any) -> Subject:
    """The same with RMSNorm, SwiGLU, rotary positions and value residuals."""
    shape = dict[str, Any](depth=6, width=48, heads=4, ffn=128) | sizes
    model = models.Llama.from_preset(preset, vocab=256, context=40, **shape)
    return Subject(model, text_batches(text(), 40, 12, seed), classified)


def recurrent(seed: int) -> Subject:
    """Transformer-XL on streams of text, with a memory."""
    shape = dict[str, Any](depth=4, width=40, heads=4, ffn=112, norm="pre", activation="relu")
    model = models.TransformerXL(models.TransformerXLConfig(vocab=256, context=32, memory=32, **shape))
    return Subject(model, text_streams(text(), 32, 12), RecurrentTask().loss)


def masked(seed: int, **sizes: Any) -> Subject:
    """Bytes of text of which a quarter is hidden, to be filled in by an encoder."""
    shape = dict[str, Any](depth=3, width=40, heads=4, ffn=112, init_std=0.1, norm="pre") | sizes
    model = models.TextEncoder(models.TextEncoderConfig(vocab=256, context=40, **shape))
    return Subject(model, hidden(text_batches(text(), 40, 12, seed), seed), _filled_in)


def hidden(batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
    draw = generator(seed)
    for tokens_BT, _ in batches:
        is_hidden_BT = torch.rand(tokens_BT.shape, generator=draw) < HIDDEN_RATIO
        yield tokens_BT.masked_fill(is_hidden_BT, MASK), tokens_BT.masked_fill(~is_hidden_BT, -100)


def _filled_in(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return score(model(inputs_BT), targets_BT)


def score(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Of the tokens that were hidden."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)


def gpt2(seed: int, *, layers: int = 4, width: int = 48) -> Subject:
    """Hugging Face's GPT-2, with its dropout."""
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=40, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    batches = text_batches(text(), 40, 12, seed)
    return Subject(transformers.GPT2LMHeadModel(config), batches, lambda m, x, y: cross_entropy(m(x).logits, y))


def bert(seed: int, *, layers: int = 4, width: int = 48) -> Subject:
    """Hugging Face's BERT on texts of 8 to 40 bytes, padded and masked."""
    return Subject(
        transformers.BertForMaskedLM(_encoder(transformers.BertConfig, layers, width)), _padded(seed), _masked_out
    )


def albert(seed: int, *, layers: int = 4, width: int = 48) -> Subject:
    """The same with one set of weights for all layers."""
    config = _encoder(transformers.AlbertConfig, layers, width, embedding_size=32)
    return Subject(transformers.AlbertForMaskedLM(config), _padded(seed), _masked_out)


def _encoder(kind: Any, layers: int, width: int, **sizes: int) -> Any:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "intermediate_size": 3 * width,
    }
    return kind(vocab_size=256, **shape, **sizes)


def _padded(seed: int) -> Iterator[Batch]:
    draw = generator(seed)
    for inputs_BT, targets_BT in hidden(text_batches(text(), 40, 12, seed), seed):
        is_padding_BT = torch.arange(40) >= torch.randint(8, 41, (len(inputs_BT), 1), generator=draw)
        yield inputs_BT.masked_fill(is_padding_BT, PADDING), targets_BT.masked_fill(is_padding_BT, -100)


def _masked_out(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return score(model(inputs_BT, attention_mask=(inputs_BT != PADDING).long()).logits, targets_BT)


def hugging_face_vit(seed: int, *, layers: int = 4, width: int = 48) -> Subject:
    """Hugging Face's ViT on digits."""
    images = digits(seed)
    config = _encoder(transformers.ViTConfig, layers, width, image_size=16, patch_size=4, num_channels=1)
    config.num_labels = 10
    batches = image_batches(images.train_images, images.train_labels, 12, seed)
    model = transformers.ViTForImageClassification(config)
    return Subject(model, batches, lambda m, x, y: cross_entropy(m(x).logits, y))


def vision(seed: int, *, batch: int = 24, **sizes: Any) -> Subject:
    """Handwritten digits, 16 patches each."""
    shape = dict[str, Any](depth=5, width=40, heads=4, ffn=96, norm="pre") | sizes
    images = digits(seed)
    model = models.VisionTransformer(models.VisionTransformerConfig(patch=4, **(images.sizes | shape)))
    return Subject(model, image_batches(images.train_images, images.train_labels, batch, seed), classified)


def perceptron(seed: int, *, depth: int, width: int = 56, activation: Callable[[], nn.Module] = nn.ReLU) -> Subject:
    """Digits again, by linear layers without norms or residuals."""
    images = digits(seed)
    sizes = [width] * (depth + 1)
    blocks = [nn.Sequential(nn.Linear(a, b), activation()) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.Sequential(*blocks), nn.Linear(width, 10))
    batches = image_batches(images.train_images, images.train_labels, 48, seed)
    return Subject(model, batches, classified, [f"2.{number}" for number in range(depth)])


class TorchLanguageModel(nn.Module):
    """The layers of `torch.nn`, which start with Xavier's weights."""

    def __init__(self, depth: int, *, norm_first: bool, width: int = 40, context: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 112, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        for each in self.encoder.layers:
            for weight in (p for p in each.parameters() if p.ndim > 1):
                nn.init.xavier_uniform_(weight)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        num_tokens = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(num_tokens)
        x_BTD = self.embed(tokens_BT) + self.positions.weight[:num_tokens]
        logits_BTV: Tensor = self.head(self.encoder(x_BTD, mask=mask, is_causal=True))
        return logits_BTV


def torch_language(seed: int, *, depth: int, norm_first: bool) -> Subject:
    return Subject(TorchLanguageModel(depth, norm_first=norm_first), text_batches(text(), 40, 12, seed), classified)


class AttentionOnlyBlock(nn.Module):
    """Attention and a norm, without a residual and without a feed-forward network."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(width, 4, causal)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BTD: Tensor, cache: Any = None) -> Tensor:
        y_BTD: Tensor = self.norm(self.attention(x_BTD, cache))
        return y_BTD


def attention_only(subject: Make) -> Make:
    """The same subject with nothing but attention in its blocks."""

    def make(seed: int) -> Subject:
        made = subject(seed)
        config: Any = made.model.config
        blocks = [AttentionOnlyBlock(config.width, causal=config.causal) for _ in range(config.depth)]
        made.model.blocks = nn.ModuleList(blocks)
        return made

    return make


class SelfSupervised(nn.Module):
    """Two distorted views of a digit go through one network; `predictor` is SimSiam's."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = dict[str, Any](depth=3, width=width, heads=4, ffn=96, norm="pre")
        config = models.VisionTransformerConfig(image_size=16, patch=4, channels=1, num_classes=width, **sizes)
        self.backbone = models.VisionTransformer(config)
        self.predictor = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width))

    def forward(self, images_BCSS: Tensor) -> Tensor:
        embedding_BK: Tensor = self.backbone(images_BCSS)
        return embedding_BK


def self_supervised(seed: int, *, rule: Callable[[Any, Tensor, Tensor], Tensor]) -> Subject:
    images, draw = digits(seed), generator(seed)

    def view(images_BCSS: Tensor) -> Tensor:
        shift = tuple(torch.randint(-2, 3, (2,), generator=draw).tolist())
        noise_BCSS = torch.randn(images_BCSS.shape, generator=draw)
        return images_BCSS.roll(shift, (2, 3)) + 0.3 * noise_BCSS

    batches = image_batches(images.train_images, images.train_labels, 48, seed)
    return Subject(SelfSupervised(), ((view(x), view(x)) for x, _ in batches), rule)


def vicreg(model: nn.Module, first: Tensor, second: Tensor, *, spread: float = 1.0) -> Tensor:
    """Views agree (MSE), each number of the embedding varies over the batch, and no two vary together (VICReg)."""
    views = [model(first), model(second)]
    loss = 25 * nn.functional.mse_loss(*views)
    for embedding_BK in views:
        centred_BK = embedding_BK - embedding_BK.mean(dim=0)
        covariance_KK = centred_BK.T @ centred_BK / (len(centred_BK) - 1)
        loss = loss + spread * 25 * torch.relu(1 - (covariance_KK.diagonal() + 1e-4).sqrt()).mean()
        loss = loss + spread * covariance_KK.fill_diagonal_(0).square().sum() / covariance_KK.shape[0]
    return loss


def simsiam(model: SelfSupervised, first: Tensor, second: Tensor, *, stops: bool = True) -> Tensor:
    """Each view's prediction agrees with the other view, through which no gradient flows (SimSiam): 1 - cosine."""
    views = [model(first), model(second)]
    loss = torch.ones(())
    for one, other in itertools.permutations(views):
        predicted = model.predictor(one) if stops else one
        loss = loss - nn.functional.cosine_similarity(predicted, other.detach() if stops else other).mean() / 2
    return loss


def modular(seed: int, *, modulus: int = 59) -> Subject:
    """a x b modulo a prime, from half of the table: long after it knows the half by heart, it may find the rule."""
    draw = generator(seed)
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))
    chosen = pairs[torch.randperm(len(pairs), generator=draw)[: len(pairs) // 2]]

    def batches() -> Iterator[Batch]:
        while True:
            some = chosen[torch.randint(len(chosen), (96,), generator=draw)]
            yield torch.cat([some, torch.full((96, 1), modulus)], dim=1), some.prod(dim=1) % modulus

    config = models.TextEncoderConfig(
        vocab=modulus + 1, context=3, depth=2, width=64, heads=4, ffn=128, norm="pre", init_std=0.1
    )
    return Subject(models.TextEncoder(config), batches(), lambda m, x, y: cross_entropy(m(x)[:, -1], y))


def repeated(seed: int) -> Subject:
    """Rows of 16 random letters that come twice: the second time they can be copied, by sharp attention."""
    draw = generator(seed)

    def batches() -> Iterator[Batch]:
        while True:
            once = torch.randint(1, 64, (24, 16), generator=draw)
            row = torch.cat([once, once], dim=1)
            yield row[:, :-1], row[:, 1:]

    subject = language(seed, depth=2, width=64, context=31)
    subject.batches = batches()
    subject.loss = lambda m, x, y: cross_entropy(m(x)[:, 15:], y[:, 15:])
    return subject

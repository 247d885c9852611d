"""A recipe: everything that decides what a training run computes, as one frozen value."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument

Schedule = Literal["constant", "cosine", "multi-step", "inverse-sqrt"]
OptimizerName = Literal["adamw", "adafactor"]
Precision = Literal["float32", "bfloat16"]
PRECISIONS: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text, and how it becomes sequences of tokens."""

    path: Path | None = None
    """A file or a folder. Without one: the data set that `source` names, or the sources of Python's standard library."""
    source: str | None = None
    """The data set that has to be fetched first, and where it is to be had."""
    context: int = 64
    """Tokens in a sequence."""
    tokenizer: str = "bytes"
    """bytes, bpe, words, or the path of a tokenizer.json."""
    vocab: int = 8192
    """The most tokens that bpe or words learn."""
    separator: str | None = None
    """The token of a tokenizer.json that ends a document, where it has none of the usual names."""
    mixture: Mapping[str, float] | None = None
    """Folders in `path` and the proportions in which sequences are drawn from them, such as Table 2 of Value Residual
    Learning. None: the text as a whole."""
    is_streamed: bool = False
    """In reading order, for models that carry a memory from batch to batch; otherwise random windows."""
    validation_ratio: float = 0.05
    """The share at the end of the text, where the data have no files of their own for validation."""
    cache: Path | None = None
    """Folder for the tokens, by default beside the text."""

    def __post_init__(self) -> None:
        _require(self.context >= 1, "data.context", "at least 1", self.context)
        _require(self.vocab >= 1, "data.vocab", "at least 1", self.vocab)
        if self.mixture is not None:
            told = f"{dict(self.mixture)}, whose sum is {math.fsum(self.mixture.values()):g}"
            is_right = all(one > 0 for one in self.mixture.values())
            is_right &= abs(math.fsum(self.mixture.values()) - 1) < 1e-6
            _require(is_right, "data.mixture", "proportions above 0 with the sum 1", told)
        _require_share(self.validation_ratio)


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images, and what is done to them before a model sees them."""

    path: Path | None = None
    """A folder or an .npz. Without one: the data set that `source` names, or scikit-learn's digits."""
    source: str | None = None
    """The data set that has to be fetched first, and where it is to be had."""
    image_size: int = 32
    """Side of the images that are read from files, in pixels."""
    augmentation: Literal["none", "crop-flip"] = "none"
    validation_ratio: float = 0.1
    """The share that is drawn to validate with, where the data have none of their own."""

    def __post_init__(self) -> None:
        _require(self.image_size >= 1, "data.image_size", "at least 1", self.image_size)
        _require_share(self.validation_ratio)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run."""

    name: str
    about: str = ""
    """One sentence: where it comes from, and where it departs from there."""
    model: str
    """A class of `tsemon.models`."""
    preset: str | None = None
    """Sizes of that class by name."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config, over those of the preset. What the data decide, vocab or num_classes, is theirs."""
    data: TextData | ImageData
    batch_size: int
    """Sequences or images in a step, over all processes and all accumulated batches."""
    accumulation: int = 1
    """Batches in a step."""
    steps: int
    """Optimizer steps."""
    optimizer: OptimizerName = "adamw"
    """AdamW, which is Adam without weight decay, or Adafactor (Shazeer and Stern, arXiv 1804.04235), as for T5."""
    learning_rate: float
    """Adafactor multiplies it by the size of each parameter, and lowers it to 1 / sqrt(t) at step t."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's. Adafactor has no first moment, and a second one with a decay rate of 1 - t^-0.8."""
    weight_decay: float = 0.1
    schedule: Schedule = "constant"
    warmup: int = 0
    """Steps."""
    final_ratio: float = 0.1
    """Where the cosine ends, as a share of the learning rate."""
    clip_norm: float | None = None
    """The largest norm of a step's gradient. None: as it comes."""
    precision: Precision = "float32"
    """Of the forward pass. Parameters and optimizer are float32."""
    compile: bool = False
    seed: int = 0
    """Draws the weights, the order of the data and, where there is any, dropout."""
    evaluate_every: int | None = None
    """Steps between evaluations; there is one at the end in any case."""
    evaluation_batches: int | None = None
    """The most batches of an evaluation. None: all of the validation data."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "steps"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("evaluate_every", "evaluation_batches"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "at least 1, or none", value)
        # Comparisons from both sides refuse NaN and infinity too.
        rate, decay, norm = self.learning_rate, self.weight_decay, self.clip_norm
        _require(0 < rate < math.inf, "learning_rate", "above 0 and finite", rate)
        _require(0 <= decay < math.inf, "weight_decay", "0 or more and finite", decay)
        _require(norm is None or 0 < norm < math.inf, "clip_norm", "above 0 and finite, or none", norm)
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", "from 0 to less than 1, both", self.betas)
        _require(self.warmup >= 0, "warmup", "0 or more steps", self.warmup)
        _require(0 <= self.final_ratio <= 1, "final_ratio", "from 0 to 1", self.final_ratio)
        _require(0 <= self.seed < 1 << 63, "seed", "from 0 to less than 2^63", self.seed)
        for name, kind in (("optimizer", OptimizerName), ("schedule", Schedule), ("precision", Precision)):
            known = get_args(kind)
            if getattr(self, name) not in known:
                raise InvalidArgument(f"{name} is one of {', '.join(known)}, got {getattr(self, name)!r}")

    def rows_of_batch(self, num_processes: int = 1) -> int:
        """Sequences or images in a batch of all processes. Raises InvalidArgument where they do not share it evenly."""
        parts = self.accumulation * num_processes
        if self.batch_size % parts:
            raise InvalidArgument(
                f"batch_size {self.batch_size} cannot be shared by {self.accumulation} accumulated batches "
                f"on {num_processes} processes; choose a multiple of {parts}"
            )
        return self.batch_size // self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint and for the run's config."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}


def changed(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """The recipe with settings from the command line: `steps`, `data.context`, `sizes.depth`, each as text.

    Raises InvalidArgument for a name that there is not, with the nearest one, and for what is no value of its kind.
    """
    for name, text in settings.items():
        group, _, key = name.rpartition(".")
        if group == "sizes":
            recipe = dataclasses.replace(recipe, sizes={**recipe.sizes, key: _guessed(text)})
        elif group == "data":
            recipe = dataclasses.replace(recipe, data=_replaced(recipe.data, key, text, "data."))
        else:
            recipe = _replaced(recipe, name, text, "")
    return recipe


def _replaced(value: Any, name: str, text: str, prefix: str) -> Any:
    kinds = typing.get_type_hints(type(value))
    for fixed in ("data", "sizes", "name", "about"):
        if not prefix:
            kinds.pop(fixed, None)
    if name not in kinds:
        known = [prefix + key for key in kinds]
        raise InvalidArgument(f"no setting named {prefix + name!r}; {nearest(prefix + name, known)}")
    return dataclasses.replace(value, **{name: _parsed(prefix + name, kinds[name], text)})


def _parsed(name: str, kind: Any, text: str) -> Any:
    """Text as a value of a field's type."""
    options = get_args(kind) if typing.get_origin(kind) is not Literal else ()
    if type(None) in options:
        return None if text.lower() == "none" else _parsed(name, options[0], text)
    try:
        if typing.get_origin(kind) is Mapping:
            return _mixture(text)
        if typing.get_origin(kind) is tuple:
            parts = text.split(",")
            return tuple(_parsed(name, part, value) for part, value in zip(options, parts, strict=True))
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if typing.get_origin(kind) is Literal:
            return {option: option for option in get_args(kind)}[text]
        return kind(text)
    except (ValueError, KeyError) as error:
        expected = (
            "name:proportion,name:proportion,..."
            if typing.get_origin(kind) is Mapping
            else " or ".join(get_args(kind))
            if typing.get_origin(kind) is Literal
            else ",".join(option.__name__ for option in options) or kind.__name__
        )
        raise InvalidArgument(f"{name} is {expected}, got {text!r}") from error


def _mixture(text: str) -> dict[str, float]:
    pairs = [part.rsplit(":", 1) for part in text.split(",")]
    mixture = {name.strip(): float(proportion) for name, proportion in pairs}
    if len(mixture) < len(pairs) or "" in mixture:
        raise ValueError(text)
    return mixture


def _require(is_right: bool, name: str, expected: str, value: Any) -> None:
    if not is_right:
        raise InvalidArgument(f"{name} must be {expected}, got {value}")


def _require_share(validation_ratio: float) -> None:
    _require(0 <= validation_ratio < 1, "data.validation_ratio", "a share from 0 to less than 1", validation_ratio)


def _guessed(text: str) -> Any:
    """A model's size has no declared kind here: none, a truth, a number, or a word."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value

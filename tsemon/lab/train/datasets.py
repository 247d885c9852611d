"""The data of a recipe, opened: batches to train on, batches to validate with, and what a loss on them means."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from tsemon.errors import InvalidArgument, MissingData
from tsemon.lab.train.augmentation import augmentation
from tsemon.lab.train.batches import Batch, Batches
from tsemon.lab.train.image_files import read_images
from tsemon.lab.train.images import Images, digits, image_batches, images_in_order
from tsemon.lab.train.recipe import ImageData, TextData
from tsemon.lab.train.text import mixed_batches, standard_library_text, text_batches, text_in_order, text_streams
from tsemon.lab.train.token_files import Text, read_text, split_text


class DataSet(Protocol):
    unit: str
    """What is counted per second."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Fields of a model's config that the data decide."""
        ...

    def batches(self, rows: int, seed: int) -> Batches: ...

    def validation_batches(self, rows: int) -> Iterator[Batch]:
        """One pass; none where nothing was set apart."""
        ...

    def meaning(self, loss: float, accuracy: float) -> dict[str, float]:
        """What says more of a validation than its mean loss in nats."""
        ...


def open_data(data: TextData | ImageData) -> DataSet:
    """Raises MissingData, with where it is to be had, for a data set that has to be fetched first."""
    if data.path is None and data.source is not None:
        raise MissingData(
            f"this recipe needs data that you fetch yourself, and --data with their folder. {data.source}"
        )
    try:
        if isinstance(data, ImageData):
            return ImageSet(data)
        return TextSet(data) if data.mixture is None else MixedTextSet(data, data.mixture)
    except MissingData as error:
        raise MissingData(f"{error}. {data.source}" if data.source else str(error)) from error


class MixedTextSet:
    """Several texts. Sequences are drawn from them in fixed proportions, for validation from their ends."""

    unit = "tokens"

    def __init__(self, data: TextData, mixture: Mapping[str, float]) -> None:
        self._data, self._proportions = data, list(mixture.values())
        if data.path is None:
            raise InvalidArgument("data.mixture needs a folder with a folder for each of its names: --data FOLDER")
        for name in mixture:
            if not (data.path / name).is_dir():
                raise MissingData(f"the folder {data.path / name} of data.mixture is not there")
        if data.is_streamed:
            raise InvalidArgument("data.mixture draws random windows, so it cannot be streamed: data.is_streamed=false")
        if data.tokenizer in ("bpe", "words"):
            raise InvalidArgument(
                f"data.mixture needs a tokenizer that all its folders share, and {data.tokenizer} would be learned from "
                "each: set data.tokenizer to bytes or to the path of a tokenizer.json"
            )
        parts = [replace(data, path=data.path / name, mixture=None) for name in mixture]
        self._sets = [TextSet(part) for part in parts]

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sets[0].sizes

    def batches(self, rows: int, seed: int) -> Batches:
        texts = [of.text.train for of in self._sets]
        return mixed_batches(texts, self._proportions, self._data.context, rows, seed)

    def validation_batches(self, rows: int) -> Iterator[Batch]:
        texts, context = [of.text.validation for of in self._sets], self._data.context
        if not all(map(len, texts)):
            return iter(())
        num_batches = max(1, sum(map(len, texts)) // (rows * context))
        return itertools.islice(mixed_batches(texts, self._proportions, context, rows, seed=0), num_batches)

    def meaning(self, loss: float, accuracy: float) -> dict[str, float]:
        sizes = [of.text.bytes_per_token for of in self._sets]
        known = [size for size in sizes if size is not None]
        is_known = len(known) == len(sizes)
        mean = sum(map(operator.mul, self._proportions, known)) if is_known else None
        return _meaning(loss, mean)


class TextSet:
    unit = "tokens"

    def __init__(self, data: TextData) -> None:
        self._data = data
        self.text = _standard_library(data) if data.path is None else _read(data)
        _check_lengths(self.text, data)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"vocab": self.text.vocab, "context": self._data.context}

    def batches(self, rows: int, seed: int) -> Batches:
        if self._data.is_streamed:
            return text_streams(self.text.train, self._data.context, rows)
        return text_batches(self.text.train, self._data.context, rows, seed)

    def validation_batches(self, rows: int) -> Iterator[Batch]:
        text, context = self.text.validation, self._data.context
        if not len(text):
            return iter(())
        if self._data.is_streamed:
            rows = max(1, min(rows, (len(text) - 1) // context))
            return itertools.islice(text_streams(text, context, rows), (len(text) - 1) // (rows * context))
        return text_in_order(text, context, rows)

    def meaning(self, loss: float, accuracy: float) -> dict[str, float]:
        return _meaning(loss, self.text.bytes_per_token)


def _meaning(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if bytes_per_token is None:
        return {"perplexity": perplexity}
    return {"perplexity": perplexity, "bits_per_byte": loss / bytes_per_token / math.log(2)}


class ImageSet:
    unit = "images"

    def __init__(self, data: ImageData) -> None:
        self.images: Images = (
            digits()
            if data.path is None
            else read_images(data.path, image_size=data.image_size, validation_ratio=data.validation_ratio)
        )
        self._augment = augmentation(data.augmentation)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.images.sizes

    def batches(self, rows: int, seed: int) -> Batches:
        return image_batches(self.images.train_images, self.images.train_labels, rows, seed, self._augment)

    def validation_batches(self, rows: int) -> Iterator[Batch]:
        if not len(self.images.val_images):
            return iter(())
        return images_in_order(self.images.val_images, self.images.val_labels, rows)

    def meaning(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy}


def _check_lengths(text: Text, data: TextData) -> None:
    """Now rather than at the first evaluation, when there is a training to lose."""
    place = data.path or "the standard library"
    num_train, num_val = len(text.train), len(text.validation)
    if num_train + num_val == 0:
        raise InvalidArgument(f"{place} holds no text: it is empty; give other text with --data")
    if num_train <= data.context:
        raise InvalidArgument(
            f"the part of {place} to train on has {num_train} tokens; expected more than data.context, {data.context}: "
            "give more text or a smaller data.context"
        )
    if 0 < num_val <= data.context:
        raise InvalidArgument(
            f"the validation part of {place} has {num_val} tokens; expected more than data.context, {data.context}: "
            "give more text, a smaller data.context or a larger data.validation_ratio (0: no validation)"
        )


def _standard_library(data: TextData) -> Text:
    if data.tokenizer != "bytes":
        raise InvalidArgument(
            f"the standard library is read as bytes, not as {data.tokenizer}; give other text with --data"
        )
    train, validation = split_text(standard_library_text(), data.validation_ratio)
    return Text(train=train, validation=validation, vocab=256, bytes_per_token=1.0)


def _read(data: TextData) -> Text:
    assert data.path is not None
    return read_text(
        data.path,
        tokenizer=data.tokenizer,
        vocab=data.vocab,
        separator=data.separator,
        validation_ratio=data.validation_ratio,
        cache=data.cache,
    )

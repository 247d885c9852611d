"""Text to tokens: bytes as they are, or a tokenizer of the `tokenizers` library, trained on the text or loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tsemon.errors import InvalidArgument, MissingData, needing

SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>")
"""Names that tokenizers give to the end of a document, the first of which is ours."""
SAMPLE = "Two  spaces,\ta tab\nand é 漢 🙂 \x01"
"""What only a tokenizer that loses nothing gives back."""
TRAINING_CHARACTERS = 1 << 28
"""A vocabulary is learned from so much of the text at the most: more changes little, and needs memory."""


class Tokenizer(Protocol):
    vocab: int
    """Tokens are from 0 to vocab - 1."""
    separator: int | None
    """Follows each document. None: the text is one row without breaks."""
    is_lossless: bool
    """Whether the tokens of a text give it back."""
    key: str
    """Equal where the same text becomes the same tokens."""

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        """The tokens of each text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...

    def save(self, path: Path) -> None:
        """Write the file from which `load` makes it again; bytes need none."""
        ...


class Bytes:
    """UTF-8. Documents end with a zero byte, which text has no use for."""

    vocab = 256
    separator: int | None = 0
    is_lossless = True
    key = "bytes"

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save(self, path: Path) -> None:
        pass


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, and the name of the token that ends a document."""

    def __init__(self, tokenizer: Any, separator: str | None) -> None:
        self._tokenizer = tokenizer
        # Without the effect of padding and such, a tokenizer.json may leave numbers out: the largest one decides.
        self.vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.separator = None if separator is None else tokenizer.token_to_id(separator)
        tokens = tokenizer.encode(SAMPLE, add_special_tokens=False).ids
        # Some begin each text with a space of their own.
        self.is_lossless = tokenizer.decode(tokens, skip_special_tokens=False).removeprefix(" ") == SAMPLE
        self.key = hashlib.sha256(f"{separator} {tokenizer.to_str()}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


def load(path: Path, separator: str | None = None) -> LibraryTokenizer:
    """The tokenizer of a `tokenizer.json`. `separator` names its token that ends a document, where it has a rare name."""
    if not path.is_file():
        raise MissingData(f"{path} is not there; expected 'bytes', 'bpe', 'words' or the path of a tokenizer.json")
    try:
        tokenizer = _library().Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other class
        raise InvalidArgument(f"{path} is no tokenizer.json of the tokenizers library: {error}") from error
    names = SEPARATORS if separator is None else (separator,)
    known = next((name for name in names if tokenizer.token_to_id(name) is not None), None)
    if known is None:
        raise InvalidArgument(
            f"{path} has no token {' or '.join(names)}; name the one that ends a document: separator="
        )
    return LibraryTokenizer(tokenizer, known)


def train_bpe(texts: Iterable[str], vocab: int) -> LibraryTokenizer:
    """Byte-level BPE, as GPT-2's: every text can be written in it. At least 257 tokens: the bytes and the separator."""
    if vocab < 257:
        raise InvalidArgument(f"a byte-level BPE has at least 257 tokens, got vocab {vocab}")
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts), trainer)
    return LibraryTokenizer(tokenizer, SEPARATORS[0])


def train_words(texts: Iterable[str], vocab: int) -> LibraryTokenizer:
    """The `vocab` most frequent words between spaces, and <eos> for each end of a line, as Transformer-XL reads WikiText.

    What is rarer is <unk>. There are no further separators between documents.
    """
    if vocab < 3:
        raise InvalidArgument(f"a vocabulary of words has at least <eos>, <unk> and one word, got vocab {vocab}")
    library = _library()
    tokenizer = library.Tokenizer(library.models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = library.normalizers.Replace("\n", " <eos> ")
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    trainer = library.trainers.WordLevelTrainer(
        vocab_size=vocab, special_tokens=["<eos>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return LibraryTokenizer(tokenizer, None)


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for text in texts:
        yield text
        num_characters += len(text)
        if num_characters >= TRAINING_CHARACTERS:
            return


def in_groups(pieces: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of up to `size`: the library uses all cores for a list, and one for a text."""
    iterator = iter(pieces)
    return iter(lambda: list(islice(iterator, size)), [])


def _library() -> Any:
    with needing("a BPE needs the tokenizers library; pip install 'tsemon[train]'"):
        import tokenizers
    return tokenizers

"""The value rules at the paper's smallest size, 82M parameters, on 100 MB of text. It needs a GPU."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from tsemon.catalogue import VALUES
from tsemon.errors import MissingData, MissingDevice
from tsemon.lab.reproduce.result import Experiment, Result
from tsemon.lab.reproduce.value_residual_page import result
from tsemon.lab.reproduce.value_rules import Sizes, train_all
from tsemon.lab.train.documents import Piece, find_files, read_pieces
from tsemon.lab.train.tokenizers import in_groups, train_bpe

EXPERIMENT = Experiment(
    name="value-residual-82m",
    title="Whose values attention mixes, at 82M parameters",
    source=f"{VALUES}, Figures 1, 2, 7, 12 and 20",
    needs_gpu=True,
    chosen_by="TSEMON_TEXT: its text, files or folders as in PATH",
)
TEXT_BYTES = 100_000_000
SIZES = Sizes(
    size="82m",
    model={"vocab": 50_277, "context": 2048},
    rules=("vanilla", "resformer", "svformer", "neutreno"),
    batch_size=16,
    steps=1000,
    device="cuda",
    precision=torch.bfloat16,
    compiled=True,
)


def run(quick: bool, seed: int = 0) -> Result:
    if not torch.cuda.is_available():
        raise MissingDevice(
            f"{EXPERIMENT.name} trains four models of 82M parameters, on the text that TSEMON_TEXT names if it is "
            "set, and needs a CUDA GPU, which is not there; "
            "`tsemon reproduce value-residual` does the same in small on a CPU"
        )
    return run_82m(replace(SIZES, seeds=range(seed, seed + 1)), TEXT_BYTES // 10 if quick else TEXT_BYTES)


def run_82m(sizes: Sizes, text_bytes: int, *, num_val: int = 8) -> Result:
    """Each rule sees as many tokens as the text has, in random windows of it.

    The last token of the vocabulary is BOS, the others are a BPE's of this text.

    Raises MissingData where there is less text than that.
    """
    pieces = text_of(text_files(), text_bytes)
    tokens = tokens_of(pieces, vocab=sizes.model["vocab"] - 1)
    sizes = replace(sizes, steps=len(tokens) // (sizes.batch_size * sizes.model["context"]))
    sizes = replace(sizes, warmup=min(sizes.warmup, sizes.steps // 4), window=min(sizes.window, sizes.steps // 4))
    source = "files named by TSEMON_TEXT" if "TSEMON_TEXT" in os.environ else "Python sources of this installation"
    data = f"{text_bytes:,} bytes of {source}, {len(tokens):,} tokens of a BPE that was trained on them"
    return result(train_all(sizes, tokens, num_val=num_val), sizes, data=data)


def text_files() -> tuple[Path, ...]:
    """What TSEMON_TEXT names, files or folders as in PATH; without it all Python sources: the library's, then packages'."""
    if named := os.environ.get("TSEMON_TEXT"):
        return tuple(chain.from_iterable(find_files(Path(name)).train for name in named.split(os.pathsep)))
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return tuple(dict.fromkeys(path for folder in folders for path in sorted(Path(folder).rglob("*.py"))))


def text_of(files: Sequence[Path], size_bytes: int) -> list[Piece]:
    """The beginning of the files, in their order: pieces that have `size_bytes` bytes together, or a little more."""
    pieces, num_bytes = [], 0
    for piece in read_pieces(tuple(files)):
        pieces.append(piece)
        num_bytes += len(piece.text.encode())
        if num_bytes >= size_bytes:
            return pieces
    raise MissingData(
        f"expected {size_bytes:,} bytes of text, found {num_bytes:,} in {len(files)} files; name more files or folders in "
        "TSEMON_TEXT"
    )


def tokens_of(pieces: Sequence[Piece], vocab: int) -> Tensor:
    """The text in the tokens of a BPE that is learned from it, (N,), each document with its end."""
    tokenizer = train_bpe((piece.text for piece in pieces), vocab)

    def encoded() -> Iterator[Tensor]:
        for group in in_groups(pieces, 1000):
            for piece, tokens in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
                end = [tokenizer.separator] if piece.ends_document else []
                yield torch.tensor([*tokens, *end], dtype=torch.int32)

    return torch.cat(list(encoded()))

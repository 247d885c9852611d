"""Write docs/compatibility.md from what the tests of set-ups saw. It is never typed.

python -m pytest --all tests/setups tests/zoo && python scripts/compatibility.py
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/compatibility.md"
CACHE_KEY = "tsemon/setups"
SEEN = ROOT / ".pytest_cache/v" / CACHE_KEY
"""Where pytest keeps the values of its cache, here one for each kind."""
COMMAND = "python -m pytest --all tests/setups tests/zoo; python scripts/compatibility.py"

KINDS = (
    "Loops",
    "Precision",
    "Optimizers",
    "torch.compile",
    "Models written by hand",
    "Models of torch.nn",
    "Hugging Face transformers",
    "Several processes",
    "Public models and loops",
)
COLUMNS = (
    "blocks",
    "trains bit-equal",
    "hidden states",
    "attention",
    "feed-forward",
    "outputs",
    "parameters",
    "gradients",
    "updates",
    "saturation",
    "same graphs",
    "leaves nothing",
    "copies, pickles",
)
HEADER = """# Supported ways to train

Tests train a small model in each of these ways, with and without tsemon. `scripts/compatibility.py` generates this page from
their results. Do not edit it.

The last section, "Public models and loops", comes from `tests/zoo`: small public models with random weights, and models with
the structure of public training code. All other rows come from `tests/setups`. The tests in `tests/zoo` compare token
similarity and diversity, effective rank, attention entropy (mean and lowest head), maximum attention logit, norms, update
ratio and saturation with a float64 computation on tensors from hooks of their own. The relative tolerance is 1e-5.

- blocks: number of blocks found in each stack. "2 + 2" is an encoder and a decoder.
- trains bit-equal: losses, parameters, buffers and random state are bit-identical, whether tsemon samples every step or
  every second step, and tsemon causes no new warnings.
- hidden states to saturation: every block has all of these [metrics](measures.md), and they agree with plain hooks
  that compute them by definition. Metrics of every tenth sample are taken from the first sample.
- same graphs: `torch.compile` compiles the same graphs.
- leaves nothing: after `close()`, no new hook or attribute remains, and a second `attach` measures the same.
- copies, pickles: `copy.deepcopy` and `pickle` of the watched model work as without tsemon.
- A dash: does not apply.
- wrong: a known error of tsemon, either a wrong number or a missing value without a true reason.
"""


WORDS = "Numbers in the table refer to reasons from `monitor.status` and to known errors:"


class Row(TypedDict):
    kind: str
    name: str
    cells: list[list[str]]
    """An answer and what was said about it, column by column."""


def main() -> int:
    unseen = [kind for kind in KINDS if not (SEEN / kind).exists()]
    rows: list[Row] = [row for kind in KINDS if kind not in unseen for row in json.loads((SEEN / kind).read_text())]
    unseen += [row["name"] for row in rows if not row["cells"]]
    if unseen:
        print(f"not seen, or not passed: {', '.join(unseen)}; run: {COMMAND}", file=sys.stderr)
        return 1
    DOCUMENT.write_text(render(rows))
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(rows)} ways to train")
    return 0


def render(rows: Sequence[Row]) -> str:
    lines = ["| way to train | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    numbers: dict[str, int] = {}
    for kind, group in itertools.groupby(rows, key=lambda row: row["kind"]):
        lines.append(f"| **{kind}** |" + " |" * len(COLUMNS))
        for row in group:
            cells = [_cell(answer, words, numbers) for answer, words in row["cells"]]
            lines.append("| " + " | ".join([row["name"], *cells]) + " |")
    notes = [f"[{number}] {words}" for words, number in numbers.items()]
    return "\n\n".join([HEADER.rstrip(), "\n".join(lines), WORDS, *notes]) + "\n"


def read(document: str) -> dict[str, dict[str, list[str]]]:
    """From what `render` wrote: way to train to its cells, by column, each an answer and what was said about it."""
    notes = dict(re.findall(r"^\[(\d+)\] (.+)$", document, re.MULTILINE))
    rows = re.findall(r"^\| ([^*|]+) \| (.+) \|$", document, re.MULTILINE)
    return {
        name: {column: _read_cell(cell, notes) for column, cell in zip(COLUMNS, cells.split(" | "), strict=True)}
        for name, cells in rows[1:]
    }


def _cell(answer: str, words: str, numbers: dict[str, int]) -> str:
    return f"{answer} [{numbers.setdefault(words, len(numbers) + 1)}]" if words else answer


def _read_cell(cell: str, notes: dict[str, str]) -> list[str]:
    answer, _, number = cell.rstrip("]").partition(" [")
    return [answer, notes[number] if number else ""]


if __name__ == "__main__":
    sys.exit(main())

"""Write docs/compatibility.md from what the tests of set-ups saw. It is never typed.

python -m pytest tests/setups && python scripts/compatibility.py
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/compatibility.md"
CACHE_KEY = "tsemon/compatibility"
SEEN = ROOT / ".pytest_cache/v" / CACHE_KEY
"""Where pytest keeps a value of its cache."""
COMMAND = "python -m pytest tests/setups; python scripts/compatibility.py"

COLUMNS = (
    "trains bit-equal",
    "hidden states",
    "attention",
    "gradients",
    "updates",
    "same graphs",
    "leaves nothing",
    "copies, pickles",
)
HEADER = """# Ways to train, and what tsemon does in each

`tests/setups` trains a small model in each of these ways, with tsemon and without. This table is what was seen there.
It is written by `scripts/compatibility.py` and held against the tests, never typed.

- trains bit-equal: losses, parameters, buffers and random state are the same, bit for bit, with every step sampled and
  with every second.
- hidden states, attention, gradients, updates: measured in every block, and equal to what plain hooks and the definition
  give. Where something is missing, the last column repeats what `monitor.status` says.
- same graphs: `torch.compile` compiles neither more nor other graphs.
- leaves nothing: after `close()` there is no hook and no attribute that was not there before; attached again, it measures
  again.
- copies, pickles: `copy.deepcopy` and `pickle` of the watched model do what they do without tsemon.
- A dash: does not apply.
"""


def main() -> int:
    if not SEEN.exists():
        print(f"nothing has been seen yet ({SEEN} is not there); run: {COMMAND}", file=sys.stderr)
        return 1
    rows = json.loads(SEEN.read_text())
    unseen = [row["name"] for row in rows if row["line"] is None]
    if unseen:
        print(f"not seen, or not passed: {', '.join(unseen)}; run: {COMMAND}", file=sys.stderr)
        return 1
    DOCUMENT.write_text(render(rows))
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(rows)} ways to train")
    return 0


def render(rows: Sequence[dict[str, str]]) -> str:
    lines = ["| way to train | " + " | ".join(COLUMNS) + " | in words |", "|---" * (len(COLUMNS) + 2) + "|"]
    for kind, group in itertools.groupby(rows, key=lambda row: row["kind"]):
        lines += [f"| **{kind}** |" + " |" * (len(COLUMNS) + 1), *(row["line"] for row in group)]
    return HEADER + "\n" + "\n".join(lines) + "\n"


def names_in(document: str) -> list[str]:
    """The ways to train that the document has a row for."""
    return [name for name in re.findall(r"^\| ([^*|]+) \|", document, re.MULTILINE) if name != "way to train"]


if __name__ == "__main__":
    sys.exit(main())

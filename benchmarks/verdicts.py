"""Do quick runs of the papers' experiments give the verdicts of the full runs, whatever the seed?

Runs `tsemon reproduce all --quick` with several seeds, and compares the verdicts with those in docs/reproduction. An
interrupted command continues with the rest: delete FOLDER if the code has changed.

    python benchmarks/verdicts.py FOLDER [--seeds N] [--jobs N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsemon.lab.reproduce import available, reproduce

PAGES = Path(__file__).parents[1] / "docs" / "reproduction"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the pages of each seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="parts of experiments at a time, one thread each")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=available(), help="these experiments")
    options = parser.parse_args()
    of_seed = []
    for seed in range(options.seeds):
        pages, start = options.folder / f"seed-{seed}", time.perf_counter()
        missing = [name for name in options.only if not (pages / f"{name}.json").exists()]
        if missing:
            reproduce(missing, pages, quick=True, seed=seed, jobs=options.jobs)
            print(f"seed {seed}: {(time.perf_counter() - start) / 60:.1f} minutes, {options.jobs} parts at a time\n")
        of_seed.append({name: claims_of(pages, name) for name in options.only})
    full = {name: claims_of(PAGES, name) for name in options.only}
    print("\n".join(compared(full, of_seed)))


def claims_of(folder: Path, name: str) -> Mapping[str, tuple[str, bool]]:
    """Each claim with its verdict, and whether it is marked as stable."""
    claims = json.loads((folder / f"{name}.json").read_text())["claims"]
    return {claim["paper"]: (claim["agrees"], claim.get("is_stable", True)) for claim in claims}


def compared(
    full: Mapping[str, Mapping[str, tuple[str, bool]]],
    of_seed: Sequence[Mapping[str, Mapping[str, tuple[str, bool]]]],
) -> list[str]:
    lines, num_equal, num_marked, num_wrong = [], 0, 0, 0
    for name, claims in of_seed[0].items():
        for paper, (_, is_stable) in claims.items():
            expected = full[name].get(paper, ("not on the page", True))[0]
            found = [each[name].get(paper, ("not there", True))[0] for each in of_seed]
            is_equal = {*found} == {expected}
            num_equal += is_equal
            num_marked += not is_equal and not is_stable
            num_wrong += not is_equal and is_stable
            if not (is_equal and is_stable):
                mark = "" if is_stable else ", unstable"
                lines.append(f"| {name} | {paper} | {expected}{mark} | {', '.join(found)} |")
    num = num_equal + num_marked + num_wrong
    head = ["| experiment | claim | full run | quick runs |", "|---|---|---|---|"] if lines else []
    return [
        *head,
        *lines,
        "",
        f"{num_equal} of {num} verdicts equal in all {len(of_seed)} quick runs ({num_equal / max(num, 1):.0%}), "
        f"{num_marked} others marked as unstable, {num_wrong} not marked",
    ]


if __name__ == "__main__":
    main()

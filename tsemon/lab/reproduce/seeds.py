"""The seeds of an experiment, and its figures over seeds: means with standard deviations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace

from tsemon.lab.reproduce.result import Claim, Numbers, Result, Spread, Verdict

NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)(?!\w)")


def seeds_of(seed: int, num: int) -> range:
    """The seeds of a run of `tsemon reproduce --seed`: no two of its values have one in common."""
    return range(seed * num, (seed + 1) * num)


def numbers_of(result: Result) -> Numbers:
    """The part of another seed's result that a trial keeps."""
    return {"claims": [asdict(claim) for claim in result.claims]}


def over_seeds(first: Result, others: Sequence[Numbers], seed: int = 0) -> Result:
    """The result of the first seed, with the claims of all seeds."""
    claims = [first.claims, *([Claim(**claim) for claim in each["claims"]] for each in others)]
    seeds = f"{seed}"
    if others:
        seeds += (
            f" to {seed + len(others)}; plots and tables are of seed {seed}; a verdict that differs between seeds is "
        )
        seeds += "'in part'"
    return replace(
        first,
        settings={**first.settings, "seeds": seeds},
        claims=[_together(same, seed) for same in zip(*claims, strict=True)],
    )


def _together(claims: Sequence[Claim], seed: int) -> Claim:
    verdicts = [claim.agrees for claim in claims]
    is_same = len({*verdicts}) == 1
    agrees: Verdict = verdicts[0] if is_same else "in part"
    seen, reading = (mean_sentence([getattr(claim, name) for claim in claims], seed) for name in ("seen", "reading"))
    by_seed = "" if is_same else f" By seed: {', '.join(verdicts)}."
    return replace(claims[0], agrees=agrees, seen=seen + by_seed, reading=reading)


def mean_sentence(sentences: Sequence[str], seed: int = 0) -> str:
    """A sentence in which each number that differs is the mean ± the standard deviation, with the same precision.

    If the sentences differ in more than their numbers, all of them. seed: of the first sentence.
    """
    words = {tuple(NUMBER.split(sentence)) for sentence in sentences}
    if len(words) > 1:
        return " ".join(f"Seed {seed}: {sentence}" for seed, sentence in enumerate(sentences, seed))
    figures = zip(*(NUMBER.findall(sentence) for sentence in sentences), strict=True)
    between = [*map(_mean, figures), ""]
    return "".join(word + figure for word, figure in zip(words.pop(), between, strict=True))


def _mean(figures: Sequence[str]) -> str:
    if len({*figures}) == 1:
        return figures[0]
    spread = Spread([*map(float, figures)])
    scientific = [figure for figure in figures if "e" in figure]
    kind = "e" if scientific else "f"
    decimals = max(len(figure.partition("e")[0].partition(".")[2]) for figure in scientific or figures)
    if "." not in "".join(figures) and not scientific:
        decimals = 1  # the mean of counts
    sign = "+" if any(figure.startswith("+") for figure in figures) else ""
    return f"{spread.mean:{sign}.{decimals}{kind}} ± {spread.deviation:.{decimals}{kind}}"

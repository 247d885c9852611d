"""The vocabulary of a line for an editor: names with the title of their metric, functions with their signature."""

from __future__ import annotations

from typing import Any

from tsemon.catalogue import LAYERED, SCALARS
from tsemon_server.rules.functions import FUNCTIONS, Function
from tsemon_server.rules.line import KNOWN, ON_CLOCK
from tsemon_server.rules.rule import FAMILIES, SEVERITIES, Hold

HELP = {
    "any": "True if the comparison holds in any layer, or in `layers=` or a `share=` of them; or any of several conditions.",
    "all": "True if the comparison holds in all layers, or if all conditions hold.",
    "first": "The first layer, or the first of the last samples.",
    "last": "The last layer, or the last of the last samples.",
    "min": "Lowest over layers or heads, of two values, or of the last samples.",
    "max": "Highest over layers or heads, of two values, or of the last samples.",
    "mean": "Mean over layers or heads, or of the last samples.",
    "median": "Median over layers or heads, or of the last samples.",
    "slope": "Slope of the least-squares line over depth, or per step over the last samples.",
    "std": "Standard deviation of the last samples.",
    "change": "Last minus first of the last samples.",
    "ratio": "Last over first of the last samples.",
    "sum": "Sum over layers or heads.",
    "quantile": "Quantile over layers or heads, or of the last samples.",
    "r_squared": "r² of the least-squares line over depth.",
    "fall": "Slope of the line over the part of the depth in which values fall to their lowest.",
    "fit": "r² of the line of `fall`.",
    "first_above": "Number of the first layer above a bound.",
    "layer": "One layer, from 0; -1 is the last.",
    "head": "One head, from 0; -1 is the last.",
    "slice": "Layers from the first place up to the second.",
    "where": "Only the layers in which the comparison holds.",
    "skip_frozen": "Without the blocks that are not trained.",
    "abs": "Absolute value.",
    "negate": "The value with the other sign.",
    "sqrt": "Square root.",
    "log10": "Decimal logarithm.",
    "exp10": "10 to the power of the value.",
    "log_odds": "log10 of p / (1 - p).",
    "lowest": "Lowest value so far.",
    "highest": "Highest value so far.",
    "previous": "The value some samples or steps ago.",
    "z_score": "Distance from the median of the samples before, in robust standard deviations.",
    "start": "Median of the first samples of the attempt, or another statistic.",
    "steps_since_lowest": "Steps since the lowest value last improved, by a share if `by=` is given.",
    "steps_since_highest": "Steps since the highest value last improved, by a share if `by=` is given.",
    "steps_in": "Steps for which the condition has held without a break.",
    "scalar": "A number that you log yourself, by its name in quotes.",
    "layers": "A metric of another writer with one value per layer, by its name in quotes.",
    "heads": "A metric with one value per head, by its name in quotes.",
    "held": "True if the condition held in at least `times` of the last `of=` samples.",
    "nonfinite": "True if the value was computed and is NaN or infinite.",
    "finite": "True if the value is a finite number.",
    "measured": "True if the value is in the frame.",
    "between": "True if every bound holds.",
}
"""One line per function."""

WORDS = {
    "and": "Both conditions hold.",
    "or": "One of the conditions holds, or both.",
    "not": "The condition does not hold.",
    "own": "The left side of the nearest operator.",
    "for": "At the end of the line: how long the condition must hold, as for 3 samples, 10 steps.",
    "after": "At the end of the line: when the rule begins, as after 1000 steps.",
}
"""Words of the language that are no functions."""


def language() -> dict[str, Any]:
    """The language of rules, as plain JSON."""
    titles = {**{name: metric.title for name, metric in SCALARS.items()}}
    titles |= {name: metric.title for name, metric in LAYERED.items()}
    titles |= dict.fromkeys(ON_CLOCK, "seconds, in time-based rules")
    default = Hold()
    return {
        "names": {name: {"kind": kind, "help": titles[name]} for name, kind in sorted(KNOWN.items())},
        "functions": {
            name: {"signature": signature(name, function), "help": HELP[name], "example": function.example}
            for name, function in sorted(FUNCTIONS.items())
        },
        "words": WORDS,
        "families": FAMILIES,
        "severities": SEVERITIES,
        "default_hold": {"samples": default.samples, "steps": default.steps},
    }


def signature(name: str, function: Function) -> str:
    """The call with the names of its parameters; optional ones are in brackets."""
    shown = ""
    for place, param in enumerate(function.params):
        text = f"{', ' if place else ''}{param.name}{'=' if param.is_keyword else ''}"
        shown += text if param.is_required else f"[{text}]"
    return f"{name}({shown}{', ...' if function.is_variadic else ''})"

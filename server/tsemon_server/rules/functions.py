"""The functions of a line: their arguments, and the piece of the tree that each of them stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tsemon_server.rules.conditions import BOUNDS, KINDS
from tsemon_server.rules.memory import MAX_SAMPLES, OVER_TIME
from tsemon_server.rules.parts import Part

Wants = Literal["value", "own value", "layers", "condition", "mask", "either", "text"]
Literal_ = Callable[[Part], Any]
"""Checks a number or a word that is written out. Raises Mistake."""


@dataclass(frozen=True)
class Read:
    """A piece of a line that was read."""

    tree: Any
    """A number or a list for a value, a mapping for a condition."""
    axes: int
    """0: one number or one answer, 1: one per layer, 2: one per block and head."""
    is_condition: bool = False

    def then(self, stage: Any, axes: int | None = None) -> Read:
        """This value with a further stage."""
        before = self.tree if isinstance(self.tree, list) else [self.tree]
        return Read([*before, stage], self.axes if axes is None else axes)


class Param(NamedTuple):
    """A parameter of a function."""

    name: str
    wants: Wants | Literal_ = "value"
    is_required: bool = True
    is_keyword: bool = False


class Unfit(Exception):
    """An argument that does not fit: its parameter, and the reason."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


@dataclass(frozen=True)
class Function:
    """A function that may be called in a line."""

    params: tuple[Param, ...]
    build: Callable[[Mapping[str, Any]], Read]
    """From the arguments that were given, by name. Raises Unfit."""
    example: str
    is_variadic: bool = False
    """True if there may be more arguments like the first one; they come as `more`."""


def _as_written(check: Callable[[Part], Any]) -> Literal_:
    """The number as it is written: 1 and 1.0 have different keys in a program."""

    def checked(part: Part) -> Any:
        check(part)
        return part.data

    return checked


_SAMPLES = _as_written(lambda part: part.whole(2, MAX_SAMPLES))
_PLACE = _as_written(lambda part: part.whole(-10_000, 10_000))
_SHARE = _as_written(Part.share)
_NUMBER = _as_written(Part.number)
_STATISTIC = _as_written(lambda part: part.one_of(list(OVER_TIME)))
_END = _as_written(lambda part: None if part.data is None else part.whole(-10_000, 10_000))
_X = Param("x")


def _reduced(x: Read, how: Any, called: str) -> Read:
    """Over heads, or over layers."""
    if not x.axes:
        raise Unfit("x", f"{called} expects a value per layer or head, got one number")
    return x.then({"heads": how}, axes=1) if x.axes == 2 else x.then({"layers": how}, axes=0)


def _of_layers(x: Read, how: Any, called: str) -> Read:
    if x.axes != 1:
        hint = "; reduce over heads first" if x.axes else ""
        raise Unfit("x", f"{called} expects a value per layer, got {AXES[x.axes]}{hint}")
    return x.then({"layers": how}, axes=0)


AXES = {0: "one number", 1: "one value per layer", 2: "one value per head"}


def _statistic(name: str) -> Function:
    """Over time if it says of how many samples, else over heads or layers."""
    is_of_both = name not in _ONLY_OVER_TIME

    def build(given: Mapping[str, Any]) -> Read:
        x: Read = given["x"]
        if "samples" in given:
            return x.then({"window": name, "samples": given["samples"]})
        if not x.axes:
            text = f"{name} expects a value per layer or head, got one number; over time, say of how many samples"
            raise Unfit("x", f"{text}: {name}(..., samples=20)")
        return _of_layers(x, name, name) if name == "slope" else _reduced(x, name, name)

    params = (_X, Param("samples", _SAMPLES, is_required=not is_of_both))
    return Function(params, build, f"{name}(loss, samples=20) > 1")


_ONLY_OVER_TIME = "std", "change", "ratio"


def _least_or_most(name: str) -> Function:
    def build(given: Mapping[str, Any]) -> Read:
        x: Read = given["x"]
        if "y" not in given:
            return of_time.build(given)
        if "samples" in given:
            raise Unfit("samples", f"{name} takes a second value or samples=, not both")
        y: Read = given["y"]
        if x.axes and y.axes and x.axes != y.axes:
            raise Unfit("y", f"{name} expects two values of one shape, got {AXES[x.axes]} and {AXES[y.axes]}")
        return x.then({f"{name}_with": y.tree}, axes=max(x.axes, y.axes))

    of_time = _statistic(name)
    params = (_X, Param("y", "own value", is_required=False), Param("samples", _SAMPLES, False, is_keyword=True))
    return Function(params, build, f"{name}(grad_norm) > 1")


def _end_or_mask(name: str) -> Function:
    """`first` and `last`: of layers, over time, or where a comparison of layers must hold."""
    of_values = _statistic(name)

    def build(given: Mapping[str, Any]) -> Read:
        if not given["x"].is_condition:
            return of_values.build(given)
        if "samples" in given:
            raise Unfit("samples", f"{name} of a comparison takes no samples")
        return _in(given["x"], name, name)

    return Function((Param("x", "either"), of_values.params[1]), build, f"{name}(token_diversity) < 0.01")


def _in(mask: Read, layers: Any, called: str) -> Read:
    if mask.axes == 2:
        raise Unfit("x", f"{called} expects a comparison of layers, got one per head; reduce over heads first")
    if mask.axes == 0:
        raise Unfit("x", f"{called} expects a comparison of layers, got one answer")
    return Read({**mask.tree, "in": layers}, 0, is_condition=True)


def _any_or_all(name: str) -> Function:
    def build(given: Mapping[str, Any]) -> Read:
        first, more = given["x"], given.get("more", ())
        counted = {key: given[key] for key in ("layers", "share") if key in given}
        if len(counted) == 2:
            raise Unfit("share", "any takes layers= or share=, not both")
        if first.axes and not more:
            return _in(first, counted or name, name)
        if counted:
            raise Unfit(next(iter(counted)), f"{next(iter(counted))}= needs one comparison of layers")
        if any(one.axes for one in (first, *more)):
            text = f"{name} of several expects one answer each; say any(...) or all(...) of each comparison of layers"
            raise Unfit("x", text)
        return Read({name: [first.tree, *(one.tree for one in more)]}, 0, is_condition=True)

    counts = (
        Param("layers", _as_written(lambda part: part.whole(1, 10_000)), False, is_keyword=True),
        Param("share", _SHARE, False, is_keyword=True),
    )
    params = (Param("x", "mask"), *(counts if name == "any" else ()))
    return Function(params, build, f"{name}(attention_entropy < 0.1)", is_variadic=True)


def _first(given: Mapping[str, Any]) -> Read:
    x: Read = given["x"]
    return x


def _quantile(given: Mapping[str, Any]) -> Read:
    x, how = _first(given), {"quantile": given["q"]}
    return x.then({"window": how, "samples": given["samples"]}) if "samples" in given else _reduced(x, how, "quantile")


def _start(given: Mapping[str, Any]) -> Read:
    if "take" in given and "quantile" in given:
        raise Unfit("quantile", "start takes take= or quantile=, not both")
    how = {"quantile": given["quantile"]} if "quantile" in given else given.get("take", "median")
    return _first(given).then({"start": how} | ({"samples": given["samples"]} if "samples" in given else {}))


def _stage(name: str) -> Function:
    example = f"max({name}(grad_norm)) > 1" if name == "skip_frozen" else f"{name}(loss) > 1"
    x = Param("x", "layers") if name == "skip_frozen" else _X
    return Function((x,), lambda given: given["x"].then(name), example)


def _best(end: str) -> Function:
    example = "loss > 1.2 * lowest(loss)" if end == "lowest" else "input_overlap < 0.5 * highest(input_overlap)"
    return Function((_X,), lambda given: given["x"].then({"best": end}), example)


def _previous(given: Mapping[str, Any]) -> Read:
    if "steps" in given and "samples" in given:
        raise Unfit("steps", "previous takes samples= or steps=, not both")
    return _first(given).then({"previous": {"steps": given["steps"]} if "steps" in given else given.get("samples", 1)})


def _steps_since(end: str) -> Function:
    def build(given: Mapping[str, Any]) -> Read:
        return _first(given).then({"steps_since": end} | ({"by": given["by"]} if "by" in given else {}))

    return Function((_X, Param("by", _SHARE, False)), build, f"steps_since_{end}(loss, by=0.01) >= 300")


def _over_depth(name: str, stage: str) -> Function:
    example = f"{name}(log_odds(token_diversity)) >= 0.8"
    return Function((_X,), lambda given: _of_layers(given["x"], stage, name), example)


def _source(kind: str) -> Function:
    examples = {"scalar": 'scalar("val/loss") > 3', "layers": 'max(layers("my_norm")) > 3'}
    examples["heads"] = 'any(min(heads("attention_entropy")) < 0.1)'
    axes = ("scalar", "layers", "heads").index(kind)
    return Function((Param("name", "text"),), lambda given: Read([{kind: given["name"]}], axes), examples[kind])


def _kind(name: str) -> Function:
    def build(given: Mapping[str, Any]) -> Read:
        return Read({"value": given["x"].tree, "is": name}, given["x"].axes, is_condition=True)

    return Function((_X,), build, f"{name}(loss)")


def _between(given: Mapping[str, Any]) -> Read:
    bounds = {name: given[name] for name in BOUNDS if name in given}
    if not bounds:
        raise Unfit("x", f"between expects one of {', '.join(f'{name}=' for name in BOUNDS)}")
    for name, bound in bounds.items():
        if bound.axes not in (0, given["x"].axes):
            raise Unfit(name, f"expected one number, or {AXES[given['x'].axes]}, got {AXES[bound.axes]}")
    tree = {"value": given["x"].tree} | {name: bound.tree for name, bound in bounds.items()}
    return Read(tree, given["x"].axes, is_condition=True)


def _held(given: Mapping[str, Any]) -> Read:
    if given["times"] > given["of"]:
        raise Unfit("times", f"expected at most the {given['of']} samples of of=, got {given['times']}")
    tree = {"condition": given["x"].tree, "in_last": given["of"], "at_least": given["times"]}
    return Read(tree, 0, is_condition=True)


def _where(given: Mapping[str, Any]) -> Read:
    mask: Read = given["mask"]
    if mask.axes == 0 or "is" in mask.tree or "value" not in mask.tree:
        raise Unfit("mask", "where expects a comparison layer by layer, such as where(grad_norm, param_norm > 0)")
    if mask.axes != given["x"].axes:
        raise Unfit("mask", f"where expects a comparison of {AXES[given['x'].axes]}, got {AXES[mask.axes]}")
    return _first(given).then({"where": mask.tree})


def _steps_in(given: Mapping[str, Any]) -> Read:
    return Read([{"steps_in": given["x"].tree}], 0)


FUNCTIONS: dict[str, Function] = {
    **{name: _any_or_all(name) for name in ("any", "all")},
    **{name: _end_or_mask(name) for name in ("first", "last")},
    **{name: _least_or_most(name) for name in ("min", "max")},
    **{name: _statistic(name) for name in ("mean", "median", "slope", *_ONLY_OVER_TIME)},
    "sum": Function((_X,), lambda given: _reduced(given["x"], "sum", "sum"), "sum(grad_norm) > 1"),
    "quantile": Function(
        (_X, Param("q", _SHARE), Param("samples", _SAMPLES, False)), _quantile, "quantile(grad_norm, 0.9) > 1"
    ),
    "r_squared": _over_depth("r_squared", "r_squared"),
    "fall": _over_depth("fall", "fall"),
    "fit": _over_depth("fit", "fall_r_squared"),
    "first_above": Function(
        (_X, Param("bound", _NUMBER)),
        lambda given: _of_layers(given["x"], {"first_above": given["bound"]}, "first_above"),
        "first_above(nonfinite, 0) < 3",
    ),
    "layer": Function(
        (_X, Param("index", _PLACE)),
        lambda given: _of_layers(given["x"], {"index": given["index"]}, "layer"),
        "layer(grad_norm, 3) > 1",
    ),
    "head": Function(
        (_X, Param("index", _PLACE)),
        lambda given: _head(given["x"], given["index"]),
        'any(head(heads("attention_entropy"), 3) < 0.1)',
    ),
    "slice": Function(
        (Param("x", "layers"), Param("start", _END), Param("end", _END, False)),
        lambda given: given["x"].then({"slice": [given["start"], given.get("end")]}),
        "min(slice(saturation, 1)) > 0.95",
    ),
    "where": Function(
        (Param("x", "layers"), Param("mask", "mask")), _where, "min(where(update_norm, param_norm > 0)) < 1e-8"
    ),
    **{name: _stage(name) for name in ("skip_frozen", "abs", "negate", "sqrt", "log10", "exp10", "log_odds")},
    "lowest": _best("lowest"),
    "highest": _best("highest"),
    "previous": Function(
        (
            _X,
            Param("samples", _as_written(lambda part: part.whole(1, MAX_SAMPLES)), False),
            Param("steps", _as_written(lambda part: part.whole(1, MAX_SAMPLES)), False, is_keyword=True),
        ),
        _previous,
        "loss > 2 * previous(loss)",
    ),
    "z_score": Function(
        (_X, Param("samples", _as_written(lambda part: part.whole(3, MAX_SAMPLES)))),
        lambda given: given["x"].then({"z_score": given["samples"]}),
        "z_score(loss, 30) > 6",
    ),
    "start": Function(
        (
            _X,
            Param("samples", _as_written(lambda part: part.whole(1, MAX_SAMPLES)), False),
            Param("take", _STATISTIC, False, is_keyword=True),
            Param("quantile", _SHARE, False, is_keyword=True),
        ),
        _start,
        "max(hidden_rms) / start(max(hidden_rms), samples=3) > 60",
    ),
    "steps_since_lowest": _steps_since("lowest"),
    "steps_since_highest": _steps_since("highest"),
    "steps_in": Function((Param("x", "condition"),), _steps_in, "steps_in(loss > 10) >= 300"),
    **{kind: _source(kind) for kind in ("scalar", "layers", "heads")},
    "held": Function(
        (
            Param("x", "condition"),
            Param("times", _as_written(lambda part: part.whole(1, MAX_SAMPLES))),
            Param("of", _as_written(lambda part: part.whole(1, MAX_SAMPLES))),
        ),
        _held,
        "held(loss > 10, 6, of=10)",
    ),
    **{name: _kind(name) for name in KINDS},
    "between": Function(
        (_X, *(Param(name, "value", False, is_keyword=True) for name in BOUNDS)),
        _between,
        "between(loss, above=1, below=2)",
    ),
}


def _head(x: Read, index: Any) -> Read:
    if x.axes != 2:
        raise Unfit("x", f"head expects a value per head, got {AXES[x.axes]}")
    return x.then({"heads": {"index": index}}, axes=1)


GUESSED = {
    "avg": "mean",
    "average": "mean",
    "best": "lowest(...) or highest(...)",
    "count": "any(..., layers=3)",
    "at_least": "any(..., layers=3) or held(..., 6, of=10)",
    "share": "any(..., share=0.5)",
    "delta": "change(..., samples=2)",
    "diff": "change(..., samples=2)",
    "exp": "exp10",
    "ln": "log10",
    "log": "log10",
    "minimum": "min",
    "maximum": "max",
    "pow": "x * x",
    "rate": "slope(..., samples=20)",
    "isfinite": "finite",
    "isnan": "nonfinite",
    "is_finite": "finite",
    "is_nan": "nonfinite",
    "lag": "previous",
    "stdev": "std",
    "zscore": "z_score",
}
"""Functions that people try, and what this language has instead."""

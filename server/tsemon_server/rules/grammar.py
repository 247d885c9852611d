"""The grammar of rules: reads definitions of values and conditions, each of which may contain the other.

`values` and `conditions` have the nodes that this module adds to a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsemon_server.rules import conditions, values
from tsemon_server.rules.conditions import BOUNDS, Bound, Comparison
from tsemon_server.rules.memory import MAX_SAMPLES, StepsIn
from tsemon_server.rules.parts import Mistake, Part, unknown_key
from tsemon_server.rules.program import Measure, Program, Term

SOURCES = "scalar", "layers", "heads", "steps_in"

# Conditions


def condition(part: Part, program: Program, found: list[Comparison] | None = None) -> Term:
    """Add the node of a condition, and its comparisons to `found`. Raises Mistake."""
    found = [] if found is None else found
    if "value" in part:
        return _comparison(part, program, found)
    if "condition" in part:
        part.has_keys(["condition", "in_last", "at_least"])
        num_samples = part["in_last"].whole(1, MAX_SAMPLES)
        least = part["at_least"].whole(1, num_samples)
        return conditions.repeated(condition(part["condition"], program, found), num_samples, least, program)
    if not isinstance(part.data, dict) or len(part.data) != 1 or next(iter(part.data)) not in ("all", "any", "not"):
        raise part.wrong("a mapping with value, or with condition, or with one of all, any, not")
    name = str(next(iter(part.data)))
    if name == "not":
        return conditions.negated(condition(part["not"], program, []), program)  # what must not hold is no evidence
    return conditions.joined([condition(item, program, found) for item in part[name].items()], name, program)


def _comparison(part: Part, program: Program, found: list[Comparison]) -> Term:
    part.has_keys(["value"], [*BOUNDS, "is", "in"])
    compared = value(part["value"], program)
    if compared.axes == 2:
        raise Mistake(part.path, "a comparison expects one number or layers, got blocks and heads; reduce over heads")
    if compared.axes == 1 and "in" not in part:
        raise Mistake(
            part.path, "the value has layers: say in which, `in: any`, all, first, last, {layers: 3}, {share: 0.5}"
        )
    if compared.axes == 0 and "in" in part:
        raise Mistake((*part.path, "in"), "the value is one number: expected no `in`")
    bounds: Sequence[Bound] = ()
    if "is" in part:
        holds = conditions.of_kind(part["is"], compared, program)
        holds = conditions.in_layers(part["in"], holds, program) if compared.axes else holds
    else:
        bounds = _bounds(part, compared, program)
        if compared.axes:
            holds = conditions.held_in(part["in"], compared, bounds, program)
        else:
            holds = conditions.held_against(compared, bounds, program)
    found.append(Comparison(compared, tuple(bounds), holds, part["in"].data if compared.axes else None))
    return holds


def mask(part: Part, program: Program) -> Term:
    """Add the node of a comparison layer by layer."""
    part.has_keys(["value"], [*BOUNDS])
    compared = value(part["value"], program)
    if compared.axes == 0:
        raise Mistake((*part.path, "value"), "expected a value with layers, got one number")
    return conditions.held_against(compared, _bounds(part, compared, program), program)


def _bounds(part: Part, compared: Term, program: Program) -> Sequence[Bound]:
    names = [name for name in BOUNDS if name in part]
    if not names:
        raise Mistake(part.path, f"nothing to hold the value against; expected one of {', '.join(BOUNDS)}, is")
    bounds = [(name, value(part[name], program)) for name in names]
    for name, bound in bounds:
        if bound.axes not in (0, compared.axes):
            raise Mistake(
                (*part.path, name), "the bound has other axes than the value; expected one number, or the same"
            )
    return bounds


# Values


def value(part: Part, program: Program, own: Term | None = None) -> Term:
    """Add the node of a value; the word `own` in its definition stands for the node `own`. Raises Mistake.

    A definition is a number, or a list: a source and then stages, each applied to the result of the one before.
    """
    if isinstance(part.data, int | float):
        return program.constant(part.number())
    if not isinstance(part.data, list):
        raise part.wrong("a number, or a list that begins with a measure, such as [{scalar: loss}]")
    source, *stages = part.items()
    term = _source(source, program, own)
    for stage in stages:
        term = _stage(term, stage, program)
    return term


def _source(part: Part, program: Program, own: Term | None) -> Term:
    if part.data == "own" and own is not None:
        return own
    if isinstance(part.data, list | int | float):
        return value(part, program)
    kind = _kind(part, SOURCES)
    if kind == "steps_in":
        counted = condition(part[kind], program)
        return program.remember(counted, "steps in", StepsIn(), says=f"steps in which {counted.says}")
    return program.read(Measure(kind, part.has_keys([kind])[kind].text(most=128)))


def _stage(term: Term, part: Part, program: Program) -> Term:
    if isinstance(part.data, str):
        return values.named(term, part, program)
    return _STAGES[_kind(part, list(_STAGES))](term, part, program)


def _kind(part: Part, options: Sequence[str]) -> str:
    """Which of `options` it is; keys may come in any order."""
    found = [key for key in options if key in part]
    if len(found) == 1:
        return found[0]
    if isinstance(part.data, dict) and part.data and not found:
        key = str(next(iter(part.data)))
        raise unknown_key(part.path, key, options)
    raise part.wrong(f"a mapping with one of {', '.join(options)}")


def _arithmetic(term: Term, part: Part, program: Program) -> Term:
    name = values.only_key(part)
    return values.combined(term, name, value(part[name], program, own=term), part, program)


def _where(term: Term, part: Part, program: Program) -> Term:
    values.needs_layers(term, part)
    return values.kept_where(term, mask(part.has_keys(["where"])["where"], program), program)


_STAGES: dict[str, Callable[[Term, Part, Program], Term]] = {
    "heads": values.heads,
    "layers": values.layers,
    "slice": values.sliced,
    "where": _where,
    **dict.fromkeys(values.OF_TWO, _arithmetic),
    "window": values.window,
    "start": values.start,
    "best": values.best,
    "z_score": values.z_score,
    "previous": values.previous,
    "steps_since": values.steps_since,
}

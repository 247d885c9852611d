"""A condition or a value as one line, such as `any(update_norm / param_norm < 1e-8) for 4 samples`.

Python's `ast` parses the line, and a closed list of its nodes is read into the tree of `grammar`. Nothing is ever executed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from tsemon.catalogue import LAYERED, SCALARS, most_alike, nearest
from tsemon_server.rules.functions import AXES, FUNCTIONS, GUESSED, Function, Param, Read, Unfit
from tsemon_server.rules.parts import Mistake, Part, Path
from tsemon_server.rules.scanning import Wrong, guessed, scan

MAX_DEPTH = 50
"""Number of expressions inside one another."""
MAX_NODES = 1_000
"""Number of names, numbers, calls and operators in a line."""
MAX_DIGITS = 300

_PARSER = Lock()
"""Held while `ast` parses: before Python 3.11.9, two threads that parse can disturb each other (gh-106905)."""

ON_CLOCK = (
    "longest_pause_seconds",
    "silent_seconds",
    "step_seconds",
    "stuck_seconds",
    "unevaluated_frames",
    "usual_heard_seconds",
    "usual_step_seconds",
)
"""Scalars of time-based rules, which the server measures itself."""
KNOWN = {**dict.fromkeys((*ON_CLOCK, *SCALARS), "scalar"), **dict.fromkeys(LAYERED, "layers")}
"""Names that may stand in a line as they are. A name that is both is the one with layers."""

_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "plus", ast.Sub: "minus", ast.Mult: "times", ast.Div: "over"}
_BOUNDS: dict[type[ast.cmpop], str] = {ast.Gt: "above", ast.Lt: "below", ast.GtE: "at_least", ast.LtE: "at_most"}
_MIRRORED = {"above": "below", "below": "above", "at_least": "at_most", "at_most": "at_least"}
_UNSUPPORTED: dict[type[ast.AST], str] = {
    ast.Lambda: "lambda is not supported",
    ast.Attribute: 'a dot between names is not supported; write a name that has one in quotes: scalar("val.loss")',
    ast.NamedExpr: "`:=` is not supported; write the expression where it is needed",
    ast.JoinedStr: "f-strings are not supported",
    ast.IfExp: "`if` and `else` are not supported; join conditions with and, or, not",
    ast.Starred: "`*` before an argument is not supported",
    ast.Pow: "`**` is not supported; write x * x, or sqrt(x), or exp10(x)",
    ast.FloorDiv: "`//` is not supported; write /",
    ast.Eq: "`==` is not supported, because measured numbers are rarely equal; write <= or >=",
    ast.NotEq: "`!=` is not supported, because measured numbers are rarely equal; write < or >",
    ast.Is: "`is` is not supported; write finite(x), nonfinite(x) or measured(x)",
    ast.IsNot: "`is not` is not supported; write not finite(x), not nonfinite(x) or not measured(x)",
    ast.In: "`in` is not supported; write any(x > 1), all(x > 1), first(x > 1) or last(x > 1)",
}
_INVALID = {"=": "`=` is not supported; write <= or >=", "!": "`!` is not supported; write not"}


@dataclass(frozen=True)
class Line:
    """A line that was read."""

    tree: Any
    clauses: Mapping[str, Mapping[str, int]]
    """The samples and steps after `for` and `after`, if the line ends in them."""


class MistakeInLine(Mistake):
    """A mistake at a place in a line. Its text has the column, and shows the line."""

    def __init__(self, path: Path, line: str, wrong: Wrong) -> None:
        super().__init__(path, wrong.shown_in(line))
        self.line = line
        self.wrong = wrong


def condition(part: Part, clauses: Collection[str] = ()) -> Line:
    """Read the line of a condition, which may end in these clauses. Raises Mistake, which shows the column."""
    return _read(part, _Reader.condition, clauses)


def mask(part: Part) -> Line:
    """Read the line of a condition with an answer for each layer. Raises Mistake, which shows the column."""
    return _read(part, _Reader.mask, ())


def value(part: Part) -> Line:
    """Read the line of a value. Raises Mistake, which shows the column."""
    return _read(part, _Reader.value, ())


def _read(part: Part, how: Callable[[_Reader, ast.expr], Read], clauses: Collection[str]) -> Line:
    text = part.data
    try:
        scanned = scan(text, clauses)
        return Line(how(_Reader(scanned.expression), _parsed(scanned.expression)).tree, scanned.clauses)
    except Wrong as wrong:
        raise MistakeInLine(part.path, text, wrong) from None


def _parsed(text: str) -> ast.expr:
    indent = len(text) - len(text.lstrip())
    try:
        with _PARSER:
            body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        other = guessed(text)
        if other is not None:
            raise other from None
        place = indent + error.offset - 1 if error.offset else len(text.rstrip())
        at_end = "something is missing at the end" if place >= len(text.rstrip()) else None
        said = _INVALID.get(text[place : place + 1]) or at_end or f"this is not an expression: {error.msg}"
        raise Wrong(place, said, "loss > 10 and any(grad_norm > 1)") from None
    except (ValueError, RecursionError, MemoryError, OverflowError):
        raise Wrong(0, "the expression is nested too deeply, or a number in it is too long") from None
    for num, node in enumerate(ast.walk(body)):
        if num >= 3 * MAX_NODES:  # contexts and operators are nodes of their own
            raise Wrong(0, f"expected at most about {MAX_NODES:,} names, numbers and operators, got more")
        if isinstance(node, ast.expr | ast.keyword):
            node.col_offset += indent
            node.end_col_offset = (node.end_col_offset or 0) + indent
    return body


class _Reader:
    """From the nodes of a line to a tree."""

    def __init__(self, text: str) -> None:
        self._encoded = text.encode("utf-8", "surrogatepass")
        self._depth = 0

    def condition(self, node: ast.expr) -> Read:
        """One answer."""
        found = self._mask(node)
        if found.axes:
            if found.axes == 2:
                raise self._wrong(
                    node, "this comparison has an answer per head; reduce over heads first", FUNCTIONS["heads"].example
                )
            text = "this comparison has an answer per layer; say in which it must hold: any(...), all(...), first(...)"
            raise self._wrong(node, f"{text} or last(...){self._over_time(node)}", self._in_any(node))
        return found

    def mask(self, node: ast.expr) -> Read:
        """An answer for each layer."""
        found = self._mask(node)
        if found.axes != 1:
            text = f"expected a comparison with an answer per layer, got {AXES[found.axes]}"
            raise self._wrong(node, text, "token_diversity < 0.01")
        return found

    def value(self, node: ast.expr, own: Read | None = None) -> Read:
        found = self._any(node, own)
        if found.is_condition:
            raise self._wrong(node, "expected a number, got a condition", "loss > 10")
        return found

    def _mask(self, node: ast.expr) -> Read:
        found = self._any(node, None)
        if not found.is_condition:
            raise self._wrong(node, "expected a condition, got a value; compare it", f"{self._text(node, 'loss')} > 1")
        return found

    def _any(self, node: ast.expr, own: Read | None) -> Read:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(node, f"expected at most {MAX_DEPTH} expressions inside one another, got more")
        read = self._NODES.get(type(node))
        if read is None:
            raise self._unsupported(node, node)
        found = read(self, node, own)
        self._depth -= 1
        return found

    # Nodes

    def _name(self, node: ast.Name, own: Read | None) -> Read:
        name = node.id
        if name == "own":
            if own is None:
                text = "`own` stands for the left side of the nearest operator, and no operator is left of it"
                raise self._wrong(node, text, "loss / lowest(own)")
            if not isinstance(own.tree, list):
                text = f"`own` would stand for {own.tree:g}, the left side of the nearest operator; write the metric instead"
                raise self._wrong(node, text, "loss > 1.2 * lowest(loss)")
            return Read(["own"], own.axes)
        if name in KNOWN:
            return Read([{KNOWN[name]: name}], ("scalar", "layers").index(KNOWN[name]))
        if name in FUNCTIONS:
            raise self._wrong(node, f"{name} is a function and needs arguments in parentheses", FUNCTIONS[name].example)
        near = most_alike(name[:128], KNOWN) or ""
        hint = f"; did you mean {near!r}?" if near else "."
        own_name = f'scalar("{name}")' if len(name) <= 40 else 'scalar("...")'
        text = f"no metric is named {_cut(name)!r}{hint} A scalar that you log yourself is written {own_name}"
        raise self._wrong(node, text, nearest=near)

    def _constant(self, node: ast.Constant, own: Read | None) -> Read:
        return Read(self._number(node, node.value), 0)

    def _number(self, node: ast.expr, number: Any) -> int | float:
        if isinstance(number, str):
            raise self._wrong(node, "expected a number or a name without quotes", f'scalar("{_cut(number)}") > 3')
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self._wrong(node, f"expected a number, got {_cut(str(number))}")
        if (abs(number) >= 10**MAX_DIGITS) if isinstance(number, int) else not math.isfinite(number):
            raise self._wrong(node, f"this number is too large; expected less than 1e{MAX_DIGITS}")
        return number

    def _unary(self, node: ast.UnaryOp, own: Read | None) -> Read:
        if isinstance(node.op, ast.Not):
            return Read({"not": self.condition(node.operand).tree}, 0, is_condition=True)
        if isinstance(node.op, ast.Invert):
            raise self._wrong(node, "`~` is not supported; write not")
        found = self.value(node.operand, own)
        if isinstance(node.op, ast.UAdd):
            return found
        if isinstance(node.operand, ast.Constant):
            return Read(-found.tree, 0)
        return found.then("negate")

    def _arithmetic(self, node: ast.BinOp, own: Read | None) -> Read:
        """A chain such as a + b - c is read from the left to the right: its terms are not inside one another."""
        chain, first = [node], node.left
        while isinstance(first, ast.BinOp):
            chain.append(first)
            first = first.left
        for one in chain:
            self._refuse_path(one)
        left = self.value(first, own)
        for one in reversed(chain):
            left = self._of_two(one, left)
        return left

    def _of_two(self, node: ast.BinOp, left: Read) -> Read:
        name = _ARITHMETIC.get(type(node.op))
        if name is None:
            raise self._unsupported(node.op, node.left)
        right = self.value(node.right, left)
        if left.axes and right.axes and left.axes != right.axes:
            text = f"expected two values of one shape, got {AXES[left.axes]} and {AXES[right.axes]}"
            raise self._wrong(node.right, text, 'min(heads("attention_entropy")) / sink_share')
        return left.then({name: right.tree}, axes=max(left.axes, right.axes))

    def _refuse_path(self, node: ast.BinOp) -> None:
        """Names with a slash between them are one name if one of them is like no metric."""
        text = self._source(node)
        names = text.split("/")
        unknown = [name for name in names if name not in KNOWN and name != "own" and not most_alike(name[:128], KNOWN)]
        if len(names) > 1 and unknown and all(name.isidentifier() for name in names) and len(text) <= 40:
            said = f'no metric is named {unknown[0]!r}. A scalar that you log yourself is written scalar("{text}")'
            raise self._wrong(node, said, f'scalar("{text}") > 3')

    def _joined(self, node: ast.BoolOp, own: Read | None) -> Read:
        name = "all" if isinstance(node.op, ast.And) else "any"
        return Read({name: [self.condition(item).tree for item in node.values]}, 0, is_condition=True)

    def _compared(self, node: ast.Compare, own: Read | None) -> Read:
        """Two comparisons have the value in the middle. One has it on the left, unless only the right side is measured."""
        operands = [node.left, *node.comparators]
        for op, left in zip(node.ops, operands, strict=False):
            if type(op) not in _BOUNDS:
                raise self._unsupported(op, left)
        bounds = [_BOUNDS[type(op)] for op in node.ops]
        if len(bounds) > 2:
            raise self._wrong(
                operands[3], "expected at most two comparisons in a row; join more with and", "1 < loss < 5"
            )
        sides = [self.value(operand) for operand in operands]
        if len(sides) == 3:
            (low, compared, high), bounds = sides, [_MIRRORED[bounds[0]], bounds[1]]
            held = [low, high]
            if bounds[0] == bounds[1]:
                raise self._wrong(
                    operands[2],
                    f"the middle is twice held against the same kind of bound ({bounds[0]})",
                    "1 < loss < 5",
                )
        else:
            compared, *held = sides
            is_number = isinstance(compared.tree, int | float) and not isinstance(held[0].tree, int | float)
            if compared.axes < held[0].axes or is_number:
                (compared, held), bounds = (held[0], [compared]), [_MIRRORED[bounds[0]]]
        for bound in held:
            if bound.axes not in (0, compared.axes):
                at = operands[sides.index(bound)]
                raise self._wrong(at, f"expected one number, or {AXES[compared.axes]}, got {AXES[bound.axes]}")
        tree = {"value": compared.tree, **{name: bound.tree for name, bound in zip(bounds, held, strict=True)}}
        return Read(tree, compared.axes, is_condition=True)

    def _call(self, node: ast.Call, own: Read | None) -> Read:
        if not isinstance(node.func, ast.Name):
            raise self._unsupported(node.func, node.func)
        name = node.func.id
        function = FUNCTIONS.get(name)
        if function is None:
            if name in KNOWN:
                raise self._wrong(node, f"{name} is a metric, not a function", f"last({name}) > 1")
            hint = f"write {GUESSED[name]}" if name in GUESSED else nearest(name[:128], list(FUNCTIONS))
            near = GUESSED.get(name) or most_alike(name[:128], FUNCTIONS) or ""
            raise self._wrong(
                node.func, f"no function is named {_cut(name)!r}; {hint}", nearest=near if near in FUNCTIONS else ""
            )
        nodes = self._bound(name, function, node)
        given: dict[str, Any] = {}
        try:
            for param in function.params:
                if param.name in nodes:
                    given[param.name] = self._argument(nodes[param.name], param, own, given.get("x"), function)
            if function.is_variadic and len(node.args) > 1:
                given["more"] = tuple(self._mask(more) for more in node.args[1:])
            return function.build(given)
        except Unfit as unfit:
            raise self._wrong(nodes[unfit.param], str(unfit), function.example) from None

    def _bound(self, name: str, function: Function, node: ast.Call) -> dict[str, ast.expr]:
        """The nodes of the arguments by the name of the parameter."""
        placed = [param.name for param in function.params if not param.is_keyword]
        args = node.args[:1] if function.is_variadic else node.args
        if len(args) > len(placed):
            takes = f"{len(placed)} argument{'s' if len(placed) > 1 else ''}"
            raise self._wrong(
                args[len(placed)], f"{name} takes at most {takes} without a name, got {len(args)}", function.example
            )
        nodes = dict(zip(placed, args, strict=False))
        names = [param.name for param in function.params if param.wants not in _FIRST or param.name != "x"]
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._wrong(keyword.value, "`**` before an argument is not supported", function.example)
            if keyword.arg not in names:
                hint = f"; expected {', '.join(f'{name}=' for name in names)}" if names else ""
                raise self._wrong(
                    keyword.value, f"{name} has no argument {_cut(keyword.arg)!r}{hint}", function.example
                )
            if keyword.arg in nodes:
                raise self._wrong(keyword.value, f"{name} got {keyword.arg} twice", function.example)
            nodes[keyword.arg] = keyword.value
        missing = next((param.name for param in function.params if param.is_required and param.name not in nodes), None)
        if missing:
            raise self._wrong(
                node, f"{name} needs {'an argument' if missing == 'x' else f'the argument {missing}'}", function.example
            )
        return nodes

    def _argument(self, node: ast.expr, param: Param, own: Read | None, x: Read | None, function: Function) -> Any:
        wants = param.wants
        if wants in ("value", "layers", "own value"):
            found = self.value(node, x if wants == "own value" else own if param.name == "x" else None)
            if wants == "layers" and not found.axes:
                raise self._wrong(node, "expected one value per layer, got one number", function.example)
            return found
        if wants == "condition":
            return self.condition(node)
        if wants == "mask":
            return self._mask(node)
        if wants == "either":
            return self._any(node, own)
        return self._literal(node, param, function)

    def _literal(self, node: ast.expr, param: Param, function: Function) -> Any:
        """A number or a text that is written out."""
        sign, inner = 1, node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign, inner = (-1 if isinstance(node.op, ast.USub) else 1), node.operand
        if not isinstance(inner, ast.Constant) or isinstance(inner.value, bytes):
            kind = "a name in quotes" if param.wants == "text" else f"a number that is written out for {param.name}"
            raise self._wrong(node, f"expected {kind}", function.example)
        is_number = isinstance(inner.value, int | float) and not isinstance(inner.value, bool)
        written = Part(sign * self._number(inner, inner.value) if is_number else inner.value)
        try:
            return written.text(most=128) if param.wants == "text" else param.wants(written)  # type: ignore[operator]
        except Mistake as mistake:
            raise self._wrong(node, f"{param.name}: {mistake}", function.example) from None

    # Errors

    def _unsupported(self, what: ast.AST, at: ast.expr) -> Wrong:
        """`at` is the expression itself, or the left side of an operator."""
        text = _UNSUPPORTED.get(type(what), "this is not part of the language of rules")
        if isinstance(what, ast.expr):
            return self._wrong(at, text)
        end = at.end_col_offset or 0
        after = self._encoded[end:]
        return Wrong(self._place(end + len(after) - len(after.lstrip(b" )"))), text)

    def _wrong(self, node: ast.expr, text: str, example: str = "", nearest: str = "") -> Wrong:
        end = None if node.end_col_offset is None else self._place(node.end_col_offset)
        return Wrong(self._place(node.col_offset), text, example, end=end, nearest=nearest)

    def _place(self, byte: int) -> int:
        """`ast` counts bytes, people count characters."""
        return len(self._encoded[:byte].decode("utf-8", "surrogatepass"))

    def _source(self, node: ast.expr) -> str:
        return self._encoded[node.col_offset : node.end_col_offset].decode("utf-8", "surrogatepass")

    def _text(self, node: ast.expr, otherwise: str) -> str:
        """The text of a node, for an example."""
        text = self._source(node)
        return text if len(text) <= 60 else otherwise

    def _in_any(self, node: ast.expr) -> str:
        """An example: the comparison in any layer, with statistics over time instead of over layers."""
        text = self._text(node, "grad_norm > 1")
        for call in self._over_layers(node):
            text = text.replace(self._source(call), f"{self._source(call)[:-1]}, samples=20)")
        return f"any({text})"

    def _over_time(self, node: ast.expr) -> str:
        """A hint if a statistic is over layers that may be meant over time."""
        calls = [self._source(call) for call in self._over_layers(node)]
        return f". {_cut(calls[0])} is over layers; over time, say of how many samples: samples=20" if calls else ""

    def _over_layers(self, node: ast.expr) -> list[ast.Call]:
        """Statistics in a comparison without `samples=`, which are over layers."""
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and len(call.args) == 1]
        named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in _OF_BOTH]
        return [call for call in named if not call.keywords]

    _NODES: Mapping[type[ast.AST], Callable[[_Reader, Any, Read | None], Read]] = {
        ast.Name: _name,
        ast.Constant: _constant,
        ast.UnaryOp: _unary,
        ast.BinOp: _arithmetic,
        ast.BoolOp: _joined,
        ast.Compare: _compared,
        ast.Call: _call,
    }


_OF_BOTH = "mean", "median", "min", "max"
"""Statistics that are over time if they say of how many samples, else over layers."""
_FIRST = "value", "layers", "condition", "mask", "either"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

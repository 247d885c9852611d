"""Arguments of calls: what cannot be meant is said at once, before anything is asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from numbers import Integral
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, validate_call

from tsemon.errors import InvalidArgument
from tsemon_answers.record import Query

P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q", bound=Query)
A = TypeVar("A")
B = TypeVar("B")


def checked(call: Callable[P, T]) -> Callable[P, T]:
    """The call, which raises InvalidArgument where an argument is not of the type that its signature names."""
    signature = inspect.signature(call)
    validated = validate_call(config=ConfigDict(strict=True))(call)

    @functools.wraps(call)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(*args, **kwargs)  # TypeError for names that the call does not have, as of any function
        for name, value in given.arguments.items():
            given.arguments[name] = _plain(name, value)
        try:
            return validated(*given.args, **given.kwargs)
        except ValidationError as error:
            raise InvalidArgument(_told(error, list(signature.parameters))) from None

    return asked


class _Strict(Query):
    # Fields keep the descriptions of the query. Looking for others takes pydantic 70 ms per query at import.
    model_config = ConfigDict(strict=True, loc_by_alias=False, use_attribute_docstrings=False)


@overload
def made_of(query: Callable[P, Q], make: Callable[[Q], T]) -> Callable[P, T]: ...
@overload
def made_of(query: Callable[P, Q], make: Callable[[Q, A], T]) -> Callable[Concatenate[A, P], T]: ...
@overload
def made_of(query: Callable[P, Q], make: Callable[[Q, A, B], T]) -> Callable[Concatenate[A, B, P], T]: ...
def made_of(query: Any, make: Callable[..., T]) -> Callable[..., T]:
    """Let the fields of `query` be parameters: `make` gets a query, and any further arguments, which come first.

    The function that is returned raises InvalidArgument if an argument is not of its type. Its docstring is that of the
    query, with its fields.
    """
    _, *first = inspect.signature(make, eval_str=True).parameters.values()
    own = {one.name: (one.annotation, Field(exclude=True)) for one in first}
    model = create_model(query.__name__, __base__=(query, _Strict), **cast(Any, own))
    fields = {name: field for name, field in model.model_fields.items() if name not in own}
    named = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD if field.kw_only is False else Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.is_required() else field.default,
            annotation=field.annotation,
        )
        for name, field in fields.items()
    ]
    parameters = [*first, *sorted(named, key=lambda parameter: parameter.kind)]
    signature = inspect.Signature(parameters, return_annotation=make.__annotations__["return"])

    def asked(*args: Any, **kwargs: Any) -> T:
        given = signature.bind(*args, **kwargs).arguments
        try:
            whole = model.model_validate({name: _plain(name, value) for name, value in given.items()})
        except ValidationError as error:
            raise InvalidArgument(_told(error, list(given))) from None
        return make(whole, *(getattr(whole, name) for name in own))

    told = {name: " ".join((field.description or "").split()) for name, field in fields.items()}
    about = "".join(f"\n    {name}: {text}" for name, text in told.items())
    asked.__doc__ = f"{inspect.cleandoc(query.__doc__)}\n\nArgs:{about}"
    asked.__signature__ = signature  # type: ignore[attr-defined]
    return asked


def _plain(name: str, value: Any) -> Any:
    """NumPy's numbers, and what pandas and NumPy have for a list, as Python has them."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"{name}: expected Unicode text, got {value!r:.80}, which has half a character"
            ) from None
    elif isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    elif isinstance(value, Iterable) and not isinstance(value, bytes | Mapping | BaseModel):
        return [_plain(name, one) for one in value]
    return value


def _told(error: ValidationError, names: list[str]) -> str:
    said = error.errors()[0]
    place, value = said["loc"][0], said["input"]
    name = names[min(place, len(names) - 1)] if isinstance(place, int) else place
    if said["type"] in ("too_short", "too_long"):
        length, word = ("min_length", "least") if said["type"] == "too_short" else ("max_length", "most")
        number, given = said["ctx"][length], said["ctx"]["actual_length"] or "an empty list"
        return f"{name}: expected at {word} {number} item{'s' * (number > 1)}, got {given}"
    is_list = said["type"] in ("sequence_str", "is_instance_of")
    expected = "a list of texts" if is_list else said["msg"].removeprefix("Input should be ")
    hint = next((f"; pass its {field}" for field in ("alert_id", "run_id") if hasattr(value, field)), "")
    return f"{name}: expected {expected}, got {value!r:.80}{hint}"

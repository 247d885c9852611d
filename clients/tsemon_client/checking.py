"""Arguments of calls: what cannot be meant is said at once, before anything is asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, validate_call

from tsemon.errors import InvalidArgument

P = ParamSpec("P")
T = TypeVar("T")


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
    is_list = said["type"] in ("sequence_str", "is_instance_of")
    expected = "a list of texts" if is_list else said["msg"].removeprefix("Input should be ")
    hint = next((f"; pass its {field}" for field in ("alert_id", "run_id") if hasattr(value, field)), "")
    return f"{name}: expected {expected}, got {value!r:.80}{hint}"

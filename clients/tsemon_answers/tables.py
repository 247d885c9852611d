"""From records to tables of pandas, polars and pyarrow. Each package is imported where it is asked for."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tsemon.errors import MissingPackage

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


@dataclass(frozen=True)
class Column:
    """One column of a table, with its type also where it has no rows or nothing but None."""

    name: str
    kind: type
    """int, float, bool, str or datetime."""
    values: Sequence[Any]


class Table:
    """What has columns, and so can become a table of other packages."""

    def columns(self) -> list[Column]:
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas.DataFrame. Integers that may be missing are Int64, times datetime64 in UTC.

        Raises MissingPackage without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise _missing("to_pandas", "pandas", "pandas") from error
        dtypes = {float: "float64", bool: "bool", str: "object", datetime: "datetime64[us, UTC]"}
        return pandas.DataFrame(
            {
                column.name: pandas.Series(column.values, dtype=_int_dtype(column) or dtypes[column.kind])
                for column in self.columns()
            }
        )

    def to_polars(self) -> polars.DataFrame:
        """A polars.DataFrame. Raises MissingPackage without polars."""
        try:
            import polars
        except ImportError as error:
            raise _missing("to_polars", "polars", "polars") from error
        dtypes: dict[type, Any] = {
            int: polars.Int64,
            float: polars.Float64,
            bool: polars.Boolean,
            str: polars.String,
            datetime: polars.Datetime("us", "UTC"),
        }
        return polars.DataFrame(
            [polars.Series(column.name, column.values, dtype=dtypes[column.kind]) for column in self.columns()]
        )

    def to_arrow(self) -> pyarrow.Table:
        """A pyarrow.Table. Raises MissingPackage without pyarrow."""
        try:
            import pyarrow
        except ImportError as error:
            raise _missing("to_arrow", "pyarrow", "export") from error
        dtypes = {
            int: pyarrow.int64(),
            float: pyarrow.float64(),
            bool: pyarrow.bool_(),
            str: pyarrow.string(),
            datetime: pyarrow.timestamp("us", "UTC"),
        }
        columns = self.columns()
        return pyarrow.table({column.name: pyarrow.array(column.values, dtypes[column.kind]) for column in columns})


def columns_of(model: type[BaseModel], records: Iterable[BaseModel]) -> list[Column]:
    """A column per field of `model`. What is neither number, text nor time is JSON text."""
    rows = list(records)
    columns = []
    for name, field in model.model_fields.items():
        kind = _kind(field.annotation)
        values = [getattr(row, name) for row in rows]
        columns.append(Column(name, kind or str, values if kind else [_json(value) for value in values]))
    return columns


def _kind(annotation: Any) -> type | None:
    """The type of a column for fields of this type; None where there is none."""
    if get_origin(annotation) in (Union, types.UnionType):
        (kind,) = {_kind(part) for part in get_args(annotation) if part is not types.NoneType}
        return kind
    if get_origin(annotation) is Literal:
        return str
    return annotation if annotation in (int, float, bool, str, datetime) else None


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(to_jsonable_python(value), ensure_ascii=False)


def _int_dtype(column: Column) -> str | None:
    if column.kind is not int:
        return None
    return "Int64" if any(value is None for value in column.values) else "int64"


def _missing(method: str, package: str, extra: str) -> MissingPackage:
    return MissingPackage(f"{method} needs {package}; pip install 'tsemon[{extra}]'")

"""Rejects query parameters that a route does not declare."""

from __future__ import annotations

from inspect import isclass

from fastapi import Request
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InvalidArgument if the query has a parameter that the route does not declare.

    Without this check a misspelled filter has no effect: a loop that deletes what `GET /runs?projct=old` lists would
    delete the runs of every project.
    """
    if not request.scope["query_string"]:
        return
    known = query_parameters(request.scope["route"].dependant)
    for name in request.query_params:
        if name not in known:
            hint = nearest(name[:80], sorted(known)) if known else "none is allowed here"
            raise InvalidArgument(f"unknown parameter {name!r:.80}; {hint}")


def query_parameters(dependant: Dependant) -> set[str]:
    """Names of the query parameters of a route, including query models and dependencies."""
    names: set[str] = set()
    for field in dependant.query_params:
        model = field.field_info.annotation
        if isclass(model) and issubclass(model, BaseModel):
            names.update(about.alias or name for name, about in model.model_fields.items())
        else:
            names.add(field.alias)
    return names.union(*map(query_parameters, dependant.dependencies))

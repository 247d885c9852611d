"""What an answer of the service means: a record, an error of its own class, or that it is worth asking again."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from tsemon import errors
from tsemon_client.asking import Request

T = TypeVar("T", bound=BaseModel)  # what an answer is read as

ERRORS: dict[str, type[errors.TsemonError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TsemonError) and kind is not errors.TsemonError
}

FOR_A_WHILE = (429, 502, 503, 504)
"""The service, or a proxy before it, cannot answer now."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
"""A service that wants to be left alone for longer is not waited for."""


class Patience:
    """Says how long to wait before the same is asked again, and when to stop."""

    def __init__(self, retries: int) -> None:
        self._left = retries
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, request: Request[Any], outcome: httpx.Response | httpx.RequestError) -> float | None:
        """None where that was the answer: it is one, or a refusal, or enough was tried."""
        if isinstance(outcome, httpx.Response) and outcome.status_code not in FOR_A_WHILE:
            return None
        if not self._left or not request.is_idempotent:
            return None
        asked_s = retry_after_s(outcome) if isinstance(outcome, httpx.Response) else None
        if asked_s is not None and asked_s > LONGEST_PAUSE_S:
            return None
        self._left -= 1
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # so that many clients do not come back at once
        self._pause_s *= 2
        return pause_s + (asked_s or 0.0)


def retry_after_s(response: httpx.Response) -> float | None:
    """What Retry-After says, in seconds; None where it says nothing, or a date."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def accept(url: str, outcome: httpx.Response | httpx.RequestError) -> httpx.Response:
    """The answer. Raises what it says where that is an error; its text must have been read then."""
    if isinstance(outcome, httpx.RequestError):
        raise ours(url, outcome) from outcome
    if outcome.is_success:
        return outcome
    try:
        said = outcome.json()
        code, text = str(said["error"]), str(said["detail"])
    except (ValueError, TypeError, KeyError) as error:
        raise not_ours(url, outcome) from error
    kind = ERRORS.get(code, errors.ServerRefused)
    if issubclass(kind, errors.Busy):
        raise kind(text, retry_after_s=retry_after_s(outcome) or 1.0)
    raise kind(text)


def read(url: str, model: type[T], response: httpx.Response, context: object) -> T:
    """An answer as a `model`; records remember the context. No content is a record without fields."""
    try:
        return model.model_validate_json(response.content or b"{}", context=context)
    except ValidationError as error:
        raise not_ours(url, response) from error


def check_stream(url: str, response: httpx.Response) -> None:
    """Raise ServerUnreachable where the answer is no stream of events, but some page."""
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        raise not_ours(url, response)


def ours(url: str, error: Exception) -> Exception:
    """The same as an error of tsemon."""
    if not isinstance(error, httpx.RequestError):
        return error
    why = str(error) or type(error).__name__
    return errors.ServerUnreachable(f"no answer from {url}: {why}; is `tsemon serve` running?")


def not_ours(url: str, response: httpx.Response) -> errors.ServerUnreachable:
    where = response.headers.get("Location")
    points = f" and points to {where}" if where else ""
    return errors.ServerUnreachable(
        f"{url} answered {response.status_code}{points}, and not what was asked; is it a tsemon service of this version?"
    )

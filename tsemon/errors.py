"""Every error that a caller of tsemon may want to handle.

The text of an error says what was expected, what came, and what to do next. `code` is the word that the service puts on
the wire, `status` the HTTP status that goes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Word = TypeVar("Word", bound=str)


class TsemonError(Exception):
    """Root of all errors that tsemon raises on purpose."""

    code = "error"
    """A class that names none has its own name in snake case: `UnknownRun` is `unknown_run`."""
    status = 500

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class InvalidArgument(TsemonError, ValueError):
    """An argument is of the wrong kind or out of its range."""

    status = 422


class ShapeError(InvalidArgument):
    """A tensor or array has other axes than the measure, or the run, needs."""

    code = "wrong_shape"


class MissingPackage(TsemonError, ImportError):
    """Something that tsemon does not need by itself, and this call does, is not installed."""

    status = 501


class MissingData(TsemonError, FileNotFoundError):
    """A data set, a file of it or a checkpoint is not where it was looked for."""


class MissingDevice(TsemonError, RuntimeError):
    """Something needs a device, such as a GPU, that this machine does not have."""


class InvalidFrame(InvalidArgument):
    """A frame or a body of frames that the wire format does not allow."""


class InvalidRules(InvalidArgument):
    """A rule, or a file of rules, that says something which rules cannot say."""


class InvalidRange(InvalidArgument):
    """A range of steps that ends before it starts."""


class InvalidDocument(InvalidArgument):
    """A YAML document that cannot be read, or that says what is not allowed; the text names the line."""


class InvalidRecording(InvalidArgument):
    """A file that is no recorded run, or not one that can be read to its end."""


class NoBlocksFound(InvalidArgument):
    """The model holds nothing that looks like a stack of transformer blocks."""


class UnknownRun(TsemonError, LookupError):
    """No run has this id."""

    status = 404


class UnknownAttempt(TsemonError, LookupError):
    """The run has no attempt of this number."""

    status = 404


class UnknownFrame(TsemonError, LookupError):
    """The run, or this attempt of it, has no frame."""

    status = 404


class UnknownMetric(TsemonError, LookupError):
    """Neither the catalogue nor the run knows this metric."""

    status = 404


class UnknownLayer(TsemonError, LookupError):
    """The metric has no such layer, or no such head."""

    status = 404


class UnknownAlert(TsemonError, LookupError):
    """No alert has this id."""

    status = 404


class UnknownIncident(TsemonError, LookupError):
    """No incident has this id."""

    status = 404


class UnknownSilence(TsemonError, LookupError):
    """No silence has this id."""

    status = 404


class UnknownRule(TsemonError, LookupError):
    """No rule has this name."""

    status = 404


class Unauthorized(TsemonError):
    """The service needs a token, and none came that it knows."""

    status = 401


class Forbidden(TsemonError):
    """The token is not for this."""

    status = 403


class WrongAlertState(TsemonError):
    """The alert is not in a state in which this can be done to it."""

    status = 409


class RunNotLive(TsemonError):
    """The run has ended, or its process is silent."""

    status = 409


class BodyTooLarge(TsemonError):
    """A request's body is over the service's limit."""

    status = 413


class LimitReached(TsemonError):
    """The service has as many things of a kind as it takes; nothing is wrong with this one."""

    status = 409


class NameInUse(TsemonError):
    """A live process sends to the run of this name, and `on_conflict` is "refuse"."""

    status = 409


class Busy(TsemonError):
    """The service has too much under way; the same request will do later."""

    status = 503

    def __init__(self, text: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class TooManyRequests(Busy):
    """Whoever asks has asked too often."""

    status = 429


class TooSlow(TsemonError):
    """What was to come did not come in time."""

    status = 408


class UnsupportedEncoding(TsemonError):
    """A request's body is compressed in a way that the service does not read."""

    status = 415


class StoreError(TsemonError):
    """The database cannot be opened, read or written."""

    code = "store_unavailable"
    status = 503


class SpoolError(TsemonError, OSError):
    """The spool folder cannot be made, read or written."""

    code = "spool_unavailable"


class SpoolInUse(SpoolError):
    """The spool belongs to a living process."""


class CheckpointError(TsemonError, OSError):
    """The folder of checkpoints cannot be made or written, or belongs to a living process."""

    code = "checkpoint_unavailable"


class ServerUnreachable(TsemonError, ConnectionError):
    """No answer from the service; what is spooled is kept and sent again."""

    retry_after_s: float | None = None
    """How long the service asked to be left alone, where it did."""


UNANSWERED = (ServerUnreachable, Busy, StoreError)
"""Of whoever asks a service: there is no answer now, and the same question may have one later."""


class ServerRefused(TsemonError):
    """The service answered, and will not take this request however often it is sent."""


class RanksDisagree(TsemonError):
    """The processes that train one model together do not attach in the same way, or one of them could not."""


def reason(error: BaseException) -> str:
    """The first sentence of another library's error: what follows is often advice that does not fit."""
    return re.split(r"\n|\. ", str(error))[0].strip() or type(error).__name__


def one_of(words: Iterable[Word], given: str | None, what: str) -> Word | None:
    """Return the given word, or None if none is given. Raises InvalidArgument if it is not one of `words`."""
    known = {str(word): word for word in words}
    if given is not None and given not in known:
        raise InvalidArgument(f"{what} must be one of {', '.join(known)}, got {given!r:.80}")
    return None if given is None else known[given]


@contextmanager
def needing(text: str) -> Iterator[None]:
    """Raises MissingPackage with this text, and why, where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"{text} ({error})") from error

"""Who is told of which alerts, as a YAML file says it: receivers, and routes to them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic import ValidationInfo as Info

from tsemon.errors import InvalidArgument, InvalidDocument
from tsemon_answers.alerts import Alert
from tsemon_server.durations import seconds_of
from tsemon_server.store.ledger.notices import Plan
from tsemon_server.yaml_lines import LineOf, parse, written

SEVERITIES = ("info", "warning", "critical")

Severity = Literal["info", "warning", "critical"]
Label = Literal["project", "run", "rule", "family", "severity"]


def _resolved(value: Any, info: Info) -> Any:
    """What `env:NAME` or `file:PATH` stands for; a relative path is taken from the folder of the configuration."""
    if not isinstance(value, str) or info.context is None:
        return value
    if value.startswith("env:"):
        name = value.removeprefix("env:")
        found = info.context["environment"].get(name)
        if not found:
            raise ValueError(f"expected the environment variable {name} to be set, it is not")
        return found
    if value.startswith("file:"):
        path = info.context["folder"] / value.removeprefix("file:")
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a text file at {path}: {getattr(error, 'strerror', error)}") from error
    return value


def _web_address(value: SecretStr) -> SecretStr:
    _check_address(value.get_secret_value())
    return value


def _check_address(url: str) -> None:
    """Raise ValueError, which does not show it, unless it is one without credentials: those would show in many places."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not (is_good and "@" not in parts.netloc and url.isascii() and url.isprintable()):
        raise ValueError("expected a URL that starts with http:// or https://, without user or password in it")


def _one_line(value: SecretStr) -> SecretStr:
    if not (value.get_secret_value().isascii() and value.get_secret_value().isprintable()):
        raise ValueError("expected ASCII text on one line")
    return value


def _span(value: Any) -> Any:
    if value == "0s":
        return 0.0
    try:
        return seconds_of(value) if isinstance(value, str) else value
    except InvalidArgument as error:
        raise ValueError(str(error)) from error


def _mail_address(value: str) -> str:
    if not re.fullmatch(r"[^@\s<>,;\"]+@[^@\s<>,;\"]+", value):
        raise ValueError("expected an address such as pager@example.org")
    return value


def _some_route(value: Any) -> Any:
    if value == []:
        raise ValueError("expected a route, there is none; leave `routes` out to tell all receivers, or name one")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _without_slash(value: str) -> str:
    _check_address(value)
    return value.rstrip("/")


Secret = Annotated[SecretStr, BeforeValidator(_resolved), AfterValidator(_one_line)]
WebAddress = Annotated[SecretStr, BeforeValidator(_resolved), AfterValidator(_web_address)]
MailAddress = Annotated[str, AfterValidator(_mail_address)]
Span = Annotated[float, BeforeValidator(_span), Field(ge=0, le=30 * 86_400)]
LongSpan = Annotated[float | None, BeforeValidator(_span), Field(ge=60)]
Words = Annotated[list[str], BeforeValidator(_listed), Field(min_length=1, max_length=100)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


class _Receiver(_Part):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}$")]
    """What routes and the log call it."""
    allow_private: bool = False
    """Whether it may be at a private or local address."""
    max_per_minute: Annotated[int, Field(ge=1, le=600)] = 6
    """So many messages at most; what is over that goes together in the last of them."""


class Webhook(_Receiver):
    """Gets JSON about each message."""

    type: Literal["webhook"]
    url: WebAddress
    """Where to."""
    secret: Secret | None = None
    """The key of the signature in the header X-Tsemon-Signature."""
    authorization: Secret | None = None
    """The header Authorization, as in `Bearer ...`."""


class Slack(_Receiver):
    """A channel of Slack."""

    type: Literal["slack"]
    url: WebAddress | None = None
    """Its incoming webhook."""
    token: Secret | None = None
    """Token of a bot that is in the channel. Without `url`: the messages on an incident are one thread."""
    channel: Annotated[str, Field(pattern=r"^\S{1,80}$")] | None = None
    """ID or name of the channel that the bot sends to."""
    api_url: Annotated[str, AfterValidator(_without_slash)] = "https://slack.com/api"
    """Base URL of Slack's Web API for the bot."""


class Discord(_Receiver):
    """A channel of Discord."""

    type: Literal["discord"]
    url: WebAddress
    """Its webhook."""
    forum: bool = False
    """True if the channel is a forum: the messages on an incident are one post of it."""


class Email(_Receiver):
    """People, by mail."""

    type: Literal["email"]
    host: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9.:_-]+$")]
    """The SMTP server."""
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Its port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """How it is encrypted: after a greeting in the open (587), from the start (465), or not at all (25)."""
    user: Secret | None = None
    """Whom to log in as."""
    password: Secret | None = None
    """With which password."""
    sender: Annotated[MailAddress, Field(alias="from")]
    """From whom it comes."""
    to: Annotated[list[MailAddress], BeforeValidator(_listed), Field(min_length=1, max_length=50)]
    """To whom it goes."""


class Alertmanager(_Receiver):
    """An Alertmanager, which groups and routes by itself: it hears of each alert at once, and again while it fires."""

    type: Literal["alertmanager"]
    url: WebAddress
    """Its base URL."""
    authorization: Secret | None = None
    """The header Authorization, as in `Bearer ...`."""
    labels: dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], str] = {}
    """Further labels of all alerts."""
    told_every: Annotated[float, BeforeValidator(_span), Field(ge=1, le=600)] = 60.0
    """How often it is told again of what fires. What it does not hear of for five times as long is over for it."""
    max_per_minute: Annotated[int, Field(ge=1, le=600)] = 60

    @property
    def forgets_after(self) -> timedelta:
        """Some minutes are left for a service that starts anew."""
        return timedelta(seconds=5 * self.told_every)


Receiver = Annotated[Webhook | Slack | Discord | Email | Alertmanager, Field(discriminator="type")]


class _Grouping(_Part):
    group_by: Annotated[list[Label] | None, BeforeValidator(_listed)] = None
    """What alerts have in common that go in one message."""
    group_wait: Span | None = None
    """How long to wait for more of them."""
    group_interval: Span | None = None
    """How long after one message the next of the same group comes at the earliest."""
    repeat_interval: LongSpan = None
    """How often to say that something still fires."""
    recovery_wait: Span | None = None
    """How long an incident must stay recovered before the receivers get a message about it."""


class Route(_Grouping):
    """Which alerts go to whom."""

    receivers: Words
    """Names of receivers."""
    project: Words | None = None
    """Only alerts of these projects; `*` and `?` stand for anything,"""
    run: Words | None = None
    """of runs with these names,"""
    family: Words | None = None
    """of these families,"""
    rule: Words | None = None
    """of these rules,"""
    severity: Severity = "warning"
    """and at least so bad."""
    continue_: Annotated[bool, Field(alias="continue")] = False
    """Whether the routes that follow are looked at, too."""

    def takes(self, alert: Alert) -> bool:
        is_bad_enough = SEVERITIES.index(alert.severity) >= SEVERITIES.index(self.severity)
        return is_bad_enough and all(
            patterns is None or any(fnmatchcase(getattr(alert, name), pattern) for pattern in patterns)
            for name, patterns in (
                ("project", self.project), ("run", self.run), ("family", self.family), ("rule", self.rule)
            )
        )  # fmt: skip


class Configuration(_Grouping):
    """All that the file says. Groupings here are for routes that say nothing else."""

    base_url: Annotated[str | None, AfterValidator(lambda value: value and _without_slash(value))] = None
    """The address of the service as the people who are told can reach it, for links."""
    give_up_after: Annotated[float, BeforeValidator(_span), Field(ge=60, le=30 * 86_400)] = 86_400.0
    """How long a message is tried that does not get through."""
    receivers: Annotated[list[Receiver], Field(min_length=1, max_length=100)]
    """Who can be told."""
    routes: Annotated[Annotated[list[Route], Field(max_length=1000)] | None, BeforeValidator(_some_route)] = None
    """Who is told of what: the first route that takes an alert. Without any, all are told of warnings and worse."""
    group_by: Annotated[list[Label], BeforeValidator(_listed)] = ["project", "run"]
    group_wait: Span = 10.0
    group_interval: Span = 60.0
    recovery_wait: Span = 300.0

    def plans(self, alert: Alert) -> list[Plan]:
        """Who is told of the alert, each receiver once."""
        found: dict[str, Plan] = {}
        everybody = Route(receivers=[receiver.name for receiver in self.receivers])
        for route in [everybody] if self.routes is None else self.routes:
            if route.takes(alert):
                for name in route.receivers:
                    found.setdefault(name, self._plan(self.receiver(name), route, alert))
                if not route.continue_:
                    break
        return list(found.values())

    def receiver(self, name: str) -> Receiver:
        return next(receiver for receiver in self.receivers if receiver.name == name)

    def _plan(self, receiver: Receiver, route: Route, alert: Alert) -> Plan:
        if isinstance(receiver, Alertmanager):
            return Plan(receiver.name, "", 0.0, 0.0, receiver.told_every)
        group_by = self.group_by if route.group_by is None else route.group_by
        topic = " ".join(f"{label}={getattr(alert, label)}" for label in group_by)
        wait_s = self.group_wait if route.group_wait is None else route.group_wait
        interval_s = self.group_interval if route.group_interval is None else route.group_interval
        repeat_s = self.repeat_interval if route.repeat_interval is None else route.repeat_interval
        recovery_wait_s = self.recovery_wait if route.recovery_wait is None else route.recovery_wait
        return Plan(receiver.name, topic, wait_s, interval_s, repeat_s, recovery_wait_s)


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Configuration:
    """The configuration in the file. Raises InvalidDocument, which names the line and what stands there."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(
            f"expected a YAML file with receivers, {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    data, line_of = parse(text, str(path))
    if not isinstance(data, dict):
        came = "nothing" if data is None else "a list" if isinstance(data, list) else "one word or number"
        raise _problem(str(path), line_of, (), f"expected settings such as `receivers:`, got {came}")
    try:
        context = {"folder": path.parent, "environment": environment}
        configuration = Configuration.model_validate(data, context=context)
    except ValidationError as error:
        raise _first_problem(error, data, line_of, str(path)) from None  # it may quote what is secret
    _check_names(configuration, line_of, str(path))
    return configuration


def _check_names(configuration: Configuration, line_of: LineOf, origin: str) -> None:
    """Names are of one receiver each, and known; a password does not go in the open."""
    seen: set[str] = set()
    for place, receiver in enumerate(configuration.receivers):
        path: tuple[str | int, ...] = ("receivers", place, "name")
        if receiver.name in seen:
            raise _problem(origin, line_of, path, f"expected a name of its own, {receiver.name!r} is taken")
        seen.add(receiver.name)
        if isinstance(receiver, Email) and (receiver.user is None) != (receiver.password is None):
            raise _problem(origin, line_of, path[:2], "expected a user and a password, got one of them")
        if isinstance(receiver, Email) and receiver.user is not None and receiver.security == "none":
            raise _problem(origin, line_of, (*path[:2], "security"), "expected tls or starttls, for a password is sent")
        if isinstance(receiver, Slack):
            given = [name for name in ("url", "token", "channel") if getattr(receiver, name) is not None]
            if given not in (["url"], ["token", "channel"]):
                came = " and ".join(given) or "none of them"
                what = f"expected `url`, or `token` and `channel`, got {came}; give the URL of an incoming webhook, or "
                raise _problem(origin, line_of, path[:2], what + "the token of a bot and the channel that it sends to")
    for place, route in enumerate(configuration.routes or []):
        for unknown in (name for name in route.receivers if name not in seen):
            known = ", ".join(sorted(seen))
            path = ("routes", place, "receivers")
            raise _problem(origin, line_of, path, f"expected one of the receivers {known}, got {unknown!r}")


def _first_problem(error: ValidationError, data: Any, line_of: LineOf, origin: str) -> InvalidDocument:
    problem = error.errors(include_input=False, include_url=False)[0]
    path = _path_in(data, problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _problem(origin, line_of, path, "no such setting; docs/notifications.md lists those there are")
    if problem["type"] in _IN_PLAIN_WORDS:
        return _problem(origin, line_of, path, _IN_PLAIN_WORDS[problem["type"]].format(**problem.get("ctx", {})))
    return _problem(origin, line_of, path, problem["msg"].removeprefix("Value error, "))


_IN_PLAIN_WORDS = {
    "missing": "expected a value, there is none",
    "too_short": "expected at least one, there is none",
    "union_tag_not_found": "expected a `type`, one of 'webhook', 'slack', 'discord', 'email', 'alertmanager'",
    "union_tag_invalid": "expected as `type` one of {expected_tags}, got {tag!r}",
    "model_type": "expected settings such as `name: value`, got something else",
    "model_attributes_type": "expected settings such as `name: value`, got something else",
    "dict_type": "expected settings such as `name: value`, got something else",
    "list_type": "expected a list, got something else",
}
"""What to say of a kind of mistake, where the library's own words are about the program and not about the file."""


def _path_in(data: Any, location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Where that is in the file: pydantic puts the type of a receiver in between."""
    path: list[str | int] = []
    for place, part in enumerate(location):
        is_there = (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int))
        if is_there:
            data = data[part]
        if is_there or (place == len(location) - 1 and isinstance(data, dict)):
            path.append(part)
    return tuple(path)


def _problem(origin: str, line_of: LineOf, path: Sequence[str | int], what: str) -> InvalidDocument:
    where = f" {written(tuple(path))}" if path else ""
    return InvalidDocument(f"{origin} line {line_of(tuple(path))}:{where}: {what}".replace(":: ", ": "))

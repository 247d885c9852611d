"""What can be set about the service."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tsemon.errors import InvalidArgument, one_of
from tsemon_server.limits.values import Limits, limits_from
from tsemon_server.logs import LOG_FORMATS, LOG_LEVELS, LogFormat, LogLevel

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """What /metrics shows of runs."""

    layers: tuple[str, ...] = ("token_diversity", "attention_entropy", "hidden_rms", "grad_norm")
    """Metrics that are shown layer by layer; `*` is all of them. All have their least, mean and largest value shown."""
    max_runs: int = 200
    """Live runs that are shown: the youngest."""
    max_scalars: int = 64
    """Scalars of a run that are shown, and as many metrics that have layers."""
    max_series: int = 100_000
    """Series of all runs together."""
    cache_s: float = 1.0
    """How many seconds the same values are given to whoever asks."""
    grace_s: int = 60
    """How long an ended run stays after its last update: two scrapes at least, so that its end is seen."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the service runs."""

    host: str = "127.0.0.1"
    """The address to listen on. At any but a loopback address a token is needed, unless `insecure`."""
    port: int = 8731
    """The TCP port to listen on; 0 takes any free one."""
    database: str = "sqlite:///tsemon.db"
    """The database URL; a relative path is taken from the working directory."""
    spool: str | None = None
    """A spool folder, as `attach` wrote it, to show read-only in place of a database."""
    workers: int = 1
    """How many processes answer, on one port and one database."""
    log_format: LogFormat = "auto"
    """How the log on stderr is written: json, text, or auto, which is text on a terminal and JSON elsewhere."""
    log_level: LogLevel = "info"
    """From which level on; at debug the log tells of frames, heartbeats and probes, too, that went well."""
    notify: str | None = None
    """A YAML file that says who is told of alerts; without one nobody is."""
    metrics: MetricsSettings = MetricsSettings()
    """What Prometheus gets to see."""
    tokens: bool = False
    """Whether a token is needed at a loopback address, too: behind a proxy, say."""
    hosts: tuple[str, ...] = ()
    """The names by which browsers and programs reach the service, besides its address; with tokens any, if none."""
    insecure: bool = False
    """Whether anyone who reaches the port may read and write everything, without a token and from any host name."""
    limits: Limits = field(default_factory=Limits)
    """What is taken of anyone, by each process."""


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the variables that begin with TSEMON_ and go on with the name of the setting.

    TSEMON_TOKENS is 1 or 0, TSEMON_HOSTS and TSEMON_METRICS_LAYERS have commas between names, TSEMON_LIMIT_ goes on with
    the name of a limit; there is none for `insecure`.
    """
    if "TSEMON_DATABASE" in environment and "TSEMON_SPOOL" in environment:
        raise InvalidArgument(
            "expected TSEMON_DATABASE or TSEMON_SPOOL, got both; a spool folder is shown without a database, unset one"
        )
    tokens = environment.get("TSEMON_TOKENS", "0")
    if tokens not in ("0", "1"):
        raise InvalidArgument(f"TSEMON_TOKENS must be 1, for tokens at a loopback address too, or 0, got {tokens!r}")
    return Settings(
        host=environment.get("TSEMON_HOST", Settings.host),
        port=_number(environment, "TSEMON_PORT", Settings.port, most=65535),
        database=environment.get("TSEMON_DATABASE", Settings.database),
        spool=environment.get("TSEMON_SPOOL"),
        workers=_number(environment, "TSEMON_WORKERS", Settings.workers, least=1, most=MAX_WORKERS),
        log_format=one_of(LOG_FORMATS, environment.get("TSEMON_LOG_FORMAT"), "TSEMON_LOG_FORMAT")
        or Settings.log_format,
        log_level=one_of(LOG_LEVELS, environment.get("TSEMON_LOG_LEVEL"), "TSEMON_LOG_LEVEL") or Settings.log_level,
        notify=environment.get("TSEMON_NOTIFY"),
        metrics=_metrics(environment),
        tokens=tokens == "1",
        hosts=host_names(environment.get("TSEMON_HOSTS", "").split(",")),
        limits=limits_from(environment),
    )


def _metrics(environment: Mapping[str, str]) -> MetricsSettings:
    default = MetricsSettings()
    layers = environment.get("TSEMON_METRICS_LAYERS", ",".join(default.layers)).split(",")
    return MetricsSettings(
        layers=tuple(name.strip() for name in layers if name.strip()),
        max_runs=_number(environment, "TSEMON_METRICS_MAX_RUNS", default.max_runs),
        max_scalars=_number(environment, "TSEMON_METRICS_MAX_SCALARS", default.max_scalars),
        max_series=_number(environment, "TSEMON_METRICS_MAX_SERIES", default.max_series),
        grace_s=_number(environment, "TSEMON_METRICS_GRACE_S", default.grace_s),
    )


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    number = environment.get(name, str(default))
    if not number.isdecimal() or int(number) < least or (most is not None and int(number) > most):
        bounds = f"from {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{name} must be a number {bounds}, got {number!r}")
    return int(number)


def host_names(given: Iterable[str]) -> tuple[str, ...]:
    """Names as a Host header has them, without a port. Raises InvalidArgument."""
    names = tuple(name.strip().lower() for name in given if name.strip())
    for name in names:
        if not re.fullmatch(r"[a-z0-9.-]+|\[[0-9a-f:.]+\]", name):
            raise InvalidArgument(
                f"expected a host name such as tsemon.example.org, without port or scheme, got {name!r:.80}"
            )
    return names

"""How the service itself does. Needs Prometheus alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import BigValueTextMode
from grafana_foundation_sdk.models.dashboard import Panel

from tsemon_dashboards.panels import THIRD, dashboard, figure, lines
from tsemon_dashboards.queries import now, over_time

PER = "[$__rate_interval]"
TEXT = BigValueTextMode.NAME
SHARES = {"half of them": "0.5", "95 %": "0.95", "99 %": "0.99"}

chart = partial(lines, width=THIRD)
"""Lines over time, three charts in a row."""


def health() -> builders.Dashboard:
    return dashboard(
        "tsemon-server",
        "tsemon / server",
        "What the service takes, how fast, and what it had to leave out.",
        panels(),
        span="now-1h",
    )


def panels() -> Iterator[Builder[Panel]]:
    yield figure("Services up", now('sum(up{job="tsemon"}) or vector(0)'), about="Of those that Prometheus scrapes.")
    yield figure("Version", now("max by (version) (tsemon_build_info)", "{{version}}")).text_mode(TEXT)
    yield figure("Frames per second", now(f'sum(rate(tsemon_frames_total{{outcome="accepted"}}{PER}))'))
    left_out = now("sum(tsemon_exposition_left_out) or vector(0)")
    yield figure("Left out of /metrics", left_out, bad_from=1, about="Runs, series or scalars beyond the caps.")

    frames = over_time(f"sum by (outcome) (rate(tsemon_frames_total{PER}))", "{{outcome}}")
    yield chart("Frames", frames, unit="cps")
    yield chart("A body of frames, from its last byte to its commit", *latencies("tsemon_ingest_seconds"), unit="s")
    yield chart("Rules on a frame", *latencies("tsemon_rule_evaluation_seconds"), unit="s")
    by_status = over_time(f"sum by (status) (rate(tsemon_http_requests_total{PER}))", "{{status}}")
    yield chart("Requests, by status", by_status, unit="reqps")
    by_route = over_time(f"sum by (method, route) (rate(tsemon_http_requests_total{PER}))", "{{method}} {{route}}")
    yield chart("Requests, by route", by_route, unit="reqps")
    longest = over_time(quantile("0.95", "tsemon_http_request_seconds", "le, route"), "{{route}}")
    yield chart("Requests: 95 % take at most", longest, unit="s")
    yield chart(
        "Frames that have not settled",
        over_time("max(tsemon_unsettled_frames)", "frames"),
        about="Some hundred of each run never are. A line that rises: housekeeping does not keep up.",
    )
    yield chart("Lag of housekeeping", over_time("max(tsemon_settling_lag_seconds)", "lag"), unit="s")
    yield chart("Queues", over_time("sum by (queue) (tsemon_queue_depth)", "{{queue}}"), about="What waits.")
    yield chart(
        "Trouble, per hour",
        over_time("sum(increase(tsemon_refused_bodies_total[1h]))", "bodies that were refused", "A"),
        over_time("sum(increase(tsemon_rule_errors_total[1h]))", "frames that the rules failed on", "B"),
    )
    messages = "sum by (receiver, outcome) (increase(tsemon_notifications_total[1h]))"
    yield chart("Notifications, per hour", over_time(messages, "{{receiver}}: {{outcome}}"))
    scrapes = over_time('max by (instance) (scrape_duration_seconds{job="tsemon"})', "{{instance}}")
    yield chart("A scrape of /metrics", scrapes, unit="s")


def quantile(share: str, histogram: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket{PER})))"


def latencies(histogram: str) -> list[prometheus.Dataquery]:
    return [
        over_time(quantile(share, histogram), legend, letter)
        for letter, (legend, share) in zip("ABC", SHARES.items(), strict=True)
    ]

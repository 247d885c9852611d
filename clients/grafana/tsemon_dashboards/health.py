"""How the service itself does. Needs Prometheus alone."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models.common import BigValueTextMode

from tsemon_dashboards.panels import THIRD, dashboard, figure, lines
from tsemon_dashboards.queries import now, over_time

PER = "[$__rate_interval]"
TEXT = BigValueTextMode.NAME
SHARES = {"half of them": "0.5", "95 %": "0.95", "99 %": "0.99"}


def health() -> builders.Dashboard:
    return (
        dashboard(
            "tsemon-server",
            "tsemon / server",
            "What the service takes, how fast, and what it had to leave out.",
            span="now-1h",
        )
        .with_panel(
            figure("Services up", now('sum(up{job="tsemon"}) or vector(0)'), about="Of those that Prometheus scrapes.")
        )
        .with_panel(figure("Version", now("max by (version) (tsemon_build_info)", "{{version}}")).text_mode(TEXT))
        .with_panel(figure("Frames per second", now(f'sum(rate(tsemon_frames_total{{outcome="accepted"}}{PER}))')))
        .with_panel(
            figure(
                "Left out of /metrics",
                now("sum(tsemon_exposition_left_out) or vector(0)"),
                bad_from=1,
                about="Runs, series or scalars beyond the caps.",
            )
        )
        .with_panel(
            lines(
                "Frames",
                [over_time(f"sum by (outcome) (rate(tsemon_frames_total{PER}))", "{{outcome}}")],
                unit="cps",
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "A body of frames, from its last byte to its commit",
                latencies("tsemon_ingest_seconds"),
                unit="s",
                width=THIRD,
            )
        )
        .with_panel(lines("Rules on a frame", latencies("tsemon_rule_evaluation_seconds"), unit="s", width=THIRD))
        .with_panel(
            lines(
                "Requests, by status",
                [over_time(f"sum by (status) (rate(tsemon_http_requests_total{PER}))", "{{status}}")],
                unit="reqps",
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Requests, by route",
                [over_time(f"sum by (method, route) (rate(tsemon_http_requests_total{PER}))", "{{method}} {{route}}")],
                unit="reqps",
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Requests: 95 % take at most",
                [over_time(quantile("0.95", "tsemon_http_request_seconds", "le, route"), "{{route}}")],
                unit="s",
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Frames that have not settled",
                [over_time("max(tsemon_unsettled_frames)", "frames")],
                about="Some hundred of each run never are. A line that rises: housekeeping does not keep up.",
                width=THIRD,
            )
        )
        .with_panel(
            lines("Lag of housekeeping", [over_time("max(tsemon_settling_lag_seconds)", "lag")], unit="s", width=THIRD)
        )
        .with_panel(
            lines(
                "Queues",
                [over_time("sum by (queue) (tsemon_queue_depth)", "{{queue}}")],
                about="What waits.",
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Trouble, per hour",
                [
                    over_time("sum(increase(tsemon_refused_bodies_total[1h]))", "bodies that were refused", "A"),
                    over_time("sum(increase(tsemon_rule_errors_total[1h]))", "frames that the rules failed on", "B"),
                ],
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Notifications, per hour",
                [
                    over_time(
                        "sum by (receiver, outcome) (increase(tsemon_notifications_total[1h]))",
                        "{{receiver}}: {{outcome}}",
                    )
                ],
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "A scrape of /metrics",
                [over_time('max by (instance) (scrape_duration_seconds{job="tsemon"})', "{{instance}}")],
                unit="s",
                width=THIRD,
            )
        )
    )


def quantile(share: str, histogram: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket{PER})))"


def latencies(histogram: str) -> list[prometheus.Dataquery]:
    return [
        over_time(quantile(share, histogram), legend, letter)
        for letter, (legend, share) in zip("ABC", SHARES.items(), strict=True)
    ]

"""Alert rules for Grafana's own alerting, on the metrics themselves: no recording rule is needed.

The bounds are those of clients/prometheus/rules. Whoever alerts from Prometheus and Alertmanager needs none of these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from grafana_foundation_sdk.builders import alerting, expr
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.common import DataSourceRef

from tsemon_dashboards.queries import PROMETHEUS, named, now

EXPRESSION = DataSourceRef(type_val="__expr__", uid="__expr__")
WINDOW_S = 600
"""How far back a query may look; ours are instant."""
RUN = "{{ .Labels.project }}/{{ .Labels.run }}"
"""Not `$labels`: Grafana puts variables of the environment into what it is provisioned with; there is none of that name."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Fires per series of `expr` whose value is above `above`, once that was so for `for_`."""

    name: str
    uid: str
    expr: str
    above: float = 0.0
    for_: str
    severity: Literal["warning", "critical"] | None
    """None where the series brings its own."""
    family: str | None
    summary: str
    description: str
    no_data: Literal["OK", "Alerting"] = "OK"
    """Series vanish when runs end, so nothing is fine."""


ESCALATES = """
(
  max by (run_id) (tsemon_layers_token_diversity_last) <= 5e-4
  and on (run_id) max by (run_id) (tsemon_layers_token_diversity_last / tsemon_layers_token_diversity_max) < 0.1
  and on (run_id) max by (run_id) (tsemon_layers_centred_token_similarity_last) >= 0.5
)
or max by (run_id) (tsemon_layers_token_diversity_last) <= 1e-6
"""
COLLAPSES = """
min by (run_id) (tsemon_layers_attention_entropy_min_min) < 0.12
and on (run_id) max by (run_id) (tsemon_layers_max_attention_logit_max) > 70
"""
NOT_FINITE = (
    "tsemon_layers_nonfinite_max > 0 or tsemon_run_loss_nonfinite > 0 or tsemon_run_loss - tsemon_run_loss != 0"
)
SILENT_S = "time() - max by (run_id) (tsemon_run_last_seen_timestamp_seconds)"
STUCK_S = (
    "max by (run_id) (tsemon_run_last_seen_timestamp_seconds) - max by (run_id) (tsemon_run_stepped_timestamp_seconds)"
)
FIRING = (
    "max by (run_id, rule, family, severity) (tsemon_alert_firing) "
    "* on (run_id) group_left (project, run) max by (run_id, project, run) (tsemon_run_info)"
)
UNHEARD = (
    'sum by (receiver) (rate(tsemon_notifications_total{outcome="failed"}[15m])) '
    'unless on (receiver) sum by (receiver) (rate(tsemon_notifications_total{outcome="sent"}[15m])) > 0'
)
"""Tries per second to reach whom none reached."""


def is_met(condition: str) -> str:
    """1 for each run that meets the condition, whatever values it compares."""
    return named(f"count by (run_id) ({' '.join(condition.split())})", project="")


ALERTS = (
    Alert(
        name="TsemonTokenSimilarityEscalation",
        uid="tsemon-escalation",
        expr=is_met(ESCALATES),
        for_="2m",
        severity="critical",
        family="tse",
        summary=f"Tokens become the same over depth in {RUN}",
        description="The last block keeps less than a tenth of what tells tokens apart in the model before it. Take a "
        "share of the token mean away at the end of each block, or normalise at the input of each sublayer.",
    ),
    Alert(
        name="TsemonEntropyCollapse",
        uid="tsemon-entropy",
        expr=is_met(COLLAPSES),
        for_="2m",
        severity="critical",
        family="entropy",
        summary=f"An attention head looks at one token each in {RUN}",
        description="Its entropy is under 0.12 of that of uniform attention, and logits are above 70. Normalise queries "
        "and keys, lower the peak learning rate, or go back to a checkpoint from before.",
    ),
    Alert(
        name="TsemonNonFinite",
        uid="tsemon-nonfinite",
        expr=is_met(NOT_FINITE),
        for_="0s",
        severity="critical",
        family="diverge",
        summary=f"The loss or a hidden state is not finite in {RUN}",
        description="Go back to the last checkpoint with finite weights; lower the learning rate, clip the gradient, and "
        "look at the batch.",
    ),
    Alert(
        name="TsemonRunStalled",
        uid="tsemon-stalled",
        expr=named(f"({STUCK_S}) and on (run_id) ({SILENT_S} < 300)", project=""),
        above=900,
        for_="1m",
        severity="warning",
        family="liveness",
        summary=f"{RUN} lives, and has made no step for {{{{ humanizeDuration .Values.A.Value }}}}",
        description="Look for a collective that waits for another rank, a loader that waits for its workers, or a full "
        "disk.",
    ),
    Alert(
        name="TsemonRunSilent",
        uid="tsemon-silent",
        expr=named(SILENT_S, project=""),
        above=300,
        for_="2m",
        severity="warning",
        family="liveness",
        summary=f"Nothing was heard of {RUN} for {{{{ humanizeDuration .Values.A.Value }}}}",
        description="Not a frame, not a heartbeat: the process may be gone, or cut off from the service. Frames that it "
        "could not send are in its spool folder.",
    ),
    Alert(
        name="TsemonDown",
        uid="tsemon-down",
        expr='1 - up{job="tsemon"}',
        for_="1m",
        severity="critical",
        family="service",
        summary="The service at {{ .Labels.instance }} does not answer Prometheus",
        description="Nobody watches the runs. Frames wait in the spools of the training processes. Should /metrics answer "
        "401 or 403, the token is wrong or revoked.",
        no_data="Alerting",
    ),
    Alert(
        name="TsemonLeftOut",
        uid="tsemon-left-out",
        expr='max(tsemon_exposition_left_out{what="runs"})',
        for_="2m",
        severity="warning",
        family="service",
        summary="Prometheus does not see {{ .Values.A.Value }} of the live runs",
        description="More runs are live than TSEMON_METRICS_MAX_RUNS lets on /metrics. Alerts of those that are left out "
        "are over here, whatever becomes of them; the service's own rules go on. Raise the limit, or see who starts so "
        "many.",
    ),
    Alert(
        name="TsemonNotificationsFail",
        uid="tsemon-notifications",
        expr=UNHEARD,
        for_="5m",
        severity="warning",
        family="service",
        summary="The service does not reach the receiver {{ .Labels.receiver }}",
        description="Each message to it failed in the last quarter of an hour, so nobody hears there of what the service's "
        "own rules say. Its log says why.",
    ),
    Alert(
        name="TsemonAlertFiring",
        uid="tsemon-firing",
        expr=FIRING,
        for_="0s",
        severity=None,
        family=None,
        summary=f"{{{{ .Labels.rule }}}} fires in {RUN}",
        description="One of tsemon's own rules, which see every frame: the dashboard of the run has what it saw, and what "
        "to try.",
    ),
)


def rules() -> dict[str, Any]:
    """The file of rules: one group, looked at every minute."""
    group = {
        "orgId": 1,
        "name": "tsemon",
        "folder": "tsemon",
        "interval": "1m",
        "rules": [in_a_file(built(alert)) for alert in ALERTS],
    }
    return {"apiVersion": 1, "groups": [group]}


def built(alert: Alert) -> alerting.Rule:
    shown = "/d/tsemon-server" if alert.family == "service" else "/d/tsemon-run?var-run={{ .Labels.run_id }}"
    labels = {"severity": alert.severity, "family": alert.family}
    return (
        alerting.Rule(alert.name)
        .uid(alert.uid)
        .folder_uid("tsemon")
        .rule_group("tsemon")
        .org_id(1)
        .condition("B")
        .with_query(
            alerting.Query("A")
            .datasource_uid(str(PROMETHEUS.uid))
            .relative_time_range(RelativeTimeRange(from_val=WINDOW_S, to=0))
            .model(now(alert.expr))
        )
        .with_query(
            alerting.Query("B")
            .datasource_uid(str(EXPRESSION.uid))
            .relative_time_range(RelativeTimeRange(from_val=WINDOW_S, to=0))
            .model(is_above("A", alert.above))
        )
        .for_val(alert.for_)
        .no_data_state(alert.no_data)
        .exec_err_state("Error")
        .labels({name: value for name, value in labels.items() if value is not None})
        .annotations({"summary": alert.summary, "description": alert.description, "dashboard": shown})
    )


def is_above(ref_id: str, bound: float) -> expr.TypeThreshold:
    evaluator = expr.ExprTypeThresholdConditionsEvaluator().type("gt").params([bound])
    condition = expr.ExprTypeThresholdConditions().evaluator(evaluator)
    return expr.TypeThreshold().ref_id("B").datasource(EXPRESSION).expression(ref_id).conditions([condition])


PLACE = ("folderUID", "ruleGroup", "orgID", "id")
"""Where a rule is. A file says that once, of the group."""


def in_a_file(rule: alerting.Rule) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(rule.build(), cls=JSONEncoder))
    return {key: value for key, value in told.items() if key not in PLACE}

"""The alerts on the recorded trainings, a frame a minute: which they call, and that they call no healthy one."""

import math
import shutil
import subprocess

import numpy as np
import pytest
import yaml
from traces import read_all

from .test_rules import CLIENTS

SHOWN = {
    "layers": {
        "token_diversity": ("last", "max"),
        "centred_token_similarity": ("last",),
        "attention_entropy_min": ("min",),
        "max_attention_logit": ("max",),
        "nonfinite": ("max",),
    },
    "scalars": ("loss", "loss_nonfinite"),
}
"""What the rules read of a frame."""
CALLED = {
    "TsemonTokenSimilarityEscalation": {
        *("digits-post-norm-s0", "text-post-norm-s0", "tse_lm16-s0", "tse_lm24-s0", "tse_vit24-s0", "tse_vit36-s0"),
        *("tse_post6_lr-s0", "tse_post6_warm-s0", "rank_attn-s0"),
        *("g_post12-s0", "g_vit16_post-s0"),
    },
    "TsemonEntropyCollapse": {
        *("ent_lr1e-1-s0", "ent_lr3e-2-s0", "ent_qk20-s0", "ent_qk8-s0", "ent_qkmul-s0", "ent_warm-s0"),
        *("div_lr-s0", "div_lr_noclip-s0", "norm_wdneg-s0", "norm_wdneg1-s0", "tse_pre_lr-s0"),
    },
    "TsemonNonFinite": {"div_nan-s0", "div_sgd-s0"},
}


def shown(trace, view):
    """What /metrics says of a frame; without what is not measured."""
    found = {f'tsemon_run_info{{run_id="{trace.name}", project="recorded", run="{trace.name}"}}': 1.0}
    for name in SHOWN["scalars"]:
        if name in view.scalars:
            loss = view.scalars[name]
            found[f'tsemon_run_{name}{{run_id="{trace.name}"}}'] = loss if math.isfinite(loss) else math.inf
    for name, kinds in SHOWN["layers"].items():
        values = np.asarray(view.layers.get(name, []), float)
        for kind in kinds if np.isfinite(values).any() else ():
            value = {
                "last": values[-1:].mean,
                "max": values[np.isfinite(values)].max,
                "min": values[np.isfinite(values)].min,
            }[kind]
            found[f'tsemon_layers_{name}_{kind}{{run_id="{trace.name}"}}'] = value()
    return {series: value for series, value in found.items() if not math.isnan(value)}


def series_of(trace):
    """(series, values) as promtool reads them, which knows no NaN; the run leaves after its last frame."""
    frames = [shown(trace, view) for view in trace.views]
    for series in sorted(set().union(*frames)):
        values = [frame.get(series) for frame in frames]
        written = ["_" if value is None else "Inf" if math.isinf(value) else repr(float(value)) for value in values]
        yield series, " ".join([*written, "stale"])


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed; scripts/system_parts.py does it where it can"
)
def test_call_those_that_fail_so_and_no_healthy_one(tmp_path):
    traces = read_all()
    healthy = {trace.name for trace in traces if trace.is_healthy}
    assert len(healthy) == 38
    assert healthy.isdisjoint(set().union(*CALLED.values()))
    about = {
        "rule_files": [str(path) for path in sorted((CLIENTS / "rules").glob("*.yml"))],
        "group_eval_order": ["tsemon-runs", "tsemon-alerts"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values} for trace in traces for series, values in series_of(trace)
                ],
                "promql_expr_test": [
                    {
                        "expr": f'group by (run_id) (last_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[4h]))',
                        "eval_time": "4h",
                        "exp_samples": [{"labels": f'{{run_id="{name}"}}', "value": 1} for name in sorted(names)],
                    }
                    for alert, names in CALLED.items()
                ],
            }
        ],
    }
    (tmp_path / "recorded.test.yml").write_text(yaml.safe_dump(about))
    command = ["promtool", "test", "rules", tmp_path / "recorded.test.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

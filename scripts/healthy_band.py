"""Write clients/tsemon_answers/healthy.json: the range of token diversity over depth in healthy recorded runs.

    python scripts/healthy_band.py

The range covers all runs at 11 depths, from 0 (the input of the first block) to 1 (the last output). Each run counts with
the 5th to 95th percentile of its samples after the first 10 % of its steps. The web UI draws the range as a green band;
notebooks, `tsemon tail` and the Grafana dashboards also read it.

Axes: S samples, L layers, D relative depths.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
FILE, TRACES = ROOT / "clients/tsemon_answers/healthy.json", ROOT / "tests/data/traces"
METRIC = "token_diversity"
DEPTHS = np.linspace(0, 1, 11)
EDGES = (np.min, 5), (np.max, 95)
WARM_UP = 0.1


def band(folder: Path = TRACES) -> dict[str, Any]:
    """The content of the file."""
    runs = [depths_SD for path in sorted(folder.glob("*.jsonl.gz")) if (depths_SD := _healthy_logs(path)) is not None]
    low_D, high_D = (edge([np.percentile(run_SD, of, axis=0) for run_SD in runs], axis=0) for edge, of in EDGES)
    return {METRIC: {"runs": len(runs), "low": _rounded(low_D), "high": _rounded(high_D)}}


def _healthy_logs(path: Path) -> NDArray[np.float64] | None:
    """Log10 of the metric in samples of a run, at each depth; None unless the run is healthy and has the metric."""
    with gzip.open(path, "rt") as lines:
        header, *entries = (json.loads(line) for line in lines)
    frames = [entry for entry in entries if entry["t"] == "frame" and METRIC in entry["layers"]]
    if header["failing"] or header["gray"] or not frames:
        return None
    warm = [frame for frame in frames if frame["step"] >= WARM_UP * frames[-1]["step"]]
    logs_SL = np.log10([frame["layers"][METRIC] for frame in warm])
    layers = np.linspace(0, 1, logs_SL.shape[1])
    return np.array([np.interp(DEPTHS, layers, logs_L) for logs_L in logs_SL])


def _rounded(logs_D: NDArray[np.float64]) -> list[float]:
    return [float(f"{10**log:.3g}") for log in logs_D]


def text() -> str:
    return json.dumps(band()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

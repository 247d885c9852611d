"""Every open case of the independent float64 oracle, for the measures that there are, in both dtypes."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tsemon import measures as m

CASES = json.loads((Path(__file__).parents[2] / "data/vectors.json").read_text())["cases"]
CALLS = {
    "tokens": {
        "token_similarity": lambda x: m.token_similarity(x["X"]),
        "token_diversity": lambda x: m.token_diversity(x["X"]),
        "cosine_similarity": lambda x: m.cosine_similarity(x["X"]),
        "cosine_similarity_skip_zero": lambda x: m.cosine_similarity(x["X"], skip_zero=True),
        "de_escalated_tau_0.4": lambda x: m.deescalate(x["X"], tau=0.4),
        "de_escalated_tau_1": lambda x: m.deescalate(x["X"], tau=1.0),
        "token_similarity_after_tau_0.4": lambda x: m.token_similarity(m.deescalate(x["X"], tau=0.4)),
        "token_similarity_after_tau_1.0": lambda x: m.token_similarity(m.deescalate(x["X"], tau=1.0)),
    },
    "attention": {"row_entropy": lambda x: m.row_entropy(x["A"])},
    "params": {
        "norm": lambda x: torch.stack([m.param_norm(t) for t in x["thetas"]]),
        "step_size": lambda x: torch.stack([m.step_size(a, b) for a, b in pairwise(x["thetas"])]),
        "alignment": lambda x: torch.stack([m.alignment(a, b) for a, b in pairwise(x["thetas"])]),
    },
}


def as_tensor(value, dtype):
    """Nested lists as a tensor; "nan", "inf", "-inf" and null are floats too."""
    if isinstance(value, list):
        return [as_tensor(v, dtype) for v in value]
    return math.nan if value is None else float(value) if isinstance(value, str) else value


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("case", "quantity"),
    [
        pytest.param(case, quantity, id=f"{case['id']}-{quantity}")
        for case in CASES
        for quantity in case["expected"]
        if quantity in CALLS.get(case["kind"], {})
    ],
)
def test_measure_agrees_with_the_oracle(case, quantity, dtype):
    inputs = {k: torch.tensor(as_tensor(v, dtype), dtype=getattr(torch, dtype)) for k, v in case["inputs"].items()}
    got = CALLS[case["kind"]][quantity](inputs).double()
    want = torch.tensor(as_tensor(case["expected"][quantity], dtype), dtype=torch.float64)
    rtol, atol = case["tol_by"].get(quantity, case["tol"])[dtype]
    torch.testing.assert_close(got, want.expand_as(got), rtol=rtol, atol=atol, equal_nan=True)

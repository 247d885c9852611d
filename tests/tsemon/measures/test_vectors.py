"""Every open case of the independent float64 oracle, in both dtypes."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tsemon import measures as m

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared/vectors/vectors.json"
CASES = json.loads((SHARED if SHARED.exists() else ROOT / "tests/data/vectors.json").read_text())["cases"]
LATER = {"value_residual"}  # attention outputs of reference models, no measures


def per_pair(measure):
    return lambda x: torch.stack([measure(a, b) for a, b in pairwise(x["thetas"])])


def rate(measure):
    return lambda x: measure(x["X"], x["P"], alpha=x["alpha"])


def head_mean(values, x):
    return values.mean(-1) if x["P"].ndim > x["X"].ndim else values


def fields(value, names):
    return {name: getattr(value, name) for name in names}


CALLS = {
    "tokens": {
        "token_similarity": lambda x: m.token_similarity(x["X"]),
        "token_diversity": lambda x: m.token_diversity(x["X"]),
        "cosine_similarity": lambda x: m.cosine_similarity(x["X"]),
        "cosine_similarity_skip_zero": lambda x: m.cosine_similarity(x["X"], skip_zero=True),
        "hfc_lfc_frobenius": lambda x: m.hfc_lfc(x["X"], norm="frobenius"),
        "hfc_lfc_spectral": lambda x: m.hfc_lfc(x["X"], norm="spectral"),
        "effective_rank": lambda x: m.effective_rank(x["X"]),
        "de_escalated_tau_0.4": lambda x: m.deescalate(x["X"], tau=0.4),
        "de_escalated_tau_1": lambda x: m.deescalate(x["X"], tau=1.0),
        "token_similarity_after_tau_0.4": lambda x: m.token_similarity(m.deescalate(x["X"], tau=0.4)),
        "token_similarity_after_tau_1.0": lambda x: m.token_similarity(m.deescalate(x["X"], tau=1.0)),
    },
    "update": {
        "escalation_rate": lambda x: m.escalation_rate(x["X"], x["Y"]),
        "xi_1": lambda x: m.xi(x["X"], x["Y"])[0],
        "xi_2": lambda x: m.xi(x["X"], x["Y"])[1],
        "mu_1_sq_bar": lambda x: m.mu_squared(x["X"], x["P"])[0],
        "mu_2_sq_bar": lambda x: m.mu_squared(x["X"], x["P"])[1],
        "omega_mean": lambda x: head_mean(m.omega(x["X"], x["P"]), x),
        "delta_mean": lambda x: head_mean(m.delta(x["P"]), x),
        "lambda2_mean": lambda x: head_mean(m.second_eigenvalue(x["P"]), x),
        "expected_rate": rate(m.expected_rate),
        "estimate1_rate": rate(m.estimate1_rate),
        "estimate2_rate": rate(m.estimate2_rate),
        "token_similarity_X": lambda x: m.token_similarity(x["X"]),
        "token_similarity_Y": lambda x: m.token_similarity(x["Y"]),
    },
    "attention": {
        "row_entropy": lambda x: m.row_entropy(x["A"]),
        "importance": lambda x: m.importance(x["A"]),
        "importance_entropy": lambda x: m.importance_entropy(x["A"]),
        "first_token_importance": lambda x: m.first_token_importance(x["A"]),
        "positions_attended": lambda x: m.positions_attended(x["A"]),
        "delta": lambda x: m.delta(x["A"]),
        "lambda2": lambda x: m.second_eigenvalue(x["A"]),
    },
    "saturated_attention": {
        "A": lambda x: m.saturated_attention(x["scores"], causal=x["causal"]),
        "positions_attended": lambda x: m.positions_attended(m.saturated_attention(x["scores"], causal=x["causal"])),
    },
    "eigen": {
        "type": lambda x: fields(
            m.dominating_eigenvalue(x["A"], x["H"]), ("kind", "modulus", "lambda_1", "spectrum_is_real")
        )
    },
    "values": {
        "spectrum": lambda x: m.value_spectrum(x["V"]),
        "first_value_norm_ratio": lambda x: m.first_value_norm_ratio(x["V"]),
    },
    "params": {
        "norm": lambda x: torch.stack([m.param_norm(t) for t in x["thetas"]]),
        "step_size": per_pair(m.step_size),
        "alignment": per_pair(m.alignment),
        "checkpoint_cosine": per_pair(m.checkpoint_cosine),
    },
    "fit": {
        "sqrt_fit": lambda x: fields(m.sqrt_fit(x["t"], x["norm"]), ("slope", "intercept", "r2")),
        "power_law_of_growth": lambda x: fields(
            m.power_law_fit(x["t"], x["norm"] - x["norm"][0]), ("exponent", "log_c", "r2")
        ),
    },
    "saturation": {"saturation": lambda x: m.saturation(x["F"], x["Fc"])},
}
ORACLE_NAMES = {"lambda_1": "lambda_1_A", "spectrum_is_real": "A_spectrum_real"}


def numbers(value):
    """Nested lists of floats; "nan", "inf", "-inf" and null are floats too."""
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return math.nan if value is None else float(value)


def as_input(value, dtype):
    return torch.tensor(numbers(value), dtype=dtype) if isinstance(value, list) else value


def assert_agrees(got, want, rtol, atol):
    if isinstance(got, dict):
        for name, value in got.items():
            assert_agrees(value, want[ORACLE_NAMES.get(name, name)], rtol, atol)
    elif isinstance(got, str):
        assert got == want
    else:
        want = torch.tensor(numbers(want), dtype=torch.float64)
        torch.testing.assert_close(got.double(), want.expand_as(got), rtol=rtol, atol=atol, equal_nan=True)


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
    inputs = {name: as_input(value, getattr(torch, dtype)) for name, value in case["inputs"].items()}
    rtol, atol = case["tol_by"].get(quantity, case["tol"])[dtype]
    assert_agrees(CALLS[case["kind"]][quantity](inputs), case["expected"][quantity], rtol, atol)


def test_no_quantity_of_the_oracle_is_left_out():
    asked = {(case["kind"], quantity) for case in CASES if case["kind"] not in LATER for quantity in case["expected"]}
    assert asked - {(kind, quantity) for kind, calls in CALLS.items() for quantity in calls} == set()
    assert len(CASES) >= 69

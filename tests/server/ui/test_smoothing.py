"""What a page says of metrics that tell whether a block smooths or sharpens."""

import pytest
from playwright.sync_api import expect

from tsemon.wire import Array, Frame

from .conftest import START_S

VALUES = {
    "residual_hfc_lfc_ratio": ([0.9, 0.8, 1.2, 0.7], "Here attention smooths in 3 of 4 blocks (below 1)."),
    "feedforward_hfc_lfc_ratio": (
        [1.1, 1.2, 1.3, float("nan")],
        "Here the feed-forward part sharpens in 3 of 3 blocks (above 1).",
    ),
    "norm_hfc_lfc_ratio": ([1.0, 1.0, 1.1, 1.2], "Here the norms sharpen in 2 of 4 blocks (above 1)."),
    "value_output_growth": (
        [3.0, 2.0, 2.0, 0.5],
        "Here the weights of attention smooth in 3 of 4 blocks (above 1).",
    ),
    "value_output_negative_share": (
        [0.4, 0.45, 0.6, 0.3],
        "Here the weights of attention mostly smooth in 3 of 4 blocks (below 0.5).",
    ),
}


@pytest.fixture
def run_id(service):
    run_id = service.register("gpt")
    layers = {name: Array.of(values) for name, (values, _) in VALUES.items()} | {"grad_norm": Array.of([1.0] * 4)}
    service.send(run_id, *(Frame(step, step, START_S + step, {"loss": 1.0}, layers) for step in range(3)))
    return run_id


@pytest.mark.parametrize("metric", VALUES)
def test_a_profile_says_what_most_blocks_do(page, run_id, metric):
    page.goto(f"/#/run/{run_id}?metric={metric}")
    expect(page.get_by_text(VALUES[metric][1])).to_be_visible()


def test_another_profile_says_nothing(page, run_id):
    page.goto(f"/#/run/{run_id}?metric=grad_norm")
    expect(page.get_by_role("heading", name="grad_norm at step 2")).to_be_visible()
    expect(page.get_by_text("Here ")).to_be_hidden()

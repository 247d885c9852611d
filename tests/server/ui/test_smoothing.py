"""What a page says of metrics that tell whether a block smooths or sharpens."""

import pytest
from playwright.sync_api import expect

from tsemon.wire import Array, Frame

from .conftest import START_S

NAN = float("nan")
VALUES = {
    "residual_hfc_lfc_ratio": [0.9, 0.8, 1.2, 0.99],
    "feedforward_hfc_lfc_ratio": [1.1, 1.2, 0.9, NAN],
    "norm1_hfc_lfc_ratio": [1.0, 1.0, 1.01, 1.0],
    "norm2_hfc_lfc_ratio": [0.5, 1.0, 1.01, 1.0],
    "value_output_growth": [3.0, 0.5, 0.5, 1.05],
}
SENTENCES = {
    "residual_hfc_lfc_ratio": "Here attention smooths in 2 and sharpens in 1 of 4 blocks. "
    "Its weights (value_output_growth) alone would do the same in 2 of these 3.",
    "feedforward_hfc_lfc_ratio": "Here the feed-forward part smooths in 1 and sharpens in 2 of 3 blocks.",
    "norm1_hfc_lfc_ratio": "Here attention's norm smooths in 0 and sharpens in 0 of 4 blocks.",
    "norm2_hfc_lfc_ratio": "Here the feed-forward part's norm smooths in 1 and sharpens in 0 of 4 blocks.",
    "value_output_growth": "Here the weights of attention smooth in 1 and sharpen in 2 of 4 blocks.",
}


def send(service, metrics):
    run_id = service.register("gpt")
    layers = {name: Array.of(VALUES[name]) for name in metrics} | {"grad_norm": Array.of([1.0] * 4)}
    service.send(run_id, *(Frame(step, step, START_S + step, {"loss": 1.0}, layers) for step in range(3)))
    return run_id


@pytest.mark.parametrize("metric", VALUES)
def test_a_profile_says_what_the_blocks_do(page, service, metric):
    page.goto(f"/#/run/{send(service, VALUES)}?metric={metric}")
    expect(page.get_by_text(SENTENCES[metric])).to_be_visible()


def test_a_profile_says_nothing_of_weights_that_were_not_measured(page, service):
    page.goto(f"/#/run/{send(service, ['residual_hfc_lfc_ratio'])}?metric=residual_hfc_lfc_ratio")
    expect(page.get_by_text("Here attention smooths in 2 and sharpens in 1 of 4 blocks.", exact=True)).to_be_visible()


def test_a_profile_says_at_which_other_step_the_weights_were_measured(page, service):
    run_id = service.register("gpt")
    effect, growth = (Array.of(VALUES[name]) for name in ("residual_hfc_lfc_ratio", "value_output_growth"))
    both = {"residual_hfc_lfc_ratio": effect, "value_output_growth": growth}
    frames = (Frame(0, 0, START_S, {}, both), Frame(1, 10, START_S + 1, {}, {"residual_hfc_lfc_ratio": effect}))
    service.send(run_id, *frames)
    page.goto(f"/#/run/{run_id}?metric=residual_hfc_lfc_ratio")
    expect(page.get_by_text("Its weights (value_output_growth at step 0) alone")).to_be_visible()


def test_another_profile_says_nothing(page, service):
    page.goto(f"/#/run/{send(service, VALUES)}?metric=grad_norm")
    expect(page.get_by_role("heading", name="grad_norm at step 2")).to_be_visible()
    expect(page.get_by_text("Here ")).to_be_hidden()

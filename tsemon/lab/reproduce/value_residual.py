"""The value rules of Value Residual Learning in small: models of 0.5M parameters, on bytes."""

from __future__ import annotations

from tsemon.catalogue import VALUES
from tsemon.lab.reproduce.result import Experiment, Result
from tsemon.lab.reproduce.value_residual_page import result
from tsemon.lab.reproduce.value_rules import LAMBDAS, Sizes, train_all
from tsemon.lab.train.text import standard_library_text

EXPERIMENT = Experiment(
    name="value-residual",
    title="Whose values attention mixes",
    source=f"{VALUES}, Figures 1, 2, 7, 8, 10, 12 and 20",
)
BYTES = {"vocab": 257, "context": 128, "depth": 8, "width": 64, "heads": 4, "ffn": 224}
FULL = Sizes(model=BYTES, steps=1000, short_rules=(*LAMBDAS, "resformer-learned", "cross-layer"), short_steps=300)
QUICK = Sizes(
    model=BYTES,
    rules=("vanilla", "resformer", "svformer", "neutreno"),
    steps=110,
    warmup=20,
    learning_rate=2e-3,
    window=20,
)


def run(quick: bool) -> Result:
    sizes = QUICK if quick else FULL
    trained = train_all(sizes, standard_library_text(6_000_000))
    return result(trained, sizes, data="the first 6 MB of the Python standard library's sources, as bytes")

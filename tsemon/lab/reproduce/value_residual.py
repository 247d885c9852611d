"""The value rules of Value Residual Learning in small: models of 0.5M and 1.9M parameters, on bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tsemon.catalogue import VALUES
from tsemon.lab.reproduce.result import Experiment, Numbers, Result, Trial
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.lab.reproduce.value_residual_page import result as page
from tsemon.lab.reproduce.value_rules import Runs, Sizes, Trained, train
from tsemon.lab.train.text import standard_library_text

EXPERIMENT = Experiment(
    name="value-residual",
    title="Whose values attention mixes",
    source=f"{VALUES}, Figures 1, 2, 7, 8, 10, 12 and 20",
)
BYTES = {"vocab": 257, "context": 128, "depth": 8, "width": 64, "heads": 4, "ffn": 224}
FULL = Sizes(
    model=BYTES,
    rules=("vanilla", "resformer", "svformer", "neutreno", "denseformer", "lambda 1"),
    steps=1000,
    short_rules=("lambda 2", "lambda 3", "resformer-learned", "cross-layer"),
    short_steps=300,
    seeds=range(3),
)
WIDER = Sizes(model=BYTES | {"width": 128, "ffn": 448}, rules=("vanilla", "resformer"), steps=600, seeds=range(3))
QUICK = Sizes(
    model=BYTES,
    rules=("vanilla", "resformer", "svformer", "neutreno", "lambda 1"),
    steps=110,
    warmup=20,
    learning_rate=2e-3,
    window=20,
)


def trials(quick: bool, seed: int) -> dict[str, Trial]:
    return {_key(*one): partial(trained, *one) for one in _trainings(quick, seed)}


def result(quick: bool, seed: int, found: Mapping[str, Numbers]) -> Result:
    (first, trained), *others = (
        (
            sizes,
            Runs(
                [{rule: Trained.of(found[_key(sizes, rule, seed)]) for rule in sizes.steps_of} for seed in sizes.seeds]
            ),
        )
        for sizes in _sizes(quick, seed)
    )
    data = "the first 6 MB of the Python standard library's sources, as bytes"
    return page(trained, first, data=data, others=others)


def _sizes(quick: bool, seed: int) -> list[Sizes]:
    every = [QUICK] if quick else [FULL, WIDER]
    return [replace(sizes, seeds=seeds_of(seed, len(sizes.seeds))) for sizes in every]


def _trainings(quick: bool, first: int) -> Iterator[tuple[Sizes, str, int]]:
    """The longest ones first."""
    for sizes in reversed(_sizes(quick, first)):
        for seed in sizes.seeds:
            for rule in sizes.steps_of:
                yield sizes, rule, seed


def _key(sizes: Sizes, rule: str, seed: int) -> str:
    return f"{rule}, width {sizes.model['width']}, seed {seed}"


def trained(sizes: Sizes, rule: str, seed: int) -> Numbers:
    return train(rule, seed, sizes, standard_library_text(6_000_000)).numbers()

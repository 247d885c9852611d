"""What `attach` tells the service about a run. Checked here, so that the service never has to refuse it for ever."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from tsemon.catalogue import TIERS, Tier, nearest
from tsemon.errors import InvalidArgument, UnknownMetric
from tsemon.quantity import Quantity
from tsemon.stacks import Stacks
from tsemon.wire import (
    MAX_BLOCK_NAME,
    MAX_BLOCKS,
    MAX_CONFIG_BYTES,
    MAX_QUANTITIES,
    MAX_STACKS,
    MAX_STEP,
    MAX_TAGS,
    NAME,
    OnConflict,
)


def registration(
    *,
    project: str,
    run: str,
    config: Mapping[str, Any] | None,
    tags: Any,
    blocks: list[str],
    stacks: Stacks,
    frozen_blocks: list[int],
    resume: int | None,
    quantities: Sequence[Quantity] = (),
    on_conflict: OnConflict = "new",
) -> dict[str, Any]:
    """The body of `POST /runs`. Raises InvalidArgument for what the service would not take."""
    tags = collection("tags", tags)
    for name, text in (("run", run), ("project", project), *(("each of tags", tag) for tag in tags)):
        if not _is_name(text):
            raise InvalidArgument(
                f"{name} is a name of 1 to 128 characters, none of them a control character, got {text!r:.200}"
            )
    if len(tags) > MAX_TAGS:
        raise InvalidArgument(f"a run has at most {MAX_TAGS} tags, got {len(tags)}")
    if len(blocks) > MAX_BLOCKS or any(len(name) > MAX_BLOCK_NAME for name in blocks):
        raise InvalidArgument(
            f"a run has at most {MAX_BLOCKS} blocks with names of at most {MAX_BLOCK_NAME} characters"
        )
    if len(stacks.each) > MAX_STACKS:
        raise InvalidArgument(
            f"a run has at most {MAX_STACKS} stacks of blocks, and the model has {len(stacks.each)}: {stacks}. Name the "
            "blocks of some of them in blocks="
        )
    if len(stacks.each) > 1 and not all(_is_name(stack.name) for stack in stacks.each):
        raise InvalidArgument(f"the name of a stack has 1 to 128 characters on one line, got {stacks}")
    if resume is not None and not _is_step(resume):
        raise InvalidArgument(f"resume is the step at which training goes on, expected an int >= 0, got {resume!r}")
    if on_conflict not in get_args(OnConflict):
        raise InvalidArgument(f'on_conflict is "new", "take_over" or "refuse", got {on_conflict!r:.100}')
    return {
        "project": project,
        "run": run,
        "on_conflict": "take_over" if on_conflict == "new" and resume is not None else on_conflict,
        "config": _as_json(config),
        "tags": list(tags),
        "blocks": blocks,
        "frozen_blocks": frozen_blocks,
        "resume_step": resume,
        "attempt_key": uuid.uuid4().hex,
        # An older server rejects these keys, so they are left out when they say nothing.
        **({"stacks": [stack._asdict() for stack in stacks.each]} if len(stacks.each) > 1 else {}),
        **({"quantities": [quantity.described() for quantity in quantities]} if quantities else {}),
    }


def step_of_state(state: object, *, project: str, run: str) -> int:
    """The step in what `Monitor.state_dict` returned. Raises InvalidArgument for anything else, and for another run's."""
    if not isinstance(state, Mapping) or not {"project", "run", "step"} <= {*state}:
        kind = f"the keys {sorted(map(str, state))}" if isinstance(state, Mapping) else type(state).__name__
        raise InvalidArgument(f"load_state_dict() takes what state_dict() of a monitor returned, got {kind}")
    step = state["step"]
    if not _is_step(step):
        raise InvalidArgument(f"the step in the state of a monitor is an int >= 0, got {step!r}")
    if (of := (state["project"], state["run"])) != (project, run):
        raise InvalidArgument(
            f"the state is of the run {of[1]!r} of project {of[0]!r}, this one is {run!r} of {project!r}; attach under that "
            f"name, or begin a new run from this checkpoint: attach(..., resume={step})"
        )
    return int(step)


class Chosen(NamedTuple):
    """The metrics to measure."""

    names: frozenset[str]
    quantities: tuple[Quantity, ...]

    @property
    def tiers(self) -> dict[str, Tier]:
        """The tier of each metric."""
        own: dict[str, Tier] = {quantity.name: quantity.tier for quantity in self.quantities}
        return {name: own.get(name) or TIERS[name] for name in self.names}

    def in_words(self) -> list[str]:
        """The same on all ranks that measure the same. Functions cannot be compared."""
        own = [f"{q.name} of={q.of} axis={q.axis} merge={q.merge} tier={q.tier}" for q in self.quantities]
        return sorted([*self.names, *own])


DEFAULT = "default"
"""Stands for all metrics of the catalogue except those on demand."""


def chosen_measures(measures: Collection[str | Quantity] | None) -> Chosen:
    """Metrics by name, and quantities of the user's own. Raises UnknownMetric and InvalidArgument.

    If no metric is named, these are all metrics of the catalogue except those on demand. "default" names the same.
    """
    given = [] if measures is None else collection("measures", measures)
    quantities = [each for each in given if isinstance(each, Quantity)]
    named = [each for each in given if not isinstance(each, Quantity)]
    for name in named:
        if not isinstance(name, str) or (name != DEFAULT and name not in TIERS):
            raise UnknownMetric(
                f"measures= names {name!r}, which is not in the catalogue; {nearest(str(name), [DEFAULT, *TIERS])}"
            )
    if twice := [name for name, count in Counter(quantity.name for quantity in quantities).items() if count > 1]:
        raise InvalidArgument(f"measures= has two quantities named {twice[0]!r}; give each a name of its own")
    if len(quantities) > MAX_QUANTITIES:
        raise InvalidArgument(f"measures= has at most {MAX_QUANTITIES} quantities, got {len(quantities)}")
    names = {*named} - {DEFAULT}
    if DEFAULT in named or (not named and (measures is None or quantities)):
        names |= {name for name, tier in TIERS.items() if tier != "demand"}
    return Chosen(frozenset(names | {quantity.name for quantity in quantities}), tuple(quantities))


def chosen_rows(attention_rows: object) -> int | Literal["all"]:
    """How many query rows of attention to weigh. Raises InvalidArgument."""
    if attention_rows == "all":
        return "all"
    if not isinstance(attention_rows, int) or isinstance(attention_rows, bool) or attention_rows < 1:
        raise InvalidArgument(
            "attention_rows is how many query rows of attention are weighed per head, expected an int of at least 1 or "
            f"'all', got {attention_rows!r}"
        )
    return attention_rows


def check_arguments(model: object, stage: object, *, has_group: bool) -> None:
    """Raises InvalidArgument for what `attach` cannot use."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"attach() watches a torch.nn.Module, got {type(model).__name__}")
    if stage is not None and (not has_group or isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise InvalidArgument(
            f"stage is this rank's place in a pipeline, an int >= 0 with process_group=, got {stage!r}"
        )


def as_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, several or None as a list. Raises InvalidArgument."""
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            what = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
            raise InvalidArgument(
                f"optimizer is the torch.optim.Optimizer that trains the model, or a list of several, got {what}"
            )
    return optimizers


def collection(name: str, values: Any) -> list[Any]:
    """`values` as a list, whatever can be looped over but a string. Raises InvalidArgument."""
    if isinstance(values, str):
        raise InvalidArgument(f"{name} is a collection, got the string {values!r}: write [{values!r}]")
    if not isinstance(values, Iterable):
        raise InvalidArgument(f"{name} is a collection, got {values!r}")
    return list(values)


def _is_step(step: object) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MAX_STEP


def _is_name(text: object) -> bool:
    if not isinstance(text, str) or not re.fullmatch(NAME, text):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)  # half a character: no UTF-8 has it


def _as_json(config: Mapping[str, Any] | None) -> dict[str, Any]:
    if config is not None and not isinstance(config, Mapping):
        raise InvalidArgument(f"config is a mapping of names to values, got {config!r}")
    try:
        text = json.dumps(dict(config or {}), allow_nan=False, ensure_ascii=False)
        size_bytes = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"config is kept as JSON, so it holds finite numbers, text, lists and dicts: {type(error).__name__}: {error}"
        ) from error
    if size_bytes > MAX_CONFIG_BYTES:
        raise InvalidArgument(
            f"config takes {size_bytes / 2**20:.1f} MiB as JSON, at most {MAX_CONFIG_BYTES // 2**20} is kept"
        )
    kept: dict[str, Any] = json.loads(text)
    return kept

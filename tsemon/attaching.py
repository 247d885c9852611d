"""`attach`: everything that a user may get wrong is found out here, before the training begins."""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tsemon.actions import Handler, OnAlert, OnIncident, handlers_of, in_words
from tsemon.errors import InvalidArgument, SpoolError
from tsemon.faults import Faults
from tsemon.mirrors import Mirror, Mirrored, as_mirrors
from tsemon.monitor import Monitor
from tsemon.probes import (
    Block,
    Found,
    Layout,
    OfInputs,
    Probe,
    ProbeBatch,
    Ranks,
    agree,
    arrange,
    check_layout,
    check_of_inputs,
    check_probe_batch,
    discover,
    joined,
    named_stacks,
    why_trains_nothing,
)
from tsemon.quantity import Quantity
from tsemon.registration import (
    Chosen,
    as_optimizers,
    check_arguments,
    chosen_measures,
    chosen_rows,
    collection,
    registration,
)
from tsemon.schedule import Cadence
from tsemon.transport import HttpDelivery, MemorySpool, Outbox, SilentOutbox, Spool, check_name
from tsemon.wire import OnConflict

SPOOL_DIR = ".tsemon"
T = TypeVar("T")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run: str,
    project: str = "default",
    server: str | None = None,
    every: int | None = None,
    budget: float = 0.01,
    measures: Collection[str | Quantity] | None = None,
    blocks: Sequence[nn.Module | str] | None = None,
    attention: Sequence[nn.Module | str] | None = None,
    attention_rows: int | Literal["all"] = 64,
    on_alert: OnAlert | Sequence[OnAlert] | None = None,
    on_incident: OnIncident | Sequence[OnIncident] | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    resume: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    stage: int | None = None,
    probe_batch: ProbeBatch | None = None,
    also: Mirror | str | Sequence[Mirror | str] = (),
    layout: Layout | None = None,
    padding: OfInputs | None = None,
    documents: OfInputs | None = None,
    on_conflict: OnConflict = "new",
) -> Monitor:
    """Watch `model` while it trains; call `step` on the result after every optimizer step.

    optimizer: whose updates are measured, one or several; without it there are no gradients and updates in the frames.
    run, project: the name under which the service keeps the run. The same names again are a new attempt at the same run.
    server: base URL of the service, by default that of TSEMON_SERVER. Without one the spool folder is the run.
    every: sample each so many optimizer steps. Without it, as often as tsemon's own cost stays within `budget`.
    budget: tsemon's share of wall time, more than 0 and at most 1. The CPU time of tsemon's own threads counts, too.
    measures: names of metrics, and `tsemon.Quantity` objects for metrics of your own. If no metric is named, all metrics of
        the catalogue are measured except those on demand; `["default", "spectral_gap"]` adds one of these.
    blocks, attention: the transformer blocks in depth order and the self-attention of each, as modules or dotted names,
        for models where they are not found. A block that is applied several times is named once for each.
    attention_rows: how many query rows of attention are weighed, per head and at the most, to stand for all; "all" weighs
        every row of every sequence, exactly, in memory that grows with the number of tokens and not with its square.
    on_alert: called from `step`, on the training thread, when an alert fires or resolves. Default: a log line. Also an
        action of `tsemon.actions`, what `tsemon.actions.when` returns, or a list of any of these.
    on_incident: the same for incidents. Functions are called when an incident opens and when it is over; actions are done
        for the cause that its verdict names.
    config, tags: kept with the run.
    resume: the step at which training goes on; frames of earlier attempts from there on are hidden. A checkpoint that
        keeps `state_dict()` of the monitor says it by itself: `load_state_dict`, before the first step.
    spool_dir: where frames wait until the service has them, by default `.tsemon`.
    process_group: processes that train this model together and all call `attach`. Their samples and their shards of the
        parameters are measured as one, in one collective a sample, and rank 0 of the group sends the frames. Ranks that
        hold blocks of different names are taken for the stages of a pipeline, in the order of ranks.
    stage: this rank's stage, from 0, in a pipeline whose stages give their blocks the same names.
    probe_batch: a few sequences for the passes that tsemon makes itself, to look into a compiled model and at what
        scaled parameters would give: a tensor, a tuple of positional arguments, or a dict of keyword arguments of
        `model`. By default the first few of the first sampled batch are kept. Such a pass runs a stand-in for the model,
        eager and in eval mode; the model is not touched, and your own hooks in it do not fire.
    also: where each frame's numbers go as well: `tsemon.mirrors.TensorBoard(folder)`, `tsemon.mirrors.WandB(run)`, the texts
        "tensorboard:FOLDER" and "wandb", what has `write(frame)` and `close()`, or a list. With ranks, that of rank 0.

    layout: the order of the axes of the hidden states between the blocks, "BTC" for (batch, tokens, width), "TBC" for
        (tokens, batch, width) or "TC" for (tokens, width). By default tsemon decides it from the shapes that each stack's
        attention gets. While that is not possible, the states are not measured; `print(monitor)` says so.
    padding, documents: functions that get the inputs of `model` and return a tensor (batch, tokens): `padding` with True at
        tokens and False at padding, `documents` with the number of each token's document, where a run of equal numbers is
        one sequence, and a negative number for tokens of none. By default tsemon takes both from the mask of each stack's
        first attention, or, where that is not seen, from inputs with the usual names (`attention_mask`, `position_ids`,
        `cu_seqlens`).

    on_conflict: what to do if a live process already sends to a run of this name. "new" makes this the run `name (2)`;
        with `resume`, it is "take_over". "take_over" makes it another attempt of the same run: both processes warn, and both
        are evaluated. "refuse" raises NameInUse. A process that was killed counts as live for 95 s.

    Raises, all of them under TsemonError: NoBlocksFound, InvalidArgument, UnknownMetric (for `measures`), SpoolError when
    there is neither a server nor a folder that can be written, and in every rank of a group where it raises in one.
    Nothing raises after this.
    """
    ranks = None if process_group is None else Ranks(process_group)
    # What raises in one rank raises in all of them: the others would wait for it for ever.
    together = _alone if ranks is None else ranks.together

    def check() -> tuple[
        list[torch.optim.Optimizer], list[list[Handler]], Chosen, int | Literal["all"], Cadence, Found
    ]:
        check_arguments(model, stage, has_group=ranks is not None)
        if probe_batch is not None:
            check_probe_batch(probe_batch)
        check_layout(layout)
        check_of_inputs("padding", padding)
        check_of_inputs("documents", documents)
        found = discover(
            model,
            None if blocks is None else collection("blocks", blocks),
            None if attention is None else collection("attention", attention),
        )
        # What the ranks agree on comes a sample late.
        cadence = Cadence(every, budget, lag=1 if ranks is None else 2)
        optimizers = as_optimizers(optimizer)
        is_alone = ranks is None and _num_processes() > 1
        handlers = [
            handlers_of(on_alert, optimizers, is_one_of_several=is_alone),
            handlers_of(on_incident, optimizers, of_incidents=True, is_one_of_several=is_alone),
        ]
        return optimizers, handlers, chosen_measures(measures), chosen_rows(attention_rows), cadence, found

    optimizers, (on_alerts, on_incidents), chosen, rows, cadence, (found, left_out, paths) = together(check)
    names, frozen = [block.name for block in found], _frozen(found)
    attention_names = [block.name for block in found if block.attention is not None]
    stacks = named_stacks(paths)
    if ranks is not None:
        acts = {"on_alert": in_words(on_alert), "on_incident": in_words(on_incident)}
        settings = {"layout": layout, "attention_rows": rows}
        agree(ranks, every=every, budget=budget, measures=chosen.in_words(), resume=resume, **settings, **acts)
        stages = arrange(ranks.exchange((stage, names)), ranks.rank)
        ranks.stage_size, names = stages.size, stages.names
        of_ranks = ranks.exchange(paths)
        stacks = named_stacks(joined([of_ranks[rank] for rank in stages.ranks]))
        numbers = range(stages.first, stages.first + len(found))
        found = [replace(b, number=n, entry=stacks.output_of(n)) for b, n in zip(found, numbers, strict=True)]
        frozen = sorted({number for of_rank in ranks.exchange(_frozen(found)) for number in of_rank})
    body = together(
        lambda: registration(
            project=project,
            run=run,
            config=config,
            tags=tags,
            blocks=names,
            stacks=stacks,
            frozen_blocks=frozen,
            resume=resume,
            quantities=chosen.quantities,
            on_conflict=on_conflict,
        )
    )
    server = server or os.environ.get("TSEMON_SERVER") or None
    faults = Faults()
    faults.guard(_warn_of_optimizers, model, optimizers, faults)
    is_sender = ranks is None or ranks.rank == 0
    probe = together(
        lambda: Probe(
            model,
            optimizers,
            found,
            faults.contain,
            stacks=stacks,
            ranks=ranks,
            attention_rows=rows,
            probe_batch=probe_batch,
            quantities=chosen.quantities,
            layout=layout,
            padding=padding,
            documents=documents,
        )
    )
    # Last, since it starts threads and opens files.
    outbox = together(lambda: _open_outbox(server, spool_dir, body, faults, also) if is_sender else SilentOutbox())
    return Monitor(
        probe,
        cadence,
        outbox,
        faults,
        ranks=ranks,
        tiers=chosen.tiers,
        optimizers=optimizers,
        on_alert=on_alerts,
        on_incident=on_incidents,
        project=project,
        run=run,
        first_step=resume or 0,
        block_names=names,
        stacks=stacks,
        attention_names=attention_names,
        left_out=left_out,
        server=server,
    )


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _frozen(blocks: Sequence[Block]) -> list[int]:
    """The numbers of blocks that nobody expects to move."""
    return [block.number for block in blocks if not any(p.requires_grad for p in block.module.parameters())]


def _warn_of_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], faults: Faults) -> None:
    if (why := why_trains_nothing(model, optimizers)) is not None:
        faults.warn(why)


def _alone(prepare: Callable[[], T]) -> T:
    return prepare()


def _open_outbox(
    server: str | None, spool_dir: str | os.PathLike[str] | None, body: Mapping[str, Any], faults: Faults, also: object
) -> Outbox:
    delivery = HttpDelivery(server) if server else None
    if delivery is not None and body["on_conflict"] == "refuse":
        check_name(delivery, body["project"], body["run"], faults.warn)
    with as_mirrors(also) as mirrors:
        spool = _open_spool(spool_dir, body, delivery is not None, faults.warn)
    return Outbox(
        spool, delivery, on_warning=faults.warn, mirrors=[Mirrored(mirror, faults.warn) for mirror in mirrors]
    )


def _open_spool(
    root: str | os.PathLike[str] | None, registration: Mapping[str, Any], has_server: bool, warn: Callable[[str], None]
) -> Spool | MemorySpool:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40].strip("-") or "host"
    writer = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    try:
        folder = Path(root or SPOOL_DIR).expanduser()
    except (TypeError, RuntimeError) as error:
        raise InvalidArgument(f"spool_dir is the path of a folder, got {root!r}") from error
    try:
        return Spool.create(folder, registration, writer)
    except (SpoolError, ValueError) as error:  # ValueError: a path that no file can have
        if not has_server:
            raise error if isinstance(error, SpoolError) else SpoolError(f"spool_dir {str(root)!r}: {error}") from error
        warn(f"{error}. Frames wait in memory instead: what the service has not received is lost at exit")
        return MemorySpool(registration, writer)

"""`attach` and what it returns: the place where probes, cadence and delivery meet in the training process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tsemon.catalogue import TIERS
from tsemon.errors import InvalidArgument, SpoolError
from tsemon.faults import Faults
from tsemon.probes import Probe, ProbeBatch, Ranks, check_probe_batch, find_blocks
from tsemon.registration import as_optimizers, chosen_measures, collection, registration
from tsemon.sample import Sample
from tsemon.schedule import Cadence, Spent
from tsemon.transport import HttpDelivery, MemorySpool, Outbox, OutboxStats, SilentOutbox, Spool
from tsemon.wire import Alert, RunState

log = logging.getLogger("tsemon")

SPOOL_DIR = ".tsemon"


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run: str,
    project: str = "default",
    server: str | None = None,
    every: int | None = None,
    budget: float = 0.01,
    measures: Collection[str] | None = None,
    blocks: Sequence[nn.Module | str] | None = None,
    attention: Sequence[nn.Module | str] | None = None,
    on_alert: Callable[[Alert], None] | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    resume: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    probe_batch: ProbeBatch | None = None,
) -> Monitor:
    """Watch `model` while it trains; call `step` on the result after every optimizer step.

    optimizer: whose updates are measured, one or several; without it there are no gradients and updates in the frames.
    run, project: the name under which the service keeps the run. The same names again are a new attempt at the same run.
    server: base URL of the service, by default that of TSEMON_SERVER. Without one the spool folder is the run.
    every: sample each so many optimizer steps. Without it, as often as tsemon's own cost stays within `budget`.
    budget: tsemon's share of wall time on the training thread, more than 0 and at most 1.
    measures: names of the catalogue, by default all but those that it has on demand only.
    blocks, attention: the transformer blocks in depth order and the self-attention of each, as modules or dotted names,
        for models where they are not found.
    on_alert: called from `step`, on the training thread, when an alert fires or resolves. Default: a log line.
    config, tags: kept with the run.
    resume: the step at which training goes on; frames of earlier attempts from there on are hidden.
    spool_dir: where frames wait until the service has them, by default `.tsemon`.
    process_group: processes that train this model together and all call `attach`. Their samples and their shards of the
        parameters are measured as one, in one collective a sample, and rank 0 of the group sends the frames.
    probe_batch: a few sequences for the passes that tsemon makes itself, to look into a compiled model and at what
        scaled parameters would give: a tensor, a tuple of positional arguments, or a dict of keyword arguments of
        `model`. By default the first few of the first sampled batch are kept. Such a pass is eager and in eval mode; it
        leaves parameters, buffers, attributes and random states as they were, but your own hooks in the model fire.

    Raises, all of them under TsemonError: NoBlocksFound, InvalidArgument, UnknownMetric (for `measures`), and SpoolError
    when there is neither a server nor a folder that can be written. Nothing raises after this.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"attach() watches a torch.nn.Module, got {type(model).__name__}")
    optimizers = as_optimizers(optimizer)
    if on_alert is not None and not callable(on_alert):
        raise InvalidArgument(f"on_alert is called with an alert, so it must be callable, got {on_alert!r}")
    chosen = chosen_measures(measures)
    check_probe_batch(probe_batch)
    cadence = Cadence(every, budget)
    found = find_blocks(
        model,
        None if blocks is None else collection("blocks", blocks),
        None if attention is None else collection("attention", attention),
    )
    body = registration(
        project=project, run=run, config=config, tags=tags, blocks=[block.name for block in found], resume=resume
    )
    ranks = None if process_group is None else Ranks(process_group)
    server = server or os.environ.get("TSEMON_SERVER") or None
    faults = Faults()
    outbox: Outbox | SilentOutbox = SilentOutbox()
    if ranks is None or ranks.rank == 0:
        delivery = HttpDelivery(server) if server else None
        spool = _open_spool(spool_dir, body, delivery is not None, faults.warn)
        outbox = Outbox(spool, delivery, on_warning=faults.warn)
    return Monitor(
        Probe(model, optimizers, found, faults.contain, ranks=ranks, probe_batch=probe_batch),
        cadence,
        outbox,
        faults,
        measures=chosen,
        on_alert=on_alert,
        first_step=resume or 0,
        block_names=[block.name for block in found],
        attention_names=[block.name for block in found if block.attention is not None],
        server=server,
    )


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a monitor does at the moment. `print` it."""

    blocks: Sequence[str]
    """Names of the blocks that were found, in depth order."""
    attentions: Sequence[str]
    """Names of the blocks in which a self-attention was found."""
    measured: Sequence[str]
    """Metrics in the last sampled frame."""
    not_measured: Mapping[str, str]
    """Metric to the reason why the last sampled frame lacks it, in whole or in part."""
    notes: Sequence[str]
    """What to know about the values of the last sampled frame."""
    server: str | None
    delivery: OutboxStats
    gap: int
    """Steps between two samples."""
    overhead_ratio: float
    """tsemon's own share of wall time on the training thread since attach."""
    faults: Sequence[str]
    """What went wrong inside tsemon and was contained, the newest last."""
    num_faults: int

    def __str__(self) -> str:
        sent = self.delivery
        lines = [
            f"blocks       {len(self.blocks)}: {_ends(self.blocks)}",
            f"attentions   {len(self.attentions)}",
            f"measured     {', '.join(self.measured) or 'nothing yet'}",
            *(f"not measured {name}: {reason}" for name, reason in self.not_measured.items()),
            *(f"note         {note}" for note in self.notes),
            f"server       {self.server or f'none: frames stay in {sent.spool_folder}'}",
            f"frames       {sent.num_sent} sent, {sent.num_pending} pending, {sent.num_dropped} dropped",
            f"cost         {self.overhead_ratio:.2%} of wall time, a sample every {self.gap} steps",
        ]
        if sent.last_error:
            lines.append(f"last error   {sent.last_error}")
        lines += [f"fault        {fault}" for fault in self.faults]
        return "\n".join(lines)


class _Newest(NamedTuple):
    """The newest sample, and what it cost as far as that is known."""

    sample: Sample | None
    spent: Spent
    total_cost_s: float
    """Seconds in tsemon on the training thread up to its end."""


class Monitor:
    """A guest in a training loop. Made by `attach`; usable as a context manager."""

    def __init__(
        self,
        probe: Probe,
        cadence: Cadence,
        outbox: Outbox | SilentOutbox,
        faults: Faults,
        *,
        measures: Collection[str],
        on_alert: Callable[[Alert], None] | None,
        first_step: int,
        block_names: Sequence[str],
        attention_names: Sequence[str],
        server: str | None,
    ) -> None:
        self._probe: Probe | None = probe
        """None once closed, so that a monitor which is kept does not keep the model."""
        self._cadence = cadence
        self._outbox = outbox
        self._faults = faults
        self._measures = frozenset(measures)
        self._on_alert = on_alert
        self._block_names = block_names
        self._attention_names = attention_names
        self._server = server
        self._step = first_step
        self._next_sample = first_step
        self._last_sample = first_step - 1
        self._last_sample_at = self._attached_at = time.perf_counter()
        self._outside_hooks_s = self._device_s = 0.0
        self._newest = _Newest(None, Spent(0.0, 0.0, is_slow=False), 0.0)
        self._measured: Sequence[str] = ()
        self._not_measured: Mapping[str, str] = {}
        self._notes: Sequence[str] = ()
        self._pid = os.getpid()
        self._faults.guard(self._arm, probe)
        self._close_at_exit = _closing_at_exit(weakref.ref(self))
        atexit.register(self._close_at_exit)

    def step(self, loss: Tensor | float | None = None, **scalars: Tensor | float) -> None:
        """Say that one optimizer step is done. `loss` and any further scalars go into the frame of a sampled step.

        Never raises, never waits for the device: a tensor given here is copied with everything else.
        """
        probe = self._probe
        if probe is not None and self._step >= self._next_sample:
            try:
                self._sample(probe, loss, scalars)
            except Exception as error:
                self._faults.contain(error)
                self._next_sample = self._step + self._cadence.gap
                self._faults.guard(probe.disarm)
        self._step += 1
        if probe is not None and self._step == self._next_sample:
            start = time.perf_counter()
            self._faults.guard(self._arm, probe)
            self._outside_hooks_s += time.perf_counter() - start
        self._tell_alerts()

    @property
    def alerts(self) -> list[Alert]:
        """The alerts of this run that fire now, as the service last said."""
        return [alert for alert in self._outbox.alerts() if alert.state == "firing"]

    @property
    def status(self) -> Status:
        """What is measured, what is not and why, what was delivered, and what it costs."""
        return Status(
            blocks=self._block_names,
            attentions=self._attention_names,
            measured=self._measured,
            not_measured=self._not_measured,
            notes=self._notes,
            server=self._server,
            delivery=self._outbox.stats(),
            gap=self._cadence.gap,
            overhead_ratio=self._overhead_ratio(),
            faults=self._faults.recent,
            num_faults=self._faults.count,
        )

    def close(self, *, state: RunState = "finished", timeout_s: float = 5.0) -> None:
        """Take all hooks out, deliver what can be delivered within `timeout_s`, keep the rest in the spool.

        `state` is what the run is said to be: "finished" or "failed". Closing twice is closing once.
        """
        probe = self._probe
        if probe is None or os.getpid() != self._pid:
            return
        if state not in get_args(RunState):
            self._faults.warn(
                f"close(state={state!r}): a run is one of {', '.join(get_args(RunState))}; it is said to be failed"
            )
            state = "failed"
        atexit.unregister(self._close_at_exit)
        self._faults.guard(probe.disarm)
        self._outside_hooks_s, self._probe = self._cost_s, None
        self._faults.guard(lambda: self._outbox.close(timeout_s=timeout_s, state=state))
        self._tell_alerts()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(state="finished" if kind is None else "failed")

    def __str__(self) -> str:
        return str(self.status)

    def _arm(self, probe: Probe) -> None:
        tiers = {"every", "slow", "demand"} if self._cadence.is_slow else {"every"}
        probe.arm({name for name in self._measures if TIERS[name] in tiers})

    def _sample(self, probe: Probe, loss: Tensor | float | None, scalars: Mapping[str, Tensor | float]) -> None:
        start, in_hooks_s = time.perf_counter(), probe.cost_s
        before, is_slow = self._newest, self._cadence.is_slow
        elapsed_s = start - self._last_sample_at - (self._cost_s - before.total_cost_s)
        spent = before.spent._replace(step_s=max(elapsed_s, 0.0) / (self._step - self._last_sample))
        if before.sample is not None:
            self._device_s += before.sample.device_s
            spent = spent._replace(cost_s=max(spent.cost_s, before.sample.device_s))
        reading = probe.collect(to_agree=(spent.cost_s, spent.step_s))
        spans = probe.take_spans()
        probe.disarm()
        given = ({} if loss is None else {"loss": loss}) | dict(scalars)
        own = {"overhead_ratio": self._overhead_ratio(), "contained_faults": float(self._faults.count)}
        sample = Sample(reading, own | given, self._step, self._faults.contain, spans)
        self._measured, self._not_measured, self._notes = sample.names, probe.not_measured, probe.notes
        self._outbox.put(sample.to_frame)

        if before.sample is not None and before.sample.has_agreed:
            cost_s, step_s = before.sample.agreed()
            spent = Spent(cost_s, step_s, before.spent.is_slow)
        gap = self._cadence.next_gap(spent)
        now = time.perf_counter()
        self._outside_hooks_s += (now - start) - (probe.cost_s - in_hooks_s)
        cost_s = self._cost_s - before.total_cost_s
        self._newest = _Newest(sample, Spent(cost_s, 0.0, is_slow), self._cost_s)
        self._last_sample_at = now
        self._last_sample, self._next_sample = self._step, self._step + gap

    @property
    def _cost_s(self) -> float:
        return self._outside_hooks_s + (0.0 if self._probe is None else self._probe.cost_s)

    def _overhead_ratio(self) -> float:
        """A device's time passes beside the thread's, so the longer of both counts."""
        cost_s = max(self._cost_s, self._device_s)
        return cost_s / max(time.perf_counter() - self._attached_at, 1e-9)

    def _tell_alerts(self) -> None:
        for alert in self._outbox.take_events():
            if self._on_alert is not None:
                self._faults.guard(self._on_alert, alert)
            elif alert.state == "firing":
                self._faults.guard(log.warning, "tsemon: step %s: %s", alert.firing_step, alert.summary)
            else:
                self._faults.guard(log.info, "tsemon: step %s: %s resolved", alert.resolved_step, alert.rule)

    def __del__(self) -> None:
        # A notebook's cell that is run again: the monitor of before must not keep threads and files open.
        with contextlib.suppress(Exception):
            self.close(timeout_s=0.5)


def _closing_at_exit(monitor: weakref.ref[Monitor]) -> Callable[[], None]:
    """What to call at interpreter exit; it keeps neither the monitor nor the model alive until then."""

    def close() -> None:
        if (living := monitor()) is not None:
            # The interpreter keeps here what it printed a traceback for: a run that died has not finished.
            died = getattr(sys, "last_value", None) is not None
            living.close(state="failed" if died else "finished")

    return close


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


def _ends(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ..., {names[-1]}"

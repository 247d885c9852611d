"""What `attach` returns: the place where probes, cadence and delivery meet in the training process."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from tsemon.actions import Handler, checked_count
from tsemon.calm import NUM_IN_MOTION, NUM_TOGETHER, Calm
from tsemon.catalogue import LAYERED, TIERS, Tier
from tsemon.faults import Faults
from tsemon.history import History
from tsemon.late import on_host
from tsemon.probes import Given, PastLosses, Probe, Ranks, Reading, Span, ThreadState, agree
from tsemon.probes.clip_norm import ClipNorm
from tsemon.probes.grad_norms import GradNormProbe
from tsemon.probes.output_loss import OutputLoss
from tsemon.probes.probe import ORIGIN
from tsemon.registration import step_of_state
from tsemon.relay import NUM_NUMBERS, Relay
from tsemon.sample import Sample
from tsemon.schedule import LONGEST_BURST, ZOOM_GAP, ZOOM_SAMPLES, Cadence, NewBurst, Spent
from tsemon.stacks import Stacks
from tsemon.status import LATE_STEPS, Status, Zooms
from tsemon.suspicion import TO_SAVE, SharedSigns, Sign, Suspicion
from tsemon.tokens import NOT_GROWING, UNKNOWN, Tokens
from tsemon.transport import Outbox, SilentOutbox
from tsemon.wire import MAX_NOT_MEASURED, MAX_REASON, Alert, Incident, RunState

log = logging.getLogger("tsemon")

HEAR_AFTER = 5
"""Steps from a sample until ranks read what rank 0 told them in it: by then its copy is done, and nobody waits."""
GRAD_NORM = "grad_norm"
"""The scalar of `step` that is the norm of the gradient before clipping."""
KNOWN_TO_BOTH = frozenset(("loss", "learning_rate"))
KEPT = KNOWN_TO_BOTH | {GRAD_NORM}
"""Names of metrics that the user's scalars may have, too."""

TAKEN = "{name!r} given to monitor.{of}() was left out: tsemon measures a metric of that name; choose another name"

REPORTS_OF_REFUSED = -1, 4, 9, 14
"""Steps from a refused zoom to frames with the losses alone: the rules on the loss hold for that long."""
LATER_REPORTS = 100, 150, 200, 300
"""The same from the start of any zoom, refused or not: alerts on the loss end soon after it has recovered."""
REPORTS_EVERY = 300
"""Minimum number of steps from one refused zoom with such frames to the next."""


class _Newest(NamedTuple):
    """The newest sample, and what it cost as far as that is known."""

    sample: Sample | None
    spent: Spent
    """With the steps since the sample before it."""
    total_cost_s: float
    """Seconds in tsemon on the training thread up to its end."""
    own_cost_s: float = 0.0
    """Seconds of its own step alone."""
    waited_s: float = 0.0
    """Seconds in the collective of all ranks."""


class Monitor:
    """A guest in a training loop. Made by `attach`; usable as a context manager."""

    def __init__(
        self,
        probe: Probe,
        cadence: Cadence,
        outbox: Outbox | SilentOutbox,
        faults: Faults,
        *,
        ranks: Ranks | None,
        tiers: Mapping[str, Tier],
        optimizers: Sequence[torch.optim.Optimizer],
        on_alert: Sequence[Handler],
        on_incident: Sequence[Handler],
        project: str,
        run: str,
        first_step: int,
        block_names: Sequence[str],
        stacks: Stacks,
        attention_names: Sequence[str],
        left_out: Sequence[str],
        server: str | None,
    ) -> None:
        self._probe: Probe | None = probe
        """None once closed, so that a monitor which is kept does not keep the model."""
        self._cadence = cadence
        self._outbox = outbox
        self._faults = faults
        self._ranks = ranks
        self._tiers = dict(tiers)
        self._on_alert = on_alert
        self._on_incident = on_incident
        self._relay = None if ranks is None else Relay()
        self._to_hear: deque[tuple[int, Sample]] = deque()
        """Samples that rank 0 may have told something in, and at which step to listen."""
        self._new_burst: NewBurst | None = None
        """A burst that begins with the next step, or is sent to the other ranks then."""
        self._calm: Calm | None = None
        """The numbers of the newest steps, as long as nothing stirs."""
        self._has_loss = False
        """Whether the newest step was given one."""
        self._has_tiers = True
        """Whether the next sample takes the tiers that are due. One that only looks for where NaN began does not."""
        self._history = History(lambda pending: outbox.put_rows(pending.to_rows), faults.contain)
        self._suspicion = Suspicion()
        self._shared_signs = None if ranks is None else SharedSigns(ranks, probe.device)
        self._zooms: Zooms | None = None
        self._reports: deque[int] = deque()
        """Steps whose losses are sent although they are not sampled."""
        self._may_report_from = first_step
        self.optimizers: Sequence[torch.optim.Optimizer] = tuple(optimizers)
        """Those that were attached to; none once closed."""
        self.schedulers: Sequence[Any] = ()
        """Learning rate schedulers of these, as far as an integration knows them: for `tsemon.actions`."""
        self.should_stop = False
        """Whether `stop` was called: the training loop is asked to end."""
        self._block_names = block_names
        self._stacks = stacks
        self._attention_names = attention_names
        self._left_out = left_out
        self._server = server
        self._project = project
        self._run = run
        self._attached_at = time.perf_counter()
        self._next_sample = first_step
        self._start_at(first_step)
        self._outside_hooks_s = self._device_s = 0.0
        self._armed_cost_s = 0.0
        """Seconds in tsemon up to the step before the newest sample."""
        self._beside_s = 0.0
        """CPU time of the outbox's threads up to the newest sample."""
        self._mark()
        self._newest = _Newest(None, Spent(0.0, 0.0, is_slow=False, num_steps=0), 0.0)
        self._measured: dict[str, int] = {}
        """Metric to the step of the newest sample that has it."""
        self._not_measured: dict[str, str] = {}
        self._explained: frozenset[str] = frozenset()
        """Metrics that the newest sample lacks for a reason known at that time."""
        self._told_not_measured: dict[str, str] | None = None
        self._how: dict[str, str] = {}
        self._pid = os.getpid()
        self._faults.guard(probe.watch_usage, faults.warn)
        self._clip_norm: ClipNorm | None = None
        if cadence.is_adaptive or not self._tiers.keys().isdisjoint(GradNormProbe.METRICS):
            self._faults.guard(self._watch_clipping, probe)
        if cadence.is_adaptive and "nonfinite" in self._tiers:
            self._faults.guard(probe.watch_gradient, self._look_for_origin)
        self._faults.guard(self._arm, probe)
        self._close_at_exit = _closing_at_exit(weakref.ref(self))
        atexit.register(self._close_at_exit)

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        tokens: Tensor | float | None = None,
        step_tokens: Tensor | float | None = None,
        sequence_losses: Tensor | Sequence[float] | float | None = None,  # a float, so that **dict[str, float] is typed
        sequence_ids: Tensor | Sequence[int] | float | None = None,
        **scalars: Tensor | float | None,
    ) -> None:
        """Mark the end of one optimizer step. `loss` and all other scalars are kept, whether it is sampled or not.

        Never raises and never waits for the device: tensors are copied together, with the measurements of a sampled step.

        Args:
            loss: Training loss of this step. Leave it out, or pass None, at a step without a new one.
            tokens: Number of tokens the run has been trained on so far, this step included. The scalar `tokens` places
                the run on the token axis of a comparison.
            step_tokens: Number of tokens of this step alone. The monitor adds them up over all steps and records the
                total as `tokens`; `state_dict` keeps the total. If you pass both, `tokens` replaces the total. With
                several ranks, pass the number of all ranks together on each of them.
            sequence_losses: Mean loss of each sequence of this step's batch (on rank 0, its own batch), such as
                `losses.mean(dim=1)` before reduction. A sampled step keeps the four largest. Without it, tsemon
                computes them if the model gets `labels` or `targets` and returns logits.
            sequence_ids: An integer from 0 to 2^53 - 1 for each of these sequences, such as the index in the data set.
                Without it, tsemon takes a hash of the model's inputs: `measures.sequence_ids`.
            **scalars: Your own metrics, by name. Each is one number or a tensor with one element. None is left out.
        """
        start = time.perf_counter()
        norm = scalars.get(GRAD_NORM)
        if self._clip_norm is not None:
            clip_norm = self._clip_norm.take()
            norm = clip_norm if norm is None else norm
        if (
            (calm := self._calm) is not None
            and self._step + 1 < self._next_sample
            and not self._outbox.has_news
            and self._new_burst is None
            and not (self._reports and self._reports[0] <= self._step)
            and not isinstance(tokens, Tensor)
            and not isinstance(step_tokens, Tensor)
            and calm.keep(loss, norm)
        ):
            if tokens is not None or step_tokens is not None:
                self._with_tokens(tokens, step_tokens, {})
            if loss is not None:
                self._history.add_loss(self._step, calm.losses[-1])
            if scalars:
                self._faults.guard(self._keep_scalars, scalars)
            self._step += 1
            self._outbox.step = self._step
            self._has_loss = loss is not None
            if calm.is_full:
                self._faults.guard(self._look_at_calm_steps)
                self._calm = self._calm_steps()
            self._outside_hooks_s += time.perf_counter() - start
            return
        state = ThreadState()
        try:
            self._end_step(
                state,
                start,
                loss,
                norm,
                tokens,
                step_tokens,
                Given(sequence_losses, sequence_ids),
                {n: value for n, value in scalars.items() if value is not None},
            )
        finally:  # an interrupt passes
            state.put_back()

    def _calm_steps(self) -> Calm | None:
        """Return what keeps the numbers of the next steps. None if the next one may need more than that."""
        probe, suspicion = self._probe, self._suspicion
        if probe is None or probe.is_busy or self._ranks is not None:
            return None
        if not self._cadence.is_adaptive:
            return Calm(math.inf)
        if not suspicion.is_settled(self._outbox.alerts()):
            return None
        num_together = NUM_IN_MOTION if suspicion.is_limit_moving else NUM_TOGETHER
        return Calm(suspicion.limit, num_together, suspicion.floor)

    def _look_at_calm_steps(self) -> None:
        calm, self._calm = self._calm, None
        if calm is None:
            return
        if self._cadence.is_adaptive:
            self._suspicion.watch(calm.losses, calm.norms)
        if self._probe is not None:
            self._probe.take_numbers(calm.losses, calm.norms)

    def _end_step(
        self,
        state: ThreadState,
        start: float,
        loss: Tensor | float | None,
        grad_norm: Tensor | float | None,
        tokens: Tensor | float | None,
        step_tokens: Tensor | float | None,
        sequences: Given,
        scalars: Mapping[str, Tensor | float],
    ) -> None:
        self._mark()
        self._counted_at = start
        self._faults.guard(self._look_at_calm_steps)
        probe = self._probe
        if probe is None:
            self._faults.warn("monitor.step() was called after monitor.close(): these steps are not recorded")
        else:
            probe.called()
        is_reported = bool(self._reports) and self._reports[0] <= self._step
        own = scalars if loss is None or is_reported else {"loss": loss, **scalars}
        if tokens is not None or step_tokens is not None:
            scalars = self._with_tokens(tokens, step_tokens, scalars)
        contain = self._faults.guard if probe is None or state.is_unseen else probe.contain
        self._has_loss = loss is not None
        if probe is not None and loss is not None:
            if state.is_unseen:
                loss = on_host(loss)
            contain(probe.take_loss, loss)
        if probe is not None and grad_norm is not None:
            if state.is_unseen:
                grad_norm = on_host(grad_norm)
            contain(probe.take_grad_norm, grad_norm)
        if probe is not None and self._step >= self._next_sample:
            try:
                self._sample(probe, loss, sequences, scalars)
            except Exception as error:
                self._faults.contain(error)
                self._cadence.end_zoom()
                self._next_sample = self._step + self._cadence.gap
                self._faults.guard(probe.disarm)
        elif probe is not None:
            contain(self._keep_scalars, own if not state.is_unseen else {name: on_host(x) for name, x in own.items()})
        self._step += 1
        self._outbox.step = self._step
        self._tell_alerts()
        probe = self._probe  # None if a handler of an alert has closed the monitor
        if probe is not None and self._shared_signs is None:
            self._begin_burst(self._new_burst)
        if probe is not None and (self._cadence.is_adaptive or self._shared_signs is not None):
            refusals = self._suspicion.refusals
            contain(self._zoom_in, loss, grad_norm)
            if self._suspicion.refusals is not refusals and self._step >= self._may_report_from:
                self._plan_reports((*REPORTS_OF_REFUSED, *LATER_REPORTS))
                self._may_report_from = self._step + REPORTS_EVERY
            if self._reports and self._reports[0] < self._step:
                self._reports.popleft()
                contain(self._send_losses, probe, self._has_loss and is_reported)
        if probe is not None and self._step == self._next_sample:
            self._faults.guard(self._arm, probe)
        self._calm = self._calm_steps()
        self._count_time()

    def _keep_scalars(self, scalars: Mapping[str, Tensor | float | None]) -> None:
        """Keep the scalars of a step without a sample, except for names of metrics that tsemon measures."""
        self._history.add(
            self._step,
            {
                name: value
                for name, value in scalars.items()
                if value is not None and (name not in TIERS or name in KEPT)
            },
        )

    def log(self, scalars: Mapping[str, Tensor | float], step: int | None = None) -> None:
        """Keep scalars at any time, for example after an evaluation. Never raises and never waits for the device.

        Args:
            scalars: One number, or a tensor with one element, by name.
            step: Number of optimizer steps so far, from 0 to `num_steps`, which is the default.

        With ranks, rank 0 keeps them.
        """
        start = time.perf_counter()
        if self._probe is None:
            self._faults.warn("monitor.log() was called after monitor.close(): these scalars are not kept")
        elif step is not None and not (type(step) is int and 0 <= step <= self._step):
            self._faults.warn(
                f"monitor.log(step={step!r}): expected an integer from 0 to {self._step}; nothing is kept"
            )
        elif not isinstance(scalars, Mapping):
            self._faults.warn(f"monitor.log() expects scalars by name, got a {type(scalars).__name__}; nothing is kept")
        else:
            for name in sorted(map(str, scalars.keys() & TIERS.keys())):
                self._faults.warn(TAKEN.format(name=name, of="log"))
            own = {name: value for name, value in scalars.items() if name not in TIERS}
            self._faults.guard(self._history.add, self._step if step is None else step, own)
        self._outside_hooks_s += time.perf_counter() - start

    def _zoom_in(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> None:
        """Take the next sample sooner at a sign of trouble. With ranks, all of them decide the same."""
        is_new, at_least = not self._cadence.is_zoomed_in, 2
        sign = self._own_sign(loss, grad_norm) if self._cadence.is_adaptive else None
        if sign is not None and sign.is_decisive and self._probe is not None and ORIGIN not in self._how:
            why = self._probe.why_no_origin
            self._how[ORIGIN] = f"the loss. It is not known where NaN began, because {why}"
        if self._shared_signs is not None:
            sign, burst = self._shared_signs.exchange(self._step, sign, self._new_burst)
            at_least = ZOOM_SAMPLES
            self._begin_burst(burst)
        if sign is None:
            return
        if sign.is_decisive:
            self._next_sample = self._step
        if not self._cadence.zoom_in(at_least, at_any_cost=sign.is_decisive):
            if is_new and self._cadence.lacks_room:
                self._suspicion.refuse(self._step, sign, TO_SAVE)
            return
        if sign.is_urgent:
            self._next_sample = self._step
        if is_new:
            self._next_sample = min(self._next_sample, max(self._step, self._last_sample + ZOOM_GAP))
            self._suspicion.begins()
            self._plan_reports(LATER_REPORTS)
            self._zooms = Zooms(1 if self._zooms is None else self._zooms.num + 1, self._step, sign.reason)

    def _begin_burst(self, burst: NewBurst | None) -> None:
        self._new_burst = None
        if burst is not None:
            self._cadence.burst(steps=burst.steps, every=burst.every)
            self._next_sample = self._step

    def _plan_reports(self, distances: Sequence[int]) -> None:
        """Plan frames for the rules on the loss. Not with ranks, whose samples are collectives."""
        if self._ranks is None:
            self._reports = deque(sorted({*self._reports, *(self._step + distance for distance in distances)}))

    def _watch_clipping(self, probe: Probe) -> None:
        self._clip_norm = probe.watch_clipping()

    def _look_for_origin(self) -> None:
        """Sample this step before the optimizer uses a gradient that is not finite."""
        if self._probe is not None:
            self._has_tiers = self.is_sampling
            if not self._has_tiers:
                self._armed_cost_s = self._cost_s
            self._next_sample = min(self._next_sample, self._step)
            self._probe.look_for_origin(is_armed=self._has_tiers)

    def _own_sign(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> Sign | None:
        is_zoomed_in = self._cadence.is_zoomed_in
        # The other ranks hear of an alert later, when rank 0 has had a zoom for it.
        alerts = () if isinstance(self._outbox, SilentOutbox) else self._outbox.alerts()
        try:
            return self._suspicion.sign(self._step, loss, grad_norm, alerts, is_zoomed_in=is_zoomed_in)
        except Exception as error:  # other ranks wait for this one, whatever its sign
            self._faults.contain(error)
            return None

    def _with_tokens(
        self, tokens: Tensor | float | None, step_tokens: Tensor | float | None, scalars: Mapping[str, Tensor | float]
    ) -> Mapping[str, Tensor | float]:
        """The scalars and the number of tokens so far, if it is known."""
        try:
            self._tokens.add(tokens, step_tokens)
        except Exception as error:
            self._faults.contain(error)
            return scalars
        if self._tokens.so_far is None:
            self._not_measured["tokens"] = UNKNOWN
            return scalars
        self._not_measured.pop("tokens", None)
        if self.is_sampling and not self._tokens.is_growing():
            self._faults.warn(NOT_GROWING)
        return {**scalars, "tokens": self._tokens.so_far}

    def stop(self) -> None:
        """Ask the training loop to end, by `should_stop`. With ranks every one calls it at the same step."""
        self.should_stop = True

    def watch_output_loss(self) -> OutputLoss | None:
        """Read the loss of each step from the model's outputs: for integrations. None if the monitor is closed."""
        return None if self._probe is None else self._probe.watch_output_loss()

    def warn(self, text: str) -> None:
        """Log a warning once, and keep it for `status`: for integrations."""
        self._faults.warn(text)

    def burst(self, steps: int = 50, *, every: int = 1) -> None:
        """Sample every `every` steps, or more often, for `steps` steps, the slow tier too, whatever the budget.

        It begins after the next call of `step`, and replaces an earlier burst. With ranks, call it on any of them: 12
        to 23 steps later, it begins on all. Raises InvalidArgument.
        """
        steps, every = checked_count("steps", steps), checked_count("every", every)
        if self._probe is None:
            self._faults.warn("monitor.burst() was called after monitor.close(): it has no effect")
        self._new_burst = NewBurst(min(steps, LONGEST_BURST), min(every, LONGEST_BURST))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run in plain values, for a checkpoint that is saved after `step`.

        It has the step, the tokens and, before `close`, up to 88 losses, so that a jump of the loss right after the
        checkpoint is detected. Call it on the training thread. Waits for the device if losses or tokens are on it, and, at
        most a second, until all scalars so far are on disk.
        """
        self._faults.guard(self._history.send)
        self._outbox.flush(1.0)
        state = {"project": self._project, "run": self._run, "step": self._step, **self._tokens.state()}
        self._faults.guard(self._add_losses, state)
        return state

    def _add_losses(self, state: dict[str, Any]) -> None:
        self._look_at_calm_steps()
        if self._probe is not None and (past := self._probe.past_losses()).first:
            state["losses"] = past._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the step of a checkpoint, as `attach(resume=)` does. Before the first step, and on every rank.

        Raises InvalidArgument for what `state_dict` has not returned, and for the state of another run. Once there was a
        step it only warns.
        """
        if self._step != self._first_step or self._probe is None:
            self._faults.warn("load_state_dict() goes before the first step: the training goes on counting as it did")
            return

        def check() -> tuple[int, Tokens, PastLosses]:
            step = step_of_state(state, project=self._project, run=self._run)
            return step, Tokens.of_state(state), PastLosses.of_state(state)

        step, tokens, past = check() if self._ranks is None else self._ranks.together(check)
        if self._ranks is not None:
            agree(self._ranks, resume=step)
            past = max(self._ranks.exchange(past), key=lambda of_rank: len(of_rank.first))
        self._start_at(step)
        self._tokens = tokens
        self._faults.guard(self._probe.continue_from, past)
        self._faults.guard(self._suspicion.continue_from, past)
        self._faults.guard(self._outbox.resume_at, step)

    def _start_at(self, step: int) -> None:
        self._first_step = step
        self._step = step
        self._tokens = Tokens(None if step else 0)
        self._next_sample = step
        self._last_sample = self._last_frame = step - 1
        self._last_sample_at = time.perf_counter()

    @property
    def num_steps(self) -> int:
        """How many optimizer steps are done, with those before a checkpoint that the training goes on from."""
        return self._step

    @property
    def is_sampling(self) -> bool:
        """Whether the current step is sampled. Check it before you compute an expensive scalar."""
        return self._probe is not None and self._step >= self._next_sample

    @property
    def alerts(self) -> list[Alert]:
        """The alerts of this run that fire now, acknowledged or not, as of the server's last response."""
        return [alert for alert in self._outbox.alerts() if alert.is_active]

    @property
    def incidents(self) -> list[Incident]:
        """The open incidents of this run, as of the server's last response. Only rank 0 has their advice."""
        return self._outbox.incidents()

    @property
    def status(self) -> Status:
        """The metrics, the missing ones with their reasons, the rules that cannot fire yet, the delivery and the cost.

        Reading it asks the server for the rules. Nothing waits for the answer, which a later status has.
        """
        self._outbox.ask_for_rules()
        calm = self._calm
        # Only read: another thread may ask while the training thread adds to them.
        has_loss, has_norm = (False, False) if calm is None else (bool(calm.losses), bool(calm.norms))
        # The next sample will have these, because a loss or a gradient norm was given since the newest one.
        coming = () if self._probe is None else self._probe.coming(has_loss=has_loss, has_grad_norm=has_norm)
        return Status(
            blocks=self._block_names,
            stacks=self._stacks,
            attentions=self._attention_names,
            left_out=self._left_out,
            how=dict(self._how),
            measured=dict(sorted(self._measured.items())),
            not_measured={name: why for name, why in self._not_measured.items() if name not in coming},
            server=self._server,
            delivery=self._outbox.stats(),
            waiting_rules=self._outbox.waiting_rules,
            gap=self._cadence.gap,
            slow_gap=self._cadence.gap * self._cadence.slow_every,
            burst=self._cadence.burst_left,
            zooms=self._zooms,
            refusals=self._suspicion.refusals,
            is_loss_watched=self._is_watched(has_loss or self._suspicion.num_losses > 0),
            num_losses=self._suspicion.num_losses + (0 if calm is None else len(calm.losses)),
            num_steps=self._step - self._first_step if self._cadence.is_adaptive and self._ranks is None else 0,
            is_grad_norm_watched=self._is_watched(has_norm or self._suspicion.has_grad_norm),
            overhead_ratio=self._overhead_ratio(),
            sample_s=self._newest.own_cost_s,
            tiers=self._tiers,
            faults=self._faults.recent,
            num_faults=self._faults.count,
        )

    def _is_watched(self, has_come: bool) -> bool:
        is_early = self._step - self._first_step < LATE_STEPS
        return has_come or is_early or not self._cadence.is_adaptive or self._ranks is not None

    def close(self, *, state: RunState = "finished", timeout_s: float = 5.0) -> None:
        """Take all hooks out, deliver what can be delivered within `timeout_s`, keep the rest in the spool.

        `state` is what the run is said to be: "finished" or "failed". Closing twice is closing once.
        """
        self._close(state, timeout_s, is_collected=False)

    def _close(self, state: RunState, timeout_s: float, *, is_collected: bool) -> None:
        """`is_collected`: the garbage collector calls it, at any moment, so nothing may run on the device."""
        probe = self._probe
        if probe is None or os.getpid() != self._pid:
            return
        if state not in get_args(RunState):
            self._faults.warn(
                f"close(state={state!r}): a run is one of {', '.join(get_args(RunState))}; it is said to be failed"
            )
            state = "failed"
        atexit.unregister(self._close_at_exit)
        if not is_collected:
            self._faults.guard(self._look_at_calm_steps)
        try:
            self._mark()
            if self._ranks is None and not is_collected:
                self._faults.guard(self._send_losses, probe, False)
            if not is_collected:
                self._faults.guard(self._history.send)
        finally:
            self._faults.guard(probe.close)
        self._outside_hooks_s, self._probe = self._cost_s, None
        self.optimizers = self.schedulers = ()
        self._to_hear.clear()
        until = time.monotonic() + timeout_s
        self._faults.guard(lambda: self._outbox.close(timeout_s=timeout_s, state=state))
        if self._shared_signs is not None and not is_collected:
            self._faults.guard(self._shared_signs.finish, until)
        self._mark()  # the wait for the server is over, and the cost in hooks is counted
        self._tell_alerts()
        if self._relay is not None:
            self._tell_alone(self._relay)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_planned = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(state="finished" if is_planned else "failed")

    def __str__(self) -> str:
        return str(self.status)

    def _arm(self, probe: Probe) -> None:
        self._armed_cost_s = self._cost_s
        tiers = {"every", "slow", "demand"} if self._cadence.is_slow else {"every"}
        probe.arm({name for name, tier in self._tiers.items() if tier in tiers})

    def _sample(
        self, probe: Probe, loss: Tensor | float | None, sequences: Given, scalars: Mapping[str, Tensor | float]
    ) -> None:
        self._count_time()
        before, has_tiers, self._has_tiers = self._newest, self._has_tiers, True
        is_slow = self._cadence.is_slow and has_tiers
        elapsed_s = self._counted_at - self._last_sample_at - (self._cost_s - before.total_cost_s)
        num_steps = self._step - self._last_sample
        spent = before.spent._replace(step_s=max(elapsed_s, 0.0) / num_steps, num_steps=num_steps)
        beside_s = self._outbox.cpu_s - self._beside_s
        self._beside_s += beside_s
        if before.sample is None and self._ranks is not None:
            spent = spent._replace(step_s=0.0)  # the ranks have agreed on nothing yet, and must choose equal gaps
        if before.sample is not None:
            self._device_s += before.sample.device_s
            spent = spent._replace(cost_s=max(spent.cost_s, before.sample.device_s) + beside_s)
        given = ({} if loss is None else {"loss": loss}) | dict(scalars)
        told = () if self._relay is None else self._relay.next_numbers()
        # Of the wait for the slowest rank only what it costs that rank is tsemon's.
        waited_s = self._waited_s
        reading = probe.collect(
            step=self._step,
            given=given,
            sequences=sequences,
            to_agree=(spent.cost_s, spent.step_s, -before.waited_s, float(before.spent.is_slow), *told),
        )
        waited_s = self._waited_s - waited_s
        spans = probe.take_spans()
        self._faults.guard(probe.disarm)
        given = self._without_names_of_metrics(given, reading)
        sample = self._packed(reading, self._own_scalars() | given, spans)
        if sample.has_agreed:
            self._to_hear.append((self._step + HEAR_AFTER, sample))
            if self._relay is not None:
                self._relay.confirm()
        self._remember(probe, sample.names, {} if before.sample is None else before.sample.undefined)
        if self._not_measured != self._told_not_measured:
            self._told_not_measured = dict(self._not_measured)
            sample.not_measured = _as_sent(self._not_measured)
        self._faults.guard(self._history.send)
        self._faults.guard(self._outbox.put, sample.to_frame)

        if before.sample is not None:
            is_silent = isinstance(self._outbox, SilentOutbox)
            self._faults.guard(lambda sample=before.sample: sample.decide(is_silent=is_silent))
        if before.sample is not None and before.sample.has_agreed:
            spent = self._agreed(before.sample)
        gap = self._cadence.next_gap(spent, has_tiers=has_tiers)
        self._count_time()
        cost_s = self._cost_s - before.total_cost_s
        own_cost_s = self._cost_s - self._armed_cost_s
        self._newest = _Newest(sample, Spent(cost_s, 0.0, is_slow, num_steps), self._cost_s, own_cost_s, waited_s)
        self._last_sample_at = self._counted_at
        self._last_sample = self._last_frame = self._step
        self._next_sample = self._step + gap

    def _send_losses(self, probe: Probe, has_loss: bool) -> None:
        """Send the losses and gradient norms since the last frame, if there was a step.

        has_loss: Whether the frame has the loss of the last step. If not, a row may have it.
        """
        step = self._step - 1
        if step <= self._last_frame:
            return
        reading = probe.collect_last(self._tiers, has_loss=has_loss)
        if not reading.scalars:  # none was given
            return
        own = self._own_scalars()
        del own["contained_faults"]  # a frame with it has measured all that could be measured
        sample = Sample(reading, own, step, self._faults.contain, stacks=self._stacks)
        self._last_frame = step
        self._not_measured = {n: why for n, why in self._not_measured.items() if n not in reading.scalars}
        self._history.send()
        self._outbox.put(sample.to_frame)
        self._count_time()

    def _own_scalars(self) -> dict[str, Tensor | float]:
        return {
            "overhead_ratio": self._overhead_ratio(),
            "contained_faults": float(self._faults.count),
            "dropped_frames": float(self._outbox.num_dropped),
        }

    def _remember(self, probe: Probe, names: Collection[str], undefined: Mapping[str, str]) -> None:
        """For the status: of metrics that not every sample has, the newest one that had them counts.

        undefined: Reasons that are known only now for metrics that the sample before lacks.
        """
        self._measured = {name: step for name, step in self._measured.items() if name not in probe.wanted}
        self._measured |= dict.fromkeys(names, self._step)
        self._not_measured = {n: why for n, why in self._not_measured.items() if n not in probe.wanted}
        known = self._not_measured.keys() | self._explained
        late = {n: why for n, why in undefined.items() if n not in known}
        self._not_measured |= late | probe.not_measured
        self._explained = frozenset(probe.not_measured)
        self._how |= probe.how

    def _packed(self, reading: Reading, given: Mapping[str, Tensor | float], spans: Sequence[Span]) -> Sample:
        try:
            return Sample(reading, given, self._step, self._faults.contain, spans, self._stacks)
        except Exception as error:
            # What the ranks agreed on is kept whatever else is lost: without it this one would sample other steps.
            self._faults.contain(error)
            return Sample(Reading(agreed=reading.agreed), {}, self._step, self._faults.contain)

    def _without_names_of_metrics(
        self, given: Mapping[str, Tensor | float], reading: Reading
    ) -> dict[str, Tensor | float]:
        """The user's scalars that are not in the reading, without those whose names belong to metrics that tsemon measures.

        With ranks, the reading has the user's scalars of all ranks.
        """
        taken = {name for name in given if name in reading.scalars or (name in LAYERED and name != GRAD_NORM)}
        for name in sorted(taken & TIERS.keys() - KEPT):
            self._faults.warn(TAKEN.format(name=name, of="step"))
        return {name: value for name, value in given.items() if name not in taken}

    def _agreed(self, sample: Sample) -> Spent:
        """What the sample before `sample` cost the slowest rank, as all of them know by now."""
        cost_s, step_s, minus_waited_s, is_slow, *_, num_new = sample.agreed()
        self._outside_hooks_s -= minus_waited_s
        if num_new and self._ranks is not None:
            self._ranks.renew()
        return Spent(cost_s, step_s, bool(is_slow), self._newest.spent.num_steps)

    def _mark(self) -> None:
        """The time from here to `_count_time` is a cost."""
        self._counted_at, self._counted_s = time.perf_counter(), self._in_hooks_s + self._waited_s

    def _count_time(self) -> None:
        """Add the time since the last mark to the cost, except for hooks, which count theirs, and waiting for ranks."""
        marked_at, counted_s = self._counted_at, self._counted_s
        self._mark()
        self._outside_hooks_s += self._counted_at - marked_at - (self._counted_s - counted_s)

    @property
    def _in_hooks_s(self) -> float:
        return 0.0 if self._probe is None else self._probe.cost_s

    @property
    def _cost_s(self) -> float:
        return self._outside_hooks_s + self._in_hooks_s

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._ranks is None else self._ranks.waited_s

    def _overhead_ratio(self) -> float:
        """A device's time passes beside the thread's, so the longer of both counts."""
        cost_s = max(self._cost_s, self._device_s)
        return cost_s / max(time.perf_counter() - self._attached_at, 1e-9)

    def _tell_alerts(self) -> None:
        for changed in self._outbox.take_events():
            if not self._on_alert and not self._on_incident:
                self._faults.guard(_log, changed)
            if self._relay is None:
                self._handle(changed)
            else:
                self._faults.guard(self._relay.put, changed)
        while self._relay is not None and self._to_hear and self._to_hear[0][0] <= self._step:
            self._faults.guard(self._hear, self._relay, self._to_hear.popleft()[1])
        if self._relay is not None and not self._to_hear and self._ranks is not None and self._ranks.is_broken:
            self._go_on_alone(self._relay)

    def _hear(self, relay: Relay, sample: Sample) -> None:
        """Every rank comes here at the same step, and reads the same."""
        changed = relay.received(sample.agreed()[-NUM_NUMBERS - 1 : -1])
        if changed is not None:
            if isinstance(self._outbox, SilentOutbox):
                self._outbox.hear(changed)
            self._handle(changed)

    def _go_on_alone(self, relay: Relay) -> None:
        """No rank can be told of an alert any more."""
        if self._on_alert or self._on_incident:
            self._faults.warn(
                "the ranks of process_group are no longer in step: from here on rank 0 alone calls the functions of "
                "on_alert and on_incident, and actions are not done on any rank"
            )
        self._tell_alone(relay)

    def _tell_alone(self, relay: Relay) -> None:
        """Call functions of this rank alone. Actions are not done: one that changes the training would make others wait."""
        self._relay = None
        self._on_alert, self._on_incident = (
            [handler for handler in handlers if not handler.is_action]
            for handlers in (self._on_alert, self._on_incident)
        )
        for changed in relay.take_back():
            self._handle(changed)

    def _handle(self, changed: Alert | Incident) -> None:
        self._count_time()
        name, handlers = "on_incident", self._on_incident
        if isinstance(changed, Alert):
            name, handlers = "on_alert", self._on_alert
        for handler in handlers:
            try:
                handler(changed, self)
            except Exception as error:  # the user's own: told, and not counted among tsemon's
                text = f"{name} failed for {changed.rule}, training is not affected: {type(error).__name__}: {error}"
                self._faults.warn(text, cause=error)
        self._mark()  # the time of handlers is the user's own

    def __del__(self) -> None:
        # A notebook's cell that is run again: the monitor of before must not keep threads and files open.
        try:  # noqa: SIM105 - at interpreter exit, contextlib may be gone
            self._close("finished", 0.5, is_collected=True)
        except Exception:
            pass


def _log(changed: Alert | Incident) -> None:
    """One warning for each verdict: an alert that belongs to an incident is a detail."""
    if isinstance(changed, Incident):
        if changed.is_active:
            where = "" if changed.where is None else f"{changed.where} "
            text = f"{where}since step {changed.left_step}: {changed.summary} What to try: {changed.advice.get('text', '-')}"
            log.warning("tsemon: step %s, %s, %s", changed.step, changed.severity, text)
        else:
            log.info("tsemon: incident of step %s %s: %s", changed.step, changed.state, changed.rule)
    elif changed.is_active:
        is_detail = changed.incident_id is not None or changed.severity == "info"
        level = logging.INFO if is_detail else logging.WARNING
        log.log(level, "tsemon: step %s: %s", changed.firing_step, changed.summary)
    elif changed.resolved_step is not None:
        log.info("tsemon: step %s: %s resolved", changed.resolved_step, changed.rule)
    else:  # the reply that told the step was lost
        log.info("tsemon: %s of step %s resolved", changed.rule, changed.firing_step)


def _as_sent(not_measured: Mapping[str, str]) -> dict[str, str]:
    """As much of it as a frame may carry."""
    return {name: why[:MAX_REASON] for name, why in sorted(not_measured.items())[:MAX_NOT_MEASURED]}


def _closing_at_exit(monitor: weakref.ref[Monitor]) -> Callable[[], None]:
    """What to call at interpreter exit; it keeps neither the monitor nor the model alive until then."""

    def close() -> None:
        if (living := monitor()) is not None:
            # The interpreter keeps here what it printed a traceback for: a run that died has not finished.
            died = getattr(sys, "last_value", None) is not None
            living.close(state="failed" if died else "finished")

    return close

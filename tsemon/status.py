"""The status of a monitor, as values and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tsemon.catalogue import TIERS, Tier
from tsemon.schedule import Burst
from tsemon.stacks import Stacks
from tsemon.suspicion import Refusals
from tsemon.transport import OutboxStats, WaitingRules

V = TypeVar("V")

LATE_STEPS = 20
"""Steps after which a loss or a gradient norm has arrived on the host."""
FEW = 0.5
"""Losses per step below which signs of the loss are seen late."""


class Zooms(NamedTuple):
    """How often the monitor zoomed in, and where it last did."""

    num: int
    step: int
    """Step at which the newest zoom began."""
    reason: str
    """Its reason."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The current status of a monitor. `print` it."""

    blocks: Sequence[str]
    """Names of the blocks that were found, in depth order."""
    stacks: Stacks
    """The stacks that these blocks form, such as an encoder and a decoder."""
    attentions: Sequence[str]
    """Names of the blocks in which a self-attention was found."""
    left_out: Sequence[str]
    """A sentence on each stack of blocks that is not measured, such as a frozen teacher beside its student."""
    how: Mapping[str, str]
    """By kind of metric, a sentence on the tensors from which the newest numbers were computed."""
    measured: Mapping[str, int]
    """Metrics in the newest sample that was to have them, each with the step of that sample."""
    not_measured: Mapping[str, str]
    """Metric to the reason why that sample lacks it, in whole or in part."""
    server: str | None
    delivery: OutboxStats
    waiting_rules: WaitingRules | None
    """The rules that cannot fire yet, and why, as of the server's last answer; None before the first one."""
    gap: int
    """Steps between two samples."""
    slow_gap: int
    """Steps between two samples with the metrics of the slow tier."""
    burst: Burst | None
    """None outside of bursts."""
    zooms: Zooms | None
    """None if there was no zoom."""
    refusals: Refusals | None
    """None if every sign of trouble led to a zoom, or needed none because samples were near anyway."""
    is_loss_watched: bool
    """False if zooms lack the signs of the loss, because `step` was given none on the CPU or a CUDA device."""
    num_losses: int
    """Number of losses in which zooms have looked for signs."""
    num_steps: int
    """Number of steps that may have had one; 0 if zooms do not depend on these losses."""
    is_grad_norm_watched: bool
    """False if zooms lack the signs of the gradient norm: `torch.nn.utils.clip_grad_norm_` did not compute it for the
    whole model, and `step` was not given it as `grad_norm`."""
    overhead_ratio: float
    """tsemon's own share of wall time on the training thread since attach."""
    sample_s: float
    """Seconds that the newest sample took of the training thread."""
    tiers: Mapping[str, Tier]
    """How often each metric is measured."""
    faults: Sequence[str]
    """What went wrong inside tsemon and was contained, the newest last."""
    num_faults: int

    def __str__(self) -> str:
        sent = self.delivery
        lines = [
            ("blocks", f"{len(self.blocks)}: {_ends(self.blocks)}"),
            *([("stacks", f"{len(self.stacks.each)}: {self.stacks}")] if len(self.stacks.each) > 1 else []),
            ("attentions", str(len(self.attentions))),
            *(("left out", sentence) for sentence in self.left_out),
            *((kind, sentence) for kind, sentence in self.how.items() if sentence),
            *(("measured" if tier == "every" else f"  {tier}", names) for tier, names in self._measured_by_tier()),
            *(("  on demand", f"{names}: attach(measures=['default', ...])") for names in self._on_demand()),
            *(("incomplete", text) for text in self._gaps(self.measured)),
            *(("not measured", text) for text in self._gaps(self.not_measured.keys() - {*self.measured})),
            ("server", self._connection()),
            ("frames", f"{sent.num_sent} sent, {sent.num_pending} pending, {sent.num_dropped} dropped"),
            *(("rules", text) for text in self._waiting_rules()),
            ("cost", f"{self.overhead_ratio:.2%} of wall time, {self.sample_s * 1e3:.1f} ms in the newest sample"),
            ("samples", f"every {self.gap} steps, with slow metrics every {self.slow_gap}"),
        ]
        if self.burst is not None:
            lines.append(("burst", f"{self.burst.num} more samples, with slow metrics, every {self.burst.gap} steps"))
        if self.zooms is not None:
            text = f"{_times(self.zooms.num)}, last from step {self.zooms.step} on: {self.zooms.reason}"
            lines.append(("zoomed in", text))
        if self.refusals is not None:
            num, step, cause, reason = self.refusals
            lines.append(("zoom refused", f"{_times(num)}, last at step {step} {cause}: {reason}"))
        if not self.is_loss_watched:
            lines.append(
                (
                    "no zooms",
                    "at signs of the loss: monitor.step() was given no loss that is one number on the CPU or a CUDA device",
                )
            )
        elif 0 < self.num_losses < FEW * (self.num_steps - LATE_STEPS):
            told = f"monitor.step() was given {self.num_losses} losses in {self.num_steps} steps: pass the loss of each step"
            lines.append(("late zooms", f"if any, at signs of the loss: {told}"))
        if not self.is_grad_norm_watched:
            lines.append(
                (
                    "no zooms",
                    "at signs of the gradient norm: clip it by its norm as a whole, or pass step(grad_norm=...)",
                )
            )
        lines += [("mirror", mirror) for mirror in sent.mirrors]
        if sent.last_error and not any(fault.startswith(sent.last_error) for fault in self.faults):
            lines.append(("last error", sent.last_error))
        lines += [("fault", fault) for fault in self.faults]
        return "\n".join(f"{label:<14}{text}" for label, text in lines)

    def _connection(self) -> str:
        if self.server is None:
            folder = self.delivery.spool_folder
            return f"none: frames stay in {'memory, or rank 0 has them' if folder is None else folder}"
        if not self.delivery.num_failures:
            return self.server
        return f"{self.server}, {self.delivery.num_failures} failed tries in a row; frames wait"

    def _waiting_rules(self) -> list[str]:
        if self.waiting_rules is None:
            ask = "the server was asked which of them cannot fire yet: print again for its answer"
            return [ask] if self.delivery.connected else []
        step, waits, lacks, problem = self.waiting_rules
        if problem:
            return [problem]
        texts = [f"{', '.join(rules)} cannot fire before {text}" for text, rules in _by_value(waits)]
        for names, rules in _by_value({rule: tuple(names) for rule, names in lacks.items()}):
            read = "reads" if len(rules) == 1 else "read"
            texts.append(f"{', '.join(rules)} {read} {', '.join(names)}, which the run has not had so far")
        return [f"{'' if step is None else f'as of step {step}, '}{text}" for text in texts or ["all can fire"]]

    def _measured_by_tier(self) -> Iterator[tuple[str, str]]:
        whole = [name for name in self.measured if name not in self.not_measured]
        if not whole:
            yield "every", "nothing" if self.measured else "nothing yet"
        for tier in ("every", "slow", "demand"):
            by_step: dict[int, list[str]] = {}
            for name in whole:
                if self.tiers.get(name, "every") == tier:
                    by_step.setdefault(self.measured[name], []).append(name)
            for step, names in sorted(by_step.items(), reverse=True):
                yield tier, f"at step {step}: {', '.join(names)}"

    def _on_demand(self) -> list[str]:
        names = [name for name, tier in TIERS.items() if tier == "demand" and name not in self.measured]
        return [", ".join(names)] if names else []

    def _gaps(self, names: Collection[str]) -> list[str]:
        """One text for each reason why one of these is missing, in whole or in part."""
        missing = {name: reason for name, reason in self.not_measured.items() if name in names}
        return [f"{', '.join(those)}: {reason}" for reason, those in _by_value(missing)]


def _by_value(by_name: Mapping[str, V]) -> list[tuple[V, list[str]]]:
    """Each value with the names that have it."""
    found: dict[V, list[str]] = {}
    for name, value in by_name.items():
        found.setdefault(value, []).append(name)
    return [*found.items()]


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


def _ends(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ..., {names[-1]}"

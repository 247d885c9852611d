"""What a scan has found, as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console

from tsemon.terminal import Column, print_table, printable
from tsemon.tools.scanning.law import growth_law, in_words
from tsemon.tools.scanning.scanner import Record, Scanner

MAX_NAMES = 4
"""Metrics of one reason that are named."""
MAX_ROWS = 24
"""Checkpoints in the table, evenly over all; JSON has them all."""
ATTENDED = {"positions_attended": "attended", "saturated_positions_attended": "x1024"}
"""Measures of heads and the titles of their columns, which have the mean over all heads."""


@dataclass
class Report:
    """Of one scan, as it goes on."""

    project: str
    run: str
    place: str
    """Where the run was written to, in words."""
    records: list[Record] = field(default_factory=list)
    num_new: int = 0
    """Frames that were not there before."""
    num_known: int = 0
    """Frames that were, of the same checkpoints."""
    num_refused: int = 0
    overwritten_from: int | None = None
    """The first step whose checkpoint is another than at an earlier scan."""
    run_id: str | None = None

    def as_json(self, scanner: Scanner) -> dict[str, Any]:
        """Plain values; what is not finite is null."""
        steps = [record.step for record in self.records]
        norms = [record.scalars["total_param_norm"] for record in self.records]
        law = growth_law(steps, norms) if norms else None
        blocks = list(scanner.groups.blocks) if scanner.groups else []
        of_blocks = [[record.layers["param_norm"][n] for record in self.records] for n in range(len(blocks))]
        return {
            "project": self.project,
            "run": self.run,
            "run_id": self.run_id,
            "written_to": self.place,
            "frames": {"new": self.num_new, "known": self.num_known, "refused": self.num_refused},
            "overwritten_from": self.overwritten_from,
            "folder": str(scanner.folder),
            "blocks": blocks,
            "saturation_on": scanner.saturation_on,
            "growth": {
                "says": in_words(law, norms) if norms else None,
                **({} if law is None else _plain(asdict(law))),
                "exponent_of_blocks": [
                    None if (own := growth_law(steps, norms_of)) is None else _number(own.exponent)
                    for norms_of in of_blocks
                ],
            },
            "checkpoints": [
                {
                    "step": record.step,
                    "name": record.name,
                    **_plain(record.scalars),
                    "layers": {name: [*map(_number, values)] for name, values in record.layers.items()},
                    "heads": {name: [[*map(_number, row)] for row in rows] for name, rows in record.heads.items()},
                }
                for record in self.records
            ],
            "left_out": scanner.left_out,
            "not_measured": scanner.not_measured,
        }

    def show(self, scanner: Scanner, console: Console) -> None:
        """The table and the sentences below it."""
        if self.records:
            self._print_table()
            told = f"{MAX_ROWS} of {len(self.records)} checkpoints shown, --json has all; " if self._is_cut else ""
            _say(console, f"{told}norms without embeddings and scalars")
            norms = [record.scalars["total_param_norm"] for record in self.records]
            _say(console, in_words(growth_law([record.step for record in self.records], norms), norms))
            if len(self.records) > 1 and scanner.groups and scanner.groups.blocks:
                _say(console, self._about_blocks(scanner.groups.blocks))
        if scanner.saturation_on is not None:
            _say(console, f"saturation on {scanner.saturation_on}, parameters times 1024")
        if self.records:
            for sentence in _about_smoothing(self.records[-1]):
                _say(console, sentence)
        if self._attended:
            _say(
                console,
                "attended: tokens to which a query gives more than 1e-5 of its attention, mean over queries and heads; "
                "x1024: the same with parameters times 1024",
            )
        for metric, reason in _joined(scanner.not_measured):
            _say(console, f"not measured: {metric}: {reason}")
        for name, reason in sorted(scanner.left_out.items()):
            _say(console, f"left out: {name}: {reason}")
        if self.overwritten_from is not None:
            _say(
                console,
                f"the checkpoints from step {self.overwritten_from} on are others than at an earlier scan, whose frames are "
                "hidden from there on",
            )
        known = f", {self.num_known} were there already" if self.num_known else ""
        refused = f", {self.num_refused} refused" if self.num_refused else ""
        _say(console, f"run {self.project}/{self.run} {self.place}: {self.num_new} new frames{known}{refused}")

    @property
    def _is_cut(self) -> bool:
        return len(self.records) > MAX_ROWS

    @property
    def _attended(self) -> list[str]:
        return [metric for metric in ATTENDED if any(metric in record.heads for record in self.records)]

    def _print_table(self) -> None:
        has_saturation = any("saturation" in record.layers for record in self.records)
        has_nonfinite = any(record.scalars["nonfinite_entries"] for record in self.records)
        titles = ["step", "norm", "distance", "cosine", "alignment", "exponent", *["saturation"] * has_saturation]
        titles += [*(ATTENDED[metric] for metric in self._attended), *["not finite"] * has_nonfinite]
        shown = self.records
        if self._is_cut:
            last = len(shown) - 1
            shown = [shown[round(row * last / (MAX_ROWS - 1))] for row in range(MAX_ROWS)]
        rows = []
        for record in shown:
            value = record.scalars.get
            cells = [
                str(record.step),
                _cell(value("total_param_norm"), ".6g"),
                _cell(value("checkpoint_distance"), ".4g"),
                _cell(value("direction_cosine"), ".6f"),
                _cell(value("checkpoint_alignment"), ".3f"),
                _cell(value("norm_growth_exponent"), ".2f"),
            ]
            if has_saturation:
                cells.append(_cell([*record.layers.get("saturation", ()), math.nan][-2:][0], ".3f"))
            for metric in self._attended:
                heads = [value for row in record.heads.get(metric, ()) for value in row]
                cells.append(_cell(fmean(heads) if heads else None, ".2f"))
            if has_nonfinite:
                cells.append(str(int(record.scalars["nonfinite_entries"])))
            rows.append(cells)
        print_table([Column(title, right=True, spare=title == "alignment") for title in titles], rows)

    def _about_blocks(self, blocks: Sequence[str]) -> str:
        first, last = self.records[0].layers["param_norm"], self.records[-1].layers["param_norm"]
        ratios = [
            (b / a, name) for a, b, name in zip(first, last, blocks, strict=True) if a > 0 and math.isfinite(b / a)
        ]
        if not ratios:
            return "no block has a norm to compare"
        (least, slowest), (most, fastest) = min(ratios), max(ratios)
        return (
            f"{len(blocks)} blocks, {blocks[0]} to {blocks[-1]}: the norm at the end is {least:.3f} times that at the "
            f"start in {slowest} and {most:.3f} times in {fastest}"
        )


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, soft_wrap=True)


def _about_smoothing(record: Record) -> Iterator[str]:
    """Whether attention smooths, by its effect and by the eigenvalues of its weights, at one checkpoint."""
    effects = [x for x in record.layers.get("residual_hfc_lfc_ratio", ()) if not math.isnan(x)]
    shares = [x for x in record.layers.get("value_output_negative_share", ()) if not math.isnan(x)]
    if effects:
        num = sum(x < 1 for x in effects)
        yield f"at step {record.step}, attention smooths (lowers HFC/LFC) in {num} of {len(effects)} blocks"
    if shares:
        share = fmean(shares)
        yield f"at step {record.step}, {share:.0%} of the eigenvalues of its value and output weights sharpen (are negative)"


def _joined(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Metrics of one reason together, the first few by name."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [(_first_of(own), reason) for reason, own in names.items()]


def _first_of(names: Sequence[str]) -> str:
    num_more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

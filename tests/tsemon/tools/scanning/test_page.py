"""docs/scan.md, held against the command and what it measures."""

import re
from pathlib import Path

import torch
import typer
from typer.testing import CliRunner

from tsemon.catalogue import LAYERED, SCALARS
from tsemon.tools.cli import app
from tsemon.tools.scanning import Scanner
from tsemon.tools.scanning.inputs import Source

PAGE = (Path(__file__).parents[4] / "docs" / "scan.md").read_text()


def scalars(record):
    return record.scalars


def layers(record):
    return record.layers


class TestThePage:
    def test_names_every_option_of_the_command(self):
        command = typer.main.get_command(app).commands["scan"]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {name for name in options if name.startswith("--")} - {"--saturation"} <= {
            *re.findall(r"--[a-z-]+", PAGE)
        }

    def test_shows_the_examples_of_the_help(self):
        shown = CliRunner().invoke(app, ["scan", "--help"], env={"COLUMNS": "120"}).stdout.split(" Examples")[1]
        examples = [line.partition("  #")[0].strip() for line in shown.splitlines() if line.strip()]
        assert len(examples) == 5
        assert all(example in PAGE for example in examples), examples

    def test_names_every_metric_and_no_other(self, trained):
        scanner = Scanner(trained[0] / "gpt2", source=Source())
        records = list(scanner.look())
        scanner.close()
        measured = {name for record in records for name in (*record.scalars, *record.layers)} | {"head_param_norm"}
        table = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
        assert {name for cell in table for name in re.findall(r"`([a-z_0-9]+)`", cell)} == measured

    def test_shares_a_name_with_the_catalogue_where_it_is_the_same_thing_alone(self, trained):
        scanner = Scanner(trained[0] / "gpt2", source=Source())
        records = list(scanner.look())
        scanner.close()
        beside = {"checkpoint_distance", "checkpoint_alignment", "nonfinite_entries"}
        of_run, of_layers = ({name for record in records for name in values(record)} for values in (scalars, layers))
        assert {name for name in of_run if name not in SCALARS} == beside | {"checkpoint_gap_steps"}
        assert {name for name in of_layers if name not in LAYERED} == beside | {"saturated_positions_attended"}
        assert torch.tensor(records[-1].layers["saturation"]).shape == (4,)

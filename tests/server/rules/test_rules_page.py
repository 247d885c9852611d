"""docs/rules.md: the rules with which it begins do what it says of them, and its tables have the whole language."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tsemon.tools.cli import app
from tsemon_server.rules import grammar, line
from tsemon_server.rules.documents import load
from tsemon_server.rules.functions import FUNCTIONS
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program, View

from .definitions import events

PAGE = (Path(__file__).parents[3] / "docs/rules.md").read_text()
FILE = re.search(r"<!-- rules:start -->\n```yaml\n(.*?)```\n<!-- rules:end -->", PAGE, re.DOTALL)[1]
RULES = {rule.name: rule for rule in load(FILE)}
EVERY = 10


def fired(name, scalars=(), **layers):
    """The steps at which a rule of the page fires on such frames, one every ten steps."""
    num_frames = max(map(len, [*layers.values(), *dict(scalars).values()]))
    views = [
        View(
            EVERY * place,
            {scalar: values[place] for scalar, values in dict(scalars).items()},
            {metric: np.array(values[place], np.float32) for metric, values in layers.items()},
        )
        for place in range(num_frames)
    ]
    return [event.firing_step for event in events([RULES[name]], views) if event.kind == "firing"]


class TestTheFirstRules:
    def test_are_a_name_and_a_line_each(self):
        assert len(RULES) == 5
        assert {key for rule in RULES.values() for key in rule.definition} == {"name", "when"}
        assert all("\n" not in rule.definition["when"] for rule in RULES.values())

    def test_fire_if_the_entropy_of_a_layer_stays_below_a_bound(self):
        name, healthy = "entropy-of-a-layer-is-low", [0.5, 0.4, 0.6]
        assert fired(name, attention_entropy=[healthy] * 20) == []
        assert fired(name, attention_entropy=[healthy] * 3 + [[0.5, 0.05, 0.6]] * 3) == [50]
        assert fired(name, attention_entropy=[healthy, [0.5, 0.05, 0.6]] * 10) == []
        assert fired(name, attention_entropy=[[0.5, math.nan, 0.6]] * 20) == []

    def test_fire_if_the_loss_stays_above_its_best_for_200_steps(self):
        name, falling = "loss-is-above-its-best", [4.0, 3.0, 2.0]
        assert fired(name, {"loss": falling + [2.39] * 40}) == []
        assert fired(name, {"loss": falling + [2.41] * 20 + [2.0] * 20}) == []
        assert fired(name, {"loss": falling + [2.41] * 21}) == [230]
        assert fired(name, {"loss": falling + [2.41] * 19 + [2.0] + [2.41] * 19}) == []

    def test_fire_if_the_gradient_is_many_times_its_median(self):
        name, usual = "gradient-is-ten-times-its-median", [1.0, 0.8, 1.2] * 10
        assert fired(name, {"total_grad_norm": [*usual, 9.0, 9.0]}) == []
        assert fired(name, {"total_grad_norm": [*usual, 30.0, 30.0]}) == [310]
        assert fired(name, {"total_grad_norm": [*usual, 30.0, *usual]}) == []
        assert fired(name, {"total_grad_norm": [1.0, 30.0, 30.0]}) == []

    def test_fire_on_a_scalar_of_ones_own(self):
        assert fired("validation-loss-is-high", {"val/loss": [2.9, 3.0, 2.0]}) == []
        assert fired("validation-loss-is-high", {"val/loss": [2.9, 3.1, 3.2]}) == [10]
        assert fired("validation-loss-is-high", {"loss": [9.0] * 9}) == []

    def test_fire_only_after_warm_up(self):
        name, norms = "update-is-large-after-warm-up", [[1.0, 1.0]] * 120
        large, small = [[0.001, 0.02]], [[0.001, 0.002]]
        assert fired(name, update_norm=large * 90 + small * 30, param_norm=norms) == []
        assert fired(name, update_norm=small * 110 + large * 10, param_norm=norms) == [1120]
        assert fired(name, update_norm=large * 120, param_norm=norms) == [1020]


def tables(start, end):
    """The code in the first cells of the tables between two headings."""
    text = PAGE[PAGE.index(f"\n## {start}\n") : PAGE.index(f"\n### {end}\n")]
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


class TestTheTables:
    def test_have_every_function(self):
        language = PAGE[PAGE.index("\n## Conditions\n") : PAGE.index("\n### Limits of a line\n")]
        named = re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", language)))
        assert {*FUNCTIONS} - {*named} == set()

    @pytest.mark.parametrize("code", tables("Conditions", "Limits of a line"))
    def test_have_nothing_that_cannot_be_read(self, code):
        """A letter stands for any value or condition."""
        letters = {"x": "grad_norm", "y": "param_norm", "a": "loss > 1", "b": "loss > 2", "own": "loss / own"}
        if code.startswith("head("):
            letters["x"] = 'heads("attention_entropy")'
        text = re.sub(r"\b(x|y|a|b|own)\b(?!=)", lambda found: letters[found[1]], code.replace(", ...", ""))
        if code in ("slope(x)", "r_squared(x)"):
            text = text.replace("x", "grad_norm")
        read, compiled = (
            (line.condition, grammar.condition)
            if re.match(r"(any|all|held|between|measured|finite|nonfinite)\(|a |b |not |[\d.]+ < |loss >", code)
            else (line.value, grammar.value)
        )
        compiled(Part(read(Part(text)).tree), Program())

    def test_show_what_the_command_says_of_a_slip(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        command, *shown = re.search(r"```console\n\$ (tsemon rules check .*?)```", PAGE, re.DOTALL)[1].splitlines()
        Path("mine.yaml").write_text(FILE.replace("any(attention_entropy", "any(atention_entropy"))
        assert CliRunner().invoke(app, command.split()[1:]).stderr.splitlines() == shown

    def test_show_a_tree_and_its_line(self):
        [(tree, text)] = re.findall(r"^when: (\{.*\})  # (.*)$", PAGE, re.MULTILINE)
        old, new = load(f"rules: [{{name: a, when: {tree}}}, {{name: b, when: {text}}}]")
        assert old.tree["when"] == new.tree["when"]

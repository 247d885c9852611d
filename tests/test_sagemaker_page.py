"""docs/sagemaker-debugger.md, held against the rules, the catalogue and what it names of tsemon."""

import inspect
import re
from pathlib import Path

import pytest

import tsemon
from tests.server.rules.definitions import events, layers_view
from tsemon import actions
from tsemon.catalogue import LAYERED, SCALARS
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.program import View

PAGE = (Path(__file__).parent.parent / "docs" / "sagemaker-debugger.md").read_text()
RULES = {rule.name: rule for rule in PACK}
SMDEBUG = """
    AllZero CheckInputImages ClassImbalance Confusion CreateXgboostReport DeadRelu ExplodingTensor
    FeatureImportanceOverweight LossNotDecreasing NLPSequenceRatio Overfit Overtraining PoorWeightInitialization
    SaturatedActivation SimilarAcrossRuns StalledTrainingRule TensorVariance TreeDepth UnchangedTensor
    VanishingGradient WeightUpdateRatio

    BatchSize CPUBottleneck GPUMemoryIncrease IOBottleneck LoadBalancing LowGPUUtilization MaxInitializationTime
    OverallFrameworkMetrics OverallSystemUsage ProfilerReport StepOutlier
"""


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(text):
    """The cells of each row of a table, the heading left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def shown():
    """The rules that the page writes out, by name."""
    [document] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return {rule.name: rule for rule in load(document)}


def fired(name, views):
    """The steps at which a rule of the page fires."""
    return [event.firing_step for event in events([shown()[name]], views) if event.kind == "firing"]


class TestTheRules:
    def test_has_a_row_for_each_rule_of_smdebug(self):
        named = re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows(section("The rules"))))
        assert {*re.findall(r"\w+", SMDEBUG)} <= {*named}

    def test_names_rules_that_there_are(self):
        named = re.findall(r"\[([a-z-]+)\]\(alerts\.md#([a-z-]+)\)", PAGE)
        assert len(named) > 15
        assert [name for name, anchor in named if name not in RULES or anchor != name] == []

    def test_names_the_aliases_that_the_rules_have_each_beside_its_rule(self):
        named = re.findall(r"`(\w+)`", section("The rules").split("\n|")[0])
        first = {theirs.strip("`").removesuffix("Rule"): ours for theirs, ours, _ in rows(section("The rules"))}
        told = {alias: re.match(r"\[([a-z-]+)\]", first[alias])[1] for alias in named}
        assert told == {alias: rule.name for rule in PACK for alias in rule.aliases}

    def test_shows_rules_that_can_be_read(self):
        assert [*shown()] == re.findall(r"the rule `([a-z-]+)` below", section("The rules"))


class TestTheRulesOfTheTable:
    def test_tell_of_a_block_that_gets_no_gradient(self):
        flows, stops = [0.1, 0.2, 0.3], [0.1, 0.0, 0.3]
        gradients = [flows, stops, flows, flows, *[stops] * 4]
        views = [layers_view(5 * i, grad_norm=norms) for i, norms in enumerate(gradients)]
        assert fired("gradient-is-zero", views) == [5 * 6], "the third in a row: one alone may be a batch"

    def test_tell_of_a_validation_loss_that_stays_a_tenth_above_the_training_loss(self):
        losses = [1.0, 1.05, 1.2, 1.0, *[1.2] * 6]
        views = [View(5 * i, {"loss_mean": 1.0, "validation_loss": loss}, {}) for i, loss in enumerate(losses)]
        assert fired("overfit", views) == [5 * 8], "the fifth in a row"

    def test_tell_of_a_validation_loss_that_falls_no_more(self):
        losses = [1.0, 0.9, *[0.8] * 14]
        views = [View(100 * i, {"validation_loss": loss}, {}) for i, loss in enumerate(losses)]
        assert fired("overtraining", views) == [200 + 1000 + 200], (
            "the third in a row, a thousand steps after the last fall"
        )


class TestTheCollections:
    def test_name_measures_of_the_catalogue(self):
        for _, measures in rows(section("Collections")):
            named = re.findall(r"`([a-z_]+)`", measures)
            assert [name for name in named if name not in LAYERED and name not in SCALARS] == []


class TestTheHook:
    @pytest.mark.parametrize("argument", ["every", "budget", "spool_dir", "server", "measures", "blocks", "attention"])
    def test_names_arguments_of_attach(self, argument):
        assert re.search(rf"`{argument}[`=]", section("The hook"))
        assert argument in inspect.signature(tsemon.attach).parameters

    def test_names_actions_that_there_are(self):
        named = re.findall(
            r"`([A-Z]\w+)(?:\(\))?`", " ".join(cells[1] for cells in rows(section("Actions, and the rest")))
        )
        assert named == ["Stop", "SaveCheckpoint", "LowerLearningRate", "Burst"]
        assert all(hasattr(actions, name) for name in named)

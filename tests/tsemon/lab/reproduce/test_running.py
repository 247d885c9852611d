import json
import sys
from types import ModuleType

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingDevice
from tsemon.lab.reproduce import experiments, running
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.result import OURS, Claim, Experiment, Plot, Result, Spread


@pytest.fixture
def runs():
    """The trials that have been run."""
    return []


@pytest.fixture
def module(monkeypatch, runs):
    """An experiment of two trials, beside those that there are."""
    made = ModuleType("falling")
    made.EXPERIMENT = Experiment(name="falling", title="Things fall", source="A paper")

    def trial(height):
        runs.append(height)
        return {"heights": [height, 0.1 * height]}

    def result(quick, seed, found):
        figure, _ = panels("height")
        heights = Spread([found[key]["heights"][1] for key in ("low", "high")])
        claims = [Claim(paper="How far?", seen=str(heights), agrees=OURS)]
        return Result(settings={}, claims=claims, plots={"height": Plot(figure=figure, caption="Height.")})

    made.trials = lambda quick, seed: {"low": lambda: trial(seed + 1.0), "high": lambda: trial(seed + 3.0)}
    made.result = result
    monkeypatch.setattr(experiments, "MODULES", (made,))
    monkeypatch.setattr(running, "EXPERIMENTS", {"falling": made.EXPERIMENT})
    return made


class TestAnExperimentOfTrials:
    def test_has_a_page_with_the_numbers_of_all(self, module, runs, tmp_path):
        page = running.run("falling", tmp_path, quick=True)
        assert runs == [1.0, 3.0]
        assert f"| How far? | 0.200 ± 0.141 | {OURS} |" in page.read_text().splitlines()
        assert not (tmp_path / ".trials").exists()

    def test_goes_on_where_it_was_interrupted(self, module, runs, tmp_path):
        running.run_trial("falling", "low", tmp_path, quick=True)
        assert (
            running._Work(["falling"], tmp_path, True, 0).describe()
            == "3 parts to run, 1 of them known from an earlier run"
        )
        running.run("falling", tmp_path, quick=True)
        assert runs == [1.0, 3.0], "each once"

    def test_of_another_size_starts_anew(self, module, runs, tmp_path):
        running.run_trial("falling", "low", tmp_path, quick=True)
        assert running._Work(["falling"], tmp_path, False, 0).missing() == [("falling", "low"), ("falling", "high")]

    def test_of_another_seed_starts_anew(self, module, runs, tmp_path):
        running.run_trial("falling", "low", tmp_path, quick=True)
        page = running.run("falling", tmp_path, quick=True, seed=4).read_text()
        assert runs == [1.0, 5.0, 7.0]
        assert "`tsemon reproduce falling --quick --seed 4`" in page

    def test_of_other_code_starts_anew(self, module, runs, tmp_path, monkeypatch):
        running.run_trial("falling", "low", tmp_path, quick=True)
        monkeypatch.setattr(running, "_code", lambda: "changed")
        assert running._Work(["falling"], tmp_path, True, 0).missing() == [("falling", "low"), ("falling", "high")]

    def test_keeps_no_half_of_a_trial(self, module, tmp_path, monkeypatch):
        monkeypatch.setattr(json, "dumps", lambda value: sys.exit("interrupted"))
        with pytest.raises(SystemExit):
            running.run_trial("falling", "low", tmp_path, quick=True)
        assert running._Work(["falling"], tmp_path, True, 0).missing() == [("falling", "low"), ("falling", "high")]


class TestAnExperimentOfSeeds:
    @pytest.fixture
    def drawn(self, monkeypatch):
        """An experiment that is run in full for each seed."""
        made = ModuleType("drawn")
        made.EXPERIMENT = Experiment(name="drawn", title="Dice fall", source="A paper", num_seeds=3)

        def run(quick, seed=0):
            figure, _ = panels("points")
            claims = [Claim(paper="What falls?", seen=f"{seed + 1:.1f} points", agrees="yes")]
            return Result(settings={}, claims=claims, plots={"points": Plot(figure=figure, caption="Points.")})

        made.run = run
        monkeypatch.setattr(experiments, "MODULES", (made,))
        monkeypatch.setattr(running, "EXPERIMENTS", {"drawn": made.EXPERIMENT})

    def test_has_a_page_with_the_mean_of_all(self, drawn, tmp_path):
        assert running._Work(["drawn"], tmp_path, False, 0).missing() == [("drawn", "seed 1"), ("drawn", "seed 2")]
        page = running.run("drawn", tmp_path, quick=False)
        assert "| What falls? | 2.0 ± 1.0 points | yes |" in page.read_text().splitlines()

    def test_has_seeds_of_its_own_with_another_seed(self, drawn, tmp_path):
        assert running._Work(["drawn"], tmp_path, False, 1).missing() == [("drawn", "seed 4"), ("drawn", "seed 5")]
        page = running.run("drawn", tmp_path, quick=False, seed=1).read_text()
        assert "| What falls? | 5.0 ± 1.0 points | yes |" in page.splitlines()
        assert "- seeds: 3 to 5; plots and tables are of seed 3" in page

    def test_has_one_seed_if_it_is_quick(self, drawn, tmp_path):
        assert running._Work(["drawn"], tmp_path, True, 0).missing() == []
        page = running.run("drawn", tmp_path, quick=True).read_text()
        assert "| 1.0 points |" in page
        assert "- seeds: 0\n" in page


def test_an_experiment_that_needs_a_gpu_says_so(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(MissingDevice, match="CUDA"):
            running.run("value-residual-82m", tmp_path, quick=True)


class TestTheProgress:
    def test_counts_trials_and_pages(self, module, tmp_path):
        work = running._Work(["falling"], tmp_path, True, 0)
        assert work.progress == (0, 3)
        work.finish("falling", "low")
        assert work.progress == (1, 3)
        assert not work.is_ready("falling")
        work.finish("falling", "high")
        work.num_pages += 1
        assert work.is_ready("falling")
        assert work.progress == (3, 3)


class TestAName:
    def test_must_be_known(self, tmp_path):
        with pytest.raises(InvalidArgument, match="did you mean 'escalation'"):
            running.reproduce(["escalaton"], tmp_path, quick=True, jobs=1)


class TestASpread:
    def test_has_mean_and_standard_deviation(self):
        spread = Spread([1.0, 2.0, 4.0])
        assert spread.mean == pytest.approx(7 / 3)
        assert spread.deviation == pytest.approx((14 / 6) ** 0.5)
        assert str(spread) == "2.333 ± 1.528"

    def test_of_one_seed_shows_no_deviation(self):
        assert str(Spread([2.5])) == "2.500"

    def test_is_below_another_by_more_than_both_deviations(self):
        low, high = Spread([1.0, 1.2]), Spread([1.5, 1.7])
        assert low.is_below(high)
        assert high.is_above(low)
        assert not high.is_below(low)
        assert not low.is_below(Spread([1.2, 1.4]))
        assert low.is_below(1.3)
        assert not low.is_below(1.2)

    def test_of_what_is_not_finite_is_neither(self):
        lost = Spread([float("nan"), 1.0])
        assert not lost.is_below(2.0)
        assert not lost.is_above(0.0)

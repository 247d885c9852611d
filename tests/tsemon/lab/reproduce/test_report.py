import json
from dataclasses import replace

import pytest

from tsemon.errors import InvalidArgument
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.report import write, write_index
from tsemon.lab.reproduce.result import NOT_TESTABLE, Claim, Experiment, Plot, Result, Table, verdict

EXPERIMENT = Experiment(name="falling", title="Things fall", source="A paper, Figure 1")


@pytest.fixture
def result():
    figure, (panel,) = panels("height")
    panel.plot([3, 2, 1])
    return Result(
        settings={"trials": 3, "seed": 0},
        claims=[
            Claim(paper="It falls", seen="3 to 1", agrees=verdict(1 < 3)),
            Claim(paper="It flies | up", seen="not once", agrees=verdict(1 > 3)),
        ],
        plots={"height": Plot(figure=figure, caption="Height over time.")},
        tables=[Table(title="Heights", columns=("time", "height"), rows=[(0, 3.14159), (1, "1e-9")])],
        notes=["The air was still."],
    )


class TestVerdict:
    @pytest.mark.parametrize(
        ("conditions", "expected"), [((True, True), "yes"), ((True, False), "in part"), ((False, False), "no")]
    )
    def test_is_yes_where_all_hold_and_no_where_none_does(self, conditions, expected):
        assert verdict(*conditions) == expected

    def test_is_not_given_on_what_nobody_tested(self):
        with pytest.raises(InvalidArgument, match="needs one condition or more"):
            verdict()


class TestAPage:
    @pytest.fixture
    def page(self, result, tmp_path):
        return write(result, EXPERIMENT, tmp_path / "out", quick=True, seconds=2.4).read_text()

    @pytest.mark.parametrize(
        "line",
        [
            "# Things fall",
            "A paper, Figure 1. Repeat it with `tsemon reproduce falling --quick`.",
            "| It falls | 3 to 1 | yes |",
            "| It flies \\| up | not once | no |",
            "![Height over time.](falling-height.png)",
            "- trials: 3",
            "- The air was still.",
            "| 0 | 3.142 |",
            "| 1 | 1e-9 |",
        ],
    )
    def test_says(self, page, line):
        assert line in page.splitlines()

    def test_lies_beside_its_figures_and_numbers(self, page, tmp_path):
        assert (tmp_path / "out/falling-height.png").read_bytes().startswith(b"\x89PNG")
        body = json.loads((tmp_path / "out/falling.json").read_text())
        assert body["tables"][0]["rows"][0] == [0, 3.14159]
        assert body["is_quick"]


class TestAPageWithReadings:
    def test_has_a_column_for_them(self, result, tmp_path):
        printed = Claim(paper="It floats", seen="for 1 s", reading="for 2 s", agrees=NOT_TESTABLE)
        page = write(replace(result, claims=[printed]), EXPERIMENT, tmp_path, quick=True, seconds=2.4)
        lines = page.read_text().splitlines()
        assert "| The paper says | As printed | As we read it | Agrees |" in lines
        assert f"| It floats | for 1 s | for 2 s | {NOT_TESTABLE} |" in lines


class TestAPageOfAnUnstableVerdict:
    def test_says_so(self, result, tmp_path):
        claim = Claim(paper="It floats", seen="for 1 s", agrees="in part", is_stable=False)
        page = write(replace(result, claims=[claim]), EXPERIMENT, tmp_path, quick=True, seconds=2.4)
        assert "| It floats | for 1 s | in part (unstable) |" in page.read_text().splitlines()


class TestTheMachine:
    @pytest.mark.parametrize(("needs_gpu", "device"), [(False, "CPU ("), (True, "A GPU, ")])
    def test_is_the_gpu_only_where_the_experiment_runs_on_it(self, result, tmp_path, monkeypatch, needs_gpu, device):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "A GPU")
        experiment = Experiment(name="falling", title="", source="", needs_gpu=needs_gpu)
        write(result, experiment, tmp_path, quick=True, seconds=1.0)
        assert json.loads((tmp_path / "falling.json").read_text())["machine"].startswith(device)


class TestTheIndex:
    def test_holds_the_claims_of_all_pages_in_the_folder(self, result, tmp_path):
        write(result, EXPERIMENT, tmp_path, quick=True, seconds=2.4)
        rising = Experiment(name="rising", title="Things rise", source="Another paper")
        write(result, rising, tmp_path, quick=False, seconds=60.0)
        lines = write_index(tmp_path, ["rising", "falling"]).read_text().splitlines()
        assert lines.index("## [Things rise](rising.md)") < lines.index("## [Things fall](falling.md)")
        assert lines.count("| It falls | 3 to 1 | yes |") == 2
        assert sum("the quick version" in line for line in lines) == 1
        assert "Verdicts: 2 yes, 2 no." in lines

"""What a chart gives to take away: names of files, and tables."""

import csv
import io

import pytest

SHOWN = {
    "runs": ["gpt"],
    "metric": "centred_token_similarity of layer 3",
    "steps": [0, 1000],
    "columns": ["step", "mean"],
    "rows": [[0, 0.5], [1000, None]],
}


def ask(page, function, shown, *more):
    """What a function of the page's module answers, called in the page."""
    page.goto("/ui/catalogue.json")  # a document of the same origin, without scripts of its own
    return page.evaluate(
        "([name, args]) => import('/ui/charts/download.js').then((module) => module[name](...args))",
        [function, [SHOWN | shown, *more]],
    )


def table(text):
    """The comment lines, and the rows after them as a spreadsheet reads them."""
    lines = text.split("\r\n")
    comments = [line for line in lines if line.startswith("# ")]
    return comments, list(csv.reader(io.StringIO("\r\n".join(lines[len(comments) :]))))


class TestTheNameOfAFile:
    def test_says_run_metric_and_steps(self, page):
        assert ask(page, "fileName", {}, "png") == "gpt_centred_token_similarity-of-layer-3_steps-0-1000.png"

    def test_counts_further_runs(self, page):
        assert ask(page, "fileName", {"runs": ["a", "b", "c"]}, "csv").startswith("a-and-2-more_")

    @pytest.mark.parametrize(
        ("run", "name"),
        [
            ("../../etc/passwd", "etc-passwd"),
            ('<b>"x"', "b-x"),
            ("...", "unnamed"),
            ("عربي", "عربي"),
            ("x" * 300, "x" * 60),
        ],
    )
    def test_is_one_that_a_file_system_takes(self, page, run, name):
        assert ask(page, "fileName", {"runs": [run]}, "csv").split("_")[0] == name


class TestATable:
    def test_says_run_metric_and_steps_above_its_rows(self, page):
        comments, rows = table(ask(page, "csvOf", {}))
        assert comments == ["# run: gpt", "# metric: centred_token_similarity of layer 3", "# steps: 0 to 1000"]
        assert rows == [["step", "mean"], ["0", "0.5"], ["1000", ""]]

    def test_keeps_a_name_in_its_cell_and_in_its_line(self, page):
        comments, rows = table(ask(page, "csvOf", {"runs": ["a\nb,c"], "columns": ["step", 'h,"0"\n1']}))
        assert comments[0] == "# run: a b,c"
        assert rows[0] == ["step", 'h,"0"\n1']

    def test_gives_a_spreadsheet_no_formula_to_run(self, page):
        _, rows = table(ask(page, "csvOf", {"columns": ["step", "=HYPERLINK(1)"], "rows": [[0, -1.5]]}))
        assert rows == [["step", "'=HYPERLINK(1)"], ["0", "-1.5"]]

    def test_gives_it_none_in_the_lines_above_the_rows_either(self, page):
        """There, a comma in a name begins another cell."""
        comments, _ = table(ask(page, "csvOf", {"runs": ["a,=1+1", "@x", "b-c;+1", "1-1"]}))
        assert comments[0] == "# run: a,'=1+1, '@x, b-c;'+1, 1-1"

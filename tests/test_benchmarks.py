"""The benchmarks run, in their smallest size: in `make test` the short ones. What they measure is not judged here."""

import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.databases import PostgresServer

ROOT = Path(__file__).parent.parent


def run(script, *arguments, timeout=300):
    done = processes.run(processes.start_python, ROOT / "benchmarks" / script, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_command(path):
    text = path.read_text()
    return '__name__ == "__main__"' in text and "parse_args(" in text


@pytest.mark.thorough
class TestStepOverhead:
    def test_has_a_row_and_a_dot_for_every_condition(self, tmp_path):
        svg = tmp_path / "ratios.svg"
        printed = run("step_overhead.py", "--size", "tiny", "--rounds", "1", "--cycles", "1", "--svg", svg)
        rows = re.findall(r"^\| ([^|]+) \| [\d.]+(?: \| [\d.]+ \| [\d.]+ to [\d.]+){2} \|$", printed, re.MULTILINE)
        ours = ["none", "unsampled", "sampled", "sampled, slow tier too", "amortised"]
        ours += ["sampled, those on demand too", "naive hooks", "cockpit economy (equivalent)"]
        assert [name for name in rows if not name.startswith("wandb")] == ours
        assert '| wandb.watch(log="all") |' in printed  # with figures, or with what to install
        assert svg.read_text().count("<circle") == len(rows) - 1
        assert "fault" not in printed.replace("contained_faults", "")


class TestCadence:
    def test_has_a_row_for_every_window(self):
        printed = run("cadence.py", "--starts", "1", "--window", "0.01", "--budget", "0.5")  # short gaps
        windows = re.findall(
            r"^\| ([a-z :]+) \| [\d.]+ \| [\d.]+% \| \d+ to \d+, \d+ samples \|$", printed, re.MULTILINE
        )
        assert windows == [
            "before",
            "just after: five times faster",
            "after",
            "just after: five times slower",
            "after",
        ]


@pytest.mark.thorough
class TestSoak:
    def test_has_a_row_for_every_process_and_loses_no_frame(self):
        printed = run("soak.py", "--minutes", "0.05", "--runs", "3", "--trainers", "2", "--rate", "20")
        rows = re.findall(r"^\| ([a-z0-9 ]+) \| (?:[\d.]+ \| ){5}[+-][\d.]+ \|$", printed, re.MULTILINE)
        assert rows == ["service", "trainer 1", "trainer 2"]
        assert printed.endswith("180 frames made, 180 confirmed, 180 stored\n")


@pytest.mark.thorough
class TestIngestRate:
    def test_has_a_row_for_every_number_of_runs_and_frames_on_each_engine(self):
        engines = ["SQLite"] + ["PostgreSQL"] * PostgresServer.is_installed()
        small = ["--seconds", "0.3", "--runs", "1", "3", "--frames", "1", "4", "--stored", "100", "--floor-frames", "3"]
        printed = run("ingest_rate.py", *small, "--engines", *(name.lower() for name in engines))
        number = r"(?:[\d,.]+|nan)"
        rates = re.findall(
            rf"^\| (\d+) \| (\d+) \| {number} \| {number} \| {number} \| {number} \|$", printed, re.MULTILINE
        )
        assert rates == [("1", "1"), ("1", "4"), ("3", "1"), ("3", "4")] * len(engines)
        assert len(re.findall(rf"^\| 100 \| {COST} \| {COST} \|$", printed, re.MULTILINE)) == len(engines)
        floors = re.findall(rf"^\| ([a-zA-Z][^|]*) \| {number} \| {number} \| {number} \|$", printed, re.MULTILINE)
        inserts = [f"{name}, one blob INSERT per commit" for name in engines]
        assert floors == ["raw append, fsync per frame", *inserts]


class TestMetricsCost:
    def test_has_a_row_for_every_number_of_runs_and_what_counting_costs(self):
        printed = run("metrics_cost.py", "--runs", "1", "2", "--rounds", "1", "--bodies", "100")
        number = r"[\d,.]+"
        rows = re.findall(rf"^\| (\d+) \| (all|4) metrics(?: \| {number}){{7}} \|$", printed, re.MULTILINE)
        assert rows == [("1", "all"), ("1", "4"), ("2", "all"), ("2", "4")]
        counted = re.findall(rf"^\| ([a-z ]+) \| {number} \|$", printed, re.MULTILINE)
        assert counted == ["one process", "shared among workers"]


PEERS = ["MLflow, SQLite", "trackio", "TensorBoard", "TensorBoard, a value at a time", "Aim"]
SMALL = ["--steps", "600", "--wide-steps", "--peer-steps", "3", "--engines"]
COST = r"[\d.]+ \([\d.]+\)"
"""CPU and wall milliseconds."""


def peers_in(printed):
    """Each has its row: with figures and a version, or with what is missing."""
    return re.findall(rf"^\| ({'|'.join(PEERS)})(?: \d[\w.]*)? \| ", printed, re.MULTILINE)


@pytest.mark.thorough
class TestStorageSize:
    def test_has_a_row_for_every_size_and_every_way_to_keep_values(self, tmp_path):
        engines = ["SQLite"] + ["PostgreSQL"] * (shutil.which("initdb") is not None)
        svg = tmp_path / "size.svg"
        small = [*SMALL, *(name.lower() for name in engines)]
        printed = run("storage_size.py", *small, "--peers", sys.executable, "--svg", svg)
        sizes = re.findall(r"^\| 600 x 4 \| (\w+) \| ([\d.]+) \| [\d,]+ \| [\d,]+ \|$", printed, re.MULTILINE)
        assert [name for name, _ in sizes] == engines
        assert all(2 < float(size) < 40 for _, size in sizes)  # the noise of float32 below, pages of small tables above
        posted = re.findall(r"^\| tsemon, (\w+) \| POST, (\d+) steps? a body", printed, re.MULTILINE)
        assert posted == [(name, number) for name in engines for number in ("1", "100")]
        assert peers_in(printed) == PEERS
        floors = re.findall(r"^\| floor of the machine \| ([^|]+) \|.*\| ([\d.]+) \|$", printed, re.MULTILINE)
        assert floors[0] == ("raw append, fsync per frame", "4.00")
        assert [name for name, _ in floors[1:]] == ["SQLite, one blob INSERT per commit"]
        assert "bytes a value" in svg.read_text()


@pytest.mark.thorough
class TestQueryLatency:
    def test_has_a_cell_for_every_question_and_a_row_for_every_tool(self, tmp_path):
        svg = tmp_path / "latency.svg"
        printed = run("query_latency.py", *SMALL, "sqlite", "--runs", "3", "--round-s", "0.01", "--svg", svg)
        questions = re.findall(rf"^\| ([^|]+) \| {COST} \|$", printed, re.MULTILINE)
        assert len(set(questions)) == len(questions) == 6
        assert re.search(rf"^SQLite, 50 of 3 runs: {COST}$", printed, re.MULTILINE)
        assert re.search(
            rf"^\| tsemon, SQLite \| GET series, GET heatmap \| {COST} \| {COST} \|$", printed, re.MULTILINE
        )
        assert peers_in(printed) == PEERS
        assert "CPU ms" in svg.read_text()


@pytest.mark.thorough
class TestFleet:
    def test_has_a_row_for_every_question(self):
        small = ["--runs", "120", "--glanced", "2", "--steps", "600", "--round-s", "0.01", "--engines", "sqlite"]
        printed = run("fleet.py", *small)
        questions = re.findall(rf"^\| (GET [^|]+) \| {COST} \|$", printed, re.MULTILINE)
        assert len(set(questions)) == len(questions) == 23
        assert {question.split()[1].rstrip(",") for question in questions} >= {"/runs", "/tags", "/glances", "/compare"}


class TestEventFiles:
    def test_has_a_row_for_each_way_to_write_and_for_the_import(self):
        printed = run("event_files.py", "--frames", "3")
        assert (
            len(re.findall(r"^\| a frame, layers='\w+' \| [\d.]+ ms \| [\d.]+ MB in all \|$", printed, re.MULTILINE))
            == 2
        )
        assert re.search(r"^\| the import of these \| [\d.]+ s \| \d+ MiB of memory \|$", printed, re.MULTILINE)


@pytest.mark.thorough
class TestFirstPaint:
    def test_has_a_cell_for_every_question(self):
        if not (shutil.which("chromium-headless-shell") or shutil.which("chromium")):
            pytest.skip("Chromium is not installed")
        printed = run("first_paint.py", "--steps", "100", "--rounds", "1")
        rows = re.findall(r"^\| ([^|]+) \| [\d,]+ \([\d,]+\) \|$", printed, re.MULTILINE)
        assert len(set(rows)) == len(rows) == 8
        assert rows[0] == "first paint, nothing in the cache"


@pytest.mark.thorough
class TestDetection:
    def test_says_when_a_run_began_to_fail_and_when_that_was_called(self, tmp_path):
        folder, traces, svg = tmp_path / "trainings", tmp_path / "traces", tmp_path / "detection.svg"
        both = ["--folder", folder, "--only", "relu-dead"]  # with its healthy twin
        page = tmp_path / "page.md"
        shutil.copy(ROOT / "docs/detection.md", page)
        printed = run("detection.py", *both, "--live", "relu-dead", "--traces", traces, "--svg", svg)
        row = re.search(
            r"^\| relu-dead\*? \| [^|]+ \| (\d+) \| - \| (\d+) \| (\d+) ([a-z-]+) \|", printed, re.MULTILINE
        )
        onset, plateau, first = map(int, row.groups()[:3])
        assert 70 <= onset <= 72  # the biases fall at step 70
        assert onset <= first < plateau
        assert "| all | 1 | 300 | 0 | 0 | 0 |" in printed  # healthy runs
        assert "relu-dead: the same alarms live" in printed
        assert {path.name for path in traces.iterdir()} == {"relu-5.jsonl.gz", "relu-dead.jsonl.gz"}
        assert "relu-dead" in svg.read_text()
        assert row.group() in run("detection.py", *both, "--page", page)  # from the folder
        assert row.group() in page.read_text()
        gaps = run("detection.py", *both, "--gaps", "5", "50")
        assert f"| 5 | 1 of 1 | 1 of 1 | {first - onset:+d} | 1.0 |" in gaps  # as with all samples
        assert "| 50 | 1 of 1 | " in gaps
        family = re.search(
            r"^\| dead \| 1 \| 1 \| 1 \| 1\.0 \| (\d+)\.0 \| 0 \| 0 \| 1 \|", page.read_text(), re.MULTILINE
        )
        assert int(family[1]) >= 1


class TestCalibration:
    def test_counts_a_family_as_right_only_if_the_verdict_names_it(self, tmp_path):
        for name in ("div_nan-s0", "tse_pre_lr-s0"):  # in the second run, attention collapses before tokens grow alike
            shutil.copy(ROOT / f"tests/data/traces/{name}.jsonl.gz", tmp_path)
        printed = run("calibration.py", tmp_path)
        rows = re.findall(r"^\| (\w+) \| (\d) \| ([\d.]+) \| ([\d.]+) \|", printed, re.MULTILINE)
        assert rows == [("diverge", "1", "1.00", "1.00"), ("tse", "1", "1.00", "0.00"), ("all", "2", "1.00", "0.50")]


@pytest.mark.thorough
class TestFalseAlarms:
    def test_counts_steps_samples_and_alarms(self):
        printed = run("false_alarms.py", "--only", "BERT-2")
        assert "| Hugging Face, as they start | 1 | 60 | 12 | 0 | 0.000 |" in printed


@pytest.mark.thorough
class TestPacked:
    @pytest.mark.parametrize(
        ("training", "steps", "rule"),
        [
            ("gpt-post-20", 35, "token-similarity-escalation"),  # at 20 or 25, by the build of torch
            ("bert-qk-x12", 20, "attention-block-entropy-collapse"),
            ("gpt-attention-only", 20, "token-similarity-escalation"),
            ("bert-decay-negative", 30, "update-misalignment"),
            ("gpt-graph-cut", 25, "block-does-not-move"),
            ("bert-nan", 80, "loss-not-finite"),
            ("gpt-same-batch", 80, "sequences-repeat"),
        ],
    )
    def test_finds_the_same_alerts_in_packed_rows(self, training, steps, rule):
        layouts = ("--layouts", "rows", "varlen")
        printed = run("packed.py", "--only", training, "--steps", str(steps), *layouts)
        row = re.search(rf"^\| {training} \| [^|]+ \| ([^|]+) \| (.+) \| - \| (.+) \| - \|$", printed, re.MULTILINE)
        alerts, *packed = row.groups()
        assert f"{rule} at " in alerts
        assert all(re.match(r"same(, other layers in [a-z, -]+)?$", words) for words in packed)

    def test_finds_none_in_health(self):
        printed = run("packed.py", "--only", "gpt-mixed", "bert-hugging-face", "--steps", "40", "--layouts", "rows")
        assert "| gpt-mixed | 12 documents of 2 to 120 tokens, 6 a row | none | same | - | - | - |" in printed
        assert "| bert-hugging-face | Hugging Face's BERT | none | same | - | - | - |" in printed


@pytest.mark.thorough
class TestBodies:
    def test_has_a_row_for_every_kind_and_size(self):
        engines = ["SQLite"] + ["PostgreSQL"] * PostgresServer.is_installed()
        small = ("--steps", "8", "--rounds", "1", "--frames", "8", "--bodies", "1", "4")
        printed = run("bodies.py", *small, "--engines", *(name.lower() for name in engines))
        both = ("application/json", "application/vnd.tsemon.frames")
        expected = [(size, kind) for size in ("1", "4") for kind in both]
        reading = re.findall(r"^\| (\d+) \| (\S+) \| [\d,]+ \| \d+ \| \d+ \|$", printed, re.MULTILINE)
        served = re.findall(r"^\| (\d+) \| (\S+) \| \d+ \| [\d,]+ \| [\d,]+ \| .+ to .+ \|$", printed, re.MULTILINE)
        assert (reading, served) == (expected, expected * len(engines))


@pytest.mark.thorough
class TestOverload:
    def test_stores_all_frames_of_all_clients(self):
        small = ("--clients", "3", "--frames", "8", "--steps", "8", "--rest-s", "0.1", "--engines", "sqlite")
        printed = run("overload.py", *small)
        assert re.search(r"^\| SQLite \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 0 \| 0 \| - \|", printed, re.MULTILINE)


LIVE_COLUMNS = (
    *("family", "steps", "samples", "zooms", "overhead", "onset", "loss_rules", "first_alert", "delay", "num_false"),
)
LIVE_SHORT = (
    *("text-nan", "text-shuffled", "text-decay", "text-inflated", "text-rate-0", "text-rate-x25", "text-post"),
    *("digits-qk", "digits-constant", "digits-ascent", "digits-attention", "digits-post"),
    *("gpt2-nan", "gpt2-shuffled", "gpt2-rate", "gpt2-same-batch", "gpt2-norm", "gpt2-embedding", "bert-decay"),
)
# Four of the 28 defects are left out, since this seed does not show them within 600 steps. text-block-x4 harms no run.
# bert-random and bert-rate harm this one later. text-rate-tiny is found, but only 446 steps after its onset.
# docs/detection.md has all 28 with three seeds of 1,000 steps.
LIVE_LONG = "vit-forgotten", "vit-random", "vit-same-batch", "vit-decay-20", "vit-shuffled"


@pytest.fixture(scope="module")
def printed():
    """29 trainings, 6 minutes of a quiet core. The vision transformer of Hugging Face learns too little in 600 steps."""
    one_seed = "live.py", "--seeds", "1"
    short = run(*one_seed, "--steps", "600", "--only", *LIVE_SHORT, timeout=1800)
    return short + run(*one_seed, "--only", *LIVE_LONG, timeout=1800)


@pytest.fixture(scope="module")
def rows(printed):
    found = [line.strip("| ").split(" | ") for line in printed.splitlines() if re.match(r"\| \S+-71 \|", line)]
    return {name: dict(zip(LIVE_COLUMNS, cells, strict=True)) for name, *cells in found}


@pytest.mark.thorough
class TestLive:
    def test_trains_failing_and_healthy_models_of_every_family(self, rows):
        """These are judged, unlike other benchmarks: what users get without any setting."""
        families = {row["family"] for row in rows.values()}
        assert families == {"healthy", "loss", "diverge", "norm", "dead", "entropy", "tse", "data", "rank", "fresh"}
        assert len(rows) >= 24

    def test_raises_no_false_alert(self, printed, rows):
        assert {name for name, row in rows.items() if row["num_false"] != "0"} == set(), printed

    def test_finds_most_harmed_runs_with_a_median_delay_of_60_steps(self, printed, rows):
        """The target is 0.95 of all seeds of 1,000 steps, in docs/detection.md. On a busy machine 600 steps have 4 samples,
        and text-rate-0 and gpt2-embedding can do with no fewer. text-post-71 is a toss-up."""
        harmed = [row for name, row in rows.items() if row["delay"] != "not harmed" and name != "text-post-71"]
        delays = [int(row["delay"]) for row in harmed if row["first_alert"] != "-"]
        assert len(harmed) >= 17, printed
        assert len(delays) >= len(harmed) - 3, printed
        assert statistics.median(delays) <= 60, printed

    def test_names_the_right_family_in_all_verdicts_but_two(self, printed):
        found = re.findall(r"^\* (\d+) of \d+ harmed runs found", printed, re.MULTILINE)
        right = re.findall(r"^\* verdict of the right family: (\d+) of", printed, re.MULTILINE)
        assert len(found) == len(right) == 2, printed
        assert sum(map(int, right)) >= sum(map(int, found)) - 2, printed
        assert printed.count("* a critical incident of a wrong family: 0\n") == 2, printed

    def test_is_hardly_behind_the_best_rule_on_the_loss(self, printed, rows):
        found = [row for row in rows.values() if row["first_alert"] != "-" and row["loss_rules"] != "inf"]
        lags = [int(row["first_alert"].split()[0]) - int(row["loss_rules"]) for row in found]
        assert len(lags) >= 10, printed
        assert max(lags) <= 20, printed
        assert statistics.median(lags) <= 5, printed

    def test_gives_the_same_alerts_when_it_is_replayed(self, printed):
        assert printed.count("* runs whose replay gives other alerts: 0\n") == 2, printed

    def test_reports_a_loss_that_is_not_finite_within_2_steps(self, printed, rows):
        for name in ("text-nan-71", "gpt2-nan-71"):
            assert rows[name]["first_alert"].endswith("loss-not-finite"), printed
            assert 0 <= int(rows[name]["delay"]) <= 2, printed

    def test_can_do_without_zooms(self):
        printed = run("live.py", "--no-zooms", "--seeds", "1", "--steps", "60", "--only", "text-nan")
        zooms = re.findall(r"^\| text(?:-nan)?-71 \|(?: [^|]+ \|){3} ([^|]+) \|", printed, re.MULTILINE)
        assert zooms == ["-", "-"]

    def test_can_sample_at_other_gaps(self):
        printed = run("live.py", "--gap", "5", "--no-zooms", "--seeds", "1", "--steps", "60", "--only", "text-nan")
        found = re.findall(r"^\| text(?:-nan)?-71 \| \w+ \| (\d+) \| (\d+) \| ([^|]+) \|", printed, re.MULTILINE)
        # 20 steps after the first NaN the training ends. The last frame has the losses since the last sample.
        assert found == [("60", "13", "-"), ("50", "12", "-")]
        assert "* a gap of 5 steps, without zooms: 1 of 1 harmed runs found, delay 0 steps (median)" in printed

    def test_zooms_in_between_samples_that_are_far_apart(self):
        printed = run("live.py", "--gap", "50", "--seeds", "1", "--steps", "200", "--only", "text-shuffled")
        found = re.findall(r"^\| text(?:-shuffled)?-71 \| \w+ \| 200 \| (\d+) \| ([^|]+) \|", printed, re.MULTILINE)
        (num, zooms), (num_zoomed, zooms_of_failing) = found
        assert (num, zooms, zooms_of_failing[:2]) == ("5", "-", "1,")
        assert int(num_zoomed) >= 9

    def test_costs_little_and_raises_nothing_in_a_healthy_training(self):
        """The target is 1.2 % in 5,000 steps; the first samples weigh three times as much in 1,500."""
        printed = run("live.py", "--healthy", "--steps", "1500", "--only", "text-cosine", timeout=600)
        row = r"^\| text-cosine \| .* \| 1,500 \| .* \| - \| ([\d.]+)% \| (.*) \|$"
        ((overhead, alerts),) = re.findall(row, printed, re.MULTILINE)
        assert float(overhead) <= 2.5, printed
        assert alerts == "-" or re.fullmatch(r"training-slow at \d+", alerts), printed  # on a busy machine

    def test_has_a_row_for_each_long_healthy_training(self):
        names = "text-fine-tuned", "digits-cleaner", "gpt2-evaluated"
        printed = run("live.py", "--healthy", "--steps", "20", "--only", *names)
        row = r"^\| ([a-z0-9-]+) \| .* \| 20 \| .* \| [\d.]+% \| - \|$"
        assert tuple(re.findall(row, printed, re.MULTILINE)) == names
        assert "3 runs, 60 steps" in printed


@pytest.mark.thorough
class TestPlanted:
    def test_names_the_block_and_the_sub_step_that_were_damaged(self, tmp_path):
        page = tmp_path / "page.md"
        shutil.copy(ROOT / "docs/detection.md", page)
        printed = run("planted.py", "--only", "post-output-81", "gpt2-norm-81", "--page", page, timeout=600)
        for name in ("post-output-81", "gpt2-norm-81"):
            assert re.search(rf"^\| {name} \| .* \| block, sub-step \|$", printed, re.MULTILINE), printed
        for what in ("the damaged block", "block within 2", "sub-step right"):
            assert f"* {what}: 2 of 2 (100%; 100% of all 2)" in page.read_text(), printed


@pytest.mark.thorough
class TestAttacks:
    def test_has_a_row_for_every_attack(self):
        printed = run("attacks.py", "--scale", "0.01", "--seconds", "0.2")
        rows = re.findall(r"^\| ([0-9][^|]+) \| [\d.]+ \| \d+ \| [\d.]+ \|$", printed, re.MULTILINE)
        assert len(rows) == len(set(rows)) == 9


class TestHistory:
    def test_has_the_cost_of_a_step_of_charts_and_of_a_value(self):
        found = run("history.py", "--steps", "3000", "--scalars", "3")
        assert re.fullmatch(
            r"3,000 steps of 3 scalars: [\d.]+ us a step\n3 charts of 1,000 points: \d+ ms; one: [\d.]+ ms\n"
            r"[\d.]+ bytes a value at rest\n",
            found,
        )


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if is_command(path)))
def test_every_benchmark_tells_its_options(script):
    assert run(script, "--help").startswith(f"usage: {script} ")

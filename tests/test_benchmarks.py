"""The benchmarks run, in their smallest size. What they measure is not judged here."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(script, *arguments):
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestStepOverhead:
    def test_has_a_row_and_a_dot_for_every_condition(self, tmp_path):
        svg = tmp_path / "ratios.svg"
        printed = run("step_overhead.py", "--size", "tiny", "--rounds", "1", "--cycles", "1", "--svg", svg)
        rows = re.findall(r"^\| ([^|]+) \| [\d.]+(?: \| [\d.]+ \| [\d.]+ to [\d.]+){2} \|$", printed, re.MULTILINE)
        ours = ["none", "unsampled", "sampled", "sampled, slow tier too", "amortised", "naive hooks"]
        ours += ["cockpit economy (equivalent)"]
        assert [name for name in rows if not name.startswith("wandb")] == ours
        assert '| wandb.watch(log="all") |' in printed  # with figures, or with what to install
        assert svg.read_text().count("<circle") == len(rows) - 1
        assert "fault" not in printed.replace("contained_faults", "")


class TestCadence:
    def test_has_a_row_for_every_window(self):
        printed = run("cadence.py", "--window", "0.01", "--budget", "0.5")  # a budget that makes gaps short
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


class TestSoak:
    def test_has_a_row_for_every_process_and_loses_no_frame(self):
        printed = run("soak.py", "--minutes", "0.05", "--runs", "3", "--trainers", "2", "--rate", "20")
        rows = re.findall(r"^\| ([a-z0-9 ]+) \| (?:[\d.]+ \| ){5}[+-][\d.]+ \|$", printed, re.MULTILINE)
        assert rows == ["service", "trainer 1", "trainer 2"]
        assert printed.endswith("180 frames made, 180 confirmed, 180 stored\n")

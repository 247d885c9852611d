import json
import os
import signal
import subprocess
import sys
import time
from typing import get_args

import psutil
import pytest

from tests import commands, processes
from tsemon.lab.reproduce import EXPERIMENTS, MODULES, available
from tsemon.lab.reproduce.result import Verdict

ONE, TWO = ("concentration",), ("concentration", "escalation")
one_and_two = pytest.mark.parametrize("done", [ONE, pytest.param(TWO, marks=pytest.mark.thorough)], indirect=True)


@pytest.fixture(scope="module")
def done(tmp_path_factory, request):
    """One or two of all, as `tsemon reproduce all --quick` runs them."""
    folder = tmp_path_factory.mktemp("reproduce")
    for name in request.param:
        done = commands.tsemon("reproduce", name, "--quick", "--out", "pages", folder=folder)
        assert done.returncode == 0, done.stderr
    return folder / "pages", done.stdout, request.param


class TestTheCommand:
    @one_and_two
    def test_writes_a_page_with_figures_and_numbers(self, done):
        folder, _, names = done
        for name in names:
            body = json.loads((folder / f"{name}.json").read_text())
            assert body["is_quick"]
            assert {claim["agrees"] for claim in body["claims"]} <= set(get_args(Verdict))
            assert (folder / f"{name}.md").read_text().startswith(f"# {EXPERIMENTS[name].title}\n")
            assert list(folder.glob(f"{name}-*.png"))

    @one_and_two
    def test_gathers_all_pages_of_the_folder_in_one_table(self, done):
        folder, said, names = done
        index = (folder / "README.md").read_text()
        places = [index.index(f"({name}.md)") for name in names]
        assert places == sorted(places, reverse=True), "as MODULES lists them"
        assert "pages/README.md" in said

    @pytest.mark.thorough
    @pytest.mark.parametrize("done", [TWO], indirect=True)
    def test_finds_the_escalation_of_the_classic_block(self, done):
        """That attention doubles xi_1 / xi_2 is what all else in the paper rests on."""
        body = json.loads((done[0] / "escalation.json").read_text())
        table = body["tables"][0]
        ratios = [row[table["columns"].index("step 1")] for row in table["rows"]]
        # The mean of 5 draws whose standard deviation is 0.11, over 20 blocks: 4 standard errors.
        assert all(abs(ratio - 2) < 0.2 for ratio in ratios), ratios


class TestNames:
    def test_an_unknown_one_gets_the_nearest(self, tmp_path):
        done = commands.tsemon("reproduce", "escalaton", folder=tmp_path)
        assert done.returncode == 2
        assert "did you mean 'escalation'?" in done.stderr
        assert "Traceback" not in done.stderr

    def test_pages_need_a_folder(self, tmp_path):
        (tmp_path / "file").touch()
        done = commands.tsemon("reproduce", "concentration", "--quick", "--out", "file", folder=tmp_path)
        assert done.returncode == 2
        assert "expected a folder to write pages to, got file" in done.stderr
        assert "Traceback" not in done.stderr

    def test_all_are_listed(self, tmp_path):
        """In a process of its own, as everything else here need not be."""
        done = processes.run(processes.start_tsemon, "reproduce", "list", folder=tmp_path)
        assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == list(EXPERIMENTS)
        assert "TSEMON_TEXT: its text" in done.stdout.splitlines()[-1]

    def test_are_each_one_modules(self):
        assert len(EXPERIMENTS) == len(MODULES) >= 11

    def test_all_leaves_out_what_needs_another_machine(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert set(EXPERIMENTS) - set(available()) == {"value-residual-82m"}
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        assert available() == list(EXPERIMENTS)


def is_in_group(process, group):
    """Whether it runs in this process group."""
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.mark.thorough
class TestAnInterruptedCommand:
    def start(self, folder):
        """In a process group of its own, as a shell starts it."""
        command = [
            sys.executable,
            "-m",
            "tsemon",
            "reproduce",
            "deep-transformer-xl",
            "--quick",
            "--jobs",
            "1",
            "--out",
            "pages",
        ]
        return subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def interrupt(self, process):
        """As Ctrl-C does."""
        os.killpg(process.pid, signal.SIGINT)
        try:
            return process.communicate(timeout=60)[0]
        finally:
            process.kill()

    def wait_for_a_trial(self, process, folder):
        deadline = time.monotonic() + 240
        while not [*folder.glob("pages/.trials/*/*.json")]:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def test_leaves_no_process_behind_when_it_alone_is_terminated(self, tmp_path):
        process = self.start(tmp_path)
        self.wait_for_a_trial(process, tmp_path)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        deadline = time.monotonic() + 30
        while alive := [one for one in psutil.process_iter() if is_in_group(one, process.pid)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)

    def test_ends_at_once_and_continues_with_the_remaining_trials(self, tmp_path):
        process = self.start(tmp_path)
        self.wait_for_a_trial(process, tmp_path)
        self.interrupt(process)
        known = len([*tmp_path.glob("pages/.trials/*/*.json")])
        assert known <= 2, "of 12; what waited was not run"
        again = self.start(tmp_path)
        first = again.stdout.readline()
        self.interrupt(again)
        assert first == f"13 parts to run, {known} of them known from an earlier run, 1 at a time\n"

"""Each extra brings what its commands need, and only those that run models bring PyTorch."""

import json
import os
import subprocess

import pytest
from packaging.utils import canonicalize_name

from tests.installing import PROJECT, ROOT, environment, needed
from tests.service import ServiceProcess

WITHOUT_TORCH = {"docs", "server", "postgres", "export", "client", "import", "pandas", "polars"}


def with_tsemon(folder, *extras):
    """The Python of an environment with these extras, and with tsemon as it lies here."""
    packages = environment(folder, *extras)
    (packages / "tsemon.pth").write_text("\n".join(map(str, (ROOT, ROOT / "server", ROOT / "clients"))))
    return folder / "bin/python"


def run(python, *arguments, timeout_s=120, **variables):
    return subprocess.run(
        [python, *arguments],
        cwd=python.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class TestTheExtras:
    @pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
    def test_bring_pytorch_where_models_run_and_nowhere_else(self, extra):
        assert ("torch" in needed([f"tsemon[{extra}]"])) == (extra not in WITHOUT_TORCH)

    def test_of_the_training_side_alone_there_are_none(self):
        assert PROJECT["dependencies"] == []


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    return with_tsemon(tmp_path_factory.mktemp("client") / "venv", "client")


class TestWithoutPyTorch:
    def test_the_server_serves_and_the_client_and_its_commands_ask(self, tmp_path, client):
        server = with_tsemon(tmp_path / "venv", "server")
        with ServiceProcess(tmp_path / "runs.db", python=server) as service:
            listings = [
                run(python, "-m", "tsemon", "runs", "--json", "--server", service.url) for python in (client, server)
            ]
            asked = run(client, "-c", f"import tsemon_client as t; print(list(t.Client('{service.url}').runs()))")
        assert [(listed.returncode, listed.stderr) for listed in listings] == [(0, ""), (0, "")]
        assert asked.stdout == "[]\n", asked.stderr
        for python in (client, server):
            assert run(python, "-c", "import torch").returncode == 1

    def test_the_command_line_says_what_there_is_and_what_lacks(self, client):
        shown = run(client, "-m", "tsemon", "--help")
        assert shown.returncode == 0, shown.stderr
        assert "serve" in shown.stdout
        for command, extra in (
            ("demo", "demo"),
            ("train", "train"),
            ("scan .", "scan"),
            ("reproduce all", "reproduce"),
        ):
            done = run(client, "-m", "tsemon", *command.split())
            assert done.returncode == 1
            assert "torch" in done.stderr.partition(";")[0]
            assert f"pip install 'tsemon[{extra}]'" in done.stderr

    def test_attach_says_what_to_install(self, client):
        done = run(client, "-c", "import tsemon; tsemon.attach")
        assert "MissingPackage: tsemon.attach needs PyTorch 2.6 or newer, installed is none" in done.stderr
        assert "pip install 'tsemon[torch]'" in done.stderr


@pytest.mark.thorough  # tests/test_readme.py does so with the server
class TestPip:
    def test_installs_the_client_with_what_these_tests_link_to_and_without_pytorch(self, tmp_path):
        environment(tmp_path / "venv", with_pip=True)
        python = tmp_path / "venv/bin/python"
        variables = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = run(python, "-m", "pip", "install", f"{ROOT}[client]", timeout_s=600, **variables)
        if "No matching distribution" in done.stderr and "CI" not in os.environ:
            pytest.skip("no package index answers")
        assert done.returncode == 0, done.stderr
        listed = json.loads(run(python, "-m", "pip", "list", "--format=json", **variables).stdout)
        found = {canonicalize_name(package["name"]) for package in listed} - {"pip", "setuptools"}
        assert "torch" not in found
        assert found == needed(["tsemon[client]"]) | {"tsemon"}
        with ServiceProcess(tmp_path / "runs.db") as service:
            commands = run(tmp_path / "venv/bin/tsemon", "runs", "--json", "--server", service.url)
            asked = run(python, "-c", f"import tsemon_client as t; print(list(t.Client('{service.url}').runs()))")
        assert (commands.returncode, commands.stderr) == (0, "")
        assert asked.stdout == "[]\n", asked.stderr


class TestAnOldPyTorch:
    def test_is_refused_by_attach_with_its_version(self, tmp_path, client):
        (tmp_path / "torch.py").write_text("__version__ = '2.5.1+cu121'\n")
        done = run(client, "-c", "import tsemon; tsemon.attach", PYTHONPATH=str(tmp_path))
        assert "needs PyTorch 2.6 or newer, installed is 2.5.1+cu121" in done.stderr

    def test_is_one_older_than_the_extra_installs(self):
        from tsemon import _OLDEST_TORCH

        assert PROJECT["optional-dependencies"]["torch"] == [f"torch>={'.'.join(map(str, _OLDEST_TORCH))}"]

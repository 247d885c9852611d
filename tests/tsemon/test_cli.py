import subprocess
import sys

import pytest

import tsemon
from tests import commands


def run_process(*command, cwd=None):
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


class TestTheCommandLine:
    def test_tells_its_version(self):
        assert run_process("-m", "tsemon", "--version").stdout.strip() == tsemon.__version__

    def test_lists_its_commands(self):
        shown = commands.tsemon("--help").stdout
        assert all(name in shown for name in ("serve", "demo", "train", "sync"))

    def test_says_what_to_install_where_typer_is_missing(self):
        code = "import sys; sys.modules['typer'] = None; sys.argv = ['tsemon']; import tsemon.__main__ as m; m.main()"
        done = run_process("-c", code)
        assert done.returncode == 1
        assert "pip install 'tsemon[server]'" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "code", "text"),
        [
            (("serve", "--host", "0.0.0.0", "--spool", "."), 2, "shown without tokens"),
            (("serve", "--tokens", "--insecure"), 2, "expected --tokens or --insecure, got both"),
            (("serve", "--allowed-host", "http://a"), 2, "expected a host name"),
            (("serve", "--database", "mysql://nowhere/x", "--port", "0"), 2, "database"),
            (("serve", "--database", "sqlite:////proc/no/such.db", "--port", "0"), 1, "cannot be used"),
            (("serve", "--spool", ".", "--database", "sqlite:///x.db"), 2, "--spool or --database, got both"),
            (("serve", "--spool", "no/such", "--port", "0"), 1, "no/such is not there"),
            (("sync", ".", "--server", "nonsense"), 2, "http"),
            (("sync", "no/such", "--server", "http://127.0.0.1:9"), 1, "no/such is not there"),
        ],
    )
    def test_ends_with_one_clear_line(self, arguments, code, text, tmp_path):
        done = commands.tsemon(*arguments, folder=tmp_path)
        assert done.returncode == code
        assert text in done.stderr
        assert done.stderr.startswith("tsemon: ")
        assert done.stderr.count("\n") == 1, done.stderr

    def test_tells_the_variables_and_defaults_of_serve(self):
        shown = " ".join(commands.tsemon("serve", "--help").stdout.replace("│", " ").split())
        for text in (
            "(TSEMON_HOST, default 127.0.0.1)",
            "(TSEMON_PORT, default 8731)",
            "(TSEMON_DATABASE, default sqlite:///tsemon.db)",
        ):
            assert text in shown

    @pytest.mark.parametrize("module", ["tsemon.cli", "torch"])
    def test_ends_quietly_at_ctrl_c_while_it_still_imports(self, module, tmp_path):
        code = f"""
import os, signal, sys

class Keyboard:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Keyboard())
sys.argv = ["tsemon", "demo"]
from tsemon.__main__ import main
main()
"""
        done = run_process("-c", code, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

    def test_says_that_a_folder_holds_nothing_to_sync(self, tmp_path):
        done = commands.tsemon("sync", tmp_path, "--server", "http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (0, f"no spools in {tmp_path}: nothing to send\n")

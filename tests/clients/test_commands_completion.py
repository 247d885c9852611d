"""What a shell is offered at Tab."""

import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests import processes
from tests.clients.command_line import environment, filled_service, register


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with filled_service(tmp_path_factory.mktemp("service")) as service:
        register(service.url, "hostile-$(touch owned)", "demo")
        register(service.url, "hostile-*", "demo")
        register(service.url, "hostile", "demo")
        yield service


def offered(service, line, shell="bash", **more):
    """What the shell is told when Tab is pressed at the end of the line."""
    words = line.split(" ")
    variables = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    variables["_TSEMON_COMPLETE"] = f"complete_{shell}"
    done = processes.run(processes.start_tsemon, environment=environment(service, **variables, **more))
    assert done.stderr == ""
    return done.stdout


class TestCompletion:
    @pytest.mark.parametrize(
        ("line", "names"),
        [
            ("tsemon ta", ["tail"]),
            ("tsemon runs --cond", ["--condition"]),
            ("tsemon runs gp", ["gpt"]),
            ("tsemon tail vision/", ["vision/vit"]),
            ("tsemon series tw", []),
            ("tsemon series a/tw", ["a/twin"]),
            ("tsemon series gpt token_", ["token_similarity"]),
            ("tsemon tail gpt --metric at", ["attention_entropy"]),
            ("tsemon alerts --run vi", ["vit"]),
            ("tsemon alerts --rule loss-n", ["loss-not-finite"]),
            ("tsemon runs --project vis", ["vision"]),
            ("tsemon runs --tag bi", ["big"]),
            ("tsemon runs --condition st", ["stuck"]),
            ("tsemon rules show loss-n", ["loss-not-finite"]),
        ],
    )
    def test_offers_names(self, service, line, names):
        # A machine that is busy may not answer within the second that a shell waits: Tab is pressed again.
        assert names in (offered(service, line).split() for _ in range(5))

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_speaks_to_other_shells(self, service, shell):
        assert "vit" in offered(service, "tsemon tail vi", shell)

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_offers_no_name_that_a_shell_would_run_or_expand(self, service, shell):
        shown = offered(service, "tsemon tail ho", shell)
        assert "hostile" in shown
        assert not set("$(*\x1b\u202e`") & set(shown.replace("_arguments '*: :((", ""))

    def test_offers_nothing_and_says_nothing_where_nobody_answers(self):
        assert offered(None, "tsemon tail gp").strip() == ""

    def test_does_not_wait_for_a_service_that_is_slow(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and never answers
            began = time.monotonic()
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert offered(None, "tsemon tail gp", TSEMON_SERVER=url).strip() == ""
        assert time.monotonic() - began < 10, "one and the start of Python on a busy machine; a command waits for 40"

    def test_offers_the_catalogue_where_the_run_is_not_known(self, service):
        assert offered(service, "tsemon series nobody token_s").split() == ["token_similarity"]

    @pytest.mark.skipif(shutil.which("bash") is None, reason="it is bash that completes")
    def test_works_in_bash(self, service, tmp_path):
        command = tmp_path / "tsemon"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tsemon "$@"\n')
        command.chmod(0o755)
        script = (
            f"PATH={tmp_path}:$PATH\n"
            'eval "$(tsemon --show-completion bash)"\n'
            "COMP_WORDS=(tsemon tail ho); COMP_CWORD=2\n"
            "_tsemon_completion tsemon\n"
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", script],
            cwd=tmp_path,
            env=environment(service, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.stdout.split(), done.stderr) == (["hostile"], "")
        assert not (tmp_path / "owned").exists()

"""What all commands have in common: help with examples, and no orders for the terminal from a name."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
import typer
from typer.testing import CliRunner

from tests.clients.command_line import HOSTILE, filled_service, in_this_process, tsemon
from tsemon.terminal import printable
from tsemon.tools.cli import app
from tsemon_server.store import Store
from tsemon_server.store.ledger.retention import Retention

PAGE = (Path(__file__).parents[2] / "docs/cli.md").read_text()


def commands(command, words=()):
    """(its words, the command) for each that does something."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
        return
    for name, one in below.items():
        yield from commands(one, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with filled_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
class TestEachCommand:
    def test_has_help_with_examples_of_itself(self, words):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "120"}).stdout
        _, examples = shown.split(" Examples")
        lines = [line for line in examples.splitlines() if line.strip()]
        assert lines
        assert all(line.startswith(f" tsemon {' '.join(words)}") for line in lines), lines

    def test_explains_each_option_and_argument(self, words):
        for parameter in COMMANDS[words].params:
            assert parameter.name == "help" or getattr(parameter, "help", None), (words, parameter.name)

    def test_has_its_place_and_its_options_in_the_documents(self, words):
        section = PAGE.split(f"\n### tsemon {' '.join(words)}\n")[1].split("\n### ")[0]
        for parameter in COMMANDS[words].params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in section, option


class TestHostileNames:
    """HOSTILE is the name of a run and a project, a block, a tag, in a config and in an alert's summary."""

    @pytest.fixture(params=[None, 250], ids=["pipe", "terminal"])
    def show(self, request, service, monkeypatch, capsys):
        run = in_this_process(service, monkeypatch, capsys)

        def show(*arguments):
            done = run(*arguments, columns=request.param)
            return done.out + done.err

        return show

    def test_give_the_terminal_no_orders(self, show, service, tmp_path):
        """What we order ourselves is taken out before."""
        run_id, database = service.ids["hostile"], service.database
        store = Store(database)
        with store.write() as writer:
            writer.retention.keep(Retention(HOSTILE, samples_s=86400.0))
        store.close()
        trace = tmp_path / "trace.jsonl"
        trace.write_text(json.dumps({"t": "run", "format": "tsemon-trace/1", "name": HOSTILE}) + '\n{"t": "end"}\n')
        spool = tmp_path / quote(HOSTILE, safe="") / quote(HOSTILE, safe="") / "w"
        spool.mkdir(parents=True)
        (spool / "run.json").write_text("{}")
        rules = tmp_path / "rules.yaml"
        rules.write_text(f"rules: [{json.dumps({'name': HOSTILE})}]")
        table = tmp_path / f"{HOSTILE}.csv".replace("/", "-")
        table.write_text(f"step,{HOSTILE},layers.0.{HOSTILE},text\n0,1,2,{HOSTILE}\n")
        table.with_suffix(".jsonl").write_text("no JSON\n")
        for arguments in (
            ("runs",),
            ("runs", run_id),
            ("runs", "--csv"),
            ("runs", "--json"),
            ("runs", HOSTILE + "?"),
            ("series", run_id),
            ("series", run_id, "loss"),
            ("incidents",),
            ("sub-step", run_id),
            ("alerts",),
            ("alerts", "--run", run_id, "--csv"),
            ("tail", run_id, "--once"),
            ("tail", run_id, "--once", "--json"),
            ("replay", trace),
            ("replay", "--database", database, "--run", run_id),
            ("rules", "check", rules),
            ("admin", "retention", "--database", database),
            ("admin", "check", "--database", database),
            ("sync", tmp_path),
            ("import", "table", table, "--dry-run"),
            ("import", "table", table, "--dry-run", "--json"),
            ("import", "table", table, table.with_suffix(".jsonl")),
            ("import", f"{HOSTILE}x"),
        ):
            shown = show(*arguments)
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown), (arguments, shown)
        assert printable(HOSTILE) in show("runs", run_id)

    def test_are_not_read_as_markup(self, show, service):
        assert "[bold]$(touch owned)" in show("runs", service.ids["hostile"])


class TestPrintable:
    @pytest.mark.parametrize("text", ["gpt-82m", "größe", "模型", "مدل‌ها", "👩‍🔬", "[bold]"])
    def test_leaves_what_is_only_text(self, text):
        assert printable(text) == text

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("\x1b[31m", "\\x1b[31m"),
            ("\x9b31m", "\\x9b31m"),
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\u202eabc", "\\u202eabc"),
            ("\u2028", "\\u2028"),
            ("\udcff", "\\udcff"),
            ("\x00\x7f", "\\x00\\x7f"),
        ],
    )
    def test_writes_out_what_a_terminal_obeys(self, text, shown):
        assert printable(text) == shown


class TestTheStart:
    @pytest.mark.parametrize("arguments", [("--help",), ("runs", "--help"), ("--version",)], ids=" ".join)
    def test_loads_nothing_that_takes_long(self, arguments):
        done = tsemon(None, *arguments, PYTHONPROFILEIMPORTTIME="1")
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "tsemon.tools.cli" in loaded
        assert not loaded & {"torch", "numpy", "httpx", "sqlalchemy", "fastapi"}

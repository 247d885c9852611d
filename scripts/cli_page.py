"""Write the commands of `tsemon` into docs/cli.md, between the marks that stand there.

python scripts/cli_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from tsemon.tools.cli import BRING, SERVE, TRAIN, app
from tsemon_client.commands.options import ANSWER, LOOK

PAGE = Path(__file__).parent.parent / "docs/cli.md"
PANELS = (LOOK, ANSWER, TRAIN, BRING, SERVE)
MORE = {
    "runs": "[Run status](liveness.md)",
    "series": "[Metrics](measures.md)",
    "incidents": "[Incidents](incidents.md)",
    "sub-step": "[The sub-step](incidents.md#the-sub-step)",
    "alerts": "[Built-in rules](alerts.md)",
    "acknowledge": "[Notifications](notifications.md#delivery)",
    "silence": "[Notifications](notifications.md#delivery)",
    "tail": "[Watch in a terminal](quickstart.md#watch-in-a-terminal)",
    "replay": "[Replaying](replay.md)",
    "demo": "[Quickstart](quickstart.md)",
    "train": "[Train the reference models](training.md)",
    "reproduce": "[The papers' experiments](reproduction/README.md)",
    "sync": "[Delivery](delivery.md#sync)",
    "import": "[Import runs from other tools](import.md)",
    "scan": "[Scan a folder of checkpoints](scan.md)",
    "serve": "[Run the server](operation.md)",
    "token": "[Manage tokens](access.md)",
    "notify": "[Notifications](notifications.md)",
    "rules": "[Rules](rules.md)",
    "admin": "[Run the server](operation.md)",
}
"""By first word of a command: the page that explains more."""


class Command(NamedTuple):
    words: str
    panel: str
    shown: Any
    """The click command."""


def page(text: str) -> str:
    """The text with the commands of today between its marks."""
    marked = re.compile(r"(<!-- commands -->\n).*(<!-- end of commands -->)", re.DOTALL)
    assert marked.search(text), f"{PAGE.name} has lost its marks around commands"
    return marked.sub(lambda found: found[1] + "\n".join(_panels()) + "\n\n" + found[2], text)


def _panels() -> Iterator[str]:
    commands = list(_commands(typer.main.get_command(app)))
    for panel in PANELS:
        yield f"\n## {panel}"
        for command in commands:
            if command.panel == panel:
                yield from _section(command)


def _commands(command: Any, words: str = "tsemon", panel: str = "") -> Iterator[Command]:
    """Yield each command with its panel, in the order of the help. A group is no command."""
    panel = panel or getattr(command, "rich_help_panel", "")
    if not hasattr(command, "commands"):
        yield Command(words, panel, command)
        return
    for name, below in command.commands.items():
        yield from _commands(below, f"{words} {name}", panel)


def _section(command: Command) -> Iterator[str]:
    shown = command.shown
    # Arguments first, whatever the order in the function.
    parameters = sorted((one for one in shown.params if one.name != "help"), key=_is_option)
    arguments = [_argument(one) if one.required else f"[{_argument(one)}]" for one in parameters if not _is_option(one)]
    yield f"\n### {command.words}\n\n    {' '.join((command.words, '[OPTIONS]', *arguments))}"
    for paragraph in shown.help.split("\n\n"):
        yield f"\n{_marked(' '.join(paragraph.split()))}"
    yield f"\nSee {MORE[command.words.split()[1]]}."
    yield from ("\n| argument or option | default | meaning |", "|---|---|---|", *map(_row, parameters))
    examples = re.sub(r"\[/?(bold|dim)\]", "", shown.epilog).splitlines()[1:]
    yield "\n```bash\n" + "\n".join(examples) + "\n```"


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _argument(parameter: Any) -> str:
    """Its name, without the brackets of one that may be left out."""
    return re.sub(r"^\[(\w+)\]$", r"\1", parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    values = f" {parameter.metavar}" if parameter.metavar else ""
    options = [name + values for name in (*parameter.opts, *parameter.secondary_opts)]
    names = options if _is_option(parameter) else [_argument(parameter)]
    # An option that the server's settings can also set gets its default from them, and its help ends with both.
    named = re.search(r" \((TSEMON_\w+)?(?:, )?(?:default:? (.+))?\)\.$", parameter.help)
    meaning = parameter.help if named is None else f"{parameter.help[: named.start()]}."
    variable, default = (parameter.envvar, _default(parameter)) if named is None else (named[1], _value(named[2]))
    defaults = ", else ".join(filter(None, (variable and _code(variable), default)))
    cells = (", ".join(map(_code, names)), defaults, _with_range(meaning, parameter))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):  # the default itself depends on the machine
        return parameter.show_default
    if isinstance(parameter.default, bool):
        return _code(parameter.opts[0]) if parameter.default else ""
    return _value(f"{parameter.default:g}" if isinstance(parameter.default, float) else parameter.default)


def _value(default: object) -> str:
    """As code, unless the help describes it in words."""
    text = "" if default is None else str(default)
    return _marked(text) if " " in text else text and _code(text)


def _with_range(meaning: str, parameter: Any) -> str:
    low, high = (getattr(parameter.type, end, None) for end in ("min", "max"))
    return _marked(meaning if low is None or high is None else f"{meaning.removesuffix('.')} ({low} to {high}).")


CODE = re.compile(
    r"`[^`]+`|'[^' ]*[^\w' ][^' ]*'|\"[^\"]+\"|(?<![\w-])--[a-z][a-z-]*"  # marked or quoted already; an option
    r"|\b[\w.]+=\w+|\b\w+_\w*|\b\w+\(\)|(?<![\w.])\.[a-z][\w.]*\b"  # key=value, a name with _, a call, a file's ending
)


def _marked(text: str) -> str:
    """The text with options, variables and patterns as code."""
    return CODE.sub(lambda found: _code(found[0].strip("`'\"")), text)


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

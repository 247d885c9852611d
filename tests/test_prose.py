"""Text that people read does not gain phrases of the old voice: those in tests/data/prose.txt.

    python tests/test_prose.py FILE ...   # print the phrases in these files, and what to write instead
    python tests/test_prose.py            # lower the ceilings to what there is today

tests/data/prose_ceilings.txt has the number of phrases in each area, which may only fall. An area without a line has none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LISTS, CEILINGS = ROOT / "tests/data/prose.txt", ROOT / "tests/data/prose_ceilings.txt"
CODE = ("tsemon", "server", "clients", "migrations", "benchmarks", "scripts", "examples")
UI, PACK = ROOT / "server/tsemon_server/ui", ROOT / "server/tsemon_server/rules/pack"


CODE_BLOCK = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)


class Text(NamedTuple):
    area: str
    path: Path
    line: int
    words: str
    """A paragraph, a cell of a table, a docstring or a string, without code spans."""
    lists: str = "ABCD"


def read_lists() -> dict[str, list[tuple[re.Pattern[str], str]]]:
    lists = dict(re.findall(r"^\[(.)\].*\n((?:.+\n)*)", LISTS.read_text(), re.MULTILINE))
    lines = {name: [line.partition(" -> ") for line in text.splitlines()] for name, text in lists.items()}
    ends = {name: (r"(?:^|[.!?:;] )", 0) if name == "C" else (r"\b", re.IGNORECASE) for name in lines}
    return {
        name: [(re.compile(rf"{ends[name][0]}({text})\b", ends[name][1]), better) for text, _, better in texts]
        for name, texts in lines.items()
    }


PHRASES = read_lists()
ANY = {  # one search for all phrases of a list
    name: re.compile("|".join(phrase.pattern for phrase, _ in phrases), phrases[0][0].flags)
    for name, phrases in PHRASES.items()
}


def num_hits(text: Text) -> int:
    return sum(len(ANY[name].findall(text.words)) for name in text.lists)


def of_markdown(path: Path, area: str) -> Iterator[Text]:
    source = CODE_BLOCK.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
    paragraph: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        if re.match(r"\s*([*+-]|\d+\.) |#|\||\s*$| {4}", line) and paragraph:
            yield Text(area, path, number - len(paragraph), plain(" ".join(paragraph)))
            paragraph = []
        if line.startswith("|"):
            yield from (Text(area, path, number, plain(cell)) for cell in line.split("|"))
        elif line.startswith("#"):
            yield Text(area, path, number, plain(line), "AD")
        elif line.strip() and not line.startswith("    "):  # which is code
            paragraph.append(re.sub(r"^\s*([*+-]|\d+\.) ", "", line))


def plain(text: str) -> str:
    """Without code spans, the targets of links, and marks around words."""
    return re.sub(r"`[^`]*`|[*_]{1,2}(?=\S)", "", re.sub(r"\]\([^)]*\)", "", text)).strip(" [#")


def of_python(path: Path, folder: str) -> Iterator[Text]:
    """Docstrings, also those of attributes, and other strings of three words or more."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        kind = "docstrings" if node in docstrings else "strings"
        for paragraph in re.split(r"\n\s*\n", text):
            if len(words := paragraph.split()) >= 3:
                yield Text(f"{kind} {folder}", path, node.lineno, plain(" ".join(words)))


def of_javascript(path: Path, area: str) -> Iterator[Text]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        for string in re.findall(r'"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`', re.sub(r"^\s*(//|/?\*).*", "", line)):
            if len(string.split()) >= 3:
                yield Text(area, path, number, re.sub(r"\$\{[^}]*\}", "_", string[1:-1]))


def of_rules(path: Path) -> Iterator[Text]:
    found = re.finditer(r"^ {4}(title|advice|origin): (?:>-\n)?(.*\n(?: {6}.*\n)*)", path.read_text(), re.MULTILINE)
    for match in found:
        line = match.string.count("\n", 0, match.start()) + 1
        yield Text(f"{match[1]} {path.stem}", path, line, " ".join(match[2].split()))


def texts() -> Iterator[Text]:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        yield from of_markdown(path, "/".join(path.relative_to(ROOT).parts[:2]))
    for path in (path for name in CODE for path in (ROOT / name).rglob("*.py")):
        folders = path.relative_to(ROOT).parts[:-1]
        yield from of_python(path, "/".join(folders[: 3 if folders[0] in ("server", "clients") else 2]))
    for path in UI.rglob("*.js"):
        if (top := path.relative_to(UI).parts[0]) != "vendor":
            yield from of_javascript(path, f"ui {top}")
    for path in PACK.glob("*.yaml"):
        yield from of_rules(path)


@cache
def count() -> Counter[str]:
    """The number of phrases in each area."""
    found = Counter[str]()
    for text in texts():
        found[text.area] += num_hits(text)
    return +found


def ceilings() -> Counter[str]:
    found = re.findall(r"^([^#\n].*) (\d+)$", CEILINGS.read_text(), re.MULTILINE)
    return Counter({area: int(number) for area, number in found})


def found_in(texts):
    return [(text.line, num_hits(text)) for text in texts if num_hits(text)]


class TestThePhrases:
    def test_are_found_in_paragraphs_and_cells_and_not_in_code_or_most_headings(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text(
            "# What the server has\n\nIt hears\nof `what is`.\n\n    who asks\n\n| What it is | grey |\n## Grey\n"
        )
        assert found_in(of_markdown(page, "page")) == [(3, 1), (8, 2), (8, 1), (9, 1)]

    def test_are_found_in_docstrings_and_strings_of_python(self, tmp_path):
        module = tmp_path / "module.py"
        module.write_text(
            '"""It hears of it."""\nX = 1\n"""So many of these."""\ny = f"{X} goes on"  # of which\nz = "anew"\n'
        )
        assert found_in(of_python(module, "module")) == [(1, 1), (3, 2), (4, 1)]

    def test_are_found_in_strings_of_javascript(self, tmp_path):
        module = tmp_path / "module.js"
        module.write_text('// nobody hears of it\nh("p", {}, `${n} runs, seen to`, "nobody was there")\n')
        assert found_in(of_javascript(module, "ui")) == [(2, 1), (2, 1)]

    def test_are_found_in_rules(self, tmp_path):
        pack = tmp_path / "pack.yaml"
        pack.write_text(
            "rules:\n  - name: a\n    title: It goes on\n    advice: >-\n      Nobody knows\n      of it anew.\n"
        )
        assert found_in(of_rules(pack)) == [(3, 1), (4, 3)]


class TestTheText:
    def test_gains_no_phrase_of_the_old_voice(self):
        grown = [f"{area}: {count()[area]}, at most {ceilings()[area]}" for area in count() - ceilings()]
        assert not grown, (
            "More phrases of tests/data/prose.txt than before. `python tests/test_prose.py FILE` shows those of a file. If "
            "text moved from one area to another, `python tests/test_prose.py` moves its ceiling.\n" + "\n".join(grown)
        )

    def test_lowers_its_ceilings_as_it_gets_better(self):
        fallen = [f"{area} {count()[area]}" for area in ceilings() - count()]
        assert not fallen, (
            "Fewer phrases of tests/data/prose.txt than before. Lower the ceilings in tests/data/prose_ceilings.txt with "
            "`python tests/test_prose.py`, to these:\n" + "\n".join(fallen)
        )


def lower() -> None:
    if CEILINGS.exists() and count().total() > ceilings().total():
        sys.exit(
            f"{count().total()} phrases in all, {ceilings().total()} before: ceilings only fall. Rewrite the new text"
        )
    # A line between two numbers that changed lets git merge them.
    lines = "\n".join(f"{area} {number}\n" for area, number in sorted(count().items()))
    CEILINGS.write_text(
        f"# Number of phrases of prose.txt in each area; `python tests/test_prose.py` lowers them.\n\n{lines}"
    )


def show(paths: set[Path]) -> None:
    for text in (text for text in texts() if text.path in paths):
        for phrase, better in (phrase for name in text.lists for phrase in PHRASES[name]):
            for found in phrase.finditer(text.words):
                print(f"{text.path.relative_to(ROOT)}:{text.line}: {found[1]}{better and f' -> {better}'}")


if __name__ == "__main__":
    show({Path(name).resolve() for name in sys.argv[1:]}) if sys.argv[1:] else lower()

"""The picture of docs/architecture.md, held against the import statements."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "tsemon": ROOT / "tsemon",
    "tsemon_server": ROOT / "server/tsemon_server",
    "tsemon_client": ROOT / "clients/tsemon_client",
}

COMMON = {"tsemon.catalogue", "tsemon.wire", "tsemon.errors"}
SERVICE = "tsemon_server"
# Who may import whom, besides COMMON and its own package. A package that is not named here may import nothing of ours.
ALLOWED = {
    "tsemon.__init__": {"tsemon.monitor"},
    "tsemon.__main__": {"tsemon.cli"},
    "tsemon.monitor": {"tsemon.probes", "tsemon.transport", "tsemon.schedule", "tsemon.sample", "tsemon.faults"},
    "tsemon.sample": {"tsemon.probes"},
    "tsemon.probes": {"tsemon.measures"},
    "tsemon.train": {"tsemon.models", "tsemon.monitor", "tsemon"},
    "tsemon.demo": {"tsemon.models", "tsemon.train", "tsemon", "tsemon_client"},
    "tsemon.cli": {"tsemon.demo", "tsemon.transport", f"{SERVICE}.main", f"{SERVICE}.settings", "tsemon"},
    f"{SERVICE}.main": {
        f"{SERVICE}.{part}"
        for part in ("ingest", "alerts", "queries", "exposition", "store", "settings", "errors", "ui")
    },
    f"{SERVICE}.errors": set(),
    f"{SERVICE}.ingest": {f"{SERVICE}.store"},
    f"{SERVICE}.alerts": {f"{SERVICE}.store", f"{SERVICE}.rules"},
    f"{SERVICE}.queries": {f"{SERVICE}.store"},
    f"{SERVICE}.exposition": {f"{SERVICE}.store"},
    f"{SERVICE}.store": {f"{SERVICE}.migrations"},
}
TORCH_FREE = {"tsemon.catalogue", "tsemon.wire", "tsemon.errors", "tsemon.transport", SERVICE, "tsemon_client"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the picture"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module in SOURCES)


def modules():
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            yield pytest.param(
                ".".join((package, *path.relative_to(folder).with_suffix("").parts)),
                path,
                id=str(path.relative_to(ROOT)),
            )


def unit_of(module):
    """`tsemon.probes.blocks` belongs to `tsemon.probes`; the client is one unit."""
    parts = module.split(".")
    return parts[0] if parts[0] == "tsemon_client" else ".".join(parts[:2])


@pytest.mark.parametrize(("module", "path"), list(modules()))
class TestImportsPointFromWhatActsToWhatIsTrue:
    def test_only_along_the_arrows(self, module, path):
        unit = unit_of(module)
        allowed = ALLOWED.get(unit, set()) | COMMON | {unit}
        if unit in COMMON:
            allowed = set()
        for name in imports_of(path):
            if name.split(".")[0] not in SOURCES or name in SOURCES:
                continue
            assert unit_of(name) in allowed, f"{module} imports {name}"

    def test_no_torch_where_none_is_needed(self, module, path):
        if unit_of(module) in TORCH_FREE or unit_of(module).split(".")[0] in TORCH_FREE:
            assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"]


class TestTheTrainingSide:
    def test_imports_with_torch_and_the_standard_library_only(self):
        code = (
            "import sys\n"
            "for name in ('pydantic', 'fastapi', 'sqlalchemy', 'httpx', 'typer', 'rich', 'transformers', 'sklearn'):\n"
            "    sys.modules[name] = None\n"
            "import tsemon\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

"""The picture of docs/architecture.md, held against the import statements."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "tsemon": ROOT / "tsemon",
    "tsemon_server": ROOT / "server/tsemon_server",
    "tsemon_answers": ROOT / "clients/tsemon_answers",
    "tsemon_client": ROOT / "clients/tsemon_client",
    "migrations": ROOT / "migrations",
}
COMMON = {"tsemon.catalogue", "tsemon.stacks", "tsemon.wire", "tsemon.errors"}
# Who imports whom, ours and others', besides the standard library, COMMON and its own unit. Who is not named here
# imports nothing else.
PICTURE = {
    "tsemon": "torch tsemon.attaching tsemon.monitor tsemon.quantity tsemon.status",
    "tsemon.__main__": "tsemon.tools.cli tsemon.terminal",
    "tsemon.actions": "torch",
    "tsemon.attaching": "torch tsemon.actions tsemon.mirrors tsemon.monitor tsemon.probes tsemon.transport "
    "tsemon.quantity tsemon.schedule tsemon.faults tsemon.registration",
    "tsemon.calm": "torch",
    "tsemon.history": "torch tsemon.late tsemon.probes tsemon.sample",
    "tsemon.mirrors": "torch tsemon.terminal wandb",
    "tsemon.late": "torch",
    "tsemon.monitor": "torch tsemon.actions tsemon.relay tsemon.probes tsemon.transport tsemon.schedule tsemon.sample "
    "tsemon.calm tsemon.history tsemon.late tsemon.status tsemon.suspicion tsemon.tokens tsemon.faults tsemon.registration",
    "tsemon.quantity": "",
    "tsemon.registration": "torch tsemon.quantity",
    "tsemon.sample": "torch tsemon.probes",
    "tsemon.stacks": "tsemon.catalogue tsemon.errors",
    "tsemon.status": "tsemon.schedule tsemon.suspicion tsemon.transport",
    "tsemon.suspicion": "torch tsemon.late tsemon.probes tsemon.schedule",
    "tsemon.terminal": "rich",
    "tsemon.tokens": "torch",
    "tsemon.probes": "torch tsemon.measures tsemon.quantity",
    "tsemon.measures": "torch",
    "tsemon.models": "torch",
    "tsemon.lab.train": "torch lm_eval numpy PIL rich sklearn tokenizers zstandard tsemon tsemon.attaching tsemon.models",
    "tsemon.lab.reproduce": "torch numpy matplotlib transformers tsemon tsemon.transport tsemon.measures tsemon.models "
    "tsemon.lab.train",
    "tsemon.tools.importing": "google pyarrow rich tensorboard tsemon.terminal tsemon.transport wandb",
    "tsemon.tools.scanning": "torch rich safetensors transformers tsemon.registration tsemon.sample tsemon.terminal "
    "tsemon.transport tsemon.measures tsemon.probes tsemon.lab.train",
    "tsemon.integrations": "torch tsemon tsemon.probes transformers lightning accelerate",
    "tsemon.lab.demo": "torch rich tsemon tsemon.terminal tsemon.lab.train tsemon_client",
    "tsemon.tools.cli": "typer tsemon tsemon.terminal tsemon_client tsemon.lab.demo tsemon.tools.importing "
    "tsemon.lab.reproduce tsemon.tools.scanning tsemon.lab.train tsemon.transport tsemon_server.main "
    "tsemon_server.settings tsemon_server.access tsemon_server.admin tsemon_server.notify tsemon_server.services.replay "
    "tsemon_server.rule_commands tsemon_server.logs",
    "tsemon_server.main": "fastapi starlette uvicorn tsemon_server.access tsemon_server.errors "
    "tsemon_server.exposition tsemon_server.limits tsemon_server.logs tsemon_server.parts tsemon_server.request_log "
    "tsemon_server.routes tsemon_server.settings tsemon_server.spools tsemon_server.store tsemon_server.workers",
    "tsemon_server.parts": "tsemon_server.access tsemon_server.alerts tsemon_server.events tsemon_server.exposition "
    "tsemon_server.housekeeping tsemon_server.limits tsemon_server.notify tsemon_server.rounds tsemon_server.rules "
    "tsemon_server.services.queries tsemon_server.settings tsemon_server.spools tsemon_server.store",
    "tsemon_server.routes": "fastapi pydantic starlette tsemon_answers tsemon_server.access tsemon_server.alerts "
    "tsemon_server.bodies tsemon_server.errors tsemon_server.events tsemon_server.exposition tsemon_server.limits "
    "tsemon_server.parts tsemon_server.rules tsemon_server.services.care tsemon_server.services.ingest "
    "tsemon_server.services.checks tsemon_server.services.queries tsemon_server.services.trials tsemon_server.store "
    "tsemon_server.ui",
    "tsemon_server.incidents": "numpy tsemon_answers tsemon_server.rules tsemon_server.yaml_lines",
    "tsemon_server.services.care": "pydantic pydantic_core tsemon_answers tsemon_server.bodies tsemon_server.store",
    "tsemon_server.services.checks": "tsemon_answers tsemon_server.alerts tsemon_server.rules tsemon_server.yaml_lines",
    "tsemon_server.services.trials": "pydantic pydantic_core tsemon_answers tsemon_server.alerts "
    "tsemon_server.bodies tsemon_server.rules tsemon_server.services.ingest tsemon_server.services.replay "
    "tsemon_server.store",
    "tsemon_server.access": "starlette typer tsemon.terminal tsemon_server.durations tsemon_server.errors "
    "tsemon_server.options tsemon_server.store",
    "tsemon_server.settings": "tsemon_server.limits tsemon_server.logs",
    "tsemon_server.options": "typer tsemon_server.settings",
    "tsemon_server.request_log": "starlette tsemon_server.logs",
    "tsemon_server.admin": "typer tsemon.terminal tsemon_answers tsemon_server.store tsemon_server.options "
    "tsemon_server.durations",
    "tsemon_server.rule_commands": "typer yaml tsemon.terminal tsemon_client tsemon_server.rules",
    "tsemon_server.errors": "fastapi starlette tsemon_answers tsemon_server.logs",
    "tsemon_server.bodies": "numpy pydantic pydantic_core",
    "tsemon_server.limits": "starlette uvicorn tsemon_server.errors",
    "tsemon_server.services.ingest": "pydantic pydantic_core typing_extensions tsemon_answers "
    "tsemon_server.alerts tsemon_server.bodies tsemon_server.store",
    "tsemon_server.alerts": "tsemon_answers tsemon_server.rules tsemon_server.store",
    "tsemon_server.services.replay": "numpy pydantic tsemon.terminal tsemon.transport tsemon_answers "
    "tsemon_client tsemon_server.incidents tsemon_server.services.ingest tsemon_server.rules tsemon_server.store",
    "tsemon_server.ui": "tsemon_answers tsemon_server.rules",
    "tsemon_server.filling": "numpy",
    "tsemon_server.rules": "numpy tsemon_server.filling tsemon_server.yaml_lines",
    "tsemon_server.events": "starlette tsemon_answers tsemon_server.store",
    "tsemon_server.services.queries": "numpy pyarrow tsemon.terminal tsemon_answers tsemon_server.filling "
    "tsemon_server.incidents tsemon_server.rules tsemon_server.store",
    "tsemon_server.notify": "pydantic typer tsemon.terminal tsemon_answers tsemon_server.store tsemon_server.options "
    "tsemon_server.durations tsemon_server.yaml_lines",
    "tsemon_server.exposition": "starlette numpy prometheus_client tsemon tsemon_server.filling "
    "tsemon_server.settings tsemon_server.store",
    "tsemon_server.housekeeping": "tsemon_server.rounds tsemon_server.store",
    "tsemon_server.rounds": "tsemon_server.store",
    "tsemon_server.spools": "starlette tsemon_answers tsemon.transport tsemon_server.alerts "
    "tsemon_server.bodies tsemon_server.errors tsemon_server.services.ingest tsemon_server.store",
    "tsemon_server.yaml_lines": "yaml",
    "tsemon_server.store": "sqlalchemy alembic numpy tsemon_answers tsemon_server.incidents zstandard",
    "migrations": "sqlalchemy alembic",
    "tsemon_answers": "pydantic pydantic_core pandas polars pyarrow",
    "tsemon_client": "httpx pydantic rich tsemon.terminal tsemon_answers typer",
}
ROOMS = ("tsemon_server.services.", "tsemon.lab.", "tsemon.tools.")
"""Packages of units."""
ALLOWED = {unit: set(names.split()) for unit, names in PICTURE.items()}


def imports_of(path):
    """Every module that the file imports, wherever in the file, by a statement or by a call."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the picture"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if is_module(name) else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            assert isinstance(node.args[0], ast.Constant), f"{path}: a computed import hides the picture"
            yield node.args[0].value


def is_module(name):
    package, *parts = name.split(".")
    path = SOURCES[package].joinpath(*parts) if package in SOURCES else None
    return path is not None and (path.is_dir() or path.with_suffix(".py").exists())


def unit_of(module):
    """`tsemon.probes.blocks` belongs to `tsemon.probes`; of others' packages, the client and the migrations, all is one."""
    depth = 3 if module.startswith(ROOMS) else 2
    return ".".join(module.split(".")[: depth if module.startswith(("tsemon.", "tsemon_server.")) else 1])


def modules():
    """Yield the name and the file of every module."""
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


@functools.cache
def arrows():
    """{unit: {what it imports: files that do}}"""
    found = defaultdict(lambda: defaultdict(set))
    for module, path in modules():
        unit = unit_of(module)
        for name in map(unit_of, imports_of(path)):
            is_free = name in sys.stdlib_module_names or (name in COMMON and unit not in COMMON) or name == unit
            if not is_free:
                found[unit][name].add(str(path.relative_to(ROOT)))
    return found


def cycle_in(imports):
    """Return modules of which each imports the next and the last the first, or none. `imports` maps names to names."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.mark.parametrize("unit", sorted(ALLOWED))
class TestImportsPointFromWhatActsToWhatIsTrue:
    def test_only_along_the_arrows(self, unit):
        assert {name: files for name, files in arrows()[unit].items() if name not in ALLOWED[unit]} == {}

    def test_and_every_arrow_is_used(self, unit):
        assert ALLOWED[unit] - {*arrows()[unit]} == set()


class TestModules:
    def test_are_of_units_in_the_picture(self):
        assert set(arrows()) <= set(ALLOWED)

    def test_do_not_import_each_other_in_a_cycle(self):
        """Imports inside functions and imports for type checkers count."""
        assert cycle_in({name: {*filter(is_module, imports_of(path))} - {name} for name, path in modules()}) == []

    def test_would_not_pass_with_a_cycle(self):
        assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


def run_python(code):
    subprocess.run([sys.executable, "-c", code], check=True)


GUEST = sorted(unit for unit in ALLOWED if re.match(r"tsemon(?!_)(?!\.(lab|tools|models|__main__)\b)", unit))
"""What lives in a training run."""


class TestTheGuest:
    @pytest.mark.parametrize("unit", GUEST)
    def test_imports_neither_lab_nor_tools_nor_models(self, unit):
        assert not {name for name in ALLOWED[unit] if name.startswith(("tsemon.lab", "tsemon.tools", "tsemon.models"))}

    def test_loads_none_of_them(self):
        run_python(
            "import sys, tsemon\n"
            "tsemon.attach\n"
            "rooms = ('tsemon.lab', 'tsemon.tools', 'tsemon.models')\n"
            "loaded = [name for name in sys.modules if name.startswith(rooms)]\n"
            "assert not loaded, loaded\n"
        )


class TestTheTrainingSide:
    def test_imports_with_torch_and_the_standard_library_only(self):
        run_python(
            "import sys\n"
            "others = 'pydantic fastapi sqlalchemy httpx typer rich transformers sklearn wandb tensorboard'\n"
            "for name in others.split():\n"
            "    sys.modules[name] = None\n"
            "import tsemon\n"
            "tsemon.attach\n"
        )

    def test_gives_all_that_it_names(self):
        run_python(
            "import tsemon, tsemon.attaching, tsemon.monitor, tsemon.status, tsemon.wire\n"
            "assert set(tsemon.__all__) <= set(dir(tsemon))\n"
            "from tsemon import *\n"
            "assert (attach, Monitor, Status) == (tsemon.attaching.attach, tsemon.monitor.Monitor, tsemon.status.Status)\n"
            "assert (Alert, __version__) == (tsemon.wire.Alert, tsemon.__version__)\n"
            "assert not hasattr(tsemon, 'atach')\n"
        )


class TestTheCommandLine:
    def test_loads_what_a_command_needs_when_it_is_used(self):
        run_python(
            "import sys, tsemon.tools.cli\n"
            "needed = {'torch', 'numpy', 'httpx', 'pydantic', 'sqlalchemy', 'yaml'}\n"
            "assert not needed & set(sys.modules), needed & set(sys.modules)\n"
        )


class TestTheServiceAndTheClient:
    def test_load_neither_torch_nor_the_training_side(self):
        run_python(
            "import sys, tsemon_server.main, tsemon_client\n"
            "assert 'tsemon.wire' in sys.modules\n"
            "loaded = {'torch', 'tsemon.monitor', 'tsemon.probes'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
        )


class TestTheAnswers:
    def test_need_nothing_but_pydantic(self):
        run_python(
            "import pkgutil, sys\n"
            "others = 'torch numpy fastapi starlette sqlalchemy httpx typer rich pandas polars pyarrow'\n"
            "for name in others.split():\n"
            "    sys.modules[name] = None\n"
            "import tsemon_answers\n"
            "for found in pkgutil.iter_modules(tsemon_answers.__path__):\n"
            "    __import__(f'tsemon_answers.{found.name}')\n"
        )

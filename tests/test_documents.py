"""What the documents show, runs; what the code has, the documents tell."""

import os
import re
from pathlib import Path

import pytest

from tests import processes
from tests.service import ServiceProcess

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


def run(arguments, folder, service):
    environment = os.environ | {"TSEMON_SERVER": service.url}
    done = processes.run(processes.start_python, *arguments, folder=folder, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py"), key=lambda path: path.name), ids=lambda p: p.name
)
def test_every_example_runs(path, tmp_path, service):
    assert run([path], tmp_path, service)


PRELUDE = (
    "import torch\n"
    "from tests import zoo\n"
    "model, forward = zoo.gpt2()\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    "loader = range(5)\n"
    "def train_step(model, optimizer, batch):\n"
    "    loss = forward().square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss\n"
)
A_RUN = (
    "import tsemon\n"
    "with tsemon.attach(model, optimizer, run='gpt-82m', project='pretrain', every=1) as monitor:\n"
    "    for batch in loader: monitor.step(loss=train_step(model, optimizer, batch))\n"
)
PRELUDE_OF_INTEGRATIONS = (
    "import torch\n"
    "from lightning.pytorch import LightningModule\n"
    "from tests import zoo\n"
    "model = zoo.gpt2()[0]\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    "dataset = [{'input_ids': tokens, 'labels': tokens} for tokens in zoo.ids(10)]\n"
    "loader = torch.utils.data.DataLoader(dataset, batch_size=2)\n"
    "class Module(LightningModule):\n"
    "    def __init__(self): super().__init__(); self.model = zoo.gpt2()[0].train()\n"
    "    def training_step(self, batch): return self.model(**batch).loss\n"
    "    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())\n"
    "module = Module()\n"
)


@pytest.mark.parametrize(
    ("document", "prelude"),
    [
        ("README.md", PRELUDE),
        ("docs/quickstart.md", PRELUDE),
        ("docs/actions.md", PRELUDE + PRELUDE_OF_INTEGRATIONS),
        ("docs/client.md", PRELUDE + A_RUN),
        ("docs/integrations.md", PRELUDE_OF_INTEGRATIONS),
        ("docs/measures.md", PRELUDE),
        ("docs/beside-wandb.md", "import os\nos.environ['WANDB_MODE'] = 'offline'\n" + PRELUDE),
        ("docs/mirrors.md", PRELUDE),
        ("docs/models.md", "import torch\n"),
        ("docs/sagemaker-debugger.md", PRELUDE),
        ("docs/training.md", ""),
    ],
    ids=[
        "README",
        "quickstart",
        "actions",
        "client",
        "integrations",
        "measures",
        "beside-wandb",
        "mirrors",
        "models",
        "sagemaker-debugger",
        "training",
    ],
)
def test_every_python_snippet_runs_in_order(document, prelude, tmp_path, service):
    """In one program, after the model, the optimizer and the data that every reader has."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert snippets
    program = tmp_path / "snippets.py"
    program.write_text(prelude + "\n".join(snippets).replace("http://127.0.0.1:8731", service.url))
    run([program], tmp_path, service)


def test_the_tables_of_models_are_those_of_their_presets():
    from scripts.models_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python scripts/models_page.py"


def test_the_range_of_healthy_runs_is_that_of_the_recordings():
    from scripts.healthy_band import FILE, text

    assert FILE.read_text() == text(), "run python scripts/healthy_band.py"


def test_the_tables_of_measures_are_those_of_the_catalogue():
    from scripts.measures_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python scripts/measures_page.py"


def test_the_commands_are_those_of_the_command_line():
    from scripts.cli_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python scripts/cli_page.py"


def test_the_documents_install_from_the_clone():
    """No index has the package, so a name in place of a path finds nothing, or somebody else's."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    by_name = [path.name for path in documents if re.search(r"pip install [^`\n]*tsemon\[", path.read_text())]
    assert by_name == ["quickstart.md"], "it says that this works where tsemon is installed already"


def test_every_decision_is_linked_where_the_architecture_is_told():
    told = (ROOT / "docs/architecture.md").read_text()
    assert [path.name for path in (ROOT / "docs/decisions").iterdir() if f"(decisions/{path.name})" not in told] == []


def test_every_page_is_linked_from_the_list_of_pages():
    listed = {
        target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "docs/README.md").read_text())
    }
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - listed == {"README.md"}


def test_the_documents_link_to_files_that_exist():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"

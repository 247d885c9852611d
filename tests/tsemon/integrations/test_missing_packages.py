import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_an_integration_without_its_package_says_what_to_install(package):
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "try:\n"
        f"    import tsemon.integrations.{package}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"needs {package}; pip install 'tsemon[integrations]'" in done.stdout

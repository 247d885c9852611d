"""Make sure of what the tests need and pip cannot install: a Chromium for the tests of the page.

An ordinary machine without one skips those tests and says so; in continuous integration that would hide them, so there
it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

APT_INSTALL = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium"]


def main() -> int:
    if shutil.which("chromium"):
        return 0
    reason = install_chromium()
    if reason is None:
        return 0
    print(f"Chromium is not installed ({reason}): the tests in tests/server/ui/test_page.py are skipped")
    return 1 if os.environ.get("CI") else 0


def install_chromium() -> str | None:
    """Install it where that is ours to do; what stands in the way otherwise."""
    if os.name != "posix" or os.geteuid() != 0:
        return "installing it needs root; on Debian: sudo apt-get install chromium"
    if not shutil.which("apt-get"):
        return "there is no apt-get here; install it as this system does"
    print("Installing Chromium for the tests of the page (once) ...", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "--quiet"], APT_INSTALL):
        finished = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if finished.returncode != 0:
            return f"{' '.join(command)} failed: {finished.stderr.strip().rpartition(chr(10))[2]}"
    return None if shutil.which("chromium") else "apt-get's package brought no `chromium` command"


if __name__ == "__main__":
    sys.exit(main())

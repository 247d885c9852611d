"""Make sure of what the tests need and pip cannot install: a Chromium for the page, a PostgreSQL for the store,
an Alertmanager for notifications.

An ordinary machine without one skips those tests and says so; in continuous integration that would hide them, so there
it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Part:
    """A package of Debian's."""

    name: str
    package: str
    program: str
    """What it brings."""
    elsewhere: tuple[str, ...] = ()
    """Where that may be besides the path, from the root of the file system."""
    tests: str
    """What is skipped without it."""

    def is_installed(self) -> bool:
        return shutil.which(self.program) is not None or any(
            found for pattern in self.elsewhere for found in Path("/").glob(pattern)
        )


PARTS = (
    Part(
        name="Chromium", package="chromium", program="chromium", tests="the tests in tests/server/ui/test_page.py are"
    ),
    Part(
        name="PostgreSQL",
        package="postgresql",
        program="initdb",
        elsewhere=("usr/lib/postgresql/*/bin/initdb",),
        tests="half of the tests in tests/server, all [postgresql], are",
    ),
    Part(
        name="Alertmanager",
        package="prometheus-alertmanager",
        program="prometheus-alertmanager",
        tests="the test in tests/server/notify/test_alertmanager.py that needs it is",
    ),
)


def main() -> int:
    missing = [(part, reason) for part in PARTS if (reason := make_sure_of(part)) is not None]
    for part, reason in missing:
        print(f"{part.name} is not installed ({reason}): {part.tests} skipped")
    return 1 if missing and os.environ.get("CI") else 0


def make_sure_of(part: Part) -> str | None:
    """Install it where that is needed and ours to do; what stands in the way otherwise."""
    if part.is_installed():
        return None
    if os.name != "posix" or os.geteuid() != 0:
        return f"installing it needs root; on Debian: sudo apt-get install {part.package}"
    if not shutil.which("apt-get"):
        return "there is no apt-get here; install it as this system does"
    print(f"Installing {part.name} for the tests (once) ...", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", part.package]
    for command in (["apt-get", "update", "--quiet"], install):
        finished = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if finished.returncode != 0:
            return f"{' '.join(command)} failed: {finished.stderr.strip().rpartition(chr(10))[2]}"
    return None if part.is_installed() else f"apt-get's package brought no `{part.program}` program"


if __name__ == "__main__":
    sys.exit(main())

"""Make sure of what the tests need and pip cannot install: a Chromium for the page, a PostgreSQL for the store,
an Alertmanager for notifications, a Prometheus for its rules, an nginx for deploy/.

An ordinary machine without one skips those tests and says so; in continuous integration that would hide them, so there
it fails. The tests start what they need on ports of their own: what a package would start by itself is left off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    service: str | None = None
    """What the package would start now and whenever the machine starts."""
    tests: str
    """What is skipped without it."""

    def is_installed(self) -> bool:
        return shutil.which(self.program) is not None or any(
            found for pattern in self.elsewhere for found in Path("/").glob(pattern)
        )


PARTS = (
    Part(
        name="Chromium",
        package="chromium-headless-shell",  # a page takes less than half the CPU time of the whole Chromium
        program="chromium-headless-shell",
        tests="the tests in tests/server/ui are",
    ),
    Part(
        name="PostgreSQL",
        package="postgresql",
        program="initdb",
        elsewhere=("usr/lib/postgresql/*/bin/initdb",),
        service="postgresql",
        tests="half of the tests in tests/server, all [postgresql], are",
    ),
    Part(
        name="Alertmanager",
        package="prometheus-alertmanager",
        program="prometheus-alertmanager",
        service="prometheus-alertmanager",
        tests="the tests in tests/server/notify/test_alertmanager.py that need it and tests/test_stack.py are",
    ),
    Part(
        name="Prometheus",
        package="prometheus",
        program="promtool",
        service="prometheus",
        tests="the tests in tests/clients/prometheus, tests/test_stack.py and half of tests/test_compose.py are",
    ),
    Part(
        name="nginx",
        package="nginx",
        program="nginx",
        service="nginx",
        tests="the tests in tests/test_deploy.py that need it are",
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
    with _nothing_started():
        for command in (["apt-get", "update", "--quiet"], install):
            finished = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if finished.returncode != 0:
                return f"{' '.join(command)} failed: {finished.stderr.strip().rpartition(chr(10))[2]}"
    if part.service is not None and shutil.which("systemctl"):
        subprocess.run(["systemctl", "--quiet", "disable", part.service], stderr=subprocess.DEVNULL)
    return None if part.is_installed() else f"apt-get's package brought no `{part.program}` program"


@contextmanager
def _nothing_started(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """As long as this file says 101, no package starts a service; where there is one, its owner has decided."""
    try:
        with policy.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except OSError:
        yield
        return
    try:
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink()


if __name__ == "__main__":
    sys.exit(main())

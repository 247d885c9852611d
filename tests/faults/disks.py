"""Disks that are full."""

import contextlib
import os
import resource
import subprocess

import pytest


class SmallDisk:
    """A file system of its own in memory."""

    def __init__(self, folder):
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, _pid):
        with open(self._filler, "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1024))

    def free(self, _pid):
        self._filler.unlink()


class LimitedFiles:
    """What anyone can have: files may not grow beyond a size. The error is another one, EFBIG instead of ENOSPC."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self, pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))

    def free(self, pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def mounted(folder, size):
    """A file system of `size` bytes; skips where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tsemon-test", folder]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root; `limited` fills a disk without")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

"""A folder that may not be read, also where root, who may read everything, runs the tests."""

import codecs
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65_534


@contextmanager
def unreadable(folder):
    """Inside of it the folder is closed, and those above it are open to everybody."""
    modes = {path: path.stat().st_mode for path in (folder, *folder.parents)}
    above = [path for path in folder.parents if Path(tempfile.gettempdir()) in path.parents]
    is_root = os.geteuid() == 0
    codecs.lookup("utf-8-sig")  # Python loads it where it is used, and nobody may not read Python in root's folders
    for path in above:
        path.chmod(modes[path] | 0o055)
    folder.chmod(0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in (folder, *above):
            path.chmod(modes[path])

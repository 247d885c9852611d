"""The command line in the test's own process, where it need not import everything again."""

import contextlib
import io
import os
import signal
import sys
from typing import NamedTuple

from tsemon.__main__ import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def tsemon(*arguments, folder=None):
    """`tsemon` with these arguments, in this folder. What it does to signals is undone."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["tsemon", *map(str, arguments)]
    try:
        with (
            contextlib.chdir(folder or os.getcwd()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Done(code, out.getvalue(), err.getvalue())

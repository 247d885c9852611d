"""`tsemon` and `python -m tsemon`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from typing import TextIO

from tsemon.errors import InvalidArgument, InvalidRange, TsemonError
from tsemon.terminal import say

READ_ENOUGH = 128 + 13
"""The exit code where who reads our output has closed it: that of a program that SIGPIPE ends."""


def main() -> None:
    """Run the command line. Errors, ours and the system's, are one line on stderr: exit code 2 for wrong usage, else 1."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        sys.exit("tsemon: the command line needs typer and rich; pip install 'tsemon[server]' or 'tsemon[client]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may have what the terminal's encoding has not
    out = sys.stdout
    try:
        try:
            from tsemon.tools.cli import app

            app(prog_name="tsemon")
        finally:
            if out is not None:
                out.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except TsemonError as error:
        say(f"tsemon: {error}", err=True)
        sys.exit(2 if _is_wrong_usage(error) else 1)
    except BrokenPipeError:
        _forget(out)
        sys.exit(READ_ENOUGH)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer and Rich make a 1 of it
            sys.exit(READ_ENOUGH)
        raise
    except OSError as error:
        _forget(out)
        where = f"{error.filename}: " if error.filename else ""
        say(f"tsemon: {where}{error.strerror or error}", err=True)
        sys.exit(1)


def _is_wrong_usage(error: TsemonError) -> bool:
    """Whether what was typed is wrong, or names what is not there; what a file has in it is not typed."""
    return isinstance(error, LookupError | InvalidRange) or type(error) is InvalidArgument


def _forget(out: TextIO) -> None:
    """Leave what cannot be written, which Python tries again at its end."""
    try:
        out.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


if __name__ == "__main__":
    main()

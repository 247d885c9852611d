"""`tsemon` and `python -m tsemon`."""

from __future__ import annotations

import importlib.util
import sys

from tsemon.errors import TsemonError


def main() -> None:
    """Run the command line; errors that are ours are one line on stderr and exit status 1."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        sys.exit("tsemon: the command line needs typer and rich; pip install 'tsemon[server]' or 'tsemon[client]'")
    try:
        from tsemon.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except TsemonError as error:
        sys.exit(f"tsemon: {error}")


if __name__ == "__main__":
    main()

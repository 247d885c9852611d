"""`tsemon serve` in a process of its own, for as long as the demo runs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from tsemon.errors import ServerUnreachable, StoreError
from tsemon_client import Client

SERVER_START_S = 30.0
_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec another thread's lock may be held for good, the loader's for one.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


@contextmanager
def service(port: int, database: Path, console: Console) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`tsemon serve` in a process of its own, gone when the block ends."""
    log_path = database.with_suffix(".log")
    try:
        if database.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        database.parent.mkdir(parents=True, exist_ok=True)
        log_file = log_path.open("ab")
    except OSError as error:
        raise StoreError(
            f"expected a file that can be written as --database, got {database}: {error.strerror}; choose another"
        ) from error
    port = _free_port(port)
    url = f"http://127.0.0.1:{port}"
    with log_file:
        command = [sys.executable, "-m", "tsemon", "serve", "--port", str(port), "--database", f"sqlite:///{database}"]
        # Its own group: Ctrl-C is for the demo, which ends the service once the runs are delivered.
        server = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),
        )
    try:
        _await_start(server, url, log_path)
        console.print(f"The service runs at [bold]{url}/[/]: open it and watch.")
        yield url, server
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await_start(server: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    with Client(url, timeout_s=1.0, retries=0) as client:
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(ServerUnreachable):
                next(client.runs(), None)
                return
            time.sleep(0.1)
    if server.poll() is None:
        raise ServerUnreachable(f"the service did not start within {SERVER_START_S:.0f} s; its log is {log_path}")
    last = log_path.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("tsemon: ")
    raise ServerUnreachable(f"the service ended with status {server.returncode}: {last} (its log is {log_path})")


def end_with(parent: int) -> None:
    """In the service's process: SIGKILL leaves the demo no time to end it, so Linux is asked to."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before it could be asked
            os._exit(1)


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise ServerUnreachable("no port is free on 127.0.0.1")

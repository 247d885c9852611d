"""The real service in a process of its own, which can be killed and started again on the same port and database."""

import os
import signal
import subprocess
import time
from contextlib import suppress

from tests.ports import free_port
from tests.processes import start_tsemon
from tsemon.errors import ServerUnreachable, Unauthorized
from tsemon_client import Client


class ServiceProcess:
    """`database` is a URL, or the path of an SQLite file; `options` are further ones of `tsemon serve`.

    `python` is the interpreter, if it is not to be forked (tests/processes.py).
    """

    def __init__(self, database, *options, python=None):
        self._options = options
        self._python = python
        self.database = database if "://" in str(database) else f"sqlite:///{database}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = None

    def start(self):
        self._process = self._launch()
        await_service(self.url, process=self._process)

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        """SIGKILL: no handler runs, nothing is flushed."""
        self._process.kill()
        self._process.wait()

    def pause(self):
        """SIGSTOP: connections stay open, and nobody answers on them."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()

    def _launch(self):
        arguments = ["serve", "--port", str(self.port), "--database", self.database, *self._options]
        if self._python is None:
            return start_tsemon(*arguments)
        command = [self._python, "-m", "tsemon", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def await_service(url, timeout_s=240, process=None):
    """Return when the server answers. `process` is the one that serves, if it may end before it does."""
    deadline = time.monotonic() + timeout_s
    with Client(url, retries=0) as client:
        while True:
            try:
                with suppress(Unauthorized):  # it answers
                    next(client.runs(), None)
                assert process is None or process.poll() is None, f"another one answers at {url}"
                return
            except ServerUnreachable:
                assert time.monotonic() < deadline, f"no service at {url} within {timeout_s} s"
                assert process is None or process.poll() is None, f"ended with {process.returncode}"
                time.sleep(0.02)

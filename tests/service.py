"""The real service in a process of its own, which can be killed and started again on the same port and database."""

import os
import signal
import socket
import time
from contextlib import suppress

from tests.processes import start_tsemon
from tsemon.errors import ServerUnreachable, Unauthorized
from tsemon_client import Client


class ServiceProcess:
    """`database` is a URL, or the path of an SQLite file; `options` are further ones of `tsemon serve`."""

    def __init__(self, database, *options):
        self._options = options
        self.database = database if "://" in str(database) else f"sqlite:///{database}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = None

    def start(self):
        self._process = self._launch()
        await_service(self.url)

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
        return start_tsemon("serve", "--port", self.port, "--database", self.database, *self._options)


def await_service(url, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    with Client(url, retries=0) as client:
        while True:
            try:
                with suppress(Unauthorized):  # it answers
                    next(client.runs(), None)
                return
            except ServerUnreachable:
                assert time.monotonic() < deadline, f"no service at {url} within {timeout_s} s"
                time.sleep(0.02)

"""A TCP proxy that cuts connections where it is told to."""

import contextlib
import socket
import struct
import threading
from collections import deque
from typing import NamedTuple

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close sends RST


class Cut(NamedTuple):
    """End the connection once `num_bytes` have gone in one direction; what comes behind them is dropped.

    0 bytes of a reply: the request was done, and nobody hears of it.
    """

    direction: str
    num_bytes: int
    is_reset: bool = False


class Proxy:
    """Each connection gets the next of `cuts`; without one it is left alone."""

    def __init__(self, port):
        self.cuts = deque()
        self.num_cut = 0
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._open = set()
        self._threads[0].start()

    def end_all(self):
        """End the connections that there are."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_all()
        for thread in self._threads:
            thread.join()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client, self.cuts.popleft() if self.cuts else None))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client, cut):
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        ends = {client, server}
        if cut is not None and cut.is_reset:
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._open |= ends
        replies = threading.Thread(target=self._relay, args=(server, client, cut, "reply"))
        replies.start()
        self._relay(client, server, cut, "request")
        replies.join()
        self._open -= ends
        for end in ends:
            end.close()

    def _relay(self, source, target, cut, direction):
        left = cut.num_bytes if cut is not None and cut.direction == direction else None
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if left is not None and len(data) > left:
                    target.sendall(data[:left])
                    self.num_cut += 1
                    break
                left = None if left is None else left - len(data)
                target.sendall(data)
        # Wakes the thread of the other direction. Where the end is to be a reset, nothing may be said before it.
        how = socket.SHUT_RD if cut is not None and cut.is_reset else socket.SHUT_RDWR
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(how)

"""What the service takes of memory, and how long others wait, while strangers do their worst.

Each attack meets a service of its own with its limits as they come. Counted is the largest resident memory beyond that
before the attack, and the slowest answer to `GET /healthz` meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from databases import Service, SQLite

from tsemon.wire import Array, Frame, frames_to_body

MIB = 2**20


class Target:
    """A service with one run, and connections to it that stay open."""

    def __init__(self, service: Service, scale: float, seconds: float) -> None:
        self.service, self.seconds, self._scale = service, seconds, scale
        parts = urlsplit(service.url)
        self._address = (parts.hostname, parts.port)
        self._open: list[socket.socket] = []
        self.run_id = self.register("small", 2)

    def register(self, run: str, num_blocks: int) -> str:
        blocks = [f"h.{number}" for number in range(num_blocks)]
        run_id: str = self.service.post("/runs", run=run, blocks=blocks)["run_id"]
        return run_id

    def times(self, number: int) -> range:
        return range(max(1, int(number * self._scale)))

    def connect(self, said: bytes = b"") -> socket.socket:
        self._open.append(socket.create_connection(self._address, timeout=60))
        with suppress(OSError):
            self._open[-1].sendall(said)
        return self._open[-1]

    def post(self, number: int, body: bytes, **headers: str) -> None:
        """So many at once."""
        url = f"{self.service.url}/api/v1/runs/{self.run_id}/frames"
        with ThreadPoolExecutor(len(self.times(number))) as pool:
            for _ in self.times(number):
                pool.submit(httpx.post, url, content=body, headers=headers, timeout=120)

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def idle(target: Target) -> str:
    for _ in target.times(10_000):
        target.connect()
    return "10,000 connections that say nothing"


def slow_heads(target: Target) -> str:
    slow = [target.connect(b"GET / HTTP/1.1\r\nX: ") for _ in target.times(2000)]
    until = time.monotonic() + target.seconds
    while time.monotonic() < until:
        for connection in slow:
            with suppress(OSError):
                connection.send(b"x")
        time.sleep(0.3)
    return "2,000 heads that come byte by byte"


def half_bodies(target: Target) -> str:
    head = f"POST /api/v1/runs/{target.run_id}/frames HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
    for _ in target.times(900):
        target.connect(head.encode() + b" " * 100_000)
    time.sleep(target.seconds)
    return "900 bodies of 200 kB of which half comes"


def bombs(target: Target) -> str:
    target.post(8, gzip.compress(b" " * 2**30, 9), **{"Content-Encoding": "gzip"})
    return "8 bodies of 1 MiB that unpack to 1 GiB"


def lists(target: Target) -> str:
    arrays = b",".join(b'"m%d":[%s1]' % (number, b"1," * 9999) for number in range(208))
    body = b'{"writer":"w","attempt":1,"frames":[{"seq":0,"step":0,"time":1,"layers":{%s}}]}' % arrays
    target.post(30, body.ljust(16 * MIB))
    return "30 bodies of 16 MiB with 2,000,000 values each"


def labels(target: Target) -> str:
    keys = b",".join(b'"%d":1' % number for number in range(10**6))
    for _ in target.times(5):
        httpx.post(f"{target.service.url}/api/v1/runs", content=b'{"run":"r","config":{%s}}' % keys, timeout=60)
    return "5 configs of 1,000,000 keys"


def long_heads(target: Target) -> str:
    for _ in target.times(200):
        target.connect(b"GET / HTTP/1.1\r\nX: " + b"x" * 10 * MIB)
    return "200 heads of 10 MiB"


def pipelines(target: Target) -> str:
    for _ in target.times(100):
        target.connect(b"GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000)
    return "100 times 20,000 requests on a connection at once"


def deaf(target: Target) -> str:
    large, values = target.register("large", 1000), Array.of(number / 1000 for number in range(1000))
    for first in range(0, 300, 100):
        frames = [Frame(seq, seq, 1.0, {}, {"grad_norm": values}).to_json() for seq in range(first, first + 100)]
        target.service.post(f"/runs/{large}/frames", frames_to_body("w", 1, frames))
    ask = f"GET /api/v1/runs/{large}/heatmap?metric=grad_norm&columns=300 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for _ in target.times(150):
        target.connect(ask.encode())
    time.sleep(5 * target.seconds)
    return "150 heat maps of 5 MB that nobody reads"


ATTACKS: tuple[Callable[[Target], str], ...] = (
    idle, slow_heads, half_bodies, bombs, lists, labels, long_heads, pipelines, deaf,
)  # fmt: skip


@contextmanager
def watched(url: str) -> Iterator[list[float]]:
    """The seconds that each answer of /healthz takes, asked for without a pause of more than 50 ms."""
    took_s, is_over = [0.0], threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=60) as http:
            while not is_over.is_set():
                began = time.perf_counter()
                http.get(f"{url}/healthz")
                took_s.append(time.perf_counter() - began)
                is_over.wait(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield took_s
    finally:
        is_over.set()
        watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="how much of each number there is")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long slow ones go on")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, SQLite\n")
    print("| attack | memory, MiB more | slowest /healthz, ms | s |")
    print("|---|---|---|---|")
    for number, attack in enumerate(ATTACKS):
        with (
            tempfile.TemporaryDirectory(prefix="tsemon-attacks-") as folder,
            closing(Service(SQLite(Path(folder)), f"attack{number}")) as service,
        ):
            print(measured(service, attack, arguments.scale, arguments.seconds), flush=True)


def measured(service: Service, attack: Callable[[Target], str], scale: float, seconds: float) -> str:
    with closing(Target(service, scale, seconds)) as target, watched(service.url) as took_s:
        before_bytes, began = peak_bytes(service), time.perf_counter()
        name = attack(target)
        grown_bytes, all_s = peak_bytes(service) - before_bytes, time.perf_counter() - began
    return f"| {name} | {grown_bytes / MIB:.1f} | {1e3 * max(took_s):.0f} | {all_s:.1f} |"


def peak_bytes(service: Service) -> int:
    status = Path(f"/proc/{service.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main()

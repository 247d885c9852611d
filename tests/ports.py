"""Free ports for servers that the tests start."""

import itertools
import os
import random
import socket
from contextlib import suppress

FIRST, PER_WORKER, NUM_WORKERS = 10_100, 2_000, 10
"""Below 32768: by default Linux takes ports from there on for outgoing connections, perhaps before a server is up."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % NUM_WORKERS
_places = itertools.count(random.SystemRandom().randrange(PER_WORKER))


def free_port():
    """A port on which nobody listens, another one at each call and in each worker of a session."""
    for _ in range(PER_WORKER):
        port = FIRST + _worker * PER_WORKER + next(_places) % PER_WORKER
        if is_free(port):
            return port
    raise OSError(f"all ports from {FIRST + _worker * PER_WORKER} on are taken")


def is_free(port):
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False

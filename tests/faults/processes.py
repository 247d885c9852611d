"""Services and trainers in processes of their own.

A trainer here has no model. It puts frames of known values into a real Outbox as fast as it is told, so that each frame
that should have arrived can be looked for afterwards.
"""

import ctypes
import os
import threading
import time

from tests.processes import CONTEXT, Program
from tests.service import ServiceProcess
from tsemon.transport import HttpDelivery, Outbox, Spool
from tsemon.wire import Array, Frame
from tsemon_server.main import serve
from tsemon_server.settings import Settings
from tsemon_server.store import Store
from tsemon_server.store.series.settling import Sizes

TIMEOUT_S = 90
"""How long a condition may take to come true on a busy machine before the test fails."""

REGISTRATION = {
    "project": "default",
    "run": "gpt",
    "config": {},
    "tags": [],
    "blocks": ["h.0", "h.1"],
    "attempt_key": "key-1",
}


def await_true(is_true, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so within {TIMEOUT_S} s: {what}"
        time.sleep(0.002)


class Service(ServiceProcess):
    """What `log` holds is what the service said on stderr.

    The service moves settled frames every few seconds. With `settles` its process does so without a pause, in small
    segments, so that whatever happens to it happens in the middle of that. `settings` are those of the service.
    """

    def __init__(self, database, log, *, settles=False, **settings):
        super().__init__(database)
        self._log, self._settles, self._settings = log, settles, settings
        self._num_settled = CONTEXT.RawValue("q")

    def await_settling(self):
        """Wait until it begins with a segment."""
        before = self._num_settled.value
        await_true(lambda: self._num_settled.value > before, "frames settle")

    def _launch(self):
        num_settled = self._num_settled if self._settles else None
        with open(self._log, "a") as log:
            return Program(_serve, self.port, self.database, num_settled, self._settings, stderr=log)

    def __exit__(self, *_):
        self.kill()


def _serve(port, database, num_settled, settings):
    if num_settled is not None:
        threading.Thread(target=_settle, args=(Store(database), num_settled), daemon=True).start()
    serve(Settings(port=port, database=database, **settings))


def _settle(store, num_settled):
    sizes = Sizes(segment=16, kept=4)

    def goes_on():
        num_settled.value += 1
        return False

    while True:
        store.settle(goes_on, sizes=sizes)
        time.sleep(0.005)


class Told(ctypes.Structure):
    """What a trainer and its test tell each other, in shared memory and without a lock, for either may be killed."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("num_made", "num_sent", "num_dropped")] + [
        (name, ctypes.c_bool) for name in ("is_in_memory", "is_done")
    ]


class Trainer:
    """One writer of one attempt of the run `gpt`."""

    def __init__(self, spool_dir, url, writer="rank0", *, key="key-1", resume_step=None, frames_per_s=300, **options):
        self.writer = writer
        self.folder = spool_dir / f"default/gpt/{key}~{writer}"
        self.told = CONTEXT.RawValue(Told)
        registration = REGISTRATION | {"attempt_key": key, "resume_step": resume_step}
        arguments = (spool_dir, url, registration, writer, self.told, frames_per_s, options)
        self._process = CONTEXT.Process(target=_train, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self):
        return self._process.pid

    def await_spool(self):
        await_true((self.folder / "run.json").exists, f"{self.writer} has a spool")

    def await_made(self, number):
        """Wait until at least so many more frames are there, which is to say in the spool where it can be written."""
        target = self.told.num_made + number
        await_true(lambda: self.told.num_made >= target, f"{self.writer} makes {number} more frames")

    def await_sent(self, number):
        """Wait until the service has confirmed at least so many more frames."""
        target = self.told.num_sent + number
        await_true(lambda: self.told.num_sent >= target, f"{number} more frames of {self.writer} arrive")

    def kill(self):
        self._process.kill()
        self._process.join()

    def finish(self):
        """End the training, deliver everything, and give the number of frames there were."""
        self.told.is_done = True
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode == 0, f"{self.writer} ended with {self._process.exitcode}"
        assert self.told.num_dropped == 0
        # A frame on its way from memory to the disk may be sent from either, and is confirmed twice then.
        assert self.told.num_sent >= self.told.num_made, "all were confirmed"
        return self.told.num_made


def _train(spool_dir, url, registration, writer, told, frames_per_s, options):
    os.environ["TSEMON_TOKEN"] = options.pop("token", "")
    delivery = HttpDelivery(url, options.pop("timeout_s", 10.0))
    retries = {"first_retry_s": 0.01, "max_retry_s": 0.1}
    spool = Spool.create(spool_dir, registration, writer, **options)
    outbox = Outbox(spool, delivery, on_warning=lambda _: None, **retries)

    def make_frame(seq):
        told.num_made = seq  # the exporter asks for a frame once it has written the one before
        return known_frame(writer, seq)

    num_put = 0
    while not told.is_done:
        outbox.put(make_frame)
        num_put += 1
        stats = outbox.stats()
        told.num_sent, told.num_dropped = stats.num_sent, stats.num_dropped
        told.is_in_memory = stats.spool_folder is None
        time.sleep(1 / frames_per_s)
    outbox.close(timeout_s=TIMEOUT_S)
    stats = outbox.stats()
    told.num_made = num_put
    told.num_sent, told.num_dropped = stats.num_sent, stats.num_dropped


def known_frame(writer, seq, time=1732100000.0):
    """A frame whose numbers tell whose it is and which."""
    return Frame(
        seq=seq,
        step=seq,
        time=time,
        scalars={writer: float(seq)},
        layers={f"{writer}.layers": Array.of([seq, seq + 0.25, -seq])},
    )

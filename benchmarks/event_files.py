"""What do TensorBoard's event files cost: to a mirror that writes them, and to an import?

    python benchmarks/event_files.py [--frames 300]

The import is a process of its own, which starts, reads all twice and writes a spool folder. Linux only.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from values import LAYERS, METRICS

from tsemon.mirrors import TensorBoard
from tsemon.mirrors.numbers import Layers
from tsemon.wire import Array, Frame

NUM_SCALARS = 15
IMPORT = """
import re, time
from pathlib import Path
from tsemon.tools.cli import app
app(standalone_mode=False)
print(time.process_time(), re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
"""The command; then its CPU seconds, and its largest memory in KiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=300)
    num_frames = parser.parse_args().frames
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}. {num_frames} frames of "
        f"{NUM_SCALARS} scalars and {len(METRICS)} metrics of {LAYERS} layers, float32.\n\n| | CPU | |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory(prefix="tsemon-") as folder:
        for layers in ("aggregates", "each"):
            events = Path(folder, layers)
            cpu_ms = 1e3 * _write(events, layers, num_frames) / num_frames
            size_mb = sum(file.stat().st_size for file in events.iterdir()) / 1e6
            print(f"| a frame, layers={layers!r} | {cpu_ms:.1f} ms | {size_mb:.1f} MB in all |", flush=True)
        command = [sys.executable, "-c", IMPORT, "import", str(events), "--spool", f"{folder}/spool"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cpu_s, memory_kib = map(float, printed.splitlines()[-1].split())
        print(f"| the import of these | {cpu_s:.1f} s | {memory_kib / 1024:.0f} MiB of memory |")


def _write(folder: Path, layers: Layers, num_frames: int) -> float:
    """CPU seconds of the mirror's thread."""
    mirror, cpu_s, draw = TensorBoard(folder, layers=layers), 0.0, np.random.default_rng(0)
    for step in range(num_frames):
        scalars = {f"scalar_{number}": draw.random() for number in range(NUM_SCALARS)}
        values = {name: Array.of(draw.random(LAYERS, np.float32)) for name in METRICS}
        start_s = time.thread_time()
        mirror.write(Frame(step, step, 1.7e9 + step, scalars, values))
        cpu_s += time.thread_time() - start_s
    mirror.close()
    return cpu_s


if __name__ == "__main__":
    main()

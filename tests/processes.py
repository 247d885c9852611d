"""Python programs in processes of their own, forked from one that has everything imported: up in 50 ms.

From their first line on they are what `subprocess` would start, three seconds of CPU later. What is tried of a start, of
imports, or of the interpreter's own end needs that.
"""

import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import connection, forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__", "tests.preloaded"])
ROOT = Path(__file__).parent.parent
STREAMS = ("stdin", "stdout", "stderr")


def start_tsemon(*arguments, **options):
    """`tsemon` with these arguments."""
    return Program(_tsemon, list(map(str, arguments)), **options)


def start_python(path, *arguments, **options):
    """`python PATH` with these arguments."""
    return Program(_python, str(path), list(map(str, arguments)), **options)


def run(start, *arguments, timeout=300, **options):
    """Start it and wait for its end; what it wrote, as subprocess.run gives it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start(*arguments, stdout=out, stderr=err, **options)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired as late:
            program.send_signal(signal.SIGABRT)
            program.wait(10)
            late.add_note(f"It wrote, and was at:\n{_text(err)}")
            raise
        finally:
            program.kill()
        texts = [_text(out), _text(err)]
    return subprocess.CompletedProcess(arguments, code, *texts)


def _text(file):
    return os.pread(file.fileno(), 2**24, 0).decode(errors="replace")


class Program:
    """`function(*arguments)` in a process of its own, with what subprocess.Popen has. It ends when the test process does.

    Each stream is a file, or PIPE, or /dev/null as it comes.
    """

    def __init__(self, function, *arguments, folder=None, environment=os.environ, **streams):
        with contextlib.ExitStack() as opened:
            ends = [self._opened(opened, name, streams.get(name)) for name in STREAMS]
            arguments = (function, arguments, str(folder or os.getcwd()), dict(environment), ends)
            self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
            with contextlib.chdir(ROOT):
                forkserver.ensure_running()  # it finds what it is to import from here
            self._process.start()
        self.pid = self._process.pid

    def _opened(self, opened, name, stream):
        """The child's end, which is closed here once the child has it."""
        if stream == subprocess.PIPE:
            read, write = os.pipe()
            child, ours = (read, write) if name == "stdin" else (write, read)
            setattr(self, name, os.fdopen(ours, "w" if name == "stdin" else "r", encoding="utf-8"))
        else:
            child = os.open(os.devnull, os.O_RDWR) if stream is None else os.dup(stream.fileno())
        return opened.enter_context(connection.Connection(child))

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def communicate(self, timeout=None):
        """What it still says, up to its end. It must be little: one stream is read after the other."""
        said = []
        for file in (getattr(self, name, None) for name in STREAMS[1:]):
            with file or contextlib.nullcontext():
                said.append(file and file.read())
        self.wait(timeout)
        return said

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in STREAMS:
            if (file := getattr(self, name, None)) is not None:
                file.close()
        self.wait()


@contextlib.contextmanager
def ranks(function, size, folder, *arguments):
    """`function(rank, size, folder, *arguments)` in `size` processes. In the end all of them must have ended well."""
    programs = [Program(function, rank, size, folder, *arguments, stderr=subprocess.PIPE) for rank in range(size)]
    try:
        yield programs
        for program in programs:
            _, errors = program.communicate(timeout=120)
            assert program.returncode == 0, errors
    finally:
        for program in programs:
            program.kill()
            program.wait()


def seen_by_ranks(size, folder):
    """What each rank kept in FOLDER/RANK.json."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _tsemon(arguments):
    from tsemon.__main__ import main

    sys.argv = ["tsemon", *arguments]
    main()


def _python(path, arguments):
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _run(function, arguments, folder, environment, ends):
    """In the child, up to its end, which is that of an interpreter."""
    multiprocessing.current_process()._config["daemon"] = False  # it may have children of its own
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # it may be another one there
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    faulthandler.enable(2)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8", closefd=False) for number in (1, 2))
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            code = end.code or 0
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)

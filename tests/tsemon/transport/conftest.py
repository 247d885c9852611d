"""A recording peer that speaks the service's contract over a real socket, and has bad days on request."""

import contextlib
import json
import math
import socket
import struct
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.ports import free_port
from tsemon.wire import HISTORY, PACKED, Array, Frame, array_to_json, number_to_json


class Peer:
    """Stores what it is sent as the service would. `faults` holds one entry per coming request of frames."""

    def __init__(self):
        self.changed = threading.Condition()
        self.released = threading.Event()
        self.runs = {}
        self.frames = {}
        self.num_duplicates = 0
        self.requests = []
        self.bodies = []
        self.faults = deque()
        self.faults_of_register = deque()
        self.faults_of_beats = deque()
        self.faults_of_reads = deque()
        self.faults_of_rules = deque()
        self.beats = []
        self.headers = []
        self.date = None
        self.is_refused = lambda _frame: False
        self.refuse_with = (422, {"error": "invalid_frame", "detail": "a frame of this kind is not taken"}, {})
        self.alerts = []
        self.incidents = None
        """A server from before incidents says nothing of them."""
        self.accepts = [HISTORY]
        """What the reply to a registration says; a server from before packed bodies says nothing."""
        self.rows = []
        """Scalars of steps without a sample, as they came."""
        self.server = None

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def start(self, port=None, tls=None):
        peer, port = self, port or free_port()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def handle_any(self):
                peer.handle(self)

            do_GET = do_POST = do_PATCH = handle_any

            def date_time_string(self, timestamp=None):
                return peer.date or super().date_time_string(timestamp)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def __init__(self, *args):
                self.open_sockets = set()
                super().__init__(*args)

            def process_request(self, request, client_address):
                self.open_sockets.add(request)
                super().process_request(request, client_address)

            def handle_error(self, request, client_address):
                pass  # a peer that hangs up is an ordinary day here

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.scheme = "http"
        if tls is not None:
            self.server.socket, self.scheme = tls.wrap_socket(self.server.socket, server_side=True), "https"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def stop(self):
        """Die as a killed service does: connections and all."""
        if self.server is not None:
            self.released.set()
            self.server.shutdown()
            self.thread.join()
            for connection in self.server.open_sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.server.server_close()
            self.server = None

    def wait_until(self, is_true):
        with self.changed:
            assert self.changed.wait_for(is_true, timeout=120), f"still not so; requests: {self.requests}"

    def seqs(self, run_id="default/gpt"):
        return sorted(seq for run, _, _, seq in self.frames if run == run_id)

    def state(self, run_id="default/gpt"):
        return self.runs[run_id]["state"]

    def handle(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        path = urlsplit(handler.path).path.removeprefix("/api/v1").split("/")[1:]
        with self.changed:
            self.requests.append(f"{handler.command} {handler.path}")
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            faults = self.faults_for(handler.command, path[-1])
            fault = faults.popleft() if faults else None
            answer = fault if isinstance(fault, tuple) else self.answer(handler, path, body)
            self.changed.notify_all()
        if fault == "hang":
            self.released.wait(20)
        if fault in ("drop", "hang"):
            handler.close_connection = True
            return
        status, reply, headers = answer
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    def faults_for(self, method, route):
        if method != "POST":
            return {"runs": self.faults_of_reads, "rules": self.faults_of_rules}.get(route, ())
        return {"frames": self.faults, "heartbeat": self.faults_of_beats}.get(route, self.faults_of_register)

    def answer(self, handler, path, body):
        is_packed = handler.headers.get("Content-Type") == PACKED
        method, sent = handler.command, unpacked(body) if is_packed else json.loads(body) if body else None
        if method == "POST" and path == ["runs"]:
            return 200, self.register(sent), {}
        if path == ["runs"]:
            asked = {name: values[-1] for name, values in parse_qs(urlsplit(handler.path).query).items()}
            run_id = f"{asked['project']}/{asked['run']}"
            known = {"run_id": run_id, "num_frames": len(self.seqs(run_id))}
            found = [{**known, "state": self.state(run_id)}] if run_id in self.runs else []
            return 200, {"runs": found, "next_cursor": None}, {}
        run = self.runs.get(path[1].replace("%2F", "/"))
        if run is None:
            return 404, {"error": "unknown_run", "detail": "no such run"}, {}
        if path[-1] == "heartbeat":
            self.beats.append((sent["writer"], sent["attempt"], sent["step"]))
            return 200, self.told(), {}
        if method == "POST":
            return self.store(run, sent)
        if method == "PATCH":
            run["state"] = sent["state"]
        known = {name: run[name] for name in ("run_id", "state", "tags")}
        return 200, {**known, "attempt": len(run["attempts"])}, {}

    def register(self, sent):
        run_id = f"{sent['project']}/{sent['run']}"
        run = self.runs.setdefault(run_id, {"run_id": run_id, "attempts": []})
        if sent["attempt_key"] not in run["attempts"]:
            run["state"], run["tags"] = "running", sent["tags"]
            run["attempts"].append(sent["attempt_key"])
            run.setdefault("resumed", []).append(sent["resume_step"])
        reply = {"run_id": run_id, "attempt": run["attempts"].index(sent["attempt_key"]) + 1}
        return reply if self.accepts is None else {**reply, "accepts": self.accepts}

    def store(self, run, sent):
        if any(self.is_refused(frame) for frame in sent["frames"]):
            return self.refuse_with
        keys = [(run["run_id"], sent["attempt"], sent["writer"], frame["seq"]) for frame in sent["frames"]]
        self.rows += sent.get("history", ())
        duplicates = sum(key in self.frames for key in keys)
        self.num_duplicates += duplicates
        self.frames.update(zip(keys, sent["frames"], strict=True))
        reply = {
            "accepted": len(keys) - duplicates,
            "duplicates": duplicates,
            "last_seq": keys[-1][3] if keys else None,
        }
        return 200, {**reply, **self.told()}, {}

    def told(self):
        return {"alerts": self.alerts} | ({} if self.incidents is None else {"incidents": self.incidents})


def unpacked(body):
    """The JSON body for a packed one, taken apart as docs/wire.md describes it."""
    magic, num_bytes = struct.unpack_from("<4sI", body)
    assert magic == b"TSF1"
    header, offset = json.loads(body[8 : 8 + num_bytes]), 8 + num_bytes
    frames = []
    for packed in header["frames"]:
        layout = header["layouts"][packed.pop("layout")]
        frame = {**packed, "scalars": {}, "layers": {}, "heads": {}}
        for name in layout["scalars"]:
            frame["scalars"][name] = number_to_json(struct.unpack_from("<d", body, offset)[0])
            offset += 8
        for kind in ("layers", "heads"):
            for name, shape in layout[kind].items():
                end = offset + 4 * math.prod(shape)
                frame[kind][name] = array_to_json(Array(tuple(shape), body[offset:end]))
                offset = end
        frames.append(frame)
    assert offset == len(body)
    body = {name: header[name] for name in ("writer", "attempt", "history") if name in header}
    return {**body, "frames": frames}


@pytest.fixture
def peer():
    peer = Peer().start()
    yield peer
    peer.stop()


@pytest.fixture
def registration():
    def of(key="key-1", run="gpt", project="default", **more):
        body = {"project": project, "run": run, "config": {}, "tags": [], "blocks": ["h.0"], "resume_step": None}
        return {**body, "attempt_key": key, **more}

    return of


@pytest.fixture
def sample():
    """A sample of a given step, as the monitor hands it over."""

    def of(step, **scalars):
        return lambda seq: Frame(seq=seq, step=step, time=1732100000.0 + step, scalars=scalars or {"loss": 2.0})

    return of

"""Receivers on loopback, which take what is sent to them, or do not."""

import contextlib
import email
import gc
import json
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from email import policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from tests.ports import free_port


class Request(NamedTuple):
    path: str
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class HttpReceiver(ThreadingHTTPServer):
    """`answers` are given in turn, then the usual one: a status, a status and headers, or what is done with the handler."""

    daemon_threads = True
    usual = 200

    def __init__(self, tls=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_port}"
        self.port = self.server_port
        self.requests, self.answers = [], []
        self.lock = threading.Lock()
        self.let_go = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # whoever hangs up does it on purpose

    def close(self):
        self.let_go.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.requests.append(Request(self.path, dict(self.headers), body))
            answer = self.server.answers.pop(0) if self.server.answers else self.server.usual
        if callable(answer):
            answer(self)
            return
        status, headers = (answer, {}) if isinstance(answer, int) else answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"secret words of the receiver")

    def log_message(self, *_):
        pass


def reply(body, status=200, **headers):
    """An answer with JSON in its body."""

    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(json.dumps(body).encode())

    return answer


class SlackReceiver(HttpReceiver):
    """Slack's `chat.postMessage`: gives each message an id, and knows the messages that a thread can begin with."""

    def __init__(self):
        super().__init__()
        self.api_url = f"{self.url}/api"
        self.messages = {}
        """Bodies by id."""

    @property
    def threads(self):
        """Thread of each message, or None."""
        return [body.get("thread_ts") for body in self.messages.values()]

    def usual(self, handler):
        path, headers, body = self.requests[-1]
        assert (path, headers["Authorization"]) == ("/api/chat.postMessage", "Bearer xoxb-1")
        body = json.loads(body)
        if body.get("thread_ts") not in (None, *self.messages):
            reply({"ok": False, "error": "thread_not_found"})(handler)
            return
        ts = f"17000000{len(self.requests):02}.000100"
        self.messages[ts] = body
        reply({"ok": True, "channel": "C1", "ts": ts, "message": body})(handler)


class ForumReceiver(HttpReceiver):
    """The webhook of a forum of Discord, which opens a post for a message with `thread_name`."""

    def __init__(self):
        super().__init__()
        self.posts = {}
        """Bodies by the id of the post."""

    def usual(self, handler):
        parts = urlsplit(self.requests[-1].path)
        query, body = dict(parse_qsl(parts.query)), self.requests[-1].json
        assert query.pop("wait") == "true"
        post_id = query.pop("thread_id", None)
        assert not query
        if (post_id is None) != ("thread_name" in body):
            reply({"code": 220001}, 400)(handler)
        elif post_id is not None and post_id not in self.posts:
            reply({"code": 10003}, 404)(handler)
        else:
            post_id = post_id or f"11{len(self.requests):016}"
            self.posts.setdefault(post_id, []).append(body)
            reply({"id": "9", "channel_id": post_id})(handler)


def hang(handler):
    """Say nothing until the test is over."""
    handler.server.let_go.wait(60)
    handler.close_connection = True


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def drip(handler):
    """Answer, a letter every now and then, for as long as anybody listens."""
    with contextlib.suppress(OSError):
        while not handler.server.let_go.wait(0.05):
            handler.wfile.write(b"x")


def say_nonsense(handler):
    handler.wfile.write(b"220 this is no HTTP\r\n")


class MailReceiver:
    """An SMTP server. `answers` are given in turn to mails, then 250."""

    def __init__(self, tls=None, is_tls_from_the_start=False, password=None):
        self.mails, self.answers, self.logins = [], [], []
        self._password = password
        options = {}
        if tls is not None and not is_tls_from_the_start:
            options = {"tls_context": tls, "require_starttls": True}
        if password is not None:
            options |= {"authenticator": self._log_in, "auth_required": True}
            options |= {"auth_require_tls": not is_tls_from_the_start}
        self.port = free_port()
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            ready_timeout=60,
            ssl_context=tls if is_tls_from_the_start else None,
            **options,
        )
        self._controller.start()

    def _log_in(self, server, session, envelope, mechanism, data):
        self.logins.append((data.login, data.password))
        return AuthResult(success=data.password == self._password.encode(), handled=False)

    async def handle_DATA(self, server, session, envelope):
        answer = self.answers.pop(0) if self.answers else "250 taken"
        if answer.startswith("250"):
            self.mails.append(
                (
                    envelope.mail_from,
                    envelope.rcpt_tos,
                    email.message_from_bytes(envelope.content, policy=policy.default),
                )
            )
        return answer

    def close(self):
        self._controller.stop(no_assert=True)
        gc.collect()  # what it leaves open under TLS, while the test that knows of it can ignore that


class SilentServer:
    """Takes connections, and says nothing on them."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        self._listener.close()


class DrippingMailServer(socketserver.ThreadingTCPServer):
    """Greets, a letter every now and then."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _DrippingHandler)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


class _DrippingHandler(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while True:
                self.request.send(b"2")
                time.sleep(0.05)


def make_certificate(folder):
    """A key and a certificate for 127.0.0.1 that nobody has signed but itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=tsemon", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return certificate, context


def await_that(condition, what, timeout_s=120):
    """`what` is the condition in words, or a function that says how things are."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(0.005)

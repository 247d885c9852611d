"""The service's REST interface as a writer needs it: register, send frames, say that it lives, finish."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from tsemon.errors import InvalidArgument, ServerRefused, ServerUnreachable, TsemonError, UnknownAttempt, UnknownRun
from tsemon.wire import API, RunState

JSON = "application/json"
_MAX_REPLY_BYTES = 16 * 2**20
_RETRY = {408, 425, 429}
"""Statuses under 500 that speak of the moment, not of the request."""


class Registered(NamedTuple):
    """The reply to a registration."""

    run_id: str
    attempt: int
    run: str
    """Another name than the one asked for, if a live process has that one."""
    live_attempts: Sequence[int] | None
    """Other attempts whose processes are alive; None from an older server, which cannot tell."""


class HttpDelivery:
    """One connection to the service, kept alive between requests. For one thread; `abort` may come from another.

    Goes straight to the host in `server_url`: it follows no redirect and reads no proxy from the environment. Each
    request may safely be sent twice, so one that dies on a connection the service has meanwhile closed is sent again at
    once. https always checks the certificate, with what the system trusts or the file that SSL_CERT_FILE names.

    The token in TSEMON_TOKEN goes into a header of every request, and nowhere else: no error repeats it, even where the
    other side does.
    """

    def __init__(self, server_url: str, timeout_s: float = 10.0) -> None:
        self.server_url = server_url
        shown = re.sub("[^/]*@", "...@", server_url) if isinstance(server_url, str) else server_url  # no password
        expected = f"server must be http(s)://host[:port][/path], got {shown!r}"
        if not isinstance(server_url, str):
            raise InvalidArgument(f"{expected}, which is no string")
        try:
            parts = urlsplit(server_url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidArgument(f"{expected}: {error}") from error
        if (
            parts.scheme not in ("http", "https")
            or not self._host
            or "@" in parts.netloc
            or parts.query
            or parts.fragment
        ):
            raise InvalidArgument(expected)
        if any(not " " < letter < "\x7f" for letter in server_url):
            raise InvalidArgument(f"{expected}: only printable ASCII without spaces, other letters percent-encoded")
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout_s must be above 0 seconds, got {timeout_s}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._token = _token()
        self._prefix = parts.path.rstrip("/") + API
        self._timeout_s = timeout_s
        self.accepts: frozenset[str] = frozenset()
        """Content types of bodies of frames that the server reads, by its last reply to a registration."""
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False

    def register(self, body: Mapping[str, Any]) -> Registered:
        """Make the run known and get its id and the number of this attempt."""
        reply = self._request("POST", "/runs", json.dumps(body).encode())
        accepts = reply.get("accepts")
        self.accepts = frozenset(map(str, accepts)) if isinstance(accepts, list) else frozenset()
        try:
            live_attempts = reply.get("live_attempts")  # an older server tells neither this nor the name
            run = str(reply.get("run", body["run"]))
            return Registered(str(reply["run_id"]), int(reply["attempt"]), run, live_attempts)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreachable(f"answered the registration without a run_id and an attempt: {reply}") from error

    def send(self, run_id: str, body: bytes, content_type: str = JSON) -> dict[str, Any]:
        """Send a body of frames. Raises UnknownRun or UnknownAttempt when the service does not have the run now."""
        return self._request("POST", f"/runs/{quote(run_id, safe='')}/frames", body, content_type)

    def beat(self, run_id: str, *, writer: str, attempt: int, step: int) -> dict[str, Any]:
        """Say that the writer lives, and at which step."""
        body = json.dumps({"writer": writer, "attempt": attempt, "step": step}).encode()
        return self._request("POST", f"/runs/{quote(run_id, safe='')}/heartbeat", body)

    def has_frames(self, project: str, run: str) -> bool:
        """Whether the service has frames of a run of this name."""
        return bool((self.find(project, run) or {}).get("num_frames"))

    def find(self, project: str, run: str) -> dict[str, Any] | None:
        """The run of this name as the service lists it; None where there is none."""
        reply = self._request("GET", "/runs?" + urlencode({"project": project, "run": run}))
        try:
            return next((found for found in reply["runs"] if found["num_frames"] is not None), None)
        except (KeyError, TypeError) as error:
            raise self._unreachable(f"answered with no list of runs: {reply}") from error

    def run(self, run_id: str) -> dict[str, Any]:
        """What the service knows of the run."""
        return self._request("GET", f"/runs/{quote(run_id, safe='')}")

    def rules(self, run_id: str) -> dict[str, Any]:
        """How each rule stands on the run."""
        return self._request("GET", f"/runs/{quote(run_id, safe='')}/rules")

    def frame(self, run_id: str, step: int) -> dict[str, Any] | None:
        """What the service shows of the run at this step; None where it has no frame of it."""
        try:
            found = self._request("GET", f"/runs/{quote(run_id, safe='')}/frame?" + urlencode({"step": step}))
        except ServerRefused as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            return None
        return found if found.get("step") == step else None

    def finish(self, run_id: str, state: RunState, attempt: int | None = None) -> None:
        """Say how an attempt ended, or the current one."""
        body = {"state": state} | ({} if attempt is None else {"attempt": attempt})
        self._request("PATCH", f"/runs/{quote(run_id, safe='')}", json.dumps(body).encode())

    def abort(self) -> None:
        """End the request under way, and any later one, with ServerUnreachable."""
        self._is_aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, path: str, body: bytes | None = None, content_type: str = JSON) -> dict[str, Any]:
        was_kept_alive = self._connection is not None
        try:
            try:
                status, headers, data = self._exchange(method, path, body, content_type)
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if not was_kept_alive:
                    raise
                status, headers, data = self._exchange(method, path, body, content_type)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise self._unreachable(
                f"shows a certificate that is not trusted ({error.verify_message}); where the authority is your own, "
                "name the file of its certificate in SSL_CERT_FILE"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(f"does not answer: {str(error) or type(error).__name__}") from error
        return self._read_reply(status, headers, data, f"{method} {self._prefix}{path}")

    def _exchange(
        self, method: str, path: str, body: bytes | None, content_type: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self._is_aborted:
            raise ConnectionAbortedError("delivery was ended by this process")
        if self._connection is None:
            self._connection = self._connect()
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._connection.request(method, self._prefix + path, body, headers)
        with self._connection.getresponse() as response:
            data = response.read(_MAX_REPLY_BYTES)
            if not response.isclosed():
                # More than any reply of the service: whatever speaks there, the rest is not read.
                self.close()
            return response.status, response.headers, data

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def _read_reply(self, status: int, headers: http.client.HTTPMessage, data: bytes, request: str) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except ValueError:
            reply = None
        known = reply if isinstance(reply, dict) else {}
        if 200 <= status < 300:
            if isinstance(reply, dict):
                return reply
            raise self._unreachable(f"answered {request} with {status} and no JSON object: is it tsemon's service?")
        code = known.get("error")
        text = f"{code}: {known.get('detail')}" if code else (http.client.responses.get(status) or "no reason given")
        if code == "unauthorized":
            text += "; the environment variable TSEMON_TOKEN holds the token that is sent"
        if status >= 500 or status in _RETRY:
            error = self._unreachable(f"answered {request} with {status} ({text})")
            error.retry_after_s = _retry_after_s(headers)
            raise error
        refusals: dict[str, type[TsemonError]] = {kind.code: kind for kind in (UnknownRun, UnknownAttempt)}
        refused = refusals.get(str(code), ServerRefused)(
            self._without_token(f"{self.server_url} answered {request} with {status} ({text})")
        )
        refused.status = status
        raise refused

    def _unreachable(self, what: str) -> ServerUnreachable:
        return ServerUnreachable(self._without_token(f"the service at {self.server_url} {what}"))

    def _without_token(self, text: str) -> str:
        return text.replace(self._token, "<token>") if self._token else text


def _token() -> str:
    token = os.environ.get("TSEMON_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise InvalidArgument(
            "TSEMON_TOKEN is a token on one line, without spaces, as the service gave it; it is not shown"
        )
    return token


def _retry_after_s(headers: http.client.HTTPMessage) -> float | None:
    """Seconds from now, of either form that Retry-After has. A date is read by the clock of the service, not by ours."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        then, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (then - now).total_seconds())
    except (ValueError, TypeError):
        return None

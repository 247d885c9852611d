"""One message to one receiver, over HTTP or SMTP, within five seconds.

What a receiver answers is read no further than its status: whatever it says beyond that is shown to nobody. The
exceptions are the id of a message and the name of an error in Slack's API. Addresses and passwords are not shown
either: an error says what happened, not where.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from email.message import EmailMessage
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tsemon_server.notify.addresses import is_public
from tsemon_server.notify.configuration import Email

TIMEOUT_S = 5.0
"""For everything, from the connection to the answer."""
MAX_RETRY_AFTER_S = 3600.0
"""A receiver that asks to be left alone for longer is asked again after so long."""

_ABOUT_THE_MESSAGE = frozenset({400, 413, 414, 422})
"""Answers that the same message gets however often it is sent."""
_SLACK_ABOUT_THE_MESSAGE = frozenset(
    {"attachment_payload_limit_exceeded", "invalid_attachments", "invalid_blocks", "invalid_blocks_format"}
    | {"msg_blocks_too_long", "msg_too_long", "no_text", "too_many_attachments"}
)
"""Errors of Slack's API that mean the same."""
MAX_ANSWER_BYTES = 2**20
"""Maximum size of an answer that is read."""


class NotDelivered(Exception):
    """The receiver does not have the message, as far as we know. The text holds nothing that is secret."""

    def __init__(self, why: str, *, is_final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.is_final = is_final
        """Whether it is of no use to send the same once more."""
        self.retry_after_s = retry_after_s
        """How long the receiver asked to be left alone."""


class NotInThread(NotDelivered):
    """The receiver may take the same message outside of the thread."""


class Post(NamedTuple):
    """A request."""

    url: str
    headers: Mapping[str, str]
    body: bytes


class _Line:
    """A connection that is cut when its time is over, whoever waits for whom on it."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s
        self._socket: socket.socket | None = None
        self._timer: threading.Timer | None = None
        self.is_cut = False

    @property
    def left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def dial(self, host: str, port: int, *, allow_private: bool) -> socket.socket:
        """A connection to the host. Who is at its other end is looked at there, for a name may mean another next time."""
        connected = self._connect(host, port)
        try:
            if not allow_private and not is_public(connected.getpeername()[0]):
                raise NotDelivered(
                    "its address is private or local; say allow_private: true in the configuration if that is meant"
                )
            self._socket = connected.dup()  # stays, when TLS takes the other one over
        except BaseException:
            connected.close()
            raise
        self._timer = threading.Timer(self.left_s, self._cut)
        self._timer.daemon = True
        self._timer.start()
        return connected

    def _connect(self, host: str, port: int) -> socket.socket:
        """To the first of the host's addresses that answers; none may take the time of all."""
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # as long as the system's resolver takes
        if time.monotonic() > self._until:
            raise TimeoutError
        for num_left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            connected = socket.socket(family, kind, protocol)
            try:
                connected.settimeout(self.left_s / num_left)
                connected.connect(address)
                connected.settimeout(self.left_s)
            except OSError:
                connected.close()
                if num_left == 1:
                    raise
            else:
                return connected
        raise OSError("the name has no address")

    def _cut(self) -> None:
        self.is_cut = True
        assert self._socket is not None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._socket is not None:
            self._socket.close()


@contextmanager
def _line(timeout_s: float) -> Iterator[_Line]:
    """Raises NotDelivered for all that can go wrong on the way."""
    line, late = _Line(timeout_s), f"no answer within {timeout_s:g} s"
    try:
        yield line
    except NotDelivered as error:
        raise (NotDelivered(late) if line.is_cut else error) from None
    except (OSError, http.client.HTTPException, smtplib.SMTPException, ValueError) as error:
        # smtplib says that the connection was closed, and that its time was up only behind that.
        is_late = line.is_cut or isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError)
        raise NotDelivered(late if is_late else _what_happened(error)) from None
    finally:
        line.close()


def _what_happened(error: Exception) -> str:
    # The text of an error may quote the receiver, or say where it is.
    if isinstance(error, ssl.SSLCertVerificationError):
        why, _, _ = error.verify_message.partition(",")  # then comes for whom it should be
        return f"its certificate is not trusted ({why}); SSL_CERT_FILE names further authorities"
    if isinstance(error, ssl.SSLError):
        return f"no encrypted connection ({error.reason})"
    if isinstance(error, socket.gaierror):
        return f"its name is not known ({error.strerror})"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, smtplib.SMTPException):
        return f"no connection ({error.strerror})"
    return f"the connection ended, or what came was no answer ({type(error).__name__})"


def judge_status(response: http.client.HTTPResponse) -> str:
    """Return the status in words, without reading the body. Raises NotDelivered unless it is a good one."""
    status = response.status
    if 200 <= status < 300:
        return f"answered {status}"
    if 300 <= status < 400:
        raise NotDelivered(f"answered {status}: redirects are not followed, give the address that it leads to")
    after_s = _seconds(response.headers.get("Retry-After")) if status in (429, 503) else 0.0
    raise NotDelivered(f"answered {status}", is_final=status in _ABOUT_THE_MESSAGE, retry_after_s=after_s)


def judge_slack(response: http.client.HTTPResponse) -> str:
    """Return the id of the message. Raises NotDelivered also if Slack's API answers 200 with an error."""
    judge_status(response)
    answer = _read_json(response)
    if answer.get("ok") is True:
        return _id_in(answer, "ts")
    error = str(answer.get("error"))
    is_about_thread = "thread" in error or error == "cannot_reply_to_message"
    raise (NotInThread if is_about_thread else NotDelivered)(
        f"Slack answered {error}" if re.fullmatch("[a-z_]{1,64}", error) else "answered 200, but not that it is ok",
        is_final=error in _SLACK_ABOUT_THE_MESSAGE,
        retry_after_s=_seconds(response.headers.get("Retry-After")),
    )


def judge_forum(response: http.client.HTTPResponse) -> str:
    """Return the id of the post in a forum of Discord. Raises NotDelivered."""
    try:
        judge_status(response)
    except NotDelivered as error:  # 400 if the post is locked, 404 if it was deleted
        raise NotInThread(str(error), is_final=error.is_final) if response.status in (400, 404) else error from None
    return _id_in(_read_json(response), "channel_id")


def _read_json(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Return the JSON object in the body, or an empty one."""
    try:
        found = json.loads(response.read(MAX_ANSWER_BYTES))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _id_in(answer: Mapping[str, Any], name: str) -> str:
    return found if re.fullmatch(r"[0-9.]{1,64}", found := str(answer.get(name))) else ""


def post(
    request: Post,
    judge: Callable[[http.client.HTTPResponse], str] = judge_status,
    *,
    allow_private: bool,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Send the request, follow no redirect, and return what `judge` finds in the answer. Raises NotDelivered."""
    with _line(timeout_s) as line:
        parts = urlsplit(request.url)
        is_tls = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if is_tls else 80)
        connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = line.dial(host, port, allow_private=allow_private)
            if is_tls:
                connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"Host": parts.netloc, "User-Agent": "tsemon", "Connection": "close"}
            connection.request("POST", path, request.body, headers | dict(request.headers))
            with connection.getresponse() as response:
                return judge(response)
        finally:
            connection.close()


def _seconds(retry_after: str | None) -> float:
    """Of a header that has a number of seconds, or a date."""
    if retry_after is None:
        return 0.0
    try:
        if retry_after.strip().isdecimal():
            seconds = float(retry_after)
        else:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


class _Smtp(smtplib.SMTP):
    """SMTP on a line."""

    def __init__(self, line: _Line, receiver: Email) -> None:
        self._line, self._receiver = line, receiver
        super().__init__(receiver.host, receiver.port, local_hostname=socket.gethostname())

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        connected = self._line.dial(host, port, allow_private=self._receiver.allow_private)
        if self._receiver.security == "tls":
            return ssl.create_default_context().wrap_socket(connected, server_hostname=host)
        return connected


def mail(message: EmailMessage, receiver: Email, timeout_s: float = TIMEOUT_S) -> str:
    """Send the mail; what was answered. Raises NotDelivered."""
    with _line(timeout_s) as line:
        try:
            with closing(_Smtp(line, receiver)) as server:
                return _mailed(server, message, receiver)
        except smtplib.SMTPNotSupportedError:
            raise NotDelivered("it offers no STARTTLS, or no login") from None
        except smtplib.SMTPAuthenticationError as error:
            raise NotDelivered(f"answered {error.smtp_code} to the login") from None
        except smtplib.SMTPRecipientsRefused as error:
            codes = [code for code, _ in error.recipients.values()]
            raise NotDelivered(f"answered {codes[0]} to the recipients", is_final=min(codes) >= 500) from None
        except smtplib.SMTPResponseException as error:
            is_final = isinstance(error, smtplib.SMTPDataError) and error.smtp_code >= 500
            raise NotDelivered(f"answered {error.smtp_code}", is_final=is_final) from None


def _mailed(server: _Smtp, message: EmailMessage, receiver: Email) -> str:
    if receiver.security == "starttls":
        server.starttls(context=ssl.create_default_context())
    if receiver.user is not None and receiver.password is not None:
        server.login(receiver.user.get_secret_value(), receiver.password.get_secret_value())
    refused = server.send_message(message, receiver.sender, receiver.to)
    with suppress(smtplib.SMTPException, OSError):  # it has the message
        server.quit()
    return "took the mail" + (f" for all but {len(refused)} of {len(receiver.to)}" if refused else "")

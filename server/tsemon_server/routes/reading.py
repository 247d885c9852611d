"""Reading the body of a request: raw, unpacked, and no more of it than there is room for."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator

from starlette.requests import ClientDisconnect, Request

from tsemon.errors import BodyTooLarge, InvalidArgument, UnsupportedEncoding
from tsemon_server.bodies import count
from tsemon_server.limits.admission import visit_of

SMALL_BODY_BYTES = 64 * 1024
"""The largest body where nothing else is said: of a heartbeat, a change, a silence."""
UNPACKED_BYTES = 256 * 1024
"""So much is unpacked at a time: a quarter of a millisecond."""

MAX_KEYS = 2**18
"""In a body; and as many lists."""
MAX_VALUES = 2**21


async def read_raw(
    request: Request, max_bytes: int = SMALL_BODY_BYTES, json_of: Callable[[bytearray], bytes] | None = None
) -> bytearray:
    """The raw body, unpacked. FastAPI would parse a declared one with the standard library, three times slower.

    json_of: Gives the part that is JSON. Default: all of it.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise UnsupportedEncoding(f"expected a body as it is or in gzip, got Content-Encoding {encoding[:80]!r}")
    visit, body = visit_of(request), bytearray()
    max_bytes = min(max_bytes, visit.room_bytes)  # "busy" would be sent again for ever; what is too large is halved
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes, f"{announced[:40]} bytes announced")
    if announced.isdecimal():
        visit.hold(int(announced))  # all of it or nothing: bodies that are half there help nobody
    gunzip = _Gunzip() if encoding == "gzip" else None
    try:
        async for chunk in request.stream():
            for part in (chunk,) if gunzip is None else gunzip.parts(chunk):
                body += part
                if len(body) > max_bytes:  # whatever was announced
                    raise _too_large(max_bytes, f"at least {len(body)} bytes")
                visit.hold(len(body))
                if gunzip is not None:
                    await asyncio.sleep(0)  # a few bytes may become many, and others wait meanwhile
    except ClientDisconnect:
        raise InvalidArgument("the client went away before the body was complete; send it again") from None
    if gunzip is not None:
        gunzip.check_end()
    _check_items(body if json_of is None else json_of(body))
    return body


def _check_items(body: bytes | bytearray) -> None:
    """Refuse what is small for its bytes and large for its contents: each key costs microseconds, in which others wait."""
    for what, sign, most in (("keys", b":", MAX_KEYS), ("lists", b"[", MAX_KEYS), ("values", b",", MAX_VALUES)):
        if (number := count(body, sign)) > most:
            raise BodyTooLarge(f"expected at most {most} {what} in a body, got about {number}; send less at a time")


class _Gunzip:
    """Unpacks one gzip member piece by piece, so that a small body cannot become a large one unnoticed."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)

    def parts(self, packed: bytes) -> Iterator[bytes]:
        is_full = False
        while packed or (is_full and not self._stream.eof):
            if self._stream.eof:
                raise InvalidArgument(
                    f"body: expected one gzip member, got more behind it, at least {len(packed)} bytes"
                )
            try:
                part = self._stream.decompress(packed, UNPACKED_BYTES)
            except zlib.error as error:
                raise InvalidArgument(f"body: expected gzip, got something else ({error})") from None
            packed, is_full = self._stream.unconsumed_tail or self._stream.unused_data, len(part) == UNPACKED_BYTES
            if part:
                yield part

    def check_end(self) -> None:
        if not self._stream.eof:
            raise InvalidArgument("body: expected gzip, which ends too early; send all of it")


def _too_large(max_bytes: int, came: str) -> BodyTooLarge:
    return BodyTooLarge(f"expected at most {max_bytes} bytes in a body, got {came}; send less at a time")

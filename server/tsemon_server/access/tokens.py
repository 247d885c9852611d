"""What a token looks like, and what it lets its holder do."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Literal, NamedTuple, get_args

Scope = Literal["ingest", "read", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

_SHAPE = re.compile(r"tsm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


class NewToken(NamedTuple):
    """A token that nobody has yet."""

    text: str
    """All of it, `tsm_<id>_<secret>`: shown once and kept nowhere."""
    token_id: str
    digest: str
    """SHA-256 of the secret. It is 32 random bytes, so nothing slower would make it harder to guess."""


def new_token() -> NewToken:
    token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    return NewToken(f"tsm_{token_id}_{secret}", token_id, digest_of(secret))


def parts_of(text: str) -> tuple[str, str] | None:
    """A token's id and secret; None for what cannot be one."""
    found = _SHAPE.fullmatch(text)
    return None if found is None else (found[1], found[2])


def id_of(text: str) -> str:
    """A token's id; empty for what cannot be one."""
    parts = parts_of(text)
    return "" if parts is None else parts[0]


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def is_secret_of(secret: str, digest: str) -> bool:
    """In a time that says nothing about how much of it is right."""
    return hmac.compare_digest(digest_of(secret), digest)

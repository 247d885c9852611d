"""The page: files of this package, read once and served from memory by name.

A name is looked up in a fixed table and never becomes a path, so nothing that a client sends is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable

from tsemon.catalogue import LAYERED
from tsemon_answers.healthy import HEALTHY
from tsemon_server.rules.language import language

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
"""What the page is made of; other files of the package (Python, licences) are not served."""

OF_DOCS = "docs.", "vendor/swagger-ui"
"""How the names of files begin that only /docs needs."""

SAFETY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

# Swagger UI and the documentation have pictures within their style sheets.
DOCS_HEADERS = SAFETY_HEADERS | {
    "Content-Security-Policy": SAFETY_HEADERS["Content-Security-Policy"] + "; img-src 'self' data:"
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    content: bytes
    media_type: str
    cache_control: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def _read(folder: Traversable, prefix: str = "") -> dict[str, Asset]:
    assets: dict[str, Asset] = {}
    for entry in folder.iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if entry.is_dir():
            assets |= _read(entry, f"{prefix}{entry.name}/")
        elif suffix in MEDIA_TYPES:
            # A vendored file carries its version in its name, so it never changes; ours are asked after each time.
            is_vendored = prefix.startswith("vendor/")
            cache_control = "public, max-age=31536000, immutable" if is_vendored else "no-cache"
            assets[prefix + entry.name] = Asset(entry.read_bytes(), MEDIA_TYPES[suffix], cache_control)
    return assets


def _catalogue() -> Asset:
    """The layered metrics' titles, ranges and scales, and their values in healthy runs."""
    metrics = {name: asdict(metric) | {"healthy": HEALTHY.get(name)} for name, metric in LAYERED.items()}
    return Asset(json.dumps(metrics).encode(), MEDIA_TYPES[".json"], "no-cache")


def _language() -> Asset:
    """The language of rules, from which the editor completes names."""
    return Asset(json.dumps(language()).encode(), MEDIA_TYPES[".json"], "no-cache")


def _with_preloads(assets: Mapping[str, Asset]) -> Asset:
    """The start page, which names all modules: the browser fetches them at once, not one import after the other."""
    page, head = assets["index.html"], b"  </head>"
    names = sorted(name for name in assets if name.endswith((".js", ".mjs")) and not name.startswith(OF_DOCS))
    links = "".join(f'    <link rel="modulepreload" href="ui/{name}">\n' for name in names)
    return replace(page, content=page.content.replace(head, links.encode() + head, 1))


_FILES = _read(files(__package__))
ASSETS = _FILES | {
    "catalogue.json": _catalogue(),
    "language.json": _language(),
    "index.html": _with_preloads(_FILES),
}
ETAGS = {name: asset.etag for name, asset in ASSETS.items()}

"""Hooks of mkdocs.yml: the navigation, links to files outside docs/, and scripts that a Content-Security-Policy allows."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

PARTS = {"architecture.md": "decisions/*.md", "reproduction/README.md": "reproduction/*.md"}
"""Pages that docs/README.md does not list, by the page that links to them."""


def on_config(config: Any) -> Any:
    """Take the navigation from docs/README.md."""
    docs = Path(config.docs_dir)
    sections = re.findall(r"^\*\*(.+)\*\*: ((?:.+\n)+)", (docs / "README.md").read_text(), re.MULTILINE)
    config.nav = [{"All pages": "README.md"}]
    for section, links in sections:
        pages = re.findall(r"\[([^]]+)\]\(([^)]+\.md)\)", links)
        config.nav.append({section: [{title: _with_parts(docs, page)} for title, page in pages]})
    return config


def _with_parts(docs: Path, page: str) -> str | list[str]:
    others = sorted(str(path.relative_to(docs)) for path in docs.glob(PARTS[page])) if page in PARTS else []
    return [page, *(other for other in others if other != page)] if others else page


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link to a file outside docs/ by the name of the file: the server does not serve it."""

    def name(link: re.Match[str]) -> str:
        text, path = link.groups()
        return text if text.strip("`/") in path else f"{text} (`{path}`)"

    up = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^]]+)\]\({re.escape(up)}([^)]+)\)", name, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Move inline scripts of the theme to files, because the server's Content-Security-Policy forbids them."""

    def move(script: re.Match[str]) -> str:
        name = f"assets/javascripts/{hashlib.sha256(script[1].encode()).hexdigest()[:16]}.js"
        (Path(config.site_dir) / name).write_text(script[1])
        return f'<script src="{"../" * page.url.count("/")}{name}"></script>'

    return re.sub(r"<script>(.+?)</script>", move, output, flags=re.DOTALL)

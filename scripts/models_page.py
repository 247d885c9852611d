"""Write the tables of presets into docs/models.md, between the marks that stand there.

python scripts/models_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tsemon import models
from tsemon.models import presets

PAGE = Path(__file__).parent.parent / "docs/models.md"
MODELS = (
    models.VisionTransformer,
    models.CausalLanguageModel,
    models.TransformerXL,
    models.Encoder,
    models.TextEncoder,
    models.T5Encoder,
    models.RepeatingTransformer,
)


def page(text: str) -> str:
    """The text with the tables of today between its marks."""
    for name, lines in (("presets", list(_presets())), ("llama", list(_llama()))):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marked.search(text), f"{PAGE.name} has lost its marks around {name}"
        text = marked.sub(lambda found, lines=lines: found[1] + "\n".join(lines) + "\n" + found[2], text)
    return text


def _presets() -> Iterator[str]:
    yield from ("| model | preset | parameters | sizes |", "|---|---|---|---|")
    for model in MODELS:
        for preset, sizes in _config(model).PRESETS.items():
            listed = ", ".join(f"{field} {value}" for field, value in sizes.items())
            yield f"| `{model.__name__}` | `{preset}` | {_count(model, preset):,} | {listed} |"


def _llama() -> Iterator[str]:
    yield from ("| rule | its fields | " + " | ".join(presets.LLAMA_SIZES) + " |", "|---" * 7 + "|")
    for rule, fields in presets.VALUE_RULES.items():
        counts = " | ".join(f"{_count(models.Llama, f'{rule}-{size}'):,}" for size in presets.LLAMA_SIZES)
        listed = ", ".join(f"`{field}={value!r}`" for field, value in fields.items()) or "none"
        yield f"| `{rule}` | {listed} | {counts} |"


def _config(model: Any) -> Any:
    return getattr(models, f"{model.__name__}Config")


def _count(model: Any, preset: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.from_preset(preset).parameters())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

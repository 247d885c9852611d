"""Models that must stay quiet: as they start, in many sizes, and over a long run."""

from __future__ import annotations

from functools import partial
from typing import Any

from trials import subjects as s
from trials.recording import Trial

NARROW, WIDE = dict[str, Any](width=32, ffn=64), dict[str, Any](width=96, ffn=256)


def _fresh(name: str, subject: s.Make, about: str, **settings: Any) -> Trial:
    """A few steps from the start, at a rate at which nothing is learned yet."""
    return Trial(name=name, subject=subject, about=about, rate=1e-6, steps=60, seed=61, **settings)


UNTRAINED = tuple(
    _fresh(f"{kind}-{layers}", partial(make, layers=layers), f"Hugging Face's {kind}, {layers} blocks")
    for kind, make in {"BERT": s.bert, "ALBERT": s.albert, "GPT-2": s.gpt2, "ViT": s.hugging_face_vit}.items()
    for layers in (2, 12, 24, 48)
)


def _reference(name: str, subject: s.Make, **settings: Any) -> Trial:
    return Trial(name=name, subject=subject, about=name, seed=62, **{"rate": 1e-3, "steps": 60} | settings)


REFERENCE = tuple(
    _reference(f"{kind}, {rule}, {depth} blocks, width {sizes['width']}", partial(make, depth=depth, **fields, **sizes))
    for kind, make, rule, fields, depths in (
        ("CausalLanguageModel", s.language, "pre-norm", {"norm": "pre"}, (3, 12, 32)),
        ("CausalLanguageModel", s.language, "norm on the branch", {"norm": "branch"}, (3, 12)),
        ("CausalLanguageModel", s.language, "de-escalated", {"norm": "post", "tau": 0.5}, (3, 12, 32)),
        ("CausalLanguageModel", s.language, "post-norm", {"norm": "post"}, (3,)),
        ("VisionTransformer", s.vision, "pre-norm", {"norm": "pre"}, (3, 12, 32)),
        ("VisionTransformer", s.vision, "de-escalated", {"norm": "post", "tau": 1.0}, (3, 12, 32)),
        ("VisionTransformer", s.vision, "post-norm", {"norm": "post"}, (3,)),
        ("TextEncoder", s.masked, "pre-norm", {"norm": "pre"}, (3, 12)),
        ("TextEncoder", s.masked, "post-norm", {"norm": "post"}, (3,)),
        ("Llama", s.llama, "vanilla", {"preset": "vanilla-2m"}, (3, 12, 32)),
        ("Llama", s.llama, "resformer", {"preset": "resformer-2m"}, (3, 12)),
        ("Llama", s.llama, "svformer", {"preset": "svformer-2m"}, (3, 12)),
        ("Llama", s.llama, "denseformer", {"preset": "denseformer-2m"}, (12,)),
    )
    for depth in depths
    for sizes in (WIDE if depth == 3 else NARROW,)
)

TINY = partial(s.language, depth=2, width=32, ffn=64, batch=4, context=24)
LONG = Trial(
    name="long", subject=TINY, about="20,000 steps, default cadence", every=None, steps=20_000, rate=1e-3, seed=63
)

QUIET = (*UNTRAINED, *REFERENCE, LONG)

"""Every rule that a block may follow, as fields of its config; and small models of every kind."""

import torch

from tsemon.models import (
    CausalLanguageModel,
    CausalLanguageModelConfig,
    Encoder,
    EncoderConfig,
    RepeatingTransformer,
    RepeatingTransformerConfig,
    T5Encoder,
    T5EncoderConfig,
    TextEncoder,
    TextEncoderConfig,
    VisionTransformer,
    VisionTransformerConfig,
)

BLOCK = {"width": 12, "heads": 3, "ffn": 24}
PLAIN = {
    "post": {},
    "pre": {"norm": "pre"},
    "branch": {"norm": "branch", "alpha": 0.3},
    "relu": {"activation": "relu"},
    "alpha": {"alpha": 0.3},
    "score_scale": {"score_scale": 1.0},
    "no_affine": {"norm_affine": False},
    "materialised": {"attention": "materialised"},
}
# 0.375 is the same in float32 and in float64, where tau is a parameter too.
DE_ESCALATED = {
    "output": {"tau": 0.375},
    "feed_forward": {"tau": 0.375, "tau_at": "feed_forward"},
    "attention": {"tau": 0.375, "tau_at": "attention"},
    "all": {"tau": 1.0},
    "learned": {"tau": 0.375, "learn_tau": True},
}
REPARAMETERISED = {
    "sharpening": {"reparameterisation": "sharpening", "norm": "pre"},
    "smoothing": {"reparameterisation": "smoothing"},
    "transposed": {"reparameterisation": "sharpening", "projection": "transpose", "psi_clip": (-0.5, 0.0)},
}
VARIANTS = PLAIN | DE_ESCALATED | REPARAMETERISED


def parametrised(variants):
    return {"argnames": "fields", "argvalues": variants.values(), "ids": variants.keys()}


def language(**fields):
    sizes = {"vocab": 20, "context": 9, "depth": 3} | BLOCK
    return CausalLanguageModel(CausalLanguageModelConfig(**(sizes | fields)))


def vision(**fields):
    sizes = {"image_size": 8, "patch": 4, "channels": 3, "num_classes": 5, "depth": 3} | BLOCK
    return VisionTransformer(VisionTransformerConfig(**(sizes | fields)))


def encoder(**fields):
    return Encoder(EncoderConfig(**({"depth": 3} | BLOCK | fields)))


def text_encoder(**fields):
    return TextEncoder(TextEncoderConfig(**({"vocab": 20, "context": 9, "depth": 3} | BLOCK | fields)))


def t5(**fields):
    return T5Encoder(T5EncoderConfig(**({"vocab": 20, "context": 9, "depth": 3, "head_width": 4} | BLOCK | fields)))


def repeating(**fields):
    sizes = {"depth": 3, "width": 12, "reparameterisation": "sharpening"}
    return RepeatingTransformer(RepeatingTransformerConfig(**(sizes | fields)))


MODELS = (
    {f"language-{name}": (language, fields) for name, fields in VARIANTS.items()}
    | {f"vision-{name}": (vision, VARIANTS[name]) for name in ("post", "pre", "output", "learned", "sharpening")}
    | {"bert": (text_encoder, {}), "albert": (text_encoder, {"embedding": 4, "num_weights": 1})}
    | {"t5": (t5, {})}
    | {"encoder": (encoder, {}), "pre-norm encoder": (encoder, {"norm": "pre"})}
    | {f"repeating-{norm}": (repeating, {"norm": norm}) for norm in (None, "post", "pre")}
)


def inputs_for(build, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    if build in (language, text_encoder, t5):
        return torch.randint(20, (2, 9), generator=generator)
    shape = (2, 3, 8, 8) if build is vision else (2, 9, 12)
    return torch.randn(shape, generator=generator).to(dtype)

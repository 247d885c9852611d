"""The sizes of the models that the papers study, by name, and how a name and changes to it become a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument

Sizes = Mapping[str, Any]


class Presets:
    """Gives a config dataclass its `from_preset`."""

    PRESETS: ClassVar[Mapping[str, Sizes]]

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """The preset with these fields replaced. Raises InvalidArgument for a name or a field that there is not."""
        if name not in cls.PRESETS:
            raise InvalidArgument(f"{cls.__name__} has no preset named {name!r}; {nearest(name, list(cls.PRESETS))}")
        assert dataclasses.is_dataclass(cls)
        fields = [field.name for field in dataclasses.fields(cls)]
        for field in overrides:
            if field not in fields:
                raise InvalidArgument(f"{cls.__name__} has no field named {field!r}; {nearest(field, fields)}")
        return cls(**{**cls.PRESETS[name], **overrides})


class OfPreset:
    """Gives a model its `from_preset`."""

    CONFIG: ClassVar[type[Presets]]

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        make: Callable[[Presets], Self] = cls
        return make(cls.CONFIG.from_preset(name, **overrides))


_CIFAR = {"image_size": 32, "patch": 4, "channels": 3}
_DIGITS = {"image_size": 16, "patch": 4, "channels": 1, "num_classes": 10}
_VIT_80 = {**_CIFAR, "num_classes": 10, "depth": 80, "width": 192, "heads": 8, "ffn": 384}

VISION: Mapping[str, Sizes] = {
    # Classic Transformers, Table 1. The paper trains all three for CIFAR-10.
    "vit-80": _VIT_80,
    "vit-80-pre-norm": {**_VIT_80, "norm": "pre"},
    "vit-80-de-escalated": {**_VIT_80, "tau": 1.0},
    # Transformer Oversmoothing, Appendix B: ViT-Ti, trained on CIFAR-100.
    "vit-ti": {**_CIFAR, "num_classes": 100, "depth": 12, "width": 192, "heads": 3, "ffn": 768, "norm": "pre"},
    # Small ones for scikit-learn's digits, enlarged to 16 x 16.
    "digits-48": {**_DIGITS, "depth": 48, "width": 64, "heads": 4, "ffn": 128},
    "digits-80": {**_DIGITS, "depth": 80, "width": 96, "heads": 8, "ffn": 192},
}

_NORM_GROWTH = {
    "vocab": 33_278,
    "context": 256,
    "depth": 12,
    "width": 768,
    "heads": 12,
    "ffn": 512,
    "activation": "relu",
}

LANGUAGE: Mapping[str, Sizes] = {
    # Parameter Norm Growth, Appendix A; the vocabulary is that of WikiText-2. 38M parameters beside the embeddings.
    "norm-growth-post-norm": _NORM_GROWTH,
    "norm-growth-pre-norm": {**_NORM_GROWTH, "norm": "pre"},
    # Its Definitions 4 to 6: norms on the branches, scores over sqrt(d_k).
    "norm-growth-branch-norm": {**_NORM_GROWTH, "norm": "branch"},
    # Its authors' code: scores as they come, and multiplied by the mask.
    "norm-growth-authors-code": {**_NORM_GROWTH, "norm": "branch", "score_scale": 1.0, "masking": "multiply"},
    # A small one for bytes.
    "bytes-32": {"vocab": 256, "context": 64, "depth": 32, "width": 64, "heads": 4, "ffn": 128},
}

_REPEATING = {"depth": 48, "width": 64}

REPEATING: Mapping[str, Sizes] = {
    # Transformer Oversmoothing, Figure 4, which does not tell its sizes.
    "sharpening": {**_REPEATING, "reparameterisation": "sharpening"},
    "smoothing": {**_REPEATING, "reparameterisation": "smoothing"},
}

ENCODER: Mapping[str, Sizes] = {
    # Classic Transformers, Section 2.4: the random encoder of Figures 2, 3 and, at depth 40, 4 and 5.
    "classic-20": {"depth": 20, "width": 512, "heads": 8, "ffn": 2048, "activation": "relu"},
}

_BERT_BASE = {"vocab": 30_522, "context": 512, "depth": 12, "width": 768, "heads": 12, "ffn": 3072}
_ALBERT_BASE = {**_BERT_BASE, "vocab": 30_000, "embedding": 128, "num_weights": 1}

TEXT_ENCODER: Mapping[str, Sizes] = {
    "bert-base": _BERT_BASE,
    "albert-base": _ALBERT_BASE,
    # Classic Transformers, Figure 1.
    "bert-100": {**_BERT_BASE, "depth": 100},
    "albert-100": {**_ALBERT_BASE, "depth": 100},
}

T5_ENCODER: Mapping[str, Sizes] = {
    # T5, Section 3.1.1: about the size of BERT-base. Parameter Norm Growth studies its checkpoints.
    "t5-base": {"depth": 12, "width": 768, "heads": 12, "ffn": 3072},
    # A small one for bytes.
    "t5-bytes": {"vocab": 256, "context": 64, "depth": 4, "width": 64, "heads": 4, "head_width": 16, "ffn": 256},
}

_WIKITEXT_103 = {"vocab": 267_735, "cutoffs": (20_000, 40_000, 200_000)}
_TRANSFORMER_XL = {"context": 150, "memory": 150, "width": 410, "heads": 10, "activation": "relu"}
_TRANSFORMER_XL_60 = {**_WIKITEXT_103, **_TRANSFORMER_XL, "depth": 60, "ffn": 820}

TRANSFORMER_XL: Mapping[str, Sizes] = {
    # Transformer-XL, the base for WikiText-103: 151M parameters. Its authors train it with dropout; there is none here.
    "transformer-xl-16": {**_WIKITEXT_103, **_TRANSFORMER_XL, "depth": 16, "ffn": 2100},
    # Classic Transformers, Section 3.4: 201M parameters, no dropout.
    "transformer-xl-60": _TRANSFORMER_XL_60,
    "transformer-xl-60-pre-norm": {**_TRANSFORMER_XL_60, "norm": "pre"},
    # As printed: Eq. 21 takes the mean of all tokens, so that each token sees later ones.
    "transformer-xl-60-de-escalated": {
        **_TRANSFORMER_XL_60,
        "tau": 1.0,
        "tau_at": "feed_forward",
        "full_mean": True,
    },
    # The mean of the tokens so far, and the tau with which a small one of 48 blocks learns best. At 0.5 and 1 it does not.
    "transformer-xl-60-de-escalated-causal": {**_TRANSFORMER_XL_60, "tau": 0.2, "tau_at": "feed_forward"},
    # A small one for bytes. Its weights are to its width what 0.02 is to 410.
    "transformer-xl-bytes-32": {
        "vocab": 256,
        "context": 64,
        "memory": 64,
        "depth": 32,
        "width": 64,
        "heads": 4,
        "ffn": 128,
        "activation": "relu",
        "init_std": 0.05,
    },
}

LLAMA_SIZES: Mapping[str, Sizes] = {
    # Value Residual Learning, Table 4. Parameters of the plain model with the table's vocabulary of 50,277:
    "2m": {"depth": 4, "width": 16, "heads": 2, "ffn": 56},  # 1,623,856
    "82m": {"depth": 8, "width": 512, "heads": 8, "ffn": 1792},  # 81,901,056
    "180m": {"depth": 12, "width": 768, "heads": 12, "ffn": 2688},  # 179,874,048
    # The paper trains it and does not print its sizes. These keep the others' head of 64 and ffn of 3.5 widths.
    "320m": {"depth": 20, "width": 896, "heads": 14, "ffn": 3136},  # 322,949,760
    "468m": {"depth": 24, "width": 1024, "heads": 16, "ffn": 3584},  # 467,921,920
}

VALUE_RULES: Mapping[str, Mapping[str, Any]] = {
    "vanilla": {},
    "resformer": {"value_weights": (0.5, 0.5)},  # Eq. 7
    "resformer-lambda": {"value_weights": (1.0, 2.0)},  # Fig. 8: 2 is best
    "resformer-learned": {"value_weights": (0.5, 0.5), "learn_value_weights": True},
    "resformer-previous": {"value_weights": (0.5, 0.5), "value_source": "previous"},  # Fig. 11
    "resformer-neutreno": {"value_weights": (0.5, 0.5), "neutreno": 0.2},  # Appendix A.3
    "svformer": {"value_every": None},  # Eq. 10
    "svformer-anchors": {"value_every": 4},  # Fig. 17
    "neutreno": {"neutreno": 0.4},  # Eq. 8, Appendix A.3
    "denseformer": {"dense": "blocks"},
    "denseformer-attention": {"dense": "attention"},  # Eq. 9
    "cross-layer": {"cross_layer": True},  # Eq. 2 with m = 1
    "cross-layer-previous": {"cross_layer": True, "value_source": "previous"},  # Eq. 2 with m = n - 1
    "cla": {"key_every": 2, "value_every": 2},  # arXiv 2405.12981, in Fig. 13
    "mean-values": {"value_weights": "mean", "value_source": "all"},  # Eq. 5
    "identity": {"identity": True, "value_source": "all"},  # Eq. 6
    "query-residual": {"query_weights": (0.5, 0.5)},  # Fig. 9
    "key-residual": {"key_weights": (0.5, 0.5)},  # Fig. 9
    "query-pairs": {"query_every": 2},  # Fig. 5
    "key-pairs": {"key_every": 2},  # Fig. 5
    "value-pairs": {"value_every": 2},  # Fig. 5
    "one-query": {"query_every": None},  # Fig. 16
    "one-key": {"key_every": None},  # Fig. 16
}

"""Reference models of the papers: the classic post-norm transformer, which fails when deep, and all that its fate taught."""

from tsemon.models.attention import SelfAttention, attend
from tsemon.models.blocks import (
    BlockConfig,
    BranchNormBlock,
    DeEscalatedBlock,
    DeEscalation,
    FeedForward,
    PostNormBlock,
    PreNormBlock,
)
from tsemon.models.cache import Cache
from tsemon.models.encoder import Encoder, EncoderConfig, TextEncoder, TextEncoderConfig
from tsemon.models.generation import generate
from tsemon.models.language import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.models.llama import Llama, LlamaConfig
from tsemon.models.reparameterised import ReparameterisationConfig, ReparameterisedAttention
from tsemon.models.repeating import RepeatingTransformer, RepeatingTransformerConfig
from tsemon.models.t5 import T5Encoder, T5EncoderConfig
from tsemon.models.transformer_xl import TransformerXL, TransformerXLConfig
from tsemon.models.values import ValueRule
from tsemon.models.vision import VisionTransformer, VisionTransformerConfig

__all__ = [
    "BlockConfig",
    "BranchNormBlock",
    "Cache",
    "CausalLanguageModel",
    "CausalLanguageModelConfig",
    "DeEscalatedBlock",
    "DeEscalation",
    "Encoder",
    "EncoderConfig",
    "FeedForward",
    "Llama",
    "LlamaConfig",
    "PostNormBlock",
    "PreNormBlock",
    "ReparameterisationConfig",
    "ReparameterisedAttention",
    "RepeatingTransformer",
    "RepeatingTransformerConfig",
    "SelfAttention",
    "T5Encoder",
    "T5EncoderConfig",
    "TextEncoder",
    "TextEncoderConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "ValueRule",
    "VisionTransformer",
    "VisionTransformerConfig",
    "attend",
    "generate",
]

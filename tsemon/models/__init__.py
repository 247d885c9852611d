"""Reference models: the classic post-norm transformer, which fails when deep, and its de-escalated twin."""

from tsemon.models.blocks import DeEscalatedBlock, DeEscalation, FeedForward, PostNormBlock, SelfAttention
from tsemon.models.language import CausalLanguageModel
from tsemon.models.vision import VisionTransformer

__all__ = [
    "CausalLanguageModel",
    "DeEscalatedBlock",
    "DeEscalation",
    "FeedForward",
    "PostNormBlock",
    "SelfAttention",
    "VisionTransformer",
]

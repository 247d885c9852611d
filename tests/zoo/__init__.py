"""Small models of every kind that tsemon finds its way in, with an input for each. Random weights, no downloads."""

import torch
from torch import nn

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}


def ids(batch=4, tokens=12):
    return torch.randint(3, 100, (batch, tokens), generator=torch.Generator().manual_seed(1))


def bert(**kwargs):
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=100, **SIZES, **kwargs))
    return model, lambda: model(ids()).logits


def gpt2(**kwargs):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=3, bos_token_id=0, eos_token_id=1, **kwargs)
    model = GPT2LMHeadModel(config)
    return model, lambda: model(ids()).logits


def llama(**kwargs):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, **SIZES, **kwargs))
    return model, lambda: model(ids()).logits


def qwen2(**kwargs):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=100, num_key_value_heads=2, **SIZES, **kwargs))
    return model, lambda: model(ids()).logits


def albert(**kwargs):
    """All its layers are one and the same module."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    model = AlbertForMaskedLM(AlbertConfig(vocab_size=100, embedding_size=16, **SIZES, **kwargs))
    return model, lambda: model(ids()).logits


def t5(**kwargs):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **kwargs
    )
    model = T5ForConditionalGeneration(config)
    return model, lambda: model(input_ids=ids(), labels=ids(tokens=8)).logits


def vit(**kwargs):
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **SIZES, **kwargs))
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(pixels).logits


def torch_encoder():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 3, enable_nested_tensor=False)
    x_TBD = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x_TBD)


def torch_decoder():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 3)
    x_BTD = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    return model, lambda: model(x_BTD, x_BTD.flip(1), tgt_mask=mask, tgt_is_causal=True)


def our_vision_transformer():
    from tsemon.models import VisionTransformer, VisionTransformerConfig

    sizes = {"image_size": 16, "patch": 4, "channels": 1, "num_classes": 10, "depth": 3, "width": 32}
    model = VisionTransformer(VisionTransformerConfig(**sizes, heads=4, ffn=64))
    x = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x)


def our_language_model():
    from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

    model = CausalLanguageModel(
        CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=32, heads=4, ffn=64, tau=0.5)
    )
    return model, lambda: model(ids())


MODELS = (bert, gpt2, llama, qwen2, vit, torch_encoder, torch_decoder, our_vision_transformer, our_language_model)


# Models that differ in what some probes look for.


def gemma2():
    """A second norm on what attention and the feed-forward part return, before they meet the residual."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=100, head_dim=8, num_key_value_heads=2, **SIZES))
    return model, lambda: model(ids()).logits


def olmo2():
    """A norm on what they return, and none on what they get; queries and keys are normalised, too."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    model = Olmo2ForCausalLM(Olmo2Config(vocab_size=100, num_key_value_heads=4, pad_token_id=0, **SIZES))
    return model, lambda: model(ids()).logits


def qwen3():
    """Norms inside attention, and heads that are together wider than the model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=100, head_dim=16, num_key_value_heads=2, **SIZES))
    return model, lambda: model(ids()).logits


def gptj():
    """Attention and feed-forward part side by side."""
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=100, n_embd=32, n_head=4, n_layer=3, rotary_dim=4, bos_token_id=0, eos_token_id=1)
    model = GPTJForCausalLM(config)
    return model, lambda: model(ids()).logits


def gpt_neox(**kwargs):
    """The same, each with a norm of its own on the block's input."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=100, **SIZES, **kwargs))
    return model, lambda: model(ids()).logits


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(vocab_size=100, num_local_experts=4, num_key_value_heads=2, **SIZES))
    return model, lambda: model(ids()).logits


def distilbert(**kwargs):
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    model = DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=100, dim=32, n_heads=4, n_layers=3, hidden_dim=64, **kwargs)
    )
    return model, lambda: model(ids()).logits


def bloom(**kwargs):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=32, n_head=4, n_layer=3, **kwargs))
    return model, lambda: model(ids()).logits

"""Model families of Hugging Face transformers, tiny and with random weights."""

import functools
import importlib
import itertools

import torch

from tests.zoo.specimen import (
    BATCH,
    TOKENS,
    Specimen,
    Subject,
    enliven,
    ids,
    images,
    own_loss,
    stack,
    to_a_target,
    tokens_first,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_GPT = {
    "vocab_size": 100,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
PIXELS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "image_size": 16,
    "patch_size": 4,
}


def with_labels(step):
    return {"input_ids": ids(step), "labels": ids(step)}


LENGTHS = torch.tensor([12, 9, 5])


def padded(step):
    """Sequences of three lengths, padded on the right."""
    is_token = torch.arange(TOKENS) < LENGTHS[:, None]
    labels = ids(step).masked_fill(~is_token, -100)
    return {"input_ids": ids(step).masked_fill(~is_token, 0), "attention_mask": is_token.long(), "labels": labels}


def without_padding(batch, size, num_tokens):
    return [(sample, torch.arange(length)) for sample, length in enumerate(LENGTHS.tolist())]


DOCUMENTS = [[5, 4, 3], [7, 5], [3, 9]]


def packed(step):
    """Rows of several documents, at each of which the positions restart."""
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    return {"input_ids": ids(step), "position_ids": position_ids, "labels": ids(step), "use_cache": False}


def one_packed_row(step):
    """The rows of `packed` as a batch of one."""
    return {name: value.reshape(1, -1) if torch.is_tensor(value) else value for name, value in packed(step).items()}


def by_document(batch, size, num_tokens):
    rows = DOCUMENTS if size == BATCH else [[n for row in DOCUMENTS for n in row]]
    ends = [(row, torch.tensor([0, *lengths]).cumsum(0).tolist()) for row, lengths in enumerate(rows)]
    return [(row, torch.arange(first, end)) for row, edges in ends for first, end in itertools.pairwise(edges)]


def model_of(kind, config, **sizes):
    """kind: name of a model class, config: name of its configuration class."""
    transformers = importlib.import_module("transformers")  # it takes seconds, and not every run of the tests needs it
    return enliven(getattr(transformers, kind)(getattr(transformers, config)(**sizes)))


def family(config, kind, blocks, batch=with_labels, loss=own_loss, sizes=GROUPED, known=None, make=model_of, **more):
    """Return a function that builds a model with one stack: the blocks in the list of this name."""

    def build():
        model = make(kind, config, **{**sizes, **more})
        return Subject(
            model=model, batch=batch, loss=loss, stacks=[stack(model.get_submodule(blocks), **(known or {}))]
        )

    return build


def images_of(step):
    return {"pixel_values": images(step)}


def to_hidden_states(output):
    return to_a_target(output.last_hidden_state)


def t5():
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = model_of("T5ForConditionalGeneration", "T5Config", **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return encoder_and_decoder(model, model.encoder.block, model.decoder.block)


def bart():
    sizes = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = model_of("BartForConditionalGeneration", "BartConfig", **sizes, decoder_start_token_id=0)
    return encoder_and_decoder(model, model.model.encoder.layers, model.model.decoder.layers)


def whisper():
    sizes = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "max_source_positions": 9}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 12, "decoder_start_token_id": 0}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "suppress_tokens": None}
    model = model_of("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **tokens)
    subject = encoder_and_decoder(model, model.model.encoder.layers, model.model.decoder.layers)

    def batch(step):
        sound = torch.randn(BATCH, 8, 18, generator=torch.Generator().manual_seed(step))
        return {"input_features": sound, "labels": ids(step)}

    return Subject(model=model, batch=batch, loss=own_loss, stacks=subject.stacks)


def encoder_and_decoder(model, encoder, decoder):
    """A decoder block calls self-attention, then attention to the encoder."""
    second = stack(decoder, attentions=[len(encoder) + 2 * number for number in range(len(decoder))])

    def batch(step):
        return {"input_ids": ids(step, tokens=10), "labels": ids(step)}

    return Subject(model=model, batch=batch, loss=own_loss, stacks=[stack(encoder), second])


def clip():
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": 100, "eos_token_id": 1, "bos_token_id": 0}
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 4}
    model = model_of("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)

    def batch(step):
        return {"input_ids": ids(step), "pixel_values": images(step), "return_loss": True}

    # The vision tower runs first, the text tower is registered first.
    text, vision = model.text_model.encoder.layers, model.vision_model.encoder.layers
    stacks = [stack(text, attentions=[3, 4]), stack(vision, attentions=[0, 1, 2])]
    return Subject(model=model, batch=batch, loss=own_loss, stacks=stacks)


def swin():
    sizes = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    sizes |= {"drop_path_rate": 0.0} | NO_DROPOUT
    model = model_of("SwinModel", "SwinConfig", **sizes)
    stacks = [stack(stage.blocks) for stage in model.encoder.layers]
    return Subject(
        is_one_depth=True,
        model=model,
        batch=lambda step: {"pixel_values": images(step, pixels=32)},
        loss=to_hidden_states,
        stacks=stacks,
    )


def albert():
    sizes = SIZES | {"embedding_size": 16, "max_position_embeddings": 16} | NO_DROPOUT
    model = model_of("AlbertForMaskedLM", "AlbertConfig", **sizes)
    (layer,) = model.albert.encoder.albert_layer_groups
    return Subject(model=model, batch=with_labels, loss=own_loss, stacks=[stack([layer, layer])])


def jamba():
    sizes = GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2}
    sizes |= {"expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4}
    sizes |= {"num_hidden_layers": 4, "pad_token_id": 0}
    model = model_of("JambaForCausalLM", "JambaConfig", **sizes)
    known = stack(model.model.layers, attentions=[None, 0, None, 1])
    return Subject(model=model, batch=with_labels, loss=own_loss, stacks=[known])


def bamba():
    sizes = GROUPED | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8}
    sizes |= {"mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4, "pad_token_id": 0}
    model = model_of("BambaForCausalLM", "BambaConfig", **sizes)
    known = stack(model.model.layers, attentions=[None, 0, None, 1])
    return Subject(model=model, batch=with_labels, loss=own_loss, stacks=[known])


BERT = SIZES | NO_DROPOUT | {"max_position_embeddings": 16}
NO_CACHE = {"use_cache": False}
LONG = {"max_position_embeddings": 64, "pad_token_id": 0}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
}
FALCON = SIZES | {"bos_token_id": 0, "eos_token_id": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0}
DISTILLED = {"vocab_size": 100, "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64, "max_position_embeddings": 16}
XLNET = {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0}
MAMBA = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
SPANS = {"sliding_window": 4, "head_dim": 8} | LONG
NO_ATTENTION = {"attentions": [None, None]}


def _named(name, build, **more):
    return Specimen(name=f"transformers: {name}", build=build, package="transformers", **more)


llama = functools.partial(family, "LlamaConfig", "LlamaForCausalLM", "model.layers", **LONG)
bert = functools.partial(family, "BertConfig", "BertForMaskedLM", "bert.encoder.layer", sizes=BERT)

SPECIMENS = [
    _named("Llama", llama(), is_representative=True),
    _named(
        "Llama, packed rows (position_ids)", llama(packed, known={"sequences": by_document}), is_representative=True
    ),
    _named("Llama, packed into one row (position_ids)", llama(one_packed_row, known={"sequences": by_document})),
    _named("Llama, eager attention", llama(attn_implementation="eager")),
    _named("GPT-2", family("GPT2Config", "GPT2LMHeadModel", "transformer.h", sizes=OF_GPT)),
    _named(
        "GPT-NeoX, parallel attention and feed-forward",
        family("GPTNeoXConfig", "GPTNeoXForCausalLM", "gpt_neox.layers", sizes=SIZES, **LONG),
    ),
    _named(
        "GPT-J, parallel attention and feed-forward",
        family("GPTJConfig", "GPTJForCausalLM", "transformer.h", sizes=OF_GPT, rotary_dim=4),
    ),
    _named(
        "BLOOM",
        family(
            *("BloomConfig", "BloomForCausalLM", "transformer.h"),
            sizes={"vocab_size": 100, "hidden_size": 32, "n_head": 4, "n_layer": 2},
        ),
    ),
    _named("Falcon", family("FalconConfig", "FalconForCausalLM", "transformer.h", sizes=FALCON)),
    _named(
        "OPT",
        family(
            *("OPTConfig", "OPTForCausalLM", "model.decoder.layers"),
            sizes=SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 16, "dropout": 0.0},
        ),
    ),
    _named("Gemma 2", family("Gemma2Config", "Gemma2ForCausalLM", "model.layers", **SPANS)),
    _named("Gemma 3", family("Gemma3TextConfig", "Gemma3ForCausalLM", "model.layers", **SPANS)),
    _named("Qwen2", family("Qwen2Config", "Qwen2ForCausalLM", "model.layers", **LONG)),
    _named("Qwen3", family("Qwen3Config", "Qwen3ForCausalLM", "model.layers", head_dim=16, **LONG)),
    _named("Mistral", family("MistralConfig", "MistralForCausalLM", "model.layers", sliding_window=4, **LONG)),
    _named(
        "Mixtral, mixture of experts",
        family("MixtralConfig", "MixtralForCausalLM", "model.layers", num_local_experts=4, **LONG),
    ),
    _named(
        "DeepSeek-V3, MLA and mixture of experts",
        family("DeepseekV3Config", "DeepseekV3ForCausalLM", "model.layers", **LATENT, **LONG),
        is_representative=True,
    ),
    _named("OLMo 2", family("Olmo2Config", "Olmo2ForCausalLM", "model.layers", **LONG)),
    _named(
        "Phi-3",
        family(
            *("Phi3Config", "Phi3ForCausalLM", "model.layers"),
            **(LONG | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "original_max_position_embeddings": 64}),
        ),
    ),
    _named("BERT", bert()),
    _named("BERT, padded", bert(padded, known={"sequences": without_padding}), is_representative=True),
    _named(
        "RoBERTa",
        family(
            *("RobertaConfig", "RobertaForMaskedLM", "roberta.encoder.layer"),
            sizes=BERT | {"max_position_embeddings": 20, "pad_token_id": 1},
        ),
    ),
    _named("ALBERT, one block called twice", albert, is_representative=True),
    _named(
        "DistilBERT",
        family(
            *("DistilBertConfig", "DistilBertForMaskedLM", "distilbert.transformer.layer"),
            sizes=DISTILLED | {"dropout": 0.0, "attention_dropout": 0.0},
        ),
    ),
    _named(
        "ELECTRA",
        family(*("ElectraConfig", "ElectraForMaskedLM", "electra.encoder.layer"), sizes=BERT | {"embedding_size": 16}),
    ),
    _named(
        "DeBERTa-v2",
        family(
            *("DebertaV2Config", "DebertaV2ForMaskedLM", "deberta.encoder.layer"),
            sizes=BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        ),
    ),
    _named(
        "ModernBERT",
        family(
            *("ModernBertConfig", "ModernBertForMaskedLM", "model.layers"),
            sizes=SIZES | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 0, "reference_compile": False},
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="sdpa",
        ),
    ),
    _named("T5, encoder and decoder", t5, is_representative=True),
    _named("BART, encoder and decoder", bart),
    _named("Whisper, encoder and decoder", whisper),
    _named("ViT", family("ViTConfig", "ViTModel", "layers", images_of, to_hidden_states, PIXELS | NO_DROPOUT)),
    _named("Swin, two stages", swin),
    _named(
        "DINOv2",
        family("Dinov2Config", "Dinov2Model", "encoder.layer", images_of, to_hidden_states, PIXELS | NO_DROPOUT),
    ),
    _named("CLIP, two towers", clip),
    _named(
        "XLNet, [T, B, C]",
        family(*("XLNetConfig", "XLNetLMHeadModel", "transformer.layer"), sizes=XLNET, known={"layout": tokens_first}),
    ),
    _named(
        "Mamba, no attention",
        family("MambaConfig", "MambaForCausalLM", "backbone.layers", sizes=MAMBA, known=NO_ATTENTION),
    ),
    _named("Jamba, attention in every second block", jamba, is_representative=True),
    _named("Bamba, attention in every second block", bamba),
]

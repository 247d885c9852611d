import pytest
import torch
from torch import nn

import tsemon
from tests.tsemon.probes.structures import (
    Attention,
    Block,
    BlockChunk,
    D,
    FeedForward,
    Holder,
    MambaSsm,
    OldVitPytorch,
    ParallelBlock,
    ResidualUnit,
    Stage,
    Tower,
    VitPytorch,
    XTransformer,
    blocks,
    frozen,
)
from tsemon.probes import discover, find_blocks

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 100}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = {"image_size": 16, "patch_size": 4}
PYRAMID = {"image_size": 32, "embed_dim": 16, "num_heads": [2, 4]}
TWO_STACKS = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 100, "state_size": 4}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8],
    "depths": [1, 1],
    "out_features": ["stage2"],
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

# Class, its config, blocks of each stack, name of the first block, how many have a self-attention (None: all).
FAMILIES = [
    ("Llama", GROUPED, [3], "layers.0", None),
    ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 100}, [3], "h.0", None),
    ("Bert", TEXT, [3], "encoder.layer.0", None),
    ("RobertaPreLayerNorm", TEXT, [3], "encoder.layer.0", None),
    ("XLNet", {"vocab_size": 100, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}, [3], "layer.0", None),
    ("T5", {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, [2, 2],
     "encoder.block.0", None),
    ("Bart", {"vocab_size": 100, **TWO_STACKS}, [2, 3], "encoder.layers.0", None),
    ("Whisper", {"num_mel_bins": 8, "pad_token_id": 0, **TWO_STACKS}, [2, 3], "encoder.layers.0", None),
    ("Detr", {"use_timm_backbone": False, "num_queries": 5,
              "backbone_config": RESNET, **TWO_STACKS}, [2, 3], "encoder.layers.0", None),
    ("CLIP", {"text_config": TEXT, "vision_config": SIZES | IMAGE | {"num_hidden_layers": 2}}, [3, 2],
     "text_model.encoder.layers.0", None),
    ("ViT", SIZES | IMAGE, [3], "layers.0", None),
    ("Swin", {"depths": [2, 2], "window_size": 4, **PYRAMID}, [4], "encoder.layers.0.blocks.0", None),
    ("Swin", {"depths": [1, 1], "window_size": 4, **PYRAMID}, [2], "encoder.layers.0.blocks.0", None),
    ("Hiera", {"embed_dim": 16, "image_size": [32, 32], "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2]}, [5],
     "encoder.stages.0.layers.0", None),
    ("Pvt", {"image_size": 32, "num_encoder_blocks": 2, "depths": [2, 2], "hidden_sizes": [16, 32],
             "num_attention_heads": [1, 2], "sequence_reduction_ratios": [2, 1], "mlp_ratios": [2, 2],
             "patch_sizes": [4, 2], "strides": [4, 2]}, [4], "encoder.block.0.0", None),
    ("Albert", TEXT | {"embedding_size": 16}, [3], "encoder.albert_layer_groups.0 (1 of 3)", None),
    ("Albert", TEXT | {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}, [8],
     "encoder.albert_layer_groups.0.albert_layers.0 (1 of 2)", None),
    ("GPTJ", {"vocab_size": 100, "n_embd": 32, "n_head": 4, "n_layer": 3, "rotary_dim": 4}, [3], "h.0", None),
    ("Falcon", TEXT, [3], "h.0", None),
    ("DeepseekV3", TEXT | MLA | EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                           "first_k_dense_replace": 1}, [3], "layers.0", None),
    ("Mamba", MAMBA, [3], "layers.0", 0),
    ("Mamba2", MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 1}, [3], "layers.0", 0),
    ("Rwkv", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 16}, [3], "blocks.0", 0),
    ("FNet", {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "vocab_size": 100}, [3],
     "encoder.layer.0", 0),
    ("Jamba", GROUPED | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                         "use_mamba_kernels": False}, [4], "layers.0", 2),
    ("Zamba2", GROUPED | {"num_hidden_layers": 4, "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 16,
                          "mamba_ngroups": 1, "use_mamba_kernels": False, "num_mem_blocks": 1,
                          "layers_block_type": ["mamba", "hybrid"] * 2}, [4], "layers.0", 2),
    ("Bamba", GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4,
                         "mamba_n_groups": 1}, [3], "layers.0", 1),
    ("Lfm2", GROUPED | {"full_attn_idxs": [1]}, [3], "layers.0", 1),
    ("RecurrentGemma", GROUPED | {"lru_width": 32, "head_dim": 8}, [3], "layers.0", 1),
    ("Qwen3Next", GROUPED | EXPERTS | {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 4,
                                       "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
                                       "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                                       "linear_value_head_dim": 8}, [4], "layers.0", 1),
]  # fmt: skip

# Models written by hand: blocks of each stack, first and last name, how many have a self-attention (None: all).
STRUCTURES = {
    "torchtitan": (
        lambda: Holder(layers=nn.ModuleDict({str(i): b for i, b in enumerate(blocks())}), norm=nn.LayerNorm(D)),
        *([3], "layers.0", "layers.2", None),
    ),
    "a pipeline stage of torchtitan": (
        lambda: Holder(layers=nn.ModuleDict({"4": Block(), "5": Block()})),
        *([2], "layers.4", "layers.5", None),
    ),
    "nanoGPT": (
        lambda: Holder(transformer=nn.ModuleDict({"wte": nn.Embedding(9, D), "h": nn.ModuleList(blocks())})),
        *([3], "transformer.h.0", "transformer.h.2", None),
    ),
    "vit-pytorch": (VitPytorch, [3], "layers.0", "layers.2", None),
    "vit-pytorch of old": (OldVitPytorch, [3], "layers.0", "layers.2", None),
    "x-transformers": (XTransformer, [3], "layers.0-1", "layers.4-5", None),
    "x-transformers with two attentions": (
        lambda: XTransformer(layers=(Attention, Attention, FeedForward)),
        *([3], "layers.0-2", "layers.6-8", None),
    ),
    "timm's Swin": (
        lambda: Holder(layers=nn.Sequential(Stage(2, is_first=True), Stage(2, is_first=False)), norm=nn.LayerNorm(D)),
        *([4], "layers.0.blocks.0", "layers.1.blocks.1", None),
    ),
    "DINOv2 in chunks": (
        lambda: Holder(
            blocks=nn.ModuleList([BlockChunk(blocks(2)), BlockChunk([nn.Identity(), nn.Identity(), *blocks(2)])])
        ),
        *([4], "blocks.0.0", "blocks.1.3", None),
    ),
    "timm's parallel ViT": (
        lambda: Holder(blocks=nn.Sequential(*(ParallelBlock() for _ in range(3)))),
        *([3], "blocks.0", "blocks.2", 0),
    ),
    "mamba-ssm": (MambaSsm, [3], "layers.0", "layers.2", 0),
    "units without a telling name": (
        lambda: Holder(emb=nn.Embedding(9, D), layers=nn.ModuleList(ResidualUnit() for _ in range(3))),
        *([3], "layers.0", "layers.2", 0),
    ),
    "a hybrid of two classes": (
        lambda: Holder(layers=nn.ModuleList([ResidualUnit(), Block(), ResidualUnit(), Block()])),
        *([4], "layers.0", "layers.3", 2),
    ),
    "embedding, blocks and head in a row": (
        lambda: nn.Sequential(nn.Linear(4, D), *blocks(), nn.LayerNorm(D), nn.Linear(D, 9)),
        *([3], "1", "3", None),
    ),
    "a module in a row": (
        lambda: nn.Sequential(nn.Linear(4, D), Tower(), nn.Linear(D, 9)),
        *([3], "1.blocks.0", "1.blocks.2", None),
    ),
    "one block": (lambda: Holder(layers=nn.ModuleList(blocks(1))), [1], "layers.0", "layers.0", None),
    "blocks in wrappers": (
        lambda: Holder(layers=nn.ModuleList([Block(), nn.Sequential(Block()), Block()])),
        *([3], "layers.0", "layers.2", None),
    ),
    "two towers": (lambda: Holder(one=Tower(), other=Tower(2)), [3, 2], "one.blocks.0", "other.blocks.1", None),
    "towers in a list": (
        lambda: Holder(towers=nn.ModuleList([Tower(), Tower(2)])),
        *([3, 2], "towers.0.blocks.0", "towers.1.blocks.1", None),
    ),
    "a decoder that is registered first": (
        lambda: Holder(decoder=Tower(2), encoder=Tower(3)),
        *([3, 2], "encoder.blocks.0", "decoder.blocks.1", None),
    ),
    "a frozen encoder": (
        lambda: Holder(encoder=frozen(Tower(3)), decoder=Tower(2)),
        *([3, 2], "encoder.blocks.0", "decoder.blocks.1", None),
    ),
    "a model that is frozen as a whole": (lambda: frozen(Tower()), [3], "blocks.0", "blocks.2", None),
    "student and teacher": (
        lambda: Holder(student=Tower(), teacher=frozen(Tower())),
        *([3], "student.blocks.0", "student.blocks.2", None),
    ),
    "a teacher that is registered first": (
        lambda: nn.ModuleDict({"teacher": frozen(Tower()), "student": Tower()}),
        *([3], "student.blocks.0", "student.blocks.2", None),
    ),
    "student and teacher that both train": (
        lambda: Holder(student=Tower(), teacher=Tower()),
        *([3, 3], "student.blocks.0", "teacher.blocks.2", None),
    ),
}


def sizes_of_stacks(found):
    return [sum(block.stack == stack for block in found) for stack in sorted({block.stack for block in found})]


def num_attentions(found):
    return sum(block.attention is not None for block in found)


class TestBlocks:
    @pytest.mark.parametrize(
        ("name", "config", "sizes", "first", "num_attended"),
        FAMILIES,
        ids=[f"{name} {sum(sizes)}" for name, _, sizes, *_ in FAMILIES],
    )
    def test_are_found_in_hugging_face_models(self, name, config, sizes, first, num_attended):
        import transformers

        settings = getattr(transformers, f"{name}Config")(**config)
        with torch.device("meta"):
            found = find_blocks(getattr(transformers, f"{name}Model")(settings))
        assert sizes_of_stacks(found) == sizes
        assert found[0].name == first
        assert [block.number for block in found] == list(range(sum(sizes)))
        assert num_attentions(found) == (sum(sizes) if num_attended is None else num_attended)

    @pytest.mark.parametrize(
        ("make", "sizes", "first", "last", "num_attended"), STRUCTURES.values(), ids=STRUCTURES.keys()
    )
    def test_are_found_in_every_structure(self, make, sizes, first, last, num_attended):
        found = find_blocks(make())
        assert sizes_of_stacks(found) == sizes
        assert [found[0].name, found[-1].name] == [first, last]
        assert num_attentions(found) == (sum(sizes) if num_attended is None else num_attended)

    def test_keep_their_stacks_when_they_are_named(self):
        model = Holder(encoder=Tower(3), decoder=Tower(2))
        named = find_blocks(model, blocks=["encoder.blocks.0", "decoder.blocks.0", "decoder.blocks.1"])
        assert [block.stack for block in named] == [0, 1, 1]


class TestNames:
    @pytest.mark.parametrize(
        ("attribute", "class_name"),
        [
            ("attn", "XLNetRelativeAttention"),
            ("attention", "RobertaPreLayerNormAttention"),
            ("x", "NormalizedAttention"),
        ],
    )
    def test_of_attentions_may_hold_norm_and_ln_in_other_words(self, attribute, class_name):
        kind = type(class_name, (Attention,), {})
        model = Holder(layers=nn.ModuleList(Holder(**{attribute: kind(), "mlp": nn.Linear(D, D)}) for _ in range(2)))
        assert [type(block.attention) for block in find_blocks(model)] == [kind, kind]

    @pytest.mark.parametrize("attribute", ["cross_attn", "encoder_attn", "encdec_attn", "linear_attn"])
    def test_tell_a_self_attention_from_other_attentions(self, attribute):
        own = {"self_attn": Attention(), "mlp": nn.Linear(D, D)}
        model = Holder(layers=nn.ModuleList(Holder(**{attribute: Attention(), **own}) for _ in range(2)))
        assert all(block.attention is block.module.self_attn for block in find_blocks(model))


class TestAFrozenTwin:
    def test_is_reported_with_the_way_to_measure_it(self):
        found = discover(Holder(student=Tower(), teacher=frozen(Tower())))
        assert len(found.left_out) == 1
        assert "teacher.blocks (3 blocks): nothing in it trains, and student.blocks has the same" in found.left_out[0]

    def test_is_measured_when_it_is_named(self):
        model = Holder(student=Tower(), teacher=frozen(Tower()))
        names = [f"{tower}.blocks.{number}" for tower in ("student", "teacher") for number in range(3)]
        assert sizes_of_stacks(find_blocks(model, blocks=names)) == [3, 3]

    def test_is_in_the_status(self, tmp_path):
        model = Holder(student=Tower(), teacher=frozen(Tower()))
        with tsemon.attach(model, run="r", spool_dir=tmp_path) as monitor:
            status = monitor.status
        assert status.blocks == ["student.blocks.0", "student.blocks.1", "student.blocks.2"]
        assert "left out      teacher.blocks (3 blocks)" in str(status)

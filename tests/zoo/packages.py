"""Models of other packages, tiny and with random weights. tsemon needs none of these packages."""

import contextlib
import importlib.abc
import importlib.util
import sys
import types

import torch
from torch import nn

from tests.zoo.hugging_face import GROUPED, LENGTHS, model_of, with_labels, without_padding
from tests.zoo.specimen import (
    BATCH,
    Place,
    Specimen,
    Stack,
    Subject,
    enliven,
    grid,
    ids,
    images,
    stack,
    to_a_target,
    tokens_first,
)


class _Anything(type(nn.Module)):
    """A class that has every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Hollow(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (nn.Module,), {})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return _Hollow(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def without_torchvision():
    """Import packages that need torchvision for data sets only. torchvision would need one exact build of PyTorch."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Torchvision()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def pictures(name="x", **sizes):
    return lambda step: {name: images(step, **sizes)}


def timm_vit():
    with without_torchvision():
        from timm.models.vision_transformer import VisionTransformer
    model = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=10)
    return Subject(model=enliven(model), batch=pictures(), loss=to_a_target, stacks=[stack(model.blocks)])


def timm_swin():
    with without_torchvision():
        from timm.models.swin_transformer import SwinTransformer
    model = SwinTransformer(
        img_size=32,
        patch_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        window_size=4,
        num_classes=10,
        drop_path_rate=0.0,
    )
    stacks = [stack(stage.blocks, layout=grid) for stage in model.layers]
    return Subject(model=enliven(model), batch=pictures(pixels=32), loss=to_a_target, stacks=stacks, is_one_depth=True)


def timm_vit_of_sam():
    """Hidden states (B, height, width, d) with B = height."""
    with without_torchvision():
        from timm.models.vision_transformer_sam import VisionTransformerSAM
    model = VisionTransformerSAM(
        img_size=12,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=10,
        window_size=0,
        global_attn_indexes=(0, 1),
        neck_chans=16,
    )
    return Subject(
        model=enliven(model), batch=pictures(pixels=12), loss=to_a_target, stacks=[stack(model.blocks, layout=grid)]
    )


def vit_pytorch():
    """A block is a ModuleList of attention and feed-forward, and only these two are called."""
    with without_torchvision():
        from vit_pytorch.vit import ViT
    model = ViT(image_size=16, patch_size=4, num_classes=10, dim=32, depth=3, heads=4, mlp_dim=64, dim_head=8)
    return Subject(
        model=enliven(model),
        batch=pictures("img"),
        loss=to_a_target,
        stacks=[never_called(model.transformer.layers, model.transformer.norm)],
    )


def simple_vit():
    with without_torchvision():
        from vit_pytorch.simple_vit import SimpleViT
    model = SimpleViT(image_size=16, patch_size=4, num_classes=10, dim=32, depth=3, heads=4, mlp_dim=64, dim_head=8)
    return Subject(
        model=enliven(model),
        batch=pictures("img"),
        loss=to_a_target,
        stacks=[never_called(model.transformer.layers, model.transformer.norm)],
    )


def never_called(layers, after):
    """Each list in `layers` is a block; the input of its first part is the hidden state before the block."""
    places = [*(Place(layer[0], is_input=True) for layer in layers), Place(after, is_input=True)]
    return Stack(places=places, parts=[list(layer) for layer in layers])


def x_transformers(kind, batch):
    def build():
        import x_transformers

        layers = getattr(x_transformers, kind)(dim=32, depth=2, heads=4, attn_dim_head=8)
        model = x_transformers.TransformerWrapper(num_tokens=100, max_seq_len=16, attn_layers=layers)
        # Attention and feed-forward alternate in one list, each with its norms and residual.
        both = list(layers.layers)
        places = [*(Place(attention[0][0], is_input=True) for attention in both[::2])]
        places.append(Place(layers.final_norm, is_input=True))
        parts = [[attention, feed] for attention, feed in zip(both[::2], both[1::2], strict=True)]
        known = {"sequences": without_padding} if batch is masked else {}
        return Subject(
            model=enliven(model),
            batch=batch,
            loss=lambda output: to_a_target(tokens_only(batch, output)),
            stacks=[Stack(places=places, parts=parts, **known)],
        )

    return build


def tokens_only(batch, output):
    return torch.cat([row[:length] for row, length in zip(output, LENGTHS, strict=True)]) if batch is masked else output


def unmasked(step):
    return {"x": ids(step)}


def masked(step):
    """The mask is True at tokens."""
    return {"x": ids(step), "mask": torch.arange(12) < LENGTHS[:, None]}


def esm2():
    """Hidden states are (n, B, d), although the input is (B, n)."""
    import esm

    model = esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet="ESM-1b")
    model = enliven(model)

    def batch(step):
        return {"tokens": ids(step).clamp(4, 23)}

    stacks = [stack(model.layers, layout=tokens_first)]
    return Subject(model=model, batch=batch, loss=lambda output: to_a_target(output["logits"]), stacks=stacks)


def diffusion_transformer():
    """One stream of image tokens."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=2,
        num_embeds_ada_norm=10,
    )

    def batch(step):
        return {
            "hidden_states": images(step, channels=4, pixels=8),
            "timestep": torch.tensor([1, 5, 9]),
            "class_labels": torch.tensor([0, 1, 2]),
            "return_dict": False,
        }

    return Subject(model=enliven(model), batch=batch, loss=to_a_target, stacks=[stack(model.transformer_blocks)])


def stable_diffusion_3():
    """Two streams, image and text, with joint attention."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return {
            "hidden_states": images(step, channels=4, pixels=8),
            "encoder_hidden_states": torch.randn(BATCH, 7, 16, generator=generator),
            "pooled_projections": torch.randn(BATCH, 16, generator=generator),
            "timestep": torch.tensor([1.0, 5.0, 9.0]),
            "return_dict": False,
        }

    return Subject(
        model=enliven(model),
        batch=batch,
        loss=to_a_target,
        stacks=two_streams(model.transformer_blocks, [0, 1, 2]),
        views=[[0, 1], [1, 0], [0], [1]],
    )


def flux():
    """Blocks with two streams of separate weights, then blocks with shared weights."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    )

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return {
            "hidden_states": torch.randn(BATCH, 12, 4, generator=generator),
            "encoder_hidden_states": torch.randn(BATCH, 7, 16, generator=generator),
            "pooled_projections": torch.randn(BATCH, 16, generator=generator),
            "timestep": torch.tensor([0.1, 0.5, 0.9]),
            "img_ids": torch.randn(12, 3, generator=generator),
            "txt_ids": torch.zeros(7, 3),
            "return_dict": False,
        }

    return Subject(
        model=enliven(model),
        batch=batch,
        loss=to_a_target,
        stacks=[
            *two_streams(model.transformer_blocks, [0, 1]),
            *two_streams(model.single_transformer_blocks, [2, 3]),
        ],
        views=[[0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2], [0, 2], [1, 3]],
    )


def two_streams(blocks, attentions):
    """The image stream and the text stream of blocks that return (text, image)."""
    streams = []
    for argument, position in (("hidden_states", 1), ("encoder_hidden_states", 0)):
        first, *others = stack(blocks).places
        places = [Place(first.module, is_input=True, pick=argument)]
        places += [Place(place.module, pick=position) for place in others]
        streams.append(Stack(places=places, parts=[[block] for block in blocks], attentions=attentions))
    return streams


def low_rank_adapters():
    """Everything but the adapters is frozen."""
    import peft

    model = model_of("LlamaForCausalLM", "LlamaConfig", **GROUPED, pad_token_id=0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
    blocks = adapted.base_model.model.model.layers
    return Subject(model=adapted, batch=with_labels, loss=lambda output: output.loss, stacks=[stack(blocks)])


def litgpt():
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(
        Config(
            block_size=16,
            vocab_size=100,
            padded_vocab_size=100,
            n_layer=2,
            n_head=4,
            n_embd=32,
            n_query_groups=2,
            rotary_percentage=1.0,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=64,
            parallel_residual=False,
        )
    )
    return Subject(
        model=enliven(model),
        batch=lambda step: {"idx": ids(step)},
        loss=to_a_target,
        stacks=[stack(model.transformer.h)],
    )


def open_clip():
    with without_torchvision():
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    model = CLIP(
        embed_dim=16,
        vision_cfg=CLIPVisionCfg(layers=3, width=48, head_width=12, image_size=16, patch_size=4),
        text_cfg=CLIPTextCfg(context_length=12, vocab_size=100, width=32, heads=4, layers=2),
    )

    def batch(step):
        return {"image": images(step), "text": ids(step)}

    def loss(output):
        image, text, _ = output
        return to_a_target(image) + to_a_target(text)

    vision, text = model.visual.transformer.resblocks, model.transformer.resblocks
    return Subject(model=enliven(model), batch=batch, loss=loss, stacks=[stack(vision), stack(text)])


SPECIMENS = [
    Specimen(name="timm: ViT", package="timm", build=timm_vit),
    Specimen(name="timm: Swin, two stages, [B, H, W, C]", package="timm", build=timm_swin, is_representative=True),
    Specimen(name="timm: ViT of SAM, [B, H, W, C] with H = B", package="timm", build=timm_vit_of_sam),
    Specimen(
        name="vit-pytorch: ViT, blocks that are never called",
        package="vit_pytorch",
        build=vit_pytorch,
        is_representative=True,
    ),
    Specimen(name="vit-pytorch: SimpleViT", package="vit_pytorch", build=simple_vit),
    Specimen(
        name="x-transformers: decoder, attention and feed-forward in one list",
        package="x_transformers",
        build=x_transformers("Decoder", unmasked),
        is_representative=True,
    ),
    Specimen(
        name="x-transformers: encoder, mask with True = token",
        package="x_transformers",
        build=x_transformers("Encoder", masked),
    ),
    Specimen(
        name="fair-esm: ESM2, [T, B, C]",
        package="esm",
        build=esm2,
        is_representative=True,
    ),
    Specimen(name="diffusers: DiT", package="diffusers", build=diffusion_transformer),
    Specimen(
        name="diffusers: Stable Diffusion 3, two streams",
        package="diffusers",
        build=stable_diffusion_3,
    ),
    Specimen(
        name="diffusers: FLUX, two streams, then one",
        package="diffusers",
        build=flux,
    ),
    Specimen(name="peft: Llama with LoRA", package="peft", build=low_rank_adapters),
    Specimen(name="litgpt: GPT", package="litgpt", build=litgpt),
    Specimen(name="open_clip: CLIP, two towers", package="open_clip", build=open_clip),
]

import pytest
import torch

from tsemon.errors import InvalidArgument
from tsemon.models import (
    CausalLanguageModel,
    Encoder,
    RepeatingTransformer,
    TextEncoder,
    TransformerXL,
    VisionTransformer,
    presets,
)

ALL = [
    (kind, name)
    for kind, named in (
        (VisionTransformer, presets.VISION),
        (CausalLanguageModel, presets.LANGUAGE),
        (Encoder, presets.ENCODER),
        (TextEncoder, presets.TEXT_ENCODER),
        (RepeatingTransformer, presets.REPEATING),
        (TransformerXL, presets.TRANSFORMER_XL),
    )
    for name in named
]


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(autouse=True)
def nowhere():
    with torch.device("meta"):
        yield


class TestAPreset:
    @pytest.mark.parametrize(("kind", "name"), ALL)
    def test_builds(self, kind, name):
        model = kind.from_preset(name)
        assert len(model.blocks) == model.config.depth
        assert all(parameter.is_meta for parameter in model.parameters())

    def test_gives_way_to_overrides(self):
        config = VisionTransformer.from_preset("vit-80", depth=2, tau=0.5).config
        assert (config.depth, config.tau, config.width) == (2, 0.5, 192)

    def test_is_one_of_those_that_there_are(self):
        with pytest.raises(InvalidArgument, match=r"VisionTransformerConfig has no preset named 'vit-8'.*vit-80"):
            VisionTransformer.from_preset("vit-8")

    def test_has_the_fields_of_its_config(self):
        with pytest.raises(InvalidArgument, match=r"VisionTransformerConfig has no field named 'dept'.*depth"):
            VisionTransformer.from_preset("vit-80", dept=2)

    def test_is_checked_with_its_overrides(self):
        with pytest.raises(InvalidArgument, match="width 192 and 7 heads"):
            VisionTransformer.from_preset("vit-80", heads=7)


class TestTheSizesOfThePapers:
    def test_of_the_norm_growth_models_are_38m_beside_the_embeddings(self):
        for norm in ("post", "pre", "branch"):
            blocks = CausalLanguageModel.from_preset(f"norm-growth-{norm}-norm").blocks
            assert round(num_parameters(blocks) / 1e6) == 38

    def test_of_bert_and_albert_are_those_of_hugging_face(self):
        from transformers import AlbertConfig, AlbertForMaskedLM, BertConfig, BertForMaskedLM

        bert = BertForMaskedLM(BertConfig())
        # Its own defaults are ALBERT-xxlarge's.
        albert = AlbertForMaskedLM(AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072))
        assert num_parameters(TextEncoder.from_preset("bert-base")) == num_parameters(bert) == 109_514_298
        # 11.7 million with the pooler, which no masked word needs.
        assert num_parameters(TextEncoder.from_preset("albert-base")) == num_parameters(albert) == 11_221_680

    def test_of_albert_do_not_grow_with_its_depth(self):
        base, deep = (TextEncoder.from_preset(name) for name in ("albert-base", "albert-100"))
        assert num_parameters(base) == num_parameters(deep)

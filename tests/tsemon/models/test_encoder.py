import pytest
import torch

from tests.tsemon.models.variants import encoder, inputs_for, text_encoder
from tests.tsemon.models.written_out import EXACT
from tsemon.errors import InvalidArgument, ShapeError

SIZES = {"vocab_size": 20, "max_position_embeddings": 9, "hidden_size": 12, "num_attention_heads": 3}
SIZES |= {"num_hidden_layers": 3, "intermediate_size": 24, "layer_norm_eps": 1e-5}


def hugging_face(kind, **config):
    """Their model in float64, with every parameter drawn anew: theirs start with biases of zero."""
    import transformers

    made = getattr(transformers, f"{kind}Config")(**SIZES, **config)
    model = getattr(transformers, f"{kind}ForMaskedLM")(made).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def take(module, *theirs):
    """The weights of theirs, one below the other."""
    for name, parameter in module.named_parameters():
        parameter.copy_(torch.cat([their.get_parameter(name) for their in theirs]))


def take_embeddings(model, embeddings):
    take(model.embed, embeddings.word_embeddings)
    take(model.positions, embeddings.position_embeddings)
    take(model.types, embeddings.token_type_embeddings)
    take(model.norm, embeddings.LayerNorm)


def bert():
    theirs = hugging_face("Bert")
    ours = text_encoder().double()
    take_embeddings(ours, theirs.bert.embeddings)
    for block, layer in zip(ours.blocks, theirs.bert.encoder.layer, strict=True):
        attention = layer.attention.self
        take(block.attention.to_query_key_value, attention.query, attention.key, attention.value)
        take(block.attention.to_output, layer.attention.output.dense)
        take(block.norm1, layer.attention.output.LayerNorm)
        take(block.feed_forward.expand, layer.intermediate.dense)
        take(block.feed_forward.contract, layer.output.dense)
        take(block.norm2, layer.output.LayerNorm)
    take(ours.to_embedding, theirs.cls.predictions.transform.dense)
    take(ours.embedding_norm, theirs.cls.predictions.transform.LayerNorm)
    ours.bias.data.copy_(theirs.cls.predictions.decoder.bias)
    return ours, theirs


def albert():
    theirs = hugging_face("Albert", embedding_size=4, hidden_act="gelu")  # by default theirs is GELU's approximation
    ours = text_encoder(embedding=4, num_weights=1).double()
    take_embeddings(ours, theirs.albert.embeddings)
    take(ours.widen, theirs.albert.encoder.embedding_hidden_mapping_in)
    block, layer = ours.blocks[0], theirs.albert.encoder.albert_layer_groups[0].albert_layers[0]
    take(block.attention.to_query_key_value, layer.attention.query, layer.attention.key, layer.attention.value)
    take(block.attention.to_output, layer.attention.dense)
    take(block.norm1, layer.attention.LayerNorm)
    take(block.feed_forward.expand, layer.ffn)
    take(block.feed_forward.contract, layer.ffn_output)
    take(block.norm2, layer.full_layer_layer_norm)
    take(ours.to_embedding, theirs.predictions.dense)
    take(ours.embedding_norm, theirs.predictions.LayerNorm)
    ours.bias.data.copy_(theirs.predictions.decoder.bias)
    return ours, theirs


class TestATextEncoder:
    @pytest.mark.parametrize("both", [bert, albert])
    @pytest.mark.parametrize("num_tokens", [9, 4])
    def test_equals_hugging_face_s_with_the_same_weights(self, both, num_tokens):
        ours, theirs = both()
        tokens = inputs_for(text_encoder)[:, :num_tokens]
        types = torch.tensor([[0, 1], [1, 1]]).repeat_interleave(5, 1)[:, :num_tokens]
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **EXACT)
        torch.testing.assert_close(ours(tokens, types), theirs(tokens, token_type_ids=types).logits, **EXACT)

    def test_starts_normal_with_no_biases(self):
        model = text_encoder(width=120, ffn=240, init_std=0.1)
        weights, biases = model.blocks[0].feed_forward.expand.parameters()
        assert weights.std().item() == pytest.approx(0.1, rel=0.05)  # of 28,800 draws
        assert not biases.any()

    def test_tells_how_long_a_sequence_may_be(self):
        with pytest.raises(ShapeError, match=r"at most 9 tokens, got \(2, 10\)"):
            text_encoder()(torch.zeros(2, 10, dtype=torch.int64))

    @pytest.mark.parametrize(
        "sizes", [{"vocab": 0}, {"context": 0}, {"num_types": 0}, {"depth": 0}, {"num_weights": 2}]
    )
    def test_refuses_sizes_that_do_not_fit(self, sizes):
        with pytest.raises(InvalidArgument, match=f"{next(iter(sizes))}"):
            text_encoder(**sizes)


class TestAnEncoder:
    def test_is_its_blocks_one_after_the_other(self):
        model = encoder().double()
        x_BTD = y_BTD = inputs_for(encoder, torch.float64)
        for block in model.blocks:
            y_BTD = block(y_BTD)
        assert torch.equal(model(x_BTD), y_BTD)

    @pytest.mark.parametrize("norm", ["pre", "branch"])
    def test_ends_in_a_norm_where_its_blocks_do_not(self, norm):
        y_BTD = encoder(norm=norm).double()(inputs_for(encoder, torch.float64))
        # A norm's epsilon of 1e-5 takes that much off the variance of states near 1.
        torch.testing.assert_close(y_BTD.var(2, correction=0), torch.ones(2, 9).double(), rtol=0, atol=1e-4)

    def test_with_one_block_applies_it_depth_times(self):
        model = encoder(num_weights=1).double()
        assert len({id(block) for block in model.blocks}) == 1
        x_BTD = inputs_for(encoder, torch.float64)
        block = model.blocks[0]
        assert torch.equal(model(x_BTD), block(block(block(x_BTD))))

    def test_lets_few_blocks_take_turns_each_in_a_row(self):
        blocks = encoder(depth=6, num_weights=3).blocks
        assert [[block is other for other in blocks].index(True) for block in blocks] == [0, 0, 2, 2, 4, 4]

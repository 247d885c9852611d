import pytest
import torch
from torch import nn

from tsemon.errors import InvalidArgument, NoBlocksFound
from tsemon.probes import find_blocks


class TestFindBlocks:
    def test_finds_every_block_and_its_self_attention(self, any_model):
        model, _ = any_model
        blocks = find_blocks(model)
        assert len(blocks) == 3
        assert all(b.attention is not None and b.attention in set(b.module.modules()) for b in blocks)
        assert [model.get_submodule(b.name) for b in blocks] == [b.module for b in blocks]

    def test_knows_where_the_tokens_stand(self):
        layer = nn.TransformerEncoderLayer(8, 2, 8)
        assert find_blocks(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))[0].tokens_first
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        assert not find_blocks(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))[0].tokens_first

    def test_takes_self_attention_and_not_attention_to_an_encoder(self):
        block = find_blocks(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8), 1))[0]
        assert block.attention is block.module.self_attn

    def test_puts_the_decoder_after_the_encoder(self):
        names = [block.name for block in find_blocks(nn.Transformer(8, 2, 2, 1, 8))]
        assert names == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]

    def test_takes_blocks_by_name_or_as_modules(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        assert [b.name for b in find_blocks(model, blocks=["0", model[1]])] == ["0", "1"]

    def test_tells_the_nearest_guess_when_it_finds_nothing(self):
        model = nn.Module()
        model.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        with pytest.raises(NoBlocksFound, match=r"lists of modules in it are parts \(2 x Linear\)"):
            find_blocks(model)

    def test_tells_the_name_that_is_not_in_the_model(self):
        with pytest.raises(InvalidArgument, match=r"no module named 'layers\.9'"):
            find_blocks(torch.nn.Linear(2, 2), blocks=["layers.9"])

    def test_wants_one_attention_per_block(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises(InvalidArgument, match="2 blocks, got 1"):
            find_blocks(model, blocks=["0", "1"], attention=["0"])

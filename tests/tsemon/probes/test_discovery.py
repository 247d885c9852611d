import re

import pytest
import torch
from torch import nn

from tests.tsemon.probes.probing import reading_of
from tests.tsemon.probes.structures import Dicts, Holder, ListsOfParts, Tower, Unit, WithoutNorms
from tsemon.errors import InvalidArgument, NoBlocksFound
from tsemon.measures import token_similarity
from tsemon.models import DeEscalation, Encoder, EncoderConfig
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

    @pytest.mark.parametrize("depth", [2, 3])
    def test_advises_only_modules_that_work_as_blocks(self, depth):
        model = Holder(
            emb=nn.Embedding(10, 2), layers=nn.ModuleList(Unit() for _ in range(depth)), head=nn.Linear(2, 2)
        )
        with pytest.raises(NoBlocksFound, match=r"blocks=\[.*\]") as caught:
            find_blocks(model)
        advised = re.search(r"blocks=\[(.*?)\]", str(caught.value))[1]
        assert advised == ("'layers.0', 'layers.1'" if depth == 2 else "'layers.0', 'layers.1', ...")
        assert len(find_blocks(model, blocks=["layers.0", "layers.1"])) == 2

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            nn.ModuleDict({"trunk": nn.Sequential(nn.Linear(2, 2))}),
            Holder(emb=nn.Embedding(10, 2), parts=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])),
            ListsOfParts(),
            nn.Linear(2, 2),
        ],
        ids=["sequential", "dict", "linear layers", "lists of parts", "a layer"],
    )
    def test_advises_no_module_if_none_is_a_block(self, model):
        with pytest.raises(NoBlocksFound, match=r"name the modules whose forward .*blocks=\[\.\.\.\]\)$"):
            find_blocks(model)

    def test_tells_why_blocks_that_are_never_called_cannot_be_read(self):
        with pytest.raises(NoBlocksFound, match=r"layers \(3 x ModuleList\) are never called themselves, and no norm"):
            find_blocks(WithoutNorms())

    @pytest.mark.parametrize("make", [WithoutNorms, Dicts, Tower])
    def test_refuses_a_container_that_is_never_called(self, make):
        model = make()
        name = "blocks" if make is Tower else "layers"
        with pytest.raises(
            InvalidArgument, match=rf"blocks= must name modules that are called, but '{name}' is a ModuleList"
        ):
            find_blocks(model, blocks=[name])

    def test_names_the_modules_in_a_container_that_is_refused(self):
        with pytest.raises(InvalidArgument, match=r"blocks=\['blocks\.0', 'blocks\.1', \.\.\.\]"):
            find_blocks(Tower(), blocks=["blocks"])

    def test_takes_a_container_that_is_never_called_where_its_parts_show_the_hidden_state(self):
        model = Dicts()
        given = find_blocks(model, blocks=["layers.0", "layers.1", "layers.2"])
        assert given == find_blocks(model)

    def test_tells_the_name_that_is_not_in_the_model(self):
        with pytest.raises(InvalidArgument, match=r"no module named 'layers\.9'"):
            find_blocks(torch.nn.Linear(2, 2), blocks=["layers.9"])

    def test_wants_one_attention_per_block(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises(InvalidArgument, match="2 blocks, got 1"):
            find_blocks(model, blocks=["0", "1"], attention=["0"])


class TestAModuleThatIsSeveralLayers:
    def test_is_as_many_blocks_as_its_list_has_entries(self):
        one, other = (nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2))
        model = nn.Module()
        model.layers = nn.ModuleList([one, one, other, one])
        blocks = find_blocks(model)
        assert [block.module for block in blocks] == [one, one, other, one]
        assert [block.name for block in blocks] == [
            "layers.0 (1 of 3)",
            "layers.0 (2 of 3)",
            "layers.2",
            "layers.0 (3 of 3)",
        ]

    def test_is_measured_in_each_of_its_places(self):
        model = Encoder(EncoderConfig(width=8, heads=2, ffn=8, depth=4, num_weights=2)).eval()
        x_BTD = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
        reading, _ = reading_of(model, lambda: model(x_BTD))
        states = [x_BTD]
        for block in model.blocks:
            states.append(block(states[-1]))
        expected = token_similarity(torch.stack(states)).mean(1)
        # Means of float32, taken in two ways.
        torch.testing.assert_close(torch.as_tensor(reading.layers["token_similarity"]).float(), expected)


class TestADeEscalation:
    @pytest.mark.parametrize("wrap", [lambda block: block, nn.Sequential], ids=["bare", "wrapped"])
    @pytest.mark.parametrize(
        ("tau_at", "is_the_end"), [("output", True), ("feed_forward", False), ("attention", False)]
    )
    def test_is_the_block_s_end_only_where_it_comes_last(self, tau_at, is_the_end, wrap):
        model = Encoder(EncoderConfig(width=8, heads=2, ffn=8, depth=2, tau=0.5, tau_at=tau_at))
        steps = [module for module in model.modules() if isinstance(module, DeEscalation)]
        model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
        assert len(steps) == 2
        assert [block.deescalation for block in find_blocks(model)] == (steps if is_the_end else [None, None])

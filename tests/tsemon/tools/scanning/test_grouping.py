import pytest
import torch

from tests import zoo
from tsemon.errors import InvalidArgument
from tsemon.probes import find_blocks
from tsemon.probes.groups import EMBEDDING, HEAD, OTHER, group_parameters
from tsemon.tools.scanning.grouping import Entry, group_names
from tsemon.tools.scanning.opening import open_weights

MORE = (zoo.t5, zoo.gemma2, zoo.gpt_neox, zoo.mixtral, zoo.distilbert, zoo.bloom)


def of_probes(model):
    """Which parameter counts where in a run that tsemon watches."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = find_blocks(model)
    groups = group_parameters(model, blocks)
    return [block.name for block in blocks], {g: {names[id(p)] for p in own} for g, own in groups.items()}


def of_file(path):
    weights = open_weights([path])
    groups = group_names(weights.entries)
    weights.close()
    return list(groups.blocks), {group: set(names) for group, names in groups.members.items()}


def entries(*names, shape=(4, 4)):
    return {name: Entry(shape, True) for name in names}


class TestGroupNames:
    @pytest.mark.parametrize("make", [*zoo.MODELS, *MORE], ids=lambda make: make.__name__)
    def test_says_of_a_saved_model_what_the_probes_say_of_the_living_one(self, make, tmp_path):
        model, _ = make()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert of_file(tmp_path / "model.pt") == of_probes(model)

    @pytest.mark.parametrize("make", [zoo.gpt2, zoo.t5, zoo.bert], ids=lambda make: make.__name__)
    def test_and_of_safetensors_whose_names_are_sorted(self, make, tmp_path):
        model, _ = make()
        model.save_pretrained(tmp_path)
        assert of_file(tmp_path / "model.safetensors") == of_probes(model)

    def test_looks_through_what_wrappers_put_into_names(self):
        groups = group_names(entries("module._orig_mod.h.0.attn.q.weight", "module._orig_mod.h.1.attn.q.weight"))
        assert groups.blocks == ("h.0", "h.1")
        assert groups.members == {
            0: ("module._orig_mod.h.0.attn.q.weight",),
            1: ("module._orig_mod.h.1.attn.q.weight",),
        }

    def test_puts_the_tenth_block_behind_the_ninth(self):
        groups = group_names(entries(*sorted(f"h.{number}.attn.weight" for number in range(11))))
        assert groups.blocks[-2:] == ("h.9", "h.10")

    def test_leaves_out_scalars_integers_masks_and_buffers(self):
        left_out = {
            "h.0.attn.scale": Entry((1,), True),
            "h.0.attn.steps": Entry((4,), False),
            "h.0.attn.bias": Entry((1, 1, 8, 8), True),
            "h.0.attn.rotary.inv_freq": Entry((4,), True),
            "norm.running_mean": Entry((4,), True),
        }
        assert group_names(entries("h.0.attn.weight") | left_out).names == ["h.0.attn.weight"]

    def test_counts_a_tied_head_once_and_with_the_embeddings(self):
        tied = {"lm_head.weight": Entry((9, 4), True), "wte.weight": Entry((9, 4), True, same_as="lm_head.weight")}
        assert group_names(tied | entries("h.0.attn.weight")).members[EMBEDDING] == ("lm_head.weight",)

    def test_gives_embeddings_head_and_the_rest_apart(self):
        groups = group_names(entries("wte.weight", "h.0.attn.weight", "ln_f.weight", "lm_head.weight"))
        assert {group: groups.members[group] for group in (EMBEDDING, HEAD, OTHER)} == {
            EMBEDDING: ("wte.weight",),
            HEAD: ("lm_head.weight",),
            OTHER: ("ln_f.weight",),
        }

    def test_finds_no_blocks_where_nothing_is_called_attention(self):
        groups = group_names(entries("layers.0.mixer.weight", "layers.1.mixer.weight"))
        assert (groups.blocks, [*groups.members]) == ((), [OTHER])

    def test_takes_the_stack_that_it_is_given(self):
        names = entries("layers.0.mixer.weight", "layers.1.mixer.weight", "norm.weight")
        assert group_names(names, ["layers"]).blocks == ("layers.0", "layers.1")

    def test_tells_of_a_stack_that_is_not_there(self):
        with pytest.raises(InvalidArgument, match="did you mean 'layers'"):
            group_names(entries("layers.0.mixer.weight"), ["layer"])

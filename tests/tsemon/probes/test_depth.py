"""Several stacks are an axis: names, inputs and entries of each, of real models and of structures."""

import functools
import json
import math

import pytest
import torch
from torch import nn

import tsemon
from tests import zoo
from tests.frames import frames_in, values_of
from tests.tsemon.probes.probing import reading_of
from tests.tsemon.probes.structures import Block, Holder, Tower, blocks, frozen
from tsemon.errors import InvalidArgument
from tsemon.measures import token_similarity
from tsemon.probes import discover, find_blocks, joined, named_stacks
from tsemon.quantity import Quantity
from tsemon.stacks import Stack, Stacks

ENCODER_DECODER = Stacks((Stack("encoder", 2), Stack("decoder", 2)))


def named(*paths):
    return [stack.name for stack in named_stacks([(path, 1) for path in paths]).each]


def clip():
    from transformers import CLIPConfig, CLIPModel

    sizes = {"intermediate_size": 64, "num_attention_heads": 4}
    text = sizes | {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "eos_token_id": 1, "bos_token_id": 0}
    vision = sizes | {"hidden_size": 48, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(input_ids=zoo.ids(), pixel_values=pixels).logits_per_image


class TestTheNameOfAStack:
    def test_is_the_first_part_of_its_path_that_no_other_has(self):
        assert named("encoder.block", "decoder.block") == ["encoder", "decoder"]
        assert named("model.encoder.layers", "model.decoder.layers") == ["encoder", "decoder"]
        assert named("text_model.encoder.layers", "vision_model.encoder.layers") == ["text_model", "vision_model"]

    def test_has_as_many_parts_as_tell_it_apart(self):
        paths = "vision_model.encoder.layers", "vision_model.decoder.layers", "text_model.layers"
        assert named(*paths) == ["vision_model.encoder", "vision_model.decoder", "text_model"]
        assert named("down.0.attn", "down.1.attn", "mid.attn") == ["down.0", "down.1", "mid"]

    def test_is_the_whole_path_if_the_paths_are_short(self):
        assert named("double_blocks", "single_blocks") == ["double_blocks", "single_blocks"]

    def test_is_left_out_for_the_only_stack(self):
        assert named_stacks([("encoder.layers", 3)]) == Stacks.of(3)


class TestABlock:
    def test_has_an_entry_for_its_output_behind_that_of_its_input(self):
        found = find_blocks(Holder(encoder=Tower(2), decoder=Tower(3)))
        assert [block.entry for block in found] == [1, 2, 4, 5, 6]

    def test_of_one_stack_counts_as_before(self):
        assert [block.entry for block in find_blocks(Tower(3))] == [1, 2, 3]

    def test_of_stacks_that_take_turns_is_of_one_depth(self):
        model = Holder(mamba=nn.ModuleList(blocks(2)), attention=nn.ModuleList(blocks(2)))
        names = ["mamba.0", "attention.0", "mamba.1", "attention.1"]
        found = discover(model, blocks=names)
        assert [block.stack for block in found.blocks] == [0, 0, 0, 0]
        assert [block.entry for block in found.blocks] == [1, 2, 3, 4]
        assert named_stacks(found.paths) == Stacks.of(4)

    def test_of_stacks_in_another_order_has_its_place_in_that_order(self):
        model = Holder(encoder=Tower(1), decoder=Tower(2))
        found = discover(model, blocks=["decoder.blocks.0", "decoder.blocks.1", "encoder.blocks.0"])
        assert [block.entry for block in found.blocks] == [1, 2, 4]
        assert named_stacks(found.paths) == Stacks((Stack("decoder", 2), Stack("encoder", 1)))


class TestTheStagesOfAPipeline:
    def test_continue_the_stack_of_the_stage_before(self):
        assert joined([[("layers", 2)], [("layers", 3)]]) == [("layers", 5)]
        assert joined([[("submod_0.layers", 2)], [("submod_1.layers", 2)]]) == [("submod_0.layers", 4)]
        assert joined([[("early", 2)], [("late", 2)]]) == [("early", 4)]
        assert joined([[("decoder.layers", 2)], [("layers", 2)]]) == [("decoder.layers", 4)]

    def test_begin_another_stack_with_a_decoder_behind_an_encoder(self):
        encoder, decoder = ("encoder.layers", 2), ("decoder.layers", 1)
        assert joined([[encoder], [decoder], [decoder]]) == [encoder, ("decoder.layers", 2)]
        assert joined([[encoder, decoder], [decoder]]) == [encoder, ("decoder.layers", 2)]
        assert joined([[encoder], [encoder, decoder]]) == [("encoder.layers", 4), decoder]

    def test_cannot_each_have_a_part_of_several(self):
        stage = [("vision.layers", 1), ("text.layers", 1)]
        with pytest.raises(InvalidArgument, match=r"one stack after the other, got .* vision.layers, text.layers"):
            joined([stage, stage])


class TestTheInputOfAStack:
    @pytest.mark.parametrize(
        ("make", "sizes"),
        [(lambda: zoo.t5(dropout_rate=0.0), [2, 2]), (clip, [2, 3])],
        ids=["encoder and decoder", "two towers"],
    )
    def test_is_what_goes_into_its_first_block(self, make, sizes):
        model, forward = make()
        found = find_blocks(model)
        reading, _ = reading_of(model, forward, measures={"token_similarity"})
        expected = [token_similarity(x_BTD).mean() for x_BTD in states_of(found, forward)]
        assert len(expected) == sum(sizes) + 2
        assert reading.layers["token_similarity"].tolist() == pytest.approx([x.item() for x in expected], rel=1e-5)

    def test_is_measured_by_the_saturation_too(self):
        model, forward = zoo.t5()
        reading, probe = reading_of(model, forward, measures={"saturation"})
        assert "saturation" not in probe.not_measured
        cosines = reading.layers["saturation"].tolist()
        assert len(cosines) == 6
        assert [cosines[0], cosines[3]] == pytest.approx([1.0, 1.0])  # an embedding only grows
        assert max(abs(cosine) for cosine in cosines) <= 1 + 1e-6

    def test_is_seen_by_quantities_of_the_users_own(self, tmp_path):
        model, forward = zoo.t5()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sizes = Quantity(
            name="tokens", of="output", function=lambda x, valid: x.shape[1] + 0.0 * x.mean(), axis="activation"
        )
        outputs = Quantity(name="widths", of="output", function=lambda x, valid: x.shape[2] + 0.0 * x.mean())
        measures = ["token_similarity", sizes, outputs]
        with tsemon.attach(model, optimizer, run="r", every=1, measures=measures, spool_dir=tmp_path) as monitor:
            forward().square().mean().backward()
            optimizer.step()
            monitor.step()
        (frame,) = frames_in(tmp_path)
        assert values_of(frame, "tokens") == [12, 12, 12, 8, 8, 8]
        assert values_of(frame, "widths") == [32, 32, 32, 32]

    def test_that_no_pass_shows_is_counted_among_the_missing(self):
        model, _ = zoo.t5()
        encoder = model.get_encoder()
        reading, probe = reading_of(model, lambda: encoder(zoo.ids()).last_hidden_state, measures={"token_similarity"})
        assert "token_similarity" not in reading.layers or any(
            math.isnan(value) for value in reading.layers["token_similarity"].tolist()
        )
        assert "token_similarity" in probe.not_measured


def states_of(found, forward):
    """The states of all blocks by their entries, by the plainest of hooks: the second tower may run first."""
    states, handles = {}, []

    def enter(entry, values):
        states.setdefault(entry, values[0])

    def leave(entry, output):
        states[entry] = output if torch.is_tensor(output) else output[0]

    for block in found:
        first, last = functools.partial(enter, block.entry - 1), functools.partial(leave, block.entry)
        before = block.module.register_forward_pre_hook(
            lambda _, args, kwargs, see=first: see((*args, *kwargs.values())), with_kwargs=True
        )
        handles += [before, block.module.register_forward_hook(lambda _, args, output, see=last: see(output))]
    forward()
    for handle in handles:
        handle.remove()
    return [states[entry].detach().double() for entry in sorted(states)]


class TestAttaching:
    def test_registers_the_stacks_and_says_them(self, tmp_path):
        model, _ = zoo.t5()
        with tsemon.attach(model, run="r", spool_dir=tmp_path) as monitor:
            (path,) = tmp_path.rglob("run.json")
            told = json.loads(path.read_bytes())["stacks"]
            assert told == [{"name": "encoder", "blocks": 2}, {"name": "decoder", "blocks": 2}]
            assert monitor.status.stacks == ENCODER_DECODER
            assert "stacks        2: encoder (2 blocks), decoder (2)" in str(monitor).splitlines()

    def test_says_nothing_of_stacks_if_there_is_one(self, tmp_path):
        model = Holder(student=Tower(), teacher=frozen(Tower()))
        with tsemon.attach(model, run="r", spool_dir=tmp_path) as monitor:
            (path,) = tmp_path.rglob("run.json")
            assert "stacks" not in json.loads(path.read_bytes())
            assert not [line for line in str(monitor).splitlines() if line.startswith("stacks")]

    def test_refuses_more_stacks_than_a_run_may_have(self, tmp_path):
        model = Holder(
            **{
                f"tower{chr(97 + i // 26)}{chr(97 + i % 26)}": Holder(blocks=nn.ModuleList([Block()]))
                for i in range(33)
            }
        )
        with pytest.raises(InvalidArgument, match="at most 32 stacks of blocks, and the model has 33"):
            tsemon.attach(model, run="r", spool_dir=tmp_path)

    def test_leaves_a_training_with_two_stacks_bit_equal(self, tmp_path):
        def trained(is_attached):
            torch.manual_seed(0)
            model, forward = zoo.t5()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            attached = tsemon.attach(model, optimizer, run="r", every=1, spool_dir=tmp_path) if is_attached else None
            for _ in range(3):
                optimizer.zero_grad()
                forward().square().mean().backward()
                optimizer.step()
                if attached is not None:
                    attached.step()
            if attached is not None:
                attached.close()
            return [p.detach().clone() for p in model.parameters()]

        assert all(map(torch.equal, trained(False), trained(True)))

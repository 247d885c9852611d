"""Which block an entry of an array is, in models with one stack and with several."""

import pytest

from tsemon.errors import UnknownLayer
from tsemon.stacks import Entry, Stack, Stacks

ONE = Stacks.of(3)
TWO = Stacks((Stack("encoder", 2), Stack("decoder", 3)))


def entries(stacks, num_entries):
    return [stacks.entry(number, num_entries) for number in range(num_entries)]


class TestTheStacksOfARegistration:
    def test_are_one_that_has_all_blocks_unless_it_lists_them(self):
        assert Stacks.of(3) == Stacks.of(3, []) == Stacks((Stack("", 3),))
        assert Stacks.of(5, [{"name": "encoder", "blocks": 2}, {"name": "decoder", "blocks": 3}]) == TWO

    def test_add_up_to_all_blocks(self):
        assert (ONE.num_blocks, TWO.num_blocks) == (3, 5)

    def test_are_named_with_their_sizes(self):
        assert str(TWO) == "encoder (2 blocks), decoder (3)"


class TestBlocks:
    @pytest.mark.parametrize(
        ("stacks", "between", "words"),
        [
            (ONE, (1, 1), "block 1"),
            (ONE, (0, 2), "blocks 0 to 2"),
            (TWO, (1, 1), "block 1 of the encoder"),
            (TWO, (2, 4), "blocks 0 to 2 of the decoder"),
            (TWO, (1, 3), "block 1 of the encoder to block 1 of the decoder"),
            (TWO, (4, 7), "blocks 4 to 7"),
            (Stacks((Stack("0", 2), Stack("1", 3))), (2, 3), 'blocks 0 to 1 of stack "1"'),
        ],
    )
    def test_are_named_within_their_stack(self, stacks, between, words):
        assert stacks.in_words(*between) == words


class TestAnArrayOfBlocks:
    def test_has_one_entry_per_block(self):
        assert TWO.num_entries("block") == 5
        assert [entry.block for entry in entries(TWO, 5)] == [0, 1, 2, 3, 4]

    def test_has_the_stacks_one_after_the_other(self):
        assert TWO.spans(5) == [range(2), range(2, 5)]
        assert [TWO.label(number, 5) for number in range(5)] == [
            *("encoder 0", "encoder 1"),
            *("decoder 0", "decoder 1", "decoder 2"),
        ]


class TestAnArrayOfActivations:
    def test_has_one_entry_more_per_stack(self):
        assert (ONE.num_entries("activation"), TWO.num_entries("activation")) == (4, 7)

    def test_begins_in_each_stack_with_the_input_of_its_first_block(self):
        assert entries(TWO, 7) == [
            *(Entry(0, 0, None), Entry(0, 1, 0), Entry(0, 2, 1)),
            *(Entry(1, 0, None), Entry(1, 1, 2), Entry(1, 2, 3), Entry(1, 3, 4)),
        ]

    def test_has_the_output_of_a_block_behind_its_input(self):
        assert [TWO.output_of(block) for block in range(5)] == [1, 2, 4, 5, 6]
        assert [ONE.output_of(block) for block in range(3)] == [1, 2, 3]

    def test_has_entries_that_are_called_by_their_stack(self):
        assert [TWO.label(number, 7) for number in (0, 2, 3, 6)] == ["encoder 0", "encoder 2", "decoder 0", "decoder 3"]

    def test_has_entries_that_are_called_by_their_number_if_there_is_one_stack(self):
        assert [ONE.label(number, 4) for number in range(4)] == ["0", "1", "2", "3"]


class TestAnEntry:
    def test_is_not_known_in_an_array_of_another_length(self):
        assert TWO.entry(0, 6) is None
        assert TWO.label(2, 6) == "2"

    @pytest.mark.parametrize("number", [-1, 7])
    def test_is_not_known_outside_of_the_array(self, number):
        assert TWO.entry(number, 7) is None

    def test_is_found_by_its_stack_and_its_place_in_it(self):
        assert [TWO.number("decoder", index, 7) for index in (0, 3, -1)] == [3, 6, 6]
        assert [TWO.number("decoder", index, 5) for index in (0, -1)] == [2, 4]

    @pytest.mark.parametrize(
        ("name", "index", "told"),
        [
            ("decodr", 0, "no stack 'decodr'; did you mean 'decoder'"),
            ("decoder", 4, "has the layers 0 to 3, -1 is the last; got 4"),
            ("decoder", -5, "got -5"),
        ],
    )
    def test_that_is_not_there_is_refused_with_those_that_are(self, name, index, told):
        with pytest.raises(UnknownLayer, match=told):
            TWO.number(name, index, 7)

    def test_is_asked_for_by_its_number_alone_if_there_is_one_stack(self):
        with pytest.raises(UnknownLayer, match="a single stack, so give the number alone"):
            ONE.number("decoder", 0, 4)

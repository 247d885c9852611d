from collections import UserDict
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

from tsemon.probes.held import MAX_SEQUENCES, HeldBatch


class Wrapping(MutableMapping):
    """Hands out what a dict holds that its copies share."""

    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, key):
        return self.inner[key]

    def __setitem__(self, key, value):
        self.inner[key] = value

    def __delitem__(self, key):
        del self.inner[key]

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Named(tuple):
    def __new__(cls, items, name):
        return super().__new__(cls, items)


def taken(*args):
    held = HeldBatch(nn.Linear(2, 2))
    held.take(held.module, args, {})
    return held


class TestWhatIsTaken:
    @pytest.mark.parametrize("kind", [dict, UserDict, Wrapping])
    def test_leaves_the_users_batch_as_it_is(self, kind):
        x = torch.zeros(2 * MAX_SEQUENCES, 3)
        batch = kind({"x": x})
        taken(batch)
        assert batch["x"] is x

    @pytest.mark.parametrize("kind", [dict, UserDict])
    def test_is_the_beginning_of_a_mapping_of_the_same_kind(self, kind):
        inputs = taken(kind({"x": torch.zeros(2 * MAX_SEQUENCES, 3)})).inputs
        assert isinstance(inputs.args[0], kind)
        assert inputs.args[0]["x"].shape == (MAX_SEQUENCES, 3)

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            (Wrapping({"x": torch.zeros(8, 3)}), "a Wrapping among the model's inputs"),
            (Named([torch.zeros(8, 3)], "name"), "the model's inputs cannot be copied: TypeError"),
            (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), "cannot be copied: RuntimeError"),
        ],
        ids=["mapping", "tuple with a constructor", "nested tensor"],
    )
    def test_is_nothing_and_says_why_where_it_cannot_be_copied(self, value, why):
        held = taken(value)
        assert held.inputs is None
        assert why in held.why_not

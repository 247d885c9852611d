"""A model that does nothing but attend, and what a probe makes of it."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.tsemon.probes.probing import raise_fault
from tsemon.probes import Probe, find_blocks
from tsemon.probes.attention import AttentionProbe

ROWS = set(AttentionProbe.METRICS)
MEASURES = ROWS | {"spectral_gap", "first_value_norm_ratio", "value_top_eigenvalue"}


class OneAttention(nn.Module):
    """A model of one block that does nothing but attend."""

    def __init__(self, attention):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential()])
        self.blocks[0].add_module("attention", attention)

    def forward(self, attention_mask=None):
        return self.blocks[0].attention()


class Attending(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self):
        self.attend()
        return torch.ones(())  # a pass without an output is one that failed


def reading_of_attention(query, key, value, *, rows="all", measures=MEASURES, attention_mask=None, **arguments):
    def attend():
        F.scaled_dot_product_attention(query, key, value, **arguments)

    return reading_of_call(attend, rows=rows, measures=measures, attention_mask=attention_mask)


def parts_of_attention(query, key, value, *, measures, **arguments):
    """The parts of a probe that has seen attention and finished nothing, as on one of several ranks."""
    model = OneAttention(Attending(lambda: F.scaled_dot_product_attention(query, key, value, **arguments)))
    probe = Probe(model, [], find_blocks(model), raise_fault, attention_rows="all")
    probe.arm(measures)
    model()
    return probe._parts


def reading_of_call(attend, **kwargs):
    return probed_call(attend, **kwargs)[0]


def probed_call(attend, *, rows="all", measures=MEASURES, attention_mask=None):
    """`attend`: a module, or what one should call. Returns the reading and the probe."""
    model = OneAttention(attend if isinstance(attend, nn.Module) else Attending(attend))
    probe = Probe(model, [], find_blocks(model), raise_fault, attention_rows=rows)
    probe.arm(measures)
    model(attention_mask=attention_mask)
    reading = probe.collect()
    probe.disarm()
    return reading, probe


def on_host(value):
    return value.finish(value.raw) if hasattr(value, "raw") else value

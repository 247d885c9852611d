"""What the tests of probes share: a probe that raises its faults, and the plainest of hooks to compare with."""

from tsemon.catalogue import CATALOGUE
from tsemon.probes import Probe, find_blocks
from tsemon.probes.sequences import SEQUENCE_METRICS

ALL = {metric.name for metric in CATALOGUE} - {*SEQUENCE_METRICS}
"""Those of sequences need labels."""


def raise_fault(error):
    raise error


def probe_of(model, optimizer=None, on_fault=raise_fault, **options):
    return Probe(model, [] if optimizer is None else [optimizer], find_blocks(model), on_fault, **options)


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def reading_of(model, forward, optimizer=None, measures=ALL, **kwargs):
    probe = probe_of(model, optimizer, **kwargs)
    probe.arm(measures)
    output = forward()
    if optimizer is not None:
        output.float().square().mean().backward()
        optimizer.step()
    reading = probe.collect()
    probe.disarm()
    return reading, probe


def hidden_states(model, forward):
    """The input of each stack and the output of every block, as float64 (B, T, D), by the plainest of hooks."""
    blocks, seen = find_blocks(model), []
    handles = [
        block.module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
        )
        for before, block in zip([None, *blocks], blocks, strict=False)
        if before is None or before.stack != block.stack
    ]
    for block in blocks:
        if block.deescalation is None:
            handles.append(block.module.register_forward_hook(lambda _, args, output: seen.append(output)))
        else:
            handles.append(block.deescalation.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    forward()
    for handle in handles:
        handle.remove()
    states = [x[0] if isinstance(x, tuple) else x for x in seen]
    return [(x.transpose(0, 1) if blocks[0].tokens_first else x).detach().double() for x in states]

"""Builds the model that checkpoints belong to, and runs it to see how near it is to its saturated limit.

Axes: B sequences, T tokens, H heads, D width.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tsemon.errors import TsemonError, reason
from tsemon.measures import positions_attended, saturation
from tsemon.probes import Block, Probe, find_blocks
from tsemon.probes.depth import firsts_of
from tsemon.probes.escalation import CHANGES
from tsemon.probes.saturation import SCALE
from tsemon.probes.states import hidden_state
from tsemon.sample import Sample
from tsemon.tools.scanning.grouping import WRAPPER
from tsemon.tools.scanning.inputs import NUM_SEQUENCES, NUM_TOKENS, Source, random_images, token_ids
from tsemon.tools.scanning.memory import free_bytes
from tsemon.tools.scanning.opening import Weights, read_json
from tsemon.wire import Frame

MODEL_OF_SEQUENCES = "input_ids"
MODEL_OF_IMAGES = "pixel_values"
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""What configs call the most positions that a model has."""

ATTENTIONS = ("encoder_attentions", "attentions", "decoder_attentions")
"""Where outputs of transformers have the weights of attention, an encoder's before its decoder's."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""The files, one of which a tokenizer has."""


MODULES_PER_TENSOR = 20
"""More than any model has, with its activations, dropouts and containers."""
DEPTH = re.compile(r"layers?$")
"""How configs call a number of layers: num_hidden_layers, n_layer, decoder_layers."""
SHARED_LAYERS = 1000
"""More than any model has that share their tensors."""

MEASURED = (
    *("token_diversity", "cosine_similarity", "hfc_lfc", "effective_rank"),
    *("value_output_growth", "value_output_negative_share", "value_output_norm"),
    *(name for names in CHANGES.values() for name in names),
)
"""Whether blocks smooth or sharpen, by their weights and by their states."""

Make = Callable[[Callable[[], nn.Module]], nn.Module]


class CannotRun(Exception):
    """The model cannot be built or run; the text says why."""


class Limit(NamedTuple):
    """What a model does at a checkpoint, and near its limit of infinite weights."""

    saturation: list[float]
    """Of each hidden state, entry 0 being the first block's input: mean over tokens of its cosine in both."""
    positions: list[list[float]]
    """To how many positions a query attends, by block and head, in the model as it is; empty where it does not say."""
    saturated_positions: list[list[float]]
    """The same near the limit, as the paper counts them."""
    frame: Frame
    """`MEASURED` of the model as it is, as `attach` measures them."""
    not_measured: Mapping[str, str]
    """Why some of these are missing."""


class Runner:
    """A model that takes the parameters of one checkpoint after the other."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...], on: str) -> None:
        # Without gradients of parameters, a pass keeps no activations for a backward pass.
        self.model = model.float().eval().requires_grad_(False)
        self.on = on
        """What it is run on, in words."""
        self.blocks: list[Block] = find_blocks(model)
        self._inputs = inputs
        self._faults: list[Exception] = []
        self._probe = Probe(self.model, [], self.blocks, self._faults.append)
        [first, *_] = inputs.values() if isinstance(inputs, Mapping) else inputs
        self.inputs_digest = hashlib.sha256(first.numpy().tobytes()).hexdigest()[:16]

    def near_the_limit(self, weights: Weights) -> Limit:
        """Run the model as it is at the checkpoint, and with all parameters times 1024.

        Raises CannotRun where the parameters are not the model's, or it does not run.
        """
        self._load(weights)
        frame, not_measured = self._measured()
        plain, positions = self._pass()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(SCALE)  # loaded anew for the next checkpoint
        scaled, saturated_positions = self._pass()
        cosines = [
            math.nan if f is None or g is None else saturation(f, g).mean().item()
            for f, g in zip(plain, scaled, strict=True)
        ]
        return Limit(cosines, positions, saturated_positions, frame, not_measured)

    def _measured(self) -> tuple[Frame, Mapping[str, str]]:
        """`MEASURED` in one pass, and why some of them are missing."""
        self._faults.clear()
        self._probe.arm({*MEASURED})
        try:
            with torch.random.fork_rng(devices=[]):
                self._run()  # not under no_grad: a probe looks at training passes alone
            reading = self._probe.collect()
        finally:
            self._probe.disarm()
        sample = Sample(reading, {}, 0, self._faults.append)
        frame = sample.to_frame(0)
        reasons = {name: why for name, why in self._probe.not_measured.items() if name in MEASURED}
        if self._faults:
            missing = {*MEASURED} - reasons.keys() - frame.layers.keys()
            reasons |= dict.fromkeys(sorted(missing), reason(self._faults[0]))
        return frame, reasons | dict(sample.undefined)

    def _load(self, weights: Weights) -> None:
        own = self.model.state_dict()
        given = {WRAPPER.sub("", name): name for name in weights.entries}
        wanted = {name for name, _ in self.model.named_parameters()}  # each tied weight once
        if missing := sorted(wanted - {*given} - _tied_to(given, self.model)):
            raise CannotRun(f"the checkpoint has no {missing[0]}, which {type(self.model).__name__} needs")
        with torch.no_grad():
            for name, tensor in own.items():
                if name not in given:
                    continue
                tensor.copy_(weights.tensor(given[name]))

    def _pass(self) -> tuple[list[Tensor | None], list[list[float]]]:
        """The hidden states (B, T, D) of one pass, and how many positions the heads of each block attended to."""
        states: list[Tensor | None] = [None] * (self.blocks[-1].entry + 1)

        def see(number: int, block: Block, value: Any) -> None:
            x = hidden_state(value, block.width)
            if x is not None and states[number] is None:
                states[number] = (x.transpose(0, 1) if block.tokens_first else x).detach().clone()

        hooks = [
            first.module.register_forward_pre_hook(
                lambda _, args, kwargs, b=first: see(b.entry - 1, b, (args, kwargs)), with_kwargs=True
            )
            for first in firsts_of(self.blocks)
        ]
        # A module that is several layers is called once for each: the n-th call is the n-th of these.
        layers: dict[nn.Module, list[Block]] = {}
        for block in self.blocks:
            layers.setdefault(block.module, []).append(block)
        for module, own in layers.items():
            if (last := own[0].deescalation) is None:
                hooks.append(module.register_forward_hook(functools.partial(_see_next, see, iter(own))))
            else:  # as with the other measures of hidden states, the state before that step
                hooks.append(last.register_forward_pre_hook(functools.partial(_see_next, see, iter(own))))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                output = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        return states, self._positions(output)

    def _run(self) -> Any:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # hooks see nothing of it
            if isinstance(self._inputs, Mapping):
                return self.model(**self._inputs, output_attentions=True)
            return self.model(*self._inputs)
        except Exception as error:
            raise CannotRun(f"{type(self.model).__name__} could not be run on {self.on}: {reason(error)}") from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def _positions(self, output: Any) -> list[list[float]]:
        """By block and head; nothing where the model does not give the attention of every block."""
        of_stacks = [getattr(output, name, None) or () for name in ATTENTIONS]
        weights = [weights_BHTT for stack in of_stacks for weights_BHTT in stack]
        if len(weights) != len(self.blocks) or not all(isinstance(a, Tensor) and a.ndim == 4 for a in weights):
            return []
        return [positions_attended(weights_BHTT).mean(dim=0).tolist() for weights_BHTT in weights]


def _see_next(see: Callable[[int, Block, Any], None], blocks: Iterator[Block], _: nn.Module, *values: Any) -> None:
    """The last of the values is a module's output, or for a hook before it the input."""
    if (block := next(blocks, None)) is not None:
        see(block.entry, block, values[-1])


def _tied_to(given: Mapping[str, str], model: nn.Module) -> set[str]:
    """Parameters whose other names the checkpoint has: safetensors keeps one of them."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {name for own in names.values() if own & given.keys() for name in own}


def build_runner(folders: Sequence[Path], weights: Weights, source: Source, *, room_bytes: int | None = None) -> Runner:
    """For a checkpoint of `tsemon train`, or one with a `config.json` of transformers in one of the folders.

    Raises CannotRun with the reason, one of which is that the model takes more than `room_bytes`, by default what is free.
    """
    make = functools.partial(_build, weights=weights, room_bytes=free_bytes() if room_bytes is None else room_bytes)
    try:
        if isinstance(weights.extra.get("recipe"), Mapping):
            return _ours(weights, source, make)
        for folder in folders:
            if "model_type" in (told := read_json(folder / "config.json")):
                _check_depth(told, len(weights.entries))
                return _of_transformers(folder, source, make)
    except (CannotRun, TsemonError):
        raise
    except Exception as error:  # other libraries raise what they like
        raise CannotRun(f"the model could not be built: {reason(error)}") from error
    raise CannotRun(
        "the model is not known: there is no config.json of transformers beside the checkpoints, and they are not of "
        "tsemon train"
    )


def _build(make: Callable[[], nn.Module], *, weights: Weights, room_bytes: int) -> nn.Module:
    """The model, once it is known to be that of the checkpoint and to have room.

    Sizes are what a file says. So it is built without memory first, and no further than a model of so many tensors goes.
    """
    with torch.device("meta"), _of_so_many_modules(MODULES_PER_TENSOR * len(weights.entries)):
        plan = make()
    _check_shapes(plan, weights)
    if (needed := _needed_bytes(plan)) > room_bytes:
        raise CannotRun(
            f"{type(plan).__name__} takes about {needed / 2**30:.1f} GiB in float32, "
            f"and {room_bytes / 2**30:.1f} GiB are free"
        )
    with torch.random.fork_rng(devices=[]):
        return make()


def _check_depth(told: object, num_tensors: int) -> None:
    """Some configs have a list as long as the model is deep, before there is a model."""
    if isinstance(told, dict):
        for name, value in told.items():
            if DEPTH.search(name) and isinstance(value, int | float) and value > max(num_tensors, SHARED_LAYERS):
                raise CannotRun(f"config.json says {name}: {value:g}, and the checkpoint has {num_tensors} tensors")
            _check_depth(value, num_tensors)


@contextlib.contextmanager
def _of_so_many_modules(most: int) -> Iterator[None]:
    num_modules = 0

    def count(*_: object) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > most:
            raise CannotRun(
                "the model that its config describes has many more parts than the checkpoint has tensors for"
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _check_shapes(model: nn.Module, weights: Weights) -> None:
    shapes = {WRAPPER.sub("", name): entry.shape for name, entry in weights.entries.items()}
    for name, tensor in model.state_dict().items():
        if name in shapes and shapes[name] != tuple(tensor.shape):
            raise CannotRun(f"{name} has the shape {shapes[name]}, the model's is {tuple(tensor.shape)}")


def _needed_bytes(model: nn.Module) -> int:
    """Its parameters, and what it is converted from; its buffers, and what they are made of; its widest output."""
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    of_parameters = sum(p.numel() * (4 if p.dtype == torch.float32 else 4 + p.itemsize) for p in parameters)
    sizes = [buffer.nbytes for buffer in buffers]
    largest = max((buffer.numel() for buffer in buffers), default=0)
    widest = max((p.shape[0] for p in parameters if p.ndim), default=0)
    # States of each block are kept besides: about a tenth.
    return int(1.1 * of_parameters) + sum(sizes) + 12 * largest + 8 * NUM_SEQUENCES * NUM_TOKENS * widest


def _of_transformers(folder: Path, source: Source, make: Make) -> Runner:
    if importlib.util.find_spec("transformers") is None:
        raise CannotRun("building the model needs the package transformers: pip install 'tsemon[scan]'")
    import transformers

    # Code that came with the checkpoint is not run.
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CannotRun(f"config.json names {name!r} as its architecture, which transformers does not have")
    model = make(lambda: kind._from_config(config, attn_implementation="eager"))  # type: ignore[attr-defined]
    text = config.get_text_config()
    if model.main_input_name == MODEL_OF_IMAGES:
        images, on = random_images(config.num_channels, config.image_size)
        return Runner(model, {MODEL_OF_IMAGES: images}, on)
    if model.main_input_name != MODEL_OF_SEQUENCES:
        raise CannotRun(f"{name} takes {model.main_input_name}, and only tokens and images can be given")
    length = min(
        (size for key in LENGTHS if isinstance(size := getattr(text, key, None), int) and size > 1), default=512
    )
    ids_BT, on = token_ids(source, functools.partial(_encode, folder), text.vocab_size, length)
    inputs = {MODEL_OF_SEQUENCES: ids_BT}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_BT
    return Runner(model, inputs, on)


def _encode(folder: Path, text: str) -> list[int]:
    import transformers

    if not any((folder / name).exists() for name in TOKENIZERS):  # transformers makes an empty one then
        raise CannotRun(f"there is no tokenizer in {folder.name}; give token ids (--tokens)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _ours(weights: Weights, source: Source, make: Make) -> Runner:
    from tsemon.lab.train.recipe import Recipe, TextData
    from tsemon.lab.train.training import build_model

    saved, sizes = weights.extra["recipe"], weights.extra.get("sizes")
    if not isinstance(sizes, Mapping):
        raise CannotRun("the checkpoint does not say what sizes its data have; it is of an earlier tsemon train")
    parts = {key: saved[key] for key in ("name", "model", "preset", "sizes")}
    recipe = Recipe(**parts, data=TextData(), batch_size=1, steps=1, learning_rate=1.0)
    model = make(lambda: build_model(recipe, sizes))
    if "image_size" in sizes:
        images, on = random_images(sizes["channels"], sizes["image_size"])
        return Runner(model, (images,), on)
    is_bytes = saved.get("data", {}).get("tokenizer") == "bytes"
    encode = (lambda text: list(text.encode())) if is_bytes else None
    ids_BT, on = token_ids(source, encode, sizes["vocab"], sizes["context"])
    return Runner(model, (ids_BT,), on)


def why_not(error: Exception) -> str:
    """In one sentence."""
    return str(error) if isinstance(error, CannotRun | TsemonError) else reason(error)

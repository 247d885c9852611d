"""Models of Hugging Face transformers, small and random."""

from tests import zoo
from tests.setups.harness import Setup, plain_loop
from tests.setups.matrix import GRADIENTS, HIDDEN_STATES, PARAMETERS, UPDATES

DROPOUT = {
    zoo.bert: {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0},
    zoo.albert: {"hidden_dropout_prob": 0.1},
    zoo.gpt_neox: {"hidden_dropout": 0.1},
    zoo.gpt2: {"attn_pdrop": 0.0},
    zoo.llama: {},
    zoo.qwen2: {},
    zoo.vit: {"hidden_dropout_prob": 0.1},
    zoo.t5: {"dropout_rate": 0.0},
}
"""None in attention, where the fused kernel draws otherwise than the softmax; T5 has one setting for both."""


def own_loss(model, ids_BT):
    return model(input_ids=ids_BT, labels=ids_BT).loss


def image_loss(model, ids_BT):
    """Images and classes made of the tokens."""
    pixels = ids_BT.float().repeat(1, 64).view(4, 3, 16, 16) / 50 - 1
    return model(pixel_values=pixels, labels=ids_BT[:, 0] % 2).loss


def fine_tuning(make, attention, checkpointing=None):
    def make_model():
        model, _ = make(attn_implementation=attention, **DROPOUT[make])
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        return model.train()

    return lambda: plain_loop(make_model, loss_of=image_loss if make is zoo.vit else own_loss)


def hugging_face(name, build, **more):
    return Setup(kind="Hugging Face transformers", name=name, build=build, **more)


NAMES = {
    zoo.bert: "BERT",
    zoo.albert: "ALBERT, one layer shared by all",
    zoo.gpt_neox: "GPT-NeoX, attention and feed-forward side by side",
    zoo.gpt2: "GPT-2",
    zoo.llama: "Llama, grouped queries",
    zoo.qwen2: "Qwen2, grouped queries",
    zoo.vit: "ViT",
    zoo.t5: "T5",
}
WITH_SDPA = (zoo.gpt2, zoo.llama, zoo.t5)
"""Whose fused attention is always tried: plain, with grouped queries, and across to an encoder."""
NUM_BLOCKS = {zoo.t5: 4}
LIKE = {zoo.qwen2: zoo.llama}
LACKS = {
    zoo.albert: dict.fromkeys((PARAMETERS, GRADIENTS, UPDATES), "what several share is counted in the first"),
    zoo.gpt_neox: {HIDDEN_STATES: "the feed-forward part runs beside attention"},
}


def like(make, attention):
    if make in LIKE:
        return f"{NAMES[LIKE[make]]}, {attention}"
    return "" if attention == "eager" or make in WITH_SDPA else f"{NAMES[make]}, eager"


PAIRS = {
    make: [
        hugging_face(
            f"{name}, {attention}",
            fine_tuning(make, attention),
            num_blocks=NUM_BLOCKS.get(make, 3),
            lacks=LACKS.get(make, {}),
            attention_twin=fine_tuning(make, "eager"),
            shows_weights=True,
            like=like(make, attention),
        )
        for attention in ("eager", "sdpa")
    ]
    for make, name in NAMES.items()
}
"""Each model with its attention computed in both ways."""
SETUPS = [
    *(setup for pair in PAIRS.values() for setup in pair),
    *(
        hugging_face(
            f"GPT-2, gradient checkpointing, {kind}",
            fine_tuning(zoo.gpt2, "sdpa", {"use_reentrant": kind == "reentrant"}),
            like="GPT-2, sdpa",
        )
        for kind in ("reentrant", "not reentrant")
    ),
]

"""Models written by hand."""

from tests.setups.harness import Setup, plain_loop
from tests.setups.loops import manual
from tests.setups.matrix import FEED_FORWARD
from tests.setups.models import DEPTH, AroundMultiheadAttention, Tower

POINTED_AT = {
    "blocks": [f"cells.{number}" for number in range(DEPTH)],
    "attention": [f"cells.{number}.mix" for number in range(DEPTH)],
}


def ours():
    from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

    return CausalLanguageModel(CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=32, heads=4, ffn=64))


def by_hand(name, build, **more):
    return Setup(kind="Models written by hand", name=name, build=build, **more)


NO_FEED_FORWARD = {FEED_FORWARD: "no linear layer leads a feed-forward part back"}

SETUPS = [
    by_hand("GPT with scaled_dot_product_attention", plain_loop, attention_twin=lambda: plain_loop(manual)),
    by_hand("GPT with a softmax over scores", lambda: plain_loop(manual)),
    by_hand(
        "blocks around nn.MultiheadAttention",
        lambda: plain_loop(lambda: Tower(AroundMultiheadAttention)),
        lacks=NO_FEED_FORWARD,
    ),
    by_hand("blocks and attention pointed at", lambda: plain_loop(Tower, options=POINTED_AT), lacks=NO_FEED_FORWARD),
    by_hand("tsemon.models", lambda: plain_loop(ours)),
]

"""All set-ups, in the order of the table."""

from tests.setups import compiled, handwritten, hugging_face, loops, optimizers, precision, ranks, torch_modules
from tests.zoo.every import SPECIMENS

KINDS = (loops, precision, optimizers, compiled, handwritten, torch_modules, hugging_face)
SETUPS = [setup for kind in KINDS for setup in kind.SETUPS]
ROWS = [*SETUPS, *ranks.SETUPS, *SPECIMENS]

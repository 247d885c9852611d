"""Pure functions on torch tensors: the quantities of the papers and of the catalogue, batched over leading axes.

Undefined is NaN, never a made-up number. Half precision is widened to float32 first. Nothing here has a gradient. Every
metric of `tsemon.catalogue` that is a quantity of tensors is a function with its name; the others are in
`catalogue.NOT_OF_TENSORS`. Each module lists its public names in `__all__`.
"""

from tsemon.measures.attention import *
from tsemon.measures.changes import *
from tsemon.measures.escalation import *
from tsemon.measures.feedforward import *
from tsemon.measures.grad_norms import *
from tsemon.measures.growth import *
from tsemon.measures.inputs import *
from tsemon.measures.losses import *
from tsemon.measures.mixing import *
from tsemon.measures.outputs import *
from tsemon.measures.parameters import *
from tsemon.measures.saturation import *
from tsemon.measures.states import *
from tsemon.measures.tokens import *
from tsemon.measures.values import *
from tsemon.measures.weights import *

"""All specimens, in the order of the table."""

from tests.zoo import handmade, hugging_face, packages

SPECIMENS = [*hugging_face.SPECIMENS, *packages.SPECIMENS, *handmade.SPECIMENS]

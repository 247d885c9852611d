"""All set-ups, in the order of the table."""

from tests.setups import loops

SETUPS = [*loops.SETUPS]
ROWS = [*SETUPS]

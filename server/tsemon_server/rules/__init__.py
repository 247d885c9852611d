"""What a run's frames mean: rules as data, and the arithmetic that turns one frame after another into alerts.

Values in, values out. The same frames in the same order give the same events, live or replayed.
"""

from tsemon_server.rules.documents import pack
from tsemon_server.rules.rule import Rule

PACK: tuple[Rule, ...] = pack()
"""The built-in rules."""

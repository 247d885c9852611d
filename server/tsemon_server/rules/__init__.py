"""What a run's frames mean: rules as data, and the arithmetic that turns one frame after another into alerts.

Values in, values out. The same frames in the same order give the same events, live or replayed.
"""

from tsemon_server.rules.documents import MAX_CHARACTERS, load, load_file, pack
from tsemon_server.rules.evaluator import Evaluator, Event, RuleStatus
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import Hold, Rule
from tsemon_server.rules.state import State, UnreadableState

PACK: tuple[Rule, ...] = pack()
"""The built-in rules."""

__all__ = [
    "MAX_CHARACTERS",
    "PACK",
    "Evaluator",
    "Event",
    "Hold",
    "Rule",
    "RuleStatus",
    "State",
    "UnreadableState",
    "View",
    "load",
    "load_file",
    "pack",
]

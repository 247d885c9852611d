"""What a run's frames mean: frozen rules, and the arithmetic that turns one frame after another into alerts.

Values in, values out. The same frames in the same order give the same events, live or replayed.
"""

from tsemon_server.rules.engine import Event, Hold, Reading, Rule, Streak, Track, View, advance
from tsemon_server.rules.escalation import Fall, TokenSimilarityEscalation, fall_over_depth

RULES: tuple[Rule, ...] = (TokenSimilarityEscalation(),)
"""The built-in pack."""

__all__ = [
    "RULES",
    "Event",
    "Fall",
    "Hold",
    "Reading",
    "Rule",
    "Streak",
    "TokenSimilarityEscalation",
    "Track",
    "View",
    "advance",
    "fall_over_depth",
]

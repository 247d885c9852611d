"""Which frames stay when a spool is full: half of them, evenly over the whole run."""

from __future__ import annotations

import json


class Thinning:
    """Drops every second frame of each kind.

    Frames of one kind have the same metrics. Slow metrics are in every tenth frame, say: if every second frame went whatever
    it holds, all frames with slow metrics could be among them.
    """

    def __init__(self) -> None:
        self._goes_next: dict[object, bool] = {}
        """Whether the next frame of a kind goes. It lasts over segments: some have a single frame of a kind."""
        self.num_that_may_go = 0
        """Number of frames that do not always stay."""

    def keeps(self, payload: str) -> bool:
        """True if this frame (JSON) stays.

        A frame with `not_measured` always stays, because no later frame repeats the reasons.
        """
        kind: object = None
        try:
            frame = json.loads(payload)
            if frame.get("not_measured") is not None:
                return True
            kind = tuple(tuple(frame.get(part, ())) for part in ("scalars", "layers", "heads"))
            goes = self._goes_next.get(kind, False)
        except (ValueError, TypeError, AttributeError, RecursionError):  # no frame at all; the service tells
            kind, goes = None, self._goes_next.get(None, False)
        self._goes_next[kind] = not goes
        self.num_that_may_go += 1
        return not goes

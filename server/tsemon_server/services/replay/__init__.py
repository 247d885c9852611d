"""Rules over recorded runs: what they would have said, or did say, of trainings that are long over.

The rules are those of the service, by the same code, and a recording gives them what the service would have been sent:
the alerts are the same, step for step.
"""

from tsemon_server.services.replay.many import replay_files
from tsemon_server.services.replay.recording import Attempt, Recording
from tsemon_server.services.replay.replaying import Fired, Replayed, replay
from tsemon_server.services.replay.traces import Trace

__all__ = ["Attempt", "Fired", "Recording", "Replayed", "Trace", "replay", "replay_files"]

"""tsemon looks inside a transformer while it trains.

import tsemon
monitor = tsemon.attach(model, optimizer, run="gpt-82m")
...
monitor.step(loss=loss)   # after the optimizer step
"""

from tsemon.monitor import Monitor, Status, attach
from tsemon.wire import Alert

__version__ = "0.1.0"
__all__ = ["Alert", "Monitor", "Status", "__version__", "attach"]

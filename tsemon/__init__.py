"""tsemon looks inside a transformer while it trains.

import tsemon
monitor = tsemon.attach(model, optimizer, run="gpt-82m")
...
monitor.step(loss=loss)   # after the optimizer step
"""

from typing import TYPE_CHECKING

from tsemon.errors import TsemonError
from tsemon.quantity import Quantity
from tsemon.wire import Alert

__version__ = "0.1.0"
__all__ = ["Alert", "Monitor", "Quantity", "Status", "TsemonError", "__version__", "attach"]

if TYPE_CHECKING:
    from tsemon.attaching import attach
    from tsemon.monitor import Monitor
    from tsemon.status import Status
else:
    # The service and the client import this package for its wire format alone: for them, no torch.
    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tsemon.attaching import attach
        from tsemon.monitor import Monitor
        from tsemon.status import Status

        return {"attach": attach, "Monitor": Monitor, "Status": Status}[name]

    def __dir__():
        return sorted({*globals(), *__all__})

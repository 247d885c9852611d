"""tsemon looks inside a transformer while it trains.

import tsemon
monitor = tsemon.attach(model, optimizer, run="gpt-82m")
...
monitor.step(loss=loss)   # after the optimizer step
"""

import re
from typing import TYPE_CHECKING

from tsemon.errors import MissingPackage, TsemonError
from tsemon.quantity import Quantity
from tsemon.wire import Alert, Incident

__version__ = "0.1.0"
__all__ = ["Alert", "Incident", "Monitor", "Quantity", "Status", "TsemonError", "__version__", "attach"]

if TYPE_CHECKING:
    from tsemon.attaching import attach
    from tsemon.monitor import Monitor
    from tsemon.status import Status
else:
    # The server and the client import this package for its wire format alone, without torch.
    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _check_torch(name)
        from tsemon.attaching import attach
        from tsemon.monitor import Monitor
        from tsemon.status import Status

        return {"attach": attach, "Monitor": Monitor, "Status": Status}[name]

    def __dir__():
        return sorted({*globals(), *__all__})


_OLDEST_TORCH = (2, 6)


def _check_torch(name: str) -> None:
    """Raises MissingPackage if torch is missing or older than pyproject.toml allows."""
    try:
        import torch

        installed = str(torch.__version__)
    except ImportError as error:
        installed = f"none ({error})"
    else:
        version = re.match(r"(\d+)\.(\d+)", installed)
        if version is None or (int(version[1]), int(version[2])) >= _OLDEST_TORCH:
            return
    raise MissingPackage(
        f"tsemon.{name} needs PyTorch {'.'.join(map(str, _OLDEST_TORCH))} or newer, installed is {installed}; install the "
        "build for your device (https://pytorch.org/get-started/locally), or run pip install 'tsemon[torch]'"
    )

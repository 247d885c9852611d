"""What one server is made of, and how the parts meet."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tsemon.errors import InvalidArgument
from tsemon_server.access.keeper import Keeper
from tsemon_server.alerts import ActiveRules, Rulebook, Watch
from tsemon_server.alerts.liveness import LISTEN_S, LOOK_EVERY_S, Liveness
from tsemon_server.events import Feed
from tsemon_server.exposition import Exposition, Meters
from tsemon_server.housekeeping import PAUSE_S, Housekeeping
from tsemon_server.limits.backlog import Backlog
from tsemon_server.limits.memory import give_back_soon
from tsemon_server.limits.values import Limits
from tsemon_server.notify.configuration import load
from tsemon_server.notify.notifier import Notifier
from tsemon_server.rounds import Rounds
from tsemon_server.rules import PACK
from tsemon_server.rules.rule import Rule
from tsemon_server.services.queries.glances import Kept
from tsemon_server.settings import Settings
from tsemon_server.spools import SpoolView
from tsemon_server.store import Store

HELP = Path(__file__).parent / "help"
"""The documentation, if `make site` has built it."""
BEAT_S = 15.0
"""Interval at which a quiet stream of events sends a comment and checks its token again: so proxies leave the connection
open, and the server notices when it is broken."""
LARGE_BODIES_AT_ONCE = 2
"""Number of large bodies that are read at the same time: a body of lists takes ten times its size meanwhile."""
LARGE_BODIES_READ = 4
"""Number of large bodies that are read or wait for their transaction: the others wait as they came, which takes a third of
the memory, and no work is lost if their clients leave."""
LARGE_CHARTS_AT_ONCE = 4
"""Number of heat maps and comparisons that are made at the same time: each takes ten times its size meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one server. Routes get those that their signatures name."""

    limits: Limits
    store: Store
    rulebook: Rulebook
    active: ActiveRules
    watch: Watch
    feed: Feed
    meters: Meters
    exposition: Exposition
    keeper: Keeper | None
    """None if the server needs no tokens."""
    view: SpoolView | None
    """None unless the server shows a folder."""
    at_work: Sequence[Rounds | Notifier]
    """What works on threads of its own between `start` and `stop`."""
    beat_s: float
    backlog: Backlog
    help_folder: Path = HELP
    glances: Kept = field(default_factory=Kept)
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_BODIES_AT_ONCE))
    large_bodies_read: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_BODIES_READ))
    large_charts: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(LARGE_CHARTS_AT_ONCE))

    def start(self) -> None:
        """Begin the work that no request asks for."""
        for work in self.at_work:
            work.start()
        if self.view is not None:
            self.view.start(self.watch)

    def stop(self) -> None:
        """End that work, and close the database."""
        for work in reversed(self.at_work):
            work.stop()
        self.store.close()
        if self.view is not None:
            self.view.close()


def make_parts(
    settings: Settings,
    *,
    rules: Sequence[Rule] | None = None,
    clock: Callable[[], float] = time.time,
    housekeeping_pause_s: float = PAUSE_S,
    look_every_s: float = LOOK_EVERY_S,
    listen_s: float = LISTEN_S,
    beat_s: float = BEAT_S,
    help_folder: Path = HELP,
) -> Parts:
    """The parts on their database, which is migrated first, or on a spool folder; built-in rules if none are given.

    Raises TsemonError if the settings or the database do not allow it.
    """
    if settings.insecure and settings.tokens:
        raise InvalidArgument("expected --tokens or --insecure, got both; with --insecure anyone may do everything")
    needs_tokens = settings.tokens or not (settings.insecure or _is_loopback(settings.host))
    if settings.spool is not None and needs_tokens:
        raise InvalidArgument(
            f"a spool folder is shown without tokens, for it has no database to keep them in, got host {settings.host!r}; "
            "listen on a loopback address such as 127.0.0.1, or let anyone read it with the option --insecure"
        )
    if settings.spool is not None and settings.workers > 1:
        raise InvalidArgument(f"a spool folder is shown by one process, got workers={settings.workers}; leave them out")
    if settings.spool is not None and settings.notify is not None:
        raise InvalidArgument(
            f"a spool folder is shown and nobody is told of it, got notify={settings.notify!r}; leave it out"
        )
    notified = None if settings.notify is None else load(Path(settings.notify))
    view = None if settings.spool is None else SpoolView(settings.spool)
    limits = settings.limits
    store = Store(
        settings.database if view is None else view.database,
        clock,
        max_runs=limits.runs,
        max_project_runs=limits.project_runs,
        max_waiting=limits.commits,
    )
    meters = Meters()
    built_in = PACK if rules is None else rules
    rulebook, active = Rulebook(built_in), ActiveRules(built_in)
    rulebook.register(store)
    watch = Watch(active, on_error=meters.count_rule_error, on_read=meters.count_rules)
    liveness = Liveness(store, active, listen_s=listen_s, clock=clock)
    at_work: list[Rounds | Notifier] = [
        Housekeeping(store, housekeeping_pause_s),
        Rounds(store, "liveness", [liveness.look], look_every_s),
        Rounds(store, "rules", [lambda is_stopped: watch.look(store, clock(), is_stopped)], look_every_s),
    ]
    if notified is not None:
        at_work.append(Notifier(store, notified, clock, count=meters.count_notifications))
    return Parts(
        limits=limits,
        store=store,
        rulebook=rulebook,
        active=active,
        watch=watch,
        feed=Feed(store, limits.listeners, clock, written_in=None if view is None else view.written_in),
        meters=meters,
        exposition=Exposition(store, meters, settings.metrics, clock=clock),
        keeper=Keeper(store, clock) if needs_tokens else None,
        view=view,
        at_work=at_work,
        beat_s=beat_s,
        backlog=Backlog(limits.wait_s, on_rest=give_back_soon),
        help_folder=help_folder,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

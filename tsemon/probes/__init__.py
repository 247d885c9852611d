"""Find blocks, hook them on sampled steps, and reduce what passes by on the device."""

from tsemon.probes.discovery import Block as Block
from tsemon.probes.discovery import find_blocks as find_blocks
from tsemon.probes.held import ProbeBatch as ProbeBatch
from tsemon.probes.held import check_probe_batch as check_probe_batch
from tsemon.probes.hooks import Span as Span
from tsemon.probes.hooks import ThreadState as ThreadState
from tsemon.probes.parameters import why_trains_nothing as why_trains_nothing
from tsemon.probes.probe import Probe as Probe
from tsemon.probes.ranks import Ranks as Ranks
from tsemon.probes.ranks import agree as agree
from tsemon.probes.ranks import arrange as arrange
from tsemon.probes.reading import OnHost as OnHost
from tsemon.probes.reading import Reading as Reading

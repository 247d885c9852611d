"""A sample on its way to a frame."""

import torch

from tsemon.probes import OnHost, Reading, Undefined
from tsemon.sample import Sample


def undefined(values):
    raise Undefined("a test")


class TestTheReasonsForUndefinedMetrics:
    def test_do_not_change_while_the_training_thread_reads_them(self):
        """A dict that grows meanwhile raises "dictionary changed size during iteration"."""
        reading = Reading(
            layers={"hidden_rms": torch.full((2,), torch.nan)},
            scalars={"batch_rank": OnHost(torch.zeros(1), undefined)},
        )
        sample = Sample(reading, {}, 0, on_fault=lambda error: None)
        reader = iter(sample.undefined.items())
        sample.to_frame(1)
        assert list(reader) == []
        assert sample.undefined.keys() == {"hidden_rms", "batch_rank"}

"""How long to search, and whether for the same cases each time."""

from typing import NamedTuple

from hypothesis import HealthCheck, given, settings

QUICK_S, THOROUGH_S = 4, 40
"""Seconds that `make test` and `make test-all` spend on the REST interface."""


class Search(NamedTuple):
    seconds: int
    is_repeatable: bool
    """Draws the same cases each time."""

    @classmethod
    def of(cls, config):
        """As long as the command line says, with new cases each time; else always the same ones."""
        seconds = config.option.fuzz_seconds
        return cls(seconds or (THOROUGH_S if config.option.all else QUICK_S), is_repeatable=seconds is None)

    def run(self, target, cases, num_examples):
        """Give the target `num_examples` of the cases in a thorough search; raise the smallest that it fails on."""
        how = settings(
            max_examples=max(1, num_examples * self.seconds // THOROUGH_S),
            derandomize=self.is_repeatable,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        how(given(cases)(target))()

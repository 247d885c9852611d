"""How long to look for trouble, and the same cases every time unless for longer."""

from hypothesis import HealthCheck, given, settings

USUAL_S = 40
"""What `make test` spends on the REST interface. Longer searches are longer everywhere, and draw other cases each time."""


def search(target, cases, num_examples, seconds=USUAL_S):
    """Give the target as many of the cases; the smallest that it fails on is raised."""
    is_usual = seconds == USUAL_S
    how = settings(
        max_examples=max(1, num_examples * seconds // USUAL_S),
        derandomize=is_usual,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    how(given(cases)(target))()

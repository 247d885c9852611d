"""What the service takes of anyone: sizes, rates, connections, and what may be under way at once.

Beyond a bound something is refused in a sentence, at once, instead of waiting or growing. `docs/limits.md` lists them.
"""

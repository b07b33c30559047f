"""Whether the workarounds of docs/xla.md are still needed: ``make xla``.

Not a part of ``make test``: a newer XLA that needs a workaround no more breaks nothing.
"""

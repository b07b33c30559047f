"""Several methods at once: by a level of ours, or by the configuration of MindSpore's AutoBoost."""

from optax_boost.auto._build import AutoBoost
from optax_boost.auto._build import auto_boost

__all__ = ["AutoBoost", "auto_boost"]

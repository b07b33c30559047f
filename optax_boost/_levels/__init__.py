"""Several methods at once: by a level of ours, or by the configuration of MindSpore's AutoBoost."""

from optax_boost._levels._build import AutoBoost as AutoBoost
from optax_boost._levels._build import auto_boost as auto_boost

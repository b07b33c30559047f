"""Several methods at once: levels and configurations in the schema of MindSpore's AutoBoost."""

from optax_boost.auto._build import AutoBoost
from optax_boost.auto._build import auto_boost
from optax_boost.auto._config import AverageConfig
from optax_boost.auto._config import BoostConfig
from optax_boost.auto._config import BoostSwitches
from optax_boost.auto._config import CommonConfig
from optax_boost.auto._config import DimReduceConfig
from optax_boost.auto._config import GradAccumulationConfig
from optax_boost.auto._config import GradFreezeConfig
from optax_boost.auto._config import LessBNConfig
from optax_boost.auto._levels import Decision

__all__ = [
  "AutoBoost",
  "AverageConfig",
  "BoostConfig",
  "BoostSwitches",
  "CommonConfig",
  "Decision",
  "DimReduceConfig",
  "GradAccumulationConfig",
  "GradFreezeConfig",
  "LessBNConfig",
  "auto_boost",
]

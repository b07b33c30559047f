"""Training accelerators as composable optax transformations.

Flax is not imported here: ``optax_boost.nnx`` and ``optax_boost.linen`` are imported by name.
"""

from optax_boost._accumulation import AccumulateState
from optax_boost._accumulation import accumulate
from optax_boost._base import NoEffectWarning
from optax_boost._centralization import centralize
from optax_boost._freezing import FreezeGroups
from optax_boost._freezing import FreezeSchedule
from optax_boost._freezing import FreezeState
from optax_boost._freezing import continuous_freezing
from optax_boost._freezing import freeze
from optax_boost._freezing import freeze_groups
from optax_boost._freezing import interval_freezing
from optax_boost._freezing import progressive_freezing
from optax_boost._lars import ScaleByLarsTrustRatioState
from optax_boost._lars import lars
from optax_boost._lars import scale_by_lars_trust_ratio
from optax_boost._lars import trust_ratio
from optax_boost._lars import trust_ratio_tree
from optax_boost._precision import DynamicLossScaleState
from optax_boost._precision import MasterWeightsState
from optax_boost._precision import dynamic_loss_scale
from optax_boost._precision import master_weights
from optax_boost._precision import next_loss_scale
from optax_boost._train_step import TrainState
from optax_boost._train_step import TrainStep
from optax_boost._train_step import make_train_step
from optax_boost._tree import path_mask

__version__ = "0.1.0"

__all__ = [
  "AccumulateState",
  "DynamicLossScaleState",
  "FreezeGroups",
  "FreezeSchedule",
  "FreezeState",
  "MasterWeightsState",
  "NoEffectWarning",
  "ScaleByLarsTrustRatioState",
  "TrainState",
  "TrainStep",
  "accumulate",
  "centralize",
  "continuous_freezing",
  "dynamic_loss_scale",
  "freeze",
  "freeze_groups",
  "interval_freezing",
  "lars",
  "make_train_step",
  "master_weights",
  "next_loss_scale",
  "path_mask",
  "progressive_freezing",
  "scale_by_lars_trust_ratio",
  "trust_ratio",
  "trust_ratio_tree",
]

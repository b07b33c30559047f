"""Training accelerators as composable optax transformations.

Flax is not imported here: ``optax_boost.nnx`` and ``optax_boost.linen`` are imported by name.
"""

from optax_boost._accumulation import AccumulateState
from optax_boost._accumulation import accumulate
from optax_boost._adasum import AdasumState
from optax_boost._adasum import adasum
from optax_boost._adasum import adasum_pair
from optax_boost._adasum import adasum_reduce
from optax_boost._auto import AutoBoost
from optax_boost._auto import BoostConfig
from optax_boost._auto import BoostSwitches
from optax_boost._auto import CommonConfig
from optax_boost._auto import Decision
from optax_boost._auto import DimReduceConfig
from optax_boost._auto import GradAccumulationConfig
from optax_boost._auto import GradFreezeConfig
from optax_boost._auto import LessBNConfig
from optax_boost._auto import auto_boost
from optax_boost._base import NoEffectWarning
from optax_boost._centralization import centralize
from optax_boost._freezing import FreezeSchedule
from optax_boost._freezing import FreezeState
from optax_boost._freezing import continuous_freezing
from optax_boost._freezing import freeze
from optax_boost._freezing import interval_freezing
from optax_boost._freezing import progressive_freezing
from optax_boost._groups import LayerGroups
from optax_boost._groups import layer_groups
from optax_boost._lars import ScaleByLarsTrustRatioState
from optax_boost._lars import lars
from optax_boost._lars import scale_by_lars_trust_ratio
from optax_boost._lars import trust_ratio
from optax_boost._lars import trust_ratio_tree
from optax_boost._less_bn import LessBNPlan
from optax_boost._less_bn import LoadReport
from optax_boost._less_bn import NormPlace
from optax_boost._precision import DynamicLossScaleState
from optax_boost._precision import GroupLossScaleState
from optax_boost._precision import MasterWeightsState
from optax_boost._precision import dynamic_loss_scale
from optax_boost._precision import group_loss_scale
from optax_boost._precision import master_weights
from optax_boost._precision import next_group_loss_scale
from optax_boost._precision import next_loss_scale
from optax_boost._precision import scale_by_group
from optax_boost._svrg import SvrgState
from optax_boost._svrg import alpha_svrg_schedule
from optax_boost._svrg import full_gradient
from optax_boost._svrg import refresh_svrg
from optax_boost._svrg import scan_full_gradient
from optax_boost._svrg import svrg
from optax_boost._switch import SwitchAfterState
from optax_boost._switch import switch_after
from optax_boost._train_step import TrainState
from optax_boost._train_step import TrainStep
from optax_boost._train_step import make_train_step
from optax_boost._tree import path_mask

__version__ = "0.1.0"

__all__ = [
  "AccumulateState",
  "AdasumState",
  "AutoBoost",
  "BoostConfig",
  "BoostSwitches",
  "CommonConfig",
  "Decision",
  "DimReduceConfig",
  "DynamicLossScaleState",
  "FreezeSchedule",
  "FreezeState",
  "GradAccumulationConfig",
  "GradFreezeConfig",
  "GroupLossScaleState",
  "LayerGroups",
  "LessBNConfig",
  "LessBNPlan",
  "LoadReport",
  "MasterWeightsState",
  "NoEffectWarning",
  "NormPlace",
  "ScaleByLarsTrustRatioState",
  "SvrgState",
  "SwitchAfterState",
  "TrainState",
  "TrainStep",
  "accumulate",
  "adasum",
  "adasum_pair",
  "adasum_reduce",
  "alpha_svrg_schedule",
  "auto_boost",
  "centralize",
  "continuous_freezing",
  "dynamic_loss_scale",
  "freeze",
  "full_gradient",
  "group_loss_scale",
  "interval_freezing",
  "lars",
  "layer_groups",
  "make_train_step",
  "master_weights",
  "next_group_loss_scale",
  "next_loss_scale",
  "path_mask",
  "progressive_freezing",
  "refresh_svrg",
  "scale_by_group",
  "scale_by_lars_trust_ratio",
  "scan_full_gradient",
  "svrg",
  "switch_after",
  "trust_ratio",
  "trust_ratio_tree",
]

"""The mixed-precision stack: loss scaling, whole or by group, and float32 master weights."""

from optax_boost._precision._group_loss_scale import GroupLossScaleState
from optax_boost._precision._group_loss_scale import group_loss_scale
from optax_boost._precision._group_loss_scale import next_group_loss_scale
from optax_boost._precision._loss_scale import DynamicLossScaleState
from optax_boost._precision._loss_scale import dynamic_loss_scale
from optax_boost._precision._loss_scale import next_loss_scale
from optax_boost._precision._master_weights import MasterWeightsState
from optax_boost._precision._master_weights import master_weights

__all__ = [
  "DynamicLossScaleState",
  "GroupLossScaleState",
  "MasterWeightsState",
  "dynamic_loss_scale",
  "group_loss_scale",
  "master_weights",
  "next_group_loss_scale",
  "next_loss_scale",
]

"""Gradient freezing: schedules and the transformation."""

from optax_boost._wrappers._freezing._schedules import (
  FreezeSchedule as FreezeSchedule,
  continuous_freezing as continuous_freezing,
  fixed_freezing as fixed_freezing,
  gradual_unfreezing as gradual_unfreezing,
  interval_freezing as interval_freezing,
  progressive_freezing as progressive_freezing,
)
from optax_boost._wrappers._freezing._transform import (
  FreezeLayersState as FreezeLayersState,
  freeze_layers as freeze_layers,
)

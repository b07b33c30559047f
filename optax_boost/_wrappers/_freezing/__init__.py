"""Gradient freezing: schedules and the transformation."""

from optax_boost._wrappers._freezing._schedules import FreezeSchedule as FreezeSchedule
from optax_boost._wrappers._freezing._schedules import continuous_freezing as continuous_freezing
from optax_boost._wrappers._freezing._schedules import fixed_freezing as fixed_freezing
from optax_boost._wrappers._freezing._schedules import gradual_unfreezing as gradual_unfreezing
from optax_boost._wrappers._freezing._schedules import interval_freezing as interval_freezing
from optax_boost._wrappers._freezing._schedules import progressive_freezing as progressive_freezing
from optax_boost._wrappers._freezing._transform import FreezeLayersState as FreezeLayersState
from optax_boost._wrappers._freezing._transform import freeze_layers as freeze_layers

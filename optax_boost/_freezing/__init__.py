"""Gradient freezing: schedules, the transformation, and the cut backward pass."""

from optax_boost._freezing._backward import Execution
from optax_boost._freezing._backward import cut_gradient
from optax_boost._freezing._backward import hold_statistics
from optax_boost._freezing._depths import HostDepths
from optax_boost._freezing._schedules import FreezeSchedule
from optax_boost._freezing._schedules import continuous_freezing
from optax_boost._freezing._schedules import interval_freezing
from optax_boost._freezing._schedules import progressive_freezing
from optax_boost._freezing._transform import FreezeState
from optax_boost._freezing._transform import freeze

__all__ = [
  "Execution",
  "FreezeSchedule",
  "FreezeState",
  "HostDepths",
  "continuous_freezing",
  "cut_gradient",
  "freeze",
  "hold_statistics",
  "interval_freezing",
  "progressive_freezing",
]

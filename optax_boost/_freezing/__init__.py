"""Gradient freezing: schedules and the transformation."""

from optax_boost._freezing._schedules import FreezeSchedule
from optax_boost._freezing._schedules import continuous_freezing
from optax_boost._freezing._schedules import interval_freezing
from optax_boost._freezing._schedules import progressive_freezing
from optax_boost._freezing._transform import FreezeState
from optax_boost._freezing._transform import freeze

__all__ = [
  "FreezeSchedule",
  "FreezeState",
  "continuous_freezing",
  "freeze",
  "interval_freezing",
  "progressive_freezing",
]

"""Gradient freezing: on some steps the first layers are not updated.

Modules:

  _schedules      how many groups of layers each step freezes
  _state_layout   the group of each leaf of the optimizer's state, and which leaves are step counts
  _group_counts   a step in which each group of layers has its own step counts
  _freeze_layers  the arguments, the state and the step
"""

from optax_boost._step._freezing._freeze_layers import (
  FreezeLayersState as FreezeLayersState,
  freeze_layers as freeze_layers,
)
from optax_boost._step._freezing._schedules import (
  FreezeSchedule as FreezeSchedule,
  continuous_freezing as continuous_freezing,
  fixed_freezing as fixed_freezing,
  gradual_unfreezing as gradual_unfreezing,
  interval_freezing as interval_freezing,
  progressive_freezing as progressive_freezing,
)

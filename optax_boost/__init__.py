"""Methods and wrappers for optax optimizers as optax transformations, and a train step for them.

Only ``optax_boost.nnx`` and ``optax_boost.linen`` need Flax; they are imported at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from optax_boost._foundation._full_gradient import full_gradient
from optax_boost._foundation._path_mask import path_mask
from optax_boost._foundation._warnings import NoEffectWarning
from optax_boost._levels import AutoBoost, auto_boost
from optax_boost._methods._adasum import adasum, adasum_reduce
from optax_boost._methods._centralization import centralize
from optax_boost._methods._dim_reduce import (
  Subspace,
  dim_reduce,
  fit_subspace,
  record_trajectory,
  refresh_subspace,
  snapshots,
)
from optax_boost._methods._lars import lars, scale_by_lars_trust_ratio
from optax_boost._methods._sgperm import PermutedParams, laperm, permuted_params, sgperm
from optax_boost._methods._svrg import refresh_svrg, svrg
from optax_boost._methods._switch import switch_after
from optax_boost._race import RaceResult, race
from optax_boost._sequences import (
  LengthSchedule,
  cut_sequences,
  length_prices,
  sequence_length_warmup,
)
from optax_boost._step._accumulation import accumulate
from optax_boost._step._apply_gradients import apply_gradients
from optax_boost._step._average_params import (
  average_params,
  averaged_model_state,
  averaged_params,
)
from optax_boost._step._freezing import (
  FreezeSchedule,
  continuous_freezing,
  fixed_freezing,
  freeze_layers,
  gradual_unfreezing,
  interval_freezing,
  progressive_freezing,
)
from optax_boost._step._layerwise_decay import layerwise_decay
from optax_boost._step._precision import dynamic_loss_scale, master_weights, stochastic_rounding
from optax_boost._step._skip_spikes import skip_spikes
from optax_boost._trace._layer_axes import layer_axes
from optax_boost._trace._layer_groups import LayerGroups, LayerSlice, layer_groups
from optax_boost._train_step import TrainState, TrainStep, flatten_metrics, make_train_step

__version__ = "0.1.0"

__all__ = [
  "AutoBoost",
  "FreezeSchedule",
  "LayerGroups",
  "LayerSlice",
  "LengthSchedule",
  "NoEffectWarning",
  "PermutedParams",
  "RaceResult",
  "Subspace",
  "TrainState",
  "TrainStep",
  "accumulate",
  "adasum",
  "adasum_reduce",
  "apply_gradients",
  "auto_boost",
  "average_params",
  "averaged_model_state",
  "averaged_params",
  "centralize",
  "continuous_freezing",
  "cut_sequences",
  "dim_reduce",
  "dynamic_loss_scale",
  "fit_subspace",
  "fixed_freezing",
  "flatten_metrics",
  "freeze_layers",
  "full_gradient",
  "gradual_unfreezing",
  "interval_freezing",
  "laperm",
  "lars",
  "layer_axes",
  "layer_groups",
  "layerwise_decay",
  "length_prices",
  "make_train_step",
  "master_weights",
  "path_mask",
  "permuted_params",
  "progressive_freezing",
  "race",
  "record_trajectory",
  "refresh_subspace",
  "refresh_svrg",
  "scale_by_lars_trust_ratio",
  "sequence_length_warmup",
  "sgperm",
  "skip_spikes",
  "snapshots",
  "stochastic_rounding",
  "svrg",
  "switch_after",
]

# Hidden from type checkers: if they saw `__getattr__`, they would accept any attribute.
if not TYPE_CHECKING:

  def __getattr__(name: str) -> Any:
    """Imports ``nnx`` and ``linen`` when they are first used."""
    if name not in ("linen", "nnx"):
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

"""A train step that hands every method the extra arguments that it needs."""

from optax_boost._train_step._frozen_backward import Execution
from optax_boost._train_step._loss import with_model_state
from optax_boost._train_step._program import Metrics
from optax_boost._train_step._state import TrainState
from optax_boost._train_step._state import canonicalize_state
from optax_boost._train_step._state import check_state
from optax_boost._train_step._state import same_shapes
from optax_boost._train_step._step import TrainStep
from optax_boost._train_step._step import check_options
from optax_boost._train_step._step import make_train_step
from optax_boost._train_step._written import with_written_params

__all__ = [
  "Execution",
  "Metrics",
  "TrainState",
  "TrainStep",
  "canonicalize_state",
  "check_options",
  "check_state",
  "make_train_step",
  "same_shapes",
  "with_model_state",
  "with_written_params",
]

"""A train step that hands every method the extra arguments that it needs."""

from optax_boost._train_step._frozen_backward import Execution
from optax_boost._train_step._loss import with_model_state
from optax_boost._train_step._state import TrainState
from optax_boost._train_step._state import settle
from optax_boost._train_step._step import Metrics
from optax_boost._train_step._step import TrainStep
from optax_boost._train_step._step import check_extra_metrics
from optax_boost._train_step._step import make_train_step

__all__ = [
  "Execution",
  "Metrics",
  "TrainState",
  "TrainStep",
  "check_extra_metrics",
  "make_train_step",
  "settle",
  "with_model_state",
]

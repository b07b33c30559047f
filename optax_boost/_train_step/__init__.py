"""A train step that hands every method the extra arguments that it needs."""

from optax_boost._train_step._depth import DepthReader as DepthReader
from optax_boost._train_step._metrics import flatten_metrics as flatten_metrics
from optax_boost._train_step._program import Program as Program
from optax_boost._train_step._state import TrainState as TrainState
from optax_boost._train_step._state import canonicalize_state as canonicalize_state
from optax_boost._train_step._state import placement as placement
from optax_boost._train_step._step import TrainStep as TrainStep
from optax_boost._train_step._step import make_train_step as make_train_step
from optax_boost._train_step._written import copied_inputs as copied_inputs
from optax_boost._train_step._written import with_written_params as with_written_params

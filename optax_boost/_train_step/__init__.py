"""A train step that passes the extra arguments that every method needs to ``update``.

The train step reads what a state declares (:mod:`optax_boost._form._protocol`), and knows no method
by name. The modules, each of which imports those before it:

  _loss_output             brings what a loss may return into one form
  _traced_loss             the loss as a traced program
  _state_requests          what the optimizer state requests of the loss: a scale, frozen layers
  _objective               the loss and its gradient as functions of the params; complex gradients
  _train_state             the state that training carries
  _state_placement         the devices of the arrays in a train state
  _metrics                 metrics in the form that loggers take
  _frozen_statistics       keeps the statistics of frozen layers as they are
  _written_params          params that a forward pass writes
  _rejected_batch          keeps the statistics as they were if a wrapper leaves a batch out
  _step_computation        the computation of a step, with its extra arguments
  _frozen_depth            reads the number of groups that the next step freezes
  _background_compilation  compiles programs in a thread
  _step                    the jitted step: its options, its calls, its state
"""

from optax_boost._train_step._background_compilation import compile_programs as compile_programs
from optax_boost._train_step._frozen_depth import DepthReader as DepthReader
from optax_boost._train_step._metrics import flatten_metrics as flatten_metrics
from optax_boost._train_step._state_placement import (
  canonicalize_state as canonicalize_state,
  placement as placement,
)
from optax_boost._train_step._step import TrainStep as TrainStep, make_train_step as make_train_step
from optax_boost._train_step._step_computation import StepComputation as StepComputation
from optax_boost._train_step._train_state import TrainState as TrainState
from optax_boost._train_step._written_params import (
  copied_inputs as copied_inputs,
  with_written_params as with_written_params,
)

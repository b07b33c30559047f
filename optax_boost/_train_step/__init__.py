"""A train step that hands every method the extra arguments that it needs.

It knows the protocol and no method by name. The modules, each of which imports those before it:

  _loss_output             what a loss may return, brought into one form
  _traced_loss             the loss as a traced program
  _state_requests          what the optimizer state requests of the loss: a scale, frozen layers
  _objective               the loss and its gradient as functions of the params; complex gradients
  _train_state             the state that training carries
  _state_placement         on which devices the arrays of that state lie
  _metrics                 metrics in the form that loggers take
  _frozen_statistics       the statistics of frozen layers, which are not updated
  _written_params          params that a forward pass writes
  _rejected_batch          what a step keeps as it was if a wrapper leaves its batch out
  _step_computation        the computation of a step: its extra arguments, and when it replays a
                           traced loss
  _frozen_depth            how many groups the next step freezes, read from the device only when it
                           may have changed
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

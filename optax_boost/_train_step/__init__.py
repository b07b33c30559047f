"""A train step that hands every method the extra arguments that it needs.

It knows the protocol and no method by name. The modules, each of which imports those before it:

  _loss         the forms in which a loss returns its value
  _traced_loss  the loss as a traced program
  _requests     requests of the optimizer state to the loss: a scale, frozen layers
  _objective    the loss and its gradient as functions of the params; complex gradients
  _state        the state that training carries
  _metrics      metrics in the form that loggers take
  _statistics   statistics of frozen layers
  _written      params that a forward pass writes
  _verdict      one verdict for everything that a step writes
  _program      the computation of a step: its extra arguments, and when it replays a traced loss
  _depth        how many groups the next step freezes, read from the device only when it may have
                changed
  _step         the jitted step: its options, its calls, its state
"""

from optax_boost._train_step._depth import DepthReader as DepthReader
from optax_boost._train_step._metrics import flatten_metrics as flatten_metrics
from optax_boost._train_step._program import Program as Program
from optax_boost._train_step._state import (
  TrainState as TrainState,
  canonicalize_state as canonicalize_state,
  placement as placement,
)
from optax_boost._train_step._step import TrainStep as TrainStep, make_train_step as make_train_step
from optax_boost._train_step._written import (
  copied_inputs as copied_inputs,
  with_written_params as with_written_params,
)

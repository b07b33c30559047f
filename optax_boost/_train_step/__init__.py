"""The train step, which computes all extra arguments that any method takes in ``tx.update``.

It knows no method by name: the class of a method's state declares what the method needs from a step
(:mod:`optax_boost._form._protocol`). The modules, each of which imports only modules above it:

  _loss_output             brings the outputs of a loss into one form
  _replaced_values         finds the values that the gradient replaces, as in Flax's fp8 layers
  _traced_loss             the loss as a jaxpr, which is traced only if it is needed
  _frozen_layers           the layers that a step freezes
  _objective               the loss and its gradient as functions of the params
  _train_state             ``TrainState``, the state that a step takes and returns
  _state_placement         places the arrays of a train state on devices
  _metrics                 what a step reports, and ``flatten_metrics``: metrics as numbers by name
  _frozen_statistics       keeps the BatchNorm statistics of frozen layers unchanged
  _written_params          finds the params that a forward pass has changed
  _rejected_batch          restores statistics if a wrapper leaves a batch out
  _explanation             says for each leaf whether its gradient exists as a whole
  _backward_update         makes the optimizer's step inside of the backward pass
  _device_gradients        computes loss and gradient on each device, for the device's own sum
  _step_computation        computes a step and its extra arguments; this function is jitted
  _frozen_depth            reads how many groups of layers the next step freezes
  _background_compilation  compiles programs in a thread
  _step                    ``make_train_step``, and the jitted step that it returns
"""

from optax_boost._train_step._background_compilation import (
  Report as Report,
  compile_for as compile_for,
)
from optax_boost._train_step._frozen_depth import DepthReader as DepthReader
from optax_boost._train_step._metrics import flatten_metrics as flatten_metrics
from optax_boost._train_step._replaced_values import REPLACED_VALUES as REPLACED_VALUES
from optax_boost._train_step._state_placement import (
  by_leaf as by_leaf,
  canonicalize_state as canonicalize_state,
  placement as placement,
  put as put,
)
from optax_boost._train_step._step import TrainStep as TrainStep, make_train_step as make_train_step
from optax_boost._train_step._step_computation import (
  UNUSED_FULL_GRADIENT as UNUSED_FULL_GRADIENT,
  StepComputation as StepComputation,
)
from optax_boost._train_step._train_state import TrainState as TrainState
from optax_boost._train_step._written_params import with_written_params as with_written_params

"""The train step for Flax Linen modules."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import optax

from optax_boost import _base
from optax_boost import _train_step
from optax_boost.linen import _adapter


class TrainStep(_train_step.TrainStep):
  """A jitted train step for a Linen module; made by :func:`make_train_step`.

  An :class:`optax_boost.TrainStep` whose :meth:`init` takes variables. The other methods are
  inherited: the call ``state, metrics = step(state, batch, rng)``, where the module's rng streams
  are made from the key `rng`, and :meth:`~optax_boost.TrainStep.refresh` and
  :meth:`~optax_boost.TrainStep.lower`.
  """

  def init(self, variables: Any) -> _train_step.TrainState:  # type: ignore[override]
    """Makes the state to start from.

    Args:
      variables: the output of ``module.init``: the collection ``params``, and others (BatchNorm's
        ``batch_stats``), which are carried as mutable statistics. They are copied.

    Returns:
      A :class:`optax_boost.TrainState`, the other collections in its `model_state`.

    Raises:
      TypeError: `variables` is no mapping.
      ValueError: `variables` has no collection ``params``.
    """
    return super().init(*_adapter.split_variables(variables))


def variables(state: _train_step.TrainState) -> dict[str, Any]:
  """The variables of a state, for ``module.apply``.

  Args:
    state: a state made by this module's train step.

  Returns:
    The params and the other collections.

  Raises:
    TypeError: `state` is no state of a train step for Linen.
  """
  _train_step.check_state(state)
  _adapter.check_model_state(state.model_state)
  return {"params": state.params, **state.model_state}


@_base.with_keywords_of(_train_step.make_train_step, "has_model_state")
def make_train_step(
  loss_fn: Callable[..., Any],
  module: nn.Module,
  tx: optax.GradientTransformation,
  *,
  rngs: Sequence[str] = ("dropout",),
  **options: Any,
) -> TrainStep:
  """Makes a jitted train step for Linen: :func:`optax_boost.make_train_step` for modules.

  Statistics come from the one forward pass at the current params; trial points of a line search see
  the same dropout masks and change nothing.

  A loss reads the module's other variables in ``model.collections``, after it has called the model:
  ``sum(jax.tree.leaves(model.collections["losses"]))`` adds what ``self.sow("losses", ...)`` stored
  in this step. Collections that ``module.init`` did not return are not kept. What ``sow`` combines
  with a `reduce_fn` of its own goes on from step to step, as other variables do.

  Args:
    loss_fn: ``loss_fn(model, batch)``, where ``model(x, ...)`` applies the module; returns the
      scalar loss, or ``(loss, aux)``.
    module: the Linen module.
    tx: the transformation.
    rngs: the names of the module's rng streams.
    **options: those of :func:`optax_boost.make_train_step` but `has_model_state`.

  Returns:
    A :class:`TrainStep`: ``state = step.init(module.init(key, x))``, then
    ``state, metrics = step(state, batch, key)``.

  Raises:
    TypeError: an argument is of the wrong kind; when traced: the loss returns something else.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module = nn.Dense(1)
    >>> def loss_fn(model, batch):
    ...   return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> step = optax_boost.linen.make_train_step(loss_fn, module, optax.lbfgs())
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)[:, None]}
    >>> state = step.init(module.init(jax.random.key(0), batch["x"]))
    >>> for _ in range(8):
    ...   state, metrics = step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
  """
  loss = _adapter.pure_loss(module, loss_fn, rngs, options.get("has_aux", False))
  step = _train_step.make_train_step(loss, tx, has_model_state=True, **options)
  return TrainStep(step.program, options.get("donate", True))

"""The train step for Flax NNX models; needs the extra ``flax``."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from optax_boost import _train_step

# Before flax 0.12.7 it was called `pure`, a name that warns since.
_as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`."""

  def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, donate: bool):
    self._loss_fn = loss_fn
    self._has_aux = has_aux
    self._donate = donate
    self._compiled: dict[Any, _train_step.TrainStep] = {}

  def __call__(self, model: Any, optimizer: nnx.Optimizer, batch: Any) -> _train_step.Metrics:
    """Makes one step, in place.

    The arrays that model and optimizer held before are donated; copy what must outlive the step.

    Args:
      model: the model.
      optimizer: its optimizer; ``optimizer.wrt`` says what is trained.
      batch: a tree of arrays, handed to the loss as it is.

    Returns:
      The metrics: ``loss``, ``aux`` if the loss has any, and what the methods keep in their state.
    """
    graphdef, params, rest = _split(model, optimizer.wrt)
    state = _train_step.TrainState(params, _as_pure(optimizer.opt_state), rest, optimizer.step[...])
    step = self._step_for(graphdef, optimizer)
    state, metrics = step(_train_step.settle(state), batch)
    nnx.update(model, state.params, state.model_state)
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
    nnx.update(optimizer, {"step": state.step})
    return metrics

  def _step_for(self, graphdef: Any, optimizer: nnx.Optimizer) -> _train_step.TrainStep:
    key = (graphdef, optimizer.tx, optimizer.wrt)
    # Hashing the structure of a large model takes a while: once per step is enough.
    found = self._compiled.get(key)
    if found is not None:
      return found

    def loss_fn(params: Any, rest: Any, batch: Any) -> Any:
      # A model of its own for every call: what the forward pass changes in it (statistics, rng
      # counts) is read off afterwards, and a trial point's changes are dropped with it.
      model = nnx.merge(graphdef, params, rest)
      output = self._loss_fn(model, batch)
      _, _, rest = _split(model, optimizer.wrt)
      return _train_step.with_model_state(output, rest, self._has_aux)

    step = _train_step.make_train_step(
      loss_fn, optimizer.tx, has_aux=self._has_aux, has_model_state=True, donate=self._donate
    )
    self._compiled[key] = step
    return step


def _split(model: Any, wrt: Any) -> tuple[Any, Any, Any]:
  """A model's structure, its trainable arrays, and all its other arrays."""
  graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
  return graphdef, _as_pure(params), _as_pure(rest)


def make_train_step(
  loss_fn: Callable[..., Any], *, has_aux: bool = False, donate: bool = True
) -> TrainStep:
  """Makes a jitted train step for NNX that feeds any optax transformation.

  The optimizer's transformation receives `value`, `grad`, `value_fn` and `grad_fn`. Statistics and
  rng counts come from the one forward pass at the current params; trial points of a line search
  see the same dropout masks and change nothing.

  Args:
    loss_fn: ``loss_fn(model, batch)``; returns the scalar loss, or ``(loss, aux)``.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    donate: whether the memory of the old arrays is reused for the new ones.

  Returns:
    A :class:`TrainStep`, called as ``metrics = step(model, optimizer, batch)``.

  Raises:
    TypeError: `loss_fn` is not callable; when traced: it returns something else.

  Examples:
    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, optax, optax_boost.nnx
    >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    >>> def loss_fn(model, batch):
    ...   return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> step = optax_boost.nnx.make_train_step(loss_fn)
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)[:, None]}
    >>> for _ in range(8):
    ...   metrics = step(model, optimizer, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
  """
  if not callable(loss_fn):
    raise TypeError(f"`loss_fn` must be callable; got {loss_fn!r}.")
  return TrainStep(loss_fn, has_aux, donate)

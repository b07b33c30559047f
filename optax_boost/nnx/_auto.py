"""Levels and configurations for Flax NNX models."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import ClassVar

from flax import nnx
import jax
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost.auto import _build
from optax_boost.nnx import _adapter
from optax_boost.nnx import _less_bn
from optax_boost.nnx import _train_step
from optax_boost.nnx._groups import layer_groups


@dataclasses.dataclass(frozen=True)
class AutoBoost(_build.ModelBoost):
  """:class:`optax_boost.auto.AutoBoost` for NNX models; made by :func:`auto_boost`."""

  _less_bn: ClassVar[Any] = _less_bn

  def eval_model(self, model: nnx.Module, trained: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares a fresh model for evaluation.

    Args:
      model: a model of the original architecture; it is not changed.
      trained: the trained model after :meth:`model`, or its checkpoint; see :func:`load_original`.
      *args: the model's inputs, as for a call.
      **kwargs: its keyword arguments.

    Returns:
      A copy with the trained weights, in evaluation mode.
    """
    plan = self.plan(model, *args, **kwargs)
    copy = _less_bn.copy_model(model) if plan is None else _less_bn.less_bn(model, plan=plan)
    _less_bn.load_original(copy, trained)
    copy.eval()
    return copy

  def optimizer(  # type: ignore[override]
    self,
    tx: optax.GradientTransformation,
    model: nnx.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    *args: Any,
    groups: _groups.Groups | None = None,
    decay: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
  ) -> optax.GradientTransformationExtraArgs:
    """Puts the methods that are on around an optimizer, for ``nnx.Optimizer(model, tx, wrt=wrt)``.

    Args:
      tx: the optimizer.
      model: what :meth:`model` returned, for freezing, loss scales and the subspace.
      loss_fn: the loss ``loss_fn(model, *args)``, from whose trace they read the groups.
      *args: the loss's other arguments.
      groups: instead of the three: groups of :func:`layer_groups`, or regular expressions.
      decay: the weight decay, to centralize together with the gradients; see
        :meth:`optax_boost.auto.AutoBoost.optimizer`.
      wrt: the filter of the trained variables.

    Returns:
      The transformation.

    Raises:
      ValueError: a method that needs groups is on without them or a loss, or the loss has too few
        layers; `dim_reduce` is on without a model, or neither finds nor can fit its subspace.
    """
    tx = _base.check_transformation("tx", tx)
    _adapter.check_filter("wrt", wrt)
    if model is not None:
      _adapter.check_model(model)
    if self._needing_groups() and groups is None and loss_fn is not None and model is not None:
      find = functools.partial(layer_groups, wrt=wrt)
      groups = self._read_groups(find, loss_fn, model, *args)
    params = None if model is None else nnx.state(model, wrt)
    return super().optimizer(tx, params, groups=groups, decay=decay)

  def train_step(  # type: ignore[override]
    self, loss_fn: Callable[..., Any], **options: Any
  ) -> _train_step.TrainStep:
    """Makes the train step.

    Args:
      loss_fn: the loss, as for :func:`make_train_step`.
      **options: those of :func:`make_train_step`.

    Returns:
      A :class:`TrainStep`.
    """
    return _train_step.make_train_step(loss_fn, **options)


def auto_boost(
  level: str = "O0",
  config: _build.Config = None,
  *,
  axis_name: Any = None,
  local_axis_name: Any = None,
  adasum_on: str | None = None,
  compose: bool = False,
  key: jax.Array | int = 0,
  reference: bool = False,
  total_steps: int | None = None,
) -> AutoBoost:
  """Chooses and sets up several methods at once: :func:`optax_boost.auto_boost` for NNX.

  Args:
    level: ``"O0"``, ``"O1"`` or ``"O2"``; see :func:`optax_boost.auto_boost`, as for the rest.
    config: a configuration, a dict of its schema, or the path of a JSON file.
    axis_name: the named axis over which `adasum` runs.
    local_axis_name: the named axis over the devices of one server.
    adasum_on: ``"gradients"`` or ``"updates"``.
    compose: whether methods are combined that MindSpore runs alone.
    key: the seed of the freezing schedule, or a key.
    reference: whether MindSpore's defaults hold instead of the level's settings.
    total_steps: the length of the training in steps of the optimizer.

  Returns:
    An :class:`AutoBoost`.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax, optax_boost.nnx
    >>> rngs, x = nnx.Rngs(0), jnp.ones((4, 3))
    >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
    >>> loss_fn = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    >>> config = {"boost": {"mode": "manual", "less_bn": False}}
    >>> boost = optax_boost.nnx.auto_boost("O1", config, total_steps=10)
    >>> model = boost.model(model, x)
    >>> tx = boost.optimizer(optax.sgd(0.1), model, loss_fn, x)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> metrics = boost.train_step(loss_fn)(model, optimizer, x)
    >>> int(metrics["frozen_groups"])
    0
  """
  # All arguments of this function.
  return AutoBoost(**_build.resolve(**locals()))

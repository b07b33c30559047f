"""Levels and configurations for Flax NNX models."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import ClassVar

from flax import nnx
import jax
import optax

from optax_boost import _groups
from optax_boost.auto import _build
from optax_boost.auto import _config
from optax_boost.nnx import _adapter
from optax_boost.nnx import _less_bn
from optax_boost.nnx import _train_step
from optax_boost.nnx._groups import layer_axes
from optax_boost.nnx._groups import layer_groups


@dataclasses.dataclass(frozen=True)
class AutoBoost(_build.AutoBoost):
  """:class:`optax_boost.auto.AutoBoost` for NNX models; made by :func:`auto_boost`."""

  _changes_models: ClassVar[bool] = True

  def model(self, model: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Prepares a model for training; it is traced with its arguments.

    Returns:
      A copy after :func:`optax_boost.nnx.less_bn`, or `model` itself if `less_bn` is off.
    """
    if "less_bn" not in self.on:
      return model
    fn_flag = self.on["less_bn"]["fn_flag"]
    return _less_bn.less_bn(model, *args, fn_flag=fn_flag, **kwargs)

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
    copy = self.model(_less_bn.copy_model(model), *args, **kwargs)
    _less_bn.load_original(copy, trained)
    copy.eval()
    return copy

  def optimizer(  # type: ignore[override]
    self,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any] | None = None,
    model: nnx.Module | None = None,
    *args: Any,
    groups: _groups.Groups | None = None,
    wrt: Any = nnx.Param,
  ) -> optax.GradientTransformationExtraArgs:
    """Puts the methods that are on around an optimizer, for ``nnx.Optimizer(model, tx, wrt=wrt)``.

    As :meth:`optax_boost.auto.AutoBoost.optimizer`, with the `model` of :meth:`model` instead of
    params, ``loss_fn(model, *args)``, and `wrt`, the filter of the trained variables.
    """
    _adapter.check_filter("wrt", wrt)
    params = find_groups = find_layers = None
    if model is not None:
      _adapter.check_model(model)
      params = nnx.state(model, wrt)
      if loss_fn is not None:
        find_groups = functools.partial(layer_groups, loss_fn, model, *args, wrt=wrt)
        find_layers = functools.partial(layer_axes, loss_fn, model, *args, wrt=wrt)
    return self._wrap(tx, params, find_groups, find_layers, groups)

  def train_step(  # type: ignore[override]
    self, loss_fn: Callable[..., Any], **options: Any
  ) -> _train_step.TrainStep:
    """Makes the train step: :func:`make_train_step` with these arguments."""
    return _train_step.make_train_step(loss_fn, **options)


def auto_boost(
  level: str = "O0",
  *,
  total_steps: int | None = None,
  axis_name: Any = None,
  local_axis_name: Any = None,
  config: _config.Config = None,
  key: jax.Array | int = 0,
) -> AutoBoost:
  """Chooses and sets up several methods at once: :func:`optax_boost.auto_boost` for NNX models.

  The arguments are the same.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax, optax_boost.nnx
    >>> rngs, x = nnx.Rngs(0), jnp.ones((4, 3))
    >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
    >>> loss_fn = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    >>> freezing = {"boost": {"mode": "manual", "grad_freeze": True}}
    >>> freezing |= {"grad_freeze": {"param_groups": 2}}
    >>> boost = optax_boost.nnx.auto_boost(config=freezing)
    >>> tx = boost.optimizer(optax.sgd(0.1), loss_fn, model, x)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> metrics = boost.train_step(loss_fn)(model, optimizer, x)
    >>> int(metrics["frozen_groups"])
    0
  """
  axes = {"axis_name": axis_name, "local_axis_name": local_axis_name}
  return _build.build(AutoBoost, level, config, total_steps, key, **axes)

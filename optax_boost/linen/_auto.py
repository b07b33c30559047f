"""Levels and configurations for Flax Linen modules."""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import ClassVar

from flax import linen as nn
import jax
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost.auto import _build
from optax_boost.linen import _adapter
from optax_boost.linen import _less_bn
from optax_boost.linen import _train_step
from optax_boost.linen._groups import layer_groups


@dataclasses.dataclass(frozen=True)
class AutoBoost(_build.ModelBoost):
  """:class:`optax_boost.auto.AutoBoost` for Linen modules; made by :func:`auto_boost`."""

  _less_bn: ClassVar[Any] = _less_bn

  def eval_model(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Prepares a module for evaluation: as :meth:`model`, since a module has no mode."""
    return self.model(model, *args, **kwargs)

  def optimizer(  # type: ignore[override]
    self,
    tx: optax.GradientTransformation,
    module: nn.Module | None = None,
    loss_fn: Callable[..., Any] | None = None,
    variables: Any = None,
    batch: Any = None,
    rng: jax.Array | None = None,
    *,
    groups: _groups.Groups | None = None,
    decay: optax.GradientTransformation | None = None,
  ) -> optax.GradientTransformationExtraArgs:
    """Puts the methods that are on around an optimizer.

    Args:
      tx: the optimizer.
      module: what :meth:`model` returned, for freezing and loss scales.
      loss_fn: the loss ``loss_fn(model, batch)``, from whose trace they read the groups.
      variables: what ``module.init`` returned, for these and the subspace.
      batch: a batch.
      rng: a key, if the module draws.
      groups: instead of all of these: groups of :func:`layer_groups`, or regular expressions.
      decay: the weight decay, to centralize together with the gradients; see
        :meth:`optax_boost.auto.AutoBoost.optimizer`.

    Returns:
      The transformation.

    Raises:
      ValueError: a method that needs groups is on without them or a loss, or the loss has too few
        layers; `dim_reduce` is on without variables, or neither finds nor can fit the subspace.
    """
    tx = _base.check_transformation("tx", tx)
    if module is not None:
      _adapter.check_module(module)
    if variables is not None:
      _adapter.split_variables(variables)
    if rng is not None:
      _base.check_key("rng", rng)
    traceable = not any(value is None for value in (module, loss_fn, variables))
    if self._needing_groups() and groups is None and traceable:
      groups = self._read_groups(layer_groups, module, loss_fn, variables, batch, rng)
    params = None if variables is None else variables["params"]
    return super().optimizer(tx, params, groups=groups, decay=decay)

  def train_step(  # type: ignore[override]
    self,
    module: nn.Module,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    **options: Any,
  ) -> _train_step.TrainStep:
    """Makes the train step.

    Args:
      module: what :meth:`model` returned.
      loss_fn: the loss, as for :func:`make_train_step`.
      tx: what :meth:`optimizer` returned.
      **options: those of :func:`make_train_step`.

    Returns:
      A :class:`TrainStep`.
    """
    return _train_step.make_train_step(module, loss_fn, tx, **options)


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
  """Chooses and sets up several methods at once: :func:`optax_boost.auto_boost` for Linen.

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
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module, x = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), jnp.ones((4, 3))
    >>> loss_fn = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    >>> config = {"boost": {"mode": "manual", "less_bn": False}}
    >>> boost = optax_boost.linen.auto_boost("O1", config, total_steps=10)
    >>> module = boost.model(module, x)
    >>> variables = module.init(jax.random.key(0), x)
    >>> tx = boost.optimizer(optax.sgd(0.1), module, loss_fn, variables, x)
    >>> step = boost.train_step(module, loss_fn, tx)
    >>> state, metrics = step(step.init(variables), x)
    >>> int(metrics["frozen_groups"])
    0
  """
  # All arguments of this function.
  return AutoBoost(**_build.resolve(**locals()))

"""Levels and configurations for Flax Linen modules."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import ClassVar

from flax import linen as nn
import jax
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost.auto import _build
from optax_boost.auto import _config
from optax_boost.linen import _adapter
from optax_boost.linen import _less_bn
from optax_boost.linen import _train_step
from optax_boost.linen._groups import layer_axes
from optax_boost.linen._groups import layer_groups


@dataclasses.dataclass(frozen=True)
class AutoBoost(_build.AutoBoost):
  """:class:`optax_boost.auto.AutoBoost` for Linen modules; made by :func:`auto_boost`."""

  _changes_models: ClassVar[bool] = True

  def model(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Prepares a module for training and evaluation; it is traced with its arguments.

    Its variables may come first, see :func:`optax_boost.linen.less_bn`.

    Returns:
      A module after :func:`optax_boost.linen.less_bn`, or `model` itself if `less_bn` is off.
    """
    if "less_bn" not in self.on:
      return model
    fn_flag = self.on["less_bn"]["fn_flag"]
    return _less_bn.less_bn(model, *args, fn_flag=fn_flag, **kwargs)

  def optimizer(  # type: ignore[override]
    self,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any] | None = None,
    module: nn.Module | None = None,
    variables: Any = None,
    batch: Any = None,
    rng: jax.Array | None = None,
    *,
    rngs: Sequence[str] = ("dropout",),
    groups: _groups.Groups | None = None,
  ) -> optax.GradientTransformationExtraArgs:
    """Puts the methods that are on around an optimizer.

    As :meth:`optax_boost.auto.AutoBoost.optimizer`, with the arguments of :func:`layer_groups`: the
    ``loss_fn(model, batch)``, the `module` of :meth:`model`, the `variables` of ``module.init``, a
    `batch` and, if the module draws, a key `rng` for the streams `rngs`.
    """
    if module is not None:
      _adapter.check_module(module)
    _base.check_key("rng", rng)
    params = find_groups = find_layers = None
    if variables is not None:
      params, _ = _adapter.split_variables(variables)
      if module is not None and loss_fn is not None:
        args = (loss_fn, module, variables, batch, rng)
        find_groups = functools.partial(layer_groups, *args, rngs=rngs)
        find_layers = functools.partial(layer_axes, *args, rngs=rngs)
    return self._wrap(tx, params, find_groups, find_layers, groups)

  def train_step(  # type: ignore[override]
    self,
    loss_fn: Callable[..., Any],
    module: nn.Module,
    tx: optax.GradientTransformation,
    **options: Any,
  ) -> _train_step.TrainStep:
    """Makes the train step: :func:`make_train_step` with the result of :meth:`optimizer`."""
    return _train_step.make_train_step(loss_fn, module, tx, **options)


def auto_boost(
  level: str = "O0",
  *,
  total_steps: int | None = None,
  axis_name: Any = None,
  local_axis_name: Any = None,
  config: _config.Config = None,
  key: jax.Array | int = 0,
) -> AutoBoost:
  """Chooses and sets up several methods at once: :func:`optax_boost.auto_boost` for Linen modules.

  The arguments are the same.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module, x = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), jnp.ones((4, 3))
    >>> loss_fn = lambda model, x: jnp.mean((model(x) - 1) ** 2)
    >>> freezing = {"boost": {"mode": "manual", "grad_freeze": True}}
    >>> freezing |= {"grad_freeze": {"param_groups": 2}}
    >>> boost = optax_boost.linen.auto_boost(config=freezing)
    >>> variables = module.init(jax.random.key(0), x)
    >>> tx = boost.optimizer(optax.sgd(0.1), loss_fn, module, variables, x)
    >>> step = boost.train_step(loss_fn, module, tx)
    >>> state, metrics = step(step.init(variables), x)
    >>> int(metrics["frozen_groups"])
    0
  """
  axes = {"axis_name": axis_name, "local_axis_name": local_axis_name}
  return _build.build(AutoBoost, level, config, total_steps, key, **axes)

"""Levels and configurations for Flax Linen modules."""

import dataclasses
from typing import Any

from flax import linen as nn

from optax_boost import _base
from optax_boost.auto import _build
from optax_boost.linen import _adapter
from optax_boost.linen import _groups
from optax_boost.linen import _less_bn
from optax_boost.linen import _train_step


@_base.with_keywords_of(_build.auto_boost)
def auto_boost(level: str = "O0", **options: Any) -> _build.AutoBoost:
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
  return dataclasses.replace(_build.auto_boost(level, **options), forms=_FORMS)


def _params_of(module: nn.Module, variables: Any, *args: Any, **options: Any) -> Any:
  _adapter.check_module(module)
  return _adapter.split_variables(variables)[0]


_FORMS = _build.Forms(
  _params_of,
  _groups.layer_groups,
  _groups.layer_axes,
  _train_step.make_train_step,
  _less_bn.less_bn,
)

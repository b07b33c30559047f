"""Levels and configurations for Flax NNX models."""

import dataclasses
from typing import Any

from flax import nnx

from optax_boost import _base
from optax_boost.auto import _build
from optax_boost.nnx import _adapter
from optax_boost.nnx import _groups
from optax_boost.nnx import _less_bn
from optax_boost.nnx import _train_step


@_base.with_keywords_of(_build.auto_boost)
def auto_boost(level: str = "O0", **options: Any) -> _build.AutoBoost:
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
  return dataclasses.replace(_build.auto_boost(level, **options), forms=_FORMS)


def _params_of(model: Any, *args: Any, wrt: Any = nnx.Param) -> nnx.State:
  _adapter.check_filter("wrt", wrt)
  _adapter.check_model(model)
  return nnx.state(model, wrt)


_FORMS = _build.Forms(
  _params_of,
  _groups.layer_groups,
  _groups.layer_axes,
  _train_step.make_train_step,
  _less_bn.less_bn,
)

"""Traces losses, tells which of their arguments are data, and marks losses with a model state."""

import jax
import optax

from optax_boost._foundation import _batches, _checks, _tree_checks, _types
from optax_boost._trace import _jaxpr


def trace(
  loss_fn: _types.LossFn, params: optax.Params, args: tuple[_types.Tree, ...]
) -> _types.Jaxpr:
  """Traces ``loss_fn(params, *args)``; raises TypeError for arguments that JAX can't trace."""
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  for name, tree in (("params", params), ("args", args)):
    _tree_checks.check_traceable(name, tree)
  return jax.make_jaxpr(_jaxpr.uncached(loss_fn))(params, *args)


def data_flags(loss_fn: _types.LossFn, args: tuple[_types.Tree, ...]) -> list[bool | None]:
  """Returns, for each leaf of a loss's arguments after the params, True if it is data, else None.

  Model states and ``Constants`` are not data.
  """
  state, data = (args[:1], args[1:]) if is_stateful(loss_fn) else ((), args)
  return [*[None] * len(jax.tree.leaves(state)), *_batches.data_flags(data)]


def stateful(loss_fn: _types.LossFn) -> _types.LossFn:
  """Marks and returns a loss that takes a model state after the params, and returns a new one."""
  loss_fn.is_stateful = True  # type: ignore[attr-defined]
  return loss_fn


def is_stateful(loss_fn: _types.LossFn) -> bool:
  """Returns whether :func:`stateful` marked a loss."""
  return getattr(loss_fn, "is_stateful", False) is True

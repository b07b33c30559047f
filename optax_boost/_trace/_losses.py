"""Loss functions: their traces, which of their arguments are data, and which have a model state."""

import jax
import optax

from optax_boost._foundation import _batches, _checks, _tree_checks, _types
from optax_boost._trace import _jaxpr


def trace(
  loss_fn: _types.LossFn, params: optax.Params, args: tuple[_types.Tree, ...]
) -> _types.Jaxpr:
  """Checks the arguments of ``loss_fn(params, *args)``, and traces it."""
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  for name, tree in (("params", params), ("args", args)):
    _tree_checks.check_traceable(name, tree)
  return jax.make_jaxpr(_jaxpr.uncached(loss_fn))(params, *args)


def data_flags(loss_fn: _types.LossFn, args: tuple[_types.Tree, ...]) -> list[bool | None]:
  """One flag for each leaf of a loss's arguments: True for data, None for a model state."""
  state, data = (args[:1], args[1:]) if is_stateful(loss_fn) else ((), args)
  return [*[None] * len(jax.tree.leaves(state)), *_batches.data_flags(data)]


def stateful(loss_fn: _types.LossFn) -> _types.LossFn:
  """Marks a loss that takes and returns a model state after the params, as Flax models' do."""
  loss_fn.is_stateful = True  # type: ignore[attr-defined]
  return loss_fn


def is_stateful(loss_fn: _types.LossFn) -> bool:
  """Whether :func:`stateful` marked a loss."""
  return getattr(loss_fn, "is_stateful", False) is True

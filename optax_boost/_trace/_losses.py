"""Loss functions: their traces, which of their arguments are data, and which have a model state."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_boost._foundation import _batches, _checks, _tree_checks
from optax_boost._trace import _jaxpr


def trace(loss_fn: Callable[..., Any], params: optax.Params, args: tuple[Any, ...]) -> Any:
  """The program of ``loss_fn(params, *args)``, after checks of the arguments."""
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  for name, tree in (("params", params), ("args", args)):
    _tree_checks.check_traceable(name, tree)
  return jax.make_jaxpr(_jaxpr.uncached(loss_fn))(params, *args)


def data_flags(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> list[bool | None]:
  """True for each leaf of the arguments, None for the state of a loss that carries one."""
  state, data = (args[:1], args[1:]) if is_stateful(loss_fn) else ((), args)
  return [*[None] * len(jax.tree.leaves(state)), *_batches.data_flags(data)]


def stateful(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
  """Marks a loss of a Flax model, ``output, model_state = loss(params, model_state, *args)``."""
  loss_fn.is_stateful = True  # type: ignore[attr-defined]
  return loss_fn


def is_stateful(loss_fn: Callable[..., Any]) -> bool:
  """Whether a loss is marked by :func:`stateful`."""
  return getattr(loss_fn, "is_stateful", False) is True

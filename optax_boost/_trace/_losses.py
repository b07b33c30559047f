"""Calls and traces losses, tells which arguments are data, and marks losses with a model state."""

import functools
from typing import Any

import jax
import optax

from optax_boost._foundation import _checks, _mesh_axes, _tree_checks, _types
from optax_boost._trace import _jaxpr


def call(loss_fn: _types.LossFn, params: optax.Params, *args: _types.Tree) -> Any:
  """Returns ``loss_fn(params, *args)``; explains errors of a loss for other arguments."""
  try:
    return loss_fn(params, *args)
  except Exception as error:
    if str(error) == f"'{type(params).__name__}' object is not callable":
      raise TypeError(
        "`loss_fn(params, batch)` is called with the params, which can't be called like a model;"
        f" got a loss that calls them, {error}. For a loss of a Linen model, write `loss_fn,"
        " params, model_state = optax_boost.linen.split_loss(loss_fn, module, variables)`, or call"
        " `module.apply(params, x)` in the loss; for NNX, `optax_boost.nnx.split_loss(loss_fn,"
        " model)`."
      ) from error
    # A note, since the error may be of the user's own.
    has_model = is_stateful(loss_fn)
    passed = args[1:] if has_model else (params, *args)
    types = jax.tree.map(jax.typeof, passed)  # a class may check the shapes of its leaves
    arguments = [*["the model"] * has_model, *(_checks.shorten(tree, 200) for tree in types)]
    note = (
      f"`loss_fn` was called with {', '.join(arguments)}. A batch reaches the loss as you pass it;"
      " read it by the names or numbers that it has."
    )
    if has_model:
      note += " The model holds its params, and is called as `model(x)`."
    if type(params) is tuple and len(params) == 2:
      note += " If the second of the params is a model state, pass `has_model_state=True`."
    error.add_note(note)
    raise


def trace(
  loss_fn: _types.LossFn,
  params: optax.Params,
  args: tuple[_types.Tree, ...],
  axis_name: _types.AxisName | None = None,
) -> _types.Jaxpr:
  """Traces ``loss_fn(params, *args)`` as on one device along the named axes `axis_name`.

  Raises TypeError for arguments that JAX can't trace, and ValueError if the loss uses another axis.
  """
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  _mesh_axes.check_axis_name("axis_name", axis_name)
  for name, tree in (("params", params), ("args", args)):
    _tree_checks.check_traceable(name, tree)
  _tree_checks.refuse_other_variables(params)
  function = _jaxpr.uncached(functools.partial(call, loss_fn))
  for axis in axis_name if isinstance(axis_name, tuple) else filter(None, [axis_name]):
    function = _with_axis(function, axis)
  try:
    return jax.make_jaxpr(function)(params, *args)
  except NameError as error:
    if "axis name" not in str(error):
      raise
    raise ValueError(
      f"`loss_fn` must be traced with its named axis: {str(error).partition('.')[0]}. Pass the name"
      ' to `layer_axes`, as axis_name="batch", or a tuple of names.'
    ) from error


def _with_axis(function: _types.LossFn, axis: str) -> _types.LossFn:
  """Returns the function under ``vmap`` of one example, which binds the name of an axis."""
  mapped = jax.vmap(lambda args: function(*args), in_axes=None, axis_name=axis, axis_size=1)
  return lambda *args: jax.tree.map(lambda leaf: leaf[0], mapped(args))


def data_flags(loss_fn: _types.LossFn, args: tuple[_types.Tree, ...]) -> list[bool | None]:
  """Returns, for each leaf of a loss's arguments after the params, True if it is data, else None.

  A model state is not data.
  """
  state, data = (args[:1], args[1:]) if is_stateful(loss_fn) else ((), args)
  return [*[None] * len(jax.tree.leaves(state)), *[True] * len(jax.tree.leaves(data))]


def stateful(loss_fn: _types.LossFn) -> _types.LossFn:
  """Marks and returns a loss that takes a model state after the params, and returns a new one."""
  loss_fn.is_stateful = True  # type: ignore[attr-defined]
  return loss_fn


def is_stateful(loss_fn: _types.LossFn) -> bool:
  """Returns whether :func:`stateful` marked a loss."""
  return getattr(loss_fn, "is_stateful", False) is True

"""The loss: the forms in which it returns its value, and its program, which is traced once."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _cut_scans
from optax_boost import _jaxpr
from optax_boost import _layers
from optax_boost import _leaf_uses


class TracedLoss:
  """A loss ``loss_fn(params, *others)`` that is traced once, however often it is called."""

  def __init__(self, loss_fn: Callable[..., Any], params: optax.Params, *others: Any):
    self._loss_fn, self._params, self._others = loss_fn, params, others
    self._programs: dict[Any, tuple[Any, Any]] = {}
    self.program = self._trace(params)[0]

  def __call__(
    self, params: optax.Params, frozen: Sequence[bool | np.ndarray] | None = None
  ) -> Any:
    """The loss's output, with a derivative of zero for frozen leaves and layers of leaves."""
    program, structure = self._trace(params)
    leaves = jax.tree.leaves(params)
    if frozen is not None:
      leaves = list(map(_cut_scans.in_parts, jax.lax.stop_gradient(leaves), leaves, frozen))
    outputs = _cut_scans.run(program, [*leaves, *jax.tree.leaves(self._others)])
    return jax.tree.unflatten(structure, outputs)

  def layers(self) -> _layers.Layers:
    """What the program says of the params; the second argument holds constants."""
    state, *data = (len(jax.tree.leaves(argument)) for argument in self._others)
    return _layers.describe(self.program, self._params, [*[None] * state, *[True] * sum(data)])

  def statistics_axes(self) -> dict[int, int]:
    """The axis of layers of each leaf of the second argument that a scan over layers slices."""
    of_state = len(jax.tree.leaves(self._others[0]))
    before = len(self.program.jaxpr.invars) - len(jax.tree.leaves(self._others))
    uses = _leaf_uses.LeafUses(constants_are_data=False, noise_is_data=False)
    values = [
      (uses.leaf if 0 <= i - before < of_state else uses.value)(variable.aval.shape)
      for i, variable in enumerate(self.program.jaxpr.invars)
    ]
    uses.run(self.program, values)
    return {leaf: axis for scan in uses.scans for leaf, axis in scan.axes}

  def _trace(self, params: optax.Params) -> tuple[Any, Any]:
    """The program for params of these types, and the structure of its output."""
    types = jax.tree.map(jax.typeof, params)
    kind = (jax.tree.structure(types), *jax.tree.leaves(types))
    if kind not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.anew(self._loss_fn), return_shape=True)
      program, shapes = trace(params, *self._others)
      self._programs[kind] = program, jax.tree.structure(shapes)
    return self._programs[kind]


def split_output(output: Any, has_aux: bool, has_model_state: bool) -> tuple[Any, tuple[Any, Any]]:
  """Brings the output of a loss into the form ``loss, (model_state, aux)``."""
  rest_form = "(model_state, aux)" if has_aux else "model_state"
  if not has_model_state:
    rest_form = "aux" if has_aux else ""
  expected = f"(loss, {rest_form})" if rest_form else "loss"
  if rest_form and not _is_pair(output):
    raise TypeError(f"`loss_fn` must return {expected}; got {_kind(output)}.")
  rest: Any = None
  loss, rest = output if rest_form else (output, None)
  if has_aux and has_model_state and not _is_pair(rest):
    raise TypeError(f"`loss_fn` must return {expected}; got (loss, {_kind(rest)}).")
  if not hasattr(loss, "shape") or jnp.shape(loss) != ():
    hint = " If it returns aux as well: `make_train_step` takes has_aux=True, `race` takes no aux."
    raise TypeError(
      f"`loss_fn` must return {expected} with a scalar loss; got {_kind(loss)} as the loss."
      f" Take the mean over the batch.{'' if has_aux else hint}"
    )
  if not jnp.issubdtype(loss.dtype, jnp.floating):
    raise TypeError(
      f"`loss_fn` must return {expected} with a real floating-point loss; got one of dtype"
      f" {loss.dtype}."
    )
  if has_aux and has_model_state:
    return loss, rest
  return loss, ((rest, None) if has_model_state else (None, rest))


def _is_pair(value: Any) -> bool:
  return isinstance(value, tuple) and len(value) == 2


def with_model_state(output: Any, model_state: Any, has_aux: bool) -> Any:
  """Adds the new statistics to the output of a loss that returns none."""
  if not has_aux:
    return output, model_state
  loss, (_, aux) = split_output(output, has_aux, False)
  return loss, (model_state, aux)


def _kind(value: Any) -> str:
  if hasattr(value, "shape"):
    return f"an array of shape {value.shape}"
  if isinstance(value, tuple):
    return f"a tuple of length {len(value)}"
  return f"a {type(value).__name__}"


def bound_arrays(function: Callable[..., Any] | None) -> tuple[Any, dict[str, Any]]:
  """Takes arrays out of a ``functools.partial``, so that jit need not treat them as constants."""
  if not isinstance(function, functools.partial):
    return function, {}
  data: dict[str, Any] = {}
  rest: dict[str, Any] = {}
  for name, value in function.keywords.items():
    leaves = jax.tree.leaves(value)
    arrays = leaves and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    (data if arrays else rest)[name] = jax.tree.map(jnp.asarray, value) if arrays else value
  return functools.partial(function.func, *function.args, **rest), data

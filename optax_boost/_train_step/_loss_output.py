"""Brings the output of a loss into one form, ``loss, (model_state, aux)``."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_boost._foundation import _paths, _types


def split_output(
  output: Any, has_aux: bool, has_model_state: bool
) -> tuple[_types.FloatScalar, tuple[_types.ModelState, Any]]:
  """Returns a loss's output as ``loss, (model_state, aux)``; a missing state or aux is None."""
  beside_loss = "(model_state, aux)" if has_aux else "model_state"
  if not has_model_state:
    beside_loss = "aux" if has_aux else ""
  expected = f"(loss, {beside_loss})" if beside_loss else "loss"
  if beside_loss and not _is_pair(output):
    raise TypeError(f"`loss_fn` must return {expected}; got {_form_of(output)}.")
  second: Any = None
  loss, second = output if beside_loss else (output, None)
  if has_aux and has_model_state and not _is_pair(second):
    raise TypeError(f"`loss_fn` must return {expected}; got (loss, {_form_of(second)}).")
  if not hasattr(loss, "shape") or jnp.shape(loss) != ():
    raise TypeError(
      f"`loss_fn` must return {expected} with a scalar loss; got {_form_of(loss)} as the loss."
      " Take the mean over the batch; `make_train_step` takes has_aux=True, `race` takes no aux."
    )
  if not jnp.issubdtype(loss.dtype, jnp.floating):
    raise TypeError(
      f"`loss_fn` must return {expected} with a real floating-point loss; got one of dtype"
      f" {loss.dtype}."
    )
  if has_aux and has_model_state:
    return loss, second
  return loss, ((second, None) if has_model_state else (None, second))


def check_model_state(before: _types.ModelState, after: _types.ModelState, has_aux: bool) -> None:
  """Raises TypeError unless a loss returns the leaves of its model state, in their array types.

  `before` is the model state that the loss got, and `after` the one that it returned. Containers
  may differ, since Flax returns dicts in place of its frozen dicts.
  """
  required, got = _array_types(before), _array_types(after)
  if required == got:
    return
  key = next(key for key in [*required, *got] if required.get(key) != got.get(key))
  surplus = [key for key in got if key not in required]
  if key in required and key in got:
    difference = f"has {_describe_type(got[key])} as the leaf '{_name(key)}'"
    difference += f", which was {_describe_type(required[key])}"
  elif key in got:
    difference = f"has a leaf '{_name(key)}' too many"
  else:
    difference = f"lacks the leaf '{_name(key)}'"
    difference += f" and has '{_name(surplus[0])}'" if surplus else ""
  form = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
  raise TypeError(
    f"`loss_fn` must return {form} with the arrays of the model state that it gets; the one that it"
    f" returned {difference}. Return all statistics, in the dtypes of those that `step.init` got."
  )


def _array_types(
  tree: _types.ModelState,
) -> dict[_types.KeyPath, tuple[tuple[int, ...], _types.Dtype]]:
  """Returns shape and dtype of each leaf, by path."""
  types = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]
  return dict(zip(_paths.leaf_keys(tree), types, strict=True))


def _name(key: _types.KeyPath) -> str:
  return jax.tree_util.keystr(key, simple=True, separator="/") or "model_state"


def _describe_type(array_type: tuple[tuple[int, ...], _types.Dtype]) -> str:
  shape, dtype = array_type
  return f"{dtype}{list(shape)}"


def _is_pair(value: _types.Unchecked) -> bool:
  return isinstance(value, tuple) and len(value) == 2


def _form_of(value: _types.Unchecked) -> str:
  if hasattr(value, "shape"):
    return f"an array of shape {value.shape}"
  if isinstance(value, tuple):
    return f"a tuple of length {len(value)}"
  return f"a {type(value).__name__}"

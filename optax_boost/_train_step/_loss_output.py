"""Brings the output of a loss into one form, ``loss, (model_state, aux)``."""

from typing import Any

import jax.numpy as jnp

from optax_boost._foundation import _types


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


def _is_pair(value: _types.Unchecked) -> bool:
  return isinstance(value, tuple) and len(value) == 2


def _form_of(value: _types.Unchecked) -> str:
  if hasattr(value, "shape"):
    return f"an array of shape {value.shape}"
  if isinstance(value, tuple):
    return f"a tuple of length {len(value)}"
  return f"a {type(value).__name__}"

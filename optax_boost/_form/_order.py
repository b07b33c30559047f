"""Refuses compositions of wrappers in a wrong order, most of which break one of two rules.

First rule: a wrapper goes around a chain, never into a chain. If a wrapper were a member of a
chain, the other members would act in steps that the wrapper skips, or change updates that the
wrapper has checked.

Second rule: a wrapper that computes something from the new params (an average, masters, rounding)
must see all changes of updates. Layer-wise decay and freezing change the updates of the innermost
transformation that the driver calls. This transformation may be a wrapper of optax. If the wrapper
of optax holds a wrapper that averages params, the average gets the updates before the change, and
so averages other params than the trained ones.

Every transformation calls the ``init`` of the transformations that it holds. So the Python stack in
a wrapper's ``init`` shows all transformations around the wrapper, also of optax and of users.
"""

from collections.abc import Iterator
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _form

# Transformations that return other updates than the transformations that they hold, at least in
# some steps.
_REPLACING = (
  *("laperm", "switch_after", "optax.lookahead"),
  *("optax.mechanize", "optax.sam", "optax.schedule_free"),
)
# On the stack, functions of these packages are not taken for transformations, apart from `init_fn`
# of a transformation of this package.
_PLUMBING = ("jax", "optax_boost")


def check(form: _form.Form, params: optax.Params) -> None:
  """Raises ValueError if a transformation around a wrapper must not hold this wrapper.

  `form` describes the wrapper. The wrapper's ``init`` must call :func:`check` directly, since
  :func:`check` reads the stack. `params` are the params that ``init`` got.
  """
  name, in_chain, is_reached = form.method, True, True
  for holder, held_params in _holders():
    called = holder.method if isinstance(holder, _form.Form) else holder
    if in_chain and called in ("optax.chain", "optax.named_chain"):
      raise ValueError(
        f"`{name}` holds an optimizer and goes around a chain, never into one: it can't see the"
        f" other members of `{called}`. Write `{name}(optax.chain(...), ...)`; for a part of the"
        " leaves, make it a part of `optax.partition`."
      )
    reason = ""
    if isinstance(holder, _form.Form):
      in_chain &= not holder.holds_an_optimizer
      if not is_reached and _changes_what_is_kept(holder, held_params, form):
        reason = "a transformation between the two applies the changed updates"
    if form.keeps == "average" and called in _REPLACING:
      reason = "it replaces the updates that lead to the averaged params"
    if form.frozen_groups and called == "optax.schedule_free":
      reason = "it changes params whose updates are zero"
    if form.keeps == "rounding" and called == "optax.apply_if_finite" and _is_half(params):
      reason = "it needs updates in the dtype of half-precision params, and gets float32"
    if reason:
      raise ValueError(
        f"`{called}` can't hold `{name}`: {reason}. Put `{name}` around the whole:"
        f" `{name}({called}(...))`."
      )
    is_reached &= isinstance(holder, _form.Form) and holder.wrapper is not None


def _changes_what_is_kept(holder: _form.Form, params: optax.Params, form: _form.Form) -> bool:
  """Returns whether `holder` changes updates on which the average or rounding of `form` depends.

  `params` are the params of `holder`, since some holders change only half-precision updates.
  """
  if holder.changes == "half":
    return form.keeps == "rounding" and _is_half(params)
  return holder.changes is not None and form.keeps is not None


def _holders() -> Iterator[tuple[_form.Form | str, optax.Params]]:
  """Yields the transformations around the wrapper whose ``init`` runs, innermost first.

  For a transformation of this package, yields its Form and the params that its ``init`` got. For a
  transformation of another package, yields its name and None. Chains of one member are left out.
  """
  frame: Any = sys._getframe(2)  # of the wrapper's `init`
  our_init = frame.f_code
  while (frame := frame.f_back) is not None:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    if frame.f_code is our_init:
      yield frame.f_locals["form"], frame.f_locals["params"]
    elif package == "optax":
      name = frame.f_code.co_qualname.partition(".")[0]
      members = frame.f_locals.get("init_fns", frame.f_locals.get("transforms", ()))
      if frame.f_code.co_name in ("init", "init_fn") and len(members) != 1:
        yield f"optax.{name}", None
    elif package not in _PLUMBING:
      yield f"{package}.{frame.f_code.co_qualname}", None


def _is_half(params: optax.Params) -> bool:
  """Returns whether any param is a floating-point array of fewer than 32 bits."""

  def is_half(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4

  return any(map(is_half, jax.tree.leaves(params)))

"""The two rules of order, and the few compositions beside them that can't be right.

A wrapper goes around a chain, never into one: the chain's other members would act in steps that the
wrapper does not make, or after it has looked at the result.

What changes updates (layer-wise decay, freezing) does so at the innermost transformation, which the
driver of wrappers calls. If that is a wrapper of optax, the change acts on *its* updates: an
average, masters or rounding inside would follow other params.

A transformation can't know in which one it is held, and optax's keep what they hold in closures.
But each calls the ``init`` of what it holds: so in a wrapper's own ``init`` the Python stack shows
all that is around it, whoever wrote it.
"""

from collections.abc import Iterator
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _form

# What in some steps replaces the updates of the transformation that it holds.
_REPLACING = (
  *("laperm", "switch_after", "optax.lookahead"),
  *("optax.mechanize", "optax.sam", "optax.schedule_free"),
)
# Packages whose functions between two ``init`` hold no transformation.
_PLUMBING = ("jax", "optax_boost")


def check(form: _form.Form, params: optax.Params) -> None:
  """Raises ValueError in a wrapper's ``init`` for an order that gives wrong steps."""
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
        reason = "a wrapper between the two hides the changes of updates"
    if form.keeps == "average" and called in _REPLACING:
      reason = "other updates count than those inside"
    if form.frozen_groups and called == "optax.schedule_free":
      reason = "it moves leaves whose updates are zero"
    if form.keeps == "rounding" and called == "optax.apply_if_finite" and _is_half(params):
      reason = "it needs updates in the dtype of half-precision params, and these are float32"
    if reason:
      raise ValueError(
        f"`{called}` can't hold `{name}`: {reason}. Put `{name}` around the whole:"
        f" `{name}({called}(...))`."
      )
    is_reached &= isinstance(holder, _form.Form) and holder.wrapper is not None


def _changes_what_is_kept(holder: _form.Form, params: optax.Params, form: _form.Form) -> bool:
  if holder.changes == "half":
    return form.keeps == "rounding" and _is_half(params)
  return holder.changes is not None and form.keeps is not None


def _holders() -> Iterator[tuple[_form.Form | str, optax.Params]]:
  """What holds the wrapper whose ``init`` runs, from the inside out: forms, or names of others.

  Each with its params, if known. A chain of one member counts as that member.
  """
  frame: Any = sys._getframe(2)  # of the wrapper's `init`
  own = frame.f_code
  while (frame := frame.f_back) is not None:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    if frame.f_code is own:
      yield frame.f_locals["form"], frame.f_locals["params"]
    elif package == "optax":
      name = frame.f_code.co_qualname.partition(".")[0]
      members = frame.f_locals.get("init_fns", frame.f_locals.get("transforms", ()))
      if frame.f_code.co_name in ("init", "init_fn") and len(members) != 1:
        yield f"optax.{name}", None
    elif package not in _PLUMBING:
      yield f"{package}.{frame.f_code.co_qualname}", None


def _is_half(params: optax.Params) -> bool:
  """Whether a param is kept in fewer than 32 bits; a leaf may be a Python number or a key, too."""

  def is_half(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4

  return any(map(is_half, jax.tree.leaves(params)))

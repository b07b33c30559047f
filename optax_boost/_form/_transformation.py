""":func:`transformation` makes the transformation of each method, :func:`with_form` of each step.

Both convert NumPy arrays to JAX arrays, and make a :class:`~optax_boost._form._form.Form` an
attribute of ``update``.
"""

from collections.abc import Callable
import inspect
from typing import Any

import optax

from optax_boost._form import _form
from optax_boost._foundation import _arrays, _extra_args, _types


def transformation(
  method: str,
  state_type: type,
  init: Callable[[optax.Params], optax.OptState],
  step: Callable[..., tuple[optax.Updates, optax.OptState]],
  *,
  needs_params: bool = False,
  allows_complex: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes the transformation of a method that rewrites gradients, from its `init` and `step`.

  ``step(updates, state, params, **extra_args)`` returns the new updates and the new state. It gets
  the extra arguments that are its keyword-only parameters, or all if it takes ``**extra_args``. The
  other arguments are attributes of the :class:`~optax_boost._form._form.Form`.
  """
  parameters = inspect.signature(step).parameters.values()
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
  form = _form.Form(method, state_type, needs_params, allows_complex)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: _types.ExtraArgs,
  ) -> tuple[optax.Updates, optax.OptState]:
    form.check(updates, state, params)
    accepted = extra_args if takes_all else {k: v for k, v in extra_args.items() if k in named}
    return step(updates, state, params, **accepted)

  return with_form(form, init, update)


def with_form(
  form: _form.Form,
  init: Callable[[optax.Params], optax.OptState],
  step: Callable[
    [optax.Updates, optax.OptState, optax.Params | None, _types.ExtraArgs],
    tuple[optax.Updates, optax.OptState],
  ],
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation with ``update.form = form``; `init` and `step` get JAX arrays."""

  def init_fn(params: optax.Params) -> optax.OptState:
    form.check_leaves(params)
    return init(_arrays.as_jax(params))

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    updates, params = _arrays.as_jax((updates, params))
    return step(updates, state, params, _extra_args.as_jax_gradients(extra_args))

  # The form is an attribute of the function `update`, not of the pair `(init, update)`, since
  # `jax.tree.map` makes a new pair.
  update.form = form  # type: ignore[attr-defined]
  return optax.GradientTransformationExtraArgs(init_fn, update)

"""Makes every transformation: a method by :func:`transformation`, a wrapper by :func:`wrapper`.

Both convert NumPy arrays to JAX arrays, check the arguments of ``update``, and make a
:class:`~optax_boost._form._form.Form` an attribute of ``update``.
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import optax

from optax_boost._form import _driver, _form, _order
from optax_boost._foundation import _arrays, _extra_args, _types


def transformation(
  method: str,
  state_type: type,
  init: Callable[[optax.Params], optax.OptState],
  step: Callable[..., tuple[optax.Updates, optax.OptState]],
  *,
  wraps: tuple[optax.GradientTransformation, ...] = (),
  needs_params: bool = False,
  allows_complex: bool = False,
  **form_options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Makes the transformation of a method that rewrites gradients, from its `init` and `step`.

  ``step(updates, state, params, **extra_args)`` returns the new updates and the new state. It gets
  the extra arguments that are its keyword-only parameters, or all if it takes ``**extra_args``. The
  other arguments are attributes of the :class:`~optax_boost._form._form.Form`.
  """
  parameters = inspect.signature(step).parameters.values()
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
  form = _form.Form(
    method, state_type, wraps, needs_params, allows_complex, extra_args=named, **form_options
  )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: _types.ExtraArgs,
  ) -> tuple[optax.Updates, optax.OptState]:
    form.check(updates, state, params)
    accepted = extra_args if takes_all else {k: v for k, v in extra_args.items() if k in named}
    return step(updates, state, params, **accepted)

  return _with_form(form, init, update)


def wrapper(
  method: str,
  state_type: type,
  holder: _driver.Wrapper,
  **form_options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Makes a wrapper from a `holder`, whose methods decide about the steps of ``holder.inner``.

  `form_options` are attributes of the Form. `state_type` must declare ``outcome=("made",)``.
  """
  if getattr(state_type, "outcome", None) != ("made",):
    raise TypeError(
      f"The state of the wrapper `{method}` must declare the field that tells whether a step was"
      f' made; `{state_type.__name__}` does not. Write `@_protocol.declares(outcome=("made",))`'
      " above the class."
    )

  def rebuild(
    inner: optax.GradientTransformationExtraArgs,
  ) -> optax.GradientTransformationExtraArgs:
    around = dataclasses.replace(holder, inner=inner)  # type: ignore[type-var]
    return wrapper(method, state_type, around, **form_options)

  form = _form.Form(
    method, state_type, (holder.inner,), wrapper=holder, rebuild=rebuild, **form_options
  )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: _types.ExtraArgs,
  ) -> tuple[optax.Updates, optax.OptState]:
    def gradients() -> tuple[optax.Updates, _types.ExtraArgs]:
      return updates, dict(extra_args)

    outcome = _driver.run(tx, _driver.Call(gradients, params), state)
    return outcome.result, outcome.state

  tx = _with_form(form, holder.init, update)
  return tx


def _with_form(
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
    if form.holds_an_optimizer:
      _order.check(form, params)
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

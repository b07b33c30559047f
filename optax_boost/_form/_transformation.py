"""The one way to write a transformation.

:func:`transformation` makes a method that computes updates from gradients, from ``init(params)``
and ``step(updates, state, params)``. :func:`wrapper` makes a wrapper, which decides whether another
transformation makes its step, with which gradients and where the result goes, from ``init``,
``before`` and ``after`` (:mod:`optax_boost._form._driver`). Both convert NumPy arrays to JAX
arrays, check the arguments of ``update``, and attach a :class:`~optax_boost._form._form.Form`.
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import optax

from optax_boost._form import _driver, _form, _order
from optax_boost._foundation import _arrays, _extra_args


def transformation(
  method: str,
  state_type: Any,
  init: Callable[[optax.Params], Any],
  step: Callable[..., tuple[optax.Updates, Any]],
  *,
  wraps: tuple[optax.GradientTransformation, ...] = (),
  needs_params: bool = False,
  allows_complex: bool = False,
  **form_options: Any,
) -> optax.GradientTransformationExtraArgs:
  """A transformation of ``init(params)`` and ``step(updates, state, params, **named)``.

  The step gets those extra arguments that are its keywords: all of them, if it takes ``**extra``.
  `form_options` are further attributes of its form.
  """
  parameters = inspect.signature(step).parameters.values()
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
  form = _form.Form(
    method, state_type, wraps, needs_params, allows_complex, extra_args=named, **form_options
  )

  def update(updates: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Any:
    form.check(updates, state, params)
    accepted = extra_args if takes_all else {k: v for k, v in extra_args.items() if k in named}
    return step(updates, state, params, **accepted)

  return _with_form(form, init, update)


def wrapper(
  method: str,
  state_type: Any,
  holder: _driver.Wrapper,
  **form_options: Any,
) -> optax.GradientTransformationExtraArgs:
  """A transformation that wraps another one: ``holder.inner``, in steps that may not be made.

  `form_options` are further attributes of its form. TypeError if the state's type does not declare
  the field that tells whether a step was made.
  """
  if getattr(state_type, "outcome", None) != ("made",):
    raise TypeError(
      f"The state of the wrapper `{method}` must declare whether a step was made, or what is around"
      f" it takes each of its calls for a step; `{state_type.__name__}` does not. Write"
      f' `@_protocol.declares(outcome=("made",))` above the class.'
    )

  def rebuild(inner: Any) -> optax.GradientTransformationExtraArgs:
    around = dataclasses.replace(holder, inner=inner)  # type: ignore[type-var]
    return wrapper(method, state_type, around, **form_options)

  form = _form.Form(
    method, state_type, (holder.inner,), wrapper=holder, rebuild=rebuild, **form_options
  )

  def update(updates: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Any:
    def gradients() -> tuple[optax.Updates, dict[str, Any]]:
      return updates, dict(extra_args)

    outcome = _driver.run(tx, _driver.Call(gradients, params), state)
    return outcome.result, outcome.state

  tx = _with_form(form, holder.init, update)
  return tx


def _with_form(
  form: _form.Form,
  init: Callable[[optax.Params], Any],
  step: Callable[[Any, Any, Any, dict[str, Any]], tuple[optax.Updates, Any]],
) -> optax.GradientTransformationExtraArgs:
  def init_fn(params: optax.Params) -> Any:
    form.check_leaves(params)
    if form.holds_an_optimizer:
      _order.check(form, params)
    return init(_arrays.as_jax(params))

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    updates, params = _arrays.as_jax((updates, params))
    return step(updates, state, params, _extra_args.as_jax_gradients(extra_args))

  # An attribute of the function survives if the pair is rebuilt, as `jax.tree.map` rebuilds it.
  update.form = form  # type: ignore[attr-defined]
  return optax.GradientTransformationExtraArgs(init_fn, update)

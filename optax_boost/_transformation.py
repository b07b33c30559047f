"""The one way to write a transformation.

:func:`transformation` makes a method that computes updates from gradients, from ``init(params)``
and ``step(updates, state, params)``. :func:`wrapper` makes a method that decides whether another
transformation makes its step, with which gradients and where the result goes, from ``before`` and
``after`` (:mod:`optax_boost._skippable`). Both check the arguments of ``update`` and convert NumPy
arrays to JAX arrays. Both attach a :class:`Form`, which names the transformations inside;
:func:`wrapped_by` reads it, and has a table of optax's wrappers.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import inspect
from typing import Any

import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _orders
from optax_boost import _own_state
from optax_boost import _protocol
from optax_boost import _skippable
from optax_boost import _tree


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """Describes a transformation of this package; the attribute `form` of its ``update``.

  Attributes:
    method: the name of its factory.
    state_type: the type of its state.
    wraps: the transformations that it holds.
    needs_params: whether ``update`` must be called with params.
    allows_complex: whether leaves may be complex.
    allows_pairs: whether the params may be the pair of ``optax.lookahead``.
    extra_args: the extra arguments that its step names.
    frozen_groups: the group of each leaf, if the method's state requests ``frozen_groups``.
    wrapper: the method, if it is a wrapper.
  """

  method: str
  state_type: Any
  wraps: tuple[optax.GradientTransformation, ...] = ()
  needs_params: bool = False
  allows_complex: bool = False
  allows_pairs: bool = False
  extra_args: frozenset[str] = frozenset()
  frozen_groups: _protocol.GroupAssignment | None = None
  wrapper: _skippable.Wrapper | None = None

  def check(self, updates: optax.Updates, state: Any, params: optax.Params | None) -> None:
    """Checks the arguments of ``update``: params that fit the gradients, and the own state."""
    if self.needs_params:
      _base.require_params(params, self.method)
    _base.require_state(state, self.state_type, self.method)
    if params is not None:
      of_gradients = _tree.differentiated(params) if self.allows_pairs else params
      _tree.check_same_tree(updates, of_gradients, self.method)
    self._check_leaves(updates)

  def check_params(self, params: optax.Params) -> None:
    """Checks the argument of ``init``."""
    self._check_leaves(params)

  def _check_leaves(self, tree: Any) -> None:
    check = _tree.check_inexact if self.allows_complex else _tree.check_floating
    check(tree, self.method)


def transformation(
  method: str,
  state_type: Any,
  init: Callable[[optax.Params], Any],
  step: Callable[..., tuple[optax.Updates, Any]],
  *,
  wraps: tuple[optax.GradientTransformation, ...] = (),
  needs_params: bool = False,
  allows_complex: bool = False,
  frozen_groups: _protocol.GroupAssignment | None = None,
) -> optax.GradientTransformationExtraArgs:
  """A transformation of ``init(params)`` and ``step(updates, state, params, **named)``.

  The step gets those extra arguments that are its keywords: all of them, if it takes ``**extra``.
  """
  parameters = inspect.signature(step).parameters.values()
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
  form = Form(
    method,
    state_type,
    wraps,
    needs_params,
    allows_complex,
    extra_args=named,
    frozen_groups=frozen_groups,
  )

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    updates, params = _arrays.as_jax((updates, params))
    extra_args = _arrays.as_jax_gradients(extra_args)
    form.check(updates, state, params)
    accepted = extra_args if takes_all else {k: v for k, v in extra_args.items() if k in named}

    def make() -> tuple[optax.Updates, Any]:
      return step(updates, state, params, **accepted)

    return _own_state.step_with(method, init, (updates, state, params), make)

  return _with_form(form, init, update)


def wrapper(
  method: str,
  state_type: Any,
  init: Callable[[optax.Params], Any],
  wrapper: _skippable.Wrapper,
  *,
  needs_params: bool = False,
  allows_complex: bool = False,
  allows_pairs: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """A transformation that wraps another one: ``wrapper.inner``, in steps that may not be made.

  TypeError if the state's type does not declare the field that tells whether a step was made.
  """
  if getattr(state_type, "outcome", None) != ("made",):
    raise TypeError(
      f"The state of the wrapper `{method}` must declare whether a step was made, or what is around"
      f" it takes each of its calls for a step; `{state_type.__name__}` does not. Write"
      f' `@_protocol.declares(outcome=("made",))` above the class.'
    )
  form = Form(
    method,
    state_type,
    (wrapper.inner,),
    needs_params,
    allows_complex,
    allows_pairs,
    wrapper=wrapper,
  )

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    updates, params = _arrays.as_jax((updates, params))
    extra_args = _arrays.as_jax_gradients(extra_args)

    def gradients() -> tuple[optax.Updates, dict[str, Any]]:
      return updates, dict(extra_args)

    call = _skippable.Call(gradients, params, True, _skippable.UPDATES)

    def make() -> tuple[optax.Updates, Any]:
      outcome = _skippable.run(tx, call, state)
      return outcome.result, outcome.state

    return _own_state.step_with(method, init, (updates, state, params), make)

  tx = _with_form(form, init, update)
  return tx


def _with_form(
  form: Form, init: Callable[[optax.Params], Any], update: Any
) -> optax.GradientTransformationExtraArgs:
  def init_fn(params: optax.Params) -> Any:
    form.check_params(params)
    state = init(_arrays.as_jax(params))
    _orders.check(state)
    return state

  # An attribute of the function survives if the pair is rebuilt, as `jax.tree.map` rebuilds it.
  update.form = form
  return optax.GradientTransformationExtraArgs(init_fn, update)


# By module and name: the variable in which the ``update`` of an optax wrapper keeps what it wraps.
_OPTAX_VARIABLES = {
  "apply_if_finite": ("inner",),
  "chain": ("update_fns",),
  "conditionally_mask": ("inner",),
  "conditionally_transform": ("inner",),
  "lookahead": ("fast_optimizer",),
  "masked": ("inner",),
  "named_chain": ("transforms",),
  "partition": ("transforms",),
  "sam": ("optimizer", "adv_optimizer"),
  "schedule_free": ("base_optimizer",),
  "split_real_and_imaginary": ("inner",),
  "with_extra_args_support": ("tx",),
}


def wrapped_by(update: Callable[..., Any]) -> list[Callable[..., Any]]:
  """The ``update`` functions of what a transformation wraps, by its own ``update``.

  A user's wrapper names them by an attribute `wraps`, a transformation or a tuple of them, of its
  ``update`` or of the object whose method it is. ``jax.jit`` names its function in `__wrapped__`.
  """
  form = _skippable.form_of(update)
  if form is not None:
    return [tx.update for tx in form.wraps]
  owner = getattr(update, "__self__", None)
  if isinstance(owner, optax.MultiSteps):
    return [owner.inner_opt.update]
  for holder in (update, owner):
    wraps = getattr(holder, "wraps", None)
    if wraps is not None:
      wraps = [wraps] if isinstance(wraps, optax.GradientTransformation) else wraps
      return [tx.update for tx in wraps]
  if hasattr(update, "__wrapped__"):
    return [update.__wrapped__]
  name = getattr(update, "__qualname__", "").partition(".")[0]
  from_optax = (getattr(update, "__module__", None) or "").partition(".")[0] == "optax"
  if not (from_optax and name in _OPTAX_VARIABLES):
    return []
  variables = inspect.getclosurevars(update).nonlocals
  return [
    found for variable in _OPTAX_VARIABLES[name] for found in _updates_in(variables.get(variable))
  ]


def _updates_in(value: Any) -> Iterator[Callable[..., Any]]:
  """The ``update`` functions in a variable of optax: a transformation, an update or a container."""
  if isinstance(value, optax.GradientTransformation):
    yield value.update
  elif isinstance(value, dict):
    yield from _updates_in(tuple(value.values()))
  elif isinstance(value, tuple | list):
    for entry in value:
      # `named_chain` keeps pairs of a name and a transformation.
      yield from _updates_in(entry[1] if isinstance(entry, tuple) and _is_named(entry) else entry)
  elif callable(value):
    yield value


def _is_named(entry: tuple[Any, ...]) -> bool:
  return len(entry) == 2 and isinstance(entry[0], str)


def _updates_of(tx: optax.GradientTransformation) -> Iterator[Callable[..., Any]]:
  """The ``update`` functions of a transformation, each before those that it wraps."""
  pending = [tx.update]
  while pending:
    update = pending.pop()
    yield update
    pending += wrapped_by(update)


def forms(tx: optax.GradientTransformation) -> list[Form]:
  """The forms of all transformations of ours in a transformation, each before those inside it."""
  forms_or_none = map(_skippable.form_of, _updates_of(tx))
  return [form for form in forms_or_none if form is not None]


def names_extra_argument(tx: optax.GradientTransformation, name: str) -> bool:
  """Whether a transformation, or one that it wraps, names an extra argument."""
  for update in _updates_of(tx):
    form = _skippable.form_of(update)
    named = inspect.signature(update).parameters if form is None else form.extra_args
    if name in named:
      return True
  return False

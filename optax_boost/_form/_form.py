""":class:`Form`: how a transformation of this package describes itself."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import optax

from optax_boost._form import _protocol, _state_check
from optax_boost._foundation import _tree_checks, _types


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """A description of a transformation of this package: the attribute `form` of its ``update``.

  Attributes:
    method: the name of the function that makes the transformation.
    wraps: the transformations that the transformation holds.
    allows_pairs: whether the params may be the pair of fast and slow params of ``optax.lookahead``.
    extra_args: the names of the extra arguments that the transformation's step takes.
    frozen_groups: the group of layers of each leaf, if the transformation freezes groups.
    wrapper: the :class:`optax_boost._form._driver.Wrapper` that the driver runs, if any.
    changes: when a wrapper's plan changes the updates of the innermost transformation (`change` or
      `cast_updates` of a :class:`~optax_boost._form._driver.StepPlan`): "always", "half" (only if
      the params are in half precision), or never (None).
    keeps: what the transformation computes from the params after a step: their "average", their
      "rounding", or nothing (None).
    held_state_fields: the fields of the state that hold the states of `wraps`.
    rebuild: takes transformations; returns this transformation with them in place of `wraps`.
  """

  method: str
  state_type: type
  wraps: tuple[optax.GradientTransformation, ...] = ()
  needs_params: bool = False
  allows_complex: bool = False
  allows_pairs: bool = False
  extra_args: frozenset[str] = frozenset()
  frozen_groups: _protocol.GroupAssignment | None = None
  wrapper: Any = None
  changes: Literal["always", "half"] | None = None
  keeps: Literal["average", "rounding"] | None = None
  held_state_fields: tuple[str, ...] = ("inner_state",)
  rebuild: Callable[..., optax.GradientTransformationExtraArgs] | None = None

  @property
  def holds_an_optimizer(self) -> bool:
    """Returns whether the transformation holds others, and its state tells if a step was made."""
    return bool(self.wraps) and hasattr(self.state_type, "outcome")

  def check(
    self, updates: optax.Updates, state: optax.OptState, params: optax.Params | None
  ) -> None:
    """Raises unless the arguments of ``update`` fit the transformation and each other."""
    if self.needs_params:
      _tree_checks.require_params(params, self.method)
    _state_check.check_type(state, self.state_type, self.method)
    if params is not None:
      like_gradients = _tree_checks.differentiated_params(params) if self.allows_pairs else params
      _tree_checks.check_same_tree(updates, like_gradients, self.method)
    self.check_leaves(updates)

  def check_leaves(self, tree: _types.Tree) -> None:
    """Raises TypeError for a leaf whose dtype the method does not take."""
    check = _tree_checks.check_inexact if self.allows_complex else _tree_checks.check_floating
    check(tree, self.method)


def wrappers_around(tx: optax.GradientTransformation) -> list[Form]:
  """Returns the Forms of the wrappers around the innermost transformation in `tx`.

  The outermost wrapper comes first.
  """
  form = form_of(tx.update)
  if form is None or form.wrapper is None:
    return []
  return [form, *wrappers_around(form.wrapper.inner)]


def form_of(update: Callable[..., Any]) -> Form | None:
  """Returns the :class:`Form` of an ``update`` of this package; None for any other function.

  ``functools.wraps`` copies the attribute `form` to a user's function around our ``update``, which
  may make other updates. So the result is None for each function with ``__wrapped__``.
  """
  return None if hasattr(update, "__wrapped__") else getattr(update, "form", None)

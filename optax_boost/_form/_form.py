"""What a transformation of this package says of itself."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import optax

from optax_boost._form import _protocol, _state_check
from optax_boost._foundation import _tree_checks, _types


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """Describes a transformation of this package, whose ``update`` has it as attribute `form`.

  Attributes:
    method: the name of its factory.
    state_type: the class of its state.
    wraps: the transformations that it holds.
    needs_params: whether ``update`` must be called with params.
    allows_complex: whether leaves may be complex.
    allows_pairs: whether the params may be the pair of ``optax.lookahead``.
    extra_args: the names of the extra arguments that its step takes.
    frozen_groups: the group of each leaf, if its state requests ``frozen_groups``.
    wrapper: the :class:`optax_boost._form._driver.Wrapper`, if it is one.
    changes: when it changes the updates of the transformation that it holds: "always", or only if
      the params are in "half" precision.
    keeps: what it computes from the params after a step: their "average", or their "rounding".
    held_state_fields: the fields of its state that hold the states of `wraps`.
    rebuild: from transformations in place of `wraps` to the same transformation around them.
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
    """Whether it is a wrapper, whose state tells whether a step was made, and not a method."""
    return bool(self.wraps) and hasattr(self.state_type, "outcome")

  def check(
    self, updates: optax.Updates, state: optax.OptState, params: optax.Params | None
  ) -> None:
    """Raises an error unless the arguments of ``update`` fit the transformation and each other."""
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
  """The wrappers that the driver calls before the innermost transformation, outermost first."""
  form = form_of(tx.update)
  if form is None or form.wrapper is None:
    return []
  return [form, *wrappers_around(form.wrapper.inner)]


def form_of(update: Callable[..., Any]) -> Form | None:
  """The form of an ``update`` function of this package; None for any other function.

  ``functools.wraps`` copies attributes, so a function around ours may carry our form.
  """
  return None if hasattr(update, "__wrapped__") else getattr(update, "form", None)

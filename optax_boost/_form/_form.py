"""What a transformation of this package says of itself."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import optax

from optax_boost._form import _protocol, _state_check
from optax_boost._foundation import _tree_checks


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
    wrapper: what the driver of wrappers calls, if it is one (:mod:`optax_boost._form._driver`).
    changes: whether it changes the updates of the transformation that it holds: "always", or if
      params are in "half" precision.
    keeps: what it makes of the params after a step: their "average", or their "rounding".
    part_states: the fields of its state with the states of the transformations that it holds.
    rebuild: from others in the place of `wraps` to the same transformation around them.
  """

  method: str
  state_type: Any
  wraps: tuple[optax.GradientTransformation, ...] = ()
  needs_params: bool = False
  allows_complex: bool = False
  allows_pairs: bool = False
  extra_args: frozenset[str] = frozenset()
  frozen_groups: _protocol.GroupAssignment | None = None
  wrapper: Any = None
  changes: Literal["always", "half"] | None = None
  keeps: Literal["average", "rounding"] | None = None
  part_states: tuple[str, ...] = ("inner_state",)
  rebuild: Callable[..., optax.GradientTransformationExtraArgs] | None = None

  @property
  def holds_an_optimizer(self) -> bool:
    """Whether it is a wrapper, whose state tells of steps, not a method, which rewrites updates."""
    return bool(self.wraps) and hasattr(self.state_type, "outcome")

  def check(self, updates: optax.Updates, state: Any, params: optax.Params | None) -> None:
    """Checks the arguments of ``update``: params that fit the gradients, the type of the state."""
    if self.needs_params:
      _tree_checks.require_params(params, self.method)
    _state_check.check_type(state, self.state_type, self.method)
    if params is not None:
      like_gradients = _tree_checks.differentiated(params) if self.allows_pairs else params
      _tree_checks.check_same_tree(updates, like_gradients, self.method)
    self.check_leaves(updates)

  def check_leaves(self, tree: Any) -> None:
    """Raises TypeError for leaves whose dtype the method can't take."""
    check = _tree_checks.check_inexact if self.allows_complex else _tree_checks.check_floating
    check(tree, self.method)


def wrappers_around(tx: optax.GradientTransformation) -> list[Form]:
  """The wrappers around an innermost transformation that the driver calls, from the outside in."""
  form = form_of(tx.update)
  if form is None or form.wrapper is None:
    return []
  return [form, *wrappers_around(form.wrapper.inner)]


def form_of(update: Callable[..., Any]) -> Form | None:
  """The form of an ``update`` of ours; None of any other function.

  ``functools.wraps`` copies attributes, so another function around ours may have our form.
  """
  return None if hasattr(update, "__wrapped__") else getattr(update, "form", None)

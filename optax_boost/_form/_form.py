""":class:`Form`: how a transformation of this package describes itself."""

from collections.abc import Callable
import dataclasses
from typing import Any

import optax

from optax_boost._form import _state_check
from optax_boost._foundation import _tree_checks, _types


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """A description of a transformation of this package: the attribute `form` of its ``update``.

  Attributes:
    method: the name of the function that makes the transformation.
    state_type: the class of its state.
    needs_params: whether ``update`` needs the params.
    allows_complex: whether leaves may be complex.
    allows_pairs: whether the params may be the pair of fast and slow params of ``optax.lookahead``.
    step: the step of a wrapper, a ``Step`` of :mod:`optax_boost._step`.
  """

  method: str
  state_type: type
  needs_params: bool = False
  allows_complex: bool = False
  allows_pairs: bool = False
  step: Any = None

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


def form_of(update: Callable[..., Any]) -> Form | None:
  """Returns the :class:`Form` of an ``update`` of this package; None for any other function.

  ``functools.wraps`` copies the attribute `form` to a user's function around our ``update``, which
  may make other updates. So the result is None for each function with ``__wrapped__``.
  """
  return None if hasattr(update, "__wrapped__") else getattr(update, "form", None)

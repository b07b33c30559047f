"""Steps that may be skipped, written once for ``update`` and for steps in place.

A wrapper states whether its step is made, and the step. A :class:`Landing` says where the step
lands: in updates, which someone else adds, or in the params. Updates that leave a conditional must
exist, as zeros if the step was skipped, and state is copied in and out. XLA works in place on a
loop's carry: so a step in place carries params and inner state through a loop of one turn or none,
and a skipped step is free.

Loop inputs are materialized, so gradients are passed as a function, and a wrapper's arithmetic on
them becomes a part of each leaf's work.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _tree

# Makes the gradients and the extra arguments of ``update``.
Gradients: TypeAlias = Callable[[], tuple[optax.Updates, dict[str, Any]]]

# From gradients, state, params and a landing to new params or updates, and the new state.
Step: TypeAlias = Callable[..., tuple[Any, Any]]


def transformation(
  init: Callable[[optax.Params], Any], step: Step
) -> optax.GradientTransformationExtraArgs:
  """A transformation whose ``update`` and steps in place are one function, `step`."""

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    return step(lambda: (updates, dict(extra_args)), state, params, UPDATES)

  # An attribute of the function: it stays if the pair of functions is copied, as trees are.
  update.step = step  # type: ignore[attr-defined]
  return _arrays.transformation(init, update)


def is_in_place(tx: optax.GradientTransformation) -> bool:
  """Whether a transformation makes its steps in place."""
  return hasattr(tx.update, "step")


@dataclasses.dataclass(frozen=True)
class Landing:
  """Where a step lands."""

  in_params: bool  # in new params; else in updates
  # Whether a loop skips it, in place; else a conditional, which can be differentiated in reverse.
  in_place: bool
  # Whether entries of the params that would no longer be finite stay as they were.
  guard: bool = False

  def step(
    self, tx: optax.GradientTransformation, gradients: Gradients, state: Any, params: Any
  ) -> tuple[Any, Any]:
    """Makes a step of a transformation."""
    if is_in_place(tx):
      return tx.update.step(gradients, state, params, self)  # type: ignore[attr-defined]
    grads, extra = gradients()
    updates, state = tx.update(grads, state, params, **extra)
    if not self.in_params:
      return (_keep_finite_updates(updates, params) if self.guard else updates), state
    new = add_updates(params, updates, state)
    return (keep_finite(new, params) if self.guard else new), state

  def step_if(
    self, condition: jax.Array, step: Callable[[Any, Any], tuple[Any, Any]], params: Any, state: Any
  ) -> tuple[jax.Array, Any, Any]:
    """Makes ``step(params, state)`` under a condition; returns whether it was made, first."""
    if self.in_params:
      made, params, state = self.change_if(condition, step, params, state)
      return made, params, state
    updates, state = _conditional.update_if(condition, functools.partial(step, params), state)
    return condition, updates, state

  def change_if(
    self, condition: jax.Array, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> tuple[Any, ...]:
    """A function's results on its arguments under a condition, or the arguments.

    Whether it was called comes first: a value that depends on it is computed after the call.
    """
    if self.in_place:
      return once_if(condition, function, *carry)

    def called(*carry: Any) -> tuple[Any, ...]:
      return tuple(_conditional.cast_like(tuple(function(*carry)), carry))

    return condition, *_conditional.cond(condition, called, lambda *carry: carry, *carry)


UPDATES = Landing(in_params=False, in_place=False)
PARAMS = Landing(in_params=True, in_place=True)


def apply_gradients(
  tx: optax.GradientTransformation,
  grads: optax.Updates,
  opt_state: optax.OptState,
  params: optax.Params,
  **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
  """Makes a step: ``tx.update`` and ``optax.apply_updates`` in one, and in place.

  The same arithmetic as ``tx.update``. If :func:`accumulate`, :func:`dynamic_loss_scale`,
  :func:`master_weights`, :func:`stochastic_rounding` or :func:`average_params` is outermost, or
  directly inside one of these, a step that is skipped touches neither params nor inner state, and
  needs no memory for updates. :func:`make_train_step` makes its steps so. Call it under ``jax.jit``
  with params and state donated, in this order: JAX matches donated inputs to outputs by shape, in
  order, and XLA copies if the two are not the same array.

  The params of :func:`sgperm` and :func:`laperm` are exactly the permuted ones;
  ``optax.apply_updates`` may be one rounding off.

  Args:
    tx: the transformation, any of optax's or ours.
    grads: the gradients, a tree of the params' structure and shapes.
    opt_state: the state of `tx`.
    params: the params.
    **extra_args: of ``tx.update``, such as `value` or the `weight` of :func:`accumulate`.

  Returns:
    The new params and the new state.

  Examples:
    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def train(params, opt_state, batch):
    ...   grads = jax.grad(lambda params: jnp.sum(params * batch))(params)
    ...   return optax_boost.apply_gradients(tx, grads, opt_state, params)
    >>> params = jnp.zeros(2)
    >>> opt_state = tx.init(params)
    >>> for batch in (jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0])):
    ...   params, opt_state = train(params, opt_state, batch)
    ...   print(params.tolist())
    [0.0, 0.0]
    [-2.0, -4.0]

  .. note::
    Reverse-mode differentiation through such a step needs ``tx.update``.
  """
  tx = _base.check_transformation("tx", tx)
  _tree.check_same_tree(grads, _tree.differentiated(params), "apply_gradients")
  grads, params = _arrays.as_jax((grads, params))
  extra_args = _arrays.as_jax_gradients(extra_args)
  return PARAMS.step(tx, lambda: (grads, dict(extra_args)), opt_state, params)


def add_updates(
  params: optax.Params, updates: optax.Updates, state: optax.OptState
) -> optax.Params:
  """``optax.apply_updates``, without its rounding where a state holds the exact new params."""

  def reach(total: Any, param: Any, update: Any, exact: Any) -> Any:
    if _tree.is_masked(exact) or jnp.shape(exact) != jnp.shape(total):
      return total
    exact = _on_device(exact).astype(total.dtype)
    wide = jnp.promote_types(total.dtype, update.dtype)
    step = exact.astype(wide) - param.astype(wide)
    # Relative to the step: whatever else changes an update, as a frozen leaf's zero, is added.
    leads = jnp.isclose(update.astype(wide), step, jnp.finfo(update.dtype).eps, 0, equal_nan=True)
    return jnp.where(leads, exact, total)

  new = optax.apply_updates(params, updates)
  structure: Any = jax.tree.structure(params, is_leaf=_tree.is_masked)
  for node in _protocol.declaring_states(state, "exact"):
    for name in _protocol.declared(node, "exact"):
      trees = (new, params, updates, getattr(node, name))
      leaves = [_masking.leaves_like(tree, params) for tree in trees]
      fitting = [of_tree for of_tree in leaves if of_tree is not None]
      if len(fitting) == len(trees):
        new = jax.tree.unflatten(structure, list(map(reach, *fitting)))
  return new


def _on_device(x: jax.Array) -> jax.Array:
  """An array in the devices' own memory; a state may be kept in their host's."""
  on_host = getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
  return jax.device_put(x, jax.memory.Space.Device) if on_host else x


def keep_finite(new: optax.Params, old: optax.Params) -> optax.Params:
  """The new params without the entries that would no longer be finite."""
  return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(n), n, o), new, old)


def _keep_finite_updates(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
  """The updates with zeros for the entries of the params that would no longer be finite."""
  new = updates if params is None else optax.apply_updates(params, updates)
  return jax.tree.map(lambda u, n: jnp.where(jnp.isfinite(n), u, jnp.zeros_like(u)), updates, new)


def once_if(
  condition: jax.Array, function: Callable[..., Sequence[Any]], *carry: Any
) -> tuple[Any, ...]:
  """What a function makes of its arguments under a condition, or the arguments, all in place.

  Whether it was made comes first: what depends on that comes after it.
  """

  def made(carry: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_conditional.cast_like(tuple(function(*carry)), tuple(carry)))

  if _conditional.is_concrete(condition):
    return (condition, *(made(carry) if condition else carry))
  if jax.sharding.get_abstract_mesh().manual_axes:
    carry = jax.tree.map(_conditional.vary, carry, jax.eval_shape(made, carry))
  # A loop rather than `lax.cond`, for which XLA copies what one branch returns as it came.
  going, *carried = jax.lax.while_loop(
    lambda loop: loop[0], lambda loop: (loop[0] & False, *made(loop[1:])), (condition, *carry)
  )
  return (condition & ~going, *carried)


def divide(x: jax.Array, by: jax.Array, largest: float = math.inf) -> jax.Array:
  """A quotient by a positive number, at most `largest`, made by multiplying.

  XLA recomputes it for each of its uses; it would store a division's result. To the last bit the
  same for powers of two.
  """
  wide = _arrays.widen(x)
  by = by.astype(wide.real.dtype)
  # The inverse of a larger number would not be a normal one.
  if largest > 2.0**126:
    shift = jnp.where(by > 2.0**64, 2.0**-64, 1.0).astype(by.dtype)
    wide, by = wide * shift, by * shift
  return (wide * (1 / by)).astype(x.dtype)


def sum_squares(tree: Any) -> jax.Array:
  """The sum of the squared magnitudes of all entries, in at least float32.

  If it is finite, no entry is larger than 2e19: one pass proves that all are finite.
  """
  sums = [
    _arrays.sum_squares_together(list(map(_arrays.widen, leaves)))
    for (leaves,) in _arrays.stackable_leaves(tree)
  ]
  return jnp.sum(jnp.stack(sums)) if sums else jnp.zeros([], jnp.float32)


def ordinary(squares: jax.Array, factor: jax.Array, extra_args: dict[str, Any]) -> jax.Array:
  """Whether numbers of a sum of squares stay far inside float32's range times a factor.

  The loss, if it is known, must be finite, too. Then a step in a dtype of float32's range overflows
  nowhere.
  """
  value = extra_args.get("value")
  finite = jnp.isfinite((squares * factor * factor).astype(jnp.float32))
  return finite if value is None else finite & jnp.all(jnp.isfinite(value))


def has_wide_range(tree: Any) -> bool:
  """Whether all leaves have at least float32's range, unlike float16."""
  return all(float(jnp.finfo(leaf.dtype).max) > 1e38 for leaf in jax.tree.leaves(tree))


def largest(tree: Any) -> jax.Array:
  """The largest absolute value, in at least float32; NaN if there is one."""
  total = jnp.zeros([], jnp.float32)
  for (leaves,) in _arrays.stackable_leaves(tree):
    most = functools.reduce(jnp.maximum, map(jnp.abs, leaves))
    total = jnp.maximum(total, _arrays.widen(jnp.max(most, initial=0)))
  return total


def none_lost(new: Any, old: Any) -> jax.Array:
  """Whether no finite entry has become NaN or infinite, found out in one leaf's memory.

  Infinities in `old` may be meant.
  """
  sums = [jnp.zeros([], jnp.float32)]

  def small(n: jax.Array, o: jax.Array) -> jax.Array:
    # Adds nothing, or NaN, but lets a leaf be worked out only after the one before. Of all before
    # it XLA would add up the sums again for each leaf.
    wide = _arrays.widen(n + (0 * sums[-1]).astype(n.dtype))
    # Squares of such small numbers overflow for no finite entry.
    shrunk = wide * 2.0 ** (-5 * jnp.finfo(wide.dtype).maxexp // 8)
    return jnp.where(jnp.isfinite(o), shrunk, 0)

  for news, olds in _arrays.stackable_leaves(new, old):
    if jnp.issubdtype(news[0].dtype, jnp.inexact):
      news, olds = (list(map(_on_device, leaves)) for leaves in (news, olds))
      sums.append(_arrays.sum_squares_together(list(map(small, news, olds))))
  return jnp.isfinite(jnp.sum(jnp.stack(sums)))


def checked_unless(
  usual: jax.Array, check: Callable[[], Sequence[jax.Array]], *passed: jax.Array
) -> Sequence[jax.Array]:
  """A check's results, or `passed`, its usual ones."""
  # Without the barrier XLA for TPUs makes every check, and selects.
  return once_if(~usual, lambda *_: jax.lax.optimization_barrier(check()), *passed)[1:]

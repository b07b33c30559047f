"""Steps with gradients that carried a scale: unscaled in float32, checked where they land.

A scale keeps small gradients from vanishing in half precision. They would vanish after all if they
were cast back once unscaled; so the inner optimizer works in at least float32, its state included.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _groups
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _tree

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def check_rule(
  initial_scale: Any, growth_factor: Any, backoff_factor: Any, minimum: Any, maximum: Any
) -> None:
  """Checks a scale, the factors by which it grows and shrinks, its floor and its cap."""
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  scales = {"minimum": minimum, "maximum": maximum, "initial_scale": initial_scale}
  known: dict[str, float] = {}
  for name, value in scales.items():
    _base.check_number(name, value, positive=True)
    if (number := _base.known_number(value)) is None:
      continue
    known[name] = float(number)
    if not _SMALLEST <= known[name] <= _LARGEST:
      raise ValueError(
        f"`{name}` must be a float32 number, between {_SMALLEST:g} and {_LARGEST:g}; got"
        f" {_base.shorten(value)}."
      )
  if known.keys() != scales.keys():
    return
  if known["minimum"] > known["maximum"]:
    raise ValueError(f"`minimum` must not be above `maximum`; got {minimum!r} and {maximum!r}.")
  if not known["minimum"] <= known["initial_scale"] <= known["maximum"]:
    raise ValueError(
      "`initial_scale` must be between `minimum` and `maximum`; got"
      f" {initial_scale!r}, not between {minimum!r} and {maximum!r}."
    )


def _is_wide(tree: Any) -> bool:
  return all(leaf.dtype == _arrays.accumulator_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree))


def next_scales(
  scale: jax.Array, growth_factor: Any, backoff_factor: Any, minimum: Any, maximum: Any
) -> tuple[jax.Array, jax.Array]:
  """A checked rule's scale after growth, and after an overflow."""
  check_rule(minimum, growth_factor, backoff_factor, minimum, maximum)
  grown = jnp.minimum(scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  return grown, shrunk


@dataclasses.dataclass(eq=False)
class UnscalingOptimizer:
  """Takes the scales of groups of leaves off the gradients for an inner optimizer."""

  method: str
  state_type: Any  # its states have an `inner_state`
  inner: Any
  axis_name: str | tuple[str, ...] | None
  maximum: Any
  _: dataclasses.KW_ONLY
  make_state: Callable[[optax.Params, optax.OptState], Any]
  scales_of: Callable[[Any], jax.Array]
  number: Callable[[Any], Any]  # from a tree to that of its leaves' groups
  # From a state, the next inner state and, for each group, whether the unscaled gradients were
  # finite, and whether the params, or without them the updates, are so as well.
  next_state: Callable[[Any, optax.OptState, jax.Array, jax.Array], Any]
  skip: Literal["all", "group"] = "all"

  def __post_init__(self) -> None:
    self.inner = _base.check_transformation("inner", self.inner)
    _base.check_axis_name("axis_name", self.axis_name)
    _base.check_name("skip", self.skip, ("all", "group"))
    self.maximum = math.inf if _base.is_array(self.maximum) else float(self.maximum)
    # Shapes with the dtypes of the inner updates, for each kind of gradients and params.
    self._output_shapes: dict[Any, Any] = {}

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return _in_place.InPlaceTransformation(self.init, self.update, self.apply)

  def init(self, params: optax.Params) -> Any:
    _tree.check_floating(params, self.method)
    wide = _arrays.copy_arrays(params, _arrays.accumulator_dtype)
    return self.make_state(params, self.inner.init(wide))

  def update(
    self,
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    _tree.check_update(self.method, updates, state, self.state_type, params)
    scales, numbers, before = self.scales_of(state), self.number(updates), state.inner_state
    whole = self.skip == "all"
    by_group = functools.partial(self._by_group, numbers, len(scales))

    def zero_unless(good: jax.Array, tree: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda n, x: jnp.where(good[n], x, jnp.zeros_like(x)), numbers, tree)

    unscale = functools.partial(self._unscale, numbers, scales)
    gradients, extra = _masking.map_gradients(unscale, updates, extra_args)
    finite = by_group(_arrays.all_finite, gradients)
    if not whole:
      zero_bad = functools.partial(zero_unless, finite)
      gradients, extra = _masking.map_gradients(zero_bad, gradients, extra)
    inner = self._cast_inner(self._updates_like(updates, params, extra_args))

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return inner.update(gradients, inner_state, params, **extra)

    # A loss scale inside must see every overflow, or it would never come down.
    if whole and not _conditional.scales_loss(before):
      out, after = _conditional.update_if(jnp.all(finite), step, before)
    else:
      out, after = step(before)
    if params is None:
      landed = by_group(_arrays.all_finite, out)
    else:
      landed = by_group(_conditional.no_entry_lost, optax.apply_updates(params, out), params)
    if whole:
      good = jnp.broadcast_to(jnp.all(landed), landed.shape)
      after = _conditional.select(good[0], after, before)
    else:
      good = finite & landed

      def select(group: int, old: Any, new: Any) -> Any:
        return jnp.where(good[group], new, old)

      after = _groups.select_state(self.method, self.inner, select, numbers, before, after)
    return zero_unless(good, out), self.next_state(state, after, finite, finite & landed)

  def apply(
    self, gradients: _in_place.Gradients, state: Any, params: optax.Params, guard: bool
  ) -> tuple[optax.Params, Any]:
    del guard  # its own steps leave params finite
    updates, extra_args = gradients()
    _tree.check_update(self.method, updates, state, self.state_type, params)
    shapes = self._updates_like(updates, params, extra_args)
    in_place = _in_place.is_in_place(self.inner)
    if self.skip == "group" or (in_place and not (shapes is None or _is_wide(shapes))):
      # The updates are needed: for each group to be left out, or to be rounded.
      out, state = self.update(updates, state, params, **extra_args)
      return _in_place.add_updates(params, out, state), state
    scales, numbers = self.scales_of(state), self.number(params)
    by_group = functools.partial(self._by_group, numbers, len(scales))
    inner = self.inner if in_place else self._cast_inner(shapes)

    def unscaled() -> tuple[optax.Updates, dict[str, Any]]:
      unscale = functools.partial(self._unscale, numbers, scales)
      return _masking.map_gradients(unscale, *gradients())

    def check() -> tuple[jax.Array, jax.Array]:
      finite = jnp.isfinite(by_group(_in_place.largest, updates, agree=False) / scales)
      finite = _conditional.agree(finite, self.axis_name, self.method)
      if in_place:
        # It checks its own steps.
        return finite, jnp.ones_like(finite)
      grads, extra = unscaled()
      out, _ = inner.update(grads, state.inner_state, params, **extra)
      return finite, by_group(_in_place.none_lost, optax.apply_updates(params, out), params)

    finite = landed = jnp.ones(len(scales), bool)
    if in_place or _in_place.has_wide_range(params):
      sums = by_group(_in_place.sum_squares, updates, agree=False)
      usual = _in_place.ordinary(sums, 1 / scales, extra_args)
      usual = jnp.all(_conditional.agree(usual, self.axis_name, self.method))
      finite, landed = _in_place.checked_unless(usual, check, finite, landed)
    else:
      finite, landed = check()
    made = finite & landed
    _, params, inner_state = _in_place.once_if(
      # A loss scale inside must see every overflow, or it would never come down.
      jnp.all(landed if _conditional.scales_loss(state.inner_state) else made),
      lambda params, state: _in_place.apply(inner, unscaled, state, params, guard=True),
      params,
      state.inner_state,
    )
    return params, self.next_state(state, inner_state, finite, made)

  def _cast_inner(self, shapes: Any) -> optax.GradientTransformationExtraArgs:
    """The inner optimizer, with its updates in the dtypes of `shapes`, its states in their own."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
      out, moved = self.inner.update(updates, state, params, **extra_args)
      out = out if shapes is None else _conditional.cast_like(out, shapes)
      return out, _conditional.cast_like(moved, state)

    return optax.GradientTransformationExtraArgs(self.inner.init, update)

  def _unscale(self, numbers: Any, scales: jax.Array, grads: optax.Updates) -> optax.Updates:
    """Gradients without the scales of their groups, in at least float32."""
    return jax.tree.map(
      lambda n, g: _in_place.divide(_arrays.widen(g), scales[n], self.maximum), numbers, grads
    )

  def _by_group(
    self,
    numbers: Any,
    num_groups: int,
    check: Callable[..., jax.Array],
    *trees: Any,
    agree: bool = True,
  ) -> jax.Array:
    """A check of each group's leaves, the same on all devices."""

    def members(group: int, tree: Any) -> list[Any]:
      pairs = zip(jax.tree.leaves(numbers), jax.tree.leaves(tree), strict=True)
      return [leaf for number, leaf in pairs if number == group]

    passed = jnp.stack([check(*(members(g, tree) for tree in trees)) for g in range(num_groups)])
    return _conditional.agree(passed, self.axis_name, self.method) if agree else passed

  def _updates_like(
    self, updates: optax.Updates, params: optax.Params | None, extra_args: dict[str, Any]
  ) -> Any:
    """Shapes with the dtypes that the inner optimizer gives its updates without a scale around it.

    Updates belong to the params: with float32 params they are float32. None: nothing has half
    precision.
    """
    leaves, structure = jax.tree.flatten((updates, params))
    if _is_wide(leaves):
      return None
    kind = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
    if kind not in self._output_shapes:
      like = updates if params is None else params

      def update(updates: optax.Updates, like: optax.Params) -> optax.Updates:
        gradients = jax.tree.map(
          lambda g, p: g.astype(jnp.promote_types(g.dtype, p.dtype)), updates, like
        )
        return self.inner.update(gradients, self.inner.init(like), params, **extra_args)[0]

      self._output_shapes[kind] = jax.eval_shape(update, updates, like)
    return self._output_shapes[kind]

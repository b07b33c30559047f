"""Steps with gradients that carried a scale: unscaled in float32, checked where they land.

A scale keeps small gradients from vanishing in half precision. They would vanish after all if they
were cast back once unscaled; so the inner optimizer works in at least float32, its state included.
"""

from collections.abc import Callable
import functools
import math
from typing import Any
from typing import Literal
from typing import NamedTuple

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
  for name, value in scales.items():
    _base.check_number(name, value, positive=True)
    if not (_base.is_array(value) or _SMALLEST <= float(value) <= _LARGEST):
      raise ValueError(
        f"`{name}` must be a float32 number, between {_SMALLEST:g} and {_LARGEST:g}; got"
        f" {_base.shorten(value)}."
      )
  if any(map(_base.is_array, scales.values())):
    return
  if float(minimum) > float(maximum):
    raise ValueError(f"`minimum` must not be above `maximum`; got {minimum!r} and {maximum!r}.")
  if not float(minimum) <= float(initial_scale) <= float(maximum):
    raise ValueError(
      "`initial_scale` must be between `minimum` and `maximum`; got"
      f" {initial_scale!r}, not between {minimum!r} and {maximum!r}."
    )


def check_injected_scales(**scales: Any) -> None:
  """Checks, in ``init``, scales that may have become infinite or zero in half precision."""
  for name, value in scales.items():
    _base.check_injected(name, value, positive=True)


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


class Step(NamedTuple):
  """The outcome of a step."""

  out: optax.Params  # the updates, zero where the step was skipped; of a step in place the params
  inner_state: optax.OptState
  finite: jax.Array  # [groups], whether the unscaled gradients were finite
  made: jax.Array  # [groups], whether the params, or without them the updates, are so as well


class UnscalingOptimizer:
  """An optimizer of gradients with a scale for each group of leaves."""

  def __init__(
    self,
    method: str,
    inner: optax.GradientTransformation,
    axis_name: str | tuple[str, ...] | None,
    maximum: Any,
    skip: Literal["all", "group"] = "all",
  ):
    self._method = method
    self._inner = _base.check_transformation("inner", inner)
    _base.check_axis_name("axis_name", axis_name)
    self._axis_name = axis_name
    _base.check_name("skip", skip, ("all", "group"))
    self._skip = skip
    self._maximum = math.inf if _base.is_array(maximum) else float(maximum)
    # Shapes with the dtypes of the inner updates, for each kind of gradients and params.
    self._output_shapes: dict[Any, Any] = {}

  def init(self, params: optax.Params) -> optax.OptState:
    """The inner optimizer's state, of the params in at least float32."""
    return self._inner.init(_arrays.copy_arrays(params, _arrays.accumulator_dtype))

  def transformation(
    self,
    state_type: type[Any],
    init_fn: Callable[[optax.Params], Any],
    scales_of: Callable[[Any], jax.Array],
    number: Callable[[Any], Any],
    next_state: Callable[[Any, Step], Any],
  ) -> _in_place.InPlaceTransformation:
    """The transformation with states of a type; `number` finds the groups of a tree's leaves."""

    def update_fn(
      updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
      _tree.check_update(self._method, updates, state, state_type, params)
      scales, numbers = scales_of(state), number(updates)
      step = self.update(scales, numbers, updates, state.inner_state, params, extra_args)
      return step.out, next_state(state, step)

    def apply_fn(
      gradients: _in_place.Gradients, state: Any, params: optax.Params, guard: bool
    ) -> tuple[optax.Params, Any]:
      del guard  # its own steps leave params finite
      _tree.check_update(self._method, gradients()[0], state, state_type, params)
      scales, numbers = scales_of(state), number(params)
      step = self.apply(scales, numbers, gradients, state.inner_state, params)
      return step.out, next_state(state, step)

    return _in_place.InPlaceTransformation(init_fn, update_fn, apply_fn)

  def update(
    self,
    scales: jax.Array,
    numbers: Any,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
  ) -> Step:
    """Makes a step; `numbers` is the tree of the leaves' groups, `state` the inner optimizer's."""
    whole = self._skip == "all"
    by_group = functools.partial(self._by_group, numbers, len(scales))

    def zero_unless(good: jax.Array, tree: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda n, x: jnp.where(good[n], x, jnp.zeros_like(x)), numbers, tree)

    unscale = functools.partial(self._unscale, numbers, scales)
    gradients, extra = _masking.map_gradients(unscale, updates, extra_args)
    finite = by_group(_arrays.all_finite, gradients)
    if not whole:
      zero_bad = functools.partial(zero_unless, finite)
      gradients, extra = _masking.map_gradients(zero_bad, gradients, extra)
    shapes = self._updates_like(updates, params, extra_args)

    def step(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      out, moved = self._inner.update(gradients, state, params, **extra)
      out = out if shapes is None else _conditional.cast_like(out, shapes)
      return out, _conditional.cast_like(moved, state)

    # A loss scale inside must see every overflow, or it would never come down.
    if whole and not _conditional.scales_loss(state):
      out, moved = _conditional.update_if(jnp.all(finite), step, state)
    else:
      out, moved = step(state)
    if params is None:
      landed = by_group(_arrays.all_finite, out)
    else:
      landed = by_group(_conditional.no_entry_lost, optax.apply_updates(params, out), params)
    if whole:
      good = jnp.broadcast_to(jnp.all(landed), landed.shape)
      inner_state = _conditional.select(good[0], moved, state)
    else:
      good = finite & landed

      def select(group: int, before: Any, after: Any) -> Any:
        return jnp.where(good[group], after, before)

      inner_state = _groups.select_state(self._method, self._inner, select, numbers, state, moved)
    return Step(zero_unless(good, out), inner_state, finite, finite & landed)

  def apply(
    self,
    scales: jax.Array,
    numbers: Any,
    gradients: _in_place.Gradients,
    state: optax.OptState,
    params: optax.Params,
  ) -> Step:
    """Makes a step in place, as `update` makes it."""
    updates, extra_args = gradients()
    shapes = self._updates_like(updates, params, extra_args)
    in_place = _in_place.is_in_place(self._inner)
    if self._skip == "group" or (in_place and not (shapes is None or _is_wide(shapes))):
      # The updates are needed: for each group to be left out, or to be rounded.
      step = self.update(scales, numbers, updates, state, params, extra_args)
      return step._replace(out=optax.apply_updates(params, step.out))
    nested = _conditional.scales_loss(state)
    by_group = functools.partial(self._by_group, numbers, len(scales))

    def unscaled() -> tuple[optax.Updates, dict[str, Any]]:
      unscale = functools.partial(self._unscale, numbers, scales)
      return _masking.map_gradients(unscale, *gradients())

    def inner_update(updates: Any, state: Any, params: Any, **extra: Any) -> Any:
      out, moved = self._inner.update(updates, state, params, **extra)
      return out if shapes is None else _conditional.cast_like(out, shapes), moved

    def check() -> tuple[jax.Array, jax.Array]:
      finite = jnp.isfinite(by_group(_in_place.largest, updates, agree=False) / scales)
      finite = _conditional.agree(finite, self._axis_name, self._method)
      if in_place:
        # It checks its own steps.
        return finite, jnp.ones_like(finite)
      grads, extra = unscaled()
      out, _ = inner_update(grads, state, params, **extra)
      return finite, by_group(_in_place.none_lost, optax.apply_updates(params, out), params)

    finite = landed = jnp.ones(len(scales), bool)
    if in_place or _in_place.has_wide_range(params):
      sums = by_group(_in_place.sum_squares, updates, agree=False)
      usual = _in_place.ordinary(sums, 1 / scales, extra_args)
      usual = jnp.all(_conditional.agree(usual, self._axis_name, self._method))
      finite, landed = _in_place.checked_unless(usual, check, finite, landed)
    else:
      finite, landed = check()
    made = finite & landed
    step = optax.GradientTransformationExtraArgs(self._inner.init, inner_update)
    _, params, inner_state = _in_place.once_if(
      # A loss scale inside must see every overflow, or it would never come down.
      jnp.all(landed if nested else made),
      lambda params, state: _in_place.apply(
        self._inner if in_place else step, unscaled, state, params, guard=True
      ),
      params,
      state,
    )
    return Step(params, inner_state, finite, made)

  def _unscale(self, numbers: Any, scales: jax.Array, grads: optax.Updates) -> optax.Updates:
    """Gradients without the scales of their groups, in at least float32."""
    return jax.tree.map(
      lambda n, g: _in_place.divide(_arrays.widen(g), scales[n], self._maximum), numbers, grads
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
    return _conditional.agree(passed, self._axis_name, self._method) if agree else passed

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
        return self._inner.update(gradients, self._inner.init(like), params, **extra_args)[0]

      self._output_shapes[kind] = jax.eval_shape(update, updates, like)
    return self._output_shapes[kind]

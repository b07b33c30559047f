"""The loss of one step and its gradient, as the optimizer state asks for it."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _transformation
from optax_boost._trace import _frozen_scans
from optax_boost._trace import _jaxpr
from optax_boost._trace import _layer_axes
from optax_boost._trace import _layer_groups
from optax_boost._trace import _leaf_uses
from optax_boost._train_step import _state


class Objective:
  """A loss, traced once however often it is called; its gradient is scaled and cut.

  Attributes:
    program: the traced loss at the current params.
    opt_state: the optimizer state; a known depth is a constant in it, so that ``update`` computes
      nothing for frozen leaves either.
    groups: the group of each leaf; those that the method does not see are past the last. None:
      nothing is frozen.
    depth: how many groups are frozen, an int32 of NumPy if the step is compiled for it.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    state: _state.TrainState,
    data: tuple[Any, ...],
    depth: int | None,
  ):
    opt_state, params = state.opt_state, state.params
    scaling = _protocol.state_asking(opt_state, _protocol.LOSS_SCALE)
    freezing = _protocol.state_asking(opt_state, _protocol.FROZEN_GROUPS)
    self._loss_fn, self._params, self._others = loss_fn, params, (state.model_state, *data)
    self.opt_state = opt_state
    self.groups: list[_layer_groups.GroupNumber] | None = None
    self.depth: Any = None
    self._scale = None if scaling is None else scaling.loss_scale
    self._is_scaled = _protocol.seen_leaves(scaling, params)
    if freezing is not None:
      self.groups = _group_numbers(tx, freezing, params)
      traced = freezing.frozen_groups
      self.depth = traced if depth is None else np.int32(depth)
      structure: Any
      leaves, structure = jax.tree.flatten(opt_state)
      leaves = [self.depth if leaf is traced else leaf for leaf in leaves]
      self.opt_state = jax.tree.unflatten(structure, leaves)
    self._programs: dict[Any, tuple[Any, Any]] = {}
    self.program = self._trace(params)[0]

  def __call__(
    self, params: optax.Params, frozen: Sequence[bool | np.ndarray] | None = None
  ) -> Any:
    """The loss's output, with a derivative of zero for frozen leaves and layers of leaves."""
    program, structure = self._trace(params)
    leaves = jax.tree.leaves(params)
    if frozen is not None:
      leaves = list(map(_frozen_scans.in_parts, jax.lax.stop_gradient(leaves), leaves, frozen))
    outputs = _frozen_scans.run(program, [*leaves, *jax.tree.leaves(self._others)])
    return jax.tree.unflatten(structure, outputs)

  def gradient(self, params: optax.Params) -> tuple[optax.Updates, tuple[jax.Array, Any]]:
    """The scaled gradient, zero for frozen leaves, and the output of the loss."""
    numbers = self.groups or [0] * len(self._is_scaled)
    is_known = self.groups is not None and isinstance(self.depth, np.integer)
    frozen = [number < self.depth for number in numbers] if is_known else None
    scale = self._scale

    def scaled(params: optax.Params) -> tuple[jax.Array, Any]:
      value, rest = self(params, frozen)
      # In float32: a float16 loss times its scale would overflow.
      return value if scale is None else value.astype(jnp.float32) * scale, (value, rest)

    def finish(g: jax.Array, number: _layer_groups.GroupNumber, is_scaled: bool) -> jax.Array:
      if scale is not None and not is_scaled:
        g = (_arrays.widen(g) / scale).astype(g.dtype)
      if self.groups is None or is_known:
        return g
      return _layer_groups.select_frozen(self.depth, number, jnp.zeros_like(g), g)

    grad, output = jax.grad(scaled, has_aux=True)(params)
    leaves, structure = jax.tree.flatten(_arrays.steepest_ascent(grad))
    return jax.tree.unflatten(structure, map(finish, leaves, numbers, self._is_scaled)), output

  def closures(self, current: optax.Params) -> dict[str, Callable[..., Any]]:
    """The loss and its gradient as functions of params."""

    @_masking.ignoring_closures
    def value_fn(params: optax.Params) -> jax.Array:
      return self(_masking.fill_masked(params, current))[0]

    grad_fn = of_masked(lambda params: self.gradient(params)[0], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}

  def layers(self) -> _layer_axes.LayerAxes:
    """The axes of the params, which the program tells; the model state holds constants."""
    state, *data = self._others
    flags = [*[None] * len(jax.tree.leaves(state)), *_layer_axes.batch_flags(data)]
    return _layer_axes.describe(self.program, self._params, flags)

  def statistics_axes(self) -> dict[int, int]:
    """The axis of layers of each leaf of the model state that a scan over layers slices."""
    of_state = len(jax.tree.leaves(self._others[0]))
    before = len(self.program.jaxpr.invars) - len(jax.tree.leaves(self._others))
    return _leaf_uses.scanned_axes(self.program, range(before, before + of_state))

  def _trace(self, params: optax.Params) -> tuple[Any, Any]:
    """The program for params of these types, and the structure of its output."""
    types = jax.tree.map(jax.typeof, params)
    kind = (jax.tree.structure(types), *jax.tree.leaves(types))
    if kind not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.untraced(self._loss_fn), return_shape=True)
      program, shapes = trace(params, *self._others)
      self._programs[kind] = program, jax.tree.structure(shapes)
    return self._programs[kind]


def of_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> Callable[..., optax.Updates]:
  """A gradient function of params in which ``optax.masked`` may have hidden leaves."""

  # Transformations may pass more than params, as `optax.contrib.sam` the number of its inner step.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masking.mask_like(gradient(_masking.fill_masked(params, current)), params)

  return grad_fn


def _group_numbers(
  tx: optax.GradientTransformation, state: Any, params: optax.Params
) -> list[_layer_groups.GroupNumber]:
  forms = _transformation.forms(tx)
  assignments = [form.frozen_groups for form in forms if form.frozen_groups is not None]
  if len(assignments) != 1:
    raise ValueError(
      f"`make_train_step` needs to find the groups of {type(state).__name__} in the transformation;"
      f" it found {len(assignments)}. A wrapper of your own must tell the transformation that it"
      " wraps: `update.wraps = tx`; and `optax.inject_hyperparams` belongs inside `freeze_layers`."
    )
  structure: Any
  leaves, structure = jax.tree.flatten(params)
  seen = _protocol.seen_leaves(state, params)
  pairs = zip(leaves, seen, strict=True)
  visible = jax.tree.unflatten(structure, [x if s else optax.MaskedNode() for x, s in pairs])
  numbers = iter(jax.tree.leaves(assignments[0].number(visible)))
  return [next(numbers) if s else assignments[0].num_groups for s in seen]

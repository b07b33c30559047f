"""Keeps from the optimizer what no step ever trains, so that nothing is stored for it.

If all depths of a schedule freeze the first k groups, these are frozen for ever. The optimizer
then gets trees with ``optax.MaskedNode()`` in place of their leaves, as in ``optax.masked``; of a
leaf that stacks several layers, it gets the slice after the frozen layers. So no moments, masters
or sums of windows exist for them.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _extra_args, _masks, _types
from optax_boost._step import _slots
from optax_boost._trace import _layer_groups

# The kept part of a leaf: all (True), nothing (False), or the entries from an index on along an
# axis: ``(axis, start)``.
_Part: TypeAlias = bool | tuple[int, int]
# The extra arguments that are functions of the params; the first two return a number.
_OF_PARAMS = ("value_fn", "obj_fn", "grad_fn", "full_grad_fn")


@dataclasses.dataclass(frozen=True)
class KeptLeaves:
  """Takes the kept part from trees like the params, and puts it back.

  Attributes:
    parts: the kept part of each leaf, in the order of ``jax.tree.leaves``; None: all is kept.
  """

  parts: Sequence[_Part] | None = None

  def take(self, tree: _types.Tree) -> _types.Tree:
    """Returns the kept part of a tree like the params; None for None."""
    if self.parts is None or tree is None:
      return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(self.parts, leaves, strict=True)
    return jax.tree.unflatten(structure, [_take(part, leaf) for part, leaf in pairs])

  def put(self, full: _types.Tree, kept: _types.Tree) -> _types.Tree:
    """Returns `full`, with `kept` in place of its kept part."""
    if self.parts is None:
      return kept
    leaves, structure = jax.tree.flatten(full)
    rows = zip(self.parts, leaves, jax.tree.leaves(kept, is_leaf=_masks.is_masked), strict=True)
    return jax.tree.unflatten(structure, [_put(*row) for row in rows])

  def fill(self, full: _types.Tree, kept: optax.Updates) -> optax.Updates:
    """Returns updates like `full`: `kept`, and zeros for what is not kept."""
    if self.parts is None:
      return kept
    return self.put(jax.tree.map(jnp.zeros_like, full), kept)

  def take_arguments(
    self, extra_args: _types.ExtraArgs, params: optax.Params | None
  ) -> _types.ExtraArgs:
    """Returns the extra arguments for an optimizer that gets the kept part of the params."""
    if self.parts is None:
      return extra_args

    def of_kept(function: _types.Closure, take: Callable[[Any], Any]) -> _types.Closure:
      def call(kept: optax.Params, *args: Any) -> Any:
        return take(function(kept if params is None else self.put(params, kept), *args))

      return _extra_args.accept_extra_args(call)

    taken = dict(extra_args)
    if taken.get("grad") is not None:
      taken["grad"] = self.take(taken["grad"])
    for name in _OF_PARAMS:
      if taken.get(name) is not None:
        gives_gradient = name in ("grad_fn", "full_grad_fn")
        taken[name] = of_kept(taken[name], self.take if gives_gradient else lambda value: value)
    return taken


def kept_by(
  step: _slots.Step, tree: _types.Tree, inner_state: optax.OptState | None = None
) -> KeptLeaves:
  """Returns what a step keeps of the leaves of `tree`, the params or gradients.

  `inner_state` is the state of the step's optimizer, or None before it is made.
  """
  if step.freezing is None or not step.freezing.always_frozen:
    return KeptLeaves()
  never_trained = step.freezing.always_frozen
  numbers = jax.tree.leaves(step.freezing.number_leaves(tree))
  parts = [_part(number, never_trained) for number in numbers]
  if any(type(part) is tuple for part in parts):
    if inner_state is None:
      inner_state = jax.eval_shape(step.inner.init, tree)
    # The mean gradient over all of the data comes from outside, for whole leaves.
    if _protocol.is_requested(inner_state, _protocol.FULL_GRADIENT):
      parts = [part is not False for part in parts]
  return KeptLeaves(None if all(part is True for part in parts) else parts)


def _part(number: _layer_groups.GroupNumber, never_trained: int) -> _Part:
  """Returns the part of a leaf in groups from `never_trained` on; a frozen middle is kept, too."""
  trained = np.ravel(number) >= never_trained
  if trained.all() or not trained.any():
    return bool(trained.all())
  start = int(np.argmax(trained))
  return (int(np.argmax(np.shape(number))), start) if start else True


def _take(part: _Part, leaf: Any) -> Any:
  if isinstance(part, bool):
    return leaf if part else optax.MaskedNode()
  axis, start = part
  if isinstance(leaf, jax.ShapeDtypeStruct):
    shape = [n - start if i == axis else n for i, n in enumerate(leaf.shape)]
    return leaf.update(shape=tuple(shape))
  return _gathered(leaf, axis)[(slice(None),) * axis + (slice(start, None),)]


def _put(part: _Part, leaf: jax.Array, kept: Any) -> jax.Array:
  if isinstance(part, bool):
    return kept if part else leaf
  axis, start = part
  starts = [start if i == axis else 0 for i in range(leaf.ndim)]
  leaf = leaf.astype(kept.dtype)
  whole = _gathered(leaf, axis)
  updated = jax.lax.dynamic_update_slice(whole, kept, starts)
  return updated if whole is leaf else jax.sharding.reshard(updated, jax.typeof(leaf).sharding)


def _gathered(leaf: jax.Array, axis: int) -> jax.Array:
  """Returns a leaf whose `axis` an Explicit mesh does not distribute, since it is to be sliced."""
  sharding = getattr(jax.typeof(leaf), "sharding", None)
  if sharding is None or axis >= len(sharding.spec) or sharding.spec[axis] is None:
    return leaf
  spec = [None if i == axis else entry for i, entry in enumerate(sharding.spec)]
  return jax.sharding.reshard(leaf, sharding.update(spec=jax.sharding.PartitionSpec(*spec)))

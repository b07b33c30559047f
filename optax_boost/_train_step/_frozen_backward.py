"""The gradient without the backward pass of frozen layers, whose statistics stand still."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any
from typing import Literal
from typing import TypeAlias
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _cut_scans
from optax_boost import _groups
from optax_boost import _jaxpr
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._train_step import _uncut_scans

# From params to the value to differentiate, and the other outputs of the step. A second argument,
# if any, is a function to put around the loss inside.
Objective: TypeAlias = Callable[..., tuple[jax.Array, Any]]
Execution: TypeAlias = Literal["auto", "per_depth", "switch"]
# Of Linen's variables, those that stand for a whole model's.
_COLLECTIONS = (["params"], ["batch_stats"])


def cut_gradient(
  objective: Objective,
  groups: _protocol.GroupAssignment,
  depth: int | jax.Array,
  execution: Execution,
  warn: Callable[[str], None],
) -> Callable[[optax.Params], tuple[optax.Updates, Any]]:
  """The gradient function of an objective, zero for frozen leaves, without their backward pass.

  A traced depth is treated as `execution` says; its output beside the gradient is the objective's.
  `warn` is called with the reason where the backward pass of a scan's frozen layers is computed.
  """

  def gradient_at(depth: int, params: optax.Params) -> tuple[optax.Updates, Any]:
    # Leaves of no group are always trained.
    frozen = [group < depth for group in groups.numbers(params)]

    def inspect(program: Any) -> None:
      reason = _uncut_scans.explain_uncut_scans(program, frozen, _tree.leaf_paths(params))
      if reason is not None:
        warn(reason)

    def of_trained(params: optax.Params) -> tuple[jax.Array, Any]:
      leaves, structure = jax.tree.flatten(params)
      # Before a loss scale puts its boundaries around the params.
      stopped = [
        jax.lax.stop_gradient(x) if np.all(f) else x for x, f in zip(leaves, frozen, strict=True)
      ]
      return objective(
        jax.tree.unflatten(structure, stopped),
        lambda loss: _cut_scans.stop_layers(loss, frozen, inspect),
      )

    return jax.grad(of_trained, has_aux=True)(params)

  if isinstance(depth, int):
    return functools.partial(gradient_at, depth)
  if execution == "per_depth":
    raise ValueError(
      "freezing='per_depth' needs a state whose values are known, to choose the compiled step on"
      " the host; got a traced one. Inside your own `jit`, `scan` or `vmap` pass freezing='auto'"
      " or 'switch'."
    )

  def gradient(params: optax.Params) -> tuple[optax.Updates, Any]:
    if execution == "auto" and not _switch_is_worth_it(objective, params):
      return jax.grad(objective, has_aux=True)(params)
    branches = [functools.partial(gradient_at, d) for d in range(groups.num_groups)]
    return jax.lax.switch(depth, branches, params)

  return gradient


def _switch_is_worth_it(objective: Objective, params: optax.Params) -> bool:
  # XLA's CPU backend makes the gradient of a convolution some 20 times slower inside a conditional.
  if jax.default_backend() != "cpu":
    return True
  if not _jaxpr.has_convolution(jax.make_jaxpr(objective)(params)):
    return True
  warnings.warn(
    "`freeze_layers` saves no time in this step: its depth is traced (the train step runs inside"
    " your own `jit`, `scan` or `vmap`, or is lowered for abstract values), and on a CPU gradients"
    " of convolutions inside a conditional are slower than without freezing. Call the train step"
    " directly, or pass freezing='switch' to insist.",
    _base.NoEffectWarning,
    stacklevel=2,
  )
  return False


def hold_statistics(
  before: Any,
  after: Any,
  params: optax.Params,
  groups: _protocol.GroupAssignment,
  depth: int | jax.Array,
  find_axes: Callable[[], Mapping[int, int]],
) -> Any:
  """Takes the floating-point statistics of frozen layers from `before`.

  A layer's statistics have the path of its params, but for a collection's name in front. Integers
  (counts of batches or draws) and statistics of layers without params go on. `find_axes` finds the
  axes of layers of the statistics `before`, by the number of the leaf.
  """
  # By path: a loss may return other containers than it was given, or further statistics.
  numbered = enumerate(zip(_tree.leaf_paths(before), jax.tree.leaves(before), strict=True))
  old_leaves = {path: (number, leaf) for number, (path, leaf) in numbered}
  if not old_leaves:
    return after
  modules: dict[str, Any] = {}
  members = zip(_modules(_tree.leaf_paths(params)), groups.numbers(params), strict=True)
  for module, group in members:
    modules[module] = np.maximum(modules.get(module, 0), np.ravel(group))
  known = np.int32(depth) if isinstance(depth, int) else depth
  axes = find_axes() if any(group.size > 1 for group in modules.values()) else {}

  def keep(path: str, module: str, new: Any) -> Any:
    if module not in modules or path not in old_leaves:
      return new
    number, old = old_leaves[path]
    if not jnp.issubdtype(jnp.result_type(new), jnp.inexact) or jnp.shape(old) != jnp.shape(new):
      return new
    group, axis = modules[module], axes.get(number)
    if axis is None or group.size != new.shape[axis]:
      return _groups.select_frozen(known, int(np.max(group)), old, new)
    along = [-1 if i == axis else 1 for i in range(new.ndim)]
    return _groups.select_frozen(known, group.reshape(along), old, new)

  paths = _tree.leaf_paths(after)
  leaves, structure = jax.tree.flatten(after)
  kept = map(keep, paths, _modules(paths), leaves)
  return jax.tree.unflatten(structure, kept)


def _modules(paths: list[str]) -> list[str]:
  """The paths of the leaves' modules, without the collections' names in front, if there are any."""
  modules = [path.split("/")[:-1] for path in paths]
  # Where one is a collection of Flax, the others are collections, too.
  first = 1 if any(module[:1] in _COLLECTIONS for module in modules) else 0
  return ["/".join(module[first:]) for module in modules]

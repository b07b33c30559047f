"""Groups of layers along the forward pass."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _forward_order
from optax_boost import _tree


@dataclasses.dataclass(frozen=True)
class LayerGroups:
  """Which leaf belongs to which group; ``print`` shows it. Made by :func:`layer_groups`.

  Attributes:
    groups: for each group, the paths of its leaves in the order of the forward pass.
    sizes: for each group, the number of its parameters.
    unused: leaves that the loss does not depend on. They are in the last group.
    reused: leaves that are used again after a later layer (tied weights, unrolled recurrences).
      They are frozen with the layer that uses them first.
  """

  groups: tuple[tuple[str, ...], ...]
  sizes: tuple[int, ...]
  unused: tuple[str, ...] = ()
  reused: tuple[str, ...] = ()

  def __str__(self) -> str:
    total = max(sum(self.sizes), 1)
    lines = []
    for index, (paths, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
      never = ", never frozen" if index == len(self.groups) - 1 else ""
      lines.append(
        f"group {index}: {size:,} parameters ({100 * size / total:.1f} %){never}: "
        + ", ".join(paths)
      )
    if self.unused:
      lines.append("not used by the loss, so never frozen: " + ", ".join(self.unused))
    if self.reused:
      lines.append("used again later, frozen where they are used first: " + ", ".join(self.reused))
    return "\n".join(lines)


# A plan, or regular expressions for the groups 0, 1, ...
Groups: TypeAlias = LayerGroups | Sequence[str]


def layer_groups(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  *args: Any,
  num_groups: int = 10,
  overrides: Mapping[str, int] | None = None,
  data: _base.LeafSelector = None,
) -> LayerGroups:
  """Groups the leaves along the forward pass, as a trace of the loss shows it.

  A leaf's place is where it first meets the data; casts and reshapes of params do not count. A bias
  or a normalization stays with the kernel before it. The blocks that this makes are shared out
  evenly. Nothing is computed; arrays may be abstract.

  Arrays that the loss closes over (an adapter's base weights, a pruning mask) are data only where
  the params would otherwise meet data in one place or nowhere.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng.
    num_groups: how many groups; the last is never frozen. Raising it makes finer steps of depth,
      each a program to compile.
    overrides: groups by regular expression, searched in the leaves' paths, which take precedence
      over the trace. The first that matches counts.
    data: which of `args` are data, where some hold weights or masks: a tree of bools with the
      structure of the tuple `args` or a prefix of it, as ``(True, False)``; regular expressions for
      their leaves' paths, as ``"^0/image$"``; or a callable to such a tree. None: all of them.

  Returns:
    A :class:`LayerGroups`.

  Raises:
    ValueError: there are fewer blocks than groups, the loss uses no leaf, an override names no
      group, or `data` does not fit `args`.
    TypeError: an argument is of the wrong kind, or a leaf is no array.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"a_head": jnp.ones((8, 1)), "z_body": {"bias": jnp.ones(8), "kernel": jnp.eye(8)}}
    >>> def loss_fn(params, x):
    ...   h = jnp.tanh(x @ params["z_body"]["kernel"] + params["z_body"]["bias"])
    ...   return jnp.mean(h @ params["a_head"])
    >>> print(optax_boost.layer_groups(loss_fn, params, jnp.ones((2, 8)), num_groups=2))
    group 0: 72 parameters (90.0 %): z_body/kernel, z_body/bias
    group 1: 8 parameters (10.0 %), never frozen: a_head
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  return group_by_use(
    lambda params, _, *args: loss_fn(params, *args),
    params,
    (),
    args,
    num_groups=num_groups,
    overrides=overrides,
    is_data=select_data(args, data),
  )


def select_data(args: Any, data: _base.LeafSelector) -> list[bool]:
  """Whether each leaf of a loss's arguments is data; `data` as in :func:`layer_groups`."""
  if data is None:
    return [True] * len(jax.tree.leaves(args))
  return _tree.select(args, data, "data")


def group_by_use(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  model_state: Any,
  args: tuple[Any, ...],
  *,
  num_groups: int,
  overrides: Mapping[str, int] | None,
  is_data: Sequence[bool],
) -> LayerGroups:
  """:func:`layer_groups` for ``loss_fn(params, model_state, *args)``; the state is a constant."""
  _base.check_whole_number("num_groups", num_groups, static=True)
  num_groups = int(num_groups)
  for name, tree in (("params", params), ("model state", model_state), ("args", args)):
    _tree.check_traceable(name, tree)
  leaves = _tree.describe(params)
  state_flags = [None] * len(jax.tree.leaves(model_state))
  events = _forward_order.forward_uses(
    loss_fn, params, model_state, *args, data=[*state_flags, *is_data]
  )
  order = list(dict.fromkeys(events))
  unused = [i for i in range(len(leaves)) if i not in set(order)]
  blocks = _blocks(leaves, order)
  if not blocks:
    raise ValueError(
      f"`layer_groups` found no leaf among the {len(leaves)} of `params` that the loss uses. Pass"
      " the params that `loss_fn` takes as its first argument."
    )
  if len(blocks) < num_groups:
    raise ValueError(
      f"`layer_groups` can't make {num_groups} groups of {len(blocks)} blocks (a kernel with its"
      f" bias and normalization is one). Pass num_groups={len(blocks)} or fewer."
    )
  group: dict[int, int] = {}
  for index, block in enumerate(blocks):
    group |= {leaf: index * num_groups // len(blocks) for leaf in block}
  group |= {leaf: num_groups - 1 for leaf in unused}
  for leaf, number in _overridden(leaves, overrides, num_groups).items():
    group[leaf] = number
  members = [[i for i in [*order, *unused] if group[i] == g] for g in range(num_groups)]
  return LayerGroups(
    groups=tuple(tuple(leaves[i].path for i in leaf_ids) for leaf_ids in members),
    sizes=tuple(sum(math.prod(leaves[i].shape) for i in leaf_ids) for leaf_ids in members),
    unused=tuple(leaves[i].path for i in unused),
    reused=tuple(leaves[i].path for i in _reused(events, blocks)),
  )


def _blocks(leaves: list[_tree.Leaf], order: list[int]) -> list[list[int]]:
  """Kernels in the order of the forward pass, each with its bias and normalization."""

  def attached(leaf: _tree.Leaf) -> bool:
    # With stacked layers, biases may be matrices.
    return len(leaf.shape) <= 1 or _tree.is_bias_or_norm(leaf.path)

  modules = [leaf.path.rpartition("/")[0] for leaf in leaves]
  kernels = [i for i in order if not attached(leaves[i])]
  kernels_of: dict[str, list[int]] = {}
  for i in kernels:
    kernels_of.setdefault(modules[i], []).append(i)
  blocks: dict[int, list[int]] = {}
  last = (kernels or order or [0])[0]
  for i in order:
    # A module's own kernel counts before the last one that was used.
    own = kernels_of.get(modules[i], [])
    if i in own:
      last = home = i
    else:
      home = own[0] if len(own) == 1 else last
    blocks.setdefault(home, []).append(i)
  # A kernel stands where it is used, even if its bias is used before it.
  return [blocks[k] for k in order if k in blocks]


def _reused(events: list[int], blocks: list[list[int]]) -> list[int]:
  """The leaves that are used again after a leaf of a later block."""
  block_of = {leaf: index for index, block in enumerate(blocks) for leaf in block}
  furthest = 0
  seen: set[int] = set()
  reused: dict[int, None] = {}  # in order
  for leaf in events:
    if leaf in seen and block_of[leaf] < furthest:
      reused[leaf] = None
    seen.add(leaf)
    furthest = max(furthest, block_of[leaf])
  return list(reused)


def _overridden(
  leaves: list[_tree.Leaf], overrides: Mapping[str, int] | None, num_groups: int
) -> dict[int, int]:
  if overrides is None:
    return {}
  if not isinstance(overrides, Mapping):
    raise TypeError(
      f"`overrides` must map regular expressions to groups, as in {{'embed': 0}}; got"
      f" {_base.shorten(overrides)}."
    )
  for pattern, number in overrides.items():
    if not (_base.is_integer(number) and 0 <= number < num_groups):
      raise ValueError(
        f"`overrides` must name groups 0 to {num_groups - 1}; got {_base.shorten(number)} for"
        f" {_base.shorten(pattern)}."
      )
  matches = _tree.first_match("overrides", list(overrides), [leaf.path for leaf in leaves])
  of_pattern = [int(number) for number in overrides.values()]
  return {i: of_pattern[match] for i, match in enumerate(matches) if match is not None}


def group_numbers(tree: Any, groups: Groups, method: str) -> list[int]:
  """The group of each leaf; ValueError for a leaf that a plan lacks."""
  paths = _tree.leaf_paths(tree)
  if isinstance(groups, LayerGroups):
    number = {path: g for g, group in enumerate(groups.groups) for path in group}
    missing = [path for path in paths if path not in number]
    if missing:
      raise ValueError(
        f"`{method}` was given groups for other params: no group has the leaf"
        f" '{_tree.leaf_name(missing[0])}'. Make them with `layer_groups` from these params."
      )
    return [number[path] for path in paths]
  last = len(groups) - 1
  matches = _tree.first_match("groups", groups, paths)
  return [last if match is None else match for match in matches]


def count_groups(groups: Any) -> int:
  """The number of groups in a plan or a sequence of patterns; TypeError for anything else."""
  if isinstance(groups, LayerGroups):
    return len(groups.groups)
  strings = isinstance(groups, list | tuple) and all(isinstance(g, str) for g in groups)
  if not strings or not groups:
    raise TypeError(
      "`groups` must be what `layer_groups` returned, or a sequence of regular expressions, one"
      f" per group; got {_base.shorten(groups)}."
    )
  for pattern in groups:
    _base.compile_pattern("groups", pattern)
  return len(groups)


def numbering(groups: Groups, method: str) -> Callable[[Any], Any]:
  """From a tree to its leaves' groups, in the structure of the tree; warns once per tree."""
  numbers = _tree.once_per_tree(lambda tree: group_numbers(tree, groups, method))
  return lambda tree: jax.tree.unflatten(jax.tree.structure(tree), numbers(tree))


def select_state(
  method: str,
  inner: optax.GradientTransformation,
  select: Callable[[int, Any, Any], Any],
  numbers: Any,
  before: optax.OptState,
  after: optax.OptState,
) -> optax.OptState:
  """Selects, leaf by leaf, between an optimizer's state before and after a step.

  ``select(group, before, after)`` decides; values of no leaf (step counts, norms) are those after.
  """
  try:
    groups = optax.tree.map_params(
      inner,
      lambda value, number: value if _tree.is_masked(value) else number,
      before,
      numbers,
      transform_non_params=lambda _: None,
      is_leaf=_tree.is_masked,
    )
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise TypeError(
      f"`{method}` needs an inner optimizer over whose state `optax.tree.map_params` can map; it"
      f" failed: {error}. Masks and labels that are callables must take any tree: use"
      " `jax.tree.map_with_path` or `optax_boost.path_mask`, or pass them as trees."
    ) from error
  return jax.tree.map(
    lambda group, old, new: new if group is None else select(group, old, new),
    groups,
    before,
    after,
    is_leaf=lambda value: value is None,
  )


class FrozenDepth:
  """Which groups are frozen; decided while tracing where the depth is a NumPy integer.

  Such is the depth for which a train step is compiled: nothing is computed for frozen leaves.
  """

  def __init__(self, depth: Any):
    self._depth = depth
    self._static = isinstance(depth, np.integer | np.ndarray)

  def select(self, group: int, if_frozen: Any, otherwise: Any) -> Any:
    """One of two values, by whether a group is frozen."""
    if self._static:
      return if_frozen if group < self._depth else otherwise
    return jnp.where(group < self._depth, if_frozen, otherwise)

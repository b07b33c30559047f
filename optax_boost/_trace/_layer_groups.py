"""Groups of layers along the forward pass: which group each leaf, or each of its layers, is in.

A *group* is a run of blocks (``_blocks``), numbered by the forward pass. In a plan, an *entry* is
the path of a leaf, or the path and a slice of its layers, as NumPy writes it:
``"blocks/kernel[0:4]"``, or with the layers along axis 1 ``"blocks/kernel[:, 0:4]"``.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
import re
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost._trace import _blocks
from optax_boost._trace import _layer_axes

_SLICE_ENTRY = re.compile(r"(.*)\[((?::, )*)(\d+):(\d+)\]", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class LayerGroups:
  """Which leaf belongs to which group; ``print`` shows it. Made by :func:`layer_groups`.

  Attributes:
    groups: for each group, the paths of its leaves in the order of the forward pass. Of a leaf
      that holds many layers, the group's are in brackets: ``"blocks/kernel[0:4]"``, or, with the
      layers along axis 1, ``"blocks/kernel[:, 0:4]"``. Methods split such leaves.
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
  num_groups: int | None = None,
  overrides: Mapping[str, int] | None = None,
) -> LayerGroups:
  """Groups the leaves along the forward pass, as a trace of the loss shows it.

  A leaf's place is where it first meets the data; casts and reshapes of params do not count. The
  first group has all leaves that meet it before the first block (patches, class token, positions,
  a tied embedding), the last all after the last block (final norm, pooler, head), and between them
  each block is a group, as in BEiT, MAE and ``timm``.

  Blocks are numbered modules of which two or more have the same leaves (``layers/0``,
  ``Block_3``). In a model that scans over its layers (``nn.scan``, ``nnx.scan``, ``lax.scan``) each
  step of the outermost scan is a block; a leaf that all layers share is in the first of them. If
  numbered modules are stages, as in ResNets, ConvNeXts and U-Nets, the blocks in them count, in the
  order of the forward pass. What is between two blocks goes with the one around which its module
  is, else a kernel, as a downsampling one, with the block that follows and a normalization with
  the one before; a module of several kernels is a block of its own. Without numbered modules each
  kernel is a block, with its bias and normalization. Nothing is computed; arrays may be abstract.

  Noise, and arrays that the loss closes over (an adapter's base weights, a pruning mask), are data
  only where the params would otherwise meet data in one place or nowhere. In `args` they count as
  data, so let the loss close over them.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng. A loss from ``nnx.split_loss`` or
      ``linen.split_loss`` takes its model state first, which is not data.
    num_groups: how many groups; the last is never frozen. None: as above. Lowering it puts
      neighbours into one group, evenly; above the number of blocks these are cut inside, into the
      numbered modules in them and at last into kernels.
    overrides: groups by regular expression, which take precedence over the trace, for all layers of
      a leaf. An expression matches whole segments of the leaves' paths; patterns of two groups that
      match one leaf are an error.

  Returns:
    A :class:`LayerGroups`.

  Raises:
    ValueError: there are fewer kernels than groups, the loss uses no leaf, an override names no
      group, or two put a leaf into different ones.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"a_head": jnp.ones((8, 1)), "z_body": {"bias": jnp.ones(8), "kernel": jnp.eye(8)}}
    >>> def loss_fn(params, x):
    ...   h = jnp.tanh(x @ params["z_body"]["kernel"] + params["z_body"]["bias"])
    ...   return jnp.mean(h @ params["a_head"])
    >>> print(optax_boost.layer_groups(loss_fn, params, jnp.ones((2, 8))))
    group 0: 72 parameters (90.0 %): z_body/kernel, z_body/bias
    group 1: 8 parameters (10.0 %), never frozen: a_head
  """
  if num_groups is not None:
    _base.check_whole_number("num_groups", num_groups, static=True)
    num_groups = int(num_groups)
  return groups_of(_layer_axes.layer_axes(loss_fn, params, *args), params, num_groups, overrides)


def groups_of(
  described: _layer_axes.LayerAxes,
  params: optax.Params,
  num_groups: int | None,
  overrides: Mapping[str, int] | None = None,
) -> LayerGroups:
  """:func:`layer_groups` of a loss that is traced already."""
  leaves = _layer_axes.leaves_of(params, described)
  # A dot in a key separates modules, too, as in the flat names of PyTorch: `h.0.attn.weight`.
  in_modules = [leaf._replace(path=leaf.path.replace(".", "/")) for leaf in leaves]
  model = _blocks.Model(in_modules, list(described.uses), described.scans)
  order = model.order
  unused = [i for i in range(len(leaves)) if i not in set(order)]
  if not order:
    raise ValueError(
      f"`layer_groups` found no leaf among the {len(leaves)} of `params` that the loss uses. Pass"
      " the params that `loss_fn` takes as its first argument."
    )
  blocks = _blocks.find_blocks(model, num_groups)
  num_groups = blocks.num_blocks if num_groups is None else num_groups
  if blocks.num_blocks < num_groups:
    raise ValueError(
      f"`layer_groups` can't make {num_groups} groups of {blocks.num_blocks} blocks (a kernel with"
      " its bias and normalization is one, or a layer of a scan). Pass"
      f" num_groups={blocks.num_blocks} or fewer."
    )
  group: dict[int, list[int]] = {
    leaf: [block * num_groups // blocks.num_blocks for block in numbers]
    for leaf, numbers in blocks.of_leaf.items()
  }
  group |= {leaf: [num_groups - 1] for leaf in unused}
  for leaf, number in _overridden(leaves, overrides, num_groups).items():
    group[leaf] = [number]
  reused = _blocks.reused(model, blocks.of_leaf)
  axes = {leaf: axis for scan in model.scans for leaf, axis in scan.axes}
  entries: list[list[str]] = [[] for _ in range(num_groups)]
  sizes = [0] * num_groups
  for i in [*order, *unused]:
    size = math.prod(leaves[i].shape) // len(group[i])
    end = 0
    for number, run in itertools.groupby(group[i]):
      first, end = end, end + len(list(run))
      is_whole = end - first == len(group[i])
      entry = leaves[i].path if is_whole else _slice_entry(leaves[i].path, axes[i], first, end)
      entries[number].append(entry)
      sizes[number] += size * (end - first)
  return LayerGroups(
    groups=tuple(map(tuple, entries)),
    sizes=tuple(sizes),
    unused=tuple(leaves[i].path for i in unused),
    reused=tuple(leaves[i].path for i in order if i in reused),
  )


def _slice_entry(path: str, axis: int, first: int, end: int) -> str:
  """The entry of some layers of a leaf, along an axis."""
  return f"{path}[{':, ' * axis}{first}:{end}]"


def _read_slice_entry(entry: str) -> tuple[str, int, range] | None:
  """The path, the axis and the layers of an entry; None for that of a whole leaf."""
  match = _SLICE_ENTRY.fullmatch(entry)
  if match is None:
    return None
  path, before, first, end = match.groups()
  return path, len(before) // len(":, "), range(int(first), int(end))


def _overridden(
  leaves: list[_layer_axes.Leaf], overrides: Mapping[str, int] | None, num_groups: int
) -> dict[int, int]:
  if overrides is None:
    return {}
  words = "a dict from regular expressions to groups, as {'embed': 0}"
  _base.check_type("overrides", overrides, Mapping, words)
  for pattern, number in overrides.items():
    if not (_base.is_integer(number) and 0 <= number < num_groups):
      raise ValueError(
        f"`overrides` must name groups 0 to {num_groups - 1}; got {_base.shorten(number)} for"
        f" {_base.shorten(pattern)}."
      )
  group_of_pattern = [(pattern, int(number)) for pattern, number in overrides.items()]
  numbers = _tree.assign_groups("overrides", group_of_pattern, [leaf.path for leaf in leaves])
  return {i: number for i, number in enumerate(numbers) if number is not None}


_NO_CATCH_ALL = (
  " A leaf that no pattern matches is in the last group already, so the last pattern need not be a"
  " catch-all like '.*': one leaf's path will do."
)
# What follows the path of a stacked leaf, or of its module, in the name of a layer.
_LAYER = re.compile(r"\\?\[[^/]*\]$|/(\[[^/]*\]|\d+|\\d[+*]?)(/.*)?$")


def _layers_hint(pattern: str, paths: Sequence[str]) -> str:
  """What to do instead of a pattern that names layers of a stacked leaf; else empty."""
  try:
    stacked = _base.compile_pattern("groups", _LAYER.sub("", pattern))
  except ValueError:
    return ""
  path = next(filter(stacked.search, paths), None)
  if path is None or not _LAYER.search(pattern):
    return ""
  return (
    f" Patterns select whole leaves: if '{path}' holds the layers of a scan, as {pattern!r} says,"
    " pass `groups=layer_groups(loss_fn, params, batch)`, which groups layers."
  )


# A leaf's group; for layers in several groups an array that broadcasts against the leaf.
GroupNumber: TypeAlias = int | np.ndarray


class _SlicedLeaf(NamedTuple):
  """A leaf of a plan whose layers are in several groups."""

  axis: int
  group_of_layer: dict[int, int]


def group_numbers(tree: Any, groups: Groups, method: str) -> list[GroupNumber]:
  """The group of each leaf or of its layers; ValueError for a leaf that a plan lacks."""
  leaves = _layer_axes.leaves_of(tree)
  if not isinstance(groups, LayerGroups):
    group_of_pattern = [(pattern, number) for number, pattern in enumerate(groups)]
    paths = [leaf.path for leaf in leaves]
    of_leaves = _tree.assign_groups(
      "groups", group_of_pattern, paths, _NO_CATCH_ALL, tree=tree, hint=_layers_hint
    )
    return [len(groups) - 1 if number is None else number for number in of_leaves]
  whole: dict[str, int] = {}
  sliced: dict[str, _SlicedLeaf] = {}
  for number, entries in enumerate(groups.groups):
    for entry in entries:
      if (of_slice := _read_slice_entry(entry)) is not None:
        path, axis, layers = of_slice
        leaf_in_plan = sliced.setdefault(path, _SlicedLeaf(axis, {}))
        is_new = path not in whole and axis == leaf_in_plan.axis
        is_new &= leaf_in_plan.group_of_layer.keys().isdisjoint(layers)
        leaf_in_plan.group_of_layer.update(dict.fromkeys(layers, number))
      else:
        is_new = entry not in whole and entry not in sliced
        whole[entry] = number
      if not is_new:
        raise ValueError(
          f"`{method}` needs groups in which each leaf, or each of its layers along one axis, is"
          f" once; got '{entry}' in group {number} and others of this leaf before it. Make the"
          " groups with `layer_groups`."
        )
  return [
    whole[leaf.path]
    if leaf.path in whole
    else _numbers_along_axis(leaf, sliced.get(leaf.path, _SlicedLeaf(0, {})), method)
    for leaf in leaves
  ]


def _numbers_along_axis(leaf: _layer_axes.Leaf, in_plan: _SlicedLeaf, method: str) -> np.ndarray:
  """The groups of a leaf's layers, as an array that broadcasts against the leaf."""
  axis, group_of_layer = in_plan
  length = leaf.shape[axis] if axis < len(leaf.shape) else 0
  if not group_of_layer or sorted(group_of_layer) != list(range(length)):
    held = f"layers {_base.shorten(sorted(group_of_layer))} along axis {axis} of"
    raise ValueError(
      f"`{method}` was given groups for other params: they have"
      f" {held if group_of_layer else 'no group with'} the leaf"
      f" '{_tree.leaf_name(leaf.path)}' of shape {leaf.shape}. Make them with `layer_groups` from"
      " these params."
    )
  along = [-1 if i == axis else 1 for i in range(len(leaf.shape))]
  return np.array([group_of_layer[i] for i in range(length)]).reshape(along)


def count_groups(groups: Any) -> int:
  """The number of groups in a plan or a sequence of patterns; TypeError for anything else."""
  if isinstance(groups, LayerGroups):
    return len(groups.groups)
  words = "what `layer_groups` returned, or a sequence of regular expressions, one per group"
  _base.check_patterns("groups", groups, words)
  return len(groups)


def numbering(groups: Groups, method: str) -> Callable[[Any], Any]:
  """From a tree to its leaves' groups, in the structure of the tree; warns once per tree."""
  numbers = _tree.once_per_tree(lambda tree: group_numbers(tree, groups, method))
  return lambda tree: jax.tree.unflatten(jax.tree.structure(tree), numbers(tree))


def select_frozen(depth: Any, group: GroupNumber, if_frozen: Any, otherwise: Any) -> Any:
  """One of two values, or parts of both; decided while tracing if the depth is a NumPy integer.

  A value without the leaf's axes (a factored moment) is frozen with the last of its layers.
  """
  if isinstance(group, np.ndarray):
    shape = jnp.shape(otherwise)
    if len(shape) != group.ndim or any(
      n not in (1, m) for n, m in zip(group.shape, shape, strict=True)
    ):
      group = int(np.max(group))
    else:
      group = group.astype(np.int32)
  frozen = group < depth
  if isinstance(depth, np.integer | np.ndarray) and np.all(frozen) == np.any(frozen):
    return if_frozen if np.all(frozen) else otherwise
  return jnp.where(frozen, if_frozen, otherwise)

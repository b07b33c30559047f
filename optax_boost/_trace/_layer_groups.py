"""``layer_groups``: divides the params into groups, numbered in the order of the forward pass.

A :class:`LayerGroups` is called a *plan*.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import glob
import itertools
import math
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _checks, _masks, _paths, _patterns, _tree_checks, _trees, _types
from optax_boost._trace import _layer_axes


class LayerSlice(NamedTuple):
  """The layers of a leaf with the indices `start` to `stop` - 1 along `axis`."""

  path: str
  axis: int
  start: int
  stop: int

  def __str__(self) -> str:
    return f"{_paths.leaf_name(self.path)}[{':, ' * self.axis}{self.start}:{self.stop}]"


@dataclasses.dataclass(frozen=True)
class LayerGroups:
  """The groups of a model's leaves, made by :func:`layer_groups`; ``print`` shows them.

  ``len(groups)`` is their number, which freezing schedules take.

  Attributes:
    groups: for each group, the paths of its leaves in the order of the forward pass. If a group has
      only some layers of a leaf, a :class:`LayerSlice` replaces the path. It is printed as
      ``blocks/kernel[0:4]``, or, if axis 1 holds the layers, as ``blocks/kernel[:, 0:4]``.
    sizes: for each group, the number of its parameters.
  """

  groups: tuple[tuple[str | LayerSlice, ...], ...]
  sizes: tuple[int, ...]

  def __len__(self) -> int:
    return len(self.groups)

  def __str__(self) -> str:
    total = max(sum(self.sizes), 1)
    lines = []
    for index, (entries, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
      turn = {len(self.groups) - 1: ", never frozen"}.get(index, "" if index else ", frozen first")
      lines.append(
        f"group {index}: {size:,} parameters ({100 * size / total:.1f} %){turn}: "
        + ", ".join(_paths.leaf_name(str(entry)) for entry in entries)
      )
    return "\n".join(lines)


# A plan; or patterns, of which number i matches the paths of group i.
Groups: TypeAlias = LayerGroups | Sequence[str]


def layer_groups(
  params: optax.Params, blocks: Sequence[str], *, num_groups: int | None = None
) -> LayerGroups:
  """Groups the layers by name, in the order of the forward pass, which you give.

  Print the groups: group 0 is frozen first, the last group never. A list of names in the order of
  the tree, which is often alphabetical, may freeze the head first.

  Args:
    params: the params; arrays may be abstract.
    blocks: patterns (see :func:`path_mask`) in the order of the forward pass, such as ``["embed",
      "blocks/*", "head"]``; together they match each leaf once.

      - A pattern without stars is one block: ``"embed"``, ``"norm|head"``, ``"blocks/[0-3]"``.
      - A pattern with a star is a series of blocks, in the order of the numbers that the star
        matches. ``"conv_*|norm_*"`` puts both modules of a number into one block.
      - ``"blocks[*]"`` has a block for each layer of the leaves in ``blocks``, which are stacked
        along their first axis, as by ``nn.scan``; ``"blocks[:,*]"``: along their second axis.
    num_groups: the number of groups. None: a group for each block. Lowering the number puts equal
      numbers of neighbouring blocks into one group.

  Returns:
    A :class:`LayerGroups`.

  Raises:
    TypeError: `blocks` is not a list of patterns.
    ValueError: a leaf matches no pattern, or two; a pattern matches no leaf; no number tells the
      order of a series; stacked leaves have different numbers of layers; there are fewer blocks
      than groups. If names are missing, the message lists all names, to copy and to order.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"embed": jnp.ones((4, 8)), "layers": jnp.ones((3, 8, 8)), "head": jnp.ones(8)}
    >>> print(optax_boost.layer_groups(params, ["embed", "layers[*]", "head"], num_groups=4))
    group 0: 96 parameters (41.4 %), frozen first: embed, layers[0:1]
    group 1: 64 parameters (27.6 %): layers[1:2]
    group 2: 64 parameters (27.6 %): layers[2:3]
    group 3: 8 parameters (3.4 %), never frozen: head
  """
  _patterns.check_patterns(
    "blocks",
    blocks,
    "a list of patterns in the order of the forward pass, as ['embed', 'blocks/*', 'head']",
  )
  _tree_checks.check_traceable("params", params)
  leaves = _layer_axes.leaves_of(params)
  paths = [leaf.path.replace(".", "/") for leaf in leaves]
  pattern_of: dict[int, str] = {}
  placed: list[tuple[range, int, int]] = []  # for each leaf: the blocks of its layers, leaf, axis
  count = 0
  for pattern in blocks:
    for axis_of in _series(pattern, paths):
      if twice := axis_of.keys() & pattern_of.keys():
        raise _matched_twice(paths[min(twice)], pattern_of[min(twice)], pattern)
      layers = range(count, count + _count_layers(pattern, axis_of, leaves))
      placed += [(layers, i, axis or 0) for i, axis in axis_of.items()]
      pattern_of |= dict.fromkeys(axis_of, pattern)
      count = layers.stop
  if missing := [path for i, path in enumerate(paths) if i not in pattern_of]:
    raise ValueError(
      f"`blocks` must match each leaf; no pattern matches {_checks.shorten(missing)}."
      f"{_names_to_copy(paths)}"
    )
  num_groups = count if num_groups is None else num_groups
  _checks.check_whole_number("num_groups", num_groups, maximum=count, static=True)
  groups: list[list[str | LayerSlice]] = [[] for _ in range(num_groups)]
  sizes = [0] * num_groups
  for layers, i, axis in sorted(placed, key=lambda place: (place[0].start, place[1])):
    leaf, end = leaves[i], 0
    for number, run in itertools.groupby(block * num_groups // count for block in layers):
      start, end = end, end + len(list(run))
      is_whole = end - start == len(layers)
      groups[number].append(leaf.path if is_whole else LayerSlice(leaf.path, axis, start, end))
      sizes[number] += math.prod(leaf.shape) // len(layers) * (end - start)
  return LayerGroups(tuple(map(tuple, groups)), tuple(sizes))


# What follows the name of stacked leaves in a pattern.
_STACKED = re.compile(r"\[((?::,\s*)*)\*\]")


def _series(pattern: str, paths: Sequence[str]) -> list[dict[int, int | None]]:
  """Returns the blocks of a pattern, in their order.

  A block is a dict from the indices of leaves to the axes along which they are stacked, or None.
  """
  blocks: dict[tuple[str, ...], dict[int, int | None]] = {}
  names: dict[tuple[str, ...], str] = {}
  matched: set[int] = set()
  for part in pattern.split("|"):
    stacked, name = _STACKED.search(part), _STACKED.sub("", part)
    axis = None if stacked is None else stacked[1].count(":")
    for i, found in enumerate(map(_patterns.compile_stars("blocks", name), paths)):
      if found is not None and i not in matched:
        texts = found.groups() if "*" in name else ()
        names.setdefault(texts, found[0])
        blocks.setdefault(texts, {})[i] = axis
        matched.add(i)
  if not blocks:
    raise ValueError(f"`blocks` has {pattern!r}, which matches no leaf.{_names_to_copy(paths)}")
  order = {texts: list(map(_split_at_numbers, texts)) for texts in blocks}
  beginnings = ([text[0].rstrip("_/") for text in of_block] for of_block in order.values())
  if any(len(set(of_star)) > 1 for of_star in zip(*beginnings, strict=False)):
    raise ValueError(
      f"`blocks` has {pattern!r}, which matches {_checks.shorten([*names.values()])}; no number"
      " tells their order. Write a pattern for each; a slash in front means a name at the root:"
      " '/norm'."
    )
  return [blocks[texts] for texts in sorted(blocks, key=order.__getitem__)]


def _split_at_numbers(text: str) -> list[Any]:
  """Returns the parts of a text before, in, and after its numbers, in turn."""
  return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text))]


def _count_layers(
  pattern: str, axis_of: Mapping[int, int | None], leaves: Sequence[_layer_axes.Leaf]
) -> int:
  """Returns how many layers the leaves of a block stack; 1 if they aren't stacked."""
  lengths = {
    1 if axis is None else sum(leaves[i].shape[axis : axis + 1]) for i, axis in axis_of.items()
  }
  if len(lengths) > 1 or 0 in lengths:
    shapes = {leaves[i].path: leaves[i].shape for i in axis_of}
    raise ValueError(
      f"`blocks` has {pattern!r}, whose leaves must stack the same number of layers; got"
      f" {_checks.shorten(shapes)}."
    )
  return lengths.pop()


def _matched_twice(path: str, first: str, second: str) -> ValueError:
  at_root = next((f"/{p}" for p in (first, second) if "/" not in p and "." not in p), "/norm")
  return ValueError(
    f"`blocks` must match each leaf once; got {first!r} and {second!r}, which both match"
    f" '{_paths.leaf_name(path)}'. A slash in front means a name at the root: {at_root!r}."
  )


def _names_to_copy(paths: Sequence[str]) -> str:
  """Returns a sentence with names that match each leaf once, in the order of the tree."""
  tree: dict[str, Any] = {}
  for path in paths:
    module = tree
    for name in path.split("/"):
      module = module.setdefault(name, {})
  names = [_patterns.exact_pattern(name, paths) for name in _names_of(tree)]
  return (
    f" Put these names, which are in the order of the tree, into the order of the forward pass:"
    f" {names}. The tree doesn't tell that order; in its own, the head may freeze first."
  )


def _names_of(tree: Mapping[str, Any], parent: str = "") -> list[str]:
  """Returns the names of modules, with a star for each series of modules."""
  series: dict[str, list[str]] = {}
  for name in tree:
    series.setdefault(re.sub(r"\d+(?=\D*$)", "*", glob.escape(name)), []).append(name)
  names = []
  for star, members in series.items():
    children = [child for name in members for child in tree[name].items()]
    if len(members) == 1:
      inner = _names_of(tree[members[0]], f"{parent}{members[0]}/")
      names += inner if "*" in "".join(inner) else [parent + members[0]]
    elif parent and star != "*" and not children:
      names += [parent + name for name in members]  # the arrays of one layer
    else:
      # A list of lists of modules is one series.
      is_nested = bool(children) and all(name.isdigit() and below for name, below in children)
      names.append(f"{parent}{star}/*" if is_nested else parent + star)
  return names


_NO_CATCH_ALL = (
  "Write patterns of which only one matches it: a leaf that no pattern matches is in the last group"
  " already, which needs no catch-all like '*'."
)
# The group of a leaf; or an array of the groups of its layers that broadcasts against the leaf.
GroupNumber: TypeAlias = int | np.ndarray


class _SlicedLeaf(NamedTuple):
  """What a plan says of a leaf that is divided into layers.

  Attributes:
    axis: the axis of the layers.
    group_of_layer: the group of each layer, by the layer's index.
  """

  axis: int
  group_of_layer: dict[int, int]


def group_numbers(tree: _types.Params, groups: Groups, method: str) -> list[GroupNumber]:
  """Returns the :data:`GroupNumber` of each leaf of a tree; error messages name `method`.

  Raises ValueError if `groups` is a plan in which a leaf is missing or is listed twice, or which
  has a leaf that the tree lacks.
  """
  leaves = _layer_axes.leaves_of(tree)
  if not isinstance(groups, LayerGroups):
    group_of_pattern = [(pattern, number) for number, pattern in enumerate(groups)]
    paths = [leaf.path for leaf in leaves]
    numbers = _patterns.assign_groups("groups", group_of_pattern, paths, _NO_CATCH_ALL, tree=tree)
    return [len(groups) - 1 if number is None else number for number in numbers]
  whole: dict[str, int] = {}
  sliced: dict[str, _SlicedLeaf] = {}
  for number, entries in enumerate(groups.groups):
    for entry in entries:
      if isinstance(entry, LayerSlice):
        layers = range(entry.start, entry.stop)
        leaf_in_plan = sliced.setdefault(entry.path, _SlicedLeaf(entry.axis, {}))
        is_new = entry.path not in whole and entry.axis == leaf_in_plan.axis
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
  of_leaves: list[GroupNumber] = [
    whole[leaf.path]
    if leaf.path in whole
    else _numbers_along_axis(leaf, sliced.get(leaf.path, _SlicedLeaf(0, {})), method)
    for leaf in leaves
  ]
  # A `MaskedNode`, or None in its place, hides leaves of the plan. `optax.tree.map_params` calls
  # `init` with a tree without leaves.
  nodes = _paths.leaf_paths(tree, lambda node: node is None or _masks.is_masked(node))
  present = tuple(f"{path}/" if path else "" for path in nodes)
  surplus = [p for p in (*whole, *sliced) if not f"{p}/".startswith(present)]
  if leaves and surplus:
    raise ValueError(
      f"`{method}` was given groups for other params: they have the leaf '{surplus[0]}', which"
      " these params lack. Make them with `layer_groups` from these params."
    )
  return of_leaves


def _numbers_along_axis(leaf: _layer_axes.Leaf, in_plan: _SlicedLeaf, method: str) -> np.ndarray:
  """Returns the groups of a leaf's layers as an array that broadcasts against the leaf.

  `in_plan` has the axis of the layers, and the group of each layer in the plan. Raises ValueError,
  with the name `method`, if the plan does not list exactly the layers of the leaf.
  """
  axis, group_of_layer = in_plan
  length = leaf.shape[axis] if axis < len(leaf.shape) else 0
  if not group_of_layer or sorted(group_of_layer) != list(range(length)):
    held = f"layers {_checks.shorten(sorted(group_of_layer))} along axis {axis} of"
    raise ValueError(
      f"`{method}` was given groups for other params: they have"
      f" {held if group_of_layer else 'no group with'} the leaf"
      f" '{_paths.leaf_name(leaf.path)}' of shape {leaf.shape}. Make them with `layer_groups` from"
      " these params."
    )
  along = [-1 if i == axis else 1 for i in range(len(leaf.shape))]
  return np.array([group_of_layer[i] for i in range(length)]).reshape(along)


def count_groups(groups: Groups) -> int:
  """Returns the number of groups in a plan or in a sequence of patterns; else raises TypeError."""
  if not isinstance(groups, LayerGroups):
    words = "what `layer_groups` returned, or a sequence of patterns, one per group"
    _patterns.check_patterns("groups", groups, words)
  return len(groups)


def numbering(groups: Groups, method: str) -> Callable[[_types.Params], _types.Tree]:
  """Returns a function that takes a tree of params, and returns the group number of each leaf.

  The returned tree has the structure of the params, and a :data:`GroupNumber` in place of each
  leaf. `groups` assigns groups to the paths of leaves. If `groups` is a :class:`LayerGroups` that
  does not fit the params, the function raises ValueError; the message names `method`, which is the
  name of the method to which the user has passed `groups`.
  """
  numbers = _trees.once_per_tree(lambda tree: group_numbers(tree, groups, method))
  return lambda tree: jax.tree.unflatten(jax.tree.structure(tree), numbers(tree))


def select_frozen(
  depth: jax.Array | np.integer, group: GroupNumber, if_frozen: _types.Leaf, otherwise: _types.Leaf
) -> _types.Leaf:
  """Returns the entries of `if_frozen` in groups below `depth`, and of `otherwise` in other groups.

  `group` is the :data:`GroupNumber` of the leaf to which the two arrays belong. If the arrays don't
  have the axes of the leaf, as a factored moment, all of `if_frozen` is returned once all layers of
  the leaf are frozen. If `depth` is a NumPy number, and the leaf is frozen as a whole or not at
  all, the function returns one of the two arrays, and adds nothing to the program.
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

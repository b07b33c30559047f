"""``layer_groups``: divides the params into groups, numbered in the order of the forward pass.

A group is one or several blocks in a row (``_blocks``). A :class:`LayerGroups` is called a *plan*.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _checks, _masks, _paths, _patterns, _trees, _types
from optax_boost._trace import (
  _blocks,
  _layer_axes,
  _leaf_uses,
  _losses,
  _places,
  _question,
  _traced_leaves,
)


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
    unused: leaves that the loss does not depend on. These leaves are in the last group.
    reused: leaves that are used again after a later layer (tied weights, unrolled recurrences).
      Such a leaf is frozen with the layer that uses the leaf first.
    origin: a line for ``print``, which tells what the blocks are, and how to choose other blocks.
  """

  groups: tuple[tuple[str | LayerSlice, ...], ...]
  sizes: tuple[int, ...]
  unused: tuple[str, ...] = ()
  reused: tuple[str, ...] = ()
  origin: str = dataclasses.field(default="", compare=False)

  def __len__(self) -> int:
    return len(self.groups)

  def __str__(self) -> str:
    total = max(sum(self.sizes), 1)
    lines = []
    for index, (entries, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
      never = ", never frozen" if index == len(self.groups) - 1 else ""
      lines.append(
        f"group {index}: {size:,} parameters ({100 * size / total:.1f} %){never}: "
        + ", ".join(_paths.leaf_name(str(entry)) for entry in entries)
      )
    if self.unused:
      lines.append("not used by the loss, so never frozen: " + ", ".join(self.unused))
    if self.reused:
      lines.append("used again later, frozen where they are used first: " + ", ".join(self.reused))
    if self.origin:
      lines.append(self.origin)
    return "\n".join(lines)


# A plan; or patterns, of which number i matches the paths of group i.
Groups: TypeAlias = LayerGroups | Sequence[str]


def layer_groups(
  loss_fn: _types.LossFn,
  params: optax.Params,
  *args: Any,
  num_groups: int | None = None,
  blocks: str | Sequence[str] | None = None,
  overrides: Mapping[str, int] | None = None,
  axis_name: _types.AxisName | None = None,
) -> LayerGroups:
  """Groups the leaves in the order of the forward pass, which a trace of the loss shows.

  A *block* is a module that the model repeats, and by default each block is a group. Blocks are a
  series of modules whose names differ by a number (``layers/0``, ``Block_3``, ``block_0_rgb``; the
  first may lack it, as in ``block, block_1``), or the layers that a scan slices or the program
  takes by an index (``nn.scan``, ``lax.scan``, ``w[i]``), also of numbered scans in a row. In a
  series, two or more blocks have several kernels, and each block gets data from the block before
  it. If one series or scan is inside of another, the outer one gives the blocks. The leaves before
  all blocks (patches, class token, positions, a tied embedding) are the first group, and the leaves
  after all blocks (final norm, pooler, head) the last, as in BEiT, MAE and ``timm``.

  In a model without a series, each layer (a kernel with its bias and normalization, or a recurrent
  cell) is a block if the layers are a plain chain, as in an MLP. For any other model, for several
  series (two towers, an encoder and a decoder), and if more kernels are beside a series than in it,
  an error lists the values of `blocks` to choose from. There, kernels in no order with the series'
  blocks, as in another tower, count twice. ``print`` shows which blocks were chosen. The loss is
  traced, not computed, so arrays may be abstract.

  A leaf that is in no block is placed by the flow of data. If no block gets data from the leaf, the
  leaf is after all blocks. Otherwise, the leaf joins the last block from which the leaf gets data,
  or the first step of a scan of which all steps use the leaf. If the leaf gets data from no block,
  the leaf joins the first block that gets data from the leaf; but if this block begins its series,
  and the loss uses the leaf before this block, the leaf is before all blocks.

  Noise, and arrays that the loss closes over (an adapter's base weights, a pruning mask), count as
  data only if otherwise at most one operation would combine params with data. An array in `args`
  always counts as data, so let the loss close over arrays that are not data.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng. A loss from ``nnx.split_loss`` or
      ``linen.split_loss`` takes its model state first, which is not data.
    num_groups: the number of groups, of which the last is never frozen. None: a group for each
      block. Lowering the number puts equal numbers of neighbouring blocks into one group. If there
      are fewer blocks than this number, and `blocks` is None, each layer is a block instead. In a
      model without a series or a chain, parallel layers stay in one group.
    blocks: a pattern (see :func:`path_mask`) of the modules that are blocks:
      ``"encoder/layers/*"``, ``"stages/*/blocks/*"``. A single name selects the outermost modules
      that it matches. If a scan or an index slices the leaves of a selected module, each layer is a
      block; ``"stages/*[*]"`` selects the layers of several scans. Patterns with bars between them
      select one series, in the order of use: ``"encoder/block/*|decoder/block/*"``.
      ``"attn_0&mlp_0|attn_1&mlp_1"`` selects blocks that are several modules. A sequence, such as
      ``("text/blocks/*", "image/blocks/*")``, selects parallel series, one for each pattern; the
      last blocks of all series are in one group. None: the blocks described above.
    overrides: a dict from patterns (see :func:`path_mask`) to groups. All layers of a leaf that the
      pattern matches are in this group, whatever the trace shows.
    axis_name: the axis, or axes, of ``vmap``, ``pmap`` or ``shard_map`` that the loss reduces over
      (``pmean``, a BatchNorm with `axis_name`).

  Returns:
    A :class:`LayerGroups`.

  Raises:
    ValueError: the trace doesn't tell the blocks, and `blocks` is None; a pattern of `blocks`
      selects nothing, or two patterns select one leaf; there are fewer blocks than groups; the loss
      uses no leaf, or a named axis that is not in `axis_name`; an override's group does not exist,
      or two overrides put a leaf into different groups.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"a_head": jnp.ones((8, 1)), "z_body": {"bias": jnp.ones(8), "kernel": jnp.eye(8)}}
    >>> def loss_fn(params, x):
    ...   h = jnp.tanh(x @ params["z_body"]["kernel"] + params["z_body"]["bias"])
    ...   return jnp.mean(h @ params["a_head"])
    >>> print(optax_boost.layer_groups(loss_fn, params, jnp.ones((2, 8))))
    group 0: 72 parameters (90.0 %): z_body/kernel, z_body/bias
    group 1: 8 parameters (10.0 %), never frozen: a_head
    blocks: each layer of a chain; for others pass blocks="..."

    Two parallel towers of two blocks each:

    >>> from optax_boost import layer_groups
    >>> block = {"up": jnp.eye(8), "down": jnp.eye(8)}
    >>> params = {"image": [block, block], "text": [block, block]}
    >>> def loss_fn(params, x):
    ...   image = text = x
    ...   for p in params["image"]:
    ...     image += jnp.tanh(image @ p["up"]) @ p["down"]
    ...   for p in params["text"]:
    ...     text += jnp.tanh(text @ p["up"]) @ p["down"]
    ...   return jnp.mean(image * text)
    >>> print(layer_groups(loss_fn, params, jnp.ones((2, 8)), blocks=("image/*", "text/*")))
    group 0: 256 parameters (50.0 %): image/0/up, image/0/down, text/0/up, text/0/down
    group 1: 256 parameters (50.0 %), never frozen: image/1/up, image/1/down, text/1/up, text/1/down
    blocks: "image/*" (2 modules) side by side with "text/*" (2 modules)
  """
  if num_groups is not None:
    _checks.check_whole_number("num_groups", num_groups, static=True)
    num_groups = int(num_groups)
  patterns = None if blocks is None else _blocks.check_patterns(blocks)
  program = _losses.trace(loss_fn, params, args, axis_name)
  model = _model_of(_leaf_uses.follow(program, params, _losses.data_flags(loss_fn, args)))
  try:
    chosen = (
      _blocks.blocks_by_default(model, num_groups)
      if patterns is None
      else _blocks.blocks_of_patterns(model, patterns)
    )
  except _question.Unclear as question:
    raise ValueError(str(question)) from None
  if patterns is None and num_groups is not None and num_groups > chosen.num_blocks:
    chosen = _blocks.smallest_blocks(model)
  return _groups_of_blocks(model, chosen, params, num_groups, overrides)


def even_groups(
  findings: _leaf_uses.Findings, params: optax.Params, num_groups: int
) -> LayerGroups:
  """Divides the leaves of a traced loss into `num_groups` groups; returns the plan.

  A group is made of blocks, or of layers if the trace shows fewer than `num_groups` blocks.
  """
  model = _model_of(findings)
  try:
    chosen = _blocks.blocks_by_default(model)
  except _question.Unclear:
    chosen = None
  if chosen is None or chosen.num_blocks < num_groups:
    chosen = _blocks.smallest_blocks(model)
  return _groups_of_blocks(model, chosen, params, num_groups, None)


def _model_of(findings: _leaf_uses.Findings) -> _traced_leaves.Model:
  """Returns the model of a traced loss; raises ValueError if the loss uses no leaf."""
  model = _traced_leaves.Model(findings)
  if not model.order:
    raise ValueError(
      f"`layer_groups` found no leaf among the {len(model.leaves)} of `params` that the loss uses."
      " Pass the params that `loss_fn` takes as its first argument."
    )
  return model


def _groups_of_blocks(
  model: _traced_leaves.Model,
  blocks: _places.Blocks,
  params: optax.Params,
  num_groups: int | None,
  overrides: Mapping[str, int] | None,
) -> LayerGroups:
  """Returns groups of equal numbers of blocks, or, if `num_groups` is None, a group per block."""
  leaves = _layer_axes.leaves_of(params)
  order = list(model.order)
  unused = [i for i in range(len(leaves)) if i not in model.order]
  num_groups = blocks.num_blocks if num_groups is None else num_groups
  if blocks.num_blocks < num_groups:
    raise ValueError(
      f"`layer_groups` can't make {num_groups} groups of {blocks.num_blocks} blocks (a kernel with"
      " its bias and normalization is one, or a layer of a scan, or what `blocks` selects). Pass"
      f" num_groups={blocks.num_blocks} or fewer."
    )
  group: dict[int, list[int]] = {
    leaf: [block * num_groups // blocks.num_blocks for block in numbers]
    for leaf, numbers in blocks.by_leaf.items()
  }
  group |= {leaf: [num_groups - 1] for leaf in unused}
  for leaf, number in _overridden(leaves, overrides, num_groups).items():
    group[leaf] = [number]
  reused = _places.reused(model, blocks.by_leaf)
  axes = {leaf: axis for scan in model.scans for leaf, axis in scan.axes}
  entries: list[list[str | LayerSlice]] = [[] for _ in range(num_groups)]
  sizes = [0] * num_groups
  for i in [*order, *unused]:
    size = math.prod(leaves[i].shape) // len(group[i])
    end = 0
    for number, run in itertools.groupby(group[i]):
      first, end = end, end + len(list(run))
      is_whole = end - first == len(group[i])
      path = leaves[i].path
      entries[number].append(path if is_whole else LayerSlice(path, axes[i], first, end))
      sizes[number] += size * (end - first)
  return LayerGroups(
    groups=tuple(map(tuple, entries)),
    sizes=tuple(sizes),
    unused=tuple(leaves[i].path for i in unused),
    reused=tuple(leaves[i].path for i in order if i in reused),
    origin=blocks.origin,
  )


def _overridden(
  leaves: list[_layer_axes.Leaf], overrides: Mapping[str, int] | None, num_groups: int
) -> dict[int, int]:
  if overrides is None:
    return {}
  words = "a dict from patterns to groups, as {'embed': 0}"
  _checks.check_type("overrides", overrides, Mapping, words)
  for pattern, number in overrides.items():
    if not (_checks.is_integer(number) and 0 <= number < num_groups):
      raise ValueError(
        f"`overrides` must name groups 0 to {num_groups - 1}; got {_checks.shorten(number)} for"
        f" {_checks.shorten(pattern)}."
      )
  group_of_pattern = [(pattern, int(number)) for pattern, number in overrides.items()]
  numbers = _patterns.assign_groups("overrides", group_of_pattern, [leaf.path for leaf in leaves])
  return {i: number for i, number in enumerate(numbers) if number is not None}


_NO_CATCH_ALL = (
  "Write patterns of which only one matches it: a leaf that no pattern matches is in the last group"
  " already, which needs no catch-all like '*'."
)
# Matches the end of a pattern from the numbers of layers on: `/[0-5]` in `blocks/kernel/[0-5]`.
_LAYER = re.compile(r"\[[^/]*\]$|/(\[[^/]*\]|\d+)(/.*)?$")


def _layers_hint(pattern: str, paths: Sequence[str]) -> str:
  """Returns the hint that only `layer_groups` divides a leaf into layers, or "".

  The hint is due if the pattern ends with numbers of layers, and its beginning matches one of the
  leaves `paths`.
  """
  whole = _LAYER.sub("", pattern)
  match = _patterns.compile_pattern("groups", f"{whole}/**")  # from the root on
  path = next((path for path in paths if match(path) is not None), None)
  if path is None or whole == pattern:
    return ""
  return (
    f" Patterns select whole leaves: if '{path}' holds the layers of a scan, as {pattern!r} says,"
    " pass `groups=layer_groups(loss_fn, params, batch)`, which groups layers."
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
    numbers = _patterns.assign_groups(
      "groups", group_of_pattern, paths, _NO_CATCH_ALL, tree=tree, hint=_layers_hint
    )
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


def to_text(groups: Groups) -> str:
  """Returns a text from which :func:`from_text` makes equal groups, in every process."""
  if isinstance(groups, LayerGroups):
    return json.dumps({"groups": groups.groups})
  return json.dumps(list(groups))


def from_text(text: str) -> Groups:
  """Returns the groups that :func:`to_text` has written; sizes are zero."""
  value = json.loads(text)
  if isinstance(value, list):
    return value
  groups = [
    [LayerSlice(*e) if isinstance(e, list) else e for e in group] for group in value["groups"]
  ]
  return LayerGroups(tuple(map(tuple, groups)), (0,) * len(groups))


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

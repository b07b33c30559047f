"""Follows the leaves of params through a traced loss: where they are used, and on which data.

One walk (``_leaf_walk``) finds all of it. Leaf A is *upstream* of leaf B if B meets
data that were computed with A. The order in which a program uses A and B does not tell this, since
a program uses two parallel towers one after the other.

>>> import jax, jax.numpy as jnp
>>> def loss_fn(params, x):
...   left, right = x @ params["left"], x @ params["right"]
...   return jnp.sum((left + right) @ params["top"])
>>> params = {"left": jnp.ones((2, 2)), "right": jnp.ones((2, 2)), "top": jnp.ones((2, 2))}
>>> program = jax.make_jaxpr(loss_fn)(params, jnp.ones((2, 2)))
>>> [sorted(leaves) for leaves in follow(program, params, [True]).upstream]
[[], [], [0, 1]]
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

from optax_boost._foundation import _leaf_names, _paths, _types
from optax_boost._trace import _data_kinds, _layer_scans, _leaf_walk, _uses
from optax_boost._trace._uses import Use, UseKind


class Findings(NamedTuple):
  """The uses of all leaves in a loss; a leaf's number is its index in ``jax.tree.leaves``.

  Attributes:
    paths: the path of each leaf.
    shapes: the shape of each leaf.
    uses: for each equation in which leaves meet data, its uses of leaves; penalties come last.
    early_uses: the uses of kernels in products without data, and of leaves as inputs of kernels.
    expert_uses: the uses of kernels that data has looked up or scaled.
    unknown_uses: the equations whose results have no axis map of a leaf that an operand has.
    batch_axes: for each leaf, the axes along which each slice of the data has a separate kernel
      (experts, ``vmap``). In a product with the kernels, such an axis is a batch dimension. Leaves
      that enter no product, such as the biases of these kernels, have such axes, too.
    scans: the scans over layers, in the order of the program, then the layers that the program
      takes by an index.
    upstream: for each leaf, the leaves upstream of its first use (in a loop, its first iteration).
    ever_upstream: for each leaf, the leaves upstream of any of its uses, in any loop iteration.
    recurrent: for each loop whose iterations depend on each other, the leaves that every iteration
      uses.
  """

  paths: list[str]
  shapes: list[tuple[int, ...]]
  uses: list[list[Use]]
  early_uses: list[Use]
  expert_uses: list[Use]
  unknown_uses: list[Use]
  batch_axes: list[_uses.Axes]
  scans: list[_layer_scans.LayerScan]
  upstream: list[frozenset[int]]
  ever_upstream: list[frozenset[int]]
  recurrent: list[frozenset[int]]

  @property
  def order(self) -> list[int]:
    """Returns the leaf of each use, in the order of uses; leaves of penalties alone come last."""
    used: list[int] = []
    in_penalties: set[int] = set()
    for uses in self.uses:
      used += dict.fromkeys(use.leaf for use in uses if use.kind != UseKind.PENALTY)
      in_penalties |= {use.leaf for use in uses if use.kind == UseKind.PENALTY}
    return used + sorted(in_penalties - set(used))


def follow(
  program: _types.Jaxpr, tree: _types.Tree, data: Sequence[bool | None] | None = None
) -> Findings:
  """Follows the leaves of a tree, the first arguments of a loss's program.

  `data` has a flag for each other argument: True for data (the default), None for constants. At
  first, only arrays of the batch count as data. If fewer than two equations use further leaves on
  data, the search starts again with one more kind of data. If no definition of data gives two
  equations, the first with one decides, or else the first.
  """
  paths = _paths.leaf_paths(tree)
  avals = [variable.aval for variable in program.jaxpr.invars]
  others = avals[len(paths) :]
  flags = [True] * len(others) if data is None else data
  named = frozenset(leaf for leaf, path in enumerate(paths) if _leaf_names.is_kernel(path))
  walks = []
  for definition in _data_kinds.DataKind:
    walk = _leaf_walk.LeafWalk(definition, named)
    arguments = [walk.leaf(aval.shape) for aval in avals[: len(paths)]]
    arguments += [
      walk.argument(aval.shape, _data_kinds.kind_of(aval, flag))
      for aval, flag in zip(others, flags, strict=True)
    ]
    for loss in walk.run(program, arguments)[:1]:
      walk.note_result(loss)
    walks.append(walk)
    if walk.num_meetings > 1:
      break
  return _findings(max(walks, key=lambda walk: walk.num_meetings), paths)


def _findings(walk: _leaf_walk.LeafWalk, paths: list[str]) -> Findings:
  as_set = functools.cache(_as_set)  # most leaves have the upstream leaves of another one
  upstream, ever_upstream = (
    [as_set(found.get(leaf, 0)) for leaf in range(len(paths))]
    for found in (walk.upstream, walk.ever_upstream)
  )
  shared_by = list(map(as_set, walk.shared_by))
  scanned = {leaf for scan in walk.scans for leaf in scan.axis_of}
  indexed = _layer_scans.find_indexed([*walk.meetings.values()], walk.shapes, shared_by)
  return Findings(
    paths=paths,
    shapes=walk.shapes,
    uses=list(filter(None, walk.uses)),
    early_uses=[*walk.early_uses, *walk.inputs.values()],
    expert_uses=walk.expert_uses,
    unknown_uses=walk.unknown_uses,
    batch_axes=walk.batch_axes(),
    scans=[*walk.scans, *(scan for scan in indexed if scanned.isdisjoint(scan.axis_of))],
    upstream=upstream,
    ever_upstream=ever_upstream,
    recurrent=[
      leaves
      for leaves in dict.fromkeys(shared_by)
      if any(leaf in ever_upstream[leaf] for leaf in leaves)
    ],
  )


def _as_set(bits: int) -> frozenset[int]:
  return frozenset(leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1)

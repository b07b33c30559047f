"""Follows the leaves of params through a traced loss to the equations that use them."""

from collections.abc import Sequence
from typing import NamedTuple

from optax_boost._foundation import _leaf_names, _paths, _types
from optax_boost._trace import _data_kinds, _leaf_walk, _uses
from optax_boost._trace._uses import Use, UseKind


class Findings(NamedTuple):
  """The uses of all leaves in a loss; a leaf's number is its index in ``jax.tree.leaves``.

  Attributes:
    paths: the path of each leaf.
    shapes: the shape of each leaf.
    uses: the uses of each leaf; those in products without data come before those with data.
    batch_axes: for each leaf, the axes along which each slice of the data has a separate kernel
      (experts, ``vmap``). In a product with the kernels, such an axis is a batch dimension. Leaves
      that enter no product, such as the biases of these kernels, have such axes, too.
  """

  paths: list[str]
  shapes: list[tuple[int, ...]]
  uses: list[list[Use]]
  batch_axes: list[_uses.Axes]


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
    walk.run(program, arguments)
    walks.append(walk)
    if walk.num_meetings > 1:
      break
  walk = max(walks, key=lambda walk: walk.num_meetings)
  shapes = [aval.shape for aval in avals[: len(paths)]]
  return Findings(paths, shapes, _uses_of_leaves(walk, len(paths)), walk.batch_axes())


def _uses_of_leaves(walk: _leaf_walk.LeafWalk, num_leaves: int) -> list[list[Use]]:
  uses: list[list[Use]] = [[] for _ in range(num_leaves)]
  experts = {use.leaf for use in walk.expert_uses}
  before_data = (*walk.expert_uses, *walk.early_uses, *walk.inputs.values())
  for use in (*before_data, *walk.uses, *walk.unknown_uses):
    # Data looks up the kernels of experts, as rows of a table, but they are used in products.
    if use.leaf not in experts or use.kind in (UseKind.CONTRACTED, UseKind.UNKNOWN):
      uses[use.leaf].append(use)
  return uses

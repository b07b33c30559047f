"""What a traced loss says of its params: each leaf's axes, and the order in which they are used.

Where a leaf first meets data, the equation tells its axes apart: contracted ones are the fan-in;
axes that a scan slices, that index one of many kernels, or along which each kernel has data of its
own (``vmap``, experts) count layers; the others are outputs. A gather looks rows up: an embedding
has no fan-in.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost import _leaf_uses
from optax_boost import _tree


class Axes(NamedTuple):
  """The axes of a leaf, ascending; each is in one of the first three."""

  fan_in: tuple[int, ...]  # summed over where the leaf first meets data
  layers: tuple[int, ...]  # along which the leaf holds layers, or experts
  outputs: tuple[int, ...]
  window: tuple[int, ...] = ()  # those of `fan_in` along which a convolution slides

  @property
  def mixes_inputs(self) -> bool:
    """Whether an output has several inputs, unlike in embeddings and depthwise convolutions."""
    return set(self.fan_in) > set(self.window)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layers:
  """What a traced loss says of its params. Static: a pytree without leaves, hashable.

  Attributes:
    paths: the path of each leaf.
    axes: each leaf's axes; None if the loss does not tell, or does not use the leaf.
    uses: the leaves, by number, in the order in which the loss brings them to data; a leaf that is
      used again is repeated.
    scans: the scans over layers, in the order of the program.
  """

  paths: tuple[str, ...]
  axes: tuple[Axes | None, ...]
  uses: tuple[int, ...]
  scans: tuple[_leaf_uses.Scan, ...]

  def of(self, paths: Iterable[str]) -> list[Axes | None]:
    """The axes of the leaves at some paths; None for a path that the loss's params lack."""
    by_path = dict(zip(self.paths, self.axes, strict=True))
    return [by_path.get(path) for path in paths]


def describe(program: Any, params: Any, data: Sequence[bool | None] | None = None) -> Layers:
  """Describes the params of a traced loss, whose leaves are the program's first arguments.

  `data` flags the other arguments; None makes one a constant, and all are data without flags.
  Scalars, constants and noise count as data, in this order, only if all leaves would otherwise
  meet data in one place or nowhere.
  """
  paths = _tree.leaf_paths(params)
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  others = program.jaxpr.invars[len(paths) :]
  flags = [True] * len(others) if data is None else data
  kinds = [_kind(variable.aval, flag) for variable, flag in zip(others, flags, strict=True)]
  candidates = []
  accepted: set[str | None] = set()
  for kind in (_ARRAY, _SCALAR, _CONSTANT, _KEY):
    accepted = {*accepted, kind}
    uses = _leaf_uses.LeafUses(
      constants_are_data=_CONSTANT in accepted, noise_is_data=_KEY in accepted
    )
    leaves = [uses.leaf(shape) for shape in shapes[: len(paths)]]
    arguments = zip(shapes[len(paths) :], kinds, strict=True)
    values = [uses.value(shape, data=own in accepted) for shape, own in arguments]
    for output in uses.run(program, [*leaves, *values])[:1]:
      # A loss without data: nothing but a penalty.
      uses.places.append(
        [_leaf_uses.Use(leaf, _leaf_uses.PENALTY) for leaf in sorted(output.leaves)]
      )
    candidates.append(uses)
    if _count_places(uses) > 1:
      break
  best = max(candidates, key=_count_places)
  axes = tuple(_axes(best, leaf, len(shapes[leaf])) for leaf in range(len(paths)))
  return Layers(tuple(paths), axes, tuple(_order(best)), tuple(best.scans))


_ARRAY, _SCALAR, _CONSTANT, _KEY = "array", "scalar", "constant", "key"


def _kind(aval: Any, is_data: bool | None) -> str | None:
  if is_data is False:
    return None
  # Noise on the weights, drawn ahead of the forward pass, is not where they are used.
  if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
    return _KEY
  if is_data is None:
    return _CONSTANT if aval.size > 1 else None
  return _ARRAY if aval.size > 1 else _SCALAR


def _count_places(uses: _leaf_uses.LeafUses) -> int:
  """In how many equations leaves meet data for the first time."""
  first: dict[tuple[int, bool], int] = {}
  for place, own in enumerate(uses.places):
    for use in own:
      first.setdefault((use.leaf, use.kind == _leaf_uses.PENALTY), place)
  return len({place for (_, is_penalty), place in first.items() if not is_penalty})


def _order(uses: _leaf_uses.LeafUses) -> list[int]:
  """The leaves in the order of their uses; those in penalties alone come last."""
  used = {True: list[int](), False: list[int]()}
  for place in uses.places:
    for is_penalty, leaves in used.items():
      own = [use.leaf for use in place if (use.kind == _leaf_uses.PENALTY) == is_penalty]
      leaves += dict.fromkeys(own)
  return used[False] + sorted(set(used[True]) - set(used[False]))


def _axes(uses: _leaf_uses.LeafUses, leaf: int, rank: int) -> Axes | None:
  """The axes of a leaf, by its first use that tells them."""
  own = [use for place in uses.places for use in place if use.leaf == leaf]
  own += [use for use in uses.experts if use.leaf == leaf]
  experts = {use.leaf for use in uses.experts}
  # Rows of a tied embedding are looked up, and contracted where it is the last layer.
  telling = [_leaf_uses.LOOKED_UP, _leaf_uses.CONTRACTED, _leaf_uses.ENTRYWISE]
  for kind in telling[1:] if leaf in experts else telling:
    for use in own:
      if use.kind == kind:
        layers = (use.layers | uses.matched_axes(leaf)) - use.fan_in
        outputs = frozenset(range(rank)) - layers - use.fan_in
        return Axes(*(tuple(sorted(axes)) for axes in (use.fan_in, layers, outputs, use.window)))
  return None

"""What a traced loss says of its params: each leaf's axes, and the order in which they are used.

Where a leaf first meets data, the equation tells its axes apart: contracted ones are the fan-in;
axes that a scan slices, that index one of many kernels, or along which each kernel has data of its
own (``vmap``, experts) count layers; the others are outputs. A gather looks rows up: an embedding
has no fan-in.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost._trace import _jaxpr
from optax_boost._trace import _leaf_uses


class Axes(NamedTuple):
  """The axes of a leaf, ascending; each is in one of the first three."""

  fan_in: tuple[int, ...]  # summed over where the leaf first meets data
  layers: tuple[int, ...]  # along which the leaf holds layers, or experts
  outputs: tuple[int, ...]
  window: tuple[int, ...] = ()  # the axes of `fan_in` along which a convolution slides

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

  def __str__(self) -> str:
    lines = []
    for path, axes in zip(self.paths, self.axes, strict=True):
      kinds = ("layers", "fan_in", "outputs") if axes is not None else ()
      told = [f"{kind.replace('_', '-')} {own}" for kind in kinds if (own := getattr(axes, kind))]
      lines.append(
        f"{_tree.leaf_name(path)}: {', '.join(told) or ('scalar' if axes else 'unknown')}"
      )
    return "\n".join(lines)


class OnDemand:
  """The description of the layers of a loss that is being traced; made when it is asked for."""

  def __init__(self, describe: Callable[[], Layers]) -> None:
    self.describe = functools.cache(describe)


class Leaf(NamedTuple):
  """A leaf of a tree, as the rules of the methods see it."""

  path: str  # the keys joined by `/`, as in `block_1/conv/kernel`
  shape: tuple[int, ...]
  axes: Axes | None = None  # if a trace of the loss tells them

  @property
  def stacked(self) -> tuple[int, ...]:
    """The axes along which the leaf holds layers."""
    return self.axes.layers if self.axes is not None else ()

  @property
  def layer_axes(self) -> tuple[int, ...]:
    """The axes of one layer: all but the stacked ones."""
    return tuple(axis for axis in range(len(self.shape)) if axis not in self.stacked)

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """The shape of one layer."""
    return tuple(self.shape[axis] for axis in self.layer_axes)

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """The sizes of the stacked axes, ``()`` for a leaf that is one layer."""
    return tuple(self.shape[axis] for axis in self.stacked)

  @property
  def layers(self) -> int:
    """How many layers the leaf holds."""
    return math.prod(self.stacked_shape)


_EMBEDDING = re.compile(r"(^|[/.])[a-z_]*(embedding([/.]weight)?|embeddings|embeds?)$")
_KERNEL = re.compile(r"(^|[/.])(kernel|weight|w)$")
# Flax's attention: of [features, heads, head features] only the first axis is fan-in.
_ATTENTION_INPUT = re.compile(r"(^|[/.])(query|key|value)[/.]kernel$")


def fan_in(leaf: Leaf, layout: str) -> tuple[int, ...]:
  """The axes of one output's incoming weights: as the loss tells, or by name and layout."""
  if leaf.axes is not None and leaf.axes.fan_in:
    return leaf.axes.fan_in
  if layout == "torch":
    return leaf.layer_axes[1:]
  is_attention = len(leaf.layer_axes) == 3 and _ATTENTION_INPUT.search(leaf.path)
  return leaf.layer_axes[: 1 if is_attention else -1]


def leaves_of(tree: Any, layers: Layers | None = None) -> list[Leaf]:
  """The leaves of a tree, in the order of ``jax.tree.leaves``.

  Leaves without a place in `layers`, or of another rank there, have no known axes.
  """
  by_path = dict(zip(layers.paths, layers.axes, strict=True)) if layers is not None else {}
  leaves = []
  for path, leaf in zip(_tree.leaf_paths(tree), jax.tree.leaves(tree), strict=True):
    axes, rank = by_path.get(path), jnp.ndim(leaf)
    known = axes is not None and len(axes.fan_in + axes.layers + axes.outputs) == rank
    leaves.append(Leaf(path, jnp.shape(leaf), axes if known else None))
  return leaves


def layer_axes(loss_fn: Callable[..., Any], params: optax.Params, *args: Any) -> Layers:
  """Reads the axes of the params from a trace of the loss.

  :func:`make_train_step` does this by itself. In a loop of your own, pass the result as `layers` to
  the methods that take it. Nothing is computed; arrays may be abstract.

  A leaf's axes are told by the operation in which it first meets data. Axes that a matrix product
  or a convolution sums over are the fan-in; axes that a scan slices, that index one of many
  kernels, or along which each kernel has data of its own (``vmap``, experts) hold layers; the
  others are outputs. Rows of embeddings are looked up, so these have no fan-in. A kernel whose
  input no data goes into (noise, constants, learned tables) has the fan-in of its product with it.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng. A loss from ``nnx.split_loss`` or
      ``linen.split_loss`` takes its model state first.

  Returns:
    A description of all leaves: hashable, a pytree without leaves.

  Raises:
    TypeError: `loss_fn` is not callable, or a leaf of the other arguments is not an array.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> def loss_fn(params, x):
    ...   x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])
    ...   return jnp.mean(x @ params["head"])
    >>> params = {"blocks": jnp.ones((4, 8, 8)), "head": jnp.ones((8, 1))}
    >>> layers = optax_boost.layer_axes(loss_fn, params, jnp.ones((2, 8)))
    >>> print(layers)
    blocks: layers (0,), fan-in (1,), outputs (2,)
    head: fan-in (0,), outputs (1,)
    >>> tx = optax_boost.centralize(layers=layers)
  """
  return describe(trace(loss_fn, params, args), params, data_flags(loss_fn, args))


def trace(loss_fn: Callable[..., Any], params: optax.Params, args: tuple[Any, ...]) -> Any:
  """The program of ``loss_fn(params, *args)``, after checks of the arguments."""
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  for name, tree in (("params", params), ("args", args)):
    _tree.check_traceable(name, tree)
  return jax.make_jaxpr(_jaxpr.untraced(loss_fn))(params, *args)


def data_flags(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> list[bool | None]:
  """True for each leaf of the arguments, None for the state of a loss that carries one."""
  state, data = (args[:1], args[1:]) if is_stateful(loss_fn) else ((), args)
  return [*[None] * len(jax.tree.leaves(state)), *batch_flags(data)]


def batch_flags(data: Any) -> list[bool | None]:
  """True for each leaf of a batch and of other data, None for the constants in it."""
  flags: list[bool | None] = []
  for node in jax.tree.leaves(data, is_leaf=_tree.is_constants):
    flags += [None] * len(jax.tree.leaves(node)) if _tree.is_constants(node) else [True]
  return flags


def stateful(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
  """Marks a loss of a Flax model, ``output, model_state = loss(params, model_state, *args)``."""
  loss_fn.is_stateful = True  # type: ignore[attr-defined]
  return loss_fn


def is_stateful(loss_fn: Callable[..., Any]) -> bool:
  """Whether a loss is marked by :func:`stateful`."""
  return getattr(loss_fn, "is_stateful", False) is True


def describe(program: Any, params: Any, data: Sequence[bool | None] | None = None) -> Layers:
  """Describes the params of a traced loss, whose leaves are the program's first arguments.

  `data` flags the other arguments; None makes one a constant, and all are data without flags.
  Scalars, constants and noise count as data, in this order, only if all leaves would otherwise
  meet data in one place or nowhere. A leaf that has no fan-in then may have one in a product with
  noise, constants or other leaves, before it meets data.
  """
  paths = _tree.leaf_paths(params)
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  others = program.jaxpr.invars[len(paths) :]
  flags = [True] * len(others) if data is None else data
  kinds = [_kind(variable.aval, flag) for variable, flag in zip(others, flags, strict=True)]

  def follow(
    accepted: set[str | None], named_kernels: frozenset[int] | None = None
  ) -> _leaf_uses.LeafUses:
    uses = _leaf_uses.LeafUses(
      constants_are_data=_CONSTANT in accepted,
      noise_is_data=_KEY in accepted,
      named_kernels=named_kernels,
    )
    leaves = [uses.leaf(shape) for shape in shapes[: len(paths)]]
    arguments = zip(shapes[len(paths) :], kinds, strict=True)
    values = [uses.value(shape, data=own in accepted) for shape, own in arguments]
    for output in uses.run(program, [*leaves, *values])[:1]:
      # A loss without data: nothing but a penalty.
      uses.places.append(
        [_leaf_uses.Use(leaf, _leaf_uses.PENALTY) for leaf in sorted(output.leaves)]
      )
    return uses

  candidates = []
  accepted: set[str | None] = set()
  for kind in (_ARRAY, _SCALAR, _CONSTANT, _KEY):
    accepted = {*accepted, kind}
    candidates.append((follow(accepted), accepted))
    if _count_places(candidates[-1][0]) > 1:
      break
  best, accepted = max(candidates, key=lambda candidate: _count_places(candidate[0]))
  axes = [_axes(best, leaf, len(shapes[leaf])) for leaf in range(len(paths))]
  lacking = [
    leaf for leaf, found in enumerate(axes) if _may_lack_fan_in(paths[leaf], shapes[leaf], found)
  ]
  if lacking:
    named = frozenset(leaf for leaf, path in enumerate(paths) if _KERNEL.search(path))
    generated = follow(accepted, named)
    for leaf in lacking:
      found = _axes(generated, leaf, len(shapes[leaf]))
      axes[leaf] = found if found is not None and found.fan_in else axes[leaf]
  return Layers(tuple(paths), tuple(axes), tuple(_order(best)), tuple(best.scans))


def _may_lack_fan_in(path: str, shape: Sequence[int], axes: Axes | None) -> bool:
  """Whether a leaf without fan-in may be a kernel whose input is made without data.

  Tables of positions are no kernels, though constants may resize them.
  """
  named_otherwise = _tree.is_bias_or_norm(path) or is_embedding(path)
  return len(shape) > 1 and not named_otherwise and (axes is None or not axes.fan_in)


def is_embedding(path: str) -> bool:
  """Whether a leaf has the name of an embedding."""
  return _EMBEDDING.search(path) is not None


_ARRAY, _SCALAR, _CONSTANT, _KEY = "array", "scalar", "constant", "key"


def _kind(aval: Any, is_data: bool | None) -> str | None:
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
  telling = [
    _leaf_uses.GENERATED,
    _leaf_uses.LOOKED_UP,
    _leaf_uses.CONTRACTED,
    _leaf_uses.ENTRYWISE,
  ]
  if leaf in experts:
    telling.remove(_leaf_uses.LOOKED_UP)
  for kind in telling:
    for use in own:
      if use.kind == kind:
        layers = (use.layers | uses.matched_axes(leaf)) - use.fan_in
        outputs = frozenset(range(rank)) - layers - use.fan_in
        return Axes(*(tuple(sorted(axes)) for axes in (use.fan_in, layers, outputs, use.window)))
  return None

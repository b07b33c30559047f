"""``layer_axes`` finds the role of each axis of the params; its docstring explains the roles."""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _checks, _leaf_names, _paths, _patterns, _types
from optax_boost._trace import _axis_map, _leaf_uses, _losses, _uses
from optax_boost._trace._uses import UseKind


class Axes(NamedTuple):
  """The roles of a leaf's axes; each is in one field but `window`, in ascending order.

  Attributes:
    fan_in: the axes that the product of the leaf with its input sums over.
    stacked: the axes along which the leaf holds layers or experts.
    outputs: all other axes.
    window: the axes of `fan_in` along which a convolution slides.
    unknown: the axes whose role the trace does not tell, if the leaf has layers along its others.
  """

  fan_in: tuple[int, ...]
  stacked: tuple[int, ...]
  outputs: tuple[int, ...]
  window: tuple[int, ...] = ()
  unknown: tuple[int, ...] = ()

  @property
  def rank(self) -> int:
    return len(self.fan_in + self.stacked + self.outputs + self.unknown)

  @property
  def mixes_inputs(self) -> bool:
    """Returns whether an output sums over input features, which a depthwise kernel does not do."""
    return set(self.fan_in) > set(self.window)


# The names of roles in the argument `axes` of `layer_axes`, and in its printed result.
_ROLES = ("layers", "fan-in", "outputs")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LayerAxes:
  """What a traced loss tells about its params, as a hashable pytree without leaves.

  Attributes:
    paths: the path of each leaf.
    axes: the axes of each leaf; None if the loss does not tell the axes, or does not use the leaf.
    unknown_primitives: for each leaf with unknown axes, the primitives that hide them.
  """

  paths: tuple[str, ...]
  axes: tuple[Axes | None, ...]
  unknown_primitives: tuple[tuple[str, ...], ...]

  def __str__(self) -> str:
    lines = []
    for path, axes, primitives in zip(self.paths, self.axes, self.unknown_primitives, strict=True):
      text = "unknown"
      if axes is not None:
        kinds = {"layers": axes.stacked, "fan-in": axes.fan_in, "outputs": axes.outputs}
        kinds["unknown"] = axes.unknown
        text = ", ".join(f"{kind} {numbers}" for kind, numbers in kinds.items() if numbers)
      text += f" after {', '.join(primitives)}" if primitives else ""
      lines.append(f"{_paths.leaf_name(path)}: {text or 'scalar'}")
    return "\n".join(lines)

  def explain_unknown(self, paths: Collection[str]) -> str:
    """Returns a warning about primitives that hide the axes of the leaves `paths`; "" if none."""
    hidden = {
      path: primitives
      for path, primitives in zip(self.paths, self.unknown_primitives, strict=True)
      if primitives and path in paths
    }
    if not hidden:
      return ""
    names = sorted({f"`{name}`" for primitives in hidden.values() for name in primitives})
    leaves = ", ".join(f"'{_paths.leaf_name(path)}'" for path in list(hidden)[:6])
    more = ", ..." if len(hidden) > 6 else ""
    return (
      f"A trace of the loss does not tell the axes of {leaves}{more} after {', '.join(names)}. Say"
      " them: pass the result of `optax_boost.layer_axes(loss_fn, params, batch, axes={"
      f"{_patterns.exact_pattern(next(iter(hidden)), self.paths)!r}: ('fan-in', 'outputs')}})`,"
      " with 'layers', 'fan-in' or 'outputs' for each axis."
    )


class DeferredLayerAxes:
  """The :class:`LayerAxes` of a loss; the first call of `describe` computes them."""

  def __init__(self, describe: Callable[[], LayerAxes]) -> None:
    self.describe = functools.cache(describe)


class Leaf(NamedTuple):
  """A leaf's path, shape and axes; the axes are None if no trace tells them."""

  path: str
  shape: tuple[int, ...]
  axes: Axes | None = None

  @property
  def roles(self) -> Axes | None:
    """Returns the axes if the trace tells the role of each of them, else None."""
    return None if self.axes is None or self.axes.unknown else self.axes

  @property
  def stacked(self) -> tuple[int, ...]:
    """Returns the axes along which the leaf holds layers."""
    return self.axes.stacked if self.axes is not None else ()

  @property
  def axes_of_layer(self) -> tuple[int, ...]:
    """Returns all axes that are not stacked."""
    return tuple(axis for axis in range(len(self.shape)) if axis not in self.stacked)

  @property
  def shape_of_layer(self) -> tuple[int, ...]:
    return tuple(self.shape[axis] for axis in self.axes_of_layer)

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """Returns the sizes of the stacked axes; ``()`` for a leaf that is one layer."""
    return tuple(self.shape[axis] for axis in self.stacked)

  @property
  def num_layers(self) -> int:
    return math.prod(self.stacked_shape)


def fan_in(leaf: Leaf, layout: str) -> tuple[int, ...]:
  """Returns the fan-in of a leaf: from the loss, or else from the leaf's name and the layout.

  `layout` is "torch" for kernels whose first axis is the outputs, as in PyTorch.
  """
  if leaf.axes is not None and leaf.axes.fan_in:
    return leaf.axes.fan_in
  if layout == "torch":
    return leaf.axes_of_layer[1:]
  is_attention = len(leaf.axes_of_layer) == 3 and _leaf_names.is_attention_input(leaf.path)
  return leaf.axes_of_layer[: 1 if is_attention else -1]


def leaves_of(tree: _types.Tree, described: LayerAxes | None = None) -> list[Leaf]:
  """Returns the leaves of a tree, in the order of ``jax.tree.leaves``, with axes from `described`.

  A leaf has no axes if `described` has no leaf with this path and rank.
  """
  by_path = dict(zip(described.paths, described.axes, strict=True)) if described is not None else {}
  leaves = []
  for path, leaf in zip(_paths.leaf_paths(tree), jax.tree.leaves(tree), strict=True):
    axes, rank = by_path.get(path), jnp.ndim(leaf)
    is_described = axes is not None and axes.rank == rank
    leaves.append(Leaf(path, jnp.shape(leaf), axes if is_described else None))
  return leaves


def layer_axes(
  loss_fn: _types.LossFn,
  params: optax.Params,
  *args: Any,
  axes: Mapping[str, Sequence[str]] | None = None,
  axis_name: _types.AxisName | None = None,
) -> LayerAxes:
  """Reads the roles of the axes of the params from a trace of the loss.

  The step of :func:`make_train_step` reads the axes by itself. In your own training loop, pass the
  result as the argument `layers` of the methods. The loss is traced, not computed, so arrays may be
  abstract.

  The operation that first combines a leaf with data tells the roles of the leaf's axes, except that
  data may scale or mask a kernel before (styles, pruning masks). The fan-in are the axes that a
  matrix product or a convolution sums over. An axis holds layers if every use of the leaf takes one
  entry along it by a number that the program counts (a scan, the counter of a loop, all numbers
  from 0 in Python), or carries it through ``vmap``. Kernels that data selects, such as experts,
  count as layers, too. All other axes are outputs. So tables, of which the program reads many rows
  at a time, are one layer. Embeddings, whose rows are looked up, have no fan-in, nor have leaves
  that are named as biases. If a kernel is multiplied with an input that is not data (noise,
  constants, learned queries), the fan-in are the axes that this product sums over. If both operands
  are params, the second is the kernel, unless only the first is named kernel or weight.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng. A loss from ``nnx.split_loss`` or
      ``linen.split_loss`` takes its model state first. All other arrays count as data, so let the
      loss close over weights that are added to kernels, such as an adapter's base weights.
    axes: for leaves whose axes the trace does not tell, or tells wrong: a dict from patterns (see
      :func:`path_mask`) to ``"layers"``, ``"fan-in"`` or ``"outputs"`` for each axis.
    axis_name: the axis, or axes, of ``vmap``, ``pmap`` or ``shard_map`` that the loss reduces over
      (``pmean``, a BatchNorm with `axis_name`).

  Returns:
    A hashable description of all leaves, a pytree without leaves. The axes of a leaf are unknown
    if the loss does not use the leaf, or passes the leaf to a primitive that the analysis does not
    know; ``print`` shows the primitive's name. An axis that a scan slices before is known.

  Raises:
    TypeError: `loss_fn` is not callable, a leaf of the other arguments is not an array, or `axes`
      does not hold names of axes.
    ValueError: `axes` has other names, or not one for each axis of a leaf; or the loss uses a named
      axis that is not in `axis_name`.

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

    If the trace does not tell the axes of a leaf, say them:

    >>> said = {"head": ("outputs", "fan-in")}
    >>> print(optax_boost.layer_axes(loss_fn, params, jnp.ones((2, 8)), axes=said))
    blocks: layers (0,), fan-in (1,), outputs (2,)
    head: fan-in (1,), outputs (0,)
  """
  program = _losses.trace(loss_fn, params, args, axis_name)
  described = describe(_leaf_uses.follow(program, params, _losses.data_flags(loss_fn, args)))
  return described if axes is None else _with_axes(described, params, axes)


def _with_axes(
  described: LayerAxes, params: optax.Params, given: Mapping[str, Sequence[str]]
) -> LayerAxes:
  """Returns a description with the axes that the argument `axes` of `layer_axes` gives."""
  if not isinstance(given, Mapping):
    raise TypeError(
      "`axes` must be a dict from patterns to a name for each axis, as"
      f" {{'kernel': ('layers', 'fan-in', 'outputs')}}; got {_checks.shorten(given)}."
    )
  patterns = list(given)
  matches = _patterns.first_match("axes", patterns, described.paths)
  ranks = [jnp.ndim(leaf) for leaf in jax.tree.leaves(params)]
  axes, primitives = list(described.axes), list(described.unknown_primitives)
  for leaf, match in enumerate(matches):
    if match is None:
      continue
    roles = given[patterns[match]]
    is_sequence = isinstance(roles, list | tuple) and len(roles) == ranks[leaf]
    if not is_sequence or any(role not in _ROLES for role in roles):
      raise ValueError(
        f"`axes` must have 'layers', 'fan-in' or 'outputs' for each of the {ranks[leaf]} axes of"
        f" '{_paths.leaf_name(described.paths[leaf])}'; got {_checks.shorten(roles)}."
      )
    stacked, fan_in, outputs = (
      tuple(axis for axis, role in enumerate(roles) if role == name) for name in _ROLES
    )
    axes[leaf], primitives[leaf] = Axes(fan_in, stacked, outputs), ()
  return dataclasses.replace(described, axes=tuple(axes), unknown_primitives=tuple(primitives))


def describe(findings: _leaf_uses.Findings) -> LayerAxes:
  """Describes the leaves of a traced loss."""
  axes = list(map(_axes, findings.uses, findings.batch_axes, findings.paths, findings.shapes))
  unknown_primitives = [
    tuple(dict.fromkeys(use.primitive for use in uses_of_leaf if use.primitive))
    if described is None or described.unknown
    else ()
    for uses_of_leaf, described in zip(findings.uses, axes, strict=True)
  ]
  return LayerAxes(tuple(findings.paths), tuple(axes), tuple(unknown_primitives))


def _axes(
  uses: Sequence[_uses.Use], batch: frozenset[int], path: str, shape: tuple[int, ...]
) -> Axes | None:
  """Returns the axes of a leaf with this path and shape.

  The fan-in is read from the use whose kind comes earliest in :class:`UseKind`; of several, the
  first. All uses tell which axes are stacked. `batch` are the leaf's axes along which each slice of
  the data has a separate kernel. A leaf with the name of a bias has no fan-in. Returns None if all
  uses are unclear.
  """
  # LOOKUP comes first, so that an embedding that is also the last layer's kernel (tied weights) has
  # no fan-in.
  silent = (UseKind.UNCLEAR, UseKind.UNKNOWN)
  telling = sorted((use for use in uses if use.kind not in silent), key=lambda use: use.kind.value)
  every = frozenset(range(len(shape)))
  if not telling:
    uses = [use for use in uses if use.kind == UseKind.UNKNOWN]
    stacked = _stacked(uses, shape) if uses else frozenset()
    unknown = tuple(sorted(every - stacked))
    return Axes((), tuple(sorted(stacked)), (), unknown=unknown) if stacked else None
  use = telling[0]
  is_bias = _leaf_names.is_bias_or_norm(path)
  # A table of positions has no fan-in, although a product with constants may resize the table.
  is_table = len(shape) == 1 or _leaf_names.is_embedding(path)
  is_kernel = not is_bias and not (is_table and use.kind == UseKind.GENERATED)
  fan_in, window = (use.fan_in, use.window) if is_kernel else (frozenset(), frozenset())
  stacked = _stacked(telling, shape) - use.fan_in
  # Experts lie along the outputs of a router, too. Slices of its kernel and bias have no outputs.
  if every - stacked - batch - fan_in or not (fan_in or is_bias):
    stacked |= batch - use.fan_in
  outputs = every - stacked - fan_in
  return Axes(*(tuple(sorted(axes)) for axes in (fan_in, stacked, outputs, window)))


def _stacked(uses: Sequence[_uses.Use], shape: tuple[int, ...]) -> frozenset[int]:
  """Returns the axes of which every use takes one entry, and all uses together take all entries."""

  def is_taken_whole(axis: int) -> bool:
    taken: dict[int, set[int]] = {}
    for use in uses:
      picks = {pick for pick in use.picks if pick.axis == axis} or {_axis_map.Pick(axis)}
      for _, number, entries in picks:
        if number is None:  # the program counts
          return True
        taken.setdefault(entries, set()).add(number)
    return any(len(indices) == entries for entries, indices in taken.items())

  common = frozenset.intersection(*(use.stacked for use in uses))
  return frozenset(filter(is_taken_whole, common))

"""``layer_axes`` finds the role of each axis of the params; its docstring explains the roles."""

from collections.abc import Callable, Collection, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _leaf_names, _paths, _types
from optax_boost._trace import _leaf_uses, _losses
from optax_boost._trace._leaf_uses import DataKind, UseKind


class Axes(NamedTuple):
  """The roles of a leaf's axes; each axis is in one of the first three fields, in ascending order.

  Attributes:
    fan_in: the axes that the product of the leaf with its input sums over.
    stacked: the axes along which the leaf holds layers or experts.
    outputs: all other axes.
    window: the axes of `fan_in` along which a convolution slides.
  """

  fan_in: tuple[int, ...]
  stacked: tuple[int, ...]
  outputs: tuple[int, ...]
  window: tuple[int, ...] = ()

  @property
  def mixes_inputs(self) -> bool:
    """Returns whether an output sums over input features, which a depthwise kernel does not do."""
    return set(self.fan_in) > set(self.window)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LayerAxes:
  """What a traced loss tells about its params, as a hashable pytree without leaves.

  Attributes:
    paths: the path of each leaf.
    axes: the axes of each leaf; None if the loss does not tell the axes, or does not use the leaf.
    uses: the indices of the leaves in the order in which the loss combines them with data; a leaf
      that is used again is repeated.
    scans: the scans over layers, in the order of the program.
    unknown_primitives: for each leaf without axes, the primitives that hide the axes, since
      ``_primitives`` has no rule for them.
  """

  paths: tuple[str, ...]
  axes: tuple[Axes | None, ...]
  uses: tuple[int, ...]
  scans: tuple[_leaf_uses.LayerScan, ...]
  unknown_primitives: tuple[tuple[str, ...], ...]

  def __str__(self) -> str:
    lines = []
    for path, axes, primitives in zip(self.paths, self.axes, self.unknown_primitives, strict=True):
      if axes is None:
        text = "unknown" + (f" after {', '.join(primitives)}" if primitives else "")
      else:
        kinds = {"layers": axes.stacked, "fan-in": axes.fan_in, "outputs": axes.outputs}
        text = ", ".join(f"{kind} {numbers}" for kind, numbers in kinds.items() if numbers)
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
      f"A trace of the loss does not tell the axes of {leaves}{more}: there is no rule for the"
      f" primitives that these leaves enter, {', '.join(names)}. Add one to"
      " `optax_boost._trace._primitives.RULES`."
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
    is_described = axes is not None and len(axes.fan_in + axes.stacked + axes.outputs) == rank
    leaves.append(Leaf(path, jnp.shape(leaf), axes if is_described else None))
  return leaves


def layer_axes(loss_fn: _types.LossFn, params: optax.Params, *args: Any) -> LayerAxes:
  """Reads the roles of the axes of the params from a trace of the loss.

  The step of :func:`make_train_step` reads the axes by itself. In your own training loop, pass the
  result as the argument `layers` of the methods. The loss is traced, not computed, so arrays may be
  abstract.

  The operation that first combines a leaf with data tells the roles of the leaf's axes. The fan-in
  are the axes that a matrix product or a convolution sums over. An axis holds layers if a scan
  slices it, if an index along it selects one of many kernels, or if each kernel along it has
  separate data (``vmap``, experts). All other axes are outputs. Embeddings, whose rows are looked
  up, have no fan-in, nor have leaves that are named as biases. If a kernel is multiplied with an
  input that is not data (noise, constants, learned queries), the fan-in are the axes that this
  product sums over. If both operands are params, the second is the kernel, unless only the first is
  named kernel or weight.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng. A loss from ``nnx.split_loss`` or
      ``linen.split_loss`` takes its model state first.

  Returns:
    A hashable description of all leaves, a pytree without leaves. The axes of a leaf are unknown
    if the loss does not use the leaf, or passes the leaf to a primitive that the analysis does not
    know; ``print`` shows the primitive's name.

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
  return describe(_losses.trace(loss_fn, params, args), params, _losses.data_flags(loss_fn, args))


def describe(
  program: _types.Jaxpr, params: _types.Params, data: Sequence[bool | None] | None = None
) -> LayerAxes:
  """Describes the params of a traced loss; their leaves are the program's first arguments.

  `data` has a flag for each other argument: True for data (the default), None for constants.
  """
  paths = _paths.leaf_paths(params)
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  loss_arguments = program.jaxpr.invars[len(paths) :]
  flags = [True] * len(loss_arguments) if data is None else data
  named = frozenset(leaf for leaf, path in enumerate(paths) if _leaf_names.is_kernel(path))

  def analyze(definition: DataKind) -> _leaf_uses.Findings:
    analysis = _leaf_uses.LeafUses(definition, named)
    arguments = [analysis.leaf(shape) for shape in shapes[: len(paths)]]
    arguments += [
      analysis.argument(variable.aval.shape, _leaf_uses.data_kind(variable.aval, flag))
      for variable, flag in zip(loss_arguments, flags, strict=True)
    ]
    for loss in analysis.run(program, arguments)[:1]:
      analysis.note_result(loss)
    return analysis.findings()

  findings = _by_narrowest_definition(analyze)
  uses: list[list[_leaf_uses.Use]] = [[] for _ in paths]
  for use in (*findings.early_uses, *itertools.chain(*findings.uses), *findings.expert_uses):
    uses[use.leaf].append(use)
  experts = {use.leaf for use in findings.expert_uses}
  axes = [
    _axes(uses[leaf], leaf in experts, findings.batch_axes[leaf], path, len(shapes[leaf]))
    for leaf, path in enumerate(paths)
  ]
  unknown_primitives = [
    names if axes[leaf] is None else () for leaf, names in enumerate(findings.unknown_primitives)
  ]
  return LayerAxes(
    paths=tuple(paths),
    axes=tuple(axes),
    uses=tuple(_order(findings)),
    scans=tuple(findings.scans),
    unknown_primitives=tuple(unknown_primitives),
  )


def _by_narrowest_definition(
  analyze: Callable[[DataKind], _leaf_uses.Findings],
) -> _leaf_uses.Findings:
  """Calls `analyze` with wider and wider definitions of data; returns the first good findings.

  Findings are good if leaves meet data in two or more equations. If no findings are good, the first
  with one equation are returned, or else the first.
  """
  candidates = []
  for definition in DataKind:
    findings = analyze(definition)
    count = _count_equations(findings)
    if count > 1:
      return findings
    candidates.append((count, findings))
  return max(candidates, key=lambda pair: pair[0])[1]


def _count_equations(findings: _leaf_uses.Findings) -> int:
  """Counts the equations in which a leaf meets data for the first time, without penalties."""
  first: dict[int, int] = {}
  for number, uses in enumerate(findings.uses):
    for use in uses:
      if use.kind != UseKind.PENALTY:
        first.setdefault(use.leaf, number)
  return len(set(first.values()))


def _order(findings: _leaf_uses.Findings) -> list[int]:
  """Returns the leaves in the order of their uses; leaves that only penalties use come last."""
  used: list[int] = []
  in_penalties: set[int] = set()
  for uses in findings.uses:
    used += dict.fromkeys(use.leaf for use in uses if use.kind != UseKind.PENALTY)
    in_penalties |= {use.leaf for use in uses if use.kind == UseKind.PENALTY}
  return used + sorted(in_penalties - set(used))


def _axes(
  uses: Sequence[_leaf_uses.Use], is_expert: bool, batch: frozenset[int], path: str, rank: int
) -> Axes | None:
  """Returns the axes of a leaf, read from one of its uses.

  This is the use whose kind comes earliest in :class:`UseKind`; of several, the first. `is_expert`
  tells whether data selects kernels from the leaf; for such a leaf, lookups don't count. `batch`
  are the leaf's axes along which each slice of the data has a separate kernel. A leaf with the name
  of a bias has no fan-in. Returns None if all uses are unclear or in penalties.
  """
  is_bias = _leaf_names.is_bias_or_norm(path)
  # A table of positions has no fan-in, although a product with constants may resize the table.
  is_table = rank == 1 or _leaf_names.is_embedding(path)
  # LOOKUP comes first, so that an embedding that is also the last layer's kernel (tied weights) has
  # no fan-in. The kernel of an expert is looked up, too, but has a fan-in.
  telling = [kind for kind in UseKind if kind not in (UseKind.PENALTY, UseKind.UNCLEAR)]
  if is_expert:
    telling.remove(UseKind.LOOKUP)
  for kind in telling:
    for use in uses:
      if use.kind == kind:
        stacked = (use.stacked | batch) - use.fan_in
        is_kernel = not is_bias and not (is_table and kind == UseKind.GENERATED)
        fan_in, window = (use.fan_in, use.window) if is_kernel else (frozenset(), frozenset())
        outputs = frozenset(range(rank)) - stacked - fan_in
        return Axes(*(tuple(sorted(axes)) for axes in (fan_in, stacked, outputs, window)))
  return None

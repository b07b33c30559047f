"""The adaptive sum as a transformation, and of stacked gradients."""

from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _transformation
from optax_boost._foundation import _arrays, _mesh_axes, _paths, _patterns, _tree_checks
from optax_boost._methods import _leaves
from optax_boost._methods._adasum import _layers, _reduction
from optax_boost._trace import _layer_axes


@_protocol.declares(metrics=("orthogonality", "adasum/notfinite_count"))
class AdasumState(NamedTuple):
  """State of :func:`adasum`.

  Attributes:
    orthogonality: scalar float32, the last step's squared norm of the result over the summed
      squared norms of the replicas' gradients, over all leaves: 1 if the replicas' gradients were
      orthogonal and were summed, 1/N if they were identical and were averaged.
    notfinite_count: scalar int32, the steps in which a leaf was not finite on some replica.
  """

  orthogonality: jax.Array
  notfinite_count: jax.Array


def adasum_reduce(stacked: Any, *, groups: str | Sequence[str] | None = None) -> Any:
  r"""The adaptive sum of N gradients that are stacked on one device.

  The mathematics of :func:`adasum` without communication, for replicas simulated on one device.

  Args:
    stacked: a tree whose leaves have the N gradients along their first axis.
    groups: which leaves share their coefficients, as in :func:`adasum`.

  Returns:
    The tree without the first axis, in the leaves' dtypes.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> grads = {"w": jnp.array([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]])}  # three replicas
    >>> [round(x, 5) for x in optax_boost.adasum_reduce(grads)["w"].tolist()]
    [2.0, 2.0]
  """
  method = "adasum_reduce"
  patterns = _check_groups(groups)
  _tree_checks.check_floating(stacked, method, "Leave it out of the tree.")
  leaves, structure = jax.tree.flatten(stacked)
  paths = _paths.leaf_paths(stacked)
  if not leaves:
    return stacked
  for path, leaf in zip(paths, leaves, strict=True):
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != jnp.shape(leaves[0])[0] or leaf.shape[0] == 0:
      raise ValueError(
        f"`{method}` needs leaves with the replicas along their first axis, of one length;"
        f" got shape {jnp.shape(leaf)} for the leaf '{_paths.leaf_name(path)}' and"
        f" {jnp.shape(leaves[0])} for '{paths[0] or 'params'}'."
      )
  reduced = _reduction.reduce_stacked(leaves, _group_numbers(paths, patterns))
  return jax.tree.unflatten(structure, reduced)


def adasum(
  axis_name: str | tuple[str, ...],
  *,
  local_axis_name: str | tuple[str, ...] | None = None,
  groups: str | Sequence[str] | None = None,
  shard_axis_name: str | tuple[str, ...] | None = None,
  layers: _layer_axes.LayerAxes | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the mean over replicas by an adaptive sum.

  .. math::
    \mathrm{adasum}(a, b) = a \left(1 - \frac{\langle a, b \rangle}{2 |a|^2}\right) +
    b \left(1 - \frac{\langle a, b \rangle}{2 |b|^2}\right)

  over a binary tree of the N replicas, neighbours first: if their gradients agree it averages, if
  they are orthogonal it sums. So the step grows as gradients decorrelate, and a learning rate tuned
  for one replica stays usable with many. All replicas get the same bits; N need not be a power of
  two.

  It runs inside ``jax.shard_map`` (or ``vmap`` with an axis name) in place of ``jax.lax.pmean``.
  First in a chain it acts on gradients; last, after an inner optimizer, on updates, as in Horovod.
  The inner state then differs from replica to replica and must be kept so, as in
  ``examples/adasum_processes.py``, which runs it over several processes or machines.

  Each dtype costs an all-to-all and an all-gather, about the bytes of an all-reduce, and each level
  of the tree an all-reduce of a few numbers per group; above some 64 replicas, use
  `local_axis_name`. Inner products are taken in float32, of gradients scaled by their group's
  largest entry, so gradients may have any magnitude from 1e-30 to 1e30, and differ as much.

  A group that is not finite on one replica becomes NaN as a whole on all of them; other leaves are
  untouched, and no state but `notfinite_count` remembers it.

  Args:
    axis_name: the mesh axis, or axes, along which the replicas lie.
    local_axis_name: further axes along which gradients are averaged first, as over the devices of
      one node; the adaptive sum then runs over nodes. None: no such axis.
    groups: which leaves share their coefficients. None: each leaf is a group, as in Horovod.
      Regular expressions, which match whole segments of the leaves' paths, make a group each (a
      leaf that two match is an error; one that none matches stays on its own); ``".*"`` makes the
      whole model one vector.
    shard_axis_name: axes along which the leaves are sharded (tensor parallelism): inner products
      are summed over them. Replicated leaves count as often as they occur, which matters only in a
      group with sharded ones. Not an axis along which devices hold different layers.
    layers: what :func:`layer_axes` returns, for leaves that hold many layers: each layer has
      coefficients of its own, unless `groups` names its leaf. None: the extra argument `layers` of
      ``update``, which the train step passes; without it, too, such a leaf counts as one layer.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates have the gradients' dtype; inner
    products of float64 are taken in float64.

  Raises:
    ValueError: an axis occurs twice; in ``update``: an axis is not bound, or the gradients were
      summed already.

  Examples:
    On gradients. The params go in replicated; ``pcast`` makes them vary, or ``shard_map`` would
    sum their gradients itself:

    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("replicas",))
    >>> tx = optax.chain(optax_boost.adasum("replicas"), optax.sgd(0.1))
    >>> def loss_fn(params, x):
    ...   return jnp.mean((x @ params["w"] - 1.0) ** 2)
    >>> @jax.jit
    ... @functools.partial(
    ...   jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("replicas")), out_specs=P()
    ... )
    ... def step(params, state, x):
    ...   varying = jax.lax.pcast(params, "replicas", to="varying")
    ...   updates, state = tx.update(jax.grad(loss_fn)(varying, x), state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> params = {"w": jnp.zeros(3)}
    >>> x = jnp.ones((2 * jax.device_count(), 3))
    >>> x = jax.device_put(x, jax.NamedSharding(mesh, P("replicas")))
    >>> params, state = step(params, tx.init(params), x)
    >>> [round(float(w), 6) for w in params["w"]]
    [0.2, 0.2, 0.2]

  References:
    Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020.

  .. note::
    If the two summands of a node cancel to a part c of their norms, rounding errors grow to some
    1e-6 / c. Exact arithmetic would enlarge the rounding errors of float32 gradients as much. A
    node counts as zero only if it is. No sure gain over the mean; see the method's card.
  """
  names = {
    "axis_name": axis_name,
    "local_axis_name": local_axis_name,
    "shard_axis_name": shard_axis_name,
  }
  axes, local_axes, shard_axes = every_axis = list(itertools.starmap(_axes, names.items()))
  if not axes:
    raise TypeError(f"`axis_name` must be the name of a mesh axis; got {axis_name!r}.")
  if len({*axes, *local_axes, *shard_axes}) < sum(map(len, every_axis)):
    raise ValueError(f"`adasum` needs an axis of its own for each purpose; got {names}.")
  patterns = _check_groups(groups)
  factory_layers = _leaves.check_layers(layers)

  def init(params: optax.Params) -> AdasumState:
    _group_numbers(_paths.leaf_paths(params), patterns)
    return AdasumState(jnp.ones([], jnp.float32), jnp.zeros([], jnp.int32))

  def step(
    updates: optax.Updates, state: AdasumState, params: Any, *, layers: Any = None
  ) -> tuple[optax.Updates, AdasumState]:
    for argument, value in names.items():
      _mesh_axes.require_axis(argument, value, "adasum", optional=argument != "axis_name")
    layer_axes = _leaves.choose_layers(factory_layers, layers)
    paths, single_layers, join = _layers.split_layers(updates, layer_axes)
    if not single_layers:
      return updates, state
    _leaves.warn_of_unknown_axes("adasum", _layer_axes.leaves_of(updates), layer_axes)
    check_not_summed(single_layers, axes + local_axes)
    outputs, orthogonality, notfinite = _reduction.reduce_over_devices(
      single_layers, _group_numbers(paths, patterns), axes, local_axes, shard_axes
    )
    return join(outputs), AdasumState(
      orthogonality=orthogonality,
      notfinite_count=_arrays.increment_if(notfinite, state.notfinite_count),
    )

  return _transformation.transformation("adasum", AdasumState, init, step)


def _axes(argument: str, names: Any) -> tuple[str, ...]:
  _mesh_axes.check_axis_name(argument, names)
  return () if names is None else (names,) if isinstance(names, str) else names


def check_not_summed(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> None:
  """Refuses gradients that ``shard_map`` has summed already, because params are replicated."""
  varying = frozenset[str]().union(*(_mesh_axes.varying_axes(jax.typeof(leaf)) for leaf in leaves))
  for name in axes:
    # Without `check_vma` nothing varies.
    varying_axes_here = _mesh_axes.varying_axes(jax.typeof(jax.lax.axis_index(name)))
    if name in varying_axes_here and name not in varying:
      raise ValueError(
        f"`adasum` needs gradients that differ along the axis '{name}'; these are the same"
        " everywhere. Inside `jax.shard_map`, gradients with respect to replicated params have"
        " been summed already: take them with respect to"
        f" `jax.lax.pcast(params, '{name}', to='varying')`, or `jax.lax.pvary(params, '{name}')`"
        " where JAX is too old to have that. A step of `make_train_step` takes them itself: pass"
        " `check_vma=False` to `jax.shard_map`."
      )


def _check_groups(groups: Any) -> tuple[str, ...]:
  if groups is None:
    return ()
  patterns = (groups,) if isinstance(groups, str) else groups
  _patterns.check_patterns("groups", patterns, "regular expressions or None")
  return tuple(patterns)


def _group_numbers(paths: Sequence[str], patterns: Sequence[str]) -> tuple[int, ...]:
  """The group of each leaf, numbered ``0, 1, ...``."""
  group_of_pattern = [(pattern, group) for group, pattern in enumerate(patterns)]
  groups = _patterns.assign_groups("groups", group_of_pattern, paths)
  keys = [("leaf", i) if group is None else ("group", group) for i, group in enumerate(groups)]
  numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
  return tuple(numbers[key] for key in keys)

"""`adasum`, which reduces gradients over devices, and `adasum_reduce`, which simulates this."""

from collections.abc import Sequence
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _transformation
from optax_boost._foundation import _arrays, _mesh_axes, _paths, _patterns, _tree_checks, _types
from optax_boost._methods import _layer_arguments
from optax_boost._methods._adasum import _layers, _reduction
from optax_boost._trace import _layer_axes


@_protocol.declares(
  metrics=("orthogonality", "adasum/notfinite_count"),
  takes=("layers",),
  across_devices=("orthogonality",),
)
class AdasumState(NamedTuple):
  """State of :func:`adasum`.

  Attributes:
    orthogonality: scalar float32, from the last step: the squared norm of the result, divided by
      the sum of the squared norms of the replicas' gradients; norms are over all leaves. It is 1 if
      the gradients were orthogonal, so that they were summed, and 1/N if they were identical.
    notfinite_count: scalar int32, the number of steps in which a leaf was not finite on a replica.
  """

  orthogonality: _types.FloatScalar
  notfinite_count: _types.IntScalar


def adasum_reduce(
  stacked: _types.SameTree, *, groups: str | Sequence[str] | None = None
) -> _types.SameTree:
  r"""Returns the adaptive sum of N gradients that are stacked on one device.

  Computes what :func:`adasum` computes, for replicas that one device simulates.

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
  axis_name: _types.AxisName,
  *,
  local_axis_name: _types.AxisName | None = None,
  groups: str | Sequence[str] | None = None,
  shard_axis_name: _types.AxisName | None = None,
  layers: _layer_axes.LayerAxes | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the mean over replicas by an adaptive sum.

  .. math::
    \mathrm{adasum}(a, b) = a \left(1 - \frac{\langle a, b \rangle}{2 |a|^2}\right) +
    b \left(1 - \frac{\langle a, b \rangle}{2 |b|^2}\right)

  A binary tree applies this formula to the N replicas, neighbours first. Gradients that agree are
  averaged, and orthogonal gradients are summed. So the step grows as gradients decorrelate, and a
  learning rate tuned for one replica stays usable with many. All replicas get the same bits; N need
  not be a power of two.

  Call ``update`` inside ``jax.shard_map`` (or ``vmap`` with an axis name) in place of
  ``jax.lax.pmean``. Put `adasum` first in a chain to reduce gradients, or last, after an optimizer,
  to reduce updates, as in Horovod. If it is last, the optimizer's state differs between replicas,
  and each replica must keep its own state, as in ``examples/adasum_processes.py``, which runs over
  several processes or machines.

  For each dtype, a step makes an all-to-all and an all-gather, which together move about as many
  bytes as one all-reduce. Each level of the tree makes an all-reduce of a few numbers per group;
  above some 64 replicas, use `local_axis_name`. Inner products are taken in float32. The gradients
  are first scaled by their group's largest entry, so magnitudes from 1e-30 to 1e30 are safe, even
  within one group.

  A group that is not finite on one replica becomes NaN on all replicas. Other groups are computed
  as usual, and `notfinite_count` grows.

  Args:
    axis_name: the mesh axis or axes of the replicas.
    local_axis_name: axes along which gradients are averaged first, such as the devices of a node;
      the adaptive sum then runs over nodes. None: no such axis.
    groups: which leaves share the coefficients of :math:`a` and :math:`b`; inner products are over
      the whole group. None: each leaf is a group, as in Horovod. A string or a sequence: each
      pattern (see :func:`path_mask`) makes a group of the leaves that it matches. A leaf that two
      patterns match is an error; a leaf that no pattern matches is a group by itself. ``"*"`` makes
      the whole model one group.
    shard_axis_name: axes along which the leaves are sharded (tensor parallelism); inner products
      are summed over these axes. In a group with sharded leaves, a replicated leaf counts once for
      each device of these axes. Don't name an axis along which devices hold different layers.
    layers: as in :func:`centralize`. Each layer of a leaf has its own coefficients, unless `groups`
      names the leaf. Without `layers`, a leaf counts as one layer.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates have the gradients' dtype; inner
    products of float64 are taken in float64.

  Raises:
    ValueError: an axis is named twice; in ``update``: an axis is not bound, or ``shard_map`` has
      summed the gradients already.

  Examples:
    `adasum` reduces the gradients of replicated params. ``pcast`` keeps ``shard_map`` from summing
    the gradients first:

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
    If the two terms of an adaptive sum nearly cancel, so that the norm of the sum is c times their
    norms, the relative rounding error grows to about 1e-6 / c. Exact arithmetic would not avoid
    this, because the rounding errors of float32 gradients would grow as much. A gain over the mean
    is not certain; see the method's card.
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
    raise ValueError(f"`adasum` needs different axes for its three arguments; got {names}.")
  patterns = _check_groups(groups)
  factory_layers = _layer_arguments.check_layers(layers)

  def init(params: optax.Params) -> AdasumState:
    _group_numbers(_paths.leaf_paths(params), patterns)
    return AdasumState(jnp.ones([], jnp.float32), jnp.zeros([], jnp.int32))

  def step(
    updates: optax.Updates,
    state: AdasumState,
    params: optax.Params | None,
    *,
    layers: _types.Unchecked = None,
  ) -> tuple[optax.Updates, AdasumState]:
    for argument, value in names.items():
      _mesh_axes.require_axis(argument, value, "adasum", optional=argument != "axis_name")
    layer_axes = _layer_arguments.choose_layers(factory_layers, layers)
    paths, single_layers, join = _layers.split_layers(updates, layer_axes)
    if not single_layers:
      return updates, state
    leaves = _layer_axes.leaves_of(updates, layer_axes)
    _layer_arguments.warn_of_unknown_axes("adasum", leaves, layer_axes, layers_only=True)
    check_not_summed(single_layers, axes + local_axes)
    outputs, orthogonality, notfinite = _reduction.reduce_over_devices(
      single_layers, _group_numbers(paths, patterns), axes, local_axes, shard_axes
    )
    return join(outputs), AdasumState(
      orthogonality=orthogonality,
      notfinite_count=_arrays.increment_if(notfinite, state.notfinite_count),
    )

  return _transformation.transformation("adasum", AdasumState, init, step)


def _axes(argument: str, names: _types.AxisName | None) -> tuple[str, ...]:
  _mesh_axes.check_axis_name(argument, names)
  return () if names is None else (names,) if isinstance(names, str) else names


def check_not_summed(leaves: Sequence[jax.Array], axes: tuple[str, ...]) -> None:
  """Raises ValueError if ``shard_map`` has summed the gradients over one of `axes`."""
  varying = frozenset[str]().union(*(_mesh_axes.varying_axes(jax.typeof(leaf)) for leaf in leaves))
  for name in axes:
    # With `check_vma=False`, JAX doesn't track over which axes arrays vary. Then even the index of
    # a device doesn't vary, and the gradients can't be checked.
    varying_axes_here = _mesh_axes.varying_axes(jax.typeof(jax.lax.axis_index(name)))
    if name in varying_axes_here and name not in varying:
      raise ValueError(
        f"`adasum` needs gradients that differ along the axis '{name}'; got gradients of replicated"
        " params, which `jax.shard_map` has summed. Differentiate with respect to"
        f" `jax.lax.pcast(params, '{name}', to='varying')`, or pass `check_vma=False` to"
        " `jax.shard_map` if `make_train_step` takes the gradients."
      )


def _check_groups(groups: str | Sequence[str] | None) -> tuple[str, ...]:
  if groups is None:
    return ()
  patterns = (groups,) if isinstance(groups, str) else groups
  _patterns.check_patterns("groups", patterns, "patterns or None")
  return tuple(patterns)


def _group_numbers(paths: Sequence[str], patterns: Sequence[str]) -> tuple[int, ...]:
  """Returns the number of each leaf's group; a leaf that no pattern matches is its own group."""
  group_of_pattern = [(pattern, group) for group, pattern in enumerate(patterns)]
  groups = _patterns.assign_groups("groups", group_of_pattern, paths)
  keys = [("leaf", i) if group is None else ("group", group) for i, group in enumerate(groups)]
  numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
  return tuple(numbers[key] for key in keys)

"""Places the arrays of a train state on devices, before and after a step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _paths, _placement, _trees, _types
from optax_boost._step import _device_sums
from optax_boost._train_step import _train_state


def canonicalize_state(
  state: _train_state.TrainState, tx: optax.GradientTransformation
) -> _train_state.TrainState:
  """Returns a state with the types and placement of a state that a step returns.

  So the second step needs no new compilation. Weak types are removed. If an array is on a mesh,
  arrays that are on no mesh get their :func:`_default_shardings`. If no array is on a mesh, and one
  is committed to devices, all arrays move to these devices. An array that occurs twice in the state
  is copied, since an array can't be donated twice.
  """
  leaves = [_train_state.drop_weak_type(leaf) for leaf in jax.tree.leaves(state)]
  state = jax.tree.unflatten(jax.tree.structure(state), leaves)
  defaults = _default_shardings(state, tx)
  on_mesh = any(isinstance(sharding, jax.sharding.NamedSharding) for sharding in defaults)
  seen: set[int] = set()

  def canonicalize(leaf: jax.Array, default: Any) -> jax.Array:
    # `id` is compared before the array is moved, since the result of `device_put` is a new object
    # that may share the memory of the array.
    repeated = id(leaf) in seen
    seen.add(id(leaf))
    if on_mesh:
      sharding = _on_mesh(leaf)
      if not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        leaf = _put_in_memory(leaf, default)
      elif sharding is not None and sharding != leaf.sharding:
        leaf = jax.device_put(leaf, sharding)
    return _placement.copy(leaf) if repeated else leaf

  moved = _trees.map_with(canonicalize, state, defaults)
  return moved if on_mesh else commit_like(moved, moved)


def place_abstract(
  state: _train_state.TrainState,
  params: optax.Params,
  model_state: _types.ModelState,
  tx: optax.GradientTransformation,
  opt_state_sharding: _types.ShardingFn | None = None,
) -> _train_state.TrainState:
  """Adds to an abstract state the shardings that :func:`canonicalize_state` would give it.

  `params` and `model_state` are the initial trees from which `state` was made; their shardings are
  used.
  """
  shardings = [
    *map(_sharding, jax.tree.leaves(params)),
    *(
      sharding_of and sharding_of(x)
      for x, sharding_of in zip(
        jax.tree.leaves(state.opt_state),
        by_leaf(opt_state_sharding, tx, state.opt_state),
        strict=True,
      )
    ),
    *map(_sharding, jax.tree.leaves(model_state)),
    None,
  ]

  def place(leaf: Any, *shardings: jax.sharding.Sharding | None) -> Any:
    sharding = next(filter(None, shardings), None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  defaults = _default_shardings(_trees.map_with(place, state, shardings), tx)
  return _trees.map_with(place, state, shardings, defaults)


def put(x: jax.Array, sharding_of: _types.ShardingFn | None) -> jax.Array:
  """Puts an array where a function of the user says, if there is one."""
  if sharding_of is None:
    return x
  sharding = sharding_of(jax.ShapeDtypeStruct(x.shape, x.dtype))
  # Under `jit`, `device_put` may leave its result elsewhere.
  is_traced = isinstance(x, jax.core.Tracer)
  return (jax.lax.with_sharding_constraint if is_traced else jax.device_put)(x, sharding)


def by_leaf(
  sharding_of: _types.ShardingFn | None,
  tx: optax.GradientTransformation,
  opt_state: optax.OptState,
) -> list[_types.ShardingFn | None]:
  """Returns for each array of an optimizer state the user's function, if it places the array."""
  return [None if is_sum else sharding_of for is_sum in _device_sums.find(tx, opt_state)[1]]


def _default_shardings(
  state: _train_state.TrainState, tx: optax.GradientTransformation
) -> list[jax.sharding.Sharding | None]:
  """Returns for each array of a state where it lies if it has no place of its own on a mesh.

  An array of the optimizer state that has a param's path and, behind leading axes, its shape, lies
  as the param does along the axes of this shape. All others are replicated over the mesh of the
  params. Without a mesh, all lie where the first param does. A sum of gradients on each device lies
  on these devices along its first axis.
  """
  sums, are_sums = _device_sums.find(tx, state.opt_state)
  shardings = [s for s in map(_sharding, jax.tree.leaves(state)) if s is not None]
  meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  meshes += [sums.batch.mesh] if sums and not isinstance(state.step, jax.core.Tracer) else []
  if not meshes:
    return [shardings[0] if shardings else None] * len(jax.tree.leaves(state))
  replicated = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
  paths = _paths.leaf_paths(state.params)
  params = dict(zip(paths, jax.tree.leaves(state.params), strict=True))

  def like_param(leaf: Any, path: str, is_sum: bool) -> jax.sharding.NamedSharding:
    names = path.split("/")
    for start in range(len(names) + 1):
      param: Any = params.get("/".join(names[start:]))
      sharding = _sharding(param)
      if isinstance(sharding, jax.sharding.NamedSharding):
        leading = leaf.ndim - param.ndim
        if sums and is_sum:
          return sums.sharding(sharding)
        if leaf.shape[leading:] == param.shape:
          spec = jax.sharding.PartitionSpec(*[None] * leading, *sharding.spec)
          return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sums.sharding(None) if sums and is_sum else replicated

  opt_state = _trees.map_with(
    like_param, state.opt_state, _paths.leaf_paths(state.opt_state), are_sums
  )
  others = jax.tree.map(lambda leaf: replicated, state._replace(opt_state=None))
  return jax.tree.leaves(others._replace(opt_state=opt_state))


def _sharding(leaf: _types.Unchecked) -> jax.sharding.Sharding | None:
  """Returns the sharding of an array or an abstract array; None for a tracer or another value."""
  return None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)


def _first_sharding(state: _train_state.TrainState) -> jax.sharding.Sharding | None:
  return _sharding(next(iter(jax.tree.leaves(state.params)), None))


def _is_committed(leaf: _types.Unchecked) -> bool:
  """Returns whether an array was put on its devices explicitly, as by ``jax.device_put``."""
  return not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "committed", False)


def commit_like(state: _train_state.TrainState, arguments: _types.Tree) -> _train_state.TrainState:
  """Returns the state of a step, moved to the devices on which the step will run.

  A step runs on the devices to which one of its `arguments` is committed. The state is returned
  unchanged if it is committed already, if it is on a mesh, or if no argument is committed.
  """
  # The function runs at every step, so the cheapest test comes first.
  if _is_committed(state.step):
    return state
  if not isinstance(_first_sharding(state), jax.sharding.SingleDeviceSharding):
    return state
  for leaf in filter(_is_committed, jax.tree.leaves(arguments)):
    if isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
      return jax.tree.map(functools.partial(_put_in_memory, sharding=leaf.sharding), state)
    # A mesh with Explicit axes is not used, since it would change the types of the state's arrays.
    if isinstance(leaf.sharding, jax.sharding.NamedSharding) and _placement.has_auto_axes_only(
      leaf.sharding.mesh
    ):
      replicated = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
      return jax.tree.map(functools.partial(_put_in_memory, sharding=replicated), state)
  return state


def _put_in_memory(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns an array, moved to a sharding; an array in host memory stays in host memory."""
  memory_kind = getattr(_sharding(leaf), "memory_kind", None)
  if memory_kind:
    sharding = sharding.with_memory_kind(memory_kind)
  if not (sharding.is_fully_addressable or isinstance(leaf, jax.core.Tracer)):
    # `device_put` moves to other processes neither keys nor what a restore put on a device here.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if leaf.is_fully_addressable and (leaf.committed or is_key):
      return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
  return jax.device_put(leaf, sharding)


def placement(state: _train_state.TrainState) -> tuple[jax.sharding.NamedSharding | None, ...]:
  """Returns the shardings to which a step must constrain the arrays of its new state.

  An array has None if its sharding needs no constraint. Returns () unless the params are on a mesh
  of several devices.
  """
  first = _first_sharding(state)
  if not isinstance(first, jax.sharding.NamedSharding) or first.mesh.size == 1:
    return ()
  return tuple(map(_on_mesh, jax.tree.leaves(state)))


def _on_mesh(leaf: jax.Array) -> jax.sharding.NamedSharding | None:
  """Returns the sharding to which a step must constrain an array, or None.

  None means that the array is on no mesh, or that its sharding is not to be constrained.
  """
  # Per leaf and step, so that all tests of the sharding and the dtype are cached.
  sharding = _sharding(leaf)
  return None if sharding is None else _constraint(sharding, leaf.dtype)


@functools.cache
def _constraint(
  sharding: jax.sharding.Sharding, dtype: _types.Dtype
) -> jax.sharding.NamedSharding | None:
  """Returns a sharding as a constraint, or None if the compiler always keeps this sharding.

  None entries at the end of the ``PartitionSpec`` are removed, since compiled programs return their
  shardings without such entries. The sharding of a typed key is not constrained, since the key is
  stored with a further axis.
  """
  is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
  if is_key or not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  mesh, spec = sharding.mesh, list(sharding.spec)
  # Explicit axes and host memory are part of an array's type. `keep_placement` keeps the axes.
  free = isinstance(mesh, jax.sharding.Mesh) and _placement.has_auto_axes_only(mesh)
  if not free or sharding.memory_kind != mesh.devices.flat[0].default_memory().kind:
    return None
  while spec and spec[-1] is None:
    spec.pop()
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def keep_placement(
  state: _train_state.TrainState,
  before: _train_state.TrainState,
  shardings: tuple[jax.sharding.NamedSharding | None, ...],
) -> _train_state.TrainState:
  """Returns a step's new state, with its arrays constrained to `shardings`.

  `before` is the state before the step, and `shardings` is what :func:`placement` returned for
  `before`. If the two states differ in structure, the new state is returned unchanged.
  """
  structure: _types.TreeDef = jax.tree.structure(state)
  if not shardings or structure != jax.tree.structure(before):
    return state

  def place(
    leaf: jax.Array, old: jax.Array, sharding: jax.sharding.NamedSharding | None
  ) -> jax.Array:
    if sharding is not None:
      return jax.lax.with_sharding_constraint(leaf, sharding)
    typed = jax.typeof(old).sharding
    return leaf if typed == jax.typeof(leaf).sharding else _placement.place_by(leaf, typed)

  return _trees.map_with(place, state, jax.tree.leaves(before), shardings)

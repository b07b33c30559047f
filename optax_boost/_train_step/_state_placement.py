"""Places the arrays of a train state on devices, before and after a step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _paths, _placement, _trees, _types
from optax_boost._train_step import _train_state


def canonicalize_state(state: _train_state.TrainState) -> _train_state.TrainState:
  """Returns a state with the types and placement of a state that a step returns.

  So the second step needs no new compilation. Weak types are removed. If the params are on a mesh,
  arrays that are on no mesh are replicated over the params' mesh. If the params are on no mesh, and
  an array of the state is committed to devices, all arrays move to these devices. An array that
  occurs twice in the state is copied, since an array can't be donated twice.
  """
  leaves = [_train_state.drop_weak_type(leaf) for leaf in jax.tree.leaves(state)]
  shardings = map(_sharding, jax.tree.leaves(state.params))
  meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  replicated = meshes and jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
  seen: set[int] = set()

  def canonicalize(leaf: jax.Array) -> jax.Array:
    # `id` is compared before the array is moved, since the result of `device_put` is a new object
    # that may share the memory of the array.
    repeated = id(leaf) in seen
    seen.add(id(leaf))
    if replicated:
      sharding = _on_mesh(leaf)
      if not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        leaf = _put_in_memory(leaf, replicated)
      elif sharding is not None and sharding != leaf.sharding:
        leaf = jax.device_put(leaf, sharding)
    return jnp.array(leaf) if repeated else leaf

  moved = jax.tree.unflatten(jax.tree.structure(state), map(canonicalize, leaves))
  return moved if replicated else commit_like(moved, moved)


def place_abstract(
  state: _train_state.TrainState, params: optax.Params, model_state: _types.ModelState
) -> _train_state.TrainState:
  """Adds to an abstract state the shardings that :func:`canonicalize_state` would give it.

  `params` and `model_state` are the initial trees from which `state` was made; their shardings are
  used. An array of the optimizer state gets the sharding of the param with the same path and shape.
  """
  sharding_of_param: dict[str, tuple[tuple[int, ...] | None, jax.sharding.Sharding | None]] = {
    path: (leaf.shape, _sharding(leaf))
    for path, leaf in zip(_paths.leaf_paths(params), jax.tree.leaves(params), strict=True)
  }
  shardings = [sharding for _, sharding in sharding_of_param.values() if sharding is not None]
  meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
  # The sharding of all arrays that match no param by path and shape.
  replicated: Any = next(iter(shardings), None)
  if meshes:
    replicated = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())

  def place(leaf: Any, sharding: jax.sharding.Sharding | None) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or replicated)

  def place_like(leaf: jax.ShapeDtypeStruct, initial: jax.Array) -> jax.ShapeDtypeStruct:
    return place(leaf, _sharding(initial))

  def place_by_path(leaf: jax.ShapeDtypeStruct, path: str) -> jax.ShapeDtypeStruct:
    names = path.split("/")
    for start in range(len(names) + 1):
      shape, sharding = sharding_of_param.get("/".join(names[start:]), (None, None))
      if shape == leaf.shape:
        return place(leaf, sharding)
    return place(leaf, None)

  return _train_state.TrainState(
    params=jax.tree.map(place_like, state.params, params),
    opt_state=_trees.map_with(place_by_path, state.opt_state, _paths.leaf_paths(state.opt_state)),
    model_state=jax.tree.map(place_like, state.model_state, model_state),
    step=place(state.step, None),
  )


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
  sharding = _sharding(leaf)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  # The sharding of a typed key is not constrained, since the key is stored with a further axis.
  return None if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _constraint(sharding)


@functools.cache
def _constraint(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding | None:
  """Returns a sharding as a constraint, or None if the compiler always keeps this sharding.

  None entries at the end of the ``PartitionSpec`` are removed, since compiled programs return their
  shardings without such entries.
  """
  mesh, spec = sharding.mesh, list(sharding.spec)
  # Explicit axes and host memory are part of an array's type, so the compiler keeps them.
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

  def place(leaf: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)

  return _trees.map_with(place, state, shardings)

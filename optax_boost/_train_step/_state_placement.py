"""Where the arrays of a train state lie: on one device, or how they are sharded over a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _paths, _placement, _trees, _types
from optax_boost._train_step import _train_state


def canonicalize_state(state: _train_state.TrainState) -> _train_state.TrainState:
  """Makes a fresh state look like the one that a step returns, so that nothing recompiles.

  Weak types are removed, and the optimizer state's own arrays are replicated over the mesh of the
  params, or put on the one device to which an array of the state is committed. An array that occurs
  twice is copied, as donation demands.
  """
  leaves = [_train_state.drop_weak_type(leaf) for leaf in jax.tree.leaves(state)]
  shardings = map(_sharding, jax.tree.leaves(state.params))
  meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  replicated = meshes and jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
  seen: set[int] = set()

  def canonicalize(leaf: jax.Array) -> jax.Array:
    # Before it is moved: two objects may share one device's part.
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
  state: _train_state.TrainState, params: optax.Params, model_state: _types.Tree
) -> _train_state.TrainState:
  """Gives an abstract state the shardings of the params, as a concrete one has them."""
  sharding_of_param: dict[str, tuple[Any, Any]] = {
    path: (leaf.shape, _sharding(leaf))
    for path, leaf in zip(_paths.leaf_paths(params), jax.tree.leaves(params), strict=True)
  }
  shardings = [sharding for _, sharding in sharding_of_param.values() if sharding is not None]
  meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
  # On all devices of the mesh, or on the one device.
  everywhere = next(iter(shardings), None)
  if meshes:
    everywhere = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())

  def place(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or everywhere)

  def place_like(leaf: Any, initial: Any) -> Any:
    return place(leaf, _sharding(initial))

  def place_by_path(leaf: Any, path: str) -> Any:
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
  """The sharding of an array, or of an abstract one; inside a trace there is none to ask for."""
  return None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)


def _first_sharding(state: _train_state.TrainState) -> jax.sharding.Sharding | None:
  return _sharding(next(iter(jax.tree.leaves(state.params)), None))


def _is_committed(leaf: _types.Unchecked) -> bool:
  """Whether an array was put on its devices, not left where it was made."""
  return not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "committed", False)


def commit_like(state: _train_state.TrainState, arguments: _types.Tree) -> _train_state.TrainState:
  """Puts a state where its step will: on the device, or the mesh, of a committed argument."""
  # At every step: the cheap question first.
  if _is_committed(state.step):
    return state
  if not isinstance(_first_sharding(state), jax.sharding.SingleDeviceSharding):
    return state
  for leaf in filter(_is_committed, jax.tree.leaves(arguments)):
    if isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
      return jax.tree.map(functools.partial(_put_in_memory, sharding=leaf.sharding), state)
    # Axes that are Explicit are part of the arrays' types.
    if isinstance(leaf.sharding, jax.sharding.NamedSharding) and _placement.has_auto_axes_only(
      leaf.sharding.mesh
    ):
      everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
      return jax.tree.map(functools.partial(_put_in_memory, sharding=everywhere), state)
  return state


def _put_in_memory(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Puts a leaf on devices, in the memory that it lies in: a state may be kept on the host."""
  memory_kind = getattr(_sharding(leaf), "memory_kind", None)
  if memory_kind:
    sharding = sharding.with_memory_kind(memory_kind)
  return jax.device_put(leaf, sharding)


def placement(state: _train_state.TrainState) -> tuple[jax.sharding.NamedSharding | None, ...]:
  """How each array of a state lies on a mesh, where XLA might place it elsewhere after the step."""
  first = _first_sharding(state)
  if not isinstance(first, jax.sharding.NamedSharding) or first.mesh.size == 1:
    return ()
  return tuple(map(_on_mesh, jax.tree.leaves(state)))


def _on_mesh(leaf: Any) -> jax.sharding.NamedSharding | None:
  sharding = _sharding(leaf)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  # A key has a layout of its own.
  return None if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _constraint(sharding)


@functools.cache
def _constraint(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding | None:
  """A sharding as it comes out of a program, without None at the end, where XLA would choose it."""
  mesh, spec = sharding.mesh, list(sharding.spec)
  # Explicit axes are part of the type, and so are places in the memory of the host.
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
  """Places each array of a step's result as :func:`placement` found it before the step."""
  structure: Any = jax.tree.structure(state)
  if not shardings or structure != jax.tree.structure(before):
    return state

  def place(leaf: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)

  return _trees.map_with(place, state, shardings)

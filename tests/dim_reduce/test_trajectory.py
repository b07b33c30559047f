"""Snapshots of the params in the optimizer state."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from tests import meshes


def record(tx, points):
  """The state after `update` has seen each of the points."""
  state = tx.init(points[0])
  update = jax.jit(tx.update)
  for params in points:
    _, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
  return state


def numbered(count):
  return [{"w": jnp.full((2, 3), i, jnp.float32), "b": jnp.float32(-i)} for i in range(count)]


@pytest.mark.parametrize(
  ("every", "capacity", "steps"), [(1, 3, 2), (1, 3, 7), (3, 4, 11), (2, 1, 6)]
)
def test_the_last_snapshots_are_kept_in_order(every, capacity, steps):
  tx = optax_boost.record_trajectory(every, capacity)
  state = record(tx, numbered(steps))
  expected = list(range(0, steps, every))
  found = optax_boost.snapshots(state)
  assert found["b"].tolist() == [-i for i in expected[-capacity:]]
  assert found["w"][:, 1, 2].tolist() == expected[-capacity:]
  assert found["w"].shape[1:] == (2, 3)
  assert (int(state.count), int(state.snapshot_count)) == (steps, len(expected))


def test_snapshots_are_stored_in_another_dtype():
  points = [{"w": jnp.full(3, x)} for x in (1.0, 1.0 + 2**-7, 1.0 + 2**-10)]
  tx = optax_boost.record_trajectory(every=1, capacity=3, dtype=jnp.bfloat16)
  found = optax_boost.snapshots(record(tx, points))["w"]
  assert found.dtype == jnp.bfloat16
  assert found[:, 0].tolist() == [1.0, 1.0 + 2**-7, 1.0]


def test_params_that_are_not_finite_overwrite_nothing_in_a_full_ring():
  points = numbered(5)
  points[3]["w"], points[4]["b"] = jnp.full((2, 3), jnp.nan), jnp.float32(jnp.inf)
  state = record(optax_boost.record_trajectory(every=1, capacity=3), points)
  found = optax_boost.snapshots(state)
  assert found["b"].tolist() == [0.0, -1.0, -2.0]
  assert found["w"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
  assert (int(state.snapshot_count), int(state.notfinite_count)) == (3, 2)


def test_snapshots_under_jit_says_to_pass_the_state_itself():
  state = optax_boost.record_trajectory(1, 2).init(jnp.ones(2))
  with pytest.raises(TypeError, match=r"state whose values are known; got a traced one"):
    jax.jit(optax_boost.snapshots)(state)


@pytest.mark.parametrize("capacity", [2, 4])
def test_refuses_a_state_of_another_capacity(capacity):
  state = record(optax_boost.record_trajectory(1, 3), numbered(4))
  other = optax_boost.record_trajectory(1, capacity)
  with pytest.raises(
    ValueError, match=rf"room for `capacity` snapshots, {capacity}; got one for 3"
  ):
    other.update(numbered(1)[0], state, numbered(1)[0])


def test_a_donated_state_is_not_copied():
  params = {"w": jnp.ones((64, 64))}
  tx = optax_boost.record_trajectory(every=10, capacity=50)
  step = jax.jit(lambda p, s: tx.update(p, s, p), donate_argnums=1)
  memory = step.lower(params, tx.init(params)).compile().memory_analysis()
  size = params["w"].nbytes
  assert memory.temp_size_in_bytes < 3 * size
  assert memory.alias_size_in_bytes >= 50 * size


@pytest.mark.parametrize("count", [0, 2])
def test_snapshots_needs_a_state_with_one_trajectory(count):
  tx = optax.chain(optax.identity(), *[optax_boost.record_trajectory(1, 2)] * count)
  with pytest.raises(ValueError, match=rf"one TrajectoryState; got {count} of them .* once\?"):
    optax_boost.snapshots(tx.init(jnp.ones(2)))


def test_all_devices_take_a_snapshot_or_none_does():
  mesh = meshes.mesh((8,), ("x",))
  tx = optax_boost.record_trajectory(1, 4, axis_name="x")
  points = [jnp.arange(16.0) + i for i in range(4)]
  points[1] = points[1].at[3].set(jnp.nan)
  state = tx.init(points[0])
  part, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  ring = jax.sharding.PartitionSpec(None, "x")
  specs = jax.tree.map(lambda x: ring if x.ndim == 2 else whole, state)
  update = jax.jit(
    jax.shard_map(
      lambda state, params: tx.update(params, state, params)[1],
      mesh=mesh,
      in_specs=(specs, part),
      out_specs=specs,
    )
  )
  for params in points:
    state = update(state, params)
  assert optax_boost.snapshots(state).tolist() == [points[i].tolist() for i in (0, 2, 3)]
  assert state.notfinite_count == 1


def test_snapshots_needs_a_state_that_has_seen_params():
  tx = optax_boost.record_trajectory(1, 2)
  with pytest.raises(ValueError, match=r"after 0 steps .* Make a step first"):
    optax_boost.snapshots(tx.init(jnp.ones(2)))


def test_snapshots_needs_one_member_of_a_population():
  tx = optax_boost.record_trajectory(1, 2)
  population = jnp.arange(6.0).reshape(3, 2)
  state = jax.vmap(tx.init)(population)
  _, state = jax.vmap(tx.update)(population, state, population)
  with pytest.raises(ValueError, match=r"population.* of shape \(3,\). Take a member"):
    optax_boost.snapshots(state)
  second = jax.tree.map(lambda x: x[1], state)
  assert optax_boost.snapshots(second).tolist() == [[2.0, 3.0]]

"""A layer of a leaf that holds many gets the subspace that it gets in a leaf of its own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost import LayerSlice
from tests import layer_losses, meshes

LAYERS, K = 4, 2
SHAPES = {"head": (7,), "nested": (2, 2, 7), "up": (5, LAYERS, 4)}
# The same layers in leaves of their own, in the same groups.
UNROLLED = [*(f"layers/{layer}/" for layer in range(LAYERS)), "head"]
# Of the snapshots below, the closest singular values are 6.740 and 6.679, so that their directions
# have 111 times the rounding errors of the snapshots; eight of these each.
ATOL = 8 * 111 * float(np.finfo(np.float32).eps)


def random_tree(seed, *rows):
  rng = np.random.default_rng(seed)
  return {n: rng.normal(size=(*rows, *s)).astype(np.float32) for n, s in SHAPES.items()}


AXES = layer_losses.described(random_tree(0), {"nested": (0, 1), "up": (1,)})


def unrolled(tree, rows=0):
  """Layers in leaves of their own, after this number of axes of rows."""
  nested = tree["nested"].reshape(*tree["nested"].shape[:rows], LAYERS, 7)
  every = (slice(None),) * rows
  layers = [
    {"nested": nested[(*every, i)], "up": tree["up"][(*every, slice(None), i)]}
    for i in range(LAYERS)
  ]
  return {"layers": layers, "head": tree["head"]}


def unrolled_subspace(space):
  return space._replace(mean=unrolled(space.mean), basis=unrolled(space.basis, 1))


def test_each_layer_is_fitted_separately():
  snapshots = random_tree(0, 8)
  ours = jax.device_get(optax_boost.fit_subspace(snapshots, K, groups=AXES))
  expected = optax_boost.fit_subspace(unrolled(snapshots, 1), K, groups=UNROLLED)
  chex.assert_trees_all_close(unrolled_subspace(ours), expected, rtol=1e-4, atol=ATOL)
  layer = unrolled(ours.basis, 1)["layers"][2]
  rows = np.concatenate([layer["nested"], layer["up"].reshape(K, -1)], axis=1)
  np.testing.assert_allclose(rows @ rows.T, np.eye(K), atol=1e-5)
  alone = optax_boost.fit_subspace(unrolled(snapshots, 1)["layers"][2], K)
  np.testing.assert_allclose(layer["up"], alone.basis["up"], rtol=1e-4, atol=ATOL)
  # The variance along a row sums over all groups' parts.
  deviations = jax.tree.map(lambda x, m: x - m, snapshots, ours.mean)
  along = [
    np.tensordot(deviations["up"][:, :, i], ours.basis["up"][0, :, i], 2)
    + np.tensordot(deviations["nested"].reshape(8, LAYERS, 7)[:, i], layer_of(ours.basis, i)[0], 1)
    for i in range(LAYERS)
  ]
  along.append(np.tensordot(deviations["head"], ours.basis["head"][0], 1))
  variance = sum(np.sum(part**2) for part in along) / 7
  np.testing.assert_allclose(ours.explained_variance[0], variance, rtol=1e-4)


def test_no_axes_are_one_group_with_a_warning():
  snapshots, none = random_tree(0, 8), layer_losses.described(random_tree(0))
  expected = optax_boost.fit_subspace(snapshots, K)
  state = optax_boost.dim_reduce(expected).init(expected.mean)
  for call in (
    lambda: chex.assert_trees_all_equal(
      optax_boost.fit_subspace(snapshots, K, groups=none), expected
    ),
    lambda: optax_boost.dim_reduce(expected, groups=none),
    lambda: optax_boost.refresh_subspace(state, expected, groups=none),
  ):
    with pytest.warns(optax_boost.NoEffectWarning, match=r"all leaves are one group") as warned:
      call()
    # The warning points to the line with the argument.
    assert warned[0].filename == __file__


SPECS = {"head": (None,), "nested": (None, "x"), "up": (None, "x")}


def put(tree, kind, rows=0):
  """A tree, or its rows, with the axis of the layers over two devices."""
  mesh = meshes.mesh((2,), ("x",), kind)
  shardings = {
    name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * rows, *spec))
    for name, spec in SPECS.items()
  }
  return jax.device_put(tree, shardings)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_layers_are_fitted_without_a_gather(kind):
  plain = random_tree(0, 8)
  expected = optax_boost.fit_subspace(plain, K, groups=AXES)
  ours = optax_boost.fit_subspace(put(plain, kind, 1), K, groups=AXES)
  chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=ATOL)
  for found, rows in ((ours.mean, 0), (ours.basis, 1)):
    for name in SPECS:
      sharding = put(found, kind, rows)[name].sharding
      assert found[name].sharding.is_equivalent_to(sharding, found[name].ndim)


def layer_of(basis, layer):
  return basis["nested"].reshape(K, LAYERS, 7)[:, layer]


def quadratic(params):
  curvatures = unrolled(jax.tree.map(lambda x: 1 + x**2, random_tree(1)))
  terms = jax.tree.map(lambda c, p: jnp.sum(c * p**2), curvatures, params)
  return sum(jax.tree.leaves(terms))


def stacked_quadratic(params):
  return quadratic(unrolled(params))


PLAN = optax_boost.LayerGroups(
  groups=(
    (LayerSlice("up", 1, 0, 2), LayerSlice("nested", 0, 0, 1)),
    (LayerSlice("up", 1, 2, 4), LayerSlice("nested", 0, 1, 2), "head"),
  ),
  sizes=(54, 61),
)
# The groups of a plan, which has the outer layers of scans in scans.
PLAN_GROUPS = ["layers/[01]", "head"]


@pytest.mark.parametrize("by_plan", [False, True])
def test_stacked_layers_move_like_layers_in_separate_leaves(by_plan):
  params = random_tree(2)
  groups = (PLAN, PLAN_GROUPS) if by_plan else (AXES, UNROLLED)
  ours = jax.device_get(optax_boost.fit_subspace(random_tree(0, 8), K, groups=groups[0]))
  spaces = ours, unrolled_subspace(ours)
  losses = stacked_quadratic, quadratic
  starts = params, unrolled(params)
  results = []
  for own, space, loss, start in zip(groups, spaces, losses, starts, strict=True):
    tx = optax_boost.dim_reduce(space, alpha=0.01, groups=own)
    step = optax_boost.make_train_step(lambda p, _, loss=loss: loss(p), tx, donate=False)
    state = step.init(start)
    for _ in range(5):
      state, metrics = step(state, jnp.zeros([]))
    results.append((state, metrics["loss"]))
  (state, loss), (expected, expected_loss) = results
  found = unrolled(jax.device_get(state.params))
  chex.assert_trees_all_close(found, expected.params, rtol=1e-3, atol=1e-4)
  assert state.opt_state.inverse_hessian.shape == expected.opt_state.inverse_hessian.shape
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
  assert loss < 0.95 * stacked_quadratic(params)


def test_a_subspace_of_layers_is_replaced_with_the_same_groups():
  first, second = (optax_boost.fit_subspace(random_tree(s, 8), K, groups=AXES) for s in (0, 3))
  tx = optax_boost.dim_reduce(first, max_search=None, groups=AXES)
  params = random_tree(2)
  gradient = jax.jit(jax.grad(stacked_quadratic))(params)
  _, state = jax.jit(tx.update)(gradient, tx.init(params), params)

  def residual(state):
    state = jax.device_get(state)
    inside = np.zeros((LAYERS, 7))
    for layer in range(LAYERS):
      inside[layer] = state.projected_momentum[layer] @ layer_of(state.basis, layer)
    return state.momentum["nested"].reshape(LAYERS, 7) - inside

  renewed = optax_boost.refresh_subspace(state, second, groups=AXES)
  np.testing.assert_allclose(residual(renewed), residual(state), rtol=1e-4, atol=1e-5)
  assert np.any(residual(state))
  chex.assert_trees_all_equal(renewed.basis, second.basis)
  with pytest.raises(ValueError, match=r"`refresh_subspace` needs .*, \(5, 2\); got \(1, 2\)"):
    optax_boost.refresh_subspace(state, second)

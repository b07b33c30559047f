"""Freezing layers of a scan: groups of layers, the cut scan, frozen slices of optimizer states."""

import functools
import re

import chex
from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from optax_boost._trace import _jaxpr
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests import meshes
from tests.freeze_layers import test_freezing
from tests.layer_groups.models import with_custom_vjp

LAYERS, WIDTH = 5, 8
X = jnp.asarray(np.random.default_rng(9).normal(size=(16, WIDTH)), jnp.float32)


def layer(h, w):
  h = h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"]
  return h, None


def make_params(layers=LAYERS, width=WIDTH):
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(0, width**-0.5, shape), jnp.float32)

  blocks = {
    "up": normal(layers, width, width),
    "bias": normal(layers, width),
    "down": normal(layers, width, width),
  }
  return {"embed": normal(width, width), "blocks": blocks, "head": normal(width, 3)}


def apply(params, x, body=layer, prepare=lambda w: w, **options):
  h = jnp.tanh(x @ params["embed"])
  h, _ = jax.lax.scan(body, h, prepare(params["blocks"]), **options)
  return h


def loss_fn(params, x, **options):
  return jnp.mean((apply(params, x, **options) @ params["head"]) ** 2)


def unstack(params):
  leaves, structure = jax.tree.flatten(params["blocks"])
  layers = [jax.tree.unflatten(structure, layer) for layer in zip(*leaves, strict=True)]
  return params | {"blocks": layers}


def unrolled_loss(params, x):
  h = jnp.tanh(x @ params["embed"])
  for w in params["blocks"]:
    h, _ = layer(h, w)
  return jnp.mean((h @ params["head"]) ** 2)


def groups_of(loss=loss_fn, params=None, num_groups=LAYERS + 2, x=X, **options):
  params = make_params() if params is None else params
  return optax_boost.layer_groups(loss, params, x, num_groups=num_groups, **options)


@functools.cache
def each_layer():
  """A group for each layer of the scan."""
  return groups_of()


def blocks(first, end):
  names = ("up", "bias", "down")
  return tuple(LayerSlice(f"blocks/{name}", 0, first, end) for name in names)


def test_each_layer_of_a_scan_is_a_block():
  plan = groups_of()
  layers = tuple(blocks(i, i + 1) for i in range(LAYERS))
  assert plan.groups == (("embed",), *layers, ("head",))
  assert plan.sizes == (64, *[136] * LAYERS, 24)
  assert "group 2: 136 parameters (17.7 %): blocks/up[1:2], blocks/bias[1:2]" in str(plan)
  assert plan.unused == plan.reused == ()


def test_layers_are_distributed_as_evenly_as_possible():
  plan = groups_of(num_groups=3)
  assert plan.groups == (("embed", *blocks(0, 2)), blocks(2, 4), (*blocks(4, 5), "head"))
  backwards = groups_of(functools.partial(loss_fn, reverse=True), num_groups=3)
  assert backwards.groups == (("embed", *blocks(3, 5)), blocks(1, 3), (*blocks(0, 1), "head"))
  # A leaf whose layers are all in one group is named as a whole.
  assert groups_of(num_groups=1).groups[0][1] == "blocks/up"
  with pytest.raises(
    ValueError, match=r"8 groups of 7 blocks.* or a layer of a scan.*num_groups=7"
  ):
    groups_of(num_groups=8)


def test_layers_along_another_axis_are_named_by_it():
  def loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.moveaxis(params["w"], 1, 0))
    return jnp.mean(h)

  params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, 4, WIDTH))}
  plan = groups_of(loss, params, 2)
  assert plan.groups == ((LayerSlice("w", 1, 0, 2),), (LayerSlice("w", 1, 2, 4),))
  assert held_by(loss, params, plan, 1)


def test_norms_beside_a_scan_join_the_group_of_its_first_or_last_layer():
  params = make_params() | {
    "before": {"scale": jnp.ones(WIDTH)},
    "after": {"scale": jnp.ones(WIDTH)},
  }
  del params["embed"]

  def loss(params, x):
    h = apply(params | {"embed": jnp.eye(WIDTH)}, x * params["before"]["scale"])
    return jnp.mean(h * params["after"]["scale"])

  plan = groups_of(loss, params, LAYERS)
  assert "before/scale" in plan.groups[0]
  assert "after/scale" in plan.groups[-1]


def test_a_leaf_that_all_layers_share_is_frozen_with_the_first():
  def loss(params, x):
    def body(h, w):
      return layer(h, w | {"down": w["down"] @ params["shared"]})

    return loss_fn(params, x, body=body)

  plan = groups_of(loss, make_params() | {"shared": jnp.eye(WIDTH)})
  assert "shared" in plan.groups[1]
  assert plan.reused == ("shared",)


def test_parallel_layers_and_overridden_leaves_are_not_split():
  def experts(params, x):
    return jnp.sum(jax.lax.map(lambda w: jnp.sum(jnp.tanh(x @ w)), params["experts"]))

  plan = groups_of(experts, {"experts": jnp.ones((4, WIDTH, WIDTH))}, 1)
  assert plan.groups == (("experts",),)
  moved = groups_of(overrides={"down": 6})
  assert moved.groups[1] == (LayerSlice("blocks/up", 0, 0, 1), LayerSlice("blocks/bias", 0, 0, 1))
  assert "blocks/down" in moved.groups[6]


def fixed(depth, num_groups=LAYERS + 2):
  return optax_boost.FreezeSchedule(num_groups, lambda step, key: depth)


def frozen_masks(plan, params, depth):
  """For each leaf, an array that tells which entries are frozen."""
  tx = optax_boost.freeze_layers(optax.sgd(1.0), plan, fixed(depth, len(plan.groups)))
  ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)
  updates = jax.device_get(jax.jit(lambda p: tx.update(p, tx.init(p))[0])(ones))
  return jax.tree.map(lambda u: u == 0, updates)


def held_by(loss, params, plan, depth, x=X, rtol=0.0):
  """Returns whether a scan is cut.

  Asserts that the gradient is zero where frozen, and elsewhere that of the whole scan (to the bit
  if `rtol` is 0).
  """
  frozen = optax_boost.freeze_layers(optax.sgd(1.0), plan, fixed(depth, len(plan.groups)))
  step = optax_boost.make_train_step(loss, test_freezing.spied(frozen), donate=False)
  state = step.init(params)
  ours = step(state, x)[0].opt_state[0]
  traced = jax.jit(jax.grad(loss)).trace(params, x)
  whole = jax.device_get(traced.lower().compile()(params, x))
  masks = frozen_masks(plan, params, depth)
  assert any(mask.any() and not mask.all() for mask in jax.tree.leaves(masks))
  expected = jax.tree.map(lambda mask, g: np.where(mask, 0, g), masks, whole)
  chex.assert_trees_all_close(jax.device_get(ours), expected, rtol=rtol, atol=rtol / 10)
  assert all(np.any(g) for g in jax.tree.leaves(whole))
  return len(scans(program_of(step, state, x))) > len(scans(traced.jaxpr.jaxpr))


def program_of(step, state, *args):
  """The program of a step; the state, with its depth, is a constant in it."""
  return jax.make_jaxpr(lambda *args: step(state, *args))(*args).jaxpr


def scans(program):
  equations = [e for e in program.eqns if e.primitive.name == "scan"]
  for equation in program.eqns:
    for inner in _jaxpr.sub_jaxprs(equation):
      equations += scans(getattr(inner, "jaxpr", inner))
  return equations


def tied(params, x):
  logits = apply(params, x) @ params["embed"].T
  return jnp.mean(logits**2) + jnp.mean((logits @ params["head"]) ** 2)


def twice(params, x):
  return jnp.mean((apply(params, apply(params, x)) @ params["head"]) ** 2)


def micro_batches(params, x):
  def one(total, x):
    return total + loss_fn(params, x), None

  return jax.lax.scan(one, 0.0, x.reshape(4, 4, WIDTH))[0]


def with_decay(params, x):
  return loss_fn(params, x) + 0.1 * optax.tree.norm(params, squared=True)


def to_half(w):
  return jax.tree.map(lambda a: 0.5 * a.astype(jnp.bfloat16), w)


def keyed(params, x):
  keys = jax.random.split(jax.random.key(0), LAYERS)

  def body(h, w):
    key, w = w
    return layer(h * jax.random.bernoulli(key, 0.5, h.shape), w)

  return loss_fn(params, x, body=body, prepare=lambda w: (keys, w))


LOSSES = {
  "plain": loss_fn,
  "jit": jax.jit(loss_fn),
  "remat body": functools.partial(loss_fn, body=jax.checkpoint(layer)),
  "remat": lambda p, x: jax.checkpoint(loss_fn)(p, x),
  "reverse": functools.partial(loss_fn, reverse=True),
  "unroll": functools.partial(loss_fn, unroll=2),
  "cast": functools.partial(loss_fn, prepare=to_half),
  "keyed": keyed,
  "tied": tied,
  "two scans": twice,
  "micro-batches": micro_batches,
  "decay": with_decay,
}


def under_shard_map(params, x):
  mesh = meshes.mesh((8,), ("x",))
  specs = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x"))
  mean = lambda p, x: jax.lax.pmean(loss_fn(p, x), "x")  # noqa: E731
  return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=specs[0])(params, x)


# Scans that can't be cut: the gradients of frozen layers are computed and masked.
UNCUT = {
  "cond": lambda p, x: jax.lax.cond(x[0, 0] > 9, lambda p: 0.0, lambda p: loss_fn(p, x), p),
  "custom_vjp": with_custom_vjp(loss_fn),
  "shard_map": under_shard_map,
  "relu of the layers": functools.partial(loss_fn, prepare=lambda w: jax.tree.map(jax.nn.relu, w)),
}


@pytest.mark.parametrize("name", [*LOSSES, *UNCUT])
def test_a_cut_scan_gives_the_same_gradient_to_the_bit(name):
  loss = (LOSSES | UNCUT)[name]
  assert held_by(loss, make_params(), groups_of(loss), 3) == (name in LOSSES)


def dots(program):
  """How many matrix products a program computes."""
  count = 0
  for equation in program.eqns:
    runs = equation.params["length"] if equation.primitive.name == "scan" else 1
    inner = [getattr(p, "jaxpr", p) for p in _jaxpr.sub_jaxprs(equation)]
    count += (equation.primitive.name == "dot_general") + runs * sum(map(dots, inner))
  return count


def dots_of_a_step(loss, params=None, x=X):
  params = make_params() if params is None else params
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups_of(loss, params, x=x), fixed(3))
  step = optax_boost.make_train_step(loss, tx)
  return dots(program_of(step, step.init(params), x))


@functools.cache
def dots_of_a_plain_step():
  return dots_of_a_step(loss_fn)


def constrained(*spec):
  def prepare(w):
    mesh = meshes.mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), w)

  return prepare


def in_heads(w):
  kernels = {name: w[name].reshape(LAYERS, WIDTH, 2, 4) for name in ("up", "down")}
  return w | {name: jnp.tanh(a).reshape(LAYERS, WIDTH, WIDTH) for name, a in kernels.items()}


PREPARED = {
  "constraint": constrained(),
  "constraint of the layers": constrained("x"),
  "barrier": jax.lax.optimization_barrier,
  "reshape": in_heads,
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_scan_is_cut_if_its_layers_are_moved_or_reshaped_before_it(name):
  loss = functools.partial(loss_fn, prepare=PREPARED[name])
  # Newer XLA fuses the operations before the scan in another way.
  rtol = 1e-5 if name == "reshape" else 0.0
  assert held_by(loss, make_params(), groups_of(loss), 3, rtol=rtol)
  assert dots_of_a_step(loss) == dots_of_a_plain_step()
  if name == "barrier":  # around all params, too
    loss_behind_barrier = lambda p, x: loss_fn(jax.lax.optimization_barrier(p), x)  # noqa: E731
    assert dots_of_a_step(loss_behind_barrier) == dots_of_a_plain_step()


@pytest.mark.parametrize("spec", [(None, "x"), ("x",)], ids=["columns", "layers"])
def test_a_scan_over_resharded_layers_is_cut_on_an_explicit_mesh(spec):
  mesh = meshes.mesh((8,), ("x",), "Explicit")
  replicated, sharded = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(*spec)

  def loss(params, x):
    decay = 0.1 * jnp.sum(params["blocks"]["up"] ** 2)
    return decay + loss_fn(params, x, prepare=lambda w: jax.sharding.reshard(w, replicated))

  with jax.set_mesh(mesh):
    params = jax.device_put(make_params(8), replicated)
    params["blocks"] = jax.device_put(params["blocks"], sharded)
    x = jax.device_put(X, jax.sharding.PartitionSpec("x"))
    assert held_by(loss, params, groups_of(loss, params, x=x), 3, x)
    assert dots_of_a_step(loss, params, x) == dots_of_a_step(loss_fn, make_params(8))


def test_scans_in_scans_are_cut_at_the_outer_one():
  def loss(params, x):
    def outer(h, w):
      return jax.lax.scan(layer, h, w)

    return loss_fn(params, x, body=outer)

  stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), make_params(3)["blocks"])
  params = make_params() | {"blocks": jax.tree.map(lambda w: jnp.moveaxis(w, 0, 1), stacked)}
  plan = groups_of(loss, params, 5)
  assert plan.groups[2] == blocks(1, 2)
  assert held_by(loss, params, plan, 3)


def test_params_trained_below_frozen_layers_keep_their_gradient():
  for pattern in ("embed", "blocks/bias"):
    assert held_by(loss_fn, make_params(), groups_of(overrides={pattern: 6}), 3)


def test_stacks_that_share_leaves_are_distinguished():
  def loss(params, x):
    def body(h, w):
      mixed = jnp.einsum("bi,lij->bj", h, params["second"]["w"])
      return layer(h + 0.1 * mixed @ params["shared"], w)

    h = apply(params, x, body=body)
    h, _ = jax.lax.scan(
      lambda h, w: (jnp.tanh(h @ w["w"] @ params["shared"] + w["b"]), None), h, params["second"]
    )
    return jnp.mean((h @ params["head"]) ** 2)

  second = {"w": make_params()["blocks"]["up"][:2], "b": make_params()["blocks"]["bias"][:2]}
  params = make_params() | {"second": second, "shared": jnp.eye(WIDTH)}
  plan = groups_of(loss, params, None, blocks="second[*]|blocks[*]")
  # The first scan uses the second scan's weights, too.
  assert plan.groups[1] == (
    LayerSlice("second/w", 0, 0, 1),
    "shared",
    LayerSlice("second/b", 0, 0, 1),
  )
  assert plan.groups[3] == blocks(0, 1)
  assert set(plan.reused) == {"second/w", "shared"}
  # At depth 2, the trained first scan comes before the frozen layer of the second.
  assert held_by(loss, params, plan, 2)
  assert held_by(loss, params, plan, 5)


# Frozen layers of the scan: none, two, none (only the embedding), all, all but the last.
DEPTHS = np.array([0, 3, 1, 6, 5])
SEVERAL_DEPTHS = optax_boost.FreezeSchedule(
  LAYERS + 2, lambda step, key: jnp.asarray(DEPTHS)[step % len(DEPTHS)]
)
INNERS = {
  "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
  "clip": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(0.1, momentum=0.9)),
  "lars": lambda: optax_boost.lars(1.0, layers=optax_boost.layer_axes(loss_fn, make_params(), X)),
  "partition": lambda: optax.partition(
    {"x": optax.adam(1e-2), "y": optax.sgd(0.1, 0.9)},
    lambda p: jax.tree.map_with_path(lambda path, _: "x" if "up" in str(path) else "y", p),
  ),
}


def is_frozen(before, after, depth):
  """Whether, in all leaves of the blocks, exactly the frozen layers are unchanged."""

  def block_leaves(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [leaf for path, leaf in flat if "['blocks']" in jax.tree_util.keystr(path)]

  moved = [
    np.any((np.asarray(a) != np.asarray(b)).reshape(LAYERS, -1), axis=1)
    for a, b in zip(block_leaves(before), block_leaves(after), strict=True)
  ]
  frozen = np.arange(LAYERS) < depth - 1
  return bool(moved) and all((m == ~frozen).all() for m in moved)


@pytest.mark.parametrize("name", INNERS)
def test_frozen_layers_and_their_state_stay_bit_for_bit(name):
  tx = optax_boost.freeze_layers(INNERS[name](), each_layer(), SEVERAL_DEPTHS)
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state = step.init(make_params())

  @jax.jit
  def masked(params, state):
    updates, state = tx.update(jax.grad(loss_fn)(params, X), state, params)
    return optax.apply_updates(params, updates), state

  for depth in DEPTHS:
    after, metrics = step(state, X)
    assert metrics["frozen_groups"] == depth
    moments = (state.opt_state.inner_state, after.opt_state.inner_state)
    assert is_frozen((state.params, moments[0]), (after.params, moments[1]), depth)
    expected = masked(state.params, state.opt_state)
    chex.assert_trees_all_close((after.params, after.opt_state), expected, rtol=1e-5, atol=1e-6)
    state = after


def one_step_of(inner, depth):
  """The updates and the state after one step; the layers are wide and the first are frozen."""
  params = make_params(width=128)
  x = jnp.ones((4, 128))
  plan = groups_of(params=params, x=x)
  tx = optax_boost.freeze_layers(inner, plan, fixed(depth))

  @jax.jit
  def step(params):
    return tx.update(jax.grad(loss_fn)(params, x), tx.init(params), params)

  return jax.device_get(step(params))


def test_a_factored_moment_is_frozen_layer_by_layer():
  updates, state = one_step_of(optax.adafactor(1e-2, clipping_threshold=None), 3)
  for u in jax.tree.leaves(updates["blocks"]):
    assert not np.any(u[:2])
    assert np.any(u[2:])
  for moment in (optax.tree.get(state, "v_row"), optax.tree.get(state, "v_col")):
    assert moment["blocks"]["up"].shape == (LAYERS, 128)
    assert not np.any(moment["blocks"]["up"][:2])
    assert np.all(np.any(moment["blocks"]["up"][2:], axis=1))


def test_a_moment_without_the_axis_of_layers_moves_while_one_of_them_is_trained():
  for depth in (LAYERS, LAYERS + 1):
    updates, state = one_step_of(optax.novograd(1e-2), depth)
    nu = optax.tree.get(state, "nu")["blocks"]["up"]
    assert nu.shape == ()
    assert bool(nu > 0) == bool(np.any(updates["blocks"]["up"])) == (depth == LAYERS)


def flops(loss, params, plan, depth, x):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan, fixed(depth, 10))
  step = optax_boost.make_train_step(loss, tx)
  return step.lower(step.init(params), x).compile().cost_analysis()["flops"]


def test_a_step_has_the_flops_of_the_unrolled_model():
  params, x = make_params(8, 64), jnp.ones((128, 64))
  # Unrolled by XLA, which counts the body of a loop once.
  scanned = functools.partial(loss_fn, unroll=8)
  plan = groups_of(scanned, params, 10, x)
  layers = ["embed", *(f"blocks/{i}/" for i in range(8)), "head"]
  ours = [flops(scanned, params, plan, depth, x) for depth in (0, 5)]
  expected = [flops(unrolled_loss, unstack(params), layers, depth, x) for depth in (0, 5)]
  np.testing.assert_allclose(ours, expected, rtol=0.02)
  np.testing.assert_allclose(ours[1] / ours[0], 0.65, rtol=0.02)


def test_the_backward_pass_of_a_scaled_loss_is_cut():
  frozen = optax_boost.freeze_layers(optax.sgd(0.1), each_layer(), fixed(3))
  tx = optax_boost.dynamic_loss_scale(frozen, 8.0)
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state = step.init(make_params())
  after, _ = step(state, X)
  assert is_frozen(state.params, after.params, 3)
  # Forward over frozen layers, forward and backward over trained ones.
  lengths = [e.params["length"] for e in scans(program_of(step, state, X))]
  assert sorted(lengths) == [2, 3, 3]


def test_a_step_over_sharded_layers_gathers_nothing():
  mesh = meshes.mesh((8,), ("x",))
  params = make_params()

  def place(w):
    spec = [None] * (w.ndim - 1) + ["x" if w.shape[-1] == 8 else None]
    return jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

  sharded = jax.tree.map(place, params)
  steps = []
  for depth in (0, 4):
    tx = optax_boost.freeze_layers(optax.adam(1e-2), each_layer(), fixed(depth))
    steps.append(optax_boost.make_train_step(loss_fn, tx, donate=False))
  state, whole = steps[1].init(sharded), steps[1].init(params)
  programs = [s.lower(s.init(sharded), X).compile().as_text() for s in steps]
  # The step with frozen layers gathers no other shapes.
  whole_step, cut_step = (set(re.findall(r"= (\S+) all-gather", text)) for text in programs)
  assert cut_step <= whole_step
  after, _ = steps[1](state, X)
  expected, _ = steps[1](whole, X)
  chex.assert_trees_all_close(
    jax.device_get(after.params), jax.device_get(expected.params), rtol=1e-4, atol=1e-6
  )
  shardings = [w.sharding for w in jax.tree.leaves(after.params["blocks"])]
  assert shardings == [w.sharding for w in jax.tree.leaves(sharded["blocks"])]


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    x = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
    return nn.Dropout(0.2, deterministic=False)(nn.tanh(x)), None


class Model(nn.Module):
  axis: int
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(
      nn.remat(Block) if self.remat else Block,
      variable_axes={"params": self.axis, "batch_stats": 0},
      split_rngs={"params": True, "dropout": True},
      length=LAYERS,
    )
    x, _ = scanned(name="blocks")(nn.Dense(WIDTH)(x), None)
    return nn.Dense(1)(x)


@pytest.mark.parametrize(("axis", "remat"), [(0, True), (1, False)])
def test_frozen_linen_layers_and_their_statistics_are_not_updated(axis, remat):
  module = Model(axis, remat)
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = jax.jit(module.init)(keys, X)

  def loss(model, x):
    return jnp.mean(model(x) ** 2)

  loss, *arrays = ob_linen.split_loss(loss, module, variables)
  plan = optax_boost.layer_groups(loss, *arrays, X, jax.random.key(0), num_groups=LAYERS + 2)
  dense = [LayerSlice(f"blocks/Dense_0/{name}", axis, 1, 2) for name in ("kernel", "bias")]
  assert list(plan.groups[2][:2]) == dense
  tx = optax_boost.freeze_layers(optax.adamw(1e-2), plan, fixed(3))
  step = optax_boost.make_train_step(loss, tx, donate=False)
  state = step.init(*arrays)
  after, _ = step(state, X, jax.random.key(2))
  trees = [
    jax.tree.map(lambda w: np.moveaxis(w, axis, 0), (s.params["blocks"], mu["blocks"]))
    for s, mu in ((s, s.opt_state.inner_state[0].mu) for s in jax.device_get((state, after)))
  ]
  trees = [{"blocks": tree} for tree in trees]
  assert is_frozen(*trees, 3)
  assert is_frozen(state.model_state, after.model_state, 3)
  lengths = {e.params["length"] for e in scans(program_of(step, state, X, keys["params"]))}
  assert lengths == {2, 3}


class NormedLinear(nnx.Module):
  def __init__(self, key):
    rngs = nnx.Rngs(key)
    self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

  def __call__(self, x):
    return self.norm(self.linear(x))


class Scanned(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.blocks = nnx.vmap(NormedLinear)(jax.random.split(rngs(), LAYERS))
    self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

  def __call__(self, x):
    run = nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return self.last(run(self.first(x), self.blocks))


def test_frozen_nnx_layers_are_not_updated():
  model = Scanned(nnx.Rngs(0))

  def loss(model, x):
    return jnp.mean(model(x) ** 2)

  plan = optax_boost.layer_groups(*ob_nnx.split_loss(loss, model), X, num_groups=LAYERS + 2)
  assert plan.groups[2][:2] == (
    LayerSlice("blocks/linear/kernel", 0, 1, 2),
    LayerSlice("blocks/linear/bias", 0, 1, 2),
  )
  tx = optax_boost.freeze_layers(optax.adamw(1e-2), plan, fixed(3))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model)))
  ob_nnx.make_train_step(loss)(model, optimizer, X)
  assert is_frozen(before, nnx.to_pure_dict(nnx.state(model)), 3)

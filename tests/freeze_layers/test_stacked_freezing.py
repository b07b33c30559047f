"""Freezing layers of a scan: the cut scan, and frozen slices of the optimizer's state."""

import functools
import itertools
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
BLOCKS = ("up", "bias", "down")


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


def groups_of(params=None):
  """A group for each layer of the scan."""
  params = make_params() if params is None else params
  return optax_boost.layer_groups(params, ["embed", "blocks[*]", "head"])


def blocks(first, end):
  return tuple(LayerSlice(f"blocks/{name}", 0, first, end) for name in BLOCKS)


def plan_of(*groups):
  """Groups of paths and slices, written by hand; sizes are only printed."""
  return optax_boost.LayerGroups(groups, (0,) * len(groups))


def fixed(depth, num_groups=LAYERS + 2):
  return optax_boost.fixed_freezing(num_groups, depth)


def frozen_masks(plan, params, depth):
  """For each leaf, an array that tells which entries are frozen."""
  masks = jax.tree.map(lambda w: np.zeros(w.shape, bool), params)
  for entry in itertools.chain.from_iterable(plan.groups[:depth]):
    path, axis, first, end = entry if isinstance(entry, LayerSlice) else (entry, 0, None, None)
    mask = functools.reduce(lambda node, name: node[name], path.split("/"), masks)
    mask[(slice(None),) * axis + (slice(first, end),)] = True
  return masks


def held_by(loss, params, plan, depth, x=X, rtol=0.0):
  """Returns whether a scan is cut.

  Asserts that the gradient is zero where frozen, and elsewhere that of the whole scan (to the bit
  if `rtol` is 0).
  """
  # The optimizer keeps state of all layers, since the second step trains them.
  schedule = optax_boost.FreezeSchedule([0, 1], [depth, 0])
  tx = optax_boost.freeze_layers(test_freezing.spied(optax.sgd(1.0)), plan, schedule)
  step = optax_boost.make_train_step(loss, tx, donate=False)
  state = step.init(params)
  gradient, _ = step(state, x)[0].opt_state.inner_state
  traced = jax.jit(jax.grad(loss)).trace(params, x)
  whole = jax.device_get(traced.lower().compile()(params, x))
  masks = frozen_masks(plan, params, depth)
  assert any(mask.any() and not mask.all() for mask in jax.tree.leaves(masks))
  expected = jax.tree.map(lambda mask, g: np.where(mask, 0, g), masks, whole)
  chex.assert_trees_all_close(jax.device_get(gradient), expected, rtol=rtol, atol=rtol / 10)
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


def tied_with_decay(params, x):
  logits = apply(params, x) @ params["embed"].T
  loss = jnp.mean(logits**2) + jnp.mean((logits @ params["head"]) ** 2)
  return loss + 0.1 * optax.tree.norm(params, squared=True)


def twice(params, x):
  return jnp.mean((apply(params, apply(params, x)) @ params["head"]) ** 2)


def micro_batches(params, x):
  def one(total, x):
    return total + loss_fn(params, x), None

  return jax.lax.scan(one, 0.0, x.reshape(4, 4, WIDTH))[0]


def to_half(w):
  return jax.tree.map(lambda a: 0.5 * a.astype(jnp.bfloat16), w)


def keyed(params, x):
  keys = jax.random.split(jax.random.key(0), LAYERS)

  def body(h, w):
    key, w = w
    return layer(h * jax.random.bernoulli(key, 0.5, h.shape), w)

  return loss_fn(params, x, body=body, prepare=lambda w: (keys, w), reverse=True, unroll=2)


LOSSES = {
  "jit": jax.jit(loss_fn),
  "layers recomputed and cast": functools.partial(
    loss_fn, body=jax.checkpoint(layer), prepare=to_half
  ),
  "recomputed as a whole": lambda p, x: jax.checkpoint(loss_fn)(p, x),
  "keyed, backwards, unrolled": keyed,
  "tied, with decay": tied_with_decay,
  "two scans": twice,
  "micro-batches": micro_batches,
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


# Without optimization, XLA of JAX 0.12 rounds an unrolled scan in another order.
UNROLLED = "keyed, backwards, unrolled"


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.optimized) if name == UNROLLED else name
    for name in [*LOSSES, *UNCUT]
  ],
)
def test_a_cut_scan_gives_the_same_gradient_to_the_bit(name):
  loss, depth = (LOSSES | UNCUT)[name], 3
  plan = groups_of()
  if name.startswith("keyed"):  # the last layer comes first
    plan = plan_of(("embed",), *(blocks(i, i + 1) for i in reversed(range(LAYERS))), ("head",))
  assert held_by(loss, make_params(), plan, depth) == (name in LOSSES)


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
  groups = groups_of(params)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, fixed(3, len(groups)))
  step = optax_boost.make_train_step(loss, tx)
  return dots(program_of(step, step.init(params), x))


def moved(w):
  """Layers that are constrained, reshaped and behind a barrier."""
  sharding = jax.sharding.NamedSharding(
    meshes.mesh((8,), ("x",)), jax.sharding.PartitionSpec(None, "x")
  )
  w = jax.lax.optimization_barrier(w)
  w = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), w)
  kernels = {name: w[name].reshape(LAYERS, WIDTH, 2, 4) for name in ("up", "down")}
  return w | {name: jnp.tanh(a).reshape(LAYERS, WIDTH, WIDTH) for name, a in kernels.items()}


def test_a_scan_is_cut_if_its_layers_are_moved_or_reshaped_before_it():
  loss = functools.partial(loss_fn, prepare=moved)
  # Newer XLA fuses the operations before the scan in another way.
  assert held_by(loss, make_params(), groups_of(), 3, rtol=1e-5)
  plain = dots_of_a_step(loss_fn)
  assert dots_of_a_step(loss) == plain
  assert dots_of_a_step(lambda p, x: loss_fn(jax.lax.optimization_barrier(p), x)) == plain


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
    assert dots_of_a_step(loss, params, x) == dots_of_a_step(loss_fn, make_params(8))
    if spec == ("x",):
      assert held_by(loss, params, groups_of(params), 3, x)


def test_scans_in_scans_and_layers_along_another_axis_are_cut():
  def scan_in_scan(params, x):
    return loss_fn(params, x, body=lambda h, w: jax.lax.scan(layer, h, w))

  pairs = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w], 1), make_params(3)["blocks"])
  params = make_params() | {"blocks": pairs}
  assert held_by(scan_in_scan, params, groups_of(params), 3)

  def along_axis_1(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.moveaxis(params["w"], 1, 0))
    return jnp.mean(h)

  params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, 4, WIDTH))}
  plan = optax_boost.layer_groups(params, ["w[:,*]"])
  assert plan.groups[1] == (LayerSlice("w", 1, 1, 2),)
  assert held_by(along_axis_1, params, plan, 2)


def test_params_trained_below_frozen_layers_keep_their_gradient():
  layers = [blocks(i, i + 1) for i in range(LAYERS)]
  assert held_by(loss_fn, make_params(), plan_of((), *layers, ("embed", "head")), 3)
  without_bias = [(up, down) for up, _, down in layers]
  plan = plan_of(("embed",), *without_bias, ("blocks/bias", "head"))
  assert held_by(loss_fn, make_params(), plan, 3)


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
  # The first scan uses the second scan's weights, too. At depth 2, the trained first scan comes
  # before the frozen layer of the second.
  names = ["embed", "second[*]", "blocks[*]", "head|shared"]
  assert held_by(loss, params, optax_boost.layer_groups(params, names), 2)
  shared_first = ["embed|shared", "second[*]", "blocks[*]", "head"]
  assert held_by(loss, params, optax_boost.layer_groups(params, shared_first), 5)


# Frozen layers of the scan: two, all, all but the last.
DEPTHS = [3, LAYERS + 1, LAYERS]
SEVERAL_DEPTHS = optax_boost.FreezeSchedule(range(4), [*DEPTHS, 0])


def label_ups(params):
  return jax.tree.map_with_path(lambda path, _: "x" if "up" in str(path) else "y", params)


INNERS = {
  "adamw": optax.adamw(1e-2, weight_decay=0.1),
  "clip": optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(0.1, momentum=0.9)),
  "partition": optax.partition({"x": optax.adam(1e-2), "y": optax.sgd(0.1, 0.9)}, label_ups),
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


def test_frozen_layers_and_their_state_stay_bit_for_bit():
  """In one program with traced depths, and in the train step, whose scans are cut."""
  txs = {n: optax_boost.freeze_layers(i, groups_of(), SEVERAL_DEPTHS) for n, i in INNERS.items()}
  step = optax_boost.make_train_step(loss_fn, txs["adamw"], donate=False)

  @jax.jit
  def masked(runs):
    moved = {}
    for name, (params, state) in runs.items():
      updates, state = txs[name].update(jax.grad(loss_fn)(params, X), state, params)
      moved[name] = optax.apply_updates(params, updates), state
    return moved

  runs = {name: (make_params(), tx.init(make_params())) for name, tx in txs.items()}
  state = step.init(make_params())
  for depth in DEPTHS:
    after = masked(runs)
    for name, (params, old) in runs.items():
      moved, new = after[name]
      assert is_frozen((params, old.inner_state), (moved, new.inner_state), depth)
    state, metrics = step(state, X)
    assert metrics["frozen_groups"] == depth
    chex.assert_trees_all_close(
      (state.params, state.opt_state), after["adamw"], rtol=1e-5, atol=1e-6
    )
    runs = after


def test_factored_moments_and_moments_without_an_axis_of_layers_are_frozen():
  params, x = make_params(width=128), jnp.ones((4, 128))
  inners = {
    "factored": optax.adafactor(1e-2, clipping_threshold=None),
    "norms": optax.novograd(1e-2),
  }
  schedule = optax_boost.FreezeSchedule([0, 1, 2], [LAYERS, LAYERS + 1, 0])
  plan = groups_of(params)
  txs = {name: optax_boost.freeze_layers(inner, plan, schedule) for name, inner in inners.items()}
  states = {name: tx.init(params) for name, tx in txs.items()}

  @jax.jit
  def step(states):
    grads = jax.grad(loss_fn)(params, x)
    return {name: tx.update(grads, states[name], params) for name, tx in txs.items()}

  history = []
  for depth in (LAYERS, LAYERS + 1):
    results = step(states)
    states = {name: state for name, (_, state) in results.items()}
    for name in txs:
      for u in jax.tree.leaves(results[name][0]["blocks"]):
        assert np.any(u.reshape(LAYERS, -1), axis=1).tolist() == [
          i >= depth - 1 for i in range(LAYERS)
        ]
    for name in ("v_row", "v_col"):
      moment = optax.tree.get(states["factored"], name)["blocks"]["up"]
      assert moment.shape == (LAYERS, 128)
      assert np.any(moment, axis=1).tolist() == [False] * (LAYERS - 1) + [True]
    history.append(optax.tree.get(states["norms"], "nu")["blocks"]["up"])
  # A norm of all layers moves while one of them is trained.
  assert history[0].shape == ()
  assert history[0] == history[1] > 0


def flops(loss, params, groups, depth, x):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, fixed(depth, 10))
  step = optax_boost.make_train_step(loss, tx)
  return step.lower(step.init(params), x).compile().cost_analysis()["flops"]


def test_a_step_has_the_flops_of_the_unrolled_model():
  params, x = make_params(8, 64), jnp.ones((128, 64))
  # Unrolled by XLA, which counts the body of a loop once.
  scanned = functools.partial(loss_fn, unroll=8)
  whole, half = (flops(scanned, params, groups_of(params), depth, x) for depth in (0, 5))
  layers = ["embed", *(f"blocks/{i}/" for i in range(8)), "head"]
  expected = flops(unrolled_loss, unstack(params), layers, 5, x)
  np.testing.assert_allclose(half, expected, rtol=0.02)
  np.testing.assert_allclose(half / whole, 0.65, rtol=0.02)


def test_the_backward_pass_of_a_scaled_loss_is_cut():
  frozen = optax_boost.freeze_layers(optax.sgd(0.1), groups_of(), fixed(3))
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
  tx = optax_boost.freeze_layers(
    optax.adam(1e-2), groups_of(), optax_boost.FreezeSchedule([0, 1], [0, 4])
  )
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state, whole = step.init(sharded), step.init(params)
  at_1 = lambda s: s._replace(opt_state=s.opt_state._replace(count=jnp.int32(1)))  # noqa: E731
  programs = [step.lower(s, X).compile().as_text() for s in (state, at_1(state))]
  # The step with frozen layers gathers no other shapes.
  whole_step, cut_step = (set(re.findall(r"= (\S+) all-gather", text)) for text in programs)
  assert cut_step <= whole_step
  after, _ = step(at_1(state), X)
  expected, _ = step(at_1(whole), X)
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
  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(
      nn.remat(Block),
      variable_axes={"params": 1, "batch_stats": 0},
      split_rngs={"params": True, "dropout": True},
      length=LAYERS,
    )
    x, _ = scanned(name="blocks")(nn.Dense(WIDTH, name="embed")(x), None)
    return nn.Dense(1, name="head")(x)


def mean_square(model, x):
  return jnp.mean(model(x) ** 2)


def test_frozen_linen_layers_and_their_statistics_are_not_updated():
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = jax.jit(Model().init)(keys, X)
  loss, *arrays = ob_linen.split_loss(mean_square, Model(), variables)
  groups = optax_boost.layer_groups(arrays[0], ["embed", "blocks[:,*]", "head"])
  tx = optax_boost.freeze_layers(optax.adamw(1e-2), groups, fixed(3))
  step = optax_boost.make_train_step(loss, tx, donate=False)
  state = step.init(*arrays)
  after, _ = step(state, X, jax.random.key(2))
  before_and_after = [
    {"blocks": jax.tree.map(lambda w: np.moveaxis(w, 1, 0), s.params["blocks"])}
    for s in jax.device_get((state, after))
  ]
  assert is_frozen(*before_and_after, 3)
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


def test_frozen_nnx_layers_and_their_statistics_are_not_updated():
  model = Scanned(nnx.Rngs(0))
  params = nnx.state(model, nnx.Param)
  plan = optax_boost.layer_groups(params, ["first", "blocks[*]", "last"])
  assert LayerSlice("blocks/linear/kernel", 0, 1, 2) in plan.groups[2]
  tx = optax_boost.freeze_layers(optax.adamw(1e-2), plan, fixed(3))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model)))
  ob_nnx.make_train_step(mean_square)(model, optimizer, X)
  assert is_frozen(before, nnx.to_pure_dict(nnx.state(model)), 3)

"""Steps of SGPerm and LaPerm leave params exactly a permutation, whatever the form of the step."""

import functools

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import linen, nnx as ob_nnx
from tests import meshes

METHODS = {
  "exact": lambda: optax_boost.sgperm(lamda=1.0, lamda_max=1.0, momentum=0.5),
  "pairs": lambda: optax_boost.sgperm(method="pairs", key=0),
  "rank": lambda: optax_boost.sgperm(method="rank"),
  "laperm": lambda: optax_boost.laperm(optax.adam(0.1), sync_every=1),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

KERNELS = {"first": True, "second": False}
FORMS = {
  "alone": lambda tx: tx,
  "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
  "masked": lambda tx: optax.masked(tx, KERNELS),
  "partition": lambda tx: optax.partition(
    {"permuted": tx, "free": optax.sgd(0.1)}, {"first": "permuted", "second": "free"}
  ),
  "accumulate": lambda tx: optax_boost.accumulate(tx, every=2),
  "accumulate in a chain of one": lambda tx: optax.chain(optax_boost.accumulate(tx, every=2)),
  "dynamic_loss_scale": optax_boost.dynamic_loss_scale,
  "master_weights": optax_boost.master_weights,
  "stochastic_rounding": lambda tx: optax_boost.stochastic_rounding(tx, key=0),
  "average_params": lambda tx: optax_boost.average_params(tx, decay=0.9),
  "freeze_layers": lambda tx: optax_boost.freeze_layers(
    tx, ["first", "second"], optax_boost.continuous_freezing(2, 0.5)
  ),
  "switch_after": lambda tx: optax_boost.switch_after(9, tx, optax.sgd(0.1)),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "accumulate in a loss scale": lambda tx: optax_boost.dynamic_loss_scale(
    optax_boost.accumulate(tx, every=2)
  ),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "all of them": lambda tx: optax_boost.average_params(
    optax_boost.dynamic_loss_scale(optax_boost.accumulate(optax.masked(tx, KERNELS), every=2)),
    decay=0.9,
  ),
}
# Methods differ in the permutation alone, not in its way through the step; LaPerm's may be free.
PAIRS = [("rank", form) for form in FORMS]
PAIRS += [("laperm", form) for form in ("alone", "accumulate", "dynamic_loss_scale", "masked")]
PAIRS += [(method, "all of them") for method in ("exact", "pairs", "laperm")]
both_kinds = pytest.mark.parametrize("method", [METHODS["rank"], METHODS["laperm"]])


def params():
  # Entries of many magnitudes: `p + (q - p)` is another number than `q` in a third of them.
  rng = np.random.default_rng(0)

  def draw(*shape):
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 1, shape)).astype(np.float32)

  return {"first": draw(24, 5), "second": draw(5, 3)}


def batches():
  x = np.random.default_rng(1).normal(size=(7, 16, 24)).astype(np.float32)
  # An overflow: its step is skipped, or does no harm.
  x[4, 0, 0] = np.inf
  return x


def loss_fn(params, x):
  hidden = jnp.tanh(x @ params["first"])
  return jnp.mean((jnp.sum(hidden @ params["second"], -1) - jnp.sum(x[:, :3], -1)) ** 2)


def check(trained, start, opt_state, free=()):
  """Params are the initial ones in another order, to the bit, and those of the state."""
  exact = optax_boost.permuted_params(opt_state, trained).params
  for name in start.keys() - free:
    x, first, known = (np.asarray(tree[name]) for tree in (trained, start, exact))
    np.testing.assert_array_equal(np.sort(x, 0), np.sort(first, 0))
    np.testing.assert_array_equal(x, known.astype(x.dtype))


def has_moved(trained, start):
  return bool(np.any(np.asarray(trained["first"]) != np.asarray(start["first"])))


@pytest.mark.parametrize(("method", "form"), PAIRS)
def test_each_train_step_ends_in_a_permutation(method, form):
  start = params()
  tx = FORMS[form](METHODS[method]())
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(start)
  free = {"second"} if "MaskedNode" in str(state.opt_state) else set()
  for x in batches():
    state, _ = step(state, x)
    check(state.params, start, state.opt_state, free)
  assert has_moved(state.params, start)


@pytest.mark.parametrize(
  ("method", "form", "dtype"),
  [
    ("exact", "alone", "bfloat16"),
    ("pairs", "alone", "float16"),
    ("laperm", "master_weights", "float16"),
    ("rank", "stochastic_rounding", "bfloat16"),
    ("rank", "accumulate in a loss scale", "float16"),
  ],
)
def test_each_step_in_half_precision_ends_in_a_permutation(method, form, dtype):
  start = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params())
  step = optax_boost.make_train_step(loss_fn, FORMS[form](METHODS[method]()))
  state = step.init(start)
  for x in batches()[:4].astype(jnp.dtype(dtype)):
    state, _ = step(state, x)
    check(state.params, start, state.opt_state)
  assert has_moved(state.params, start)


@both_kinds
def test_each_step_of_a_scan_ends_in_a_permutation(method):
  start, tx = params(), method()

  def body(carry, x):
    trained, state = carry
    grads = jax.grad(loss_fn)(trained, x)
    trained, state = optax_boost.apply_gradients(tx, grads, state, trained)
    return (trained, state), trained

  (last, state), history = jax.jit(lambda *carry: jax.lax.scan(body, carry, batches()))(
    start, tx.init(start)
  )
  check(last, start, state)
  for name, xs in history.items():
    np.testing.assert_array_equal(np.sort(xs, 1), np.sort(np.stack([start[name]] * len(xs)), 1))
  assert has_moved(last, start)


@both_kinds
def test_each_step_of_an_nnx_model_ends_in_a_permutation(method):
  model = nnx.Linear(24, 3, use_bias=False, rngs=nnx.Rngs(0))
  start = {"first": jnp.copy(model.kernel[...])}
  optimizer = nnx.Optimizer(model, method(), wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean((model(x) - x[:, :3]) ** 2))
  for x in batches()[:4]:
    step(model, optimizer, x)
    trained = jnp.copy(model.kernel[...])
    np.testing.assert_array_equal(np.sort(trained, 0), np.sort(start["first"], 0))
  assert has_moved({"first": trained}, start)


@both_kinds
def test_each_step_of_a_linen_module_ends_in_a_permutation(method):
  module = nn.Dense(3, use_bias=False)

  def loss(model, x):
    return jnp.mean((model(x) - x[:, :3]) ** 2)

  loss, *arrays = linen.split_loss(loss, module, module.init(jax.random.key(0), batches()[0]))
  step = optax_boost.make_train_step(loss, method())
  state = step.init(*arrays)
  start = {"first": jnp.copy(state.params["kernel"])}
  for x in batches()[:4]:
    state, _ = step(state, x)
    trained = state.params["kernel"]
    np.testing.assert_array_equal(np.sort(trained, 0), np.sort(start["first"], 0))
  assert has_moved({"first": trained}, start)


# Powers of two: `p - rate * g` is rounded once, fused or not.
@pytest.mark.parametrize("rate", [2.0**-3, 2.0**-20])
def test_updates_that_do_not_permute_are_added(rate):
  start = params()
  grads = jax.jit(jax.grad(loss_fn))(start, batches()[0])

  @functools.partial(jax.jit, static_argnums=0)
  def stepped(tx, state, trained):
    return optax_boost.apply_gradients(tx, grads, state, trained)

  halved = optax.chain(METHODS["rank"](), optax.scale(0.5))
  updates, _ = jax.jit(halved.update)(grads, halved.init(start), start)
  found, _ = stepped(halved, halved.init(start), start)
  jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.add, start, updates))
  # After a switch, steps as small as a few roundings; between two synchronizations, free ones.
  free = optax.sgd(rate)
  for tx in (
    optax_boost.switch_after(1, METHODS["rank"](), free),
    optax.chain(optax_boost.laperm(free, sync_every=lambda count: 1 + 9 * (count > 0))),
  ):
    trained, state = stepped(tx, tx.init(start), start)
    check(trained, start, state)
    moved, _ = stepped(tx, state, trained)
    expected = jax.tree.map(lambda p, g: p + np.float32(-rate) * g, trained, grads)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


@pytest.mark.parametrize("spec", [(None, "x"), ("x",)], ids=["outputs", "fan-in"])
@each_method
def test_a_sharded_step_ends_in_a_permutation_and_gathers_no_param(method, spec):
  mesh = meshes.mesh((8,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  start = {"first": np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)}
  sharded, grads = jax.device_put((start, jax.tree.map(np.sin, start)), sharding)
  tx = method()
  state = tx.init(sharded)

  def step(grads, state, trained):
    return optax_boost.apply_gradients(tx, grads, state, trained)

  compiled = jax.jit(step).lower(grads, state, sharded).compile()
  trained, state = compiled(grads, state, sharded)
  check(trained, start, state)
  assert has_moved(trained, start)
  assert "all-gather" not in compiled.as_text()
  assert trained["first"].sharding.is_equivalent_to(sharding, 2)

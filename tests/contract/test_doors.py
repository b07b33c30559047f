"""Recorded runs through every door: `update`, `apply_gradients`, and the three train steps.

Not here: the normalized head, a layer that its own test runs in NNX and Linen.
"""

import functools
import json
import pathlib

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from optax_boost.nnx import _model
from tests import closeness
from tests.adasum import test_adasum
from tests.centralize import test_centralization
from tests.dim_reduce import test_mindspore
from tests.lars import test_lars
from tests.sgperm import oracle, test_laperm, test_sgperm
from tests.svrg import test_svrg

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def dot(params, gradients):
  """A loss with the given gradients, to the bit."""
  return sum(jnp.sum(gradients[name] * p) for name, p in params.items())


def by_hand(move, tx, params, loss):
  def step(carry, batch):
    params, state = carry
    scale = optax.tree.get(state, "loss_scale", 1.0)

    def value_fn(params):
      return loss(params, batch)

    grad_fn = jax.grad(lambda params: scale * value_fn(params))
    closures = {"value": value_fn(params), "value_fn": value_fn, "grad_fn": grad_fn}
    carry = move(tx, grad_fn(params), state, params, **closures)
    return carry, carry

  return (params, tx.init(params)), step


def updated(tx, gradients, state, params, **closures):
  updates, state = tx.update(gradients, state, params, **closures)
  return optax.apply_updates(params, updates), state


def in_train_step(tx, params, loss):
  take = optax_boost.make_train_step(loss, tx)

  def step(state, batch):
    state, _ = take(state, batch)
    return state, (state.params, state.opt_state)

  return take.init(params), step


class Net(nnx.Module):
  def __init__(self, params):
    # Not an `nnx.Dict`, which the oldest Flax lacks.
    for name, p in params.items():
      setattr(self, name, nnx.Param(jnp.copy(p)))


def in_nnx(tx, params, loss):
  net = Net(params)
  take = ob_nnx.make_train_step(
    lambda net, batch: loss({name: getattr(net, name)[...] for name in params}, batch)
  )

  def step(carry, batch):
    take(*carry, batch)
    net, optimizer = carry
    opt_state = _model.as_pure(optimizer.opt_state)
    return carry, ({n: getattr(net, n)[...] for n in params}, opt_state)

  return (net, nnx.Optimizer(net, tx, wrt=nnx.Param)), step


def in_linen(tx, params, loss):
  class Net(nn.Module):
    @nn.compact
    def __call__(self):
      return {name: self.param(name, lambda _, p=p: p) for name, p in params.items()}

  pure, *arrays = ob_linen.split_loss(
    lambda net, batch: loss(net(), batch), Net(), {"params": params}
  )
  take = optax_boost.make_train_step(pure, tx)

  def step(state, batch):
    state, _ = take(state, batch)
    return state, (state.params, state.opt_state)

  return take.init(*arrays), step


DOORS = {
  "update": functools.partial(by_hand, updated),
  "apply_gradients": functools.partial(by_hand, optax_boost.apply_gradients),
  "train_step": in_train_step,
  "nnx": in_nnx,
  "linen": in_linen,
}


def in_numpy(x):
  """A copy of an array, or of a key's data."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.array(jax.random.key_data(x) if is_key else x)


def through(door, tx, params, batches, loss=dot):
  """Params and optimizer state after each step, stacked."""
  name, how = door
  carry, step = DOORS[name](tx, params, loss)
  if how == "scan":
    scan = nnx.scan(step) if name == "nnx" else functools.partial(jax.lax.scan, step)
    return (nnx.jit if name == "nnx" else jax.jit)(scan)(carry, batches)[1]
  # A column of the contract compares eager steps with jitted ones.
  step, after = jax.jit(step) if how == "jit" else step, []
  batches = jax.tree.map(np.asarray, batches)
  for t in range(len(jax.tree.leaves(batches)[0])):
    carry, found = step(carry, jax.tree.map(lambda x, t=t: x[t], batches))
    after.append(jax.tree.map(in_numpy, found))  # the next step donates it
  return jax.tree.map(lambda *steps: np.stack(steps), *after)


STEP_BY_STEP = [
  ("update", "jit"),
  ("apply_gradients", "jit"),
  *((name, "") for name in ("train_step", "nnx", "linen")),
]


def doors_of(turn=None):
  """Each door step by step and in a scan, or with a turn one of both, the other at the next."""
  doors = [(way, (way[0], "scan")) for way in STEP_BY_STEP]
  chosen = doors if turn is None else [[pair[(i + turn) % 2]] for i, pair in enumerate(doors)]
  doors = [door for pair in chosen for door in pair]
  return pytest.mark.parametrize("door", doors, ids=lambda door: "-".join(filter(None, door)))


@doors_of(turn=0)
def test_lars_of_mxnet(door):
  arrays, hyper = test_lars.load("lars_mxnet200beta1_fp32")
  tx = test_lars.mxnet_lars(arrays, hyper["cases"][22])
  params = test_lars.unflatten(arrays, arrays["init"])
  grads = test_lars.unflatten(arrays, arrays["grads_r1"])
  found, _ = through(door, tx, params, grads)
  found = [test_lars.flatten(arrays, {n: p[t] for n, p in found.items()}) for t in range(10)]
  test_lars.assert_weights_agree(np.stack(found), arrays["init"], arrays["c22_w"])


@doors_of(turn=1)
def test_centralize_of_mindspore_in_its_order(door):
  arrays, names = test_centralization.recorded()
  hyper = json.loads(str(arrays["meta_json"]))["hyper"]
  init, grads = ({n: arrays[kind + n] for n in names} for kind in ("init_", "grad_"))
  closed = [n for n, p in init.items() if p.ndim < 2 or p.shape[1] % 16]
  tx = optax.chain(
    optax.add_decayed_weights(hyper["weight_decay"]),
    optax_boost.centralize(layout="torch", exclude=closed),
    optax.sgd(hyper["learning_rate"], hyper["momentum"]),
  )

  def loss(params, batch):
    """As `dot`, with the fan-in of each leaf contracted with data, where train steps see it."""
    gradients, eyes = batch
    used = {n: jnp.tensordot(p, eyes[n], p.ndim - 1) for n, p in params.items()}
    return dot(used, {n: g.reshape(used[n].shape) for n, g in gradients.items()})

  eyes = {n: np.eye(p[0].size).reshape(*p.shape[1:], -1) for n, p in init.items()}
  eyes = {n: np.asarray([eye] * hyper["steps"], np.float32) for n, eye in eyes.items()}
  params = jax.tree.map(jnp.asarray, init)
  found, _ = through(door, tx, params, (grads, eyes), loss)
  for name in names:
    # The same steps with the magnitudes of all terms.
    weight, velocity = np.abs(np.float64(init[name])), 0.0
    for t in range(hyper["steps"]):
      decayed = np.abs(grads[name][t]) + hyper["weight_decay"] * weight
      step = decayed if name in closed else test_centralization.terms_of(decayed)
      velocity = hyper["momentum"] * velocity + step
      weight = weight + hyper["learning_rate"] * velocity
      expected, ulps = arrays[f"weight_{name}"][t], test_centralization.ULPS
      closeness.assert_within_ulps(found[name][t], expected, weight, ulps)


def accumulation_terms(arrays, leaf):
  """MindSpore's run with the magnitudes of all terms."""
  weight = np.abs(np.float64(arrays[f"init_{leaf}"]))
  accum, velocity = np.zeros_like(weight), np.zeros_like(weight)
  found = {"weight": [], "accum": [], "velocity": []}
  for t, grad in enumerate(np.abs(arrays[f"grad_{leaf}"])):
    accum = accum + grad / 4
    if t % 4 == 3:
      velocity = 0.9 * velocity + accum + 0.01 * weight
      weight, accum = weight + 0.1 * velocity, np.zeros_like(weight)
    for name, sums in (("weight", weight), ("accum", accum), ("velocity", velocity)):
      found[name].append(sums)
  return found


@doors_of(turn=0)
def test_accumulate_of_mindspore(door):
  with np.load(GOLDEN / "grad_accumulation.npz") as file:
    arrays = dict(file)
  decayed = optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9))
  init, grads = ({n: jnp.asarray(arrays[kind + n]) for n in "wb"} for kind in ("init_", "grad_"))
  weights, state = through(door, optax_boost.accumulate(decayed, every=4), init, grads)
  sums, velocities = optax.tree.get(state, "accumulator"), optax.tree.get(state, "trace")
  found = {"weight": weights, "accum": optax.tree.scale(0.25, sums), "velocity": velocities}
  for i, leaf in enumerate("bw"):
    for quantity, terms in accumulation_terms(arrays, leaf).items():
      # With every operation rounded up or down at random: 1.7 ulps at most.
      expected = arrays[f"momentum_{quantity}_{leaf}"]
      closeness.assert_within_ulps(jax.tree.leaves(found[quantity])[i], expected, terms, 3)


@doors_of(turn=1)
def test_dynamic_loss_scale_of_mindspore(door):
  with np.load(GOLDEN / "loss_scale.npz") as file:
    overflow, scales = file["basic_overflow"], file["basic_scale"]
  tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), 4096.0, 4)
  grads = {"w": np.where(overflow[:, None], np.inf, -np.ones(2)).astype(np.float32)}
  found, state = through(door, tx, {"w": jnp.ones(2)}, grads)
  np.testing.assert_array_equal(optax.tree.get(state, "loss_scale"), scales)
  np.testing.assert_array_equal(found["w"][:, 0], 1 + np.cumsum(~overflow))


# How many replicas there are makes no difference to a door.
@pytest.mark.parametrize(("name", "ranks"), [("update", 2), *((name, 4) for name in DOORS)])
def test_adasum_of_horovod_with_a_momentum_per_replica(name, ranks):
  with np.load(GOLDEN / f"adasum_{ranks}ranks.npz") as file:
    run = {k.removeprefix("opt_"): file[k] for k in file.files if k.startswith("opt_")}
  init = {leaf: jnp.asarray(run[f"init_{leaf}"]) for leaf in ("weight", "bias")}
  tx = optax.chain(optax.sgd(0.1, momentum=0.9), optax_boost.adasum("replicas"))

  def loss(params, batch):
    return jnp.mean((batch[0] @ params["weight"].T + params["bias"] - batch[1]) ** 2)

  replica = functools.partial(through, (name, "scan"), tx, init, loss=loss)
  found, state = jax.vmap(replica, in_axes=1, axis_name="replicas")((run["x"], run["y"]))
  for leaf, start in init.items():
    terms = closeness.path_lengths(start, run[leaf])
    closeness.assert_within_ulps(found[leaf][0], run[leaf], terms, test_adasum.ULPS)
  velocity, *_ = jax.tree.leaves(optax.tree.get(state, "trace"))
  assert np.abs(velocity[0] - velocity[1]).max() > 1e-3


# Inside scans the train steps freeze, but skip no backward pass, and say so.
@pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")
@doors_of()
def test_freeze_layers_of_numpy(door):
  strategy = np.array([0, 1, 0, 0, 1, 0])
  schedule = optax_boost.FreezeSchedule(range(6), strategy)
  tx = optax_boost.freeze_layers(optax.sgd(0.5), ["body", "head"], schedule)
  grads = np.random.default_rng(0).integers(-9, 9, (6, 4)).astype(np.float32)
  params, grads = {"body": jnp.ones(4), "head": jnp.ones(4)}, {"body": grads, "head": grads[::-1]}
  found, _ = through(door, tx, params, grads)
  trained = (strategy == 0)[:, None] * grads["body"]
  np.testing.assert_array_equal(found["body"], 1 - 0.5 * np.cumsum(trained, 0))
  np.testing.assert_array_equal(found["head"], 1 - 0.5 * np.cumsum(grads["head"], 0))


@doors_of(turn=0)
def test_svrg_of_mxnet(door):
  run = test_svrg.trace_of("momentum")
  full = run.tree("full_grad_", 0, 1 / run.size)
  inner = optax.chain(optax_boost.svrg(None), optax.sgd(run.hyper["lr"], run.hyper["momentum"]))

  def init(params):
    mu = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(full))
    return optax_boost.refresh_svrg(inner.init(params), params, mu)

  tx = optax.GradientTransformationExtraArgs(init, inner.update)
  batches = run.batch(slice(run.first_period))
  found, _ = through(door, tx, run.tree("init_", ...), batches, test_svrg.mxnet_loss)
  test_svrg.assert_agrees(run, found)


@doors_of(turn=1)
def test_dim_reduce_of_mindspore(door):
  run = test_mindspore.trace_of("linear")
  params = {"a": run.init[0], "b": run.init[1]}

  def loss(params, batch):
    return jnp.mean((batch[0] @ params["a"] + params["b"] - batch[1]) ** 2)

  found, state = through(door, run.tx, params, (run["x"], run["y"]), loss)
  np.testing.assert_array_equal(optax.tree.get(state, "accepted_rho"), run["rho"])
  weights = [test_mindspore.flat([found["a"][t], found["b"][t]]) for t in range(run.steps)]
  test_mindspore.assert_weights_agree(run, weights)


# Recorded recommendations, weights whose sums are exact: to the bit.
@doors_of(turn=0)
def test_sgperm_of_sgperm_py(door):
  arrays, meta = oracle.load("sgperm_bounds")
  hyper = test_sgperm.hyperparams(meta["hyper"]) | test_sgperm.RECOMMENDED
  params, grads = {"kernel": jnp.asarray(arrays["w0"][0])}, {"kernel": jnp.asarray(arrays["m0"])}
  found, _ = through(door, optax_boost.sgperm(**hyper, key=0), params, grads)
  np.testing.assert_array_equal(found["kernel"], arrays["w0"][1:])


@doors_of(turn=1)
def test_laperm_of_numpy(door):
  start = np.random.default_rng(0).permutation(64).reshape(8, 8).astype(np.float32)
  grads = np.random.default_rng(1).integers(-99, 99, (6, 8, 8)).astype(np.float32)
  tx = optax_boost.laperm(optax.sgd(1.0, momentum=0.5), sync_every=3)
  found, _ = through(door, tx, {"kernel": jnp.asarray(start)}, {"kernel": jnp.asarray(grads)})
  expected, momentum = start, 0.0
  for t, grad in enumerate(grads):
    momentum = 0.5 * momentum + grad
    expected = expected - momentum
    if t % 3 == 2:
      expected = test_laperm.synchronized(start, expected)
    np.testing.assert_array_equal(found["kernel"][t], expected)

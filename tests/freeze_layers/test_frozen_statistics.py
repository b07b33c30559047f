"""Statistics of frozen layers: which ones keep their values in a step."""

import types

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._train_step import _frozen_statistics
import optax_boost.nnx as ob_nnx

pytestmark = pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time in this step")

X = jax.random.normal(jax.random.key(0), (16, 4)) + 2
NORM = {"norm": {"scale": 1.0}}
MEAN = {"norm": {"mean": 0.0}}


def paths_of(tree):
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def held_by_path(params, statistics, *frozen_paths):
  """The paths of the statistics that are held by path if some leaves of the params are frozen."""
  paths = paths_of(params)
  assert set(frozen_paths) <= set(paths)
  groups = [int(path not in frozen_paths) for path in paths]
  after = jax.tree.map(lambda x: x + 1, statistics)
  no_trace = types.SimpleNamespace(statistics_axes=dict)
  after = _frozen_statistics.hold_statistics(
    statistics, after, params, groups, np.int32(1), no_trace
  )
  leaves = zip(paths_of(statistics), *map(jax.tree.leaves, (statistics, after)), strict=True)
  return [path for path, old, new in leaves if old == new]


@pytest.mark.parametrize("params", [NORM, {"params": NORM}], ids=["bare", "params"])
@pytest.mark.parametrize("statistics", [MEAN, {"batch_stats": MEAN}], ids=["nnx", "linen"])
def test_statistics_belong_to_the_params_of_their_module(params, statistics):
  assert held_by_path(params, statistics, *paths_of(params)) == paths_of(statistics)


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("prefix", ["", "net"])
def test_joined_names_count_as_paths(separator, prefix):
  params = {separator.join(filter(None, (prefix, "norm", "scale"))): 1.0}
  name = separator.join(filter(None, (prefix, "norm", "mean")))
  assert held_by_path(params, {name: 0.0}, *params) == [name]


def test_a_module_without_params_of_its_own_belongs_to_the_innermost_module_around_with_params():
  params = {
    "block": {"dense": {"w": 1.0}, "last": {"w": 1.0}},
    "other": {"dense": {"w": 1.0}},
    "head": {"w": 1.0},
  }
  statistics = {
    "block": {"norm": {"mean": 0.0}, "seen": 0.0, "last": {"norm": {"mean": 0.0}}},
    "other": {"norm": {"deep": {"mean": 0.0}}},
    "head": {"mean": 0.0},
    # Of data alone: the module around is the whole model, whose last group is never frozen.
    "targets": {"mean": 0.0},
    "total": 0.0,
  }
  frozen = ("block/dense/w", "block/last/w", "other/dense/w")
  assert held_by_path(params, statistics, *frozen) == [
    "block/last/norm/mean",
    "block/norm/mean",
    "block/seen",
    "other/norm/deep/mean",
  ]
  # A module is frozen with its last params.
  assert held_by_path(params, statistics, "block/dense/w", "other/dense/w") == [
    "other/norm/deep/mean"
  ]


@pytest.mark.parametrize(
  "wrap", [lambda s: s, lambda s: {"batch_stats": s, "ema": s}], ids=["nnx", "linen"]
)
def test_statistics_without_params_are_not_frozen_by_an_equal_name(wrap):
  statistics = wrap({"encoder": MEAN, "norm": {"var": 1.0}})
  still = held_by_path(NORM | {"head": {"kernel": 1.0}}, statistics, "norm/scale")
  assert {path.removeprefix("batch_stats/").removeprefix("ema/") for path in still} == {"norm/var"}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"encoder": x}], ids=["root", "inside"])
def test_indices_in_lists_of_different_lengths_do_not_count_as_names(wrap):
  norm, dense = {"scale": 1.0}, {"w": 1.0}
  params = wrap([dense, norm, dense, norm])
  start = "encoder/" if "encoder" in params else ""
  assert held_by_path(params, wrap([{"mean": 0.0}, {"mean": 0.0}]), f"{start}1/scale") == []
  aligned = wrap([{}, {"mean": 0.0}, None, {"mean": 0.0}])
  assert held_by_path(params, aligned, f"{start}1/scale") == [f"{start}1/mean"]
  # The last layer has no statistics, but an entry in the list.
  aligned = wrap([{}, {"mean": 0.0}, {}, {}])
  assert held_by_path(params, aligned, f"{start}1/scale") == [f"{start}1/mean"]


def normalize(h, stats):
  """Returns normalized activations, and the running statistics."""
  m, v = h.mean(0), h.var(0)
  new = {"mean": 0.9 * stats["mean"] + 0.1 * m, "var": 0.9 * stats["var"] + 0.1 * v}
  return (h - m) / jnp.sqrt(v + 1e-5), new


def loss_with_statistics(p, s, x):
  """A dense layer and a norm in a scan over two layers, and a head with a norm."""

  def layer(h, inputs):
    w, mean = inputs
    h = jnp.tanh(h @ w)
    return h, 0.9 * mean + 0.1 * h.mean(0)

  h, norm = normalize(x, s["norm"])
  norm |= {"count": s["norm"]["count"] + 1, "draws": s["norm"]["draws"] + 1}
  h, means = jax.lax.scan(layer, p["norm"]["scale"] * h, (p["blocks"]["w"], s["blocks"]["mean"]))
  h, head = normalize(h @ p["head"]["w"], s["head"])
  new = {"norm": norm, "blocks": {"mean": means}, "head": head, "data": 0.5 * s["data"] + x.mean()}
  return jnp.mean((h**3 - 1) ** 2), new


@pytest.mark.parametrize("door", ["calls", "a scan", "not held"])
def test_statistics_of_frozen_layers_are_held_layer_by_layer(door):
  """In a step of its own for each depth, and with a traced depth in a user's scan."""
  keys = jax.random.split(jax.random.key(1), 2)
  params = {
    "norm": {"scale": jnp.ones(4)},
    "blocks": {"w": jax.random.normal(keys[0], (2, 4, 4))},
    "head": {"w": jax.random.normal(keys[1], (4, 2))},
  }
  moments = lambda n: {"mean": jnp.zeros(n), "var": jnp.ones(n)}  # noqa: E731
  stats = {
    "norm": moments(4) | {"count": jnp.int32(0), "draws": jnp.uint32(0)},
    "blocks": {"mean": jnp.zeros((2, 4))},
    "head": moments(2),
    "data": jnp.zeros(()),
  }
  groups = optax_boost.layer_groups(params, ["norm", "blocks[*]", "head"])
  tx = optax_boost.freeze_layers(optax.sgd(0.0), groups, optax_boost.FreezeSchedule([0, 1], [2, 0]))
  step = optax_boost.make_train_step(
    loss_with_statistics,
    tx,
    has_model_state=True,
    donate=False,
    hold_frozen_statistics=door != "not held",
  )
  state = step.init(params, stats)
  if door == "a scan":
    run = lambda s: jax.lax.scan(lambda s, _: (step(s, X)[0],) * 2, s, length=2)[1]  # noqa: E731
    history = jax.jit(run)(state).model_state
    history = [jax.tree.map(lambda x, t=t: x[t], history) for t in range(2)]
  else:
    history = []
    for _ in range(2):
      state, _ = step(state, X)
      history.append(state.model_state)
  new = loss_with_statistics(params, stats, X)[1]
  first = new
  if door != "not held":
    # The norm and the first of the two layers are frozen; a count of draws always moves.
    first = new | {
      "norm": stats["norm"] | {"draws": jnp.uint32(1)},
      "blocks": {"mean": new["blocks"]["mean"].at[0].set(0)},
    }
  second = loss_with_statistics(params, first, X)[1]
  chex.assert_trees_all_close(history, [first, second], rtol=1e-4, atol=1e-6)


class Block(nnx.Module):
  def __init__(self, affine, rngs):
    self.dense = nnx.Linear(4, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, use_bias=affine, use_scale=affine, rngs=rngs)

  def __call__(self, x):
    return jnp.tanh(self.norm(self.dense(x)))


class Blocks(nnx.Module):
  def __init__(self, rngs):
    blocks = [Block(affine, rngs) for affine in (True, False, False)]
    self.blocks = getattr(nnx, "List", list)(blocks)  # flax before 0.12 takes plain containers
    self.head = nnx.Linear(4, 1, rngs=rngs)

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return self.head(x)


def error(model, x):
  return jnp.mean((model(x) - 1) ** 2)


def test_nnx_norms_without_scale_and_bias_are_held_with_their_block():
  model = Blocks(nnx.Rngs(0))
  twin = nnx.clone(model)
  twin(X)
  groups = ["blocks/[01]/", "blocks/2/|head"]
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, optax_boost.fixed_freezing(2, 1))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  ob_nnx.make_train_step(error)(model, optimizer, X)
  for i in (0, 1):
    np.testing.assert_array_equal(model.blocks[i].norm.mean[...], 0)
    np.testing.assert_array_equal(model.blocks[i].norm.var[...], 1)
  moved = (model.blocks[2].norm.mean[...], twin.blocks[2].norm.mean[...])
  np.testing.assert_allclose(*moved, rtol=1e-5, atol=1e-7)

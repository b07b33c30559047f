"""Statistics of frozen layers: which ones keep their values in a step."""

import types

import chex
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._train_step import _frozen_statistics, _traced_loss
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx

pytestmark = pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time in this step")

X = jax.random.normal(jax.random.key(0), (16, 4)) + 2
flat = lambda tree: jax.tree_util.tree_flatten_with_path(tree)[0]  # noqa: E731
NORM = {"norm": {"scale": 1.0}}
MEAN = {"norm": {"mean": 0.0}}


def held_by_path(params, statistics, *frozen_paths):
  """The paths of the statistics that are held by path if some leaves of the params are frozen."""
  paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat(params)]
  assert set(frozen_paths) <= set(paths)
  groups = [int(path not in frozen_paths) for path in paths]
  after = jax.tree.map(lambda x: x + 1, statistics)
  unplaced = [_traced_loss.StatisticSources([], [], False)] * len(jax.tree.leaves(after))
  no_trace = types.SimpleNamespace(statistics_sources=lambda carried: unplaced)
  after = _frozen_statistics.hold_statistics(
    statistics, after, params, groups, np.int32(1), no_trace
  )
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for (path, old), (_, new) in zip(flat(statistics), flat(after), strict=True)
    if old == new
  ]


@pytest.mark.parametrize("params", [NORM, {"params": NORM}], ids=["bare", "params"])
@pytest.mark.parametrize("statistics", [MEAN, {"batch_stats": MEAN}], ids=["nnx", "linen"])
def test_statistics_belong_to_the_params_of_their_path(params, statistics):
  (scale,) = (jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat(params))
  (mean,) = (jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat(statistics))
  assert held_by_path(params, statistics, scale) == [mean]


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("prefix", ["", "net"])
def test_joined_names_count_as_paths(separator, prefix):
  params = {separator.join(filter(None, (prefix, "norm", "scale"))): 1.0}
  name = separator.join(filter(None, (prefix, "norm", "mean")))
  assert held_by_path(params, {name: 0.0}, *params) == [name]


@pytest.mark.parametrize(
  "wrap", [lambda s: s, lambda s: {"batch_stats": s, "ema": s}], ids=["nnx", "linen"]
)
def test_statistics_without_params_are_not_frozen_by_an_equal_name(wrap):
  statistics = wrap({"encoder": MEAN, "norm": {"var": 1.0}})
  still = held_by_path(NORM | {"head": {"kernel": 1.0}}, statistics, "norm/scale")
  assert {path.removeprefix("batch_stats/").removeprefix("ema/") for path in still} == {"norm/var"}
  # A module that holds nothing but a norm of the same name.
  assert held_by_path(NORM, wrap({"encoder": MEAN}), "norm/scale") == []


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


def run(step, state, scanned, steps=2):
  """The state after some steps: a jitted call each, or one scan with a traced number of groups."""
  if scanned:
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: (step(s, X)[0], None), s, length=steps)[0])(
      state
    )
  for _ in range(steps):
    state, _ = step(state, X)
  return state


def start(loss, params, statistics, groups, frozen=1):
  schedule = optax_boost.fixed_freezing(len(groups), frozen)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, schedule)
  step = optax_boost.make_train_step(loss, tx, has_model_state=True, donate=False)
  return step, step.init(params, statistics)


def normalize(h, stats, mean, var):
  """Returns normalized activations, and the running statistics; with two names of statistics."""
  m, v = h.mean(0), h.var(0)
  new = {mean: 0.9 * stats[mean] + 0.1 * m, var: 0.9 * stats[var] + 0.1 * v}
  return (h - m) / jnp.sqrt(v + 1e-5), new


NAMES = ("body/w", "norm/scale", "norm/bias", "head/w")
# For each tree: the names of params and statistics, and the groups. In the last two, paths say
# nothing.
TREES = {
  "slash": (NAMES, ("norm/mean", "norm/var", "head/mean", "head/var"), ["body|norm", "head"]),
  "dot": (
    [name.replace("/", ".") for name in NAMES],
    ("norm.mean", "norm.var", "head.mean", "head.var"),
    ["body|norm", "head"],
  ),
  "underscore": (
    [name.replace("/", "_") for name in NAMES],
    ("norm_mean", "norm_var", "head_mean", "head_var"),
    ["body_*|norm_*", "head_*"],
  ),
  "list": (range(4), range(4), ["[0-2]", "3"]),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["calls", "scan"])
@pytest.mark.parametrize("tree", TREES)
def test_the_statistics_of_a_frozen_norm_in_a_flat_tree_are_held(tree, scanned):
  of_params, of_stats, groups = TREES[tree]
  w, scale, bias, head = of_params
  keys = jax.random.split(jax.random.key(1), 2)
  params = {w: jax.random.normal(keys[0], (4, 4)), scale: jnp.ones(4), bias: jnp.zeros(4)}
  params[head] = jax.random.normal(keys[1], (4, 2))
  stats = {
    name: (jnp.zeros if i % 2 == 0 else jnp.ones)(4 if i < 2 else 2)
    for i, name in enumerate(of_stats)
  }

  def loss(p, s, x):
    h, new = normalize(x @ p[w], s, *of_stats[:2])
    h, of_head = normalize((p[scale] * h + p[bias]) @ p[head], s, *of_stats[2:])
    new |= of_head
    return jnp.mean((h**3 - 1) ** 2), [*new.values()] if tree == "list" else new

  expected, expected_stats = dict(params), dict(stats)
  for _ in range(2):
    new = loss(expected, expected_stats, X)[1]
    gradient = jax.grad(lambda p, s=expected_stats: loss(p, s, X)[0])(expected)
    expected |= {head: expected[head] - 0.1 * gradient[head]}
    expected_stats |= {name: new[name] for name in of_stats[2:]}
  if tree == "list":
    params, stats = [*params.values()], [*stats.values()]
  state = run(*start(loss, params, stats, groups), scanned)
  got = (dict(enumerate(t)) if tree == "list" else t for t in (state.params, state.model_state))
  chex.assert_trees_all_close(tuple(got), (expected, expected_stats), rtol=1e-4, atol=1e-6)
  assert bool(jnp.any(expected_stats[of_stats[2]] != 0))


# For each statistic whether it is held while the body is frozen.
DEPENDENT = {
  "of_data": True,
  "of_body": True,
  "of_body_alone": True,
  "copy_of_body_statistic": True,
  "of_head": False,
  "of_loss": False,
  "copy_of_head_statistic": False,
  "chosen_by_head": False,
  "repeated_by_head": False,
  "counter": False,
}


@pytest.mark.parametrize("scanned", [False, True], ids=["calls", "scan"])
def test_a_statistic_is_held_if_it_depends_on_no_trained_leaf(scanned):
  params = {"body": jnp.eye(4) * 0.5, "head": jnp.linspace(0.1, 0.4, 4)}

  def loss(p, s, x):
    h = jnp.tanh(x @ p["body"])
    y = h @ p["head"]
    value = jnp.mean((y - 1) ** 2)
    new = {
      "of_data": 0.9 * s["of_data"] + x.mean(),
      "of_body": jax.jit(lambda h: 0.9 * s["of_body"] + h.mean())(h),
      "of_body_alone": 0.9 * s["of_body_alone"] + p["body"].sum(),
      "copy_of_body_statistic": s["of_body"] + 1,
      "of_head": s["of_head"] + y.mean(),
      "of_loss": s["of_loss"] + value,
      "copy_of_head_statistic": s["of_head"] + 1,
      "chosen_by_head": jax.lax.cond(y.mean() > -9, lambda: h.mean(), lambda: x.mean()),
      "repeated_by_head": jax.lax.while_loop(
        lambda c: c[0] < y.mean() + 9, lambda c: (c[0] + 1, c[1] + h.mean()), (0.0, 0.0)
      )[1],
      "counter": s["counter"] + 1,
    }
    return value, new

  stats = dict.fromkeys(DEPENDENT, jnp.float32(0))
  before, after = {"p": params, "s": stats}, None
  for _ in range(2):
    new = loss(before["p"], before["s"], X)[1]
    gradient = jax.grad(lambda p, s=before["s"]: loss(p, s, X)[0])(before["p"])
    head = before["p"]["head"] - 0.1 * gradient["head"]
    after = {n: stats[n] if is_held else new[n] for n, is_held in DEPENDENT.items()}
    before = {"p": params | {"head": head}, "s": after}
  state = run(*start(loss, params, stats, ["body", "head"]), scanned)
  chex.assert_trees_all_close(state.model_state, after, rtol=1e-5)


@pytest.mark.parametrize("scanned", [False, True], ids=["calls", "scan"])
def test_counts_are_held_with_the_statistics_that_are_computed_from_them(scanned):
  params = {"body": jnp.eye(4) * 0.5, "head": jnp.linspace(0.1, 0.4, 4)}
  zero, count = jnp.zeros(()), jnp.int32(2)
  # Haiku's average, a mean with a float count, a key and a step in the same module, and a level of
  # noise that the means are computed from.
  stats = {
    "ema": {"hidden": zero, "average": zero, "counter": count},
    "mean": {"mean": zero, "n": zero + 2, "draws": jnp.uint32(0), "steps": count},
    "noise": {"level": zero + 1},
  }

  def loss(p, s, x):
    ema, mean, level = s["ema"], s["mean"], s["noise"]["level"]
    h = jnp.tanh(x @ p["body"]) + level
    counter, n = ema["counter"] + 1, mean["n"] + 1
    hidden = 0.9 * ema["hidden"] + 0.1 * h.mean()
    new = {
      "ema": {"hidden": hidden, "average": hidden / (1 - 0.9**counter), "counter": counter},
      "mean": {
        "mean": mean["mean"] + (h.mean() - mean["mean"]) / n,
        "n": n,
        "draws": mean["draws"] + jnp.uint32(1),
        "steps": mean["steps"] + 1,
      },
      "noise": {"level": level / 2},
    }
    return jnp.mean((h @ p["head"] - 1) ** 2), new

  state = run(*start(loss, params, stats, ["body", "head"]), scanned)
  moved = {"draws": jnp.uint32(2), "steps": count + 2}
  want = stats | {"mean": stats["mean"] | moved, "noise": {"level": zero + 0.25}}
  chex.assert_trees_all_equal(state.model_state, want)


@pytest.mark.parametrize("layers", ["sliced by a scan", "taken by an index"])
@pytest.mark.parametrize("scanned", [False, True], ids=["calls", "scan"])
def test_stacked_statistics_that_no_path_places_are_held_layer_by_layer(scanned, layers):
  params = {"blocks": jnp.stack([jnp.eye(4) * c for c in (0.3, 0.6, 0.9)]), "head": jnp.ones(4)}
  stats = {"means": jnp.zeros((3, 4)), "last": jnp.zeros(())}

  def loss(p, s, x):
    def layer(h, inputs):
      w, mean = inputs
      h = jnp.tanh(h @ w)
      return h, 0.9 * mean + 0.1 * h.mean(0)

    stacked = p["blocks"], s["means"]
    if layers == "sliced by a scan":
      h, means = jax.lax.scan(layer, x, stacked)
    else:
      h, means = x, []
      for i in range(3):
        h, mean = layer(h, (stacked[0][i], stacked[1][i]))
        means.append(mean)
      means = jnp.stack(means)
    return jnp.mean((h @ p["head"] - 1) ** 2), {"means": means, "last": h.mean()}

  plan = optax_boost.layer_groups(lambda p, x: loss(p, stats, x)[0], params, X)
  assert len(plan) == 4, str(plan)
  state = run(*start(loss, params, stats, plan, frozen=2), scanned, steps=1)
  new = loss(params, stats, X)[1]
  expected = new | {"means": new["means"].at[:2].set(0)}
  chex.assert_trees_all_close(state.model_state, expected, rtol=1e-5)


class Block(nnx.Module):
  def __init__(self, affine, rngs):
    self.dense = nnx.Linear(4, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, use_bias=affine, use_scale=affine, rngs=rngs)

  def __call__(self, x):
    return jnp.tanh(self.norm(self.dense(x)))


class Blocks(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.List([Block(affine, rngs) for affine in (True, False, False)])
    self.head = nnx.Linear(4, 1, rngs=rngs)

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return self.head(x)


def error(model, x):
  return jnp.mean((model(x) - 1) ** 2)


GROUPS = ["blocks/[01]/", "blocks/2/|head"]


def test_nnx_norms_without_scale_and_bias_are_held_with_their_block():
  model = Blocks(nnx.Rngs(0))
  twin = nnx.clone(model)
  twin(X)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), GROUPS, optax_boost.fixed_freezing(2, 1))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  ob_nnx.make_train_step(error)(model, optimizer, X)
  for i in (0, 1):
    np.testing.assert_array_equal(model.blocks[i].norm.mean[...], 0)
    np.testing.assert_array_equal(model.blocks[i].norm.var[...], 1)
  moved = (model.blocks[2].norm.mean[...], twin.blocks[2].norm.mean[...])
  np.testing.assert_allclose(*moved, rtol=1e-5, atol=1e-7)


class LinenBlocks(nn.Module):
  @nn.compact
  def __call__(self, x):
    for i in range(3):
      norm = nn.BatchNorm(False, use_scale=i == 0, use_bias=i == 0, name=f"norm_{i}")
      x = jnp.tanh(norm(nn.Dense(4, name=f"dense_{i}")(x)))
    return nn.Dense(1, name="head")(x)


@pytest.mark.parametrize("scanned", [False, True], ids=["calls", "scan"])
def test_linen_norms_without_scale_and_bias_are_held_with_their_block(scanned):
  variables = LinenBlocks().init(jax.random.key(0), X)
  loss, *arrays = ob_linen.split_loss(error, LinenBlocks(), variables)
  tx = optax_boost.freeze_layers(
    optax.sgd(0.1), ["dense_[01]|norm_[01]", "dense_2|head"], optax_boost.fixed_freezing(2, 1)
  )
  step = optax_boost.make_train_step(loss, tx, donate=False)
  state = run(step, step.init(*arrays), scanned, steps=1)
  _, new = LinenBlocks().apply(variables, X, mutable=["batch_stats"])
  expected = variables["batch_stats"] | {"norm_2": new["batch_stats"]["norm_2"]}
  chex.assert_trees_all_close(state.model_state["batch_stats"], expected, rtol=1e-5, atol=1e-7)

"""Mutable statistics that `average_params` averages beside the params, for a mean teacher."""

import functools
import pickle

import chex
from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import compilations

STATISTICS = {"mean": jnp.zeros(2), "uses": jnp.zeros([], jnp.int32)}
EPS = float(np.finfo(np.float32).eps)
# The arguments, and from n to the weights of n snapshots.
MODES = {
  "mean": ({"start": 0}, np.ones),
  "late mean": ({"start": 4, "every": 2}, lambda n: np.r_[np.zeros(2), np.ones(n - 2)]),
  "decay": ({"decay": 0.7}, lambda n: 0.7 ** np.arange(n)[::-1]),
  "decay, every third": ({"decay": 0.5, "every": 3}, lambda n: 0.5 ** np.arange(n)[::-1]),
}
LAST = {"decay": lambda k: jnp.zeros([])}


def loss_fn(params, statistics, batch):
  """The loss is batch times params; the statistics are a running mean and a count."""
  mean = 0.5 * statistics["mean"] + 0.5 * batch
  return jnp.sum(params["w"] * batch), {"mean": mean, "uses": statistics["uses"] + 1}


def weighted(snapshots, weights):
  return np.tensordot(weights, np.asarray(snapshots, np.float64), 1) / np.sum(weights)


def batches(count, seed=0):
  return np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)


def train(tx, data, statistics=STATISTICS):
  """Returns the last state, and the running means and params after each step."""
  step = optax_boost.make_train_step(loss_fn, tx, has_model_state=True)
  state, means, params = step.init({"w": jnp.ones(2)}, statistics), [], []
  for batch in data:
    state, _ = step(state, batch)
    means.append(np.asarray(state.model_state["mean"]))
    params.append(np.asarray(state.params["w"]))
  return state, means, params


def read(state):
  return optax_boost.averaged_model_state(state.opt_state, state.model_state)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_averaged_with_the_weights_of_the_params(mode):
  kwargs, weights = MODES[mode]
  tx = optax_boost.average_params(optax.adam(0.1), **kwargs, model_state=STATISTICS)
  data, every = batches(12), kwargs.get("every", 1)
  state, _, params = train(tx, data)
  mean, means = np.zeros(2), []
  for batch in data:
    mean = 0.5 * mean + 0.5 * batch.astype(np.float64)
    means.append(mean)
  weights = weights(12 // every)
  averaged = read(state)
  tolerance = 16 * EPS
  np.testing.assert_allclose(
    averaged["mean"], weighted(means[every - 1 :: every], weights), tolerance, tolerance
  )
  np.testing.assert_allclose(
    optax_boost.averaged_params(state.opt_state, state.params)["w"],
    weighted(params[every - 1 :: every], weights),
    tolerance,
  )
  # Integers are not averaged.
  assert averaged["uses"] == 12
  assert list(state.opt_state.statistics) == ["mean"]


def test_a_decay_that_is_a_function_starts_from_the_initial_statistics():
  first = {"mean": jnp.array([4.0, -2.0]), "uses": jnp.zeros([], jnp.int32)}
  tx = optax_boost.average_params(optax.sgd(0.1), decay=lambda k: 0.75, model_state=first)
  state, means, _ = train(tx, batches(3), first)
  expected = np.array([4.0, -2.0])
  for mean in means:
    expected = 0.75 * expected + 0.25 * mean
  np.testing.assert_allclose(read(state)["mean"], expected, 8 * EPS)


def test_before_the_first_snapshot_the_statistics_are_the_current_ones():
  tx = optax_boost.average_params(optax.sgd(0.1), start=5, model_state=STATISTICS)
  state, means, _ = train(tx, batches(5))
  np.testing.assert_array_equal(read(state)["mean"], means[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_averages_of_half_precision_statistics_are_float32_and_read_in_their_dtype(dtype):
  statistics = {"mean": jnp.zeros(2, dtype)}
  tx = optax_boost.average_params(optax.sgd(0.1), start=0, model_state=statistics)
  params = jnp.ones(2)
  state = tx.init(params)
  update = jax.jit(tx.update)
  seen = [jnp.array([1 + i / 16, -i], dtype) for i in range(1, 4)]
  for mean in seen:
    _, after = update(params, state, params, model_state={"mean": mean})
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    state = after
  assert state.statistics["mean"].dtype == jnp.float32
  expected = np.mean([np.asarray(x, np.float64) for x in seen], 0)
  np.testing.assert_allclose(state.statistics["mean"], expected, 4 * EPS)
  averaged = jax.jit(optax_boost.averaged_model_state)(state, {"mean": seen[-1]})
  assert averaged["mean"].dtype == dtype
  np.testing.assert_array_equal(averaged["mean"], expected.astype(dtype))


# The second and the fourth of six batches are bad: which steps end with a snapshot.
WINDOWS = {
  "loss scale outside": (
    lambda average: optax_boost.dynamic_loss_scale(average(optax.sgd(0.1)), 1.0),
    {0: 0, 2: 2, 4: 4, 5: 5},
  ),
  "loss scale inside": (
    lambda average: average(optax_boost.dynamic_loss_scale(optax.sgd(0.1), 1.0)),
    {0: 0, 2: 2, 4: 4, 5: 5},
  ),
  "apply_if_finite": (
    lambda average: average(optax.apply_if_finite(optax.sgd(0.1), 9)),
    {0: 0, 2: 2, 4: 4, 5: 5},
  ),
  # Bad micro-batches don't count in their windows.
  "accumulate outside": (
    lambda average: optax_boost.accumulate(average(optax.sgd(0.1)), 2, not_finite="drop"),
    {2: 2, 5: 5},
  ),
  "accumulate inside": (
    lambda average: average(optax_boost.accumulate(optax.sgd(0.1), 2, not_finite="drop")),
    {2: 2, 5: 5},
  ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_skipped_steps_and_dropped_micro_batches_change_no_average(name):
  """A bad batch has gradients that are not finite, and finite statistics that are far too large."""

  def bad_loss(params, statistics, batch):
    loss, statistics = loss_fn(params, statistics, batch["x"])
    return loss * batch["factor"], statistics

  wrap, snapshots = WINDOWS[name]
  tx = wrap(functools.partial(optax_boost.average_params, **LAST, model_state=STATISTICS))
  step = optax_boost.make_train_step(bad_loss, tx, has_model_state=True)
  state = step.init({"w": jnp.ones(2)}, STATISTICS)
  expected = np.zeros(2)
  for t, x in enumerate(batches(6)):
    bad = t in (1, 3)
    batch = {"x": jnp.asarray(1e6 * x if bad else x), "factor": jnp.array(np.nan if bad else 1.0)}
    state, _ = step(state, batch)
    if t in snapshots:
      expected = np.asarray(state.model_state["mean"])
    average = optax.tree.get(state.opt_state, "statistics")["mean"]
    np.testing.assert_array_equal(average, expected)
  assert np.all(np.abs(expected) < 10)


def test_inside_accumulate_a_snapshot_takes_the_statistics_after_the_window():
  average = optax_boost.average_params(optax.sgd(0.1), start=0, model_state=STATISTICS)
  state, means, _ = train(optax_boost.accumulate(average, 3), batches(9))
  np.testing.assert_allclose(read(state)["mean"], np.mean(means[2::3], 0), 8 * EPS, 4 * EPS)


def test_entries_of_statistics_that_are_not_finite_are_ignored():
  tx = optax_boost.average_params(optax.sgd(0.1), start=0, model_state={"mean": jnp.zeros(2)})
  params = jnp.ones(2)
  state = tx.init(params)
  for mean in ([1.0, 1.0], [2.0, np.inf], [3.0, np.nan]):
    _, state = tx.update(params, state, params, model_state={"mean": np.array(mean)})
  np.testing.assert_allclose(state.statistics["mean"], [2.0, 1.0])


def test_statistics_of_frozen_layers_are_averaged_as_they_are_held():
  def loss(params, statistics, x):
    new = {}
    for name in ("a", "b"):
      new[name] = {"mean": 0.5 * statistics[name]["mean"] + 0.5 * jnp.mean(x)}
      x = x * params[name]["scale"]
    return jnp.mean(x), new

  statistics = {name: {"mean": jnp.zeros([])} for name in ("a", "b")}
  inner = optax_boost.freeze_layers(
    optax.sgd(0.1), ("a", "b"), optax_boost.fixed_freezing(2, frozen_groups=1)
  )
  tx = optax_boost.average_params(inner, start=0, model_state=statistics)
  step = optax_boost.make_train_step(loss, tx, has_model_state=True)
  state = step.init({name: {"scale": jnp.ones(3)} for name in ("a", "b")}, statistics)
  means = []
  for _ in range(4):
    state, _ = step(state, jnp.ones(3))
    means.append([float(state.model_state[name]["mean"]) for name in ("a", "b")])
  averaged = read(state)
  averaged_means = [averaged[name]["mean"] for name in ("a", "b")]
  np.testing.assert_allclose(averaged_means, np.mean(means, 0), 8 * EPS)
  assert averaged_means[0] == 0 < averaged_means[1]


def shift(updates, state, params=None, *, model_state=None, **extra):
  """Adds the running mean to the updates."""
  return jax.tree.map(lambda g: g + model_state["mean"], updates), state


def names_the_statistics(updates, state, params=None, *, model_state, **extra):
  return updates, state


def stateless(update):
  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


INNERS = {
  "alone": optax.lbfgs(),
  "in a part": optax.partition({"w": optax.lbfgs()}, {"w": "w"}),
  "in a wrapper": optax_boost.accumulate(optax.lbfgs(), 1),
  "in masters": optax_boost.master_weights(optax.lbfgs()),
  "beside one that names the statistics": optax.chain(
    stateless(names_the_statistics), optax.lbfgs()
  ),
}


def bowl(params, statistics, batch):
  return jnp.sum((params["w"] - batch) ** 2), {"mean": 0.5 * statistics["mean"] + 0.5 * batch}


@pytest.mark.parametrize("name", INNERS)
def test_line_searches_get_the_arguments_that_they_know(name):
  statistics = {"mean": jnp.zeros(2)}
  tx = optax_boost.average_params(INNERS[name], start=0, model_state=statistics)
  step = optax_boost.make_train_step(bowl, tx, has_model_state=True)
  state = step.init({"w": jnp.ones(2)}, statistics)
  for _ in range(6):
    state, _ = step(state, jnp.array([3.0, -1.0]))
  np.testing.assert_allclose(state.params["w"], [3.0, -1.0], 1e-5)
  weights = 1 - 0.5 ** np.arange(1, 7)
  np.testing.assert_allclose(read(state)["mean"], np.mean(weights) * np.array([3, -1]), 8 * EPS)


def test_a_transformation_of_the_users_own_gets_the_statistics_if_it_names_them():
  shifting = stateless(shift)
  for tx in (shifting, optax_boost.average_params(shifting, start=0, model_state=STATISTICS)):
    _, means, params = train(tx, batches(1))
    np.testing.assert_allclose(params[0], 1 + batches(1)[0] + means[0], 8 * EPS)


def test_a_resumed_run_has_the_averages_of_an_uninterrupted_one():
  tx = optax_boost.average_params(optax.adam(0.1), decay=0.9, model_state=STATISTICS)
  data = batches(6)
  whole, _, _ = train(tx, data)
  half, _, _ = train(tx, data[:3])
  saved = pickle.dumps(jax.tree.map(np.asarray, jax.tree.leaves(half)))
  # A new process has the shapes of the statistics only.
  abstract = jax.eval_shape(lambda: STATISTICS)
  tx = optax_boost.average_params(optax.adam(0.1), decay=0.9, model_state=abstract)
  step = optax_boost.make_train_step(loss_fn, tx, has_model_state=True)
  fresh = step.init({"w": jnp.zeros(2)}, STATISTICS)
  state = jax.tree.unflatten(jax.tree.structure(fresh), map(jnp.asarray, pickle.loads(saved)))
  for batch in data[3:]:
    state, _ = step(state, batch)
  chex.assert_trees_all_equal(read(state), read(whole))


def test_a_train_step_with_statistics_compiles_once():
  tx = optax_boost.average_params(optax.sgd(0.1), decay=0.9, model_state=STATISTICS)
  step = optax_boost.make_train_step(loss_fn, tx, has_model_state=True)
  watched = compilations.Watched(step)
  state = step.init({"w": jnp.ones(2)}, STATISTICS)
  for batch in batches(4):
    state, _ = watched(state, batch)
  assert watched.compiled_once()


class Nnx(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.dense = nnx.Linear(3, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.dense(x)))


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4, name="dense")(x)
    return nn.BatchNorm(False, momentum=0.5, name="norm")(x)


def model_loss(model, x):
  return jnp.mean((model(x) - 1) ** 2)


def inputs():
  return np.random.default_rng(1).normal(size=(5, 8, 3)).astype(np.float32)


def running(kernels, biases):
  """The averages of a BatchNorm's running means and variances, each after another batch."""
  mean, var, after = np.zeros(4), np.ones(4), []
  for x, kernel, bias in zip(inputs(), kernels, biases, strict=True):
    y = x.astype(np.float64) @ kernel + bias
    mean, var = (mean + y.mean(0)) / 2, (var + y.var(0)) / 2
    after.append((mean, var))
  return np.mean(after, 0)


NNX_FORMS = {
  "BatchStat": lambda model: nnx.state(model, nnx.BatchStat),
  "pure BatchStat": lambda model: nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
  "split_loss": lambda model: optax_boost.nnx.split_loss(model_loss, model)[2],
}


@pytest.mark.parametrize("form", NNX_FORMS)
def test_the_statistics_of_an_nnx_model_are_averaged(form):
  model = Nnx()
  tx = optax_boost.average_params(optax.sgd(0.3), start=0, model_state=NNX_FORMS[form](model))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(model_loss)
  kernels, biases = [], []
  for x in inputs():
    kernels.append(np.array(model.dense.kernel[...]))
    biases.append(np.array(model.dense.bias[...]))
    step(model, optimizer, x)
  expected = running(kernels, biases)
  averaged = optax_boost.nnx.averaged_model(optimizer, model)
  averaged_statistics = averaged.norm.mean[...], averaged.norm.var[...]
  np.testing.assert_allclose(averaged_statistics, expected, 1e-5, 1e-5)
  # The model has other statistics, but the same random state.
  assert np.any(np.abs(model.norm.mean[...] - averaged_statistics[0]) > 1e-3)
  assert averaged.dropout.rngs.count[...] == model.dropout.rngs.count[...] == 5
  read = optax_boost.averaged_model_state(optimizer.opt_state, nnx.state(model, nnx.BatchStat))
  np.testing.assert_array_equal(read["norm"]["mean"][...], averaged_statistics[0])
  # The train step has donated the arrays of which `tx` was made.
  tx.init(nnx.state(model, nnx.Param))


def test_flaxs_own_update_of_an_nnx_model_passes_the_statistics():
  model = Nnx()
  tx = optax_boost.average_params(
    optax.sgd(0.3), start=0, model_state=nnx.state(model, nnx.BatchStat)
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  means = []
  for x in inputs()[:3]:
    grads = nnx.grad(model_loss)(model, x)
    optimizer.update(model, grads, model_state=nnx.state(model, nnx.BatchStat))
    means.append(np.array(model.norm.mean[...]))
  averaged = optax_boost.nnx.averaged_model(optimizer, model)
  np.testing.assert_allclose(averaged.norm.mean[...], np.mean(means, 0), 8 * EPS, 8 * EPS)


@pytest.mark.parametrize("form", ["collections", "batch_stats"])
def test_the_statistics_of_a_linen_module_are_averaged(form):
  module = Linen()
  variables = module.init(jax.random.key(0), inputs()[0])
  # `init` calls the module in training mode, but does not change the statistics.
  loss, params, model_state = optax_boost.linen.split_loss(model_loss, module, variables)
  passed = model_state if form == "collections" else model_state["batch_stats"]
  tx = optax_boost.average_params(optax.sgd(0.3), start=0, model_state=passed)
  step = optax_boost.make_train_step(loss, tx)
  state, kernels, biases = step.init(params, model_state), [], []
  for x in inputs():
    kernels.append(np.array(state.params["dense"]["kernel"]))
    biases.append(np.array(state.params["dense"]["bias"]))
    state, _ = step(state, x)
  norm = read(state)["batch_stats"]["norm"]
  np.testing.assert_allclose([norm["mean"], norm["var"]], running(kernels, biases), 1e-5, 1e-5)


def test_errors_name_the_statistics_that_are_missing():
  statistics = {"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
  tx = optax_boost.average_params(optax.sgd(0.1), start=0, model_state=statistics)
  params = jnp.ones(2)
  state = tx.init(params)
  with pytest.raises(ValueError, match=r"averages statistics.*got model_state=None.*make_train_st"):
    tx.update(params, state, params)
  mean_alone = {"norm": {"mean": jnp.zeros(2)}}
  with pytest.raises(ValueError, match=r"'norm/var' must have the shape \(2,\), got none among"):
    tx.update(params, state, params, model_state=mean_alone)
  with pytest.raises(ValueError, match=r"`averaged_model_state` needs .*'norm/var'"):
    optax_boost.averaged_model_state(state, mean_alone)
  longer = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(2)}}
  with pytest.raises(ValueError, match=r"'norm/mean' must have the shape \(2,\), got \(3,\)"):
    tx.update(params, state, params, model_state=longer)
  plain = optax_boost.average_params(optax.sgd(0.1), start=0).init(params)
  for other in (plain, (state, state)):
    with pytest.raises(
      ValueError, match=r"state of an optimizer with `optax_boost.average_params\("
    ):
      optax_boost.averaged_model_state(other, statistics)
  several = jax.vmap(tx.init)(jnp.ones((3, 2)))
  with pytest.raises(ValueError, match=r"state of one run.*jax\.vmap"):
    optax_boost.averaged_model_state(several, statistics)


def test_a_model_state_without_statistics_has_no_effect():
  with pytest.warns(optax_boost.NoEffectWarning, match="no floating-point leaf"):
    tx = optax_boost.average_params(optax.sgd(0.1), start=0, model_state={"uses": jnp.int32(0)})
  params = jnp.ones(2)
  tx.update(params, tx.init(params), params)

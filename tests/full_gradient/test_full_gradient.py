"""The mean gradient over batches, streamed or scanned."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
import optax_boost.nnx
from tests.svrg.test_svrg import (
  DATA,
  GRADIENT,
  KEY,
  MXNET_GRADIENT,
  START,
  X,
  assert_close,
  batch_at,
  batches,
  everything,
  gradient_terms,
  loss_fn,
  masked_loss,
  trace_of,
)


@pytest.mark.parametrize("name", ["sgd", "momentum", "wd"])
def test_the_full_gradient_is_the_true_mean_although_mxnet_adds_the_previous_one(name):
  trace = trace_of(name)
  count = trace.hyper["n"] // trace.size
  for k in range(1, len(trace.arrays["refresh_epoch"])):
    anchor = trace.tree("anchor_", k)
    ours = optax_boost.full_gradient(MXNET_GRADIENT, anchor, trace.real_batches())
    recorded = trace.tree("full_grad_", k, 1 / trace.size)
    previous = trace.tree("full_grad_", k - 1, 1 / trace.size)
    terms = gradient_terms(trace, anchor, ...)
    clean = {leaf: trace.arrays[f"full_grad_{leaf}_clean"][k] / trace.size for leaf in terms}
    assert_close(ours, clean, terms)
    with_last = {leaf: ours[leaf] + previous[leaf] / count for leaf in terms}
    more_terms = {leaf: terms[leaf] + np.abs(previous[leaf]) / count for leaf in terms}
    assert_close(with_last, recorded, more_terms)


@pytest.mark.parametrize("padded", [True, False])
def test_a_last_batch_that_is_padded_or_smaller_counts_each_example_once(padded):
  trace = trace_of("partial")
  anchor = trace.tree("anchor_", 1)
  x, y = trace.arrays["X"].astype(np.float64), trace.arrays["Y"].astype(np.float64)
  error = x @ np.asarray(anchor["weight"], np.float64).T + np.asarray(anchor["bias"]) - y
  expected = {"weight": (error.T @ x) / len(x), "bias": error.mean(0)}

  def loss(params, batch):
    errors = (batch["x"] @ params["weight"].T + params["bias"] - batch["y"])[:, 0] ** 2
    return 0.5 * jnp.sum(batch["mask"] * errors) / jnp.sum(batch["mask"])

  def padded_batches():
    for t in range(8):
      mask = np.arange(trace.size) < trace.size - trace.arrays["step_pad"][t]
      yield trace.batch(t) | {"mask": mask.astype(np.float32)}

  if padded:
    ours = optax_boost.full_gradient(
      jax.grad(loss), anchor, padded_batches(), weight_fn=lambda batch: batch["mask"].sum()
    )
  else:
    ours = optax_boost.full_gradient(MXNET_GRADIENT, anchor, trace.real_batches())
  assert_close(ours, expected, gradient_terms(trace, anchor, ...))
  # The reference counts the padding as examples.
  theirs = trace.arrays["full_grad_weight_clean"][1] / trace.size
  assert np.abs(theirs - expected["weight"]).max() > 0.01 * np.abs(expected["weight"]).max()


class Foreign:
  """An array of another library, such as PyTorch."""

  def __init__(self, array):
    self.array = array

  def __array__(self, dtype=None, copy=None):
    return np.asarray(self.array, dtype)


@pytest.mark.parametrize(
  "source",
  [
    lambda: list(batches()),
    batches,
    lambda: (jax.tree.map(jnp.asarray, batch) for batch in batches()),
    lambda: (jax.tree.map(Foreign, batch) for batch in batches()),
    lambda: [everything()],
  ],
  ids=["list", "generator", "jax", "foreign arrays", "one batch"],
)
def test_any_iterable_gives_the_true_mean(source):
  found = optax_boost.full_gradient(GRADIENT, START, source())
  expected = GRADIENT(START, everything())
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def padded():
  """The last batch is two examples and three rows of rubbish; another one is all rubbish."""
  stacked = {k: np.concatenate([v, np.full_like(v[:1], np.nan)]) for k, v in DATA.items()}
  stacked["mask"] = np.ones((7, 5), np.float32)
  stacked["mask"][5, 2:] = 0
  stacked["mask"][6] = 0
  stacked["x"][5, 2:] = 7.0
  return stacked


def test_padding_does_not_count_as_examples_streamed_or_scanned():
  stacked = padded()
  weigh = {"weight_fn": lambda batch: batch["mask"].sum()}
  gradient = jax.grad(masked_loss)
  stream = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(7)]
  streamed = optax_boost.full_gradient(gradient, START, stream, **weigh)
  scanned = jax.jit(lambda p, b: optax_boost.full_gradient(gradient, p, b, **weigh, stacked=True))(
    START, stacked
  )
  real = jax.tree.map(lambda x: x[:27], everything())
  for found in (streamed, scanned):
    chex.assert_trees_all_close(found, GRADIENT(START, real), rtol=1e-5, atol=1e-6)


def test_a_scan_is_one_loop_and_equals_the_stream():
  def scan(params, data):
    return optax_boost.full_gradient(jax.grad(loss_fn), params, data, stacked=True)

  streamed = optax_boost.full_gradient(GRADIENT, START, batches())
  chex.assert_trees_all_close(jax.jit(scan)(START, DATA), streamed, rtol=1e-5, atol=1e-6)
  names = [e.primitive.name for e in jax.make_jaxpr(scan)(START, DATA).jaxpr.eqns]
  assert names.count("scan") == 1
  assert "dot_general" not in names


def test_streamed_and_scanned_batches_draw_the_same_masks():
  def noisy(params, batch, rng):
    return loss_fn(params, batch | {"x": batch["x"] * jax.random.bernoulli(rng, 0.5, (5, 4))})

  gradient = jax.grad(noisy)
  streamed = optax_boost.full_gradient(gradient, START, batches(), rng=KEY)
  scanned = optax_boost.full_gradient(gradient, START, DATA, rng=KEY, stacked=True)
  chex.assert_trees_all_close(streamed, scanned, rtol=1e-5, atol=1e-6)
  other = optax_boost.full_gradient(gradient, START, batches(), rng=jax.random.key(1))
  assert not np.allclose(other["w"], streamed["w"])


def test_the_progress_bar_counts_batches(capfd):
  optax_boost.full_gradient(GRADIENT, START, list(batches()), progress=True)
  assert "6/6" in capfd.readouterr().err
  optax_boost.full_gradient(GRADIENT, START, list(batches()))
  assert not capfd.readouterr().err


def used_up():
  iterator = batches()
  list(iterator)
  return iterator


@pytest.mark.parametrize(
  ("source", "gradient", "error", "message"),
  [
    (used_up, GRADIENT, ValueError, r"at least one batch; got none. An iterator that was used up"),
    (
      lambda: [batch_at(0), batch_at(1) | {"more": X[0]}],
      GRADIENT,
      ValueError,
      r"one tree structure; batch 1 has PyTreeDef.*more.* the first had",
    ),
    (
      batches,
      lambda p, b: (loss_fn(p, b), p),
      ValueError,
      r"`grad_fn` must give gradients of the params' tree structure and shapes; got PyTreeDef",
    ),
    (
      lambda: [batch_at(0) | {"y": np.ones(3)}],
      GRADIENT,
      ValueError,
      r"can't tell the number of examples from arrays of shapes .* Pass `weight_fn`",
    ),
    (lambda: batch_at(0), GRADIENT, TypeError, r"(?s)got \{'x': .* A single batch is"),
    (
      lambda: [batch_at(0), batch_at(1) | {"name": np.array(["cat"])}],
      GRADIENT,
      TypeError,
      r"the leaf 'name' of batch 1 is array\(\['cat'\].* of dtype <U3. Leave it out",
    ),
    (batches, lambda p, b: jax.tree.map(str, p), TypeError, r"`grad_fn` needs arrays as leaves"),
  ],
)
def test_full_gradient_refuses_gradients_that_it_cannot_average(source, gradient, error, message):
  with pytest.raises(error, match=message):
    optax_boost.full_gradient(gradient, START, source())


@pytest.mark.parametrize("weight", [float("nan"), -1.0, jnp.float32("inf"), "5", jnp.ones([]) * 1j])
def test_a_weight_that_is_not_a_finite_number_is_refused_or_left_out_in_a_scan(weight):
  def full_gradient(data, **kwargs):
    weigh = {"weight_fn": lambda batch: weight}
    return optax_boost.full_gradient(GRADIENT, START, data, **weigh, **kwargs)

  with pytest.raises(
    (TypeError, ValueError), match=r"`weight_fn` must return a .*number.*; it retu"
  ):
    full_gradient(batches())
  if isinstance(weight, str) or jnp.iscomplexobj(weight):
    with pytest.raises(TypeError, match="`weight_fn` must return a number"):
      full_gradient(DATA, stacked=True)
    return
  full = full_gradient(DATA, stacked=True)
  state = optax_boost.refresh_svrg(optax_boost.svrg(None).init(START), START, full)
  assert (int(state.refresh_count), int(state.notfinite_count)) == (0, 1)


def test_a_stream_is_refused_under_jit_and_without_weight():
  with pytest.raises(ValueError, match=r"can't run inside `jit`. Call it between two steps"):
    jax.jit(lambda p: optax_boost.full_gradient(GRADIENT, p, batches()))(START)
  with pytest.raises(ValueError, match=r"the weights of all batches sum to 0.0"):
    optax_boost.full_gradient(GRADIENT, START, batches(), weight_fn=lambda batch: 0)


@pytest.mark.parametrize(
  "stacked", [{}, {"x": X[:0]}, {"x": X, "y": X[:2]}, {"x": 1.0}], ids=["{}", "0", "2", "scalar"]
)
def test_scan_refuses_arrays_that_are_not_stacked_batches(stacked):
  with pytest.raises(ValueError, match=r"at least one batch, and arrays whose first axis .* got"):
    optax_boost.full_gradient(GRADIENT, START, stacked, stacked=True)


def test_an_array_is_not_an_iterable_of_batches():
  array = jnp.ones((4, 2))
  for passed in (array, np.asarray(array)):
    with pytest.raises(TypeError, match=r"of shape \(4, 2\), whose rows.*`list\(stack\)`"):
      optax_boost.full_gradient(lambda p, b: p, jnp.ones(2), passed)
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="whose rows would be the batches"):
      optax_boost.nnx.estimate_batch_stats(model, passed)
    with pytest.raises(ValueError, match=r"needs batches of several examples; .* \[''\] are 0"):
      optax_boost.nnx.estimate_batch_stats(model, list(passed))

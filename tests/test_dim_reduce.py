"""DimReduce against the recorded runs of MindSpore, and against NumPy."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

GOLDEN = pathlib.Path(__file__).parent / "golden"
TRACES = ("linear", "linear_hard", "mlp", "mlp_noisy", "rawproj")


def subspace_of(rows, like):
  """A subspace whose basis is a matrix of concatenated rows."""
  leaves, structure = jax.tree.flatten(like)
  parts = np.split(rows, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1)
  k = len(rows)
  basis = [part.reshape(k, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
  ones = np.ones(k, np.float32)
  return optax_boost.Subspace(like, jax.tree.unflatten(structure, basis), ones, ones / k)


# The recorded runs.


class Trace:
  """A recorded run of MindSpore; its params are a list, in the columns' order."""

  def __init__(self, name):
    with np.load(GOLDEN / f"dimreduce_{name}.npz") as file:
      self.arrays = {key: file[key] for key in file.files}
    self.hyper = json.loads(str(self.arrays["meta_json"]))["hyper"]
    self.names = {"linear": ["w", "b"], "mlp": ["w1", "b1", "w2", "b2"]}[self.hyper["model"]]
    self.init = [jnp.asarray(self.arrays[f"init_{name}"]) for name in self.names]
    self.steps = self.hyper["steps"]
    h = self.hyper
    subspace = subspace_of(self.arrays["P"], self.init)
    self.tx = optax_boost.dim_reduce(subspace, h["rho"], h["sigma"], h["gamma"], h["alpha"])

  def __getitem__(self, key):
    return self.arrays[key]

  def tree(self, prefix, step):
    return [jnp.asarray(self.arrays[f"{prefix}_{name}"][step]) for name in self.names]

  def loss(self, params, x, y):
    if len(params) == 2:
      return jnp.mean((x @ params[0] + params[1] - y) ** 2)
    logits = jnp.tanh(x @ params[0] + params[1]) @ params[2] + params[3]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

  @functools.cached_property
  def step(self):
    @jax.jit
    def step(params, state, x, y):
      value_fn = functools.partial(self.loss, x=x, y=y)
      value, grads = jax.value_and_grad(value_fn)(params)
      updates, state = self.tx.update(grads, state, params, value=value, value_fn=value_fn)
      return optax.apply_updates(params, updates), state

    return step

  def state_after(self, step):
    """Our state after a recorded step; its residual momentum is all in `momentum`."""
    state = self.tx.init(self.init)
    if step < 0:
      return state
    return state._replace(
      momentum=self.tree("grm", step),
      inverse_hessian=jnp.asarray(self["bk"][step])[None],
      projected_gradient=jnp.asarray(self["gk_last"][step])[None],
      last_step=jnp.asarray(self["sk"][step])[None],
    )

  def params_before(self, step):
    return self.tree("weight", step - 1) if step else self.init


@functools.cache
def trace_of(name):
  return Trace(name)


def residual(state):
  """The residual momentum, out of its two parts."""
  (q,) = state.projected_momentum
  return jax.tree.map(lambda m, rows: m - jnp.tensordot(q, rows, 1), state.momentum, state.basis)


def assert_close(found, expected, rtol):
  """Relative to the largest entry of all, as the traces state their own errors."""
  a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (found, expected))
  np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max() + 1e-12)


def assert_same_decisions(trace, t, before, state):
  assert float(state.accepted_rho) == trace["rho"][t]
  assert int(state.line_search_steps) == np.isfinite(trace["trial_loss"][t]).sum()
  assert int(state.rejected_count - before.rejected_count) == (not trace["found"][t])
  if t:
    # Before any accepted step there is nothing to update with.
    squared = float(jnp.sum(before.last_step**2))
    expected = trace["ys"][t] / squared if squared else 0.0
    np.testing.assert_allclose(state.curvature, expected, rtol=1e-3, atol=1e-5)
    updated = not np.allclose(state.inverse_hessian, before.inverse_hessian, rtol=0, atol=0)
    assert updated == (trace["bfgs_updated"][t] and trace["found"][t])


@pytest.mark.parametrize("name", TRACES)
def test_every_step_agrees_with_mindspore(name):
  trace = trace_of(name)
  for t in range(trace.steps):
    before = trace.state_after(t - 1)
    params, state = trace.step(trace.params_before(t), before, trace["x"][t], trace["y"][t])
    assert_same_decisions(trace, t, before, state)
    # MindSpore's tanh is less exact than the rest.
    rtol = 3e-6 if trace.hyper["model"] == "mlp" else 1e-6
    assert_close(params, trace.tree("weight", t), rtol)
    assert_close(residual(state), trace.tree("grm", t), 3e-6)
    assert_close(state.inverse_hessian[0], trace["bk"][t], 1e-4)
    assert_close(state.projected_gradient[0], trace["gk_last"][t], 5e-6)
    assert_close(state.last_step[0], trace["sk"][t], 1e-4)


@pytest.mark.parametrize("name", TRACES)
def test_a_whole_run_takes_the_branches_of_mindspore(name):
  trace = trace_of(name)
  params, state = trace.init, trace.tx.init(trace.init)
  for t in range(trace.steps):
    before = state
    params, state = trace.step(params, before, trace["x"][t], trace["y"][t])
    assert_same_decisions(trace, t, before, state)
    assert_close(params, trace.tree("weight", t), 1e-5)
    assert_close(residual(state), trace.tree("grm", t), 3e-5)
    assert_close(state.inverse_hessian[0], trace["bk"][t], 1e-4)
  assert int(state.rejected_count) == int(np.sum(~trace["found"]))
  assert int(state.notfinite_count) == 0

"""The normalized head against the recorded layer of MindSpore, in NNX and in Linen."""

import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests import closeness

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "fn_head.npz")
CASES = ("bias", "nobias", "smallnorm")
# Summed in random orders, float32 errs by up to 2.0 ulps of the terms. The multiplier's gradient
# errs by up to 0.5: its terms, whose own errors average out, cancel to between 1/25 and 1/76.
ULPS = {"out": 3, "dx": 3, "weight": 3, "bias": 3, "multiplier": 1}


def recorded(case):
  arrays = {k.removeprefix(f"{case}_"): GOLDEN[k] for k in GOLDEN.files if k.startswith(case)}
  params = {"kernel": arrays["weight"].T, "multiplier": arrays["multiplier"]}
  if "bias" in arrays:
    params["bias"] = arrays["bias"]
  return arrays, jax.tree.map(jnp.asarray, params)


def in_nnx(params, x):
  n, m = params["kernel"].shape
  head = ob_nnx.NormalizedDense(n, m, use_bias="bias" in params, rngs=nnx.Rngs(0))
  nnx.update(head, params)
  return head(x)


def in_linen(params, x):
  head = ob_linen.NormalizedDense(params["kernel"].shape[1], use_bias="bias" in params)
  return head.apply({"params": params}, x)


APPLY = {"nnx": in_nnx, "linen": in_linen}


def magnitudes(arrays):
  """The summed magnitudes of the terms of each result: its formula, every term made positive."""

  def normalized(v):
    norms = np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-2)
    return np.abs(v) / norms, norms

  def through_the_norm(gradient, unit, norms):
    return (gradient + unit * np.sum(unit * gradient, axis=1, keepdims=True)) / norms

  x, x_norms = normalized(np.float64(arrays["x"]))
  w, w_norms = normalized(np.float64(arrays["weight"]))
  dout, multiplier = np.abs(np.float64(arrays["dout"])), np.abs(arrays["multiplier"])
  inner = x @ w.T + np.abs(arrays.get("bias", 0))
  return {
    "out": multiplier * inner,
    "dx": through_the_norm(multiplier * dout @ w, x, x_norms),
    "weight": through_the_norm(multiplier * dout.T @ x, w, w_norms),
    "multiplier": np.sum(dout * inner),
    "bias": multiplier * dout.sum(axis=0),
  }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("flax", APPLY)
def test_outputs_and_gradients_equal_mindspores_recorded_ones(case, flax):
  arrays, params = recorded(case)
  x = jnp.asarray(arrays["x"])
  out, pull = jax.vjp(APPLY[flax], params, x)
  grads, dx = pull(jnp.asarray(arrays["dout"]))
  terms = magnitudes(arrays)

  def assert_close(found, expected, name, rows=...):
    closeness.assert_within_ulps(found[rows], expected[rows], terms[name][rows], ULPS[name])

  assert_close(out, arrays["out"], "out")
  # Where norms are clamped the reference returns another gradient than the derivative of its
  # forward pass; the recorded `true` ones are the derivative in float64.
  assert_close(dx, arrays["dx_true"], "dx")
  assert_close(grads["kernel"].T, arrays["d_weight_true"], "weight")
  assert_close(grads["multiplier"], arrays["d_multiplier"], "multiplier")
  if "bias" in params:
    assert_close(grads["bias"], arrays["d_bias"], "bias")
  clamped = np.linalg.norm(arrays["x"], axis=1) < 1e-2
  assert clamped.any() == (case == "smallnorm")
  assert_close(dx, arrays["dx"], "dx", ~clamped)
  if case == "smallnorm":
    assert np.abs(dx - arrays["dx"]).max() > 10


@pytest.mark.parametrize("flax", APPLY)
def test_a_zero_row_has_a_finite_gradient(flax):
  _, params = recorded("bias")
  dx = jax.grad(lambda x: jnp.sum(APPLY[flax](params, x) ** 2))(jnp.zeros((2, 6)))
  assert np.all(np.isfinite(dx))


@pytest.mark.parametrize("flax", APPLY)
def test_half_precision_inputs_do_not_overflow_their_norm(flax):
  arrays, params = recorded("bias")
  half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
  big = (1000 * arrays["x"]).astype(jnp.float16)
  out = APPLY[flax](half, jnp.asarray(big))
  assert out.dtype == jnp.float16
  np.testing.assert_allclose(out, arrays["out"], atol=5e-3)


def test_any_leading_axes_are_rows():
  arrays, params = recorded("bias")
  x = jnp.stack([arrays["x"]] * 2)[None]
  for apply in APPLY.values():
    np.testing.assert_allclose(apply(params, x)[0, 1], arrays["out"], rtol=1e-5)


@pytest.mark.parametrize(
  ("setting", "error", "message"),
  [
    ({"multiplier_init": 16.0}, TypeError, r"`multiplier_init` must be callable.*; got 16.0"),
    ({"eps": 0}, ValueError, r"`eps` must be finite and > 0; got 0"),
    ({"eps": "1e-4"}, TypeError, r"`eps` must be a real number.*; got '1e-4'"),
  ],
)
def test_bad_settings_are_refused_by_their_names(setting, error, message):
  with pytest.raises(error, match=message):
    ob_linen.NormalizedDense(3, **setting)
  with pytest.raises(error, match=message):
    ob_nnx.NormalizedDense(2, 3, **setting, rngs=nnx.Rngs(0))

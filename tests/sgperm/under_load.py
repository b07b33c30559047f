"""Runs the host kernel on all devices at once, beside other work and with donated buffers.

Run by ``test_sgperm`` in a process of its own, which it can end if this one hangs.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np

import optax_boost


def main() -> None:
  tx = optax_boost.sgperm(lamda=1.0, lamda_max=1.0, backend="host")

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state):
    # Work around the callback that wants the threads which wait for it.
    grads = jax.tree.map(lambda p: jnp.sin(p @ (p.T @ p)), params)
    return optax_boost.apply_gradients(tx, grads, state, params)

  start = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)

  def train(device):
    params = {"kernel": jax.device_put(start, device)}
    state = tx.init(params)
    for _ in range(3):
      params, state = step(params, state)
    return np.asarray(params["kernel"])

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(train, jax.devices()))
  for one in found:
    np.testing.assert_array_equal(one, found[0])
  assert np.any(found[0] != start)
  np.testing.assert_array_equal(np.sort(found[0], 0), np.sort(start, 0))


if __name__ == "__main__":
  main()

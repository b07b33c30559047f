"""`make_train_step` against steps written by hand: ``python -m benchmarks.train_step``."""

import argparse
from collections.abc import Callable
import pathlib
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
import optax_boost.nnx

_BY_HAND, _NNX = "by hand", "nnx.jit, by hand"
_LAYERS, _WIDTH, _CALLS = 50, 16, 10
_ABOUT = f"""\
One train step (forward, backward, momentum SGD, state donated) of {_LAYERS} dense layers of
{_WIDTH} x {_WIDTH}, 100 leaves, so small that calling the step is most of the time. `by hand` is a
jitted function of params, optimizer state and batch that returns the loss too, the least that a
loop can do. The plain form's only metric is the loss, as of `optax.sgd`. Milliseconds are of
processor time, of all threads; a measurement makes {_CALLS} steps."""


class Stack(nnx.Module):
  """Dense layers."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.layers = nnx.List([nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in range(_LAYERS)])

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies them."""
    for layer in self.layers:
      x = jnp.tanh(layer(x))
    return x


def loss_fn(model: Stack, x: jax.Array) -> jax.Array:
  """What is minimized."""
  return jnp.mean((model(x) - 1.0) ** 2)


def contender(name: str, step: Callable[[], Any]) -> _harness.Contender:
  """Steps, compiled."""

  def run() -> float:
    start = time.process_time()
    for _ in range(_CALLS):
      jax.block_until_ready(step())
    return (time.process_time() - start) / _CALLS

  run()
  run()
  return _harness.Contender(name, run)


def plain(x: jax.Array) -> list[_harness.Contender]:
  """Steps on a tree of params."""
  graph, params = nnx.split(Stack(rngs=nnx.Rngs(0)))
  params, tx = nnx.to_pure_dict(params), optax.sgd(0.1, 0.9)

  def loss(params: Any, x: jax.Array) -> jax.Array:
    model = nnx.merge(graph, nnx.State(params))
    return loss_fn(model, x)

  def by_hand(params: Any, opt_state: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  jitted = jax.jit(by_hand, donate_argnums=(0, 1))
  copied = jax.tree.map(jnp.array, params)
  carried = [copied, tx.init(copied)]

  def hand() -> Any:
    carried[0], carried[1], value = jitted(*carried, x)
    return carried, value

  ours = optax_boost.make_train_step(loss, tx)
  states = [ours.init(params)]

  def step() -> Any:
    states[0], metrics = ours(states[0], x)
    return states, metrics

  return [contender(_BY_HAND, hand), contender("optax_boost.make_train_step", step)]


def flax(x: jax.Array) -> list[_harness.Contender]:
  """Steps on NNX models."""

  @nnx.jit
  def by_hand(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return value

  def in_place(step: Callable[..., Any]) -> Callable[[], Any]:
    model = Stack(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
    return lambda: step(model, optimizer, x)

  loss, *arrays = optax_boost.nnx.split_loss(loss_fn, Stack(rngs=nnx.Rngs(0)))
  functional = optax_boost.make_train_step(loss, optax.sgd(0.1, 0.9))
  states = [functional.init(*arrays)]

  def step() -> Any:
    states[0], metrics = functional(states[0], x)
    return metrics

  return [
    contender(_NNX, in_place(by_hand)),
    contender("nnx.make_train_step", in_place(optax_boost.nnx.make_train_step(loss_fn))),
    contender("make_train_step of nnx.split_loss", step),
  ]


def main() -> None:
  """Measures both and writes the tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=100, help="to collect, quiet if possible")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  x = jax.random.normal(jax.random.key(0), (8, _WIDTH))
  comparisons = [
    _harness.compare(plain(x), [_BY_HAND], options.rounds, "Plain JAX", 1),
    _harness.compare(flax(x), [_NNX], options.rounds, "Flax NNX", 1),
  ]
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  _harness.write("train_step", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()

"""The Python of one call of an NNX train step: ``python -m benchmarks.nnx_call``."""

import argparse
import pathlib
from typing import Any

from flax import nnx
import jax.numpy as jnp

from benchmarks import _harness, auto_boost, auto_boost_profile as profile
import optax_boost.nnx

_IMAGE = (1, 8, 8, 1)
_BY_HAND = "`nnx.jit` by hand"
_ABOUT = """\
Milliseconds of processor time per call of a train step of a ResNet-11 on one image of 8 x 8, less
those of the same compiled step on pure arrays: the least of several measurements in turns, 50
calls each. `after a change of structure` switches the model between training and evaluation mode
before each call. `by hand` is Flax's own train step, `nnx.value_and_grad` and `optimizer.update`;
`nnx.cached_partial` takes it apart once, so model and optimizer must keep their structure."""


def by_hand(model: Any, optimizer: nnx.Optimizer, batch: Any) -> Any:
  """Flax's own train step."""
  loss, grads = nnx.value_and_grad(auto_boost.loss_fn)(model, batch)
  optimizer.update(model, grads)
  return loss


def measure(rounds: int) -> dict[str, float]:
  """Milliseconds by train step."""
  batch = {"x": jnp.ones(_IMAGE), "y": jnp.zeros(1, int)}

  def pair() -> tuple[Any, nnx.Optimizer]:
    model = auto_boost.ResNet(_IMAGE[-1], 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, profile._sgd(), wrt=nnx.Param)

  step, changing = (optax_boost.nnx.make_train_step(auto_boost.loss_fn) for _ in range(2))
  jitted = nnx.jit(by_hand)
  cached = nnx.cached_partial(nnx.jit(by_hand), *pair())
  pairs = {name: pair() for name in ("same", "changing", "jitted")}

  def change() -> Any:
    model, optimizer = pairs["changing"]
    (model.eval if change.training else model.train)()
    change.training = not change.training
    return changing(model, optimizer, batch)

  change.training = True
  change()  # each mode is compiled before the first measurement
  works = {
    "compiled": profile._pure_step(pair()[0], batch, profile._sgd()),
    "`optax_boost.nnx.make_train_step`": lambda: step(*pairs["same"], batch),
    "the same, after a change of structure": change,
    _BY_HAND: lambda: jitted(*pairs["jitted"], batch),
    "`nnx.cached_partial` of it": lambda: cached(batch),
  }
  found = profile._least(works, 50, rounds)
  compiled = found.pop("compiled")
  return {name: value - compiled for name, value in found.items()}


def main() -> None:
  """Measures and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=30, help="measurements of each train step")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  found = measure(options.rounds)
  table = [f"| | ms | x {_BY_HAND} |", "|---|---|---|"]
  table += [f"| {name} | {ms:.2f} | {ms / found[_BY_HAND]:.2f} |" for name, ms in found.items()]
  _harness.write_lines("nnx_call", _ABOUT, table, ["jax", "jaxlib", "flax"], options.out)
  print("\n".join(table))


if __name__ == "__main__":
  main()

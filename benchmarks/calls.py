"""How many of the package's functions one NNX step calls: ``python -m benchmarks.calls``.

For ``adamw``, ``lars``, and ``dynamic_loss_scale(accumulate(freeze_layers(adamw)))`` with
``centralize``, on a model of a few layers: the first call, a call of the compiled step, and, where
layers freeze, a call at another depth of frozen layers. With a number, ``python -m benchmarks.calls
20``, also the functions that are called most often.
"""

import collections
from collections.abc import Callable
import itertools
import pathlib
import sys
from typing import Any, NamedTuple

from flax import nnx
import jax.numpy as jnp
import optax

import optax_boost.nnx

_PACKAGE = f"{pathlib.Path(optax_boost.__file__).parent}/"


class Calls(NamedTuple):
  """What one call of a step calls.

  Attributes:
    functions: how often each function of the package was called.
    jumps: how often a function was followed by one of another file.
  """

  functions: collections.Counter[str]
  jumps: int


def count(work: Callable[[], Any]) -> Calls:
  """Counts the calls of the package's functions in some work."""
  functions: collections.Counter[str] = collections.Counter()
  files: list[str] = []

  def profile(frame: Any, event: str, _: Any) -> None:
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(_PACKAGE):
      return
    path = code.co_filename.removeprefix(_PACKAGE)
    functions[f"{path}:{code.co_firstlineno} {code.co_qualname}"] += 1
    files.append(path)

  sys.setprofile(profile)
  try:
    work()
  finally:
    sys.setprofile(None)
  jumps = sum(before != after for before, after in itertools.pairwise(files))
  return Calls(functions, jumps)


def optimizers(layers: int) -> dict[str, optax.GradientTransformation]:
  """The optimizers whose steps are counted, for a model with this number of layers."""
  schedule = optax_boost.FreezeSchedule([0, 1], [1, 0])
  groups = [f"layers/{i}/" for i in range(layers)]
  centralized = optax.chain(optax_boost.centralize(), optax.adamw(1e-3))
  frozen = optax_boost.freeze_layers(centralized, groups, schedule)
  return {
    "adamw": optax.adamw(1e-3),
    "lars": optax_boost.lars(1e-3),
    "wrappers": optax_boost.dynamic_loss_scale(optax_boost.accumulate(frozen, 2)),
  }


_STEPS = ("first call", "warm call", "third call")


def step_calls(
  tx: optax.GradientTransformation, layers: int = 2, steps: tuple[str, ...] = _STEPS
) -> dict[str, Calls]:
  """The calls of a first step, of a warm one, and of one at another depth of frozen layers."""
  model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(layers)))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  batch = jnp.ones((2, 3))
  return {name: count(lambda: step(model, optimizer, batch)) for name in steps}


def main() -> None:
  """Prints the figures."""
  shown = int(*sys.argv[1:] or [0])
  for optimizer, tx in optimizers(2).items():
    for name, calls in step_calls(tx).items():
      total = calls.functions.total()
      print(f"{optimizer}, {name}: {total:,} calls, {calls.jumps:,} jumps from file to file")
      for function, times in calls.functions.most_common(shown):
        print(f"  {times:6,}  {function}")


if __name__ == "__main__":
  main()

"""How many of the package's functions one NNX step calls: ``python -m benchmarks.calls``.

The step of ``dynamic_loss_scale(accumulate(freeze_layers(adamw)))`` on a model of a few layers: its
first call, a call at another depth of frozen layers, and a call of a compiled step.
"""

import collections
from collections.abc import Callable
import itertools
import pathlib
import sys
from typing import Any
from typing import NamedTuple

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


def step_calls(layers: int = 2) -> dict[str, Calls]:
  """The calls of three kinds of steps."""
  model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(layers)))
  schedule = optax_boost.FreezeSchedule(layers, lambda step, key: jnp.where(step == 0, 1, 0))
  groups = [f"layers/{i}/" for i in range(layers)]
  frozen = optax_boost.freeze_layers(optax.adamw(1e-3), groups, schedule)
  tx = optax_boost.dynamic_loss_scale(optax_boost.accumulate(frozen, 2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  batch = jnp.ones((2, 3))
  names = ("first call", "warm call", "new depth")
  return {name: count(lambda: step(model, optimizer, batch)) for name in names}


def main() -> None:
  """Prints the figures."""
  for name, calls in step_calls().items():
    print(f"{name}: {calls.functions.total():,} calls, {calls.jumps:,} jumps from file to file")
    for function, times in calls.functions.most_common(int(*sys.argv[1:] or [0])):
      print(f"  {times:6,}  {function}")


if __name__ == "__main__":
  main()

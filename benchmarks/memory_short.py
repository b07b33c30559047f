"""Ways to train in less memory, in one table: ``python -m benchmarks.memory_short``.

``cpu``, ``h100`` and ``v5e-8`` as arguments renew the columns of these alone; the others are kept
in ``out/``. The chips' columns need the packages of ``make devices``.
"""

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any
import warnings

# Read when JAX starts: no chip is asked for.
os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # beside another process

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from benchmarks import _harness, _process, models
from benchmarks.devices import chips, programs
import optax_boost

_SMALL = models.GPT2(layers=12, width=256, heads=4, vocabulary=256, length=128, dtype=jnp.float32)
# A TPU v5e would keep the temporaries of the small model in its fast memory, which holds 128 MB.
_LARGE = dataclasses.replace(_SMALL, layers=24, width=512, heads=8)
_BATCH, _WINDOW, _DEVICES = 8, 4, 8
_CPU, _SEVERAL = "cpu", "eight CPUs"
_CHIPS = {"h100": "H100", "v5e-8": "v5e"}
_PLAIN = "optax by hand"
_ABOUT = f"""\
One optimizer step (forward, backward, AdamW unless a row names SGD; params and state donated) of a
GPT with {_SMALL.layers} blocks of width {_SMALL.width} that the loss scans over, on {_BATCH}
sequences of {_SMALL.length} tokens; each block is computed again in the backward
pass unless a row says "no remat". Params are in float32, 38 MB, or in bfloat16. `{_PLAIN}` is a
jitted function of `jax.value_and_grad`, `update` and `optax.apply_updates`; other rows are steps of
`optax_boost.make_train_step`, unless they name optax. A window takes the {_BATCH} sequences in
{_WINDOW} micro-batches, and its time is of all of them.

Memory is XLA's account of the compiled program, in MB of 1e6 bytes. Arguments: params, optimizer
state and batch. Peak: the most that is in use at once, arguments included; for the CPU, the sum of
arguments and temporaries. CPUs have no arithmetic in bfloat16, so XLA converts to float32: in these
columns, compare rows in bfloat16 with one another. The columns of an H100 and a TPU v5e are of
{_LARGE.layers} blocks of width {_LARGE.width}, 304 MB of params in float32, compiled for one such
chip that was not there, and not run. The last rows are of {_DEVICES} devices with a sequence each:
virtual CPU devices, which share the cores, so they have no time, and a slice of {_DEVICES} v5e; the
memory is one device's.

Milliseconds are of processor time, of all threads; ratios are medians of the ratios within a
round."""


class HandWritten:
  """A train step that a user of optax writes, with the methods of a `TrainStep`.

  Args:
    gradient: from params and batch to the loss and its gradient.
    tx: the optimizer.
  """

  def __init__(self, gradient: Callable[..., Any], tx: optax.GradientTransformation):
    def step(state: Any, batch: Any) -> Any:
      params, opt_state = state
      value, grads = gradient(params, batch)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), value

    self._tx = tx
    self._step = jax.jit(step, donate_argnums=0)
    self.lower = self._step.lower

  def init(self, params: Any) -> Any:
    """The first state: params, whose arrays are copied, and the optimizer's state."""
    return jax.tree.map(jnp.copy, (params, self._tx.init(params)))

  def __call__(self, state: Any, batch: Any) -> Any:
    """Makes a step."""
    return self._step(state, batch)


@dataclasses.dataclass(frozen=True)
class Way:
  """A row.

  Attributes:
    make: makes the step of a model.
    rematerialized: whether the backward pass computes blocks again.
    dtype: of the params and the arithmetic.
    micro_batches: the calls that make one optimizer step.
  """

  make: Callable[[models.GPT2], Any]
  rematerialized: bool = True
  dtype: Any = jnp.float32
  micro_batches: int = 1

  def step(self, model: models.GPT2) -> Any:
    """Makes the train step of a model."""
    settings = {"rematerialized": self.rematerialized, "dtype": self.dtype}
    return self.make(dataclasses.replace(model, **settings))

  def arrays(self, model: models.GPT2) -> tuple[Any, jax.Array]:
    """The initial params, and the batch of a call."""
    params = jax.tree.map(lambda x: x.astype(self.dtype), model.init(jax.random.key(0)))
    shape = (_BATCH // self.micro_batches, model.length + 1)
    return params, jax.random.randint(jax.random.key(1), shape, 0, model.vocabulary)

  def shapes(self, model: models.GPT2) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The same without values."""
    return jax.eval_shape(lambda: self.arrays(model))


def by_hand(tx: optax.GradientTransformation, size: int | None = None) -> Any:
  """Makes hand-written steps, which take their batch at once or by `optax.microbatching`."""
  mean = optax.microbatching.AccumulationType.MEAN

  def make(model: models.GPT2) -> HandWritten:
    gradient = jax.value_and_grad(model.loss)
    return HandWritten(optax.microbatching.microbatch(gradient, 1, size, mean), tx)

  return make


def ours(tx: optax.GradientTransformation, in_backward: bool = False) -> Any:
  """Makes train steps of the package."""
  return lambda model: optax_boost.make_train_step(model.loss, tx, update_in_backward=in_backward)


def half_frozen(tx: optax.GradientTransformation) -> Any:
  """Makes train steps with the embeddings and the first half of the blocks frozen."""

  def make(model: models.GPT2) -> Any:
    params = jax.eval_shape(model.init, jax.random.key(0))
    names = ["tokens|positions", "blocks[*]", "norm"]
    groups = optax_boost.layer_groups(params, names, num_groups=2)
    frozen = optax_boost.freeze_layers(tx, groups, optax_boost.fixed_freezing(2, 1))
    return optax_boost.make_train_step(model.loss, frozen)

  return make


def ways() -> dict[str, Way]:
  """The rows."""
  adamw, sgd = optax.adamw(1e-4), optax.sgd(0.01)
  masters = optax_boost.master_weights(adamw, check=None)
  rounding = optax_boost.stochastic_rounding(adamw, key=0, check=None)
  steps = optax.MultiSteps(adamw, _WINDOW).gradient_transformation()
  dropping = optax_boost.accumulate(adamw, _WINDOW)
  restarting = optax_boost.accumulate(adamw, _WINDOW, not_finite="restart")
  window = functools.partial(Way, micro_batches=_WINDOW)
  low = functools.partial(Way, dtype=jnp.bfloat16)
  return {
    f"{_PLAIN}, no remat": Way(by_hand(adamw), rematerialized=False),
    _PLAIN: Way(by_hand(adamw)),
    "train step": Way(ours(adamw)),
    "`update_in_backward`": Way(ours(adamw, True)),
    "`update_in_backward`, no remat": Way(ours(adamw, True), rematerialized=False),
    "half of the blocks frozen": Way(half_frozen(adamw)),
    "SGD": Way(ours(sgd)),
    "SGD, `update_in_backward`": Way(ours(sgd, True)),
    "window, `optax.MultiSteps`": window(by_hand(steps)),
    "window, `optax.microbatching`": Way(by_hand(adamw, _BATCH // _WINDOW)),
    'window, `accumulate`, "drop"': window(ours(dropping)),
    'window, `accumulate`, "restart"': window(ours(restarting)),
    "bfloat16, `master_weights`": low(ours(masters)),
    "bfloat16, `master_weights`, `update_in_backward`": low(ours(masters, True)),
    "bfloat16, `stochastic_rounding`": low(ours(rounding)),
    "bfloat16, `stochastic_rounding`, `update_in_backward`": low(ours(rounding, True)),
  }


def sharded_ways() -> dict[str, tuple[Way, bool]]:
  """The rows of several devices, and whether each shards the optimizer's state."""
  adamw = optax.adamw(1e-4)
  return {
    "eight devices, data parallel": (Way(ours(adamw)), False),
    "eight devices, ZeRO-1": (Way(ours(adamw)), True),
    "eight devices, ZeRO-1, `update_in_backward`": (Way(ours(adamw, True)), True),
  }


def sizes(compiled: Any, on_cpu: bool = False) -> dict[str, float]:
  """The memory of a compiled program, in MB."""
  memory = compiled.memory_analysis()
  # XLA's peak of a CPU's program is without temporaries.
  peak = programs.whole_bytes(compiled) if on_cpu else memory.peak_memory_in_bytes
  return {
    "arguments": memory.argument_size_in_bytes / 1e6,
    "temporaries": memory.temp_size_in_bytes / 1e6,
    "peak": peak / 1e6,
  }


def contender(name: str, way: Way) -> _harness.Contender:
  """Compiles a row."""
  step, (params, tokens) = way.step(_SMALL), way.arrays(_SMALL)
  state = step.init(params)
  facts = sizes(step.lower(state, tokens).compile(), on_cpu=True)
  run = lambda state: (step(state, tokens)[0],)  # noqa: E731
  wall = _harness.carried(name, run, (state,), calls=way.micro_batches, facts=facts)
  return _harness.in_processor_time(wall)


def compile_for_chip(chip_name: str, name: str) -> dict[str, float]:
  """Compiles a row for one chip."""
  way = ways()[name]
  step, (params, tokens) = way.step(_LARGE), way.shapes(_LARGE)
  _, compiled = programs.compile_train_step(chips.CHIPS[chip_name], step, (params,), tokens)
  return sizes(compiled)


def compile_for_several(device: str, name: str) -> dict[str, float]:
  """Compiles a row for a slice of eight chips, or for eight virtual CPU devices."""
  way, shards_state = sharded_ways()[name]
  on_cpu = device == _SEVERAL
  model = _SMALL if on_cpu else _LARGE
  mesh = jax.make_mesh((_DEVICES,), ("x",)) if on_cpu else chips.CHIPS[device].mesh()

  def sharding(*spec: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  def along_last_axis(x: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
    divides = shards_state and x.ndim and x.shape[-1] % _DEVICES == 0
    return sharding(*[None] * (x.ndim - 1), "x") if divides else sharding()

  def place(x: Any, where: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  step, (params, tokens) = way.step(model), way.shapes(model)
  params = jax.tree.map(lambda x: place(x, sharding()), params)
  state = step.init(params, opt_state_sharding=along_last_axis)
  return sizes(step.lower(state, place(tokens, sharding("x"))).compile(), on_cpu)


def compile_each(device: str, names: list[str]) -> Iterator[dict[str, float]]:
  """The memory of rows; for a process of its own."""
  warnings.simplefilter("ignore")
  for name in names:
    yield (compile_for_several if name in sharded_ways() else compile_for_chip)(device, name)


def compile_rows(device: str, names: list[str], limit: float) -> dict[str, dict[str, float]]:
  """The memory of rows, compiled in another process; what takes too long is left out."""
  devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}"}
  found: dict[str, dict[str, float]] = {}
  remaining = list(names)
  while remaining:
    given = (compile_each, device, remaining)
    try:
      for record in _process.items(*given, each=limit, environment=devices):
        found[remaining.pop(0)] = record
        print(device, *list(found.items())[-1], flush=True)
    except _process.GivenUp as error:
      print(device, remaining.pop(0), error, flush=True)
  return found


def measure(device: str, rounds: int, limit: float) -> Any:
  """What a device's columns need."""
  several = list(sharded_ways())
  if device != _CPU:
    names = [*ways(), *several] if chips.CHIPS[device].platform == "tpu" else list(ways())
    return compile_rows(device, names, limit)
  contenders = [contender(*row) for row in tqdm(ways().items(), desc="compiling")]
  comparison = _harness.compare(contenders, [_PLAIN], rounds, "Time and memory", 1)
  for name, facts in compile_rows(_SEVERAL, several, limit).items():
    comparison["rows"].append({"name": name, "note": "", "facts": facts})
  return comparison


def table(measured: dict[str, Any]) -> dict[str, Any]:
  """One comparison with the columns of all devices that were measured."""
  comparison = measured[_CPU]
  for device, title in _CHIPS.items():
    for row in comparison["rows"]:
      found = measured.get(device, {}).get(row["name"], {})
      row["facts"] |= {f"{title} {column}": size for column, size in found.items()}
  return comparison


def main() -> None:
  """Measures, and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  devices = (_CPU, *_CHIPS)
  parser.add_argument("devices", nargs="*", choices=[[], *devices], default=[])
  parser.add_argument("--rounds", type=int, default=15, help="to collect, quiet if possible")
  parser.add_argument("--limit", type=float, default=300.0, help="seconds to compile a row")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  kept = _harness.OUT / "memory_short.json"
  for device in options.devices or devices:
    if device in _CHIPS and chips.CHIPS[device].missing():
      print(f"{device}: left out; it needs `pip install {chips.CHIPS[device].missing()}`")
      continue
    found = measure(device, options.rounds, options.limit)
    measured = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    _harness.replace(kept, json.dumps(measured | {device: found}))
  measured = json.loads(kept.read_text(encoding="utf-8"))
  if _CPU in measured:
    where = _harness.machine(["jax", "jaxlib", "optax"])
    _harness.write("memory_short", _ABOUT, [table(measured)], where, options.out)


if __name__ == "__main__":
  main()

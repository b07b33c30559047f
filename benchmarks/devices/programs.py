"""Compiles a case for a chip and reads the program: kernels, collectives, memory."""

import collections
from collections.abc import Iterator
import re
import time
from typing import Any
import warnings

import jax
import numpy as np

from benchmarks import _process
from benchmarks.devices import cases, chips

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_KERNELS = ("fusion", "copy", "custom-call", "sort", "transpose", "reduce", "scatter")
_OPERATION = r"%?([\w.-]+) = (\(.*?\)|\S+) ([a-z-]+)\(([^)]*)\)"
_NO_ACCESS = (
  *("parameter", "get-tuple-element", "bitcast", "tuple", "constant"),
  *("copy-done", "all-reduce-done", "all-gather-done"),
)
_ITEM_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


def compile_all(
  chip_name: str, layout: str, names: list[str], limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields a record for each case; one that takes longer than `limit` seconds is given up."""
  remaining = list(names)
  while remaining:
    try:
      for record in _process.items(compile_each, chip_name, layout, remaining, each=limit):
        yield remaining.pop(0), record
    except _process.GivenUp as error:
      yield remaining.pop(0), {"error": str(error)}


def compile_each(chip_name: str, layout: str, names: list[str]) -> Iterator[dict[str, Any]]:
  """Compiles the cases one after the other; for a process of its own."""
  warnings.simplefilter("ignore")
  for name in names:
    yield compile_case(cases.CASES[name], chips.CHIPS[chip_name], layout)


def compile_case(case: cases.Case, chip: chips.Chip, layout: str) -> dict[str, Any]:
  """The figures of the compiled step: one row of the table."""
  mesh = chip.mesh()
  tx = case.make()

  def place(x: Any) -> jax.ShapeDtypeStruct:
    sharding = chips.sharding(mesh, layout, x.shape, case.shape)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  def per_replica(x: Any) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding)

  params = cases.params(case)
  state = jax.tree.map(place, jax.eval_shape(tx.init, params))
  grads = jax.tree.map(per_replica if case.replicas else place, params)
  params = jax.tree.map(place, params)
  start = time.perf_counter()
  lowered = jax.jit(cases.step(case, mesh), donate_argnums=(0, 1)).lower(params, state, grads)
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  return {"seconds to compile": seconds} | read(compiled)


def compile_train_step(chip: chips.Chip, step: Any, arrays: Any, batch: Any) -> tuple[Any, Any]:
  """Compiles a train step for one device: its abstract state, and the program.

  Args:
    chip: the chip.
    step: a train step, whose schedule of freezing, if there is one, has one depth.
    arrays: the arguments of its `init`, abstract.
    batch: the batch, abstract.
  """
  one = jax.sharding.SingleDeviceSharding(chip.mesh().devices.flat[0])

  def place(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)

  abstract = jax.tree.map(place, jax.eval_shape(step.init, *arrays))
  return abstract, step.lower(abstract, jax.tree.map(place, batch)).compile()


def whole_bytes(compiled: Any) -> int:
  """The memory of a step: arguments, results and temporaries, those that share some once."""
  memory = compiled.memory_analysis()
  kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return kept + memory.temp_size_in_bytes


def read(compiled: Any) -> dict[str, Any]:
  """Counts in a compiled program."""
  text = compiled.as_text()
  entry = text[text.index("\nENTRY") :]
  operations = collections.Counter(re.findall(r" ([a-z-]+?)(?:-start)?\(", entry))
  collectives = collections.Counter()
  sent = 0
  pattern = rf"= (.+?) ({_COLLECTIVES})(?:-start)?\("
  for shape, name in re.findall(pattern, text):
    collectives[name] += 1
    sent += _bytes(shape)
  cost = compiled.cost_analysis() or {}
  return {
    "kernels": sum(operations[name] for name in _KERNELS),
    "loops": operations["while"],
    "collectives": dict(collectives),
    "collective bytes": sent,
    "temporary bytes": compiled.memory_analysis().temp_size_in_bytes,
    "bytes accessed": cost.get("bytes accessed"),
    "HBM bytes": _hbm_bytes(entry),
  }


def _hbm_bytes(entry: str) -> int:
  """The bytes that the operations of a TPU's entry computation read from and write to its HBM.

  XLA's own estimate counts the faster memories too, `S(1)` in a shape, and copies to them twice.
  """
  results: dict[str, list[str]] = {}
  total = 0
  for name, result, operation, arguments in re.findall(_OPERATION, entry):
    results[name] = re.findall(r"[a-z]+\d*\[[\d,]*\](?:\{[^}]*\})?", result)
    if operation in _NO_ACCESS:
      continue
    written = results[name][:1] if operation == "copy-start" else results[name]
    read = [results.get(argument, []) for argument in re.findall(r"%([\w.-]+)", arguments)]
    # What holds several arrays is taken apart before it is read.
    shapes = written + [shape for shapes in read if len(shapes) == 1 for shape in shapes]
    total += sum(_bytes(shape) for shape in shapes if "S(" not in shape)
  return total


def _bytes(shape: str) -> int:
  """The bytes of an HLO shape, of a tuple's parts together."""
  total = 0
  for dtype, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape):
    total += int(np.prod([int(n) for n in sizes.split(",") if n])) * _ITEM_SIZES.get(dtype, 4)
  return total

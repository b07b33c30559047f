"""Compiles programs in a thread."""

from collections.abc import Callable, Iterable, Mapping
import concurrent.futures
from typing import Any, TypeAlias

import jax

from optax_boost._foundation import _checks, _types

Report: TypeAlias = Callable[[str], Any]


def compile_for(
  batches: Iterable[_types.Batch],
  lower: Callable[[_types.Batch], jax.stages.Lowered],
  report: Report | None = None,
) -> concurrent.futures.Future[None]:
  """Compiles a program for each batch in a new thread, one after the other, in order.

  Training continues meanwhile, since XLA compiles without Python's interpreter lock. `lower` is
  called in the caller's thread, since tracing depends on contexts of the current thread, such as
  ``jax.set_mesh``; the thread compiles a program while the next is lowered. A call of the jitted
  function waits for the program that the thread is compiling, and finds one that is compiled.

  Returns a future that is done when all programs are compiled. `report`, if given, is called with
  a line for each program when the thread begins to compile it.
  """
  is_batch = (
    isinstance(batches, Mapping) or hasattr(batches, "shape") or hasattr(batches, "_fields")
  )
  if is_batch or not isinstance(batches, Iterable):
    raise TypeError(
      "`batches` must be a list of batches, one of each shape; got a single batch,"
      f" {_describe(batches) or _checks.shorten(batches)}. Pass a list:"
      " `compile_ahead(..., [batch])`."
    )
  _checks.check_callable("report", report, "a function of a line, such as `print`", optional=True)
  is_tuple, batches = isinstance(batches, tuple), list(batches)

  def compile_one(program: jax.stages.Lowered, number: int) -> None:
    if report is not None:
      shapes = _describe(batches[number - 1])
      report(f"compiling the train step, program {number} of {len(batches)}: {shapes}")
    program.compile()

  def finish() -> None:
    for future in compiled:
      future.result()

  thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="optax_boost_compile")
  compiled = []
  try:
    for number, batch in enumerate(batches, 1):
      compiled.append(thread.submit(compile_one, lower(batch), number))
    return thread.submit(finish)
  except Exception as error:
    if is_tuple:
      error.add_note("If `batches` is a single batch, pass a list: `compile_ahead(..., [batch])`.")
    raise
  finally:
    thread.shutdown(wait=False)


def _describe(batch: _types.Batch) -> str:
  """Returns the dtypes and shapes of a batch, such as "int32[8, 65]", for a message."""
  arrays = [leaf for leaf in jax.tree.leaves(batch) if hasattr(leaf, "shape")]
  return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in arrays)

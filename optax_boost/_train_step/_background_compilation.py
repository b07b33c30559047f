"""Compiles programs in a thread, while training continues."""

from collections.abc import Sequence
import concurrent.futures

import jax


def compile_programs(programs: Sequence[jax.stages.Lowered]) -> concurrent.futures.Future[None]:
  """Starts a thread that compiles `programs`; returns a future that is done after the last.

  XLA releases Python's interpreter lock while it compiles. A later call of the function under
  ``jax.jit`` finds the compiled program. The caller traces the programs, since a trace depends on
  contexts of the caller's thread, such as ``jax.set_mesh``.
  """

  def compile_all() -> None:
    for program in programs:
      program.compile()

  thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="optax_boost_compile")
  future = thread.submit(compile_all)
  thread.shutdown(wait=False)
  return future

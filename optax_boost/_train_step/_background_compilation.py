"""Compiles programs in a thread."""

from collections.abc import Sequence
import concurrent.futures

import jax


def compile_programs(programs: Sequence[jax.stages.Lowered]) -> concurrent.futures.Future[None]:
  """Compiles `programs` in a new thread; returns a future that is done when all are compiled.

  Training continues meanwhile, since XLA compiles without Python's interpreter lock. The caller
  lowers the programs in its own thread, since tracing depends on contexts of the current thread,
  such as ``jax.set_mesh``. A later call of the jitted function finds the compiled program.
  """

  def compile_all() -> None:
    for program in programs:
      program.compile()

  thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="optax_boost_compile")
  future = thread.submit(compile_all)
  thread.shutdown(wait=False)
  return future

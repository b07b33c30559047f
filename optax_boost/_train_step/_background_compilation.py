"""Compiles programs in a thread, while the training that will need them goes on."""

from collections.abc import Sequence
import concurrent.futures

import jax


def compile_programs(programs: Sequence[jax.stages.Lowered]) -> concurrent.futures.Future[None]:
  """Starts to compile `programs`, one after the other; the future is done when all are.

  XLA releases Python's interpreter while it compiles, and ``jax.jit`` finds what was compiled when
  it is called with such arguments. Programs are traced by the caller, whose thread has the
  contexts that a trace depends on, as ``jax.set_mesh``.
  """

  def compile_all() -> None:
    for program in programs:
      program.compile()

  thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="optax_boost_compile")
  future = thread.submit(compile_all)
  thread.shutdown(wait=False)
  return future

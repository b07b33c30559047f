"""AdaSum over several processes, as over several machines, with checkpoints to resume from.

Start it once per process, on one machine or many, or let ``--launch`` start them here::

  python examples/adasum_processes.py --launch 4 --steps 20 --checkpoints out/adasum
  python examples/adasum_processes.py --coordinator 10.0.0.1:1234 --processes 4 --process 0 ...

All processes together train the same model to the same weights as one process with that many
virtual devices (``--devices 4``). When a process dies, the others end with a message: this
script's where an exchange with it fails, else the one of JAX's runtime, which misses its
heartbeat after `HEARTBEAT_SECONDS`. The next start resumes from the last checkpoint; it needs the
same number of replicas, as each has a momentum of its own.
"""

import argparse
import functools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost

REPLICAS = "replicas"
P = jax.sharding.PartitionSpec
HEARTBEAT_SECONDS = 10  # how long a silent process may be silent before the others end


def batch_of(step: int, replica: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
  """One replica's share of a step's data; a function of both, so that resuming sees the same."""
  rng = np.random.default_rng((step, replica))
  x = rng.normal(size=(size, 8)).astype(np.float32)
  return x, np.sin(x @ np.linspace(-1, 1, 8, dtype=np.float32))[:, None]


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
  """Mean squared error of a small network."""
  hidden = jnp.tanh(x @ params["first"] + params["bias"])
  return jnp.mean((hidden @ params["second"] - y) ** 2)


def initial_params() -> dict[str, np.ndarray]:
  """The same in every process."""
  rng = np.random.default_rng(0)
  first, second = rng.normal(size=(8, 16)) / 3, rng.normal(size=(16, 1)) / 4
  params = {"first": first, "bias": np.zeros(16), "second": second}
  return jax.tree.map(lambda x: x.astype(np.float32), params)


def save(folder: pathlib.Path, step: int, replicas: int, leaves: list[np.ndarray]) -> None:
  """Writes a checkpoint whole or not at all: a process may die at any moment."""
  folder.mkdir(parents=True, exist_ok=True)
  partial = folder / f"partial-{os.getpid()}.npz"
  np.savez(partial, *leaves, step=step, replicas=replicas)
  partial.replace(folder / "checkpoint.npz")


def load(checkpoint: pathlib.Path, replicas: int) -> tuple[int, list[np.ndarray]]:
  """Reads a checkpoint: the step, and the leaves of params, momenta and state."""
  with np.load(checkpoint) as saved:
    held = int(saved["replicas"])
    if held != replicas:
      sys.exit(
        f"'{checkpoint}' holds a momentum for each of {held} replicas; there are {replicas} now."
        f" Start with {held} replicas, or train from the start with another --checkpoints folder."
      )
    leaves = [saved[f"arr_{i}"] for i in range(sum(name.startswith("arr_") for name in saved))]
    return int(saved["step"]), leaves


def train(options: argparse.Namespace) -> None:
  """Trains on all devices of all processes."""
  mesh = jax.make_mesh((jax.device_count(),), (REPLICAS,))
  replicated = jax.NamedSharding(mesh, P())
  inner, tx = optax.sgd(0.05, momentum=0.9), optax_boost.adasum(REPLICAS)

  # Each replica has a momentum of its own; AdaSum acts on the updates.
  @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P(REPLICAS), P(), P(REPLICAS), P(REPLICAS)),
    out_specs=(P(), P(REPLICAS), P()),
  )
  def step_fn(params: Any, own: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    mine = jax.lax.pcast(params, REPLICAS, to="varying")
    own = jax.tree.map(lambda s: s[0], own)
    updates, own = inner.update(jax.grad(loss_fn)(mine, x, y), own, mine)
    updates, state = tx.update(updates, state, params)
    own = jax.tree.map(lambda s: s[None], own)
    return optax.apply_updates(params, updates), own, state

  params = initial_params()
  own = jax.vmap(inner.init, in_axes=None, out_axes=0, axis_size=mesh.size)(params)
  carry = (params, own, tx.init(params))
  structure, first = jax.tree.structure(carry), 0
  checkpoint = options.checkpoints / "checkpoint.npz"
  if checkpoint.exists():
    first, leaves = load(checkpoint, mesh.size)
    carry = jax.tree.unflatten(structure, leaves)
  carry = jax.device_get(carry)

  def place(tree: Any, spec: Any) -> Any:
    sharding = jax.NamedSharding(mesh, spec)

    def put(x: np.ndarray) -> jax.Array:
      return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(lambda x: put(np.asarray(x)), tree)

  carry = tuple(
    place(part, spec) for part, spec in zip(carry, (P(), P(REPLICAS), P()), strict=True)
  )
  whole = jax.jit(lambda tree: tree, out_shardings=replicated)
  print(f"process {jax.process_index()}: {mesh.size} replicas, from step {first}", flush=True)
  for step in range(first, options.steps):
    shares = [batch_of(step, r) for r in range(mesh.size)]
    x, y = place(tuple(np.concatenate(part) for part in zip(*shares, strict=True)), P(REPLICAS))
    carry = step_fn(*carry, x, y)
    if (step + 1) % options.every == 0 or step + 1 == options.steps:
      leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(whole(carry))]
      if jax.process_index() == 0:
        save(options.checkpoints, step + 1, mesh.size, leaves)
        print(f"step {step + 1} saved", flush=True)
    if step + 1 == options.die_after and jax.process_index() == jax.process_count() - 1:
      os._exit(1)  # as if the machine had lost its power
    time.sleep(options.pause)


def launch(options: argparse.Namespace) -> int:
  """Starts the processes on this machine; ends all as soon as one fails.

  Returns:
    The exit status: 0 if all ended well.
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  command = [sys.executable, __file__, "--coordinator", f"127.0.0.1:{port}"]
  command += ["--steps", str(options.steps), "--every", str(options.every)]
  command += ["--checkpoints", str(options.checkpoints), "--processes", str(options.launch)]
  command += ["--die-after", str(options.die_after), "--pause", str(options.pause)]
  # One device each, whatever this environment says.
  flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
  environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
  with tempfile.TemporaryDirectory() as folder:
    logs = [pathlib.Path(folder, str(i)) for i in range(options.launch)]
    processes = []
    try:
      for i, log in enumerate(logs):
        with log.open("w") as file:
          processes.append(
            subprocess.Popen(
              [*command, "--process", str(i)], stdout=file, stderr=file, env=environment
            )
          )
      status: list[int | None] = [None]
      while None in status and not any(status):
        time.sleep(0.05)
        status = [process.poll() for process in processes]
      failed = [i for i, code in enumerate(status) if code]
    finally:
      for process in processes:
        process.kill()
        process.wait()
    print(logs[0].read_text(encoding="utf-8").split("\nTraceback")[0].strip())
    if failed:
      tail = "\n".join(logs[failed[0]].read_text(encoding="utf-8").splitlines()[-5:])
      print(
        f"process {failed[0]} of {options.launch} ended with status {status[failed[0]]}; the"
        " others were ended. Start again to resume from the last checkpoint.\n" + tail,
        file=sys.stderr,
      )
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
  """Parses the command line and runs what it says."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--launch", type=int, help="start this many processes on this machine")
  parser.add_argument("--devices", type=int, help="one process with this many virtual devices")
  parser.add_argument("--coordinator", help="address:port of process 0")
  parser.add_argument("--processes", type=int, help="how many processes there are")
  parser.add_argument("--process", type=int, help="which of them this is")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint")
  parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("out/adasum"))
  parser.add_argument("--die-after", type=int, default=0, help="the last process dies then")
  parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
  options = parser.parse_args(arguments)
  for name in ("launch", "devices", "processes", "steps", "every"):
    value = getattr(options, name)
    if value is not None and value < 1:
      parser.error(f"--{name} must be at least 1; got {value}")
  if options.die_after < 0 or options.pause < 0:
    parser.error("--die-after and --pause must be at least 0")
  if options.launch:
    return launch(options)
  if not options.devices:
    if None in (options.coordinator, options.processes, options.process):
      parser.error("--launch, --devices, or --coordinator, --processes and --process are needed")
    if not 0 <= options.process < options.processes:
      parser.error(f"--process must be from 0 to {options.processes - 1}; got {options.process}")
  jax.config.update("jax_platforms", "cpu")
  if options.devices:
    jax.config.update("jax_num_cpu_devices", options.devices)
  else:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      options.coordinator,
      options.processes,
      options.process,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
  try:
    train(options)
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    print(
      f"process {options.process}: another process is gone ({reason}). Start all again to resume"
      " from the last checkpoint.",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)  # an orderly end would wait for the process that is gone
  return 0


if __name__ == "__main__":
  sys.exit(main())

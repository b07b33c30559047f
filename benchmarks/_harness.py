"""Side-by-side timing: every contender once per round, in random order, reported as ratios.

Rounds make the comparison fair on a machine whose speed drifts: contenders of one round see the
same machine, so the ratio within a round means something even where the seconds don't.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from importlib import metadata
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

HERE = pathlib.Path(__file__).resolve().parent
# Where intermediate results are kept, which git ignores.
OUT = HERE.parent / "out"
# Idle OpenMP threads would spin on the cores that the next contender needs.
_NO_SPINNING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
_TICKS = os.sysconf("SC_CLK_TCK")
# Rounds count where strangers took at most this share of a core. The kernel counts in ticks of
# some 10 ms, so it is asked about stretches that are long beside them.
_QUIET = 0.12
_STRETCH_SECONDS = 0.5
_MOST_STRETCHES = 4


class PeerUnavailable(Exception):
  """A peer can't be installed or started here; its text goes into the table."""


@dataclasses.dataclass(frozen=True)
class Contender:
  """What takes part in each round.

  Attributes:
    name: its row in the table.
    run: does the work once and returns its seconds; None where the contender can't run here.
    facts: further columns, such as seconds to compile.
    note: why it can't run.
    pid: the process that works for it, when that is not this one.
  """

  name: str
  run: Callable[[], float] | None
  facts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  note: str = ""
  pid: int | None = None


def carried(
  name: str,
  step: Callable[..., Any],
  carry: tuple[Any, ...],
  *rest: Any,
  calls: int = 1,
  facts: Mapping[str, float] | None = None,
) -> Contender:
  """A step that is given arrays, such as params and state, and returns new ones.

  Args:
    name: its row in the table.
    step: ``step(*carry, *rest)`` returns the next carry.
    carry: the first one, which may be donated.
    *rest: what every call gets.
    calls: how many make a measurement.
    facts: further columns.

  Returns:
    The contender, run twice already.
  """

  def run() -> float:
    nonlocal carry
    start = time.perf_counter()
    for _ in range(calls):
      carry = step(*carry, *rest)
    jax.block_until_ready(carry)
    return time.perf_counter() - start

  run()
  run()
  return Contender(name, run, facts or {})


def in_processor_time(contender: Contender) -> Contender:
  """Times a contender by the processor's clock, which other work on the machine does not stretch.

  Args:
    contender: to be timed.
  """
  work = contender.run

  def run() -> float:
    start = time.process_time()
    if work is not None:
      work()
    return time.process_time() - start

  return dataclasses.replace(contender, run=run)


@dataclasses.dataclass(frozen=True)
class Environment:
  """A pinned virtual environment for a peer.

  Attributes:
    name: of its folder under ``benchmarks/.venvs``.
    requirements: pinned, as pip takes them.
    newest_python: the last Python that the peer's packages were built for.
  """

  name: str
  requirements: tuple[str, ...]
  newest_python: tuple[int, int]

  def python(self) -> str:
    """Returns the environment's interpreter, after installing what is missing."""
    folder = HERE / ".venvs" / self.name
    interpreter = str(folder / "bin" / "python")
    pinned = folder / "requirements.txt"
    wanted = "\n".join(self.requirements)
    # Written last, so that an interrupted installation starts again.
    if pinned.is_file() and pinned.read_text(encoding="utf-8") == wanted:
      return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    try:
      for command in (
        [self._base_python(), "-m", "venv", str(folder)],
        [interpreter, "-m", "pip", "install", "--quiet", *self.requirements],
      ):
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
      reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
      raise PeerUnavailable(f"not installed: {reason}") from error
    pinned.write_text(wanted, encoding="utf-8")
    return interpreter

  def _base_python(self) -> str:
    major, newest = self.newest_python
    if sys.version_info[:2] <= self.newest_python:
      return sys.executable
    for minor in range(newest, 7, -1):
      name = f"python{major}.{minor}"
      # A pyenv shim exists even where its version does not run.
      if shutil.which(name) and not subprocess.run([name, "-V"], capture_output=True).returncode:
        return name
    raise PeerUnavailable(f"not installed: needs Python <= {major}.{newest}")


MINDSPORE = Environment(
  "mindspore-2.10.0", ("mindspore==2.10.0", "numpy==1.26.4"), newest_python=(3, 11)
)


@contextlib.contextmanager
def peer(name: str, environment: Environment, script: str, *arguments: str) -> Iterator[Contender]:
  """Starts a peer in a process and an environment of its own.

  Args:
    name: its row in the table.
    environment: where its packages are.
    script: file under ``benchmarks/peers`` that calls ``serve``.
    *arguments: of the script.

  Yields:
    The contender; without `run` where the peer is not to be had.
  """
  try:
    process = _start([environment.python(), str(HERE / "peers" / script), *arguments])
  except PeerUnavailable as error:
    yield Contender(name, None, note=str(error))
    return
  try:
    yield Contender(name, lambda: _ask(process), pid=process.pid)
  finally:
    process.stdin.close()
    process.wait()


def _start(command: Sequence[str]) -> subprocess.Popen:
  process = subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    bufsize=1,
    env={**os.environ, **_NO_SPINNING},
  )
  answer = process.stdout.readline().strip()
  if answer != "ready":
    raise PeerUnavailable(answer or f"did not start: exit status {process.wait()}")
  return process


def _ask(process: subprocess.Popen) -> float:
  process.stdin.write("\n")
  answer = process.stdout.readline()
  if not answer:
    raise RuntimeError(f"peer {process.args} died with exit status {process.wait()}")
  return float(answer)


def _busy_seconds() -> float:
  """Seconds that all cores together have worked since boot."""
  user, nice, system, _, _, irq, softirq, steal, *_ = _fields("/proc/stat", 1)
  return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_seconds(pids: Sequence[int]) -> float:
  """Processor seconds of this process and of the peers'."""
  peers = sum(sum(_fields(f"/proc/{pid}/stat", 13)[:2]) for pid in pids)
  return time.process_time() + peers / _TICKS


def _fields(path: str, start: int) -> list[int]:
  first_line = pathlib.Path(path).read_text(encoding="utf-8").splitlines()[0].split()
  return [int(x) for x in first_line[start : start + 10]]


def measure(
  contenders: Sequence[Contender], rounds: int, title: str, patience: int = _MOST_STRETCHES
) -> tuple[list[dict[str, float]], int]:
  """Times all contenders, preferably in rounds that nobody else disturbed.

  Args:
    contenders: those without `run` are left out.
    rounds: how many quiet rounds to collect.
    title: of the progress bar.
    patience: after so many times as many disturbed rounds it gives up and fills what is missing
      with the last of them.

  Returns:
    One dictionary per round, from contender to seconds, and how many of them were quiet.
  """
  able = {c.name: c.run for c in contenders if c.run is not None}
  pids = [c.pid for c in contenders if c.pid is not None]
  order, shuffle = list(able), random.Random(0).shuffle
  quiet: list[dict[str, float]] = []
  disturbed: list[dict[str, float]] = []
  with tqdm(total=rounds, desc=title, unit="round") as bar:
    while len(quiet) < rounds and len(disturbed) < patience * rounds:
      stretch: list[dict[str, float]] = []
      start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds(pids)
      while time.perf_counter() - start < _STRETCH_SECONDS:
        shuffle(order)
        stretch.append({name: able[name]() for name in order})
      strangers = (_busy_seconds() - busy) - (_own_seconds(pids) - own)
      if strangers <= _QUIET * (time.perf_counter() - start):
        quiet += stretch
        bar.update(min(len(stretch), rounds - bar.n))
      else:
        disturbed += stretch
        time.sleep(_STRETCH_SECONDS)
  kept = quiet[:rounds]
  return kept + disturbed[len(kept) - rounds :][: rounds - len(kept)], len(kept)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
  """Returns the lower quartile, the median and the upper quartile."""
  low, median, high = np.percentile(values, [25, 50, 75])
  return float(low), float(median), float(high)


def compare(
  contenders: Sequence[Contender],
  references: Sequence[str],
  rounds: int,
  title: str,
  patience: int = _MOST_STRETCHES,
) -> dict[str, Any]:
  """Measures and reduces to one record per contender.

  Args:
    contenders: in the table's order.
    references: contenders that the others are divided by, one column each.
    rounds: see `measure`.
    title: of the comparison.
    patience: see `measure`.

  Returns:
    A record: `title`, `rounds`, `quiet_rounds`, `references` and `rows`.
  """
  seconds, quiet = measure(contenders, rounds, title, patience)
  able = [c.name for c in contenders if c.run is not None]
  references = [name for name in references if name in able]
  rows = []
  for contender in contenders:
    row: dict[str, Any] = {"name": contender.name, "note": contender.note, "facts": contender.facts}
    if contender.name in able:
      row["milliseconds"] = quartiles([1e3 * s[contender.name] for s in seconds])
      row["ratios"] = {
        r: quartiles([s[contender.name] / s[r] for s in seconds]) for r in references
      }
    rows.append(row)
  return {
    "title": title,
    "rounds": len(seconds),
    "quiet_rounds": quiet,
    "references": references,
    "rows": rows,
  }


def machine(packages: Sequence[str]) -> dict[str, str]:
  """Describes where the figures come from.

  Args:
    packages: distributions whose versions matter.
  """
  cpu = platform.machine()
  with contextlib.suppress(OSError, StopIteration):
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next(x for x in lines if x.startswith("model name")).split(":", 1)[1].strip()
  versions = {name: metadata.version(name) for name in packages}
  return {
    "cpu": cpu,
    "cores": str(os.cpu_count()),
    "system": f"{platform.system()} {platform.release()}",
    "python": platform.python_version(),
    **versions,
  }


def write(
  name: str,
  about: str,
  comparisons: Sequence[Mapping],
  machine_description: Mapping[str, str],
  folder: pathlib.Path,
) -> None:
  """Writes ``<folder>/<name>.md``, whole or not at all.

  Args:
    name: of the benchmark.
    about: a paragraph for the table's reader.
    comparisons: what `compare` returned.
    machine_description: what `machine` returned.
    folder: made when missing.
  """
  tables = "\n".join(map(_table, comparisons))
  replace(folder / f"{name}.md", page(name, about, machine_description, tables))


def write_lines(
  name: str, about: str, lines: Sequence[str], packages: Sequence[str], folder: pathlib.Path
) -> None:
  """Writes ``<folder>/<name>.md`` with a body of `lines`, whole or not at all.

  `packages` are those whose versions the page names.
  """
  body = "\n".join(lines).rstrip("\n") + "\n"
  replace(folder / f"{name}.md", page(name, about, machine(packages), body))


def page(title: str, about: str, machine_description: Mapping[str, str], body: str) -> str:
  """The text of a page of results."""
  where = ", ".join(f"{key} {value}" for key, value in machine_description.items())
  return f"# {title}\n\n{about}\n\nMachine: {where}.\n\n{body}"


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a file, whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f"{path.name}.partial")
  partial.write_text(text, encoding="utf-8")
  partial.replace(path)


def _table(comparison: Mapping[str, Any]) -> str:
  references, rows = comparison["references"], comparison["rows"]
  # In the order of first appearance; peers have fewer of them.
  facts = list(dict.fromkeys(fact for row in rows for fact in row["facts"]))
  header = ["", "ms", *(f"x {r}" for r in references), *facts]
  lines = [header, ["---"] * len(header)]
  for row in rows:
    columns = [f"{row['facts'][f]:,.5g}" if f in row["facts"] else "" for f in facts]
    if "milliseconds" in row:
      ratios = [_ratio(row["ratios"][r]) for r in references]
      lines.append([row["name"], f"{row['milliseconds'][1]:.2f}", *ratios, *columns])
    else:
      lines.append([row["name"], row["note"], *[""] * len(references), *columns])
  body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  rounds = f"{comparison['rounds']} rounds, {comparison['quiet_rounds']} of them quiet"
  return f"## {comparison['title']}\n\n{body}\n\nMedian [quartiles] over {rounds}.\n"


def _ratio(values: Sequence[float]) -> str:
  low, median, high = map(_short, values)
  return f"**{median}** [{low}, {high}]"


def _short(ratio: float) -> str:
  """Writes a ratio with two decimals, or more where they would be zeros."""
  return f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.2g}"

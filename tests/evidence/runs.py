"""Many small trainings, one on each core at a time, and settings chosen from them.

Finished trainings are kept in ``out/evidence``, so that an interrupted run goes on where it was.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import concurrent.futures
import hashlib
import inspect
import json
import math
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from benchmarks import _process
from tests.evidence import report

KEPT = pathlib.Path(__file__).parent.parent.parent / "out" / "evidence"
# Of no reported seed.
TUNING_SEED = 100
Result = dict[str, Any]
Train = Callable[[Any, int], Result]


class Tuned(NamedTuple):
  """One contender.

  Attributes:
    setting: the best on validation data.
    tried: the mean of ``"validation"`` for each setting, in the grid's order.
    results: of the best setting, one for each seed.
  """

  setting: Any
  tried: list[tuple[Any, float]]
  results: list[Result]

  @property
  def at_edge(self) -> bool:
    """Whether the best setting is the first or last of several: the grid may be too narrow."""
    return len(self.tried) > 1 and self.setting in (self.tried[0][0], self.tried[-1][0])

  @property
  def rate(self) -> str:
    """The best setting's rate, for a table."""
    return f"{self.setting.rate:g}{' (edge of the grid)' if self.at_edge else ''}"

  def values(self, key: str) -> list[Any]:
    """One entry of the results, for each seed."""
    return [result[key] for result in self.results]

  def spread(self, key: str, form: str = "{:.2f}") -> str:
    """Mean and standard deviation of an entry."""
    return report.spread(self.values(key), form)


def train_all(train: Train, runs: Sequence[tuple[Hashable, int]]) -> list[Result]:
  """Calls ``train(setting, seed)`` for each run, in a process pinned to a core.

  Args:
    train: a function of a module under ``tests.evidence``; returns a JSON-able dictionary.
    runs: settings, whose ``repr`` tells them apart, and seeds.

  Returns:
    The results, in order.
  """
  module = sys.modules[train.__module__]
  source = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16]
  path = KEPT / f"{train.__module__.rpartition('.')[2]}-{train.__name__}-{source}.jsonl"
  known = (
    dict(map(json.loads, path.read_text(encoding="utf-8").splitlines())) if path.exists() else {}
  )
  missing = [run for run in dict.fromkeys(runs) if repr(run) not in known]
  if missing:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _process.core_pool(_keep_programs) as pool, path.open("a") as file:
      futures = {pool.submit(train, *run): run for run in missing}
      done = concurrent.futures.as_completed(futures)
      for future in tqdm(done, total=len(missing), desc=train.__name__, mininterval=10):
        known[repr(futures[future])] = future.result()
        file.write(json.dumps([repr(futures[future]), future.result()]) + "\n")
        file.flush()
  return [known[repr(run)] for run in runs]


def tune(
  train: Train, grids: Mapping[str, Sequence[Hashable]], seeds: Sequence[int]
) -> dict[str, Tuned]:
  """Chooses each contender's setting on validation data, then trains it with every seed.

  Args:
    train: as in `train_all`; its results have a ``"validation"``, the larger the better, which is
      the only one to choose by. One that is not finite counts as the worst.
    grids: the settings to try, by contender; a single one is not tried.
    seeds: to report.

  Returns:
    The outcome, by contender.
  """
  trials = [(setting, TUNING_SEED) for grid in grids.values() for setting in grid if len(grid) > 1]
  values = dict(zip(trials, train_all(train, trials), strict=True))

  def validation(setting: Hashable) -> float:
    value = values[setting, TUNING_SEED]["validation"]
    return value if math.isfinite(value) else -math.inf

  tried = {
    name: [(setting, validation(setting)) for setting in grid] if len(grid) > 1 else []
    for name, grid in grids.items()
  }
  best = {
    name: max(tried[name], key=lambda pair: pair[1])[0] if tried[name] else grid[0]
    for name, grid in grids.items()
  }
  runs = [(best[name], seed) for name in grids for seed in seeds]
  results = dict(zip(runs, train_all(train, runs), strict=True))
  return {
    name: Tuned(best[name], tried[name], [results[best[name], seed] for seed in seeds])
    for name in grids
  }


def _keep_programs() -> None:
  # Trainings with the same program compile it once.
  cache = pathlib.Path(tempfile.gettempdir()) / "optax_boost_evidence_cache"
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

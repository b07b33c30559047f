"""Evidence runs choose settings on validation data and keep finished trainings."""

import math

from tests.evidence import runs


def _train(setting, seed):
  return {"validation": -((setting - 2) ** 2) if setting else math.nan, "seed": seed}


def _with_journal(monkeypatch, tmp_path):
  calls = []

  class Inline:
    def __init__(self, _):
      pass

    def __enter__(self):
      return self

    def __exit__(self, *_):
      pass

    def submit(self, train, *run):
      calls.append(run)
      future = runs.concurrent.futures.Future()
      future.set_result(train(*run))
      return future

  monkeypatch.setattr(runs._process, "core_pool", Inline)
  monkeypatch.setattr(runs, "KEPT", tmp_path)
  return calls


def test_the_best_setting_on_validation_data_is_trained_with_every_seed(monkeypatch, tmp_path):
  calls = _with_journal(monkeypatch, tmp_path)
  tuned = runs.tune(_train, {"a": [0, 1, 2, 3], "b": [3], "c": [4, 5]}, seeds=(7, 8))
  assert tuned["a"].setting == 2
  assert not tuned["a"].at_edge
  assert tuned["a"].tried[0] == (0, -math.inf)  # diverged
  assert [result["seed"] for result in tuned["a"].results] == [7, 8]
  assert tuned["b"].setting == 3
  assert not tuned["b"].at_edge
  assert tuned["c"].setting == 4
  assert tuned["c"].at_edge
  assert (3, runs.TUNING_SEED) in calls  # for "a"; "b" has no choice
  assert sum(seed == runs.TUNING_SEED for _, seed in calls) == 6


def test_finished_trainings_are_not_run_again(monkeypatch, tmp_path):
  calls = _with_journal(monkeypatch, tmp_path)
  first = runs.train_all(_train, [(1, 0), (2, 0)])
  again = runs.train_all(_train, [(2, 0), (3, 0), (1, 0)])
  assert calls == [(1, 0), (2, 0), (3, 0)]
  assert [again[2], again[0]] == first

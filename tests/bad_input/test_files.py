"""Forged, truncated and foreign files: each is refused by its name."""

from collections.abc import Callable
import json
import pathlib
from typing import Any

import pytest

import optax_boost
from optax_boost.race import RaceResult
from tests.bad_input import problem
from tests.bad_input import refusals
from tests.bad_input.kinds import Bad

JSON = {
  "empty": b"",
  "truncated": b'{"boost": {"mode": "au',
  "not UTF-8": b'{"boost": "\xff\xfe"}',
  "UTF-16": '{"boost": {}}'.encode("utf-16"),
  "deeply nested": b"[" * 100_000 + b"]" * 100_000,
  "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
  "a list": b"[]",
  "a number": b"3",
  "null": b"null",
  "NaN": b'{"dim_reduce": {"alpha": NaN}}',
  "Infinity": b'{"dim_reduce": {"alpha": Infinity}}',
  "400 digits": b'{"dim_reduce": {"alpha": ' + b"9" * 400 + b"}}",
  "5000 digits": b'{"dim_reduce": {"alpha": ' + b"9" * 5000 + b"}}",
  "1e400": b'{"dim_reduce": {"alpha": 1e400}}',
  "another file": b'{"name": "package", "version": 3}',
  "null character": b'{"boost": {}}\0',
  "binary": bytes(range(256)),
}
CONFIG = {
  "true as count": {"grad_freeze": {"param_groups": True}},
  "count of 2**31": {"grad_freeze": {"param_groups": 2**31}},
  "text as number": {"dim_reduce": {"alpha": "0.1"}},
  "list as block": {"boost": []},
  "unknown key": {"boost": {"mod": "auto"}},
  "unknown mode": {"boost": {"mode": "fast"}},
  "number as path": {"dim_reduce": {"pca_mat_path": 3}},
  "share above 1": {"grad_freeze": {"freeze_p": 1.5}},
}


def refused(load: Callable[[Any], Any], path: pathlib.Path, error: Any = ValueError) -> str:
  """The complaint about how a file is refused, whose name must be in the message."""
  return refusals.complaint(lambda: load(path), Bad(path, error, path.name), "path")


@pytest.mark.parametrize("label", [*JSON, *CONFIG])
@pytest.mark.parametrize("load", ["auto_boost", "RaceResult.load"])
def test_json_that_is_no_such_file_is_refused(load, label, tmp_path):
  path = tmp_path / "forged.json"
  path.write_bytes(JSON[label] if label in JSON else json.dumps(CONFIG[label]).encode())
  function = {
    "auto_boost": lambda path: optax_boost.auto_boost("O1", config=path),
    "RaceResult.load": RaceResult.load,
  }[load]
  assert not refused(function, path, (TypeError, ValueError))


def forged_result(change: Callable[[dict[str, Any]], None], path: pathlib.Path) -> None:
  problem.race_result().save(path)
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def setting(*keys: Any) -> Callable[[dict[str, Any]], None]:
  """Sets the value at the end of some keys."""
  *keys, last, value = keys

  def change(content: dict[str, Any]) -> None:
    for key in keys:
      content = content[key]
    content[last] = value

  return change


RESULTS = {
  "unknown baseline": setting("baseline", "c"),
  "number as baseline": setting("baseline", 3),
  "no curves": setting("curves", {}),
  "curves as a list": setting("curves", []),
  "too few seeds": setting("seeds", [0]),
  "fractional seeds": setting("seeds", [0.5, 1]),
  "seeds twice": setting("seeds", [1, 1]),
  "seeds as a number": setting("seeds", 2),
  "text as complete": setting("complete", "yes"),
  "empty loss": setting("curves", "a", "loss", []),
  "ragged loss": setting("curves", "a", "loss", [[1.0], [1.0, 2.0]]),
  "text in the loss": setting("curves", "a", "loss", [["a", "b"], ["c", "d"]]),
  "falling steps": setting("curves", "a", "steps", [2, 1]),
  "other steps": setting("curves", "a", "steps", [1, 3]),
  "fractional steps": setting("curves", "a", "steps", [0.5, 1.5]),
  "steps of 10**400": setting("curves", "a", "steps", [1, 10**400]),
  "other metrics": setting("curves", "a", "metrics", {}),
  "unknown field": setting("winner", "a"),
  "missing field": lambda content: content.pop("device"),
  "missing curve": lambda content: content["curves"]["a"].pop("seconds"),
}


@pytest.mark.parametrize("label", RESULTS)
def test_forged_results_of_a_race_are_refused(label, tmp_path):
  path = tmp_path / "forged.json"
  forged_result(RESULTS[label], path)
  assert not refused(RaceResult.load, path)

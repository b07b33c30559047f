"""Forged, truncated and foreign files: each is refused by its name."""

from collections.abc import Callable
import io
import json
import pathlib
from typing import Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost import auto
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
  "twice": b'{"boost": {}, "boost": {}}',
  "another file": b'{"name": "package", "version": 3}',
  "null character": b'{"boost": {}}\0',
  "binary": bytes(range(256)),
}
CONFIG = {
  "true as count": {"grad_freeze": {"param_groups": True}},
  "count of 2**31": {"grad_freeze": {"param_groups": 2**31}},
  "text as number": {"dim_reduce": {"alpha": "0.1"}},
  "null as number": {"dim_reduce": {"alpha": None}},
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
@pytest.mark.parametrize("load", ["BoostConfig.load", "auto_boost", "RaceResult.load"])
def test_json_that_is_no_such_file_is_refused(load, label, tmp_path):
  path = tmp_path / "forged.json"
  path.write_bytes(JSON[label] if label in JSON else json.dumps(CONFIG[label]).encode())
  function = {
    "BoostConfig.load": auto.BoostConfig.load,
    "auto_boost": lambda path: optax_boost.auto_boost("O1", path),
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


def load_subspace(path: pathlib.Path) -> Any:
  return optax_boost.load_subspace(path, like=problem.PARAMS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "subspace.npz"
  optax_boost.save_subspace(path, problem.subspace())
  return path


@pytest.mark.parametrize("kept", [0, 1, 0.1, 0.5, 0.9, -1])
def test_a_truncated_subspace_is_refused(kept, saved, tmp_path):
  data = saved.read_bytes()
  path = tmp_path / "truncated.npz"
  path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
  assert not refused(load_subspace, path)


@pytest.mark.parametrize(
  "label", ["text", "empty archive", "bare array", "other archive", "pickle"]
)
def test_a_file_of_another_kind_is_no_subspace(label, tmp_path):
  path = tmp_path / "foreign.npz"
  if label == "text":
    path.write_text("not a subspace")
  elif label == "empty archive":
    zipfile.ZipFile(path, "w").close()
  elif label == "other archive":
    np.savez(path, weights=np.ones(3))
  else:
    with open(path, "wb") as file:
      array = np.array([{}], object) if label == "pickle" else np.ones(3)
      np.save(file, array, allow_pickle=True)
  assert not refused(load_subspace, path)


def members(path: pathlib.Path) -> dict[str, bytes]:
  with zipfile.ZipFile(path) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


def npy(array: Any) -> bytes:
  file = io.BytesIO()
  np.save(file, array)
  return file.getvalue()


def header_of(shape: str) -> bytes:
  """A file of NumPy's that claims to hold an array of a shape, and holds nothing."""
  text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
  text = text.ljust(117) + "\n"
  return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize("label", ["1e15 entries", "changed", "nothing", "other meta", "encrypted"])
def test_a_forged_subspace_is_refused(label, saved, tmp_path):
  contents = members(saved)
  mean = next(name for name in contents if name.startswith("mean/"))
  if label == "1e15 entries":
    contents[mean] = header_of("(1000000000000000,)")
  elif label == "nothing":
    del contents[mean]
  elif label == "other meta":
    contents["meta_json.npy"] = npy(np.array("[" * 100_000))
  path = tmp_path / "forged.npz"
  with zipfile.ZipFile(path, "w") as archive:
    for name, data in contents.items():
      archive.writestr(name, data)
  if label == "changed":
    data = bytearray(path.read_bytes())
    data[data.index(contents[mean]) + len(contents[mean]) - 1] ^= 1
    path.write_bytes(data)
  elif label == "encrypted":
    # The bit that says so, in each header of the archive.
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
      place = data.find(signature)
      while place >= 0:
        data[place + offset] |= 1
        place = data.find(signature, place + 1)
    path.write_bytes(data)
  assert not refused(load_subspace, path)


def test_a_subspace_of_other_params_is_refused(saved):
  for like in (
    None,
    {"other": jnp.ones(2)},
    jax.tree.map(lambda p: jnp.ones(7), problem.PARAMS),
    {"conv": "a"},
  ):
    bad = Bad(like, (TypeError, ValueError), "like")
    found = refusals.complaint(lambda: optax_boost.load_subspace(saved, like), bad, "like")  # noqa: B023
    assert not found


@pytest.mark.parametrize("wrong", ["integers", "nan", "objects", "text", "other shape"])
def test_a_subspace_that_could_not_be_read_again_is_not_saved(wrong, tmp_path):
  good = problem.subspace()
  leaf = {
    "integers": jnp.ones((2, 3), int),
    "nan": jnp.full((2, 3), jnp.nan),
    "objects": np.array([[object()] * 3] * 2),
    "text": "a",
    "other shape": jnp.ones(5),
  }[wrong]
  bad = good._replace(mean={**good.mean, "conv": {"kernel": leaf}})
  path = tmp_path / "subspace.npz"
  found = refusals.complaint(
    lambda: optax_boost.save_subspace(path, bad), Bad(bad, (TypeError, ValueError), "subspace"), ""
  )
  assert not found
  assert not list(tmp_path.iterdir())

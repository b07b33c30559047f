"""Forged, truncated and foreign files: each is refused by its name."""

from collections.abc import Callable
import json
import pathlib
from typing import Any

import pytest

import optax_boost
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
def test_json_that_is_no_such_file_is_refused(label, tmp_path):
  path = tmp_path / "forged.json"
  path.write_bytes(JSON[label] if label in JSON else json.dumps(CONFIG[label]).encode())
  load = lambda path: optax_boost.auto_boost("O1", config=path)  # noqa: E731
  assert not refused(load, path, (TypeError, ValueError))

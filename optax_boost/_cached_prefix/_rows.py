"""Rows of bytes by the number of an example, in memory or in a folder of files."""

from collections.abc import Iterator
import contextlib
import gc
import json
import os
import pathlib
from typing import Any
import weakref

import numpy as np

from optax_boost import _base
from optax_boost import _files

_METHOD = "cache_prefix"
# The lock, the facts that the rows depend on, the rows, and the number of each row's example.
_LOCK, _HEADER, _ROWS, _EXAMPLES = "prefix.lock", "prefix.json", "rows.bin", "examples.bin"


class Rows:
  """So many rows as there is room for; the first to come stay.

  `facts` are what the rows depend on; those of a folder must be the same.
  """

  def __init__(
    self, examples: int, capacity: int, row_bytes: int, folder: str | None, facts: dict[str, Any]
  ):
    self.used = 0
    self._slots = np.full(examples, -1, np.int32)
    self._found = 0
    self._folder = None
    if folder is None:
      self._rows = np.empty((capacity, row_bytes), np.uint8)
    else:
      header = {"examples": examples, "capacity": capacity, "row_bytes": row_bytes, **facts}
      self._folder = _Folder(pathlib.Path(folder), header)
      self._rows = self._folder.rows
      self._name(self._folder.examples)
      self._found = self.used

  def has(self, examples: np.ndarray) -> bool:
    """Whether all of some examples have rows."""
    return bool(np.all(self._slots[examples] >= 0))

  def has_found(self, examples: np.ndarray) -> np.ndarray:
    """For each of some examples whether its row was in the folder when it was opened."""
    slots = self._slots[examples]
    return (slots >= 0) & (slots < self._found)

  def read(self, examples: np.ndarray) -> np.ndarray:
    """The rows of examples that have some."""
    return self._rows[self._slots[examples]]

  def add(self, examples: np.ndarray, rows: np.ndarray) -> None:
    """Gives rows to the examples that have none, while there is room."""
    numbers, places = np.unique(examples, return_index=True)
    new = np.flatnonzero(self._slots[numbers] < 0)[: len(self._rows) - self.used]
    if self._folder is None:
      self._rows[self.used : self.used + len(new)] = rows[places[new]]
    else:
      self._folder.write(self.used, numbers[new], rows[places[new]])
    self._name(numbers[new])

  def _name(self, examples: np.ndarray) -> None:
    """Makes the next rows those of some examples."""
    self._slots[examples] = np.arange(self.used, self.used + len(examples))
    self.used += len(examples)


class _Folder:
  """The files of a folder, locked until this object is gone.

  Rows are written by calls, and only read through a memory map: where the disk is full a call
  raises an error, and a write to a map ends the process.
  """

  def __init__(self, path: pathlib.Path, header: dict[str, Any]):
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
      # First, so that no other run writes the files while they are checked.
      opened.callback(os.close, _locked(path))
      if not (path / _HEADER).exists():
        _create(path, header)
      self.examples = _read_examples(path, header)
      shape = header["capacity"], header["row_bytes"]
      self.rows = np.memmap(path / _ROWS, np.uint8, "r", shape=shape)
      flags = os.O_WRONLY | getattr(os, "O_BINARY", 0)
      files = []
      for name in (_ROWS, _EXAMPLES):
        files.append(os.open(path / name, flags))
        opened.callback(os.close, files[-1])
      self._path, self._files = path, files
      weakref.finalize(self, opened.pop_all().close)

  def write(self, used: int, examples: np.ndarray, rows: np.ndarray) -> None:
    """Writes rows behind those that are used, then the numbers of their examples."""
    numbers = examples.astype(np.int64)
    with _naming(self._path, f"{rows.nbytes + numbers.nbytes} bytes for {len(rows)} examples"):
      # In this order: a process that ends in between leaves rows that no number names.
      for file, array in zip(self._files, (rows, numbers), strict=True):
        os.lseek(file, used * array[:1].nbytes, os.SEEK_SET)
        rest = np.ascontiguousarray(array).data.cast("B")
        while rest:
          rest = rest[os.write(file, rest) :]
        os.fsync(file)


def _locked(path: pathlib.Path) -> int:
  """The descriptor of a folder's lock, which is held until it is closed."""
  file = _files.lock(path / _LOCK)
  if file is None:
    # Of a cache that nothing refers to any more, but that is part of a cycle.
    gc.collect()
    file = _files.lock(path / _LOCK)
  if file is None:
    raise ValueError(
      f"`path` must be a folder of its own for each cache; '{path}' is in use by another run, or by"
      " a cache of this process. Wait for that run or delete that cache with its train step"
      " (`del cache, step`), or pass another `path`."
    )
  return file


@contextlib.contextmanager
def _naming(path: pathlib.Path, needed: str) -> Iterator[None]:
  """Errors of the block name the folder and the room that was needed."""
  try:
    yield
  except OSError as error:
    text = f"{error.strerror}: `{_METHOD}` needs {needed}; make room or pass another `path`"
    raise OSError(error.errno, text, str(path)) from error


def _create(path: pathlib.Path, header: dict[str, Any]) -> None:
  size = header["capacity"] * header["row_bytes"]
  with _naming(path, f"a file of {size} bytes"), open(path / _ROWS, "wb") as file:
    file.truncate(size)
  (path / _EXAMPLES).write_bytes(b"")
  # Last, so that a folder without it is one that was never finished.
  text = json.dumps(header).encode()
  _files.write_atomically(path / _HEADER, lambda file: file.write(text))


def _read_examples(path: pathlib.Path, header: dict[str, Any]) -> np.ndarray:
  """The numbers of the examples in a folder; refuses that of another prefix, or a damaged one."""
  found = _files.read_json("path", path / _HEADER)
  different = [
    key for key in header if not isinstance(found, dict) or found.get(key) != header[key]
  ]
  if different:
    raise ValueError(
      f"'{path}' holds activations of another prefix: {', '.join(different)} differ. Delete it,"
      " or pass another `path`."
    )
  try:
    size, expected = (path / _ROWS).stat().st_size, header["capacity"] * header["row_bytes"]
    if size != expected:
      raise ValueError(f"{_ROWS!r} has {size} bytes instead of {expected}")
    data = (path / _EXAMPLES).read_bytes()
    # A process that ended while it wrote may have left a part of a number.
    examples = np.frombuffer(data, np.int64, len(data) // 8)
    inside = np.all((examples >= 0) & (examples < header["examples"]))
    if not inside or not len(np.unique(examples)) == len(examples) <= header["capacity"]:
      raise ValueError(f"{_EXAMPLES!r} holds {_base.shorten(examples)}")
  except (FileNotFoundError, ValueError) as error:
    raise ValueError(
      f"`{_METHOD}` needs the whole files that it wrote; '{path}' is truncated, damaged or of"
      f" another kind: {error}. Delete it, or pass another `path`."
    ) from error
  return examples

"""Rows of bytes by the number of an example, in memory or in a folder of memory-mapped files."""

import json
import pathlib
from typing import Any

import numpy as np

from optax_boost import _files

_HEADER, _ROWS, _SLOTS = "prefix.json", "rows.bin", "slots.bin"


class Rows:
  """So many rows as there is room for; the first to come stay.

  Args:
    examples: how many there are.
    capacity: for how many of them there is room.
    row_bytes: the size of a row.
    folder: of the files, or None.
    facts: what the rows depend on; those of a folder must be the same.
  """

  def __init__(
    self, examples: int, capacity: int, row_bytes: int, folder: str | None, facts: dict[str, Any]
  ):
    if folder is None:
      self._rows = np.empty((capacity, row_bytes), np.uint8)
      self._slots = np.full(examples, -1, np.int32)
    else:
      header = {"examples": examples, "capacity": capacity, "row_bytes": row_bytes, **facts}
      mode = _open(pathlib.Path(folder), header)
      self._rows = np.memmap(f"{folder}/{_ROWS}", np.uint8, mode, shape=(capacity, row_bytes))
      self._slots = np.memmap(f"{folder}/{_SLOTS}", np.int32, mode, shape=(examples,))
      if mode == "w+":
        self._slots[:] = -1
        self._slots.flush()
        # Last, so that a folder without it is one that was never finished.
        text = json.dumps(header).encode()
        _files.write_atomically(f"{folder}/{_HEADER}", lambda file: file.write(text))
    self.used = int(np.sum(self._slots >= 0))

  def has(self, examples: np.ndarray) -> bool:
    """Whether all of some examples have rows."""
    return bool(np.all(self._slots[examples] >= 0))

  def read(self, examples: np.ndarray) -> np.ndarray:
    """The rows of examples that have some."""
    return self._rows[self._slots[examples]]

  def has_room_for(self, examples: np.ndarray) -> bool:
    """Whether at least one of some examples without a row can get one."""
    return self.used < len(self._rows) and not self.has(examples)

  def add(self, examples: np.ndarray, rows: np.ndarray) -> None:
    """Gives rows to the examples that have none, while there is room."""
    numbers, places = np.unique(examples, return_index=True)
    new = np.flatnonzero(self._slots[numbers] < 0)[: len(self._rows) - self.used]
    slots = np.arange(self.used, self.used + len(new))
    self._rows[slots] = rows[places[new]]
    self._flush(self._rows)
    # Only now: a process that ends in between leaves rows that nothing names.
    self._slots[numbers[new]] = slots
    self._flush(self._slots)
    self.used += len(new)

  def _flush(self, array: np.ndarray) -> None:
    if isinstance(array, np.memmap):
      array.flush()


def _open(folder: pathlib.Path, header: dict[str, Any]) -> Any:
  """The mode to open the files of a folder with: new ones, or those that are there."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / _HEADER
  if not path.exists():
    return "w+"
  found = _files.read_json("path", path)
  different = [
    key for key in header if not isinstance(found, dict) or found.get(key) != header[key]
  ]
  if different:
    raise ValueError(
      f"'{folder}' holds activations of another prefix: {', '.join(different)} differ. Delete it,"
      " or pass another `path`."
    )
  return "r+"

"""Pictures are written whole or not at all."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")


def check_writable(path: Path) -> None:
  """Makes sure that a picture can be written, and leaves no trace but the folder.

  Args:
    path: where it is to go.

  Raises:
    OSError: the folder can't be made or written to.
    ValueError: the name has no ending of a picture, or is something else than a file.
  """
  if path.suffix.lower() not in FORMATS:
    raise ValueError(f"--out {path} must end in {', '.join(FORMATS)}")
  if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
    raise ValueError(f"--out {path} exists and is not a file that can be overwritten")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except FileExistsError as error:
    raise ValueError(f"--out {path} can't be written: {path.parent} is not a folder") from error
  try:
    _temporary(path).touch()
  finally:
    _temporary(path).unlink(missing_ok=True)


def save(figure: "Figure", path: Path) -> None:
  """Writes a picture under a temporary name and renames it, so that `path` is whole or not there.

  Args:
    figure: the picture.
    path: where it goes.

  Raises:
    OSError: it can't be written.
  """
  try:
    figure.savefig(_temporary(path), format=path.suffix.lower().lstrip("."))
    os.replace(_temporary(path), os.path.realpath(path))
  finally:
    _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
  return path.with_name(f".{path.name}.{os.getpid()}.part")

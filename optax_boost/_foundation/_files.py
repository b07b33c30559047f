"""Atomic writing of files: a file is written whole or not at all."""

from collections.abc import Callable
import os
import pathlib
import secrets
from typing import BinaryIO


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
  """Writes a file under a temporary name in its folder, then renames the file to `path`.

  If `path` is a symbolic link, its target is replaced. An existing file keeps its permissions. If
  writing fails, the old file is unchanged, and an OSError names `path`.
  """
  target = pathlib.Path(os.path.realpath(path))
  # Not `tempfile.mkstemp`, which makes files that only their owner may read.
  temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
  try:
    with open(temporary, "xb") as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    if target.exists():
      os.chmod(temporary, target.stat().st_mode & 0o777)
    os.replace(temporary, target)
  except OSError as error:
    # `error` names the temporary file, or no file at all if the disk is full. So a new error is
    # raised, which names `path`.
    message = os.strerror(error.errno) if error.errno else f"can't be written: {error}"
    raise OSError(error.errno, message, os.fspath(path)) from error
  finally:
    temporary.unlink(missing_ok=True)

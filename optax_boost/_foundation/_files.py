"""Atomic writing of files: a file is written whole or not at all."""

from collections.abc import Callable
import os
import pathlib
import secrets
from typing import BinaryIO


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
  """Writes a file under a temporary name in its folder, then renames it to `path`.

  A symbolic link stays, and its target is replaced; permissions stay. An OSError names `path` and
  leaves the old file unchanged.
  """
  target = pathlib.Path(os.path.realpath(path))
  # `tempfile.mkstemp` would make a file that only its owner may read.
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
    # Errors name the temporary file; that of a full disk names none.
    message = os.strerror(error.errno) if error.errno else f"can't be written: {error}"
    raise OSError(error.errno, message, os.fspath(path)) from error
  finally:
    temporary.unlink(missing_ok=True)

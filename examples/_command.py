"""The command line of an example: a wrong argument is one line, Ctrl-C leaves nothing behind."""

import argparse
from collections.abc import Callable, Sequence
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING, NoReturn, TypeVar

import _pictures

if TYPE_CHECKING:
  from matplotlib.figure import Figure

INTERRUPTED = 130

Plan = TypeVar("Plan")


class _Parser(argparse.ArgumentParser):
  """Raises ValueError for a wrong argument."""

  def error(self, message: str) -> NoReturn:
    """Raises the message."""
    raise ValueError(message)


def parser(
  name: str,
  doc: str | None,
  formatter: type[argparse.HelpFormatter] = argparse.ArgumentDefaultsHelpFormatter,
  epilog: str | None = None,
) -> argparse.ArgumentParser:
  """A parser that raises ValueError for a wrong argument, and takes whole names alone.

  Args:
    name: of the example.
    doc: of its module; the first line describes it.
    formatter: of the help.
    epilog: the last part of the help.
  """
  return _Parser(
    prog=name,
    description=(doc or "").partition("\n")[0],
    epilog=epilog,
    formatter_class=formatter,
    allow_abbrev=False,
  )


def read(
  options: argparse.ArgumentParser, argv: Sequence[str] | None, out: str, **least: int
) -> argparse.Namespace:
  """Reads the options, and one more for the picture's path; checks path and whole numbers.

  Args:
    options: the parser of the example's own options.
    argv: the arguments; None: the process's.
    out: where the picture goes unless ``--out`` says it.
    **least: the least values by name, as for :func:`check_range`.

  Raises:
    ValueError: an argument is wrong.
    OSError: the picture can't be written.
  """
  options.add_argument("--out", type=Path, metavar="FILE", default=out, help="the picture")
  found = options.parse_args(argv)
  check_range(found, **least)
  _pictures.check_writable(found.out)
  return found


def check_range(options: argparse.Namespace, **least: int) -> None:
  """Checks whole numbers among the options: None, or from their least value to 2**31 - 1.

  Args:
    options: the parsed options.
    **least: the least value by name.

  Raises:
    ValueError: one is out of its range.
  """
  for name, low in least.items():
    value = getattr(options, name)
    if value is not None and not low <= value < 2**31:
      flag = "--" + name.replace("_", "-")
      raise ValueError(f"{flag} must be at least {low} and below 2**31; got {value}")


def interrupted(name: str) -> int:
  """Says that the example was interrupted; returns the exit status."""
  print(f"\n{name}: interrupted; no picture was written.", file=sys.stderr)
  return INTERRUPTED


def run(
  name: str,
  prepare: Callable[[Sequence[str] | None], Plan],
  work: Callable[[Plan], "tuple[Figure, Path]"],
  argv: Sequence[str] | None,
) -> int:
  """Prepares, works and saves the picture.

  Args:
    name: of the example.
    prepare: reads the command line and checks all of it, so that nothing fails after the work;
      raises ValueError or OSError.
    work: carries out the plan; returns the picture and its path.
    argv: the arguments; None: the process's.

  Returns:
    The exit status: 0, 2 after an error of the user's, 130 after Ctrl-C.
  """
  try:
    try:
      plan = prepare(argv)
    except (OSError, ValueError) as error:
      return _fail(name, error)
    figure, out = work(plan)
    try:
      _pictures.save(figure, out)
    except OSError as error:
      return _fail(name, error)
    print(f"\nThe picture is {out}")
  except KeyboardInterrupt:
    return interrupted(name)
  return 0


def end(status: int) -> NoReturn:
  """Ends the process."""
  if status == INTERRUPTED:
    # JAX that was interrupted while it compiled can crash when Python shuts down.
    sys.stdout.flush()
    os._exit(status)
  sys.exit(status)


def _fail(name: str, error: Exception) -> int:
  named = isinstance(error, OSError) and error.filename is not None
  cause = f"{error.filename}: {error.strerror}" if named else str(error)
  print(f"{name}: error: {' '.join(cause.split())}", file=sys.stderr)
  return 2

"""Figures of the house, which `make house` prints: a report, for no figure is a goal."""

import ast
from collections.abc import Iterator
import importlib
import io
import pathlib
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_boost"
_NOTHING = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENCODING,
  tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def sources(folder: pathlib.Path) -> dict[pathlib.Path, str]:
  """The Python files below a folder, by path."""
  return {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def lines(folder: pathlib.Path) -> int:
  """All lines of a folder's Python files."""
  return sum(text.count("\n") for text in sources(folder).values())


def code_lines(text: str) -> int:
  """A file's lines without docstrings, comments, imports and blank lines."""
  tree = ast.parse(text)
  left_out: set[int] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      left_out |= set(range(node.lineno, node.end_lineno + 1))
    elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
      left_out |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  numbers: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type not in _NOTHING:
      numbers |= set(range(token.start[0], token.end[0] + 1))
  return len(numbers - left_out)


def long_functions(folder: pathlib.Path, limit: int = 80) -> Iterator[str]:
  """The functions of more lines than `limit`, docstrings not counted."""
  for path, text in sources(folder).items():
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, _FUNCTIONS):
        first = node.body[0]
        documented = ast.get_docstring(node) is not None
        docstring = first.end_lineno - first.lineno + 1 if documented else 0
        length = node.end_lineno - node.lineno + 1 - docstring
        if length > limit:
          yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}"


def public_names() -> list[str]:
  """The names that the package and its public subpackages export, each object once."""
  found: dict[int, str] = {}
  for part in ("", ".nnx", ".linen"):
    module = importlib.import_module(f"optax_boost{part}")
    for name in getattr(module, "__all__", ()):
      found.setdefault(id(getattr(module, name)), f"optax_boost{part}.{name}")
  return sorted(found.values())


def figures() -> dict[str, int]:
  """All figures that need no run of the suite."""
  return {
    "lines in optax_boost": lines(PACKAGE),
    "lines of code in optax_boost": sum(map(code_lines, sources(PACKAGE).values())),
    "public names": len(public_names()),
    "functions over 80 lines": len(list(long_functions(PACKAGE))),
    "lines in tests": lines(ROOT / "tests"),
  }


def rooms() -> dict[str, int]:
  """The lines of each file and folder at the package's top."""
  entries = (entry for entry in sorted(PACKAGE.iterdir()) if entry.name != "__pycache__")
  return {
    entry.name: lines(entry) if entry.is_dir() else entry.read_text(encoding="utf-8").count("\n")
    for entry in entries
  }


if __name__ == "__main__":
  for name, number in (figures() | rooms()).items():
    print(f"{number:7,}  {name}")
  print(*long_functions(PACKAGE), sep="\n")

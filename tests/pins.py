"""Renews tests/tools.txt, the pins of the linter and the type checker: `make pins`."""

import json
import pathlib
import subprocess
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
PYPROJECT = HERE.parent / "pyproject.toml"
# Programs, with what they need to run.
PROGRAMS = ("mypy", "ruff")
# Packages that ship types, which mypy reads and nobody imports.
TYPED = ("flax", "jax", "numpy")
HEADER = """\
# The linter, the type checker, and the packages whose types it reads. Written by `make pins`.
"""


def newest(*arguments: str, python: str) -> dict[str, str]:
  """The newest versions, by name, of packages that have wheels for a version of Python."""
  command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
  command += ["--only-binary", ":all:", "--python-version", python, "--target", "unused"]
  result = subprocess.run([*command, "--report", "-", *arguments], stdout=-1, check=True)
  packages = [install["metadata"] for install in json.loads(result.stdout)["install"]]
  return {package["name"]: package["version"] for package in packages}


def main() -> None:
  """Pins what the oldest supported Python can install, which newer ones can install, too."""
  pyproject = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
  python = pyproject["project"]["requires-python"].removeprefix(">=")
  pins = newest(*PROGRAMS, python=python) | newest("--no-deps", *TYPED, python=python)
  lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
  (HERE / "tools.txt").write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
  main()

"""The linter and the type checker are pinned in one file, whatever a user's pip would install."""

import pathlib
import re
import tomllib

from tests import pins

ROOT = pathlib.Path(__file__).parents[2]
PINNED = (ROOT / "tests" / "tools.txt").read_text(encoding="utf-8").splitlines()


def test_every_tool_and_every_package_with_types_has_one_exact_version():
  versions = [line for line in PINNED if not line.startswith("#")]
  assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in versions), versions
  names = [line.partition("==")[0] for line in versions]
  assert len(set(names)) == len(names)
  assert {*pins.PROGRAMS, *pins.TYPED} <= set(names)


def test_no_extra_names_a_pinned_tool():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  for name, extra in project["optional-dependencies"].items():
    tools = [line for line in extra if re.match(r"[\w-]+", line)[0] in pins.PROGRAMS]
    assert not tools, f"{name}: pin {tools} in tests/tools.txt alone"


def test_make_pins_writes_the_newest_versions_for_the_oldest_python(monkeypatch, tmp_path):
  def newest(*arguments, python):
    assert python == "3.11"
    return {"jax": "9.1"} if "--no-deps" in arguments else {"ruff": "9.3", "mypy": "9.2"}

  monkeypatch.setattr(pins, "newest", newest)
  monkeypatch.setattr(pins, "HERE", tmp_path)
  pins.main()
  written = (tmp_path / "tools.txt").read_text(encoding="utf-8")
  assert written == pins.HEADER + "jax==9.1\nmypy==9.2\nruff==9.3\n"

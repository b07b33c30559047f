"""Benchmarks and examples check their arguments before they measure, train or draw."""

import pytest


@pytest.mark.parametrize("module", ["benchmarks.__main__", "benchmarks.races", "tune"])
def test_help_and_unknown_options_start_nothing(import_example, module):
  for argument, status in (("--help", 0), ("--misspelt", 2)):
    with pytest.raises(SystemExit) as ended:
      import_example(module).main([argument])
    assert ended.value.code == status


@pytest.mark.parametrize(
  ("module", "arguments", "message"),
  [
    ("benchmarks.races", ["svrg", "svgr"], "unknown race 'svgr'; choose from large_batches, "),
    ("tune", ["lars", "lasr"], "unknown method 'lasr'; choose from "),
    ("adasum_processes", [], "--launch, --devices, or --coordinator, --processes and --process"),
    ("adasum_processes", ["--launch", "0"], "--launch must be at least 1; got 0"),
    ("adasum_processes", ["--devices", "1", "--every", "0"], "--every must be at least 1; got 0"),
    ("adasum_processes", ["--launch", "2", "--steps", "0"], "--steps must be at least 1; got 0"),
    ("adasum_processes", ["--launch", "2", "--pause", "-1"], "must be at least 0"),
    (
      "adasum_processes",
      ["--coordinator", "localhost:1", "--processes", "2", "--process", "2"],
      "--process must be from 0 to 1; got 2",
    ),
  ],
)
def test_a_wrong_argument_is_named(import_example, capsys, module, arguments, message):
  with pytest.raises(SystemExit):
    import_example(module).main(arguments)
  assert message in capsys.readouterr().err


def test_a_race_writes_into_the_folder_that_is_given(import_example, monkeypatch, tmp_path):
  races = import_example("benchmarks.races")

  class Result:
    def table(self):
      return "| method |"

  race = races.Race(lambda: {"One": Result()}, draw=None)
  monkeypatch.setattr(races, "RACES", {"one": race})
  races.main(["--rounds", "3", "--out", str(tmp_path / "new"), "one"])
  assert "## One\n\n| method |" in (tmp_path / "new" / "races.md").read_text(encoding="utf-8")

"""The AutoBoost example runs its levels and prints its table."""

import re

import pytest


@pytest.fixture(scope="module")
def example(import_example):
  return import_example("auto_boost_resnet")


@pytest.mark.slow
def test_the_example_prints_its_settings_and_a_comparison(example, capsys, tmp_path):
  config = tmp_path / "two_groups.json"
  config.write_text(
    '{"grad_freeze": {"param_groups": 2}, "less_bn": {"fn_flag": true}}', encoding="utf-8"
  )
  out = tmp_path / "levels.png"
  options = ["--config", str(config), "--epochs", "4", "--seeds", "1", "--out", str(out)]
  example.main(["--levels", "O0", "O1", *options])
  assert out.read_bytes().startswith(b"\x89PNG")
  printed = capsys.readouterr().out
  assert "6 of 13 BatchNorms removed, head normalized" in printed
  rows = re.findall(r"^(O\d) +(\d+\.\d) \+- .*% +(\d+\.\d+) +(\d\.\d+)$", printed, re.MULTILINE)
  assert [row[0] for row in rows] == ["O0", "O1"]
  assert all(float(row[1]) > 30 for row in rows), "nothing was learned"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--levels", "O7"], "There is no level 'O7'"),
    (["--levels", "O1", "--config", "nowhere.json"], "nowhere.json"),
    (["--seeds", "0"], "must be at least 1"),
    (["--out", "levels.txt"], "levels.txt"),
  ],
)
def test_the_example_refuses_bad_arguments(example, capsys, arguments, message):
  with pytest.raises(SystemExit):
    example.main(arguments)
  assert message in capsys.readouterr().err

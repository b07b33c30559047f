"""`make devices`: cases of public methods, figures read rightly, bounds that can break."""

import importlib
import importlib.util
import os
import sys

from benchmarks.devices import bounds, cases, chips, programs
from tests.contract import registry

PROGRAM = """\
HloModule jit_step

%body (p: f32[8]) -> f32[8] {
  %inner = f32[8]{0} fusion(%p), kind=kLoop
  %permuted = bf16[4,2]{1,0} collective-permute(%inner), channel_id=1
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %a = f32[8]{0} fusion(%p0), kind=kLoop, calls=%fused
  %sum = (f32[3]{0}, f32[]) all-reduce-start(%a, %b), channel_id=2
  %loop = (f32[8]{0}) while(%a), condition=%c, body=%body
  %copy.1 = f32[8]{0} copy(%a)
}
"""


class Compiled:
  def as_text(self) -> str:
    return PROGRAM

  def cost_analysis(self):
    return {"bytes accessed": 64.0}

  def memory_analysis(self):
    class Memory:
      temp_size_in_bytes = 32

    return Memory


def test_every_case_uses_a_public_factory_or_optax():
  assert {case.factory for case in cases.CASES.values()} <= registry.public_factories() | {""}


def test_kernels_loops_and_collectives_are_counted():
  assert programs.read(Compiled()) == {
    "kernels": 2,
    "loops": 1,
    "collectives": {"collective-permute": 1, "all-reduce": 1},
    "collective bytes": 16 + 16,
    "temporary bytes": 32,
    "bytes accessed": 64.0,
    "HBM bytes": 32 + 3 * 32 + (16 + 32) + 32,
  }


def test_broken_bounds_are_named_also_per_leaf_and_in_parts_of_another_case(monkeypatch):
  limits = (
    ("h100", "replicated", "lars", "kernels", 1),
    ("h100", "replicated", "svrg", "loops", 0),
    ("h100", "replicated", "lars", "kernels / leaves", 0.05),
    ("h100", "replicated", "lars", "kernels / centralize", 0.5),
    ("h100", "replicated", "lars", "kernels / centralize", 1),
    ("h100", "replicated", "lars", "kernels / adasum", 0),
  )
  monkeypatch.setattr(bounds, "BOUNDS", limits)
  record = programs.read(Compiled())
  case_records = {"lars": record, "centralize": record, "svrg": {"error": "late"}}
  assert bounds.broken({"h100": {"replicated": case_records}}) == [
    "lars on h100, params replicated: kernels 2, at most 1",
    "svrg on h100, params replicated: loops late, at most 0",
    "lars on h100, params replicated: kernels / leaves 0.1, at most 0.05",
    "lars on h100, params replicated: kernels / centralize 1.0, at most 0.5",
  ]
  assert bounds.broken({}) == []


def test_bounds_name_measured_figures_only():
  for chip, layout, case, _, _ in bounds.BOUNDS:
    assert layout in chips.layouts(chips.CHIPS[chip])
    assert case in cases.CASES
    assert cases.CASES[case].is_for(chip, layout)


def test_an_error_without_the_compilers_names_the_packages_to_install(
  monkeypatch, capsys, tmp_path
):
  find_spec, compilers = importlib.util.find_spec, ("jax_cuda12_plugin", "libtpu")

  def without_compilers(name, *of):
    return None if name in compilers else find_spec(name, *of)

  monkeypatch.setattr(importlib.util, "find_spec", without_compilers)
  # The command sets its environment as it is imported, which ends with this test.
  monkeypatch.setattr(os, "environ", os.environ.copy())
  monkeypatch.setattr(sys, "argv", ["devices", "--out", str(tmp_path), "lars"])
  assert importlib.import_module("benchmarks.devices.__main__").main() == 0
  printed = capsys.readouterr().out
  assert "H100: left out; it needs `pip install jax-cuda12-plugin" in printed
  assert "TPU v5e 2x4: left out; it needs `pip install libtpu`" in printed
  assert not list(tmp_path.iterdir())

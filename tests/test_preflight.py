"""What a TPU would do, asked of its compiler."""

import dataclasses
import json
import sys

import jax
import pytest
from numpy.testing import assert_allclose

import train
from config import PRESETS
from runtime import preflight
from runtime.errors import UserError

FOUR = dataclasses.replace(PRESETS["stories"], batch=32, mesh="4", optimizer="adamw", preflight="v5e:2x2")


@pytest.fixture(scope="module")
def four(cache):
    return dataclasses.replace(FOUR, cache=cache)


@pytest.fixture(scope="module")
def found(four):
    yield preflight.inspect(preflight.Plan(four, train.build))
    jax.config.update("jax_enable_compilation_cache", True)  # for the tests of other modules


def test_layers_in_a_loop_are_counted_as_often_as_they_run(found, four):
    """Counted by the difference of two builds, a step has the operations of one with its layers unrolled."""
    _, unrolled = preflight.compiled(preflight.Plan(four, train.build).step(unroll_layers=4))
    assert_allclose(found["kernel_flops"], unrolled["kernel flops"])
    # Except for the second layer of the encoder, which is still in a loop here.
    assert_allclose(found["flops"], unrolled["flops"] + unrolled["kernel flops"], rtol=0.04)


def test_the_report_has_every_number(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "inspect", lambda plan: found)
    words = ["--mesh", "4", "--preflight", "v5e:2x2", "--preflight-json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train.main()
    assert json.loads((tmp_path / "found.json").read_text()) == found
    for key in (
        "hbm_state_bytes",
        "hbm_temp_bytes",
        "flops",
        "bytes_accessed",
        "predicted_seconds",
        "compile_seconds",
    ):
        assert found[key] > 0
    assert 0 < found["mfu"] < 1 and found["hbm_limit_bytes"] == 16e9 and found["fits"]
    assert found["owt_epoch_hours"] == pytest.approx(found["predicted_seconds"] * 19_017 * 512 / 32 / 3600)
    kinds = {each["kind"]: each for each in found["collectives"]}
    assert kinds and all(each["count"] > 0 and each["bytes"] > 0 for each in kinds.values())
    said = capsys.readouterr().out
    for words in ("v5e:2x2, per chip", "fits", "predicted", "an epoch", "in kernels"):
        assert words in said


def test_collectives_and_kernels_are_read_from_the_program():
    operands = "s8[1,3,3]{2,1,0}, bf16[8,12,1152,64]{3,2,1,0}, bf16[8,12,1152,64]{3,2,1,0}"
    hlo = f"""HloModule step
%body (p: f32[8]) -> f32[8] {{
  %gather = f32[1024]{{0}} all-gather(%p), dimensions={{0}}
  %sums = (f32[4]{{0}}, f32[12]{{0}}) all-reduce(%p, %q), to_apply=%sum
  %splash_mha_fwd.2 = bf16[8,12,1152,64]{{3,2,1,0}} custom-call(%q, %k), \
custom_call_target="tpu_custom_call", operand_layout_constraints={{{operands}}}, metadata={{}}
}}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %start = (bf16[8]{{0}}, bf16[64]{{0}}) all-gather-start(%loop), dimensions={{0}}
  %done = bf16[64]{{0}} all-gather-done(%start)
}}
"""
    found = preflight.read_hlo(hlo)
    assert (found["all-gather count"], found["all-gather bytes"]) == (2, 4096 + 128)
    assert (found["all-reduce count"], found["all-reduce bytes"]) == (1, 64)
    assert found["kernel flops"] == 4 * 8 * 12 * 1152**2 * 64
    assert found["kernel bytes"] == 9 + 3 * 8 * 12 * 1152 * 64 * 2


@pytest.mark.parametrize("name", ["h100", "v9:2x2", "v5p:3x3x3", "v5p"])
def test_an_unknown_tpu_is_refused_with_the_known_ones(name):
    with pytest.raises(UserError, match=r"choose v5e:4x4, v5p:4x4x4, v6e:4x4"):
        preflight.topology(name)


def test_a_mesh_that_leaves_chips_idle_is_refused():
    with pytest.raises(UserError, match=r"--mesh 2 needs 2 devices and there are 4 \(tpu\): use --mesh 4"):
        preflight.inspect(preflight.Plan(dataclasses.replace(FOUR, mesh="2"), train.build))

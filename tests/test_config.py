"""What a command stands for, and how a bad one is refused."""

import dataclasses
import sys
from pathlib import Path

import pytest

import elf
import train
from config import OWT_EPOCHS, PRESETS, parse
from report import paper
from runtime import files


def test_paper_sizes_bring_the_settings_of_table_7():
    b, m, large = (parse(["--model", size], "") for size in ("elf-b", "elf-m", "elf-l"))
    assert b.data == "owt" and b.encoder == "t5-small"
    assert (b.length, b.bottleneck, b.batch, b.optimizer, b.learning_rate) == (1024, 128, 512, "muon", 0.002)
    assert (b.t_mean, b.t_std, b.noise_scale, b.p_mean, b.p_std, b.decode_noise_scale) == (
        -1.5,
        0.8,
        2.0,
        0.8,
        0.8,
        5.0,
    )
    assert (b.p_decode, b.p_self_cond, b.w_min, b.w_max, b.gamma) == (0.2, 0.5, 0.5, 5.0, 1.0)
    assert (b.ema, b.clip, b.schedule) == (0.9999, 1.0, "constant")
    assert [c.steps / 19_017 for c in (b, m, large)] == [5, 4, 3]
    assert round(b.warmup_steps / 19_017, 2) == 0.5
    assert parse(["--model", "elf-b", "--learning-rate", "0.1"], "").learning_rate == 0.1
    same = {k: v for k, v in paper.HYPERPARAMETERS.items() if hasattr(b, k) and isinstance(v, int | float)}
    assert len(same) > 15 and {k: getattr(b, k) for k in same} == same
    for name, (depth, width, heads, _, epochs) in paper.SIZES.items():
        assert elf.SIZES[name] == dict(depth=depth, width=width, heads=heads) and OWT_EPOCHS[name] == epochs


@pytest.mark.parametrize(
    "name, epoch, length, source", [("de-en", 8_806, 128, 64), ("xsum", 398, 1088, 1024)]
)
def test_conditional_presets_are_the_papers(name, epoch, length, source):
    for c in (parse(["--model", "elf-b", "--data", name + kind], "") for kind in ("", "-t5")):
        assert (c.steps, c.warmup_steps, c.batch, c.learning_rate, c.schedule) == (
            100 * epoch,
            5_000,
            512,
            0.002,
            "constant",
        )
        assert (c.length, c.source_length, c.noise_scale, c.decode_noise_scale, c.p_drop) == (
            length,
            source,
            2.0,
            1.0,
            0.1,
        )
        assert (c.sample_steps, c.w, c.cfg, c.gamma, c.encoder, c.ema) == (
            64,
            1.0,
            2.0,
            0.0,
            "t5-small",
            0.9999,
        )


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--model", "elf-x"], "--model elf-x: unknown; choose elf-b, elf-m, elf-l"),
        (["--data", "novels"], "--data novels: no such file or directory, nor one of stories"),
        (["--mesh", "16"], "--mesh 16 needs 16 devices and there are 8 (cpu)"),
        (["--mesh", "two"], "--mesh two: give one number"),
        (["--mesh", "8", "--batch", "12"], "--batch 12: not a multiple of the 8 devices"),
        (["--accumulate", "3"], "--accumulate 3: does not divide --batch 32"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", "200000"], "--batch 200000: the corpus has only 10000 rows"),
        (["--p-decode", "1.5"], "--p-decode 1.5: must be between 0 and 1"),
        (["--warmup-steps", "9999"], "--warmup-steps 9999: must be below --steps 2000"),
        (["--learning-rate", "-1"], "--learning-rate -1.0: must be above 0"),
        (["--gamma", "-1"], "--gamma -1.0: must be at least 0"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--process-id", "9"], "--process-id 9: must be below --processes 1"),
        (["--processes", "2"], "--processes 2: needs a --coordinator"),
        (["--runs", "/proc/elf"], "/proc/elf/stories-desk: cannot write there"),
        (["--name", "/tmp/run"], "--name /tmp/run: give a name inside --runs"),
        (["--w-min", "0"], "--w-min 0.0 --w-max 5.0: must be above 0"),
        (["--cache", "/proc/elf"], "--cache /proc/elf: data could not be prepared there"),
        (
            ["--data", "xsum", "--encoder", "nowhere"],
            "--data xsum, which is EdinburghNLP/xsum: no such directory, and",
        ),
        (["--encoder", "nowhere"], "--encoder nowhere: no such directory, and"),
        (["--encoder", "./nowhere"], "--encoder ./nowhere: no such directory; give one with config.json"),
        (["--data", "xsum", "--data-dir", "nowhere"], "--data-dir nowhere: no such directory or file"),
        (["--length", "8"], "do not fit into rows of 8: raise --length"),
        (["--decoder", "separate", "--embeddings", "gaussian"], "--decoder separate: mirrors an encoder"),
        (["--decoder", "separate", "--p-decode", "0.1"], "--p-decode 0.1: must be 0 with --decoder separate"),
        (["--p-decode", "0"], "--p-decode 0.0: must be above 0 and below 1"),
        (
            ["--embeddings", "learned", "--data", "translate"],
            "--embeddings learned: not for data with sources",
        ),
        (["--encoder", "scratch-wide"], "--encoder scratch-wide: give scratch, scratch-256"),
        (["--wandb", "project"], "pip install wandb"),
        (["--tensorboard"], "pip install tensorboardX"),
    ],
)
def test_bad_input_gets_one_line_and_a_failing_exit(flags, complaint, tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--runs", str(tmp_path), "--cache", str(cache), *flags])
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # set, so that main() does not restart
    with pytest.raises(SystemExit) as exit:
        train.main()
    message = str(exit.value.code)
    assert message.startswith("error: ") and complaint in message and "\n" not in message
    for directory in list(files.LOCKS):
        files.remove_if_empty(directory)  # as at the end of the program
    assert not list(tmp_path.iterdir())


def test_averages_are_never_longer_than_training():
    """Presets use their decay. Shorter runs do not average their first weights; students do."""
    assert all(preset.ema_decay == preset.ema for preset in PRESETS.values())
    cut = dataclasses.replace(PRESETS["xsum"], steps=398)
    assert cut.ema_decay**cut.steps < 1e-4
    assert dataclasses.replace(cut, steps=5).ema_decay == 0
    student = dataclasses.replace(PRESETS["stories"], teacher="a run", steps=100)
    assert (
        0.1 < student.ema_decay**student.steps < 0.2
    )  # in the paper, 19,017 steps leave 0.15 of what a round begins with


def test_an_unknown_flag_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--learning-rats", "1"])
    with pytest.raises(SystemExit) as exit:
        train.main()
    assert exit.value.code not in (0, None) and "learning-rat" in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_chosen_preset(monkeypatch, capsys):
    for flags, shown in [(["--model", "elf-b"], "default: 1024"), ([], "default: 30")]:
        with pytest.raises(SystemExit):
            parse([*flags, "--help"], "")
        assert shown in capsys.readouterr().out


def test_fewer_steps_have_less_warm_up():
    warmups = [
        parse(flags.split(), "").warmup_steps for flags in ("", "--steps 50", "--steps 50 --warmup-steps 9")
    ]
    assert warmups == [100, 5, 9]
    assert parse(["--model", "elf-l"], "").warmup_steps == 9_508  # which is more than a tenth of its 3 epochs


def test_paths_are_relative_to_where_one_is():
    assert (
        not PRESETS["stories"].directory.is_absolute()
        and Path("runs") in PRESETS["stories"].directory.parents
    )

"""The settings of a run: every one a flag, with the paper's values as defaults, and presets for a choice of model and data."""

import argparse
import dataclasses
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from elf import SIZES
from errors import Refused


@dataclass(frozen=True)
class TrainConfig:
    model: str
    """Size of the network: elf-b, elf-m, elf-l, or a desk size for CPU (desk-m, desk, tiny)."""
    data: str
    """Texts: stories, translate, summarize (embedded); owt, de-en, xsum (hub; -t5: as released); or file, directory, hub name."""
    data_dir: str = ""
    """Local directory (or file) with the texts of owt, de-en or xsum, where the hub cannot be reached."""
    name: str = ""
    """Name of the run, which lives in <runs>/<name>; by default data-model."""
    runs: Path = Path("runs")
    """Directory of all runs."""
    cache: Path = Path("cache")
    """Directory of prepared data and encoders, shared by all runs."""

    encoder: str = "t5-small"
    """Frozen encoder of the clean embeddings: a T5 by name or directory. Or one that is trained first: scratch is a small one,
    scratch-256 one of that width, scratch-t5-small one of T5-small's shape."""
    encoder_steps: int = 5 * 19_017
    """Optimizer steps of an encoder from scratch."""
    encoder_learning_rate: float = 1e-3
    """Its peak learning rate."""
    tokenizer: str = ""
    """Tokenizer, by name or directory, if not the encoder's own."""
    length: int = 1024
    """Tokens per row."""
    source_length: int = 0
    """Of them, the most that the source of a text may take, where the data has sources."""
    pack: bool = True
    """Fill every row with texts end to end; otherwise one text a row. Rows with a source are never packed."""
    embeddings: Literal["encoder", "table", "gaussian", "learned"] = "encoder"
    """Clean embeddings: the encoder's; those of its table alone; of a random table as large; or of one that ELF learns itself."""

    bottleneck: int = 128
    """Width of the bottleneck between embeddings and network; 0 for none. The paper compares 32, 128 and 512."""
    prediction: Literal["x", "v", "eps"] = "x"
    """What the network predicts: clean embeddings, velocity, or noise."""
    conditioning: Literal["tokens", "adaln-zero"] = "tokens"
    """How it is told time, guidance scale and mode: by control tokens, or by modulation of every layer."""
    decoder: Literal["shared", "separate"] = "shared"
    """What turns embeddings into tokens: the network itself, or a mirror of the encoder, trained before it."""
    decoder_steps: int = 3 * 19_017
    """Optimizer steps of a separate decoder."""
    decoder_learning_rate: float = 3e-4
    """Its peak learning rate, for AdamW."""

    steps: int = 5 * 19_017
    """Optimizer steps."""
    batch: int = 512
    """Rows per step, over all devices."""
    accumulate: int = 1
    """Parts a batch is worked through in, one after the other, to save memory."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices and Adam for the rest, or AdamW (0.9, 0.95) for all."""
    learning_rate: float = 0.002
    """Peak learning rate; if none is given, AdamW has a twentieth of Muon's, as in the paper."""
    warmup_steps: int = 9_508
    """Steps of linear warm-up from zero; in the paper, half an epoch of OpenWebText."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    ema: float = 0.9999
    """Decay of the averaged weights, which are the ones sampled from; less where training is shorter than what is averaged."""

    times: Literal["logit-normal", "uniform"] = "logit-normal"
    """Distribution of the time of a denoised row."""
    t_mean: float = -1.5
    """Mean of the logit-normal time of a denoised row, and of the sampling grid."""
    t_std: float = 0.8
    """Standard deviation of the same."""
    noise_scale: float = 2.0
    """Scale of the noise that denoised rows start from."""
    p_mean: float = 0.8
    """Mean of the logit-normal corruption level of a token in decoded rows."""
    p_std: float = 0.8
    """Standard deviation of the same."""
    decode_noise_scale: float = 5.0
    """Scale of the noise in decoded rows, and of that which a separate decoder learns from; the paper uses 5 on OpenWebText and
    1 on conditional tasks."""
    p_decode: float = 0.2
    """Share of rows that train the decoder (cross-entropy) rather than the denoiser (velocity error)."""
    p_self_cond: float = 0.5
    """Share of denoised rows that see their own first prediction."""
    w_min: float = 0.5
    """Smallest guidance scale trained on."""
    w_max: float = 5.0
    """Largest guidance scale trained on."""
    p_drop: float = 0.1
    """Share of rows that lose their condition, where the data has one."""

    sample_steps: int = 64
    """Steps of the sampler behind the samples shown."""
    w: float = 1.0
    """Self-conditioning guidance scale of these samples."""
    cfg: float = 2.0
    """Guidance scale of their condition, where the data has one."""
    gamma: float = 1.0
    """Noise re-injected by their sampler; 0 is the ODE."""
    grid: Literal["logit-normal", "uniform"] = "logit-normal"
    """Times of its steps."""
    num_samples: int = 1000
    """Texts sampled and scored at the end; 0 for none."""

    mesh: str = "1"
    """Devices: 64 is 64 data shards, 16x4 is 16 data shards with the weights of each split over 4."""
    coordinator: str = ""
    """Address (host:port) of process 0, where JAX cannot find the processes of a run by itself."""
    processes: int = 1
    """Number of processes, if a coordinator is given."""
    process_id: int = 0
    """Which of them this is."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of training; auto is bfloat16 on TPU and GPU and float32 on CPU. State and sampling are always float32."""
    remat: bool = False
    """Recompute activations in the backward pass to save memory."""
    seed: int = 0
    """All randomness of the run follows from it, but for that of a scratch encoder, which all seeds share."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    sample_every: int = 5_000
    """Steps between samples shown while training; 0 for none."""
    save_every: int = 1_000
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    preflight: str = ""
    """Do not train: compile the step for a TPU that need not be there, as v5p:4x4x4, and say what it would cost."""
    preflight_json: Path | None = None
    """File for the numbers of that."""
    wandb: str = ""
    """Weights & Biases project to log to (pip install wandb)."""
    tensorboard: bool = False
    """Also log for TensorBoard (pip install tensorboardX)."""

    teacher: tyro.conf.Suppress[str] = ""
    """What distill.py, which sets these, distilled: a run or released checkpoint."""
    teacher_steps: tyro.conf.Suppress[int | None] = None
    """Its steps,"""
    student_steps: tyro.conf.Suppress[int | None] = None
    """those of the student,"""
    start_steps: tyro.conf.Suppress[int | None] = None
    """and those of the student that it began as, in the directory beside it; none if it began as the teacher."""
    weights: tyro.conf.Suppress[str] = ""
    """What tells the weights of the teacher, and of what the student began as, from others."""

    @property
    def directory(self) -> Path:
        return self.runs / (self.name or f"{Path(self.data).stem}-{self.model}")

    @property
    def ema_decay(self) -> float:
        """An average over more steps than there are would be of what training began with: then it is over a tenth of them, or
        over half in distillation, which begins with trained weights."""
        return self.ema if self.steps * (1 - self.ema) > 1 else max(0.0, 1 - (2 if self.teacher else 10) / self.steps)

    def as_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def config_from(values: dict[str, Any]) -> TrainConfig:
    """The configuration that `as_json` wrote."""
    paths = {f.name for f in dataclasses.fields(TrainConfig) if f.type is Path}
    return TrainConfig(**{k: Path(v) if k in paths else v for k, v in values.items()})


# Fields that may change when a run is continued: they do not change what is computed.
FREE = {"data_dir", "name", "runs", "cache", "mesh", "coordinator", "processes", "process_id", "remat"}
FREE |= {"num_samples", "sample_steps", "w"}
FREE |= {"cfg", "gamma", "grid", "preflight", "preflight_json", "log_every", "sample_every", "save_every", "keep"}
FREE |= {"wandb", "tensorboard", "decoder_steps", "decoder_learning_rate"}  # of the last two, the decoder's own run tells

OWT_ROWS = 19_017 * 512
OWT_EPOCHS = {"elf-b": 5, "elf-m": 4, "elf-l": 3}
OWT = TrainConfig(model="elf-b", data="owt")
# Translation and summarization, with the sampler of the paper's Table 1.
CONDITIONAL = replace(OWT, pack=False, decode_noise_scale=1.0, warmup_steps=5_000, gamma=0.0, num_samples=100_000)


def for_epochs(epoch: int) -> dict[str, int]:
    """Steps of all that is trained, from those of an epoch."""
    return dict(steps=100 * epoch, encoder_steps=5 * epoch, decoder_steps=3 * epoch)


DE_EN = replace(CONDITIONAL, data="de-en", length=128, source_length=64, **for_epochs(8_806))
XSUM = replace(CONDITIONAL, data="xsum", length=1024 + 64, source_length=1024, **for_epochs(398))
# What runs on the cores of a desk, in minutes.
STORIES = TrainConfig(
    model="desk",
    data="stories",
    encoder="scratch",
    encoder_steps=2_000,
    encoder_learning_rate=0.01,
    length=30,
    pack=False,
    steps=2_000,
    batch=32,
    learning_rate=0.01,
    warmup_steps=100,
    schedule="cosine",
    ema=0.995,
    noise_scale=1.0,
    decode_noise_scale=1.0,
    decoder_steps=1_000,
    decoder_learning_rate=3e-3,
    num_samples=256,
    log_every=20,
    sample_every=400,
    save_every=400,
)
# With much noise, little can be guessed from it and all has to be learned from the source.
TRANSLATE = replace(
    STORIES,
    data="translate",
    encoder_steps=1_000,
    encoder_learning_rate=0.003,
    length=38,
    source_length=20,
    steps=3_200,
    learning_rate=0.004,
    noise_scale=4.0,
    gamma=0.0,
)
SUMMARIZE = replace(TRANSLATE, data="summarize", length=58, source_length=43, steps=2_000)
PRESETS = {preset.data: preset for preset in (OWT, DE_EN, XSUM, STORIES, TRANSLATE, SUMMARIZE)}
PRESETS |= {f"{name}-t5": replace(PRESETS[name], data=f"{name}-t5") for name in ("owt", "de-en", "xsum")}
# Texts of one's own, with sources or without, with a network for a TPU and for a desk.
OWN = replace(OWT, length=128, source_length=64, steps=100_000, warmup_steps=5_000, decode_noise_scale=1.0, gamma=0.0)
OWN_AT_A_DESK = replace(
    OWN,
    encoder_steps=2_000,
    encoder_learning_rate=0.01,
    decoder_steps=3_000,
    decoder_learning_rate=1e-3,
    steps=10_000,
    batch=32,
    learning_rate=0.005,
    warmup_steps=500,
    schedule="cosine",
    ema=0.999,
    num_samples=256,
    log_every=10,
    sample_every=500,
    save_every=200,
)
ADAMW_RATE = 0.05  # of Muon's: the paper found 1e-4 and 2e-3 the best


def preset(model: str | None, corpus: str | None, optimizer: str | None = None, decoder: str | None = None) -> TrainConfig:
    """The settings that a choice of model and data stands for. A paper size alone means the paper's OpenWebText run.

    Another optimizer brings another learning rate, and with a decoder of its own no row of ELF's decodes.
    """
    corpus = corpus or ("owt" if model in OWT_EPOCHS else "stories")
    if model and model not in SIZES:
        raise Refused(f"--model {model}: unknown; known are {', '.join(SIZES)}")
    own = OWN if model in OWT_EPOCHS else replace(OWN_AT_A_DESK, model="desk")
    chosen = PRESETS.get(corpus, own)
    model = model or chosen.model
    steps = OWT_EPOCHS.get(model, 5) * 19_017 if corpus in ("owt", "owt-t5") else chosen.steps
    chosen = replace(chosen, data=corpus, model=model, steps=steps)
    chosen = replace(chosen, learning_rate=ADAMW_RATE * chosen.learning_rate) if optimizer == "adamw" else chosen
    return replace(chosen, p_decode=0.0) if decoder == "separate" else chosen


def parse(args: list[str], description: str) -> TrainConfig:
    """Flags over the preset that the first four name; --help shows the defaults of that preset.

    Where only the steps are fewer than the preset's, no more than a tenth of them is warm-up.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model", "--data", "--optimizer", "--decoder"):
        first.add_argument(flag)
    chosen, _ = first.parse_known_args(args)
    default = preset(chosen.model, chosen.data, chosen.optimizer, chosen.decoder)
    config = tyro.cli(TrainConfig, default=default, description=description, args=args)
    if config.steps < default.steps and config.warmup_steps == default.warmup_steps:
        return replace(config, warmup_steps=min(config.warmup_steps, config.steps // 10))
    return config


LEARNED_WITH_SOURCES = "--embeddings learned: only without sources, which would need embeddings before ELF has learned them"


AT_LEAST_1 = "steps batch accumulate length encoder_steps decoder_steps log_every save_every keep sample_steps".split()
AT_LEAST_0 = "source_length bottleneck num_samples sample_every warmup_steps gamma".split()
ABOVE_0 = "learning_rate encoder_learning_rate decoder_learning_rate clip t_std p_std noise_scale decode_noise_scale w".split()
SHARES = "p_decode p_self_cond p_drop ema".split()


def check(config: TrainConfig):
    """Refuse what cannot work before anything is written."""
    for fields, right, meant in (
        (AT_LEAST_1, lambda x: x >= 1, "at least 1"),
        (AT_LEAST_0, lambda x: x >= 0, "at least 0, which is for none"),
        (ABOVE_0, lambda x: x > 0, "above 0"),
        (SHARES, lambda x: 0 <= x <= 1, "between 0 and 1"),
        (["seed"], lambda x: x >= 0, "at least 0"),
    ):
        for field in fields:
            if not right(getattr(config, field)):
                raise Refused(f"--{field.replace('_', '-')} {getattr(config, field)}: must be {meant}")
    if not 0 < config.w_min <= config.w_max:
        raise Refused(f"--w-min {config.w_min} --w-max {config.w_max}: guidance scales must be positive, the smaller first")
    if config.decoder == "separate" and config.p_decode:
        raise Refused(f"--p-decode {config.p_decode}: must be 0 with --decoder separate, which decodes instead")
    if config.decoder == "shared" and not 0 < config.p_decode < 1:
        raise Refused(f"--p-decode {config.p_decode}: must be above 0 and below 1, as rows learn to decode and to denoise")
    if config.embeddings == "learned" and config.data in PRESETS and PRESETS[config.data].source_length:
        raise Refused(LEARNED_WITH_SOURCES)
    if config.decoder == "separate" and config.embeddings != "encoder":
        raise Refused(f"--embeddings {config.embeddings} --decoder separate: the decoder mirrors an encoder")
    if config.preflight and (config.embeddings, config.decoder, config.conditioning) != ("encoder", "shared", "tokens"):
        raise Refused("--preflight: only for embeddings from an encoder, a decoder shared with the network, and control tokens")
    if config.data_dir and not Path(config.data_dir).exists():
        raise Refused(f"--data-dir {config.data_dir}: no such directory or file")
    if Path(config.name).is_absolute():
        raise Refused(f"--name {config.name}: a name inside the directory that --runs gives, not a path of its own")
    if config.batch % config.accumulate:
        raise Refused(f"--accumulate {config.accumulate} does not divide --batch {config.batch}")
    if config.warmup_steps >= config.steps:
        raise Refused(f"--warmup-steps {config.warmup_steps} leaves nothing of --steps {config.steps}: lower it")
    if config.processes > 1 and not config.coordinator:
        raise Refused(f"--processes {config.processes}: they find each other through a --coordinator, as host0:12355")
    if not 0 <= config.process_id < config.processes:
        raise Refused(f"--process-id {config.process_id}: must be one of the {config.processes} --processes, counted from 0")
    for flag, package in ((config.wandb, "wandb"), (config.tensorboard, "tensorboardX")):
        if flag and importlib.util.find_spec(package) is None:
            raise Refused(f"logging to {package} was asked for and it is not installed: pip install {package}")

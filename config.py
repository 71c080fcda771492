"""The settings of a run, each a flag with the paper's value as default, and presets for model and data."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from elf import SIZES
from runtime.errors import UserError

Grid = Literal["logit-normal", "uniform"]
Form = Literal["paper", "released"]


@dataclass(frozen=True)
class Sampler:
    """Settings of a sampler."""

    steps: int
    """Steps from noise to data."""
    w: float
    """Self-conditioning guidance scale."""
    cfg: float
    """Guidance scale of the source, if the data has sources."""
    gamma: float
    """Scale γ of the noise that SDE steps re-inject; 0 gives ODE steps."""
    grid: Grid = "logit-normal"
    """Time grid of the sampler: random logit-normal times, or uniform ones."""
    form: Form = "paper"
    """SDE step and unconditional pass as in the paper or as in the released code."""


@dataclass(frozen=True)
class Common:
    """The flags most runs need."""

    model: str
    """Size of the network: the paper's elf-b, elf-m, elf-l; for a CPU desk-m, desk, tiny."""
    data: str
    """Texts: stories, translate, summarize (built in); owt, de-en, xsum (hub); a file, directory or hub name.

    owt-t5, de-en-t5, xsum-t5 are the same texts as tokenized by the paper's authors.
    """
    encoder: str = "t5-small"
    """Frozen T5 encoder of the clean embeddings: a name or directory, or one trained on the texts first.

    To train one: scratch (width 128), scratch-256 (width 256), or scratch-t5-small (T5-small's shape).
    """
    name: str = ""
    """Name of the run; its directory is <runs>/<name>. By default <data>-<model>, as stories-desk."""
    mesh: str = "1"
    """Devices: 64 splits the batch over 64; 16x4 does too, and shards the weights over groups of 4."""
    steps: int = 5 * 19_017
    """Optimizer steps."""
    batch: int = 512
    """Rows per step, over all devices."""
    learning_rate: float = 0.002
    """Peak learning rate; the default for AdamW is a twentieth of that for Muon, as in the paper."""
    num_samples: int = 1000
    """Texts sampled and scored at the end; 0 for none."""
    seed: int = 0
    """Seed of all randomness in the run, except in a scratch encoder, which runs of all seeds share."""


@dataclass(frozen=True)
class Data:
    """Texts, rows and embeddings."""

    data_dir: str = ""
    """Local directory or file with the texts of owt, de-en or xsum, to use instead of the hub."""
    tokenizer: str = ""
    """Tokenizer, by name or directory; by default the encoder's own."""
    length: int = 1024
    """Tokens per row."""
    source_length: int = 0
    """Tokens of a row that the source may take, if the data has sources."""
    pack: bool = True
    """Fill every row with texts end to end, or one text per row. Rows with sources are never packed."""
    embeddings: Literal["encoder", "table", "gaussian", "learned"] = "encoder"
    """Clean embeddings: encoder output, the encoder's token table, a random table, or a trained one."""
    encoder_steps: int = 5 * 19_017
    """Optimizer steps of a scratch encoder."""
    encoder_learning_rate: float = 1e-3
    """Peak learning rate of a scratch encoder."""


@dataclass(frozen=True)
class Network:
    """The network and its ablations."""

    bottleneck: int = 128
    """Width of the bottleneck between embeddings and network; 0 for none. The paper compares 32, 128, 512."""
    prediction: Literal["x", "v", "eps"] = "x"
    """Output of the network: clean embeddings, velocity, or noise."""
    conditioning: Literal["tokens", "adaln-zero"] = "tokens"
    """Input of time, guidance scale and mode: as control tokens, or as modulation of every layer."""
    decoder: Literal["shared", "separate"] = "shared"
    """Decoder from embeddings to tokens: the ELF network, or a separate network that is trained first."""
    decoder_steps: int = 3 * 19_017
    """Optimizer steps of a separate decoder."""
    decoder_learning_rate: float = 3e-4
    """Peak learning rate of a separate decoder, for AdamW."""
    remat: bool = False
    """Recompute activations in the backward pass to save memory."""


@dataclass(frozen=True)
class Training:
    """Optimizer, noise, and the share of rows for each objective."""

    accumulate: int = 1
    """Parts of a batch whose gradients are accumulated, to save memory."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices with Adam for the rest, or AdamW (betas 0.9 and 0.95) for all."""
    warmup_steps: int = 9_508
    """Steps of linear warm-up; if only --steps is lowered, at most a tenth of it."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    ema: float = 0.9999
    """Decay of the EMA weights, which draw the samples; lowered by itself if training is short."""
    times: Grid = "logit-normal"
    """Distribution of the time t of a denoiser row."""
    t_mean: float = -1.5
    """P_mean of the logit-normal time t, in denoiser rows and in the sampling grid."""
    t_std: float = 0.8
    """P_std of the logit-normal time t, in both."""
    noise_scale: float = 2.0
    """Scale of the noise in denoiser rows and in sampling."""
    p_mean: float = 0.8
    """P_mean of the logit-normal corruption level p of each token in decoder rows."""
    p_std: float = 0.8
    """P_std of the logit-normal corruption level p."""
    decode_noise_scale: float = 5.0
    """Scale of the noise in decoder rows and for a separate decoder."""
    p_decode: float = 0.2
    """Share of decoder rows (trained by cross-entropy); the others are denoiser rows (by velocity error)."""
    p_self_cond: float = 0.5
    """Share of denoiser rows with self-conditioning: the network sees its own first prediction."""
    w_min: float = 0.5
    """Smallest self-conditioning guidance scale in training."""
    w_max: float = 5.0
    """Largest self-conditioning guidance scale in training."""
    p_drop: float = 0.1
    """Share of rows whose source is dropped, if the data has sources."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of training: auto is bfloat16 on TPU and GPU, float32 on CPU.

    Weights, optimizer state and sampling are always float32.
    """


@dataclass(frozen=True)
class Sampling:
    """Samples shown while training and at the end."""

    sample_steps: int = 64
    """Steps of the sampler."""
    w: float = 1.0
    """Self-conditioning guidance scale."""
    cfg: float = 2.0
    """Guidance scale of the source, if the data has sources."""
    gamma: float = 1.0
    """Scale γ of the noise that SDE steps re-inject; 0 gives ODE steps."""
    grid: Grid = "logit-normal"
    """Time grid of the sampler: random logit-normal times, or uniform ones."""
    sample_every: int = 5_000
    """Steps between samples shown while training; 0 for none."""


@dataclass(frozen=True)
class Devices:
    """Processes of a run, and preflight."""

    coordinator: str = ""
    """Address (host:port) of process 0, on hosts where JAX does not find the other processes."""
    processes: int = 1
    """Number of processes; only with --coordinator."""
    process_id: int = 0
    """Index of this process, from 0; only with --coordinator."""
    preflight: str = ""
    """Do not train: compile the step for a TPU slice, such as v5p:4x4x4, and print its cost. Needs no TPU."""
    preflight_json: Path | None = None
    """JSON file for the numbers of the preflight."""


@dataclass(frozen=True)
class Output:
    """Directories, checkpoints and logs."""

    runs: Path = Path("runs")
    """Directory of all runs."""
    cache: Path = Path("cache")
    """Directory of prepared data and scratch encoders, shared by all runs."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    save_every: int = 1_000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints kept, besides the best one."""
    wandb: str = ""
    """Weights & Biases project to log to (pip install wandb)."""
    tensorboard: bool = False
    """Also log for TensorBoard (pip install tensorboardX)."""


@dataclass(frozen=True)
class Distillation:
    """Records of a round of distill.py; not flags of train.py."""

    teacher: str = ""
    """Run or released checkpoint that teaches."""
    teacher_steps: int | None = None
    """Steps of the teacher from noise to data."""
    student_steps: int | None = None
    """Steps of the student from noise to data."""
    start_steps: int | None = None
    """Steps of the earlier student this one started from; None if it started from the teacher."""
    weights: str = ""
    """Hashes of the weights of the teacher and of the start."""


GROUPS = (Common, Data, Network, Training, Sampling, Devices, Output)


@dataclass(frozen=True)
class TrainConfig(Distillation, Output, Devices, Sampling, Training, Network, Data, Common):
    """All settings of a run, in one flat record; the groups are those of --help."""

    @property
    def directory(self) -> Path:
        return self.runs / (self.name or f"{Path(self.data).stem}-{self.model}")

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.sample_steps, self.w, self.cfg, self.gamma, self.grid)

    @property
    def ema_decay(self) -> float:
        """Decay of the EMA weights, lowered in short trainings so that the initial weights leave no trace.

        They average over a tenth of the steps then, or half of a distillation's, which starts trained.
        """
        if self.steps * (1 - self.ema) > 1:
            return self.ema
        return max(0.0, 1 - (2 if self.teacher else 10) / self.steps)

    def as_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def as_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in self.as_fields().items()}


def config_from(values: dict[str, Any]) -> TrainConfig:
    """Read the config that `as_json` wrote."""
    paths = {f.name for f in dataclasses.fields(TrainConfig) if f.type is Path}
    return TrainConfig(**{k: Path(v) if k in paths else v for k, v in values.items()})


# Fields that may change when a run is resumed: they do not change what is computed.
FREE = set(
    """data_dir name runs cache mesh coordinator processes process_id remat preflight preflight_json
    num_samples sample_steps w cfg gamma grid sample_every log_every save_every keep wandb tensorboard
    decoder_steps decoder_learning_rate""".split()  # the last two are checked in the decoder's own run
)

OWT_ROWS = 19_017 * 512
OWT_EPOCHS = {"elf-b": 5, "elf-m": 4, "elf-l": 3}
OWT = TrainConfig(model="elf-b", data="owt")
# Translation and summarization, with the sampler of the paper's Table 1.
TASK = dict(pack=False, decode_noise_scale=1.0, warmup_steps=5_000, gamma=0.0, num_samples=100_000)


def for_epochs(epoch: int) -> dict[str, int]:
    """Steps of ELF, scratch encoder and separate decoder, from the steps of an epoch."""
    return dict(steps=100 * epoch, encoder_steps=5 * epoch, decoder_steps=3 * epoch)


DE_EN = replace(OWT, data="de-en", length=128, source_length=64, **TASK, **for_epochs(8_806))
XSUM = replace(OWT, data="xsum", length=1024 + 64, source_length=1024, **TASK, **for_epochs(398))
# For the cores of a desk, in minutes.
DESK = dict(model="desk", batch=32, schedule="cosine", num_samples=256)
DESK |= dict(encoder_steps=2_000, encoder_learning_rate=0.01)
SHORT = dict(encoder="scratch", pack=False, noise_scale=1.0, decode_noise_scale=1.0)
SHORT |= dict(steps=2_000, learning_rate=0.01, warmup_steps=100, ema=0.995)
SHORT |= dict(decoder_steps=1_000, decoder_learning_rate=3e-3)
SHORT |= dict(log_every=20, sample_every=400, save_every=400)
STORIES = replace(OWT, data="stories", length=30, **DESK, **SHORT)
# With much noise, little can be guessed from the noisy text: the answer has to be learned from the source.
ANSWERS = dict(encoder_steps=1_000, encoder_learning_rate=0.003, learning_rate=0.004, noise_scale=4.0)
ANSWERS |= dict(gamma=0.0)
TRANSLATE = replace(STORIES, data="translate", length=38, source_length=20, steps=3_200, **ANSWERS)
SUMMARIZE = replace(STORIES, data="summarize", length=58, source_length=43, **ANSWERS)
PRESETS = {preset.data: preset for preset in (OWT, DE_EN, XSUM, STORIES, TRANSLATE, SUMMARIZE)}
PRESETS |= {f"{name}-t5": replace(PRESETS[name], data=f"{name}-t5") for name in ("owt", "de-en", "xsum")}
# One's own texts, with or without sources: for a TPU and for a desk.
OWN = replace(OWT, length=128, source_length=64, decode_noise_scale=1.0, gamma=0.0)
OWN = replace(OWN, steps=100_000, warmup_steps=5_000)
OWN_AT_A_DESK = replace(OWN, **DESK, steps=10_000, learning_rate=0.005, warmup_steps=500, ema=0.999)
OWN_AT_A_DESK = replace(OWN_AT_A_DESK, decoder_steps=3_000, decoder_learning_rate=1e-3)
OWN_AT_A_DESK = replace(OWN_AT_A_DESK, log_every=10, sample_every=500, save_every=200)
ADAMW_RATE = 0.05  # relative to Muon's: the paper found 1e-4 and 2e-3 best


def preset(
    model: str | None, corpus: str | None, optimizer: str | None = None, decoder: str | None = None
) -> TrainConfig:
    """Choose the defaults for a model and data. A paper size alone is the paper's OpenWebText run.

    AdamW has a lower learning rate, and with a separate decoder no row of ELF's decodes.
    """
    corpus = corpus or ("owt" if model in OWT_EPOCHS else "stories")
    if model and model not in SIZES:
        raise UserError(f"--model {model}: unknown; choose {', '.join(SIZES)}")
    own = OWN if model in OWT_EPOCHS else OWN_AT_A_DESK
    chosen = PRESETS.get(corpus, own)
    model = model or chosen.model
    steps = OWT_EPOCHS.get(model, 5) * 19_017 if corpus in ("owt", "owt-t5") else chosen.steps
    chosen = replace(chosen, data=corpus, model=model, steps=steps)
    if optimizer == "adamw":
        chosen = replace(chosen, learning_rate=ADAMW_RATE * chosen.learning_rate)
    return replace(chosen, p_decode=0.0) if decoder == "separate" else chosen


def parse(args: list[str], description: str) -> TrainConfig:
    """Parse flags over the preset that model, data, optimizer and decoder choose; --help shows its defaults.

    Where only the steps are fewer than the preset's, at most a tenth of them is warm-up.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model", "--data", "--optimizer", "--decoder"):
        first.add_argument(flag)
    chosen, _ = first.parse_known_args(args)
    default = preset(chosen.model, chosen.data, chosen.optimizer, chosen.decoder)
    own = {group: {f.name: getattr(default, f.name) for f in dataclasses.fields(group)} for group in GROUPS}
    groups = {group.__name__.lower(): group(**values) for group, values in own.items()}
    flags = make_dataclass("Flags", [(name, type(group)) for name, group in groups.items()])
    parsed = tyro.cli(
        tyro.conf.OmitArgPrefixes[flags], default=flags(**groups), description=description, args=args
    )
    config = replace(default, **{k: v for group in vars(parsed).values() for k, v in vars(group).items()})
    if config.steps < default.steps and config.warmup_steps == default.warmup_steps:
        return replace(config, warmup_steps=min(config.warmup_steps, config.steps // 10))
    return config


# Rules


RANGES = {  # meaning: test of a value, names of fields
    "at least 1": (
        lambda x: x >= 1,
        "steps batch accumulate length encoder_steps decoder_steps log_every save_every keep sample_steps",
    ),
    "at least 0": (
        lambda x: x >= 0,
        "source_length bottleneck num_samples sample_every warmup_steps gamma seed",
    ),
    "above 0": (
        lambda x: x > 0,
        """learning_rate encoder_learning_rate decoder_learning_rate clip t_std p_std noise_scale
        decode_noise_scale w""",
    ),
    "between 0 and 1": (lambda x: 0 <= x <= 1, "p_decode p_self_cond p_drop ema"),
}


def check_ranges(values: dict[str, Any]):
    """Raise a UserError for a value out of its range."""
    for meaning, (holds, fields) in RANGES.items():
        for field in fields.split():
            if field in values and not holds(values[field]):
                raise UserError(f"--{field.replace('_', '-')} {values[field]}: must be {meaning}")


LEARNED_WITH_SOURCES = "--embeddings learned: not for data with sources, which need embeddings from the start"


def problems(c: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with a config beyond the ranges of its values."""
    if not 0 < c.w_min <= c.w_max:
        yield f"--w-min {c.w_min} --w-max {c.w_max}: must be above 0, the smaller first"
    if c.decoder == "separate" and c.p_decode:
        yield f"--p-decode {c.p_decode}: must be 0 with --decoder separate"
    if c.decoder == "shared" and not 0 < c.p_decode < 1:
        yield f"--p-decode {c.p_decode}: must be above 0 and below 1, for both branches to train"
    if c.embeddings == "learned" and c.data in PRESETS and PRESETS[c.data].source_length:
        yield LEARNED_WITH_SOURCES
    if c.decoder == "separate" and c.embeddings != "encoder":
        yield f"--decoder separate: mirrors an encoder, so not with --embeddings {c.embeddings}"
    if c.preflight and (c.embeddings, c.decoder, c.conditioning) != ("encoder", "shared", "tokens"):
        yield "--preflight: only with --embeddings encoder, --decoder shared and --conditioning tokens"
    if c.data_dir and not Path(c.data_dir).exists():
        yield f"--data-dir {c.data_dir}: no such directory or file"
    if Path(c.name).is_absolute():
        yield f"--name {c.name}: give a name inside --runs, not an absolute path"
    if c.batch % c.accumulate:
        yield f"--accumulate {c.accumulate}: does not divide --batch {c.batch}"
    if c.warmup_steps >= c.steps:
        yield f"--warmup-steps {c.warmup_steps}: must be below --steps {c.steps}"
    if c.processes > 1 and not c.coordinator:
        yield f"--processes {c.processes}: needs a --coordinator, such as host0:12355"
    if not 0 <= c.process_id < c.processes:
        yield f"--process-id {c.process_id}: must be below --processes {c.processes}, counted from 0"
    for flag, package in ((c.wandb, "wandb"), (c.tensorboard, "tensorboardX")):
        if flag and importlib.util.find_spec(package) is None:
            yield f"logging to {package}: not installed; pip install {package}"


def check(config: TrainConfig):
    """Raise a UserError for settings that cannot work, before anything is written."""
    check_ranges(config.as_fields())
    for problem in problems(config):
        raise UserError(problem)

"""Measure ELF, and show what it does.

    python eval.py samples --run runs/stories-desk --w 2    sample texts, score them, write a page to read
    python eval.py table system --run RUN                   a table of the paper beside this run's numbers
    python eval.py figure guidance --run RUN                a figure of the paper
    python eval.py trajectory --run RUN                     texts on their way from noise, on a page
    python eval.py compare RUN RUN …                        runs side by side
    python eval.py claims                                   the paper's claims, checked on this machine
    python eval.py speed --model desk                       seconds, tokens/s and memory on this machine

RUN is the directory of a run, or a released checkpoint: a name on the hub
(embedded-language-flows/ELF-B-owt) or a local copy. Scores are cached with the run, so an interrupted table
resumes.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

import train
from config import Form, Grid, Sampler, TrainConfig, check_ranges
from corpora.rows import Split
from report import figures, judges, pages, samples, tables
from report.claims import Claims
from report.samples import Bench, bench_for, measure
from runtime.checkpoints import Trained, load
from runtime.errors import UserError, one_line_errors
from runtime.files import write_file
from runtime.mesh import make_mesh
from runtime.processes import restart_with_huge_pages
from runtime.speed import Speed

Flat = tyro.conf.OmitArgPrefixes
Run = Annotated[str, tyro.conf.arg(help="Directory of a run, or a released checkpoint.")]
Runs = Annotated[tuple[str, ...], tyro.conf.arg(help="Directories of runs, or released checkpoints.")]
Seed = Annotated[int, tyro.conf.arg(help="Random seed of the noise.")]
Seeds = Annotated[tuple[int, ...], tyro.conf.arg(help="Random seeds of the noise.")]
JUDGE_HELP = (
    "Judge of the samples: a GPT-2 by name or directory, or none. By default the references of data with "
    "sources, the likelihood of the stories' grammar, or else gpt2-large."
)
TABLE_HELP = "In the paper: system is Table 9, scaling 10, few-step 4, rounds 5, downstream 1, tokens 8."
FIGURE_HELP = (
    "In the paper: guidance is Figures 4 and 6, samplers 5c, schedules 16a, gamma 16b, cfg 17, "
    "trade-off 7b and 9c, few-step 9a."
)


@dataclass(frozen=True)
class ReleasedOptions:
    """Only for a released checkpoint; a run has these in its directory."""

    data: str = ""
    """Data the checkpoint was trained on (owt, de-en, xsum), if its name does not say."""
    data_dir: str = ""
    """Local directory with the texts, to use instead of the hub."""
    encoder: str = ""
    """T5 directory with encoder and tokenizer; by default t5-small from the hub."""


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that loads a run."""

    run: Run = tyro.MISSING
    checkpoint: Literal["latest", "best"] = "latest"
    """Checkpoint of a run: the last one, or the one with the smallest loss on held-out rows."""
    split: Split = "validation"
    """Split with the sources to answer and the reference texts."""
    mesh: str = "1"
    """Devices: 64 splits the batch over 64; 16x4 does too, and shards the weights over groups of 4."""
    released: Flat[ReleasedOptions] = ReleasedOptions()

    def load(self, run: str) -> Trained:
        mesh, released = make_mesh(self.mesh, 0), self.released
        return load(run, mesh, self.checkpoint, released.data, released.data_dir, released.encoder)


@dataclass(frozen=True)
class MeasureOptions(RunOptions):
    """Options of every command that scores samples."""

    num_samples: int | None = None
    """Texts to sample for each score, by default as in the run; at most one for each source."""
    judge: Annotated[str, tyro.conf.arg(help=JUDGE_HELP)] = ""

    def benches(self, names: Sequence[str], form: Form) -> list[Bench]:
        if not names:
            raise UserError("give at least one run: the directory of one, or a released checkpoint")
        return [self.bench(run, form) for run in names]

    def bench(self, run: str, form: Form = "paper") -> Bench:
        bench = bench_for(self.load(run), self.num_samples, self.judge, self.split, form)
        if bench.n < 1:
            raise UserError(f"--num-samples {bench.n}: must be at least 1")
        return bench


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of the sampler; by default as in the run."""

    steps: int | None = None
    """Steps from noise to data."""
    w: float | None = None
    """Self-conditioning guidance scale."""
    cfg: float | None = None
    """Guidance scale of the source, if the data has sources."""
    gamma: float | None = None
    """Scale γ of the noise that SDE steps re-inject; 0 gives ODE steps."""
    grid: Grid | None = None
    """Time grid of the sampler: random logit-normal times, or uniform ones."""
    form: Form = "paper"
    """SDE step and unconditional pass as in the paper or as in the released code."""

    def sampler(self, config: TrainConfig) -> Sampler:
        changes = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        sampler = dataclasses.replace(config.sampler, **changes)
        check_ranges(dataclasses.asdict(sampler))
        return sampler


def settings_of(sampler: Sampler, conditions) -> dict[str, str | float]:
    """List the settings of a sampler, without cfg where there is no condition."""
    return {k: v for k, v in dataclasses.asdict(sampler).items() if conditions or k != "cfg"}


TableName = Literal["system", "scaling", "few-step", "rounds", "downstream", "tokens"]
FigureName = Literal["guidance", "samplers", "schedules", "gamma", "cfg", "trade-off", "few-step"]


@dataclass(frozen=True)
class Samples(MeasureOptions):
    """Sample texts from a run, print their scores, and write them as JSON lines and as an HTML page."""

    sampling: Flat[SamplerOptions] = SamplerOptions()
    seed: Seed = 0
    out: Path | None = None
    """File to write (.jsonl, and .html beside it); by default in samples/ of the run."""

    def __call__(self):
        if self.out and self.out.suffix != ".jsonl":
            raise UserError(f"--out {self.out}: must end in .jsonl; the page is written beside it")
        bench = self.bench(self.run)
        sampler = self.sampling.sampler(bench.trained.config)
        sampled, scores, each = measure(bench, sampler, self.seed)
        settings = settings_of(sampler, bench.conditions)
        settings |= dict(seed=self.seed, checkpoint=self.checkpoint, split=self.split)
        named = settings | dict(n=len(sampled)) | (dict(judge=Path(self.judge).name) if self.judge else {})
        name = "-".join(f"{k}={v}" for k, v in named.items())
        out = self.out or bench.trained.directory / "samples" / f"{name}.jsonl"
        report = judges.report(bench.judge, bench.corpus, sampled, scores)
        about = ", ".join(f"{k} {v}" for k, v in settings.items())
        records, shown = samples.as_records(bench.corpus, sampled), []
        for record, score in zip(records, each, strict=True):
            shown.append(pages.Sample(record["text"], score, record.get("source"), record.get("reference")))
            record[bench.judge.each] = score if math.isfinite(score) else None  # JSON has no infinity
        samples.write_texts(out, records)
        title, page = f"{len(sampled):,} samples of {bench.trained.name}", out.with_suffix(".html")
        order = bench.judge.each, bench.judge.low_is_good
        write_file(page, pages.samples_page(title, about, report, shown, *order))
        print(f"{report}\n\n{judges.some_texts(bench.corpus, sampled)}\n\n{about}\n{out}\n{page}")


@dataclass(frozen=True)
class Table(MeasureOptions):
    """A table of the paper with your runs added: as columns, or as rows in rounds, downstream and tokens."""

    name: Annotated[tyro.conf.Positional[TableName], tyro.conf.arg(help=TABLE_HELP)] = tyro.MISSING
    run: Runs = tyro.MISSING
    seeds: tuple[int, ...] = ()
    """Random seeds of the noise; by default 0, and 0 to 5 for system."""
    out: Path | None = None
    """Path of the files to write, without suffix; by default tables/NAME in the first run."""
    form: Form = "paper"
    """SDE step and unconditional pass as in the paper or as in the released code."""

    def __call__(self):
        if self.name == "tokens" and self.run:
            runs = [self.load(run) for run in self.run]
            table, directory = tables.tokens(runs), runs[0].directory
        else:
            benches = self.benches(self.run, self.form)
            table, directory = tables.TABLES[self.name](benches, self.seeds), benches[0].trained.directory
        tables.write(table, self.out or directory / "tables" / self.name)


@dataclass(frozen=True)
class Figure(MeasureOptions):
    """A figure of the paper drawn from your runs, with the paper's points where it prints numbers."""

    name: Annotated[tyro.conf.Positional[FigureName], tyro.conf.arg(help=FIGURE_HELP)] = tyro.MISSING
    run: Runs = tyro.MISSING
    seeds: Seeds = (0,)
    out: Path | None = None
    """Path of the files to write, without suffix; by default figures/NAME in the first run."""
    form: Form = "paper"
    """SDE step and unconditional pass as in the paper or as in the released code."""

    def __call__(self):
        benches = self.benches(self.run, self.form)
        figure = figures.FIGURES[self.name](benches, self.seeds or (0,))
        figures.write(figure, self.out or benches[0].trained.directory / "figures" / self.name)


@dataclass(frozen=True)
class Trajectory(RunOptions):
    """Follow samples from noise to text: one in the terminal, all on an HTML page with a slider over t."""

    sampling: Flat[SamplerOptions] = SamplerOptions()
    samples: int = 3
    """Samples to follow."""
    frames: int = 16
    """Times t at which predictions are decoded, besides the end."""
    seed: Seed = 0
    out: Path | None = None
    """Page to write; by default trajectory.html in the run."""

    def __call__(self):
        if self.samples < 1 or self.frames < 1:
            raise UserError("--samples and --frames: must be at least 1")
        trained = self.load(self.run)
        sampler = self.sampling.sampler(trained.config)
        corpus = trained.corpus(self.split) if trained.config.source_length else None
        conditions = trained.conditions(corpus) if corpus else None
        sources = [f"{e.source} → {e.text}" for e in corpus.held_out[: self.samples]] if conditions else []
        followed = samples.trajectories(trained, self.samples, sampler, self.seed, conditions, self.frames)
        for source in sources[:1]:
            print(f"{source}\n")
        for frame in followed[0]:
            print(f"t = {frame.t:.3f}  {frame.text}")
        settings = settings_of(sampler, conditions) | dict(seed=self.seed)
        about = ", ".join(f"{k} {v}" for k, v in settings.items())
        about += ". Predictions at t, decoded. Words that changed since the frame before are marked."
        out, title = self.out or trained.directory / "trajectory.html", f"{trained.name}: from noise to text"
        write_file(out, pages.trajectory_page(title, about, followed, sources))
        print(f"\n{out}")


@dataclass(frozen=True)
class Compare(MeasureOptions):
    """Runs side by side with the same sampler settings: one table, one plot."""

    run: tyro.conf.Positional[Runs] = tyro.MISSING
    sampling: Flat[SamplerOptions] = SamplerOptions()
    seeds: Seeds = (0,)
    out: Path = Path("runs/compare")
    """Path of the files to write, without suffix."""

    def __call__(self):
        benches = self.benches(self.run, self.sampling.form)
        samplers = [self.sampling.sampler(bench.trained.config) for bench in benches]
        figures.write(figures.compare(benches, self.seeds or (0,), samplers), self.out)


Command = (
    Annotated[Samples, tyro.conf.subcommand("samples")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Figure, tyro.conf.subcommand("figure")]
    | Annotated[Trajectory, tyro.conf.subcommand("trajectory")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Claims, tyro.conf.subcommand("claims")]
    | Annotated[Speed, tyro.conf.subcommand("speed")]
)


def main():
    with one_line_errors():
        command = tyro.cli(Command, description=__doc__)
        if isinstance(command, Speed):
            command = partial(command, train.build)
        command()


if __name__ == "__main__":
    restart_with_huge_pages()
    main()

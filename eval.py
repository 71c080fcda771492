"""Measure ELF, and show what it does.

    python eval.py samples --run runs/stories-desk --w 2    sample texts, score them, write a page to read
    python eval.py table system --run RUN                   a table of the paper beside this run's numbers
    python eval.py figure guidance --run RUN                a figure of the paper
    python eval.py trajectory --run RUN                     texts on their way from noise, on a page
    python eval.py compare RUN RUN …                        runs side by side
    python eval.py claims                                   the paper's claims, checked at a desk
    python eval.py speed --model desk                       seconds, tokens/s and memory on this machine

A run is a directory of train.py, or a released checkpoint: a name on the hub
(embedded-language-flows/ELF-B-owt) or a local copy. Measurements are kept with the run, so an interrupted
table resumes.
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
from report import figures, judges, pages, tables, texts
from report.claims import Claims
from report.texts import Bench, bench_for, measure
from runtime.checkpoints import Trained, load
from runtime.errors import UserError, one_line_errors
from runtime.files import write_file
from runtime.mesh import make_mesh, restart_with_huge_pages
from runtime.speed import Speed


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that loads a run."""

    data: str = ""
    """Training data of a released checkpoint (owt, de-en, xsum), if its name does not say."""
    data_dir: str = ""
    """Local directory with the texts, where the hub cannot be reached."""
    encoder: str = ""
    """T5 directory with encoder and tokenizer for a released checkpoint; by default t5-small from the hub."""
    split: Split = "validation"
    """Split of the sources to answer and of the texts to compare with."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Checkpoint of a run: the last one, or the one with the smallest loss on held-out rows."""
    mesh: str = "1"
    """Devices: 64 is 64 data shards; 16x4 is 16 data shards with the weights of each sharded over 4."""

    def load(self, run: str) -> Trained:
        return load(run, make_mesh(self.mesh, 0), self.checkpoint, self.data, self.data_dir, self.encoder)


@dataclass(frozen=True)
class MeasureOptions(RunOptions):
    """Options of every command that scores samples."""

    num_samples: int | None = None
    """Texts for each measurement, by default as in the run; with sources, at most as many as there are."""
    judge: str = ""
    """A GPT-2 by name or directory, or none; by default a grammar's exact likelihood, or else gpt2-large."""

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
    """Guidance scale of the condition, where the data has one."""
    gamma: float | None = None
    """Noise re-injected at every step; 0 is the ODE."""
    grid: Grid | None = None
    """Times of the steps."""
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


Flat = tyro.conf.OmitArgPrefixes
Run = Annotated[str, tyro.conf.arg(help="Directory of a run, or a released checkpoint.")]
Runs = Annotated[tuple[str, ...], tyro.conf.arg(help="Directories of runs, or released checkpoints.")]
Seed = Annotated[int, tyro.conf.arg(help="Random seed of the noise.")]
SEEDS = "Random seeds of the noise; by default 0, and for `system` 0 to 5."
Seeds = Annotated[tuple[int, ...], tyro.conf.arg(help=SEEDS)]
TableName = Literal["system", "scaling", "few-step", "rounds", "downstream", "tokens"]
FigureName = Literal["guidance", "samplers", "schedules", "gamma", "cfg", "trade-off", "few-step"]


@dataclass(frozen=True)
class Samples(MeasureOptions):
    """Sample texts from a run, print their scores, and write them as JSON lines and as a page."""

    run: Run = tyro.MISSING
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
        records, shown = texts.as_records(bench.corpus, sampled), []
        for record, score in zip(records, each, strict=True):
            shown.append(pages.Sample(record["text"], score, record.get("source"), record.get("reference")))
            record[bench.judge.each] = score if math.isfinite(score) else None  # JSON has no infinity
        texts.write_texts(out, records)
        title, page = f"{len(sampled):,} samples of {bench.trained.name}", out.with_suffix(".html")
        order = bench.judge.each, bench.judge.low_is_good
        write_file(page, pages.samples_page(title, about, report, shown, *order))
        print(f"{report}\n\n{judges.some_texts(bench.corpus, sampled)}\n\n{about}\n{out}\n{page}")


@dataclass(frozen=True)
class Table(MeasureOptions):
    """A table of the paper: runs are columns (rows of rounds, downstream, tokens) beside the paper's."""

    name: tyro.conf.Positional[TableName] = tyro.MISSING
    """Tables 9, 10, 4, 5, 1 and 8 of the paper."""
    run: Runs = tyro.MISSING
    seeds: Seeds = ()
    out: Path | None = None
    """Files to write, without their ending; by default tables/NAME in the first run."""
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
    """A figure of the paper, drawn from our runs, with the paper's points where it prints them."""

    name: tyro.conf.Positional[FigureName] = tyro.MISSING
    """Figures 4 and 6, 5c, 16a, 16b, 17, 7 and 9c, and 9a of the paper."""
    run: Runs = tyro.MISSING
    seeds: Seeds = (0,)
    out: Path | None = None
    """Files to write, without their ending; by default figures/NAME in the first run."""
    form: Form = "paper"
    """SDE step and unconditional pass as in the paper or as in the released code."""

    def __call__(self):
        benches = self.benches(self.run, self.form)
        figure = figures.FIGURES[self.name](benches, self.seeds or (0,))
        figures.write(figure, self.out or benches[0].trained.directory / "figures" / self.name)


@dataclass(frozen=True)
class Trajectory(RunOptions):
    """Follow samples from noise to text: the first in the terminal, all on a page with a slider over t."""

    run: Run = tyro.MISSING
    sampling: Flat[SamplerOptions] = SamplerOptions()
    samples: int = 3
    """Samples to follow."""
    frames: int = 16
    """Times to decode, besides the end."""
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
        followed = texts.trajectories(trained, self.samples, sampler, self.seed, conditions, self.frames)
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
    """Several runs side by side with the same sampler: one table, one plot."""

    runs: tyro.conf.Positional[Runs] = tyro.MISSING
    sampling: Flat[SamplerOptions] = SamplerOptions()
    seeds: Seeds = (0,)
    out: Path = Path("runs/compare")
    """Files to write, without their ending."""

    def __call__(self):
        benches = self.benches(self.runs, self.sampling.form)
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

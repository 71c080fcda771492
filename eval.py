"""Measure ELF, and show what it does.

    python eval.py samples --run runs/stories-desk --w 2         sample texts, score them, write them and a page to read them
    python eval.py table system --run RUN                        a table of the paper, our numbers beside the paper's
    python eval.py figure guidance --run RUN                     a figure of the paper
    python eval.py trajectory --run RUN                          texts on their way from noise, as a page with a slider
    python eval.py compare RUN RUN …                             runs side by side
    python eval.py speed --model desk                            seconds, tokens/s and memory of a size on this machine

A run is a directory of train.py, or a released checkpoint: a name on the hub (embedded-language-flows/ELF-B-owt) or a local copy.
What is measured is kept with the run, so an interrupted table continues.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

import figures
import generate
import judges
import pages
import runs
import tables
import train
import trained
from errors import Refused, one_line
from figures import FIGURES
from generate import Asked, Form, Sampler
from measure import Bench, bench_for, measure
from mesh import make_mesh
from speed import Speed
from tables import TABLES


@dataclass(frozen=True)
class OfRun:
    """What has to be told of runs and released checkpoints."""

    data: str = ""
    """What a released checkpoint was trained on (owt, de-en, xsum), if its name does not tell."""
    data_dir: str = ""
    """Local directory with these texts, where the hub cannot be reached."""
    encoder: str = ""
    """T5 directory with encoder and tokenizer for a released checkpoint, if not t5-small from the hub."""
    split: Literal["validation", "test"] = "validation"
    """Whose sources are answered, and whose texts samples are held against."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which of a run: the last one saved, or the one with the least loss on held-out rows."""
    mesh: str = "1"
    """Devices that share the work, as in train.py."""

    def load(self, run: str) -> trained.Trained:
        return trained.load(run, make_mesh(self.mesh, 0), self.checkpoint, self.data, self.data_dir, self.encoder)


@dataclass(frozen=True)
class OfRuns(OfRun):
    """What all measurements of runs are told."""

    num_samples: int | None = None
    """Texts for each measurement, by default as many as the run says; with sources, answers to at most that many."""
    judge: str = ""
    """A GPT-2 by name or directory, for perplexities, or none; by default a grammar's own exact likelihood, or gpt2-large."""

    def benches(self, names: Sequence[str], form: Form) -> list[Bench]:
        if not names:
            raise Refused("give at least one run: the directory of one, or a released checkpoint")
        return [self.bench(run, form) for run in names]

    def bench(self, run: str, form: Form = "paper") -> Bench:
        mesh = make_mesh(self.mesh, 0)
        found = bench_for(self.load(run), mesh, self.num_samples, self.judge, self.split, form)
        if found.n < 1:
            raise Refused(f"--num-samples {found.n}: must be at least 1")
        return found


@dataclass(frozen=True)
class Settings:
    """How to sample; by default as the run says."""

    steps: int | None = None
    """Steps from noise to data."""
    w: float | None = None
    """Self-conditioning guidance scale."""
    cfg: float | None = None
    """Guidance scale of the condition, where the data has one."""
    gamma: float | None = None
    """Noise re-injected at every step; 0 is the ODE."""
    grid: Literal["logit-normal", "uniform"] | None = None
    """Times of the steps."""
    form: Form = "paper"
    """Whose SDE step, and whose unguided pass where a condition guides."""

    def sampler(self, config: train.TrainConfig) -> Sampler:
        chosen = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        sampler = dataclasses.replace(generate.sampler_of(config), **chosen)
        if sampler.steps < 1:
            raise Refused(f"--steps {sampler.steps}: must be at least 1")
        if sampler.gamma < 0 or not sampler.w > 0:
            raise Refused(f"--gamma {sampler.gamma} --w {sampler.w}: γ must be at least 0, which is the ODE, and w above 0")
        return sampler


def told(sampler: Sampler, asked: Asked | None) -> dict[str, str | float]:
    """The settings that matter: without sources, nothing is guided by them."""
    return {k: v for k, v in dataclasses.asdict(sampler).items() if asked or k != "cfg"}


Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class Samples(OfRuns):
    """Sample texts from a run, print what they are worth, and write them as JSON lines and as a page."""

    run: str = tyro.MISSING
    """Directory of a run, or a released checkpoint."""
    how: Flat[Settings] = Settings()
    seed: int = 0
    """Of the noise."""
    out: Path | None = None
    """File to write (.jsonl, and .html beside it); by default samples/ in the run."""

    def __call__(self):
        if self.out and self.out.suffix != ".jsonl":
            raise Refused(f"--out {self.out}: give a name that ends in .jsonl; the page is written beside it")
        bench = self.bench(self.run)
        sampler = self.how.sampler(bench.trained.config)
        texts, scores, each = measure(bench, sampler, self.seed)
        settings = told(sampler, bench.asked) | dict(seed=self.seed, checkpoint=self.checkpoint, split=self.split)
        named = settings | dict(n=len(texts)) | (dict(judge=Path(self.judge).name) if self.judge else {})
        name = "-".join(f"{k}={v}" for k, v in named.items())
        out = self.out or bench.trained.directory / "samples" / f"{name}.jsonl"
        report = judges.report(bench.judge, bench.corpus, texts, scores)
        about = ", ".join(f"{k} {v}" for k, v in settings.items())
        records = generate.as_records(bench.corpus, texts)
        finite = [score if math.isfinite(score) else None for score in each]  # JSON has no infinity.
        runs.write_texts(out, [record | {bench.judge.each: score} for record, score in zip(records, finite, strict=True)])
        shown = [pages.Sample(r["text"], s, r.get("source"), r.get("reference")) for r, s in zip(records, each, strict=True)]
        title, page = f"{len(texts):,} samples of {bench.trained.name}", out.with_suffix(".html")
        runs.write_whole(page, pages.samples_page(title, about, report, shown, bench.judge.each, bench.judge.low_is_good))
        print(f"{report}\n\n{judges.some_texts(bench.corpus, texts)}\n\n{about}\n{out}\n{page}")


@dataclass(frozen=True)
class TableCommand(OfRuns):
    """A table of the paper: our numbers beside the paper's. Runs are columns (rows for rounds, downstream and tokens)."""

    name: tyro.conf.Positional[Literal["system", "scaling", "few-step", "rounds", "downstream", "tokens"]] = tyro.MISSING
    """Which: Tables 9, 10, 4, 5, 1 and 8 of the paper."""
    run: tuple[str, ...] = tyro.MISSING
    """Directories of runs, or released checkpoints."""
    seeds: tuple[int, ...] = ()
    """Of the noise; by default 0, and 0 to 5 for system as in the paper."""
    out: Path | None = None
    """Files to write, without their ending; by default tables/NAME in the first run."""
    form: Form = "paper"
    """Whose SDE step, and whose unguided pass where a condition guides."""

    def __call__(self):
        if self.name == "tokens" and self.run:
            found = [self.load(run) for run in self.run]
            return tables.write(tables.tokens(found), self.out or found[0].directory / "tables" / self.name)
        benches = self.benches(self.run, self.form)
        tables.write(TABLES[self.name](benches, self.seeds), self.out or benches[0].trained.directory / "tables" / self.name)


Figures = Literal["guidance", "samplers", "schedules", "gamma", "cfg", "trade-off", "few-step"]


@dataclass(frozen=True)
class FigureCommand(OfRuns):
    """A figure of the paper, drawn from our runs, with the paper's points where it prints them."""

    name: tyro.conf.Positional[Figures] = tyro.MISSING
    """Which: Figures 4 and 6, 5c, 16a, 16b, 17, 7 and 9c, and 9a of the paper."""
    run: tuple[str, ...] = tyro.MISSING
    """Directories of runs, or released checkpoints."""
    seeds: tuple[int, ...] = (0,)
    """Of the noise."""
    out: Path | None = None
    """Files to write, without their ending; by default figures/NAME in the first run."""
    form: Form = "paper"
    """Whose SDE step, and whose unguided pass where a condition guides."""

    def __call__(self):
        benches = self.benches(self.run, self.form)
        figure = FIGURES[self.name](benches, self.seeds or (0,))
        out = self.out or benches[0].trained.directory / "figures" / self.name
        figures.write(figure, out)


@dataclass(frozen=True)
class Trajectory(OfRun):
    """Follow samples from noise to text: the first in the terminal, all on a page with a slider over t."""

    run: str = tyro.MISSING
    """Directory of a run, or a released checkpoint."""
    how: Flat[Settings] = Settings()
    samples: int = 3
    """Samples to follow."""
    frames: int = 16
    """Times at which their text is shown, besides the end."""
    seed: int = 0
    """Of the noise."""
    out: Path | None = None
    """Page to write; by default trajectory.html in the run."""

    def __call__(self):
        if self.samples < 1 or self.frames < 1:
            raise Refused("--samples and --frames: must be at least 1")
        mesh = make_mesh(self.mesh, 0)
        found = self.load(self.run)
        sampler, key = self.how.sampler(found.config), generate.sampling_key(self.seed)
        corpus = found.corpus(self.split) if found.config.source_length else None
        asked = found.asked(corpus, mesh) if corpus else None
        sources = [f"{e.source} → {e.text}" for e in corpus.held_out[: self.samples]] if asked else []
        args = (found.config, sampler, found.model, found.tokenizer, self.samples, key, mesh, asked)
        with jax.set_mesh(mesh):
            followed = generate.trajectories(*args, frames=self.frames)
        for source in sources[:1]:
            print(f"{source}\n")
        for frame in followed[0]:
            print(f"t = {frame.t:.3f}  {frame.text}")
        about = f"{', '.join(f'{k} {v}' for k, v in told(sampler, asked).items())}, seed {self.seed}"
        about += ". What the network predicts at t, decoded. Words that changed since the frame before are marked."
        out = self.out or found.directory / "trajectory.html"
        runs.write_whole(out, pages.trajectory_page(f"{found.name}: from noise to text", about, followed, sources))
        print(f"\n{out}")


@dataclass(frozen=True)
class Compare(OfRuns):
    """Several runs side by side with the same sampler: one table, one plot."""

    runs: tyro.conf.Positional[tuple[str, ...]] = tyro.MISSING
    """Directories of runs, or released checkpoints."""
    how: Flat[Settings] = Settings()
    seeds: tuple[int, ...] = (0,)
    """Of the noise."""
    out: Path = Path("runs/compare")
    """Files to write, without their ending."""

    def __call__(self):
        benches = self.benches(self.runs, self.how.form)
        figure = figures.compare(benches, self.seeds or (0,), [self.how.sampler(bench.trained.config) for bench in benches])
        figures.write(figure, self.out)


Command = (
    Annotated[Samples, tyro.conf.subcommand("samples")]
    | Annotated[TableCommand, tyro.conf.subcommand("table")]
    | Annotated[FigureCommand, tyro.conf.subcommand("figure")]
    | Annotated[Trajectory, tyro.conf.subcommand("trajectory")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Speed, tyro.conf.subcommand("speed")]
)


def main():
    with one_line():
        tyro.cli(Command, description=__doc__)()


if __name__ == "__main__":
    train.huge_pages()
    main()

"""The paper's tables with a column for each of our runs beside the paper's own numbers."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import paper
import runs
from errors import Refused
from generate import Sampler
from measure import Bench, over_seeds
from metrics import Score, shown
from trained import Trained

ENTROPY = "unigram entropy (nats)"


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def text(self) -> str:
        """Aligned columns for the terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        aligned = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, "", *aligned, "", *self.notes])

    def markdown(self) -> str:
        lines = [self.columns, ["---:"] * len(self.columns), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), "", *self.notes, ""])

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out).writerows([self.columns, *self.rows])
        return out.getvalue()


def write(table: Table, out: Path):
    """Print a table, and write it as Markdown and CSV."""
    runs.write_whole(out.with_suffix(".md"), table.markdown())
    runs.write_whole(out.with_suffix(".csv"), table.csv())
    print(f"{table.text()}\n\n{out.with_suffix('.md')}\n{out.with_suffix('.csv')}")


def sampler_for(settings: paper.Sampling, cfg: float = 1.0) -> Sampler:
    return Sampler(settings.steps, settings.w, cfg, settings.gamma)


def number(score: Score | None) -> str:
    if score is None:
        return "-"
    return shown("", score) if isinstance(score, tuple) else f"{score:.2f}"


def pair(bench: Bench, scores: dict[str, Score]) -> list[str]:
    return [number(scores[bench.perplexity]), number(scores[ENTROPY])]


def notes_of(benches: Sequence[Bench], seeds: Iterable[int], more: str = "") -> list[str]:
    """The exact settings, seeds, number of samples and meaning of the numbers, for every run."""
    seeds = ", ".join(map(str, seeds))
    lines = [f"{b.trained.name}: {b.n:,} samples, seed {seeds}, step {b.trained.step:,}; {b.signature}" for b in benches]
    return [*dict.fromkeys(lines), *([more] if more else [])]


def unconditional(benches: Sequence[Bench]):
    for bench in benches:
        if not bench.judge:
            raise Refused(
                f"--run {bench.trained.name}: this table is of texts without a source; its answers go into `downstream`"
            )


def valid_note(benches: Sequence[Bench]) -> str:
    judged_exactly = any(bench.corpus.rules and bench.judge for bench in benches)
    return "Perplexities under a grammar and under GPT-2 are not comparable: trends are." if judged_exactly else ""


def system(benches: Sequence[Bench], seeds: Sequence[int] | None) -> Table:
    """Table 9: few steps without distillation, over seeds."""
    unconditional(benches)
    seeds = seeds or list(paper.SYSTEM_SEEDS)
    columns = ["steps", "w", "γ", *(f"{b.trained.name} {what}" for b in benches for what in ("PPL", "entropy"))]
    rows = []
    for settings, (ppl, entropy) in paper.SYSTEM.items():
        ours = [cell for b in benches for cell in pair(b, over_seeds(b, sampler_for(settings), seeds))]
        rows.append([*map(str, settings), *ours, f"{ppl[0]} ± {ppl[1]}", f"{entropy[0]} ± {entropy[1]}"])
    notes = notes_of(benches, seeds, valid_note(benches))
    return Table("System (Table 9)", [*columns, "paper PPL", "paper entropy"], rows, notes)


def scaling(benches: Sequence[Bench], seeds: Sequence[int] | None) -> Table:
    """Table 10: SDE and ODE over guidance scales, for each size."""
    unconditional(benches)
    seeds = seeds or [0]
    sizes = {b.trained.config.model: None for b in benches if b.trained.config.model in paper.SIZES} or paper.SIZES
    columns = ["sampler", "w", *(f"{b.trained.name} {what}" for b in benches for what in ("PPL", "entropy"))]
    columns += [f"paper {size} {what}" for size in sizes for what in ("PPL", "entropy")]
    rows = []
    for settings, theirs in paper.SCALING.items():
        ours = [cell for b in benches for cell in pair(b, over_seeds(b, sampler_for(settings), seeds))]
        printed = [f"{value:.2f}" for size in sizes for value in theirs[size]]
        rows.append(["SDE" if settings.gamma else "ODE", str(settings.w), *ours, *printed])
    return Table("Scaling (Table 10), 64 steps", columns, rows, notes_of(benches, seeds, valid_note(benches)))


def few_step(benches: Sequence[Bench], seeds: Sequence[int] | None) -> Table:
    """Table 4: a distilled run (and others beside it) at 1 to 32 steps."""
    unconditional(benches)
    seeds = seeds or [0]
    columns = ["steps", "w", "γ", *(f"{b.trained.name} {what}" for b in benches for what in ("PPL", "entropy"))]
    columns += [f"paper {method} {what}" for method in paper.FEW_STEP_METHODS for what in ("PPL", "entropy")]
    rows = []
    for steps, theirs in paper.FEW_STEP.items():
        settings = paper.FEW_STEP_SAMPLING[steps]
        ours = [cell for b in benches for cell in pair(b, over_seeds(b, sampler_for(settings), seeds))]
        rows.append([*map(str, settings), *ours, *(f"{value:.2f}" for method in theirs for value in method)])
    return Table("Few steps (Table 4)", columns, rows, notes_of(benches, seeds, valid_note(benches)))


def rounds(benches: Sequence[Bench], seeds: Sequence[int] | None) -> Table:
    """Table 5: a row for each run, in the order of the rounds, at 1 to 8 steps."""
    unconditional(benches)
    seeds = seeds or [0]
    columns = ["run", *(f"step={n} {what}" for n in paper.ROUNDS_SAMPLING for what in ("PPL", "entropy"))]
    rows = []
    for b in benches:
        cells = [pair(b, over_seeds(b, sampler_for(settings), seeds)) for settings in paper.ROUNDS_SAMPLING.values()]
        rows.append([b.trained.name, *(cell for each in cells for cell in each)])
    for i, theirs in enumerate(paper.ROUNDS.values(), 1):
        rows.append([f"paper r{i}", *(cell for ppl, entropy in theirs.values() for cell in (str(ppl), f"{entropy:.2f}"))])
    return Table("Rounds of distillation (Table 5)", columns, rows, notes_of(benches, seeds, valid_note(benches)))


def downstream(benches: Sequence[Bench], seeds: Sequence[int] | None) -> Table:
    """Table 1: BLEU and ROUGE of runs with sources."""
    seeds, names = seeds or [0], ("BLEU", "ROUGE-1", "ROUGE-2", "ROUGE-L")
    rows = []
    for b in benches:
        if b.judge:
            raise Refused(f"--run {b.trained.name}: its texts have no source, so there is no right answer to compare with")
        scores = over_seeds(b, sampler_for(paper.DOWNSTREAM_SAMPLING, paper.DOWNSTREAM_CFG), seeds)
        rows.append([b.trained.name, b.trained.config.data, *(number(scores[name]) for name in names)])
    for method, (size, bleu, *rouge) in paper.DOWNSTREAM.items():
        rows.append([f"paper: {method}", f"{size}, test sets", number(bleu), *map(number, rouge)])
    notes = notes_of(benches, seeds, "The paper's are of the test sets: BLEU of De-En, ROUGE of XSum.")
    return Table("Downstream (Table 1)", ["run", "data", *names], rows, notes)


def tokens(trained: Sequence[Trained]) -> Table:
    """Table 8: tokens trained on."""
    rows, elf = [], 5 * paper.OWT_TOKENS
    for run in trained:
        c = run.config
        total = c.batch * c.steps * c.length
        rows.append([run.name, f"{c.batch} x {c.steps:,} x {c.length}", "-", f"{total / 1e9:.4g}B", f"{total / elf:.4g}x"])
    for method, (base, distillation, billions, ratio) in paper.TOKENS.items():
        words = [f"{b} x {s:,} x {n}" for b, s, n in filter(None, (base, distillation))]
        words = words or [f"5 x {paper.OWT_TOKENS / 1e9:.2f}B"]
        rows.append([f"paper: {method}", *[*words, "-"][:2], f"{billions}B", f"{ratio}x"])
    notes = ["batch x steps x length, padding included; ratio to the paper's ELF-B"]
    return Table("Training tokens (Table 8)", ["run", "training", "distillation", "tokens", "ratio"], rows, notes)


TABLES: dict[str, Callable] = {
    "system": system,
    "scaling": scaling,
    "few-step": few_step,
    "rounds": rounds,
    "downstream": downstream,
    "tokens": tokens,
}

"""The paper's tables with a column for each of our runs beside the paper's own numbers."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import paper
import runs
from errors import Refused
from generate import Sampler
from measure import Bench, over_seeds
from mesh import is_chief
from metrics import Score, shown
from trained import Trained, history


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def text(self) -> str:
        """Aligned columns for the terminal, the words of their heads below each other."""
        widths = [max([8, *(len(row[i]) for row in self.rows)]) for i in range(len(self.columns))]
        whole = dict(break_long_words=False, break_on_hyphens=False)
        heads = [wrap(head, width, **whole) for head, width in zip(self.columns, widths, strict=True)]
        widths = [max(width, *map(len, head)) for width, head in zip(widths, heads, strict=True)]
        height = max(map(len, heads))
        lines = [*zip(*([""] * (height - len(head)) + head for head in heads), strict=True), *self.rows]
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
    """Print a table, and write it as Markdown and CSV: files named `out`, with an ending each."""
    if is_chief():
        runs.write_whole(Path(f"{out}.md"), table.markdown())
        runs.write_whole(Path(f"{out}.csv"), table.csv())
        print(f"{table.text()}\n\n{out}.md\n{out}.csv")


def number(name: str, score: Score) -> str:
    """Shares in percent, means with their error, and all else to two decimals; - where there is none."""
    plain = isinstance(score, float) and math.isfinite(score) and not shown(name, score).endswith("%")
    return f"{score:.2f}" if plain else shown(name, score)


def printed(score: Score | None) -> str:
    """As the paper prints it: errors to two decimals at least."""
    if isinstance(score, tuple):
        mean, error = score
        return f"{mean} ± {max(str(error), f'{error:.2f}', key=len)}"
    return "-" if score is None else str(score)


def sampler_for(bench: Bench, settings: paper.Sampling) -> Sampler:
    """The paper's settings; answers to sources are sampled as in its Table 1, with the steps of these."""
    if bench.asked:
        return Sampler(settings.steps, paper.DOWNSTREAM_SAMPLING.w, paper.DOWNSTREAM_CFG, paper.DOWNSTREAM_SAMPLING.gamma)
    return Sampler(settings.steps, settings.w, 1.0, settings.gamma)


def heads(benches: Sequence[Bench]) -> list[str]:
    """A column for each score that the judge of each run shows."""
    return [f"{bench.trained.name} {what}" for bench in benches for what in bench.judge.shown]


def cells(benches: Sequence[Bench], settings: paper.Sampling, seeds: Sequence[int]) -> list[str]:
    """The numbers under `heads`."""
    found = []
    for bench in benches:
        scores = over_seeds(bench, sampler_for(bench, settings), seeds)
        found += [number(name, scores[name]) for name in bench.judge.shown.values()]
    return found


def notes_of(benches: Sequence[Bench], seeds: Iterable[int], *more: str) -> list[str]:
    """Number of samples, seeds, samplers and meaning of the numbers, for every run."""
    seeds = ", ".join(map(str, seeds))
    lines = []
    for bench in benches:
        about, drawn = bench.trained, f"{bench.n:,} samples, seed {seeds}, {bench.form} form"
        lines.append(f"{about.name}: step {about.step:,}, {drawn}; {bench.judge.signature}")
    if any(bench.corpus and bench.corpus.rules for bench in benches):
        lines.append("Perplexities under a grammar and under GPT-2 are not comparable: trends are.")
    return [*dict.fromkeys(lines), *more]


ANSWERS = f"Answers: ODE, w {paper.DOWNSTREAM_SAMPLING.w:g}, guidance by the source {paper.DOWNSTREAM_CFG:g} (Table 1)."


def need_same_scores(benches: Sequence[Bench]):
    if len({tuple(bench.judge.shown.values()) for bench in benches}) > 1:
        raise Refused("these runs are judged by different scores: look at them apart, or give all the same --judge")


def need_perplexity(benches: Sequence[Bench]):
    need_same_scores(benches)
    for bench in benches:
        if bench.asked:
            raise Refused(f"--run {bench.trained.name}: this is about texts without a source; its answers go into `downstream`")
        if "PPL" not in bench.judge.shown:
            raise Refused(f"--run {bench.trained.name}: this needs perplexities, so a --judge")


def need_answers(benches: Sequence[Bench]):
    need_same_scores(benches)
    for bench in benches:
        if not bench.asked:
            raise Refused(f"--run {bench.trained.name}: its texts have no source, so there is no right answer to compare with")
        if "BLEU" not in bench.judge.shown:
            raise Refused("--judge: this compares texts with the right answers, which needs no judge")


def system(benches: Sequence[Bench], seeds: Sequence[int]) -> Table:
    """Table 9: few steps without distillation, over seeds."""
    need_perplexity(benches)
    seeds = seeds or list(paper.SYSTEM_SEEDS)
    rows = []
    for settings, theirs in paper.SYSTEM.items():
        rows.append([*map(str, settings), *cells(benches, settings, seeds), *map(printed, theirs)])
    columns = ["steps", "w", "γ", *heads(benches), "paper PPL", "paper entropy"]
    return Table("System (Table 9)", columns, rows, notes_of(benches, seeds))


def scaling(benches: Sequence[Bench], seeds: Sequence[int]) -> Table:
    """Table 10: SDE and ODE over guidance scales, for each size."""
    need_perplexity(benches)
    seeds = seeds or [0]
    sizes = {b.trained.config.model: None for b in benches if b.trained.config.model in paper.SIZES} or paper.SIZES
    rows = []
    for settings, theirs in paper.SCALING.items():
        numbers = [f"{value:.2f}" for size in sizes for value in theirs[size]]
        rows.append(["SDE" if settings.gamma else "ODE", str(settings.w), *cells(benches, settings, seeds), *numbers])
    columns = ["sampler", "w", *heads(benches), *(f"paper {size} {what}" for size in sizes for what in ("PPL", "entropy"))]
    return Table("Scaling (Table 10): 64 steps, the SDE with γ 1", columns, rows, notes_of(benches, seeds))


def few_step(benches: Sequence[Bench], seeds: Sequence[int]) -> Table:
    """Table 4: a distilled run (and others beside it) at 1 to 32 steps. Of answers to sources, the paper has none."""
    seeds = seeds or [0]
    if any(bench.asked for bench in benches):
        need_answers(benches)
        rows = [[str(n), *cells(benches, settings, seeds)] for n, settings in paper.FEW_STEP_SAMPLING.items()]
        return Table("Few steps", ["steps", *heads(benches)], rows, notes_of(benches, seeds, ANSWERS))
    need_perplexity(benches)
    rows = []
    for steps, theirs in paper.FEW_STEP.items():
        settings = paper.FEW_STEP_SAMPLING[steps]
        numbers = [f"{value:.2f}" for method in theirs for value in method]
        rows.append([*map(str, settings), *cells(benches, settings, seeds), *numbers])
    columns = ["steps", "w", "γ", *heads(benches)]
    columns += [f"paper {method} {what}" for method in paper.FEW_STEP_METHODS for what in ("PPL", "entropy")]
    return Table("Few steps (Table 4)", columns, rows, notes_of(benches, seeds))


def rounds(benches: Sequence[Bench], seeds: Sequence[int]) -> Table:
    """Table 5: a row for each run, in the order of the rounds, at 1 to 8 steps. Of answers to sources, the paper has none."""
    has_answers = any(bench.asked for bench in benches)
    (need_answers if has_answers else need_perplexity)(benches)
    seeds, names = seeds or [0], list(benches[0].judge.shown)
    rows = []
    for bench in benches:
        found = [cells([bench], settings, seeds) for settings in paper.ROUNDS_SAMPLING.values()]
        rows.append([bench.trained.name, *(cell for each in found for cell in each)])
    columns = ["run", *(f"step={n} {what}" for n in paper.ROUNDS_SAMPLING for what in names)]
    if has_answers:
        return Table("Rounds of distillation", columns, rows, notes_of(benches, seeds, ANSWERS))
    sampling = paper.ROUNDS_SAMPLING[1]
    title = f"Rounds of distillation (Table 5): w {sampling.w}, γ {sampling.gamma}"
    notes = notes_of(benches, seeds, f"* degenerate, as the paper calls it: entropy below {paper.DEGENERATE_ENTROPY:g}")
    return Table(title, columns, rows + their_rounds(names), notes)


def their_rounds(names: Sequence[str]) -> list[list[str]]:
    """The paper's rows of Table 5, under columns of these names for each number of steps."""
    rows = []
    for i, theirs in enumerate(paper.ROUNDS.values(), 1):
        row = [f"paper r{i}"]
        for ppl, entropy in theirs.values():
            by_name = {"PPL": str(ppl), "entropy": f"{entropy:.2f}{'*' if entropy < paper.DEGENERATE_ENTROPY else ''}"}
            row += [by_name.get(name, "-") for name in names]
        rows.append(row)
    return rows


def downstream(benches: Sequence[Bench], seeds: Sequence[int]) -> Table:
    """Table 1: BLEU and ROUGE of runs with sources."""
    need_answers(benches)
    seeds = seeds or [0]
    rows = [[b.trained.name, b.trained.config.data, *cells([b], paper.DOWNSTREAM_SAMPLING, seeds)] for b in benches]
    for method, (size, *theirs) in paper.DOWNSTREAM.items():
        rows.append([f"paper: {method}", f"{size}, test sets", *map(printed, theirs)])
    notes = notes_of(benches, seeds, ANSWERS, "The paper's are of the test sets: BLEU of De-En, ROUGE of XSum.")
    title = f"Downstream (Table 1): {paper.DOWNSTREAM_SAMPLING.steps} steps"
    return Table(title, ["run", "data", *benches[0].judge.shown], rows, notes)


def tokens(trained: Sequence[Trained]) -> Table:
    """Table 8: tokens trained on; of a distilled run, by its teacher and then in each round up to it."""
    rows, elf = [], 5 * paper.OWT_TOKENS
    for run in trained:
        stages = [(c.batch, steps, c.length) for c, steps in history(run)]
        words = [f"{b} x {s:,} x {n}" for b, s, n in stages]
        total = sum(b * s * n for b, s, n in stages)
        distilled = f"{' + '.join(words[1:])}" or "-"
        rows.append([run.name, words[0], distilled, f"{total / 1e9:.4g}B", f"{total / elf:.4g}x"])
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

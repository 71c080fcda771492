"""The paper's tables: scores of our runs beside the paper's own numbers."""

import csv
import io
import math
from collections.abc import Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from config import Sampler
from report import paper
from report.metrics import shown
from report.paper import Sampling, printed
from report.samples import Bench, over_seeds
from runtime.checkpoints import Trained, history
from runtime.errors import UserError
from runtime.files import write_file
from runtime.processes import is_process_0


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Container[int] = ()) -> str:
    """Format a table as Markdown; columns are aligned right, except the column numbers in `left`."""
    rule = ["---" if i in left else "---:" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *rows])


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def text(self) -> str:
        """Format the table for the terminal, with aligned columns and wrapped heads."""
        widths = [max([8, *(len(row[i]) for row in self.rows)]) for i in range(len(self.columns))]
        whole = dict(break_long_words=False, break_on_hyphens=False)
        heads = [wrap(head, width, **whole) for head, width in zip(self.columns, widths, strict=True)]
        widths = [max(width, *map(len, head)) for width, head in zip(widths, heads, strict=True)]
        height = max(map(len, heads))
        lines = [*zip(*([""] * (height - len(head)) + head for head in heads), strict=True), *self.rows]
        aligned = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        return "\n".join([self.title, "", *aligned, "", *self.notes])

    def markdown(self) -> str:
        table = markdown_table(self.columns, self.rows)
        return "\n".join([f"**{self.title}**", "", table, "", *self.notes, ""])

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out).writerows([self.columns, *self.rows])
        return out.getvalue()


def write(table: Table, out: Path):
    """Print a table, and write it to `out`.md and `out`.csv."""
    if is_process_0():
        write_file(Path(f"{out}.md"), table.markdown())
        write_file(Path(f"{out}.csv"), table.csv())
        print(f"{table.text()}\n\n{out}.md\n{out}.csv")


number = partial(shown, digits=2)  # formats a score of ours


def check_judges(benches: Sequence[Bench], answers: bool | None = None):
    """Refuse runs whose scores differ, or that lack what is needed: scores of answers, or perplexities."""
    if len({tuple(bench.judge.shown.values()) for bench in benches}) > 1:
        names = ", ".join(bench.trained.name for bench in benches)
        raise UserError(f"{names}: their scores differ; give all the same --judge")
    if answers is None:
        return
    for bench in benches:
        run = f"--run {bench.trained.name}"
        if answers and not bench.conditions:
            raise UserError(
                f"{run}: its texts have no source, so there is no right answer; give a run with sources"
            )
        if bench.conditions and not answers:
            raise UserError(f"{run}: this is about texts without a source; see `table downstream`")
        if ("BLEU" if answers else "PPL") not in bench.judge.shown:
            need = "answers need no judge: leave out" if answers else "this needs perplexities, so a"
            raise UserError(f"{run}: {need} --judge")


def cells(bench: Bench, settings: Sampling, seeds: Sequence[int]) -> dict[str, str]:
    """Measure the scores that the judge shows; answers are guided as in the paper's Table 1."""
    w, cfg, gamma = settings.w, 1.0, settings.gamma
    if bench.conditions:
        w, cfg, gamma = TABLE_1.w, paper.DOWNSTREAM_CFG, TABLE_1.gamma
    scores = over_seeds(bench, Sampler(settings.steps, w, cfg, gamma), seeds)
    return {head: number(name, scores[name]) for head, name in bench.judge.shown.items()}


def notes_of(benches: Sequence[Bench], seeds: Iterable[int], *more: str) -> list[str]:
    """Describe every measurement: samples, seeds, sampler and meaning of the scores."""
    seeds, lines = ", ".join(map(str, seeds)), []
    for bench in benches:
        samples = f"{bench.n:,} samples, seed {seeds}, {bench.form} form"
        lines.append(f"{bench.trained.name}: step {bench.trained.step:,}, {samples}; {bench.judge.signature}")
    if any(bench.corpus and bench.corpus.rules for bench in benches):
        lines.append("Perplexities under a grammar and under GPT-2 are not comparable: trends are.")
    return [*dict.fromkeys(lines), *more]


class Spec(NamedTuple):
    """Table of the paper: settings to measure, and the numbers that the paper prints."""

    title: str
    head: str
    """Columns that name a row."""
    settings: Sequence[Sampling]
    """Sampler settings, one in each row; in a table by run, one in each group of columns."""
    paper: Sequence[dict[str, str]]
    """Paper's cells by column: at the end of each row; in a table by run, in rows below ours."""
    by_run: bool = False
    answers: bool = False
    notes: Sequence[str] = ()
    seeds: Sequence[int] = (0,)


def ppl_and_entropy(pairs: Iterable[tuple[str, tuple[float, float]]]) -> dict[str, str]:
    """Format the paper's named pairs as cells by column."""
    row = {}
    for name, (ppl, entropy) in pairs:
        row |= {f"paper {name} PPL": f"{ppl:.2f}", f"paper {name} entropy": f"{entropy:.2f}"}
    return row


TABLE_1 = paper.DOWNSTREAM_SAMPLING
FEW = paper.FEW_STEP_SAMPLING.values()
ROUNDS = paper.ROUNDS_SAMPLING.values()
SYSTEM = [{"paper PPL": printed(ppl), "paper entropy": printed(h)} for ppl, h in paper.SYSTEM.values()]
SCALING = [ppl_and_entropy(row.items()) for row in paper.SCALING.values()]
FEW_STEP = [ppl_and_entropy(zip(paper.FEW_STEP_METHODS, row, strict=True)) for row in paper.FEW_STEP.values()]
ROUND_ROWS = [
    {"run": f"paper r{i}"}
    | {f"step={n} PPL": str(ppl) for n, (ppl, _) in row.items()}
    | {f"step={n} entropy": f"{h:.2f}{'*' * (h < paper.DEGENERATE_ENTROPY)}" for n, (_, h) in row.items()}
    for i, row in enumerate(paper.ROUNDS.values(), 1)
]
DOWNSTREAM = [
    {"run": f"paper: {method}", "data": f"{size}, test sets", "BLEU": printed(bleu)}
    | {f"ROUGE-{kind}": printed(score) for kind, score in zip("12L", rouge, strict=True)}
    for method, (size, bleu, *rouge) in paper.DOWNSTREAM.items()
]
GUIDED = f"Answers: ODE, w {TABLE_1.w:g}, guidance by the source {paper.DOWNSTREAM_CFG:g} (Table 1)."
TEST_SETS = "The paper's are of the test sets: BLEU of De-En, ROUGE of XSum."
DEGENERATE = f"* degenerate, as the paper calls it: entropy below {paper.DEGENERATE_ENTROPY:g}"
BY_SAMPLER = "Scaling (Table 10): 64 steps, the SDE with γ 1"
BY_ROUND = "Rounds of distillation"
TABLE_5 = f"{BY_ROUND} (Table 5): w 2.5, γ 1.5"
AT_64 = "Downstream (Table 1): 64 steps"
SPECS = {
    "system": Spec("System (Table 9)", "steps w γ", list(paper.SYSTEM), SYSTEM, seeds=paper.SYSTEM_SEEDS),
    "scaling": Spec(BY_SAMPLER, "sampler w", list(paper.SCALING), SCALING),
    "few-step": Spec("Few steps (Table 4)", "steps w γ", FEW, FEW_STEP),
    "few-step of answers": Spec("Few steps", "steps", FEW, [{}] * len(FEW), answers=True, notes=[GUIDED]),
    "rounds": Spec(TABLE_5, "run", ROUNDS, ROUND_ROWS, by_run=True, notes=[DEGENERATE]),
    "rounds of answers": Spec(BY_ROUND, "run", ROUNDS, [], by_run=True, answers=True, notes=[GUIDED]),
    "downstream": Spec(AT_64, "run data", [TABLE_1], DOWNSTREAM, True, True, [GUIDED, TEST_SETS]),
}


def paper_table(name: str, benches: Sequence[Bench], seeds: Sequence[int] = ()) -> Table:
    """Measure runs for a table of the paper; some have another form for answers to sources."""
    if f"{name} of answers" in SPECS and any(bench.conditions for bench in benches):
        name = f"{name} of answers"
    spec = SPECS[name]
    check_judges(benches, spec.answers)
    seeds = list(seeds or spec.seeds)
    make = rows_by_run if spec.by_run else rows_by_setting
    columns, *rows = make(spec, benches, seeds)
    return Table(spec.title, columns, rows, notes_of(benches, seeds, *spec.notes))


def rows_by_setting(spec: Spec, benches: Sequence[Bench], seeds: list[int]) -> list[list[str]]:
    """Make heads and a row for each setting; if the paper has a run's size, other sizes are left out."""
    head, sizes = spec.head.split(), dict.fromkeys(bench.trained.config.model for bench in benches)
    names = [name for size in sizes for name in spec.paper[0] if size in name.split()] or list(spec.paper[0])
    rows = [[*head, *(f"{b.trained.name} {score}" for b in benches for score in b.judge.shown), *names]]
    for settings, theirs in zip(spec.settings, spec.paper, strict=True):
        steps, w, gamma = map(str, settings)
        first = {"steps": steps, "w": w, "γ": gamma, "sampler": "SDE" if settings.gamma else "ODE"}
        ours = [cell for bench in benches for cell in cells(bench, settings, seeds).values()]
        rows.append([*(first[name] for name in head), *ours, *(theirs[name] for name in names)])
    return rows


def rows_by_run(spec: Spec, benches: Sequence[Bench], seeds: list[int]) -> list[list[str]]:
    """Make heads and a row for each run, with columns for each setting; the paper lacks some scores."""
    rows = []
    for bench in benches:
        first = {"run": bench.trained.name, "data": bench.trained.config.data}
        row = {name: first[name] for name in spec.head.split()}
        for settings in spec.settings:
            step = f"step={settings.steps} " * (len(spec.settings) > 1)
            row |= {f"{step}{name}": cell for name, cell in cells(bench, settings, seeds).items()}
        rows.append(row)
    columns = list(rows[0])
    return [columns, *([row.get(column, "-") for column in columns] for row in [*rows, *spec.paper])]


def tokens(runs: Sequence[Trained]) -> Table:
    """Count the tokens trained on (Table 8); of a distilled run, by its teacher and in each round."""
    rows, columns = [], ["run", "training", "distillation", "tokens", "ratio"]
    for run in runs:
        stages = [(config.batch, steps, config.length) for config, steps in history(run)]
        first, *others = [f"{b} x {s:,} x {n}" for b, s, n in stages]
        total = sum(map(math.prod, stages))
        ratio = f"{total / (5 * paper.OWT_TOKENS):.4g}x"
        rows.append([run.name, first, " + ".join(others) or "-", f"{total / 1e9:.4g}B", ratio])
    for method, (base, distillation, billions, ratio) in paper.TOKENS.items():
        words = [f"{b} x {s:,} x {n}" for b, s, n in filter(None, (base, distillation))]
        words = words or [f"5 x {paper.OWT_TOKENS / 1e9:.2f}B"]
        rows.append([f"paper: {method}", *[*words, "-"][:2], f"{billions}B", f"{ratio}x"])
    notes = ["batch x steps x length, padding included; ratio to the paper's ELF-B"]
    return Table("Training tokens (Table 8)", columns, rows, notes)


TABLES = {name: partial(paper_table, name) for name in SPECS if not name.endswith("of answers")}

"""The paper's figures, drawn from our runs; where the paper prints the numbers of a curve, it is drawn beside ours."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import paper
import tables
from generate import Sampler
from measure import Bench, over_seeds
from metrics import ENTROPY, mean_of
from tables import Table, need_answers, need_perplexity, need_same_scores, notes_of, number

SCALES = (0.5, 1.0, 1.5, 2.0, 3.0)
STEPS = (4, 8, 16, 32, 64)
GAMMAS = (0.0, 0.5, 1.0, 1.5, 2.0)
CFG_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0)
SUMMARIES = ("xsum", "summarize")  # which the paper scores by ROUGE, and translations by BLEU
KINDS = {"ODE": 0.0, "SDE, γ 1": 1.0}  # by γ


class Point(NamedTuple):
    label: str
    """What is varied along the curve, if the axis does not tell."""
    x: float
    y: float


Curves = dict[str, list[Point]]


class Panel(NamedTuple):
    whose: str
    """Ours or the paper's, which have axes of their own as their judges and data are others."""
    y: str
    curves: Curves


class Figure(NamedTuple):
    title: str
    x: str
    panels: list[Panel]
    table: Table
    log_x: bool = False


def sweep(
    title: str,
    benches: Sequence[Bench],
    seeds: Sequence[int],
    curves: dict[str, dict[str, Sampler]],
    x: str | Sequence[float],
    y: str,
    axes: tuple[str, str],
    theirs: Curves | None = None,
    log_x: bool = False,
) -> Figure:
    """Measure every sampler of every curve (label -> sampler). `x` is a score, or the numbers along the axis; `y` is the head of
    one that the judge shows. Perplexity of valid texts has their share beside it."""
    labels = {y: axes[1]} | ({"valid": "share of valid texts"} if "valid" in benches[0].judge.shown else {})
    drawn, rows, names = {head: {} for head in labels}, [], []
    for bench in benches:
        for name, samplers in curves.items():
            scored = [over_seeds(bench, sampler, seeds) for sampler in samplers.values()]
            names = list(scored[0])
            rows += [[bench.trained.name, name, k, *map(number, s, s.values())] for k, s in zip(samplers, scored, strict=True)]
            along = [mean_of(scores[x]) for scores in scored] if isinstance(x, str) else x
            at = list(samplers) if isinstance(x, str) else [""] * len(samplers)
            for head, curve in drawn.items():
                up = [mean_of(scores[bench.judge.shown[head]]) for scores in scored]
                run = bench.trained.name
                label = run if len(curves) == 1 else name if len(benches) == 1 else f"{run}, {name}"
                curve[label] = [Point(*each) for each in zip(at, along, up, strict=True)]
    table = Table(title, ["run", "curve", "at", *names], rows, notes_of(benches, seeds))
    panels = [Panel("here" if theirs else "", labels[head], curve) for head, curve in drawn.items()]
    return Figure(title, axes[0], panels + ([Panel("the paper", axes[1], theirs)] if theirs else []), table, log_x)


def printed(size: str) -> dict[str, list[Point]]:
    """The paper's points of Table 10, from smaller to larger guidance."""
    curves = {}
    for kind, gamma in KINDS.items():
        found = [(s.w, theirs[size]) for s, theirs in paper.SCALING.items() if s.gamma == gamma and s.w <= max(SCALES)]
        curves[f"{size}, {kind}"] = [Point(f"w {w:g}", entropy, ppl) for w, (ppl, entropy) in found]
    return curves


def guidance(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figures 4 and 6: perplexity against entropy over guidance scales."""
    need_perplexity(benches)
    curves = {kind: {f"w {w:g}": Sampler(64, w, 1.0, gamma) for w in SCALES} for kind, gamma in KINDS.items()}
    sizes = {bench.trained.config.model for bench in benches} & paper.SIZES.keys() or {"elf-b"}
    theirs = {name: points for size in sorted(sizes) for name, points in printed(size).items()}
    title = "Guidance scale (Figures 4 and 6), 64 steps"
    return sweep(title, benches, seeds, curves, ENTROPY, "PPL", ("entropy", "perplexity"), theirs)


def samplers(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figure 5c: ODE and SDE over numbers of steps."""
    need_perplexity(benches)
    curves = {kind: {f"{n} steps": Sampler(n, 1.0, 1.0, gamma) for n in STEPS} for kind, gamma in KINDS.items()}
    theirs = {f"elf-b, {kind}": [Point("", 64, paper.SCALING[64, 1.0, gamma]["elf-b"][0])] for kind, gamma in KINDS.items()}
    title = "Samplers (Figure 5c), w 1"
    return sweep(title, benches, seeds, curves, STEPS, "PPL", ("steps", "perplexity"), theirs, log_x=True)


def schedules(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figure 16a: time schedules over numbers of steps."""
    need_perplexity(benches)
    curves = {grid: {f"{n} steps": Sampler(n, 1.0, 1.0, 0.0, grid=grid) for n in STEPS} for grid in ("logit-normal", "uniform")}
    title = "Time schedules (Figure 16a), ODE, w 1"
    return sweep(title, benches, seeds, curves, STEPS, "PPL", ("steps", "perplexity"), log_x=True)


def gammas(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figure 16b: perplexity against entropy over γ."""
    need_perplexity(benches)
    curves = {"SDE": {f"γ {gamma:g}": Sampler(64, 1.0, 1.0, gamma) for gamma in GAMMAS}}
    found = {gamma: paper.SCALING[64, 1.0, gamma]["elf-b"] for gamma in KINDS.values()}
    theirs = {"elf-b": [Point(f"γ {gamma:g}", entropy, ppl) for gamma, (ppl, entropy) in found.items()]}
    title = "Noise re-injection (Figure 16b), 64 steps, w 1"
    return sweep(title, benches, seeds, curves, ENTROPY, "PPL", ("entropy", "perplexity"), theirs)


def cfg(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figure 17: the task's score over guidance scales of the condition."""
    need_answers(benches)
    curves = {"ODE": {f"cfg {scale:g}": Sampler(64, 1.0, scale, 0.0) for scale in CFG_SCALES}}
    is_summary = any(Path(bench.trained.config.data).name.startswith(SUMMARIES) for bench in benches)
    _, bleu, _, _, (rouge, _) = paper.DOWNSTREAM["ELF-B"]
    score, of_paper, corpus = ("ROUGE-L", rouge, "XSum") if is_summary else ("BLEU", bleu, "De-En")
    theirs = {f"elf-b, {corpus} (Table 1)": [Point("", paper.DOWNSTREAM_CFG, of_paper)]}
    title = "Guidance by the source (Figure 17), 64 steps, w 1"
    return sweep(title, benches, seeds, curves, CFG_SCALES, score, ("guidance scale", score), theirs)


def trade_off(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figures 7 and 9c: the frontier of perplexity and entropy at every number of steps."""
    need_perplexity(benches)
    curves = {f"{n} steps": {f"w {w:g}": Sampler(n, w, 1.0, 1.5) for w in SCALES} for n in (1, 2, 4, 8, 16, 32)}
    theirs = {"ELF-B, w 3 (Table 9)": [Point(f"{s.steps} steps", e[0], p[0]) for s, (p, e) in paper.SYSTEM.items()]}
    theirs["ELF + PD (Table 4)"] = [Point(f"{n} steps", row[-1][1], row[-1][0]) for n, row in paper.FEW_STEP.items()]
    title = "Trade-off by steps (Figures 7 and 9c), γ 1.5"
    return sweep(title, benches, seeds, curves, ENTROPY, "PPL", ("entropy", "perplexity"), theirs)


def few_step(benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Figure 9a: perplexity at few steps, beside distilled models of others."""
    need_perplexity(benches)
    curves = {"SDE": {f"{n} steps": Sampler(n, s.w, 1.0, s.gamma) for n, s in paper.FEW_STEP_SAMPLING.items()}}
    theirs = {
        method: [Point("", n, row[i][0]) for n, row in paper.FEW_STEP.items()] for i, method in enumerate(paper.FEW_STEP_METHODS)
    }
    steps = list(paper.FEW_STEP_SAMPLING)
    title = "Few steps (Figure 9a)"
    return sweep(title, benches, seeds, curves, steps, "PPL", ("steps", "perplexity"), theirs, log_x=True)


def compare(benches: Sequence[Bench], seeds: Sequence[int], samplers: Sequence[Sampler]) -> Figure:
    """One point for each run: perplexity against entropy, or the scores of its answers."""
    need_same_scores(benches)
    scored = [over_seeds(bench, sampler, seeds) for bench, sampler in zip(benches, samplers, strict=True)]
    first, *_, last = benches[0].judge.shown.values()
    x, y = (ENTROPY, first) if "PPL" in benches[0].judge.shown else (first, last)
    curves = {b.trained.name: [Point("", mean_of(s[x]), mean_of(s[y]))] for b, s in zip(benches, scored, strict=True)}
    rows = [[b.trained.name, *map(number, s, s.values())] for b, s in zip(benches, scored, strict=True)]
    settings = "; ".join(
        f"{b.trained.name}: {', '.join(f'{k} {v}' for k, v in asdict(s).items())}" for b, s in zip(benches, samplers, strict=True)
    )
    table = Table("Runs side by side", ["run", *scored[0]], rows, notes_of(benches, seeds, settings))
    return Figure("Runs side by side", x, [Panel("", y, curves)], table)


FIGURES: dict[str, Callable[[Sequence[Bench], Sequence[int]], Figure]] = {
    "guidance": guidance,
    "samplers": samplers,
    "schedules": schedules,
    "gamma": gammas,
    "cfg": cfg,
    "few-step": few_step,
    "trade-off": trade_off,
}


def write(figure: Figure, out: Path):
    """Draw a figure, and write its numbers beside it: files named `out`, with an ending each."""
    draw(figure, Path(f"{out}.png"))
    tables.write(figure.table, out)
    print(f"{out}.png")


def draw(figure: Figure, file: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = len(figure.panels)
    same_axis = figure.x in ("steps", "guidance scale")
    canvas, axes = plt.subplots(1, n, figsize=(4.2 * n, 3.6), layout="constrained", squeeze=False, sharex=same_axis)
    for axis, (whose, y, curves) in zip(axes[0], figure.panels, strict=True):
        for name, points in curves.items():
            points = [p for p in points if math.isfinite(p.y)]  # Where no text is valid, there is no perplexity.
            axis.plot([p.x for p in points], [p.y for p in points], "o-", ms=4, lw=1.2, label=name)
            for p in label_ends(points):
                axis.annotate(p.label, (p.x, p.y), textcoords="offset points", xytext=(4, 4), fontsize=7, color="0.35")
        axis.set(xlabel=figure.x, ylabel=y)
        axis.set_title(whose, fontsize=10)
        axis.margins(0.12)
        heights = [p.y for points in curves.values() for p in points if math.isfinite(p.y)]
        if heights and max(heights) > 50 * min(heights) > 0:
            axis.set_yscale("log")
        else:
            axis.set_ylim(widened(*axis.get_ylim()))
        if figure.log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
        else:
            axis.set_xlim(widened(*axis.get_xlim()))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    canvas.suptitle(figure.title, fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(file, dpi=130)
    plt.close(canvas)


def widened(low: float, high: float, least: float = 0.05) -> tuple[float, float]:
    """Limits of an axis, at least 5% of what it shows apart: chance should not look like a curve."""
    middle = (low + high) / 2
    half = max(high - low, least * abs(middle)) / 2
    return middle - half, middle + half


def label_ends(points: Sequence[Point]) -> Iterable[Point]:
    return points if len(points) <= 2 else (points[0], points[-1])

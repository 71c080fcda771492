"""The paper's figures with our scores beside the points it prints, and the plotter of all pictures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from config import Sampler
from report import paper, tables
from report.coverage import PAIR_DIVERGENCE
from report.metrics import ENTROPY, is_share, mean_of
from report.samples import Bench, over_seeds
from report.tables import Table, check_judges, notes_of, number
from runtime.checkpoints import read_metrics


class Point(NamedTuple):
    x: float
    y: float
    label: str = ""
    error: float | None = None
    """Standard error of x."""


class Panel(NamedTuple):
    title: str
    x: str
    y: str
    curves: dict[str, list[Point]]
    log: str = ""
    """Logarithmic axes: x, y or both. If values differ 50-fold, y always is."""
    grey: Sequence[list[Point]] = ()
    """Curves in the background."""
    rows: Sequence[str] = ()
    """Names of y = 0, 1, 2, … from the top."""


def plot(file: Path, title: str, panels: Sequence[Panel], size: tuple[float, float] = (4.2, 3.6)):
    """Draw panels side by side, each of a size in inches."""
    from matplotlib import figure

    canvas = figure.Figure((size[0] * len(panels), size[1]), layout="constrained")
    same_x = panels[0].x in ("steps", "guidance scale")
    axes = canvas.subplots(1, len(panels), sharex=same_x, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        draw(axis, panel)
    canvas.suptitle(title, fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(file, dpi=120)


def draw(axis, panel: Panel):
    """Draw a panel's curves, with the labels of their ends."""
    for points in panel.grey:
        axis.plot([p.x for p in points], [p.y for p in points], ".-", color="0.75", lw=0.8, zorder=0)
    for name, points in panel.curves.items():
        points = [p for p in points if math.isfinite(p.x + p.y)]  # no valid text, no perplexity
        errors = [p.error for p in points if p.error is not None]
        style = "o" if errors else "-" if len(points) > 50 else "o-"
        x, y = [p.x for p in points], [p.y for p in points]
        axis.errorbar(x, y, xerr=errors or None, fmt=style, ms=4, lw=1.2, capsize=3, label=name)
        for p in points if len(points) < 3 else (points[0], points[-1]):
            axis.annotate(p.label, p[:2], textcoords="offset points", xytext=(4, 4), fontsize=7, color="0.35")
    axis.set(xlabel=panel.x, ylabel=panel.y)
    axis.set_title(panel.title, fontsize=10)
    axis.margins(0.12)
    axis.grid(alpha=0.3)
    scale(axis, panel)
    if any(panel.curves):
        axis.legend(frameon=False, fontsize=8)


def scale(axis, panel: Panel):
    """Set the limits and the numbers of both axes."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

    points = [p for points in panel.curves.values() for p in points if math.isfinite(p.y)]
    heights = [p.y for p in points] or [0]
    if panel.rows:
        axis.set(yticks=range(len(panel.rows)), yticklabels=panel.rows, ylim=(len(panel.rows) - 0.5, -0.5))
    elif "y" in panel.log or max(heights) > 50 * min(heights) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(widened(*axis.get_ylim()))
    if "x" in panel.log:
        axis.set_xscale("log", base=2)
        return axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(widened(*axis.get_xlim()))
    axis.locator_params(axis="x", nbins=6)
    if is_share(panel.x) or any(p.x > 1e5 for p in points):
        axis.xaxis.set_major_formatter(PercentFormatter(1) if is_share(panel.x) else EngFormatter())


def widened(low: float, high: float) -> tuple[float, float]:
    """Widen an axis to 5% of what it shows, as chance should not look like a curve."""
    middle = (low + high) / 2
    half = max(high - low, 0.05 * abs(middle)) / 2
    return middle - half, middle + half


LOSSES = dict(mse="denoising: velocity error (Eq. 1)", ce="decoding: cross-entropy (Eq. 2)")


def plot_losses(run: Path):
    """Draw loss.png of a run: its named losses, in training and on held-out rows."""
    lines, panels = read_metrics(run), []
    validated = {key.partition("validation_")[2] for line in lines for key in line} - {"", "loss", *LOSSES}
    names = [name for name in [*LOSSES, *sorted(validated)] if any(line.get(name) for line in lines)]
    for name in names or ["loss"]:
        curves = {}
        for label, key in (("training", name), ("held out, EMA weights", f"validation_{name}")):
            if points := [Point(line["step"], line[key]) for line in lines if key in line]:
                curves[label] = points
        panels.append(Panel(LOSSES.get(name, name), "step", "", curves, log="y"))
    plot(run / "loss.png", "", panels, size=(4.5, 3.2))


class Figure(NamedTuple):
    panels: list[Panel]
    table: Table


def write(figure: Figure, out: Path):
    """Draw a figure as `out`.png, and print and write its table."""
    plot(Path(f"{out}.png"), figure.table.title, figure.panels)
    tables.write(figure.table, out)
    print(f"{out}.png")


def vary(setting: str, values: Sequence[float], sampler: Sampler) -> dict[str, Sampler]:
    """Make samplers that differ in one setting, by label."""
    label = {"gamma": "γ {:g}", "steps": "{:g} steps"}.get(setting, f"{setting} {{:g}}")
    return {label.format(value): replace(sampler, **{setting: value}) for value in values}


def table_10(size: str, samplers: dict[str, Sampler]) -> list[Point]:
    """Look up the paper's entropies and perplexities at 64 steps."""
    printed = {label: paper.SCALING[64, s.w, s.gamma][size] for label, s in samplers.items()}
    return [Point(entropy, ppl, label) for label, (ppl, entropy) in printed.items()]


class Sweep(NamedTuple):
    """Figure of the paper: samplers to measure, and the points that the paper prints."""

    title: str
    curves: dict[str, dict[str, Sampler]]
    """Samplers by label, for each curve."""
    paper: dict[str, list[Point]]
    x: str = "entropy"
    """Setting of the sampler along the x axis, or the measured entropy."""
    y: str = "PPL"
    """Score on the y axis, by its head in tables."""


SCALES, STEPS, SUMMARIES = (0.5, 1.0, 1.5, 2.0, 3.0), (4, 8, 16, 32, 64), ("xsum", "summarize")
ODE = Sampler(64, 1.0, 1.0, 0.0)
KINDS = {"ODE": ODE, "SDE, γ 1": replace(ODE, gamma=1.0)}
BY_SCALE = {kind: vary("w", SCALES, sampler) for kind, sampler in KINDS.items()}
BY_STEPS = {kind: vary("steps", STEPS, sampler) for kind, sampler in KINDS.items()}
BY_GRID = {grid: vary("steps", STEPS, replace(ODE, grid=grid)) for grid in ("logit-normal", "uniform")}
BY_GAMMA = {"SDE": vary("gamma", (0.0, 0.5, 1.0, 1.5, 2.0), ODE)}
BY_CFG = {"ODE": vary("cfg", (1.0, 1.5, 2.0, 3.0, 4.0), ODE)}
FEW = {"SDE": {f"{n} steps": Sampler(n, s.w, 1.0, s.gamma) for n, s in paper.FEW_STEP_SAMPLING.items()}}
BY_FEW = {f"{n} steps": vary("w", SCALES, Sampler(n, 1.0, 1.0, 1.5)) for n in (1, 2, 4, 8, 16, 32)}
SIZES = {f"{size}, {kind}": table_10(size, BY_SCALE[kind]) for size in paper.SIZES for kind in KINDS}
AT_64 = {f"elf-b, {kind}": [Point(64, table_10("elf-b", {"": s})[0].y)] for kind, s in KINDS.items()}
GAMMAS = {"elf-b": table_10("elf-b", vary("gamma", (0.0, 1.0), ODE))}
_, BLEU, _, _, (ROUGE_L, _) = paper.DOWNSTREAM["ELF-B"]
DE_EN = {"elf-b, De-En (Table 1)": [Point(paper.DOWNSTREAM_CFG, BLEU)]}
XSUM = {"elf-b, XSum (Table 1)": [Point(paper.DOWNSTREAM_CFG, ROUGE_L)]}
DISTILLED = {
    name: [Point(n, row[i][0]) for n, row in paper.FEW_STEP.items()]
    for i, name in enumerate(paper.FEW_STEP_METHODS)
}
BEST_OF_9 = [Point(h, ppl, f"{s.steps} steps") for s, ((ppl, _), (h, _)) in paper.SYSTEM.items()]
ELF_OF_4 = [Point(h, ppl, f"{n} steps") for n, (*_, (ppl, h)) in paper.FEW_STEP.items()]
FRONTIER = {"ELF-B, w 3 (Table 9)": BEST_OF_9, "ELF + PD (Table 4)": ELF_OF_4}
CFG = "Guidance by the source (Figure 17), 64 steps, w 1"
SWEEPS = {
    "guidance": Sweep("Guidance scale (Figures 4 and 6), 64 steps", BY_SCALE, SIZES),
    "samplers": Sweep("Samplers (Figure 5c), w 1", BY_STEPS, AT_64, "steps"),
    "schedules": Sweep("Time schedules (Figure 16a), ODE, w 1", BY_GRID, {}, "steps"),
    "gamma": Sweep("Noise re-injection (Figure 16b), 64 steps, w 1", BY_GAMMA, GAMMAS),
    "cfg": Sweep(CFG, BY_CFG, DE_EN, "cfg", "BLEU"),
    "cfg of summaries": Sweep(CFG, BY_CFG, XSUM, "cfg", "ROUGE-L"),
    "few-step": Sweep("Few steps (Figure 9a)", FEW, DISTILLED, "steps"),
    "trade-off": Sweep("Trade-off by steps (Figures 7 and 9c), γ 1.5", BY_FEW, FRONTIER),
}


def paper_figure(name: str, benches: Sequence[Bench], seeds: Sequence[int]) -> Figure:
    """Measure runs for a figure of the paper; perplexity of valid texts has their share beside it."""
    is_summary = any(Path(bench.trained.config.data).name.startswith(SUMMARIES) for bench in benches)
    sweep = SWEEPS["cfg of summaries" if name == "cfg" and is_summary else name]
    check_judges(benches, answers=sweep.x == "cfg")
    theirs = sweep.paper
    if name == "guidance":
        sizes = {bench.trained.config.model for bench in benches} & paper.SIZES.keys() or {"elf-b"}
        theirs = {label: points for label, points in theirs.items() if label.split(",")[0] in sizes}
    heads = [sweep.y, *(head for head in ("valid", "pairs") if head in benches[0].judge.shown)]
    curves, rows, scores = {head: {} for head in heads}, [], {}
    for bench, (curve, samplers) in product(benches, sweep.curves.items()):
        run = bench.trained.name
        label = run if len(sweep.curves) == 1 else curve if len(benches) == 1 else f"{run}, {curve}"
        for points in curves.values():
            points[label] = []
        for at, sampler in samplers.items():
            scores = over_seeds(bench, sampler, seeds)
            rows.append([run, curve, at, *map(number, scores, scores.values())])
            x = mean_of(scores[ENTROPY]) if sweep.x == "entropy" else getattr(sampler, sweep.x)
            for head in heads:
                y = mean_of(scores[bench.judge.shown[head]])
                curves[head][label].append(Point(x, y, at if sweep.x == "entropy" else ""))
    names = {"PPL": "perplexity", "valid": "share of valid texts", "cfg": "guidance scale"}
    names |= {"pairs": PAIR_DIVERGENCE}
    shown = [("here" if theirs else "", head, curves[head]) for head in heads]
    shown += [("the paper", sweep.y, theirs)] if theirs else []
    x, log = names.get(sweep.x, sweep.x), "x" * (sweep.x == "steps")
    panels = [Panel(who, x, names.get(y, y), points, log) for who, y, points in shown]
    table = Table(sweep.title, ["run", "curve", "at", *scores], rows, notes_of(benches, seeds))
    return Figure(panels, table)


FIGURES = {name: partial(paper_figure, name) for name in SWEEPS if name != "cfg of summaries"}


def compare(benches: Sequence[Bench], seeds: Sequence[int], samplers: Sequence[Sampler]) -> Figure:
    """Measure runs side by side: quality against entropy, and against the divergence from the corpus."""
    check_judges(benches)
    shown, scores, rows, settings = benches[0].judge.shown, {}, [], []
    for bench, sampler in zip(benches, samplers, strict=True):
        run = bench.trained.name
        scores[run] = over_seeds(bench, sampler, seeds)
        rows.append([run, *map(number, scores[run], scores[run].values())])
        settings.append(f"{run}: {', '.join(f'{k} {v}' for k, v in asdict(sampler).items())}")
    quality = next(iter(shown.values()))
    axes = [(ENTROPY, quality)] if ENTROPY in shown.values() else []
    axes += [(PAIR_DIVERGENCE, shown.get("valid", quality))] if "pairs" in shown else []
    panels = []
    for x, y in axes:
        curves = {run: [Point(mean_of(own[x]), mean_of(own[y]))] for run, own in scores.items()}
        panels.append(Panel("", x, y, curves))
    notes = notes_of(benches, seeds, "; ".join(settings))
    return Figure(panels, Table("Runs side by side", ["run", *scores[run]], rows, notes))

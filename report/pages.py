"""HTML pages of texts: samples with the best and worst marked, and trajectories from noise to text.

A page is one file that loads nothing else.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from string import Template
from typing import NamedTuple

from report.samples import Frame

STYLE = """
:root { color-scheme: light dark; --soft: color-mix(in srgb, currentColor 55%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } p.about, small { color: var(--soft); }
pre { overflow-x: auto; }
article { border-left: 4px solid color-mix(in srgb, currentColor 15%, transparent); }
article { padding: .1rem 0 .1rem .8rem; margin: .8rem 0; }
article.best { border-color: #2a9d4a; } article.worst { border-color: #d1493f; }
article small b { color: #2a9d4a; } article.worst small b { color: #d1493f; }
input[type=range] { width: 100%; } output { font-variant-numeric: tabular-nums; }
mark { background: color-mix(in srgb, #e8b13a 45%, transparent); color: inherit; border-radius: 3px; }
"""


def page(title: str, body: str) -> str:
    name, meta = escape(title), '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>{name}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{name}</h1>{body}</body></html>\n"


class Sample(NamedTuple):
    text: str
    score: float
    source: str | None = None
    reference: str | None = None


def small(text: str, before: str = "") -> str:
    return f"<div><small>{before}{escape(text)}</small></div>"


def article(i: int, sample: Sample, kind: str, name: str) -> str:
    """Format one sample; `kind` is best, worst or empty, `name` is the name of its score."""
    lines = [f"<div>{escape(sample.text or '(empty)')}</div>"]
    if sample.source is not None:
        lines = [small(sample.source), *lines, small(f"reference: {sample.reference}")]
    score = f"{name} {sample.score:.2f}" if math.isfinite(sample.score) else f"no {name}: not a valid text"
    lines.append(small(f"{i}: {score}", f"<b>{kind}</b> " if kind else ""))
    return f'<article class="{kind}" id="s{i}">{"".join(lines)}</article>'


def samples_page(
    title: str, about: str, table: str, samples: list[Sample], name: str, low_is_good: bool, marked: int = 3
) -> str:
    """Make a page of all samples; the `marked` best and worst by the score `name` stand out."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].score if low_is_good else -samples[i].score)
    marked = min(marked, len(samples) // 2)
    kinds = {i: "worst" for i, sample in enumerate(samples) if not math.isfinite(sample.score)}
    kinds |= dict.fromkeys(order[len(order) - marked :], "worst") | dict.fromkeys(order[:marked], "best")
    articles = [article(i, sample, kinds.get(i, ""), name) for i, sample in enumerate(samples)]
    links = [f'<a href="#s{i}">{i}</a>' for i in order]
    best, worst = ", ".join(links[:marked]), ", ".join(links[::-1][:marked])
    ends = f"<p>Best: {best}. Worst: {worst}.</p>" if marked else ""
    head = f'<p class="about">{escape(about)}</p><pre>{escape(table)}</pre>{ends}'
    return page(title, head + "".join(articles))


SLIDER = Template("""
<p class="about">$about Move the slider, or press the arrow keys.</p>
<label>t = <output id="t"></output>
<input id="slider" type="range" min="0" max="$last" value="0" step="1" autofocus></label>
<div id="texts"></div>
<script>
const samples = $samples, sources = $sources;
const slider = document.getElementById("slider");
function show() {
  const i = +slider.value;
  document.getElementById("t").value = samples[0][i].t.toFixed(3);
  document.getElementById("texts").replaceChildren(...samples.map((frames, n) => {
    const before = i ? frames[i - 1].text.split(" ") : [], article = document.createElement("article");
    if (n in sources) {
      const source = document.createElement("small");
      source.textContent = sources[n];
      article.append(source, document.createElement("br"));
    }
    frames[i].text.split(" ").forEach((word, j) => {
      const node = document.createElement(i && word !== before[j] ? "mark" : "span");
      node.textContent = word;
      article.append(node, " ");
    });
    return article;
  }));
}
slider.addEventListener("input", show);
show();
</script>
""")


def trajectory_page(title: str, about: str, samples: list[list[Frame]], sources: Sequence[str] = ()) -> str:
    """Make a page with a slider over t that marks changed words; a sample's source stands above it."""
    frames = [[frame._asdict() for frame in frames] for frames in samples]
    values = dict(about=escape(about), last=len(samples[0]) - 1)
    values |= dict(samples=in_script(frames), sources=in_script(list(sources)))
    return page(title, SLIDER.substitute(values))


def in_script(value: list) -> str:
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")

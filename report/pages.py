"""Pages to look at texts: samples with the best and the worst marked, and a sample on its way from noise to text.

A page is one file that needs nothing else.
"""

import json
import math
import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from generate import Frame

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
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


class Sample(NamedTuple):
    text: str
    score: float
    """Of this text alone."""
    source: str | None = None
    reference: str | None = None


def samples_page(
    title: str, about: str, table: str, samples: Sequence[Sample], what: str, low_is_good: bool, marked: int = 3
) -> str:
    """All samples; `what` is the name of their score, and the `marked` best and worst by it stand out."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].score if low_is_good else -samples[i].score)
    marked = min(marked, len(samples) // 2)
    best, worst = set(order[:marked]), set(order[len(order) - marked :])
    parts = []
    for i, sample in enumerate(samples):
        kind = "best" if i in best else "worst" if i in worst or not math.isfinite(sample.score) else ""
        lines = [f"<div>{escape(sample.text or '(empty)')}</div>"]
        if sample.source is not None:
            lines = [small(sample.source), *lines, small(f"reference: {sample.reference}")]
        score = f"{what} {sample.score:.2f}" if math.isfinite(sample.score) else f"no {what}: not a valid text"
        lines.append(small(f"{i}: {score}", f"<b>{kind}</b> " if kind else ""))
        parts.append(f'<article class="{kind}" id="s{i}">{"".join(lines)}</article>')
    links = [f'<a href="#s{i}">{i}</a>' for i in order]
    ends = f"<p>Best: {', '.join(links[:marked])}. Worst: {', '.join(links[::-1][:marked])}.</p>" if marked else ""
    return page(title, f'<p class="about">{escape(about)}</p><pre>{escape(table)}</pre>{ends}{"".join(parts)}')


def small(text: str, before: str = "") -> str:
    return f"<div><small>{before}{escape(text)}</small></div>"


SLIDER = """
<p class="about">{about} Move the slider, or press the arrow keys.</p>
<label>t = <output id="t"></output><input id="slider" type="range" min="0" max="{last}" value="0" step="1" autofocus></label>
<div id="texts"></div>
<script>
const samples = {samples}, sources = {sources};
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
"""


def trajectory_page(title: str, about: str, samples: Sequence[Sequence[Frame]], sources: Sequence[str] = ()) -> str:
    """A slider over t; words that differ from the frame before are marked. What is answered, if anything, stands above."""
    frames = [[frame._asdict() for frame in frames] for frames in samples]
    filled = dict(about=escape(about), last=str(len(samples[0]) - 1), sources=in_script(list(sources)), samples=in_script(frames))
    return page(title, re.sub(r"\{(about|last|sources|samples)\}", lambda found: filled[found[1]], SLIDER))


def in_script(what: list) -> str:
    return json.dumps(what, ensure_ascii=False).replace("<", "\\u003c")

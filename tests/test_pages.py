"""Pages as a browser shows them. Without Chromium (apt-get install chromium), these tests are left out."""

import re
import shutil
import subprocess

import pytest

from report import pages
from report.samples import Frame

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]


def shown(html, tmp_path, script=""):
    """The page after its scripts and the given one ran, as the browser sees it."""
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    words = [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path}/profile", "--dump-dom", file.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


FRAMES = [[Frame(0.0, "a <b> a"), Frame(0.5, "the <b> sat"), Frame(1.0, "the cat sat")]]
MOVE = "const s = document.getElementById('slider'); s.value = {}; s.dispatchEvent(new Event('input'));"


@needs_chromium
def test_the_slider_shows_the_text_of_every_time(tmp_path):
    page = pages.trajectory_page("From noise", "w 1 & more", FRAMES)

    def texts(dom):
        (article,) = re.findall(r"<article>(.*?)</article>", dom)
        return article

    assert (
        texts(shown(page, tmp_path, MOVE.format(2))) == "<span>the</span> <mark>cat</mark> <span>sat</span> "
    )
    assert (
        texts(shown(page, tmp_path, MOVE.format(1)))
        == "<mark>the</mark> <span>&lt;b&gt;</span> <mark>sat</mark> "
    )
    assert texts(shown(page, tmp_path)) == "<span>a</span> <span>&lt;b&gt;</span> <span>a</span> "


@needs_chromium
def test_what_is_answered_stands_above(tmp_path):
    page = pages.trajectory_page("From noise", "about", FRAMES, ["Die Katze saß. → the <cat> sat"])
    assert "<article><small>Die Katze saß. → the &lt;cat&gt; sat</small><br><span>a</span>" in shown(
        page, tmp_path
    )


@needs_chromium
def test_best_and_worst_samples_stand_out(tmp_path):
    samples = [pages.Sample(f"text {i} <i>", score) for i, score in enumerate([3.0, 1.0, float("inf"), 2.0])]
    dom = shown(
        pages.samples_page("Samples", "about", "a table", samples, "perplexity", True, marked=1), tmp_path
    )
    assert re.findall(r'<article class="(\w*)" id="(\w+)">', dom) == [
        ("", "s0"),
        ("best", "s1"),
        ("worst", "s2"),
        ("", "s3"),
    ]
    assert "text 2 &lt;i&gt;" in dom and "no perplexity: not a valid text" in dom


def test_a_page_needs_nothing_else():
    for page in (
        pages.trajectory_page("Title", "about", FRAMES),
        pages.samples_page(
            "Title", "about", "", [pages.Sample("a", 1.0, "source", "reference")], "ROUGE-L", False
        ),
    ):
        assert "http" not in page and "src=" not in page and page.startswith("<!doctype html>")

"""The built pages in Chromium, on a desk and on a phone, light and dark: `make browser`."""

import functools
import http.server
import os
import pathlib
import shutil
import threading

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
BUILD = pathlib.Path(__file__).parents[2] / "docs" / "build" / "html"
BUILD = pathlib.Path(os.environ.get("DOCS_BUILD", BUILD))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
  pytest.mark.skipif(not (BUILD / "index.html").exists(), reason="needs `make docs`"),
]
PAGES = sorted(str(page.relative_to(BUILD)) for page in BUILD.rglob("*.html"))

# Furo lets the whole text scroll sideways on a phone, so the document's width alone says little.
OVERFLOW = """() => [document.documentElement, ...document.querySelectorAll(".content")]
  .filter(box => box.scrollWidth > box.clientWidth + 1 && box.clientWidth)
  .map(box => `${box.className || box.tagName}: ${box.scrollWidth} > ${box.clientWidth}`)"""
BROKEN_NAMES = """() => [...document.querySelectorAll(
    "article table code .pre, article h1 code .pre, article h2 code .pre")]
  .filter(name => name.getClientRects().length > 1).map(name => name.innerText)"""
PICTURES = """() => [...document.querySelectorAll("article img")].filter(image => image.offsetWidth)
  .map(image => [image.getAttribute("src"), image.offsetWidth, image.parentElement.href || "",
                 image.parentElement.clientWidth])"""


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def site():
  handler = functools.partial(Quiet, directory=str(BUILD))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
  with sync_api.sync_playwright() as playwright:
    yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen_with_whole_names_and_legible_pictures(site, browser, width, scheme):
  from PIL import Image

  tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
  wrong = []
  for page in PAGES:
    tab.goto(f"{site}/{page}", wait_until="load")
    wrong += [(page, "wider than the screen", box) for box in tab.evaluate(OVERFLOW)]
    wrong += [(page, "broken name", name) for name in tab.evaluate(BROKEN_NAMES)]
    for source, shown, link, box in tab.evaluate(PICTURES):
      with Image.open((BUILD / page).parent / source) as image:
        points = 10 * image.info.get("dpi", (72, 72))[0] / 72  # in a notebook's picture
        text = shown / image.width * float(image.info.get("smallest text, px", points))
      if text < 8.99 or not link.endswith(source.rpartition("/")[2]):
        wrong.append((page, source, text, link))
      if width == 1280 and shown > box:
        wrong.append((page, source, f"{shown} pixels in {box}"))
  tab.close()
  assert not wrong, "\n".join(map(str, wrong))


ANSWERS = {
  "EMA": "cards/average_params",
  "SWA": "cards/average_params",
  "GradScaler": "cards/loss_scaling",
  "AMP": "cards/loss_scaling",
  "MultiSteps": "cards/accumulate",
  "LLRD": "cards/freeze_layers",
  "requires_grad": "cards/freeze_layers",
  "LoRA": "choosing",
  "Trainer": "guides/trainers",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_search_finds_the_answer_to_a_word_that_people_look_for_among_the_first_three(
  site, browser, word
):
  tab = browser.new_page()
  tab.goto(f"{site}/search.html?q={word}")
  results = tab.locator("#search-results ul.search > li > a")
  tab.wait_for_selector("#search-results .search-summary:has-text('found')", timeout=10_000)
  found = results.evaluate_all("links => links.map(link => link.getAttribute('href'))")
  assert any(link.startswith(f"{ANSWERS[word]}.html") for link in found[:3]), found[:3]
  tab.close()


def test_the_copy_button_copies_code_without_prompts(site, browser):
  context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
  tab = context.new_page()
  tab.goto(f"{site}/index.html")
  copied = copy(tab, tab.locator("div.highlight-python").first)
  assert copied.startswith("import jax.numpy as jnp\n")
  tab.goto(f"{site}/reference/centralize.html")
  copied = copy(tab, tab.locator("div.highlight", has_text=">>>").first)
  assert copied
  assert ">>>" not in copied
  context.close()


def copy(tab, block):
  block.hover()
  block.locator("button.copybtn").click()
  return tab.evaluate("navigator.clipboard.readText()")

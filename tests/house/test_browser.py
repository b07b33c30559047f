"""The built pages in Chromium, on a desk and on a phone, light and dark: `make browser`."""

import functools
import http.server
import io
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

# Of a table, what lies outside of its box, and what a phone squeezes into a column.
CUT_TABLES = """() => [...document.querySelectorAll("article .table-wrapper, article table")]
  .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1)
  .map(box => `${box.innerText.slice(0, 40)}: ${box.scrollWidth} > ${box.clientWidth}`)"""
NARROW_CELLS = """() => [...document.querySelectorAll("article table.rows td")]
  .filter(cell => cell.offsetWidth && cell.offsetWidth < 250).map(cell => cell.innerText)"""


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
    wrong += [(page, "cut table", table) for table in tab.evaluate(CUT_TABLES)]
    if width == 390:
      wrong += [(page, "narrow cell", cell) for cell in tab.evaluate(NARROW_CELLS)]
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


def test_a_wide_table_is_a_list_on_a_phone_with_the_headings_as_labels_and_the_roles_of_a_table(
  site, browser
):
  tab = browser.new_page(viewport={"width": 390, "height": 900})
  tab.goto(f"{site}/metrics.html")
  table = tab.get_by_role("table").first
  assert table.get_by_role("columnheader").count() == 4
  assert table.get_by_role("row").count() > 20
  cell = table.get_by_role("cell").nth(1)
  label, display = "getComputedStyle(cell, '::before').content", "getComputedStyle(cell).display"
  assert cell.evaluate(f"cell => {label}") == '"of: " / ""'
  assert cell.evaluate(f"cell => {display}") == "block"
  tab.emulate_media(media="print")
  assert cell.evaluate(f"cell => {display}") == "table-cell"
  tab.close()


@pytest.mark.parametrize("page", ["index.html", "how-it-works.html", "notebooks/race.html"])
def test_pictures_have_a_dark_ground_in_the_dark_alone_and_never_on_paper(site, browser, page):
  from PIL import Image

  def ground(scheme, media):
    tab.emulate_media(color_scheme=scheme, media=media)
    corner = Image.open(io.BytesIO(tab.locator("article img").first.screenshot())).getpixel((2, 2))
    return max(corner[:3])

  tab = browser.new_page()
  tab.goto(f"{site}/{page}")
  assert ground("dark", "screen") < 40
  assert ground("light", "screen") > 240
  assert ground("dark", "print") > 240
  tab.close()


def test_the_sidebar_begins_with_fine_tuning(site, browser):
  tab = browser.new_page(viewport={"width": 1280, "height": 900})
  tab.goto(f"{site}/index.html")
  wishes = tab.locator(".sidebar-tree .caption").all_inner_texts()
  assert [wish.lower() for wish in wishes[:3]] == [
    "first steps",
    "fine-tune a part of a model",
    "larger batches than fit",
  ]
  tab.close()


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
  assert copied.startswith("from flax import nnx\nimport jax.numpy as jnp\n")
  tab.goto(f"{site}/reference/centralize.html")
  copied = copy(tab, tab.locator("div.highlight", has_text=">>>").first)
  assert copied
  assert ">>>" not in copied
  context.close()


def copy(tab, block):
  block.hover()
  block.locator("button.copybtn").click()
  return tab.evaluate("navigator.clipboard.readText()")

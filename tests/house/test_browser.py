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
    "article table code .pre, article h1 code .pre, article h2 code .pre, article dl.py code .pre,"
    + ".sig-name .pre, .sig-param > .n > .pre")]
  .filter(name => name.closest("table") || name.innerText.length < 40)
  .filter(name => name.getClientRects().length > 1)
  .map(name => name.innerText)"""
BROKEN_FIGURES = """() => [...document.querySelectorAll("article td.figure")].filter(cell => {
    const range = document.createRange()
    range.selectNodeContents(cell.querySelector("p") || cell)
    return new Set([...range.getClientRects()].map(line => line.top)).size > 1
  }).map(cell => cell.innerText)"""
PICTURES = """() => [...document.querySelectorAll("article img")].filter(image => image.offsetWidth)
  .map(image => [image.getAttribute("src"), image.offsetWidth, image.parentElement.href || "",
                 image.parentElement.clientWidth])"""

# Parts of a table or a formula that lie outside of its box; entries of a phone's lists that are
# squeezed into a column or stand at the right; texts in narrow columns of a desk's tables.
CUT = """() => [...document.querySelectorAll("article :is(.table-wrapper, table, .formula)")]
  .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1)
  .map(box => `${box.innerText.slice(0, 40)}: ${box.scrollWidth} > ${box.clientWidth}`)"""
NARROW_CELLS = """() => [...document.querySelectorAll("article table.rows td, .genindextable li")]
  .filter(cell => cell.offsetWidth)
  .filter(cell => cell.offsetWidth < 250 || getComputedStyle(cell).textAlign == "right")
  .map(cell => cell.innerText)"""
NARROW_TEXTS = """() => [...document.querySelectorAll("article table.docutils td")]
  .filter(cell => cell.offsetWidth && cell.offsetWidth < 175 && cell.innerText.length > 60)
  .map(cell => `${cell.innerText}: ${cell.offsetWidth}`)"""

# Pictures of which a part is out of sight without a word about it, or all of which is in sight.
HINTS = """() => [...document.querySelectorAll("article a.picture")].filter(box => box.clientWidth)
  .filter(box => (box.scrollWidth > box.clientWidth + 1)
                 != (getComputedStyle(box, "::after").content != "none"))
  .map(box => `${box.href}: ${box.scrollWidth} in ${box.clientWidth}`)"""

# TeX, and types and objects of Python, as people should not see them.
RAW = """() => [...document.querySelectorAll("article :is(p, li, dt.sig)")]
  .filter(text => /\\\\[(\\[]|~\\w+\\.|<(class|function|factory)|object at 0x/.test(text.innerText))
  .map(text => text.innerText.slice(0, 200))"""

# The texts with a contrast below 4.5, which WCAG asks of text (AA).
PALE = """() => {
  const parse = colour => [...colour.match(/[\\d.]+/g).map(Number), 1]
  const light = colour => {
    const [red, green, blue] = parse(colour).map(
      part => part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4)
    return 0.05 + 0.2126 * red + 0.7152 * green + 0.0722 * blue
  }
  const ground = box => {
    while (box && parse(getComputedStyle(box).backgroundColor)[3] < 0.5) box = box.parentElement
    return box ? getComputedStyle(box).backgroundColor : "rgb(255, 255, 255)"
  }
  const found = new Set()
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (texts.nextNode()) {
    const box = texts.currentNode.parentElement
    if (!texts.currentNode.data.trim() || !box.getClientRects().length) continue
    const style = getComputedStyle(box)
    if (style.visibility != "visible") continue
    const two = [light(style.color), light(ground(box))]
    if (Math.max(...two) / Math.min(...two) < 4.5)
      found.add(`${box.className || box.tagName}: ${style.color} on ${ground(box)}`)
  }
  return [...found]
}"""


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
def test_pages_fit_the_screen_and_all_on_them_is_whole_and_legible(site, browser, width, scheme):
  from PIL import Image

  tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
  wrong, asked = [], []
  tab.on("request", lambda request: asked.append(request.url))
  for page in PAGES:
    tab.goto(f"{site}/{page}", wait_until="load")
    wrong += [(page, "wider than the screen", box) for box in tab.evaluate(OVERFLOW)]
    wrong += [(page, "broken name", name) for name in tab.evaluate(BROKEN_NAMES)]
    wrong += [(page, "cut", box) for box in tab.evaluate(CUT)]
    wrong += [(page, "broken figure", cell) for cell in tab.evaluate(BROKEN_FIGURES)]
    wrong += [(page, "raw markup", text) for text in tab.evaluate(RAW)]
    wrong += [(page, "pale text", text) for text in tab.evaluate(PALE)]
    wrong += [(page, "hint at a picture", picture) for picture in tab.evaluate(HINTS)]
    narrow = NARROW_CELLS if width == 390 else NARROW_TEXTS
    wrong += [(page, "narrow cell", cell) for cell in tab.evaluate(narrow)]
    for source, shown, link, box in tab.evaluate(PICTURES):
      with Image.open((BUILD / page).parent / source) as image:
        points = 10 * image.info.get("dpi", (72, 72))[0] / 72  # in a notebook's picture
        text = shown / image.width * float(image.info.get("smallest text, px", points))
      if text < 8.99 or not link.endswith(source.rpartition("/")[2]):
        wrong.append((page, source, text, link))
      if width == 1280 and shown > box:
        wrong.append((page, source, f"{shown} pixels in {box}"))
  tab.close()
  # Readers who are offline get the same pages.
  wrong += [url for url in asked if not url.startswith((site, "data:"))]
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

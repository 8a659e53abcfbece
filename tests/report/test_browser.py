"""A real browser without a screen opens the report. Skipped where there is none, unless HKD_REQUIRE_BROWSER=1."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from hkd_hpc.report.page import all_figures, page_of
from hkd_hpc.results import find_runs

pytestmark = pytest.mark.slow

PATIENCE_MS = 300_000  # where many processes share few cores
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def why_not() -> str:
    """Why no browser can be had here, empty where it can."""
    if CHROMIUM is None:
        return "no Chromium here: apt-get install --no-install-recommends chromium"
    return "" if importlib.util.find_spec("playwright") else "no Playwright here: pip install playwright"


@pytest.fixture(scope="module")
def browser():
    reason = why_not()
    if reason and os.environ.get("HKD_REQUIRE_BROWSER") == "1":
        pytest.fail(f"HKD_REQUIRE_BROWSER=1, but {reason}")
    if reason:
        pytest.skip(reason)
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(browser, report):
    """(the page, all that its console and its errors said), opened with the light scheme and without network."""
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(PATIENCE_MS)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.goto(report.as_uri())
    return page, said


@pytest.fixture(scope="module")
def told(study):
    """What stands on the page, as it was put into it."""
    return page_of(find_runs(study))


def test_tab_goes_from_the_skip_link_to_the_button_the_contents_and_the_tables(opened):
    page, _ = opened
    names = []
    for _ in range(3):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert names == ["Skip to the results", "Dark", "Results"]
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def paper_of(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_and_dark_by_the_system_and_by_the_button(opened):
    page, _ = opened
    assert paper_of(page) == "rgb(255, 255, 255)"
    page.locator("[data-plot]").first.scroll_into_view_if_needed()
    page.locator("[data-drawn]").first.wait_for()
    page.locator("#theme").click()
    assert paper_of(page) == "rgb(20, 23, 27)"
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"
    assert set(page.evaluate("[...document.querySelectorAll('[data-drawn]')].map(p => p.dataset.drawn)")) == {"dark"}
    assert inks_of(page) == ["rgb(230, 233, 237)", ["rgb(61, 157, 224)", "rgb(213, 94, 0)"]]
    page.locator("#theme").click()
    assert paper_of(page) == "rgb(255, 255, 255)"
    assert inks_of(page) == ["rgb(26, 29, 33)", ["rgb(0, 114, 178)", "rgb(213, 94, 0)"]]
    page.emulate_media(color_scheme="dark")
    assert paper_of(page) == "rgb(255, 255, 255)"  # what the button said stays


def inks_of(page):
    """(colour of the words, colours of the lines) of the first figure, as they are painted."""
    return page.evaluate(
        """() => {
            const first = document.querySelector("[data-drawn]");
            const styles = [...first.querySelectorAll(".js-line")].map((line) => getComputedStyle(line));
            const strokes = styles.filter((style) => style.strokeWidth != "0px").map((style) => style.stroke);
            return [getComputedStyle(first.querySelector(".xtick text")).fill, [...new Set(strokes)]];
        }"""  # of width 0: bands
    )


def draw_all(page):
    """Scroll to every figure that is in no closed part; these."""
    plots = page.locator("[data-plot]:visible")
    for place in range(plots.count()):
        plots.nth(place).scroll_into_view_if_needed()
        plots.nth(place).locator(".main-svg").first.wait_for()
    return plots


def drawn(page):
    """Open and scroll to every figure; the names of the figures, and of those that have traces or cells."""
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    plots = draw_all(page)
    marks = page.locator("[data-plot]:has(.scatterlayer path, .barlayer path, .heatmaplayer image)")
    return [found.evaluate_all("all => all.map(plot => plot.dataset.plot)") for found in (plots, marks)]


def test_tab_visits_every_control_in_the_order_of_the_page(opened):
    """Of those that can be seen: links, buttons, tables that may be scrolled, parts that open, each figure's tools."""
    page, _ = opened
    page.emulate_media(reduced_motion="reduce")  # no press waits for the page to have scrolled
    draw_all(page)
    page.evaluate(
        """() => {
            window.visited = [];
            addEventListener("focusin", ({ target }) => visited.push(target));
            window.controls = [...document.querySelectorAll("body *")].filter(
                (one) => one.tabIndex >= 0 && one.checkVisibility({ visibilityProperty: true }));
        }"""
    )
    page.locator(".skip").focus()
    count = page.evaluate("controls.length")
    for _ in range(count - 1):
        page.keyboard.press("Tab")
    assert page.evaluate("visited.map((one) => controls.indexOf(one))") == list(range(count))


@pytest.mark.parametrize("press", ["click", "Enter"])
def test_a_link_of_the_contents_leads_to_its_part_however_many_figures_lie_between(browser, report, press):
    """Those on the way are drawn while the page scrolls, and move nothing."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    link = page.locator("nav a[href='#happened']")
    link.click() if press == "click" else link.press(press)
    page.evaluate(
        """async () => {
            const pause = () => new Promise((done) => setTimeout(done, 500));
            for (let before = -1; before !== scrollY; await pause()) before = scrollY;
        }"""
    )
    top, left = page.evaluate(
        """() => [document.getElementById("happened").getBoundingClientRect().top,
                 document.documentElement.scrollHeight - innerHeight - scrollY]"""
    )
    assert page.locator("[data-drawn]").count() < page.locator("[data-plot]").count()  # else there was nothing to miss
    assert left > 1  # else the page ends there
    assert abs(top - 16) < 2  # scroll-padding-top: 1rem


def test_every_figure_is_drawn_and_the_console_is_silent(opened, told):
    page, said = opened
    names, marked = drawn(page)
    assert names == [figure.name for figure in all_figures(told.drawn)]
    assert marked == names
    assert {"accuracy_rounds_rounds_2", "knowledge_rounds_fedhkd_s0", "left_out_restless"} <= set(names)
    assert said == []


def test_every_table_is_there_with_a_caption_and_scopes(opened, told):
    page, _ = opened
    names = [entry.name for part in (told.results, told.happened, told.origin) for entry in part]
    assert names[:2] == ["accuracy-0", "differences-0-0"]
    assert page.locator("section.table:has(table > caption)").evaluate_all("all => all.map(one => one.id)") == names
    assert page.locator("table").count() == len(names)
    assert page.locator("th:not([scope])").count() == 0


@pytest.mark.parametrize(
    "format, line",
    [
        ("Markdown", "| fedavg | 0.600 ± 0.248 (3) [paper 0.595] | 0.310 ± 0.025 (3) [paper 0.474 ↑] |"),
        ("LaTeX", r"fedavg & 0.600 $\pm$ 0.248 (3) [paper 0.595] & 0.310 $\pm$ 0.025 (3) [paper 0.474 $\uparrow$] &"),
        ("CSV", "fedavg,0.6,0.24841,3,0.595,,0.31,0.024841,3,0.4741,above,0.002,11.209,1.00,8.71,no"),
    ],
    ids=lambda text: text if text.isalpha() else "",
)
def test_a_table_is_copied(opened, format, line):
    page, _ = opened
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#accuracy-0 button", has_text=format).click()
    page.wait_for_function(f"document.getElementById('said').textContent == 'Copy {format}: done.'")
    text = page.evaluate("navigator.clipboard.readText()")
    assert [found for found in text.splitlines() if found.startswith(line)]


def test_nothing_is_wider_than_a_telephone(browser, report):
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_no_name_of_a_setting_and_no_count_of_rounds_is_broken_and_commands_have_room(browser, report):
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    lines = "all => all.map(cell => { const range = document.createRange(); range.selectNodeContents(cell);"
    lines += " return range.getClientRects().length; })"
    for cells in ("#settings tbody th, #settings tbody td:first-child", "#runs td", "#sessions td:nth-child(2)"):
        assert set(page.locator(cells).evaluate_all(lines)) <= {0, 1}
    width = "cell => cell.getBoundingClientRect().width"
    assert page.locator("#sessions tbody td:last-child").first.evaluate(width) >= 256


def test_without_javascript_tables_and_text_are_there(browser, report):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    assert page.locator("#accuracy-0 table").is_visible()
    assert page.locator("noscript p").first.is_visible()
    assert not page.locator("button.copy").first.is_visible()

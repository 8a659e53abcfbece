"""A real browser without a screen opens the report. Skipped where there is none, unless HKD_REQUIRE_BROWSER=1."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

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
    page.locator("#theme").click()
    assert paper_of(page) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert paper_of(page) == "rgb(255, 255, 255)"  # what the button said stays


def drawn(page):
    """Open and scroll to every figure; the figures, and how many of them have traces or cells."""
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    plots = page.locator("[data-plot]")
    for place in range(plots.count()):
        plots.nth(place).scroll_into_view_if_needed()
        plots.nth(place).locator(".main-svg").first.wait_for()
    marks = page.locator("[data-plot]:has(.scatterlayer path, .barlayer path, .heatmaplayer image)")
    return plots.count(), marks.count()


def test_every_figure_is_drawn_and_the_console_is_silent(opened):
    page, said = opened
    count, marked = drawn(page)
    assert count > 5
    assert marked == count
    assert said == []


def test_every_table_has_a_caption_and_scopes(opened):
    page, _ = opened
    assert page.locator("table").count() == page.locator("table > caption").count() > 5
    assert page.locator("th:not([scope])").count() == 0


def test_a_table_is_copied_as_markdown(opened):
    page, _ = opened
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#accuracy-0 button", has_text="Markdown").click()
    page.wait_for_function("document.getElementById('said').textContent == 'Copy Markdown: done.'")
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.splitlines()[2].startswith(
        "| fedavg | 0.600 ± 0.248 (3) [paper 0.595] | 0.310 ± 0.025 (3) [paper 0.474 ↑] |"
    )


def test_nothing_is_wider_than_a_telephone(browser, report):
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_without_javascript_tables_and_text_are_there(browser, report):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(report.as_uri(), timeout=PATIENCE_MS)
    assert page.locator("#accuracy-0 table").is_visible()
    assert page.locator("noscript p").first.is_visible()
    assert not page.locator("button.copy").first.is_visible()

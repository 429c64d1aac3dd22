"""A walk over the page in a real browser: ask twice, and see why the second was quicker."""

from __future__ import annotations

import re

import pytest
from tests.browser.conftest import opened
from tests.harness.cluster import Up

pytest.importorskip("playwright", reason="the extra `browser` is not installed")

from playwright.sync_api import Browser, Page, expect

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]
WAIT_MS = 120_000
QUESTION = "The {} kite is in Oslo. A fox sleeps in the night. Where is the {} kite?"
# The names of all controls, as a screen reader has them; those that are hidden have none.
UNNAMED = """() => [...document.querySelectorAll('button, input, textarea, [role], summary, a')]
  .filter((control) => control.checkVisibility() && !control.closest('dialog:not([open])'))
  .filter((control) => !(control.getAttribute('aria-label') || control.textContent.trim()
    || control.labels?.length || control.getAttribute('aria-labelledby')
    || control.role === 'status'))
  .map((control) => control.outerHTML.slice(0, 90))"""
REPEATED_IDS = """() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  return ids.filter((id, index) => ids.indexOf(id) !== index); }"""

SET_HIDDEN = """(hidden) => {
  Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange')); }"""


def ask(page: Page, question: str) -> None:
    """Sends a message by the keyboard, and waits for the account below its answer."""
    before = page.locator(".turn.assistant").count()
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    note = page.locator(".turn.assistant .note").nth(before)
    expect(note).to_contain_text("reused", timeout=WAIT_MS)


def test_the_second_time_the_strip_shows_what_was_reused_and_why_not_the_rest(page: Page) -> None:
    question = QUESTION.format("green", "green")
    ask(page, question)
    first = page.locator(".turn.assistant .note").first
    expect(first).to_contain_text("0 of")
    ranges = page.locator("table.ranges tbody tr")
    expect(ranges).to_have_count(1, timeout=WAIT_MS)
    expect(ranges.first).to_contain_text("no earlier prompt had it")
    name = page.locator("#detail-title").inner_text()
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turn.assistant .note").nth(1)).to_contain_text("reused", timeout=WAIT_MS)
    expect(page.locator("#detail-title")).not_to_have_text(name, timeout=WAIT_MS)
    expect(ranges.first).to_contain_text("device memory", timeout=WAIT_MS)
    expect(ranges.last).to_contain_text("does not fill a page")
    reused = re.search(r"(\d+) of (\d+) tokens", page.locator(".headline").inner_text())
    assert reused is not None
    assert 0 < int(reused[1]) < int(reused[2])
    expect(page.locator(".waterfall > li")).not_to_have_count(0)
    for event in ("received", "admitted", "verified", "first_token"):
        expect(page.locator(".waterfall")).to_contain_text(event, timeout=WAIT_MS)
    expect(page.get_by_role("region", name="Route", exact=True)).to_contain_text("chosen")
    expect(page.locator("#detail-body")).to_contain_text("exact", timeout=WAIT_MS)


def test_a_prompt_that_parts_says_in_which_message(page: Page) -> None:
    for colour in ("amber", "violet"):
        page.get_by_role("button", name="New chat").click()
        ask(page, QUESTION.format(colour, colour))
    expect(page.locator("#detail-body")).to_contain_text("It parts at token", timeout=WAIT_MS)
    expect(page.locator("#detail-body")).to_contain_text("user[0]")


def test_the_observer_sees_the_fleet_and_its_token_stays_out_of_urls(
    as_observer: Page, cluster: Up
) -> None:
    fleet = as_observer.locator("#fleet")
    for title in ("Prefill", "Decode", "Host caches"):
        expect(fleet.get_by_role("region", name=title, exact=True).locator(".card")).to_have_count(
            1
        )
    expect(fleet).to_contain_text("slots free")
    token = cluster.as_observer["authorization"].removeprefix("Bearer ")
    assert token not in as_observer.url
    as_observer.reload()
    expect(fleet.locator(".card").first).to_be_visible(timeout=WAIT_MS)


def test_without_the_token_the_fleet_says_where_it_is(page: Page) -> None:
    expect(page.locator("#fleet")).to_contain_text("metrics.token", timeout=WAIT_MS)
    page.get_by_role("button", name="show the observer's token").click()
    page.get_by_label("Observer's token").fill("a guess")
    page.get_by_role("button", name="Use these").click()
    # A guess is no API key that this cluster asks for, so the viewer is the public as before.
    expect(page.locator("#fleet")).to_contain_text("metrics.token", timeout=WAIT_MS)


def test_the_keyboard_alone_reaches_everything(page: Page) -> None:
    for colour in ("pink", "teal"):
        ask(page, QUESTION.format(colour, colour))
    page.locator("#ask").focus()
    order = []
    for _ in range(60):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.role"))
        if order[-1] == "option":
            break
    assert order[-1] == "option", order
    assert {"max-tokens", "send"} <= set(order)
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"
    chosen = page.locator('[role="option"][aria-selected="true"]')
    before = chosen.get_attribute("data-id")
    page.keyboard.press("ArrowDown")
    expect(chosen).to_have_count(1)
    assert chosen.get_attribute("data-id") != before
    expect(chosen).to_be_focused()
    page.keyboard.press("Home")
    assert chosen.get_attribute("data-id") == before
    assert page.locator('[role="option"][tabindex="0"]').count() == 1, "one stop for Tab"


def test_each_control_has_a_name_and_each_id_is_there_once(as_observer: Page) -> None:
    ask(as_observer, QUESTION.format("grey", "grey"))
    expect(as_observer.locator(".strip")).to_be_visible(timeout=WAIT_MS)
    assert as_observer.evaluate(UNNAMED) == []
    assert as_observer.evaluate(REPEATED_IDS) == []
    assert as_observer.locator("html").get_attribute("lang") == "en"
    assert as_observer.locator("main").count() == as_observer.locator("h1").count() == 1
    expect(as_observer.locator("#turns")).to_have_attribute("aria-live", "polite")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_no_need_to_scroll_sideways(browser: Browser, cluster: Up, width: int) -> None:
    with opened(browser, cluster, width=width, height=800, is_mobile=True) as phone:
        ask(phone, QUESTION.format("white", "white"))
        expect(phone.locator(".waterfall > li").first).to_be_visible(timeout=WAIT_MS)
        assert phone.evaluate("document.documentElement.scrollWidth") <= width


def test_nothing_moves_where_motion_is_not_wanted(browser: Browser, cluster: Up) -> None:
    with opened(browser, cluster, width=900, height=800, reduced_motion="reduce") as page:
        ask(page, QUESTION.format("brown", "brown"))
        expect(page.locator(".span").first).to_be_visible(timeout=WAIT_MS)
        moving = "getComputedStyle(document.querySelector('.span')).transitionDuration"
        assert page.evaluate(moving) == "0s"


def test_the_theme_follows_the_system_until_one_is_chosen(browser: Browser, cluster: Up) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, cluster, width=900, height=800, color_scheme="light") as page:
        light = page.evaluate(ground)
        page.get_by_role("button", name="Theme: system").click()
        dark = page.evaluate(ground)
        assert light != dark
        page.reload()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert page.evaluate(ground) == dark


def test_a_hidden_tab_lets_its_stream_go_and_takes_it_up_again(page: Page) -> None:
    status = page.locator("#status")
    expect(status).to_contain_text("ready", timeout=WAIT_MS)
    page.evaluate(SET_HIDDEN, True)
    expect(status).to_have_text("paused")
    page.evaluate(SET_HIDDEN, False)
    expect(status).to_contain_text("ready", timeout=WAIT_MS)

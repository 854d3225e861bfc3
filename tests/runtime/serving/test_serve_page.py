"""The built-in page of `edgespec serve` in headless Chromium, against a real server: keys pressed, replies read from the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser import FOUND, Tab, browser
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.serving.page import FILE
from gate import gated, until
from served import listening
from simulated_machine import STEEP, costs_of

pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium on this machine")

REPLY = "document.querySelector('.model:last-of-type .said')"
OVER = "running === null && document.querySelector('.model:last-of-type .note') !== null"
FINISHED = f"messages.length % 2 === 0 && {OVER}"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(autouse=True)
def _no_problems(tab: Tab) -> Iterator[None]:
    """The console stays empty: no exception, nothing that the page's own policy forbids."""
    tab.size(1200, 800)
    tab.problems.clear()
    yield
    assert tab.problems == []


def opened(tab: Tab, url: str) -> None:
    tab.open(url)
    tab.until("model !== null")


def texts(tab: Tab, selector: str) -> list[str]:
    return list(tab.see(f"[...document.querySelectorAll({selector!r})].map(one => one.textContent)"))


def short(tab: Tab, tokens: int) -> None:
    tab.see(f"document.getElementById('longest').value = {tokens}")


def say(tab: Tab, text: str, over: str = FINISHED) -> None:
    """Type a message and send it; return once `over` is true."""
    tab.type(text)
    tab.press("Enter")
    tab.until(over)


def test_a_chat_with_the_keyboard_alone(bundle: Path, tab: Tab) -> None:
    with listening(bundle) as server:
        opened(tab, server.url)
        short(tab, 40)
        assert tab.see("document.activeElement.id") == "prompt"
        tab.type("Hello")
        tab.press("Enter", shift=True)
        say(tab, "there")
        assert texts(tab, ".user .said") == ["Hello\nthere"]
        body = {"messages": [{"role": "user", "content": "Hello\nthere"}], "temperature": 0, "max_tokens": 40}
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()
        assert texts(tab, ".model .said") == [answer["choices"][0]["message"]["content"]]
        tinted = texts(tab, ".model .accepted")
        assert 0 < len("".join(tinted)) < len(tab.see(f"{REPLY}.textContent"))
        usage = answer["usage"]["speculation"]
        assert f"{usage['accepted']} from the drafter" in texts(tab, ".model .note")[0]
        # the strip
        assert float(tab.see("document.getElementById('rate').textContent")) > 0
        tau = answer["usage"]["completion_tokens"] / usage["blocks"]
        assert tab.see("document.getElementById('tau').textContent") == f"{tau:.2f}"
        assert len(texts(tab, "#positions i")) == 3
        shares = [int(text.split()[0]) for text in texts(tab, "#split-key span span")]
        assert 98 <= sum(shares) <= 102
        # the second turn goes on from the first; the keyboard has stayed where it was
        assert tab.see("document.activeElement.id") == "prompt"
        say(tab, "And?", f"messages.length === 4 && {OVER}")
        assert tab.see("messages.map(one => one.role).join(' ')") == "user assistant user assistant"
        # every control can be reached
        reached = set()
        for _ in range(14):
            tab.press("Tab")
            reached.add(tab.see("document.activeElement.id || document.activeElement.tagName"))
        controls = "fresh prompt compare send speculative rule length temperature"
        assert reached.issuperset(controls.split())


def test_a_switch_for_speculation_and_one_for_the_rule(bundle: Path, tab: Tab) -> None:
    with listening(bundle) as server:
        opened(tab, server.url)
        short(tab, 20)
        assert "block" in texts(tab, "#rule optgroup:first-of-type option")
        tab.see("document.getElementById('speculative').focus()")
        tab.press("Space")
        tab.see("document.getElementById('prompt').focus()")
        say(tab, "Hello")
        assert texts(tab, ".accepted") == []
        assert texts(tab, "#positions") == ["no drafts"]
        assert texts(tab, "#off:not([hidden])") == ["Drafts are off."]
        assert server.service.sums.counts.drafted == 0
        tab.see("document.getElementById('speculative').click()")
        tab.see(
            "const rule = document.getElementById('rule'); rule.value = 'opt'; rule.dispatchEvent(new Event('change'))"
        )
        assert "TV(p, q)" in texts(tab, "#rule-help")[0]
        say(tab, "Hello", f"messages.length === 4 && {OVER}")
        assert server.service.sums.counts.drafted > 0
        assert texts(tab, "#off:not([hidden])") == []


def test_the_strip_says_why_there_are_no_drafts(
    bundle: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the reply comes, and when it is finished."""
    monkeypatch.setattr(Schedules, "_costs", costs_of(STEEP, 0.1))
    why = (
        r"Off: a draft of 1 token and its pass cost [\d.]+ plain steps here; the drafter would need α [\d.]+, "
        r"it has [\d.]+(; copies from the text go on)?\."
    )
    with gated(bundle, draft_length=None) as (server, gate):
        opened(tab, server.url)
        short(tab, 30)
        tab.type("Hello")
        tab.press("Enter")
        until(lambda: len(gate.sizes) == 1)
        gate.passes.release(8)
        tab.until("!document.getElementById('off').hidden")
        assert tab.see("running !== null")
        gate.passes.release(100)
        tab.until(FINISHED)
        (said,) = texts(tab, "#off:not([hidden])")
        assert re.fullmatch(why, said)


def test_plain_against_speculative(bundle: Path, tab: Tab) -> None:
    """The same text twice, with both times, also at a temperature."""
    with listening(bundle) as server:
        opened(tab, server.url)
        short(tab, 30)
        for temperature in (0, 1):
            tab.see(f"document.getElementById('temperature').value = {temperature}")
            tab.see("document.getElementById('fresh').click()")
            tab.type("Hello")
            tab.see("document.getElementById('compare').click()")
            tab.until(FINISHED)
            plain, speculative = texts(tab, ".pair .said")
            assert plain == speculative != ""
            assert texts(tab, ".pair > div:first-child .accepted") == []
            assert texts(tab, ".pair > div:last-child .accepted") != []
            verdict = texts(tab, ".model > .note")[0]
            times = (
                r"\d+\.\d\d× as fast: \d+\.\d\d s plain, \d+\.\d\d s speculative\. Both texts are the same\."
            )
            assert re.match(rf"For this message speculation is {times}", verdict)


def test_stop_ends_the_reply_and_keeps_what_was_said(bundle: Path, tab: Tab) -> None:
    with gated(bundle) as (server, gate):
        opened(tab, server.url)
        tab.type("Hello")
        tab.press("Enter")
        until(lambda: len(gate.sizes) == 1)
        gate.passes.release(8)
        tab.until(f"{REPLY} && {REPLY}.textContent.length > 5")
        assert texts(tab, "#status") == ["The model is writing."]
        tab.type("And")  # the next message, while the reply comes
        tab.press("Space")
        assert tab.see("running !== null && document.getElementById('prompt').value") == "And "
        tab.press("Escape")
        tab.until("running === null")
        until(lambda: all(job.left for job in list(server.line._jobs)))
        assert texts(tab, ".model .note") == ["stopped"]
        assert texts(tab, "#status") == ["The reply was stopped."]
        assert tab.see("messages.length") == 2
        assert not tab.see("document.getElementById('send').hidden")


def test_the_focus_stays_where_it_was_put_meanwhile(bundle: Path, tab: Tab) -> None:
    with gated(bundle) as (server, gate):
        opened(tab, server.url)
        short(tab, 3)
        tab.type("Hello")
        tab.press("Enter")
        until(lambda: len(gate.sizes) == 1)
        tab.see("document.getElementById('temperature').focus()")
        gate.passes.release(50)
        tab.until(FINISHED)
        assert tab.see("document.activeElement.id") == "temperature"


def test_a_button_that_goes_hands_its_focus_on(bundle: Path, tab: Tab) -> None:
    with gated(bundle) as (server, gate):
        opened(tab, server.url)
        tab.type("Hello")
        tab.see("document.getElementById('send').focus()")
        tab.press("Enter")
        until(lambda: len(gate.sizes) == 1)
        assert tab.see("document.activeElement.id") == "stop"
        gate.passes.release(8)
        tab.press("Space")
        tab.until("running === null")
        assert tab.see("document.activeElement.id") == "prompt"


def test_a_text_begins_at_the_side_that_its_script_begins_at(bundle: Path, tab: Tab) -> None:
    with listening(bundle) as server:
        opened(tab, server.url)
        short(tab, 3)
        tab.type("שלום")
        assert tab.see("getComputedStyle(document.getElementById('prompt')).direction") == "rtl"
        tab.press("Enter")
        tab.until(FINISHED)
        left, right = tab.see(
            "(box => { const text = document.createRange(); text.selectNodeContents(box);"
            " const [a, b] = [text, box].map(one => one.getBoundingClientRect());"
            " return [a.left - b.left, b.right - a.right]; })(document.querySelector('.user .said'))"
        )
        assert left > 100
        assert right < 40


def test_an_enter_that_confirms_a_candidate_sends_nothing(bundle: Path, tab: Tab) -> None:
    """Safari's comes when the composition is over, with the key code of one."""
    with listening(bundle) as server:
        opened(tab, server.url)
        tab.type("Hello")
        confirm = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, cancelable: true})"
        assert tab.see(f"document.getElementById('prompt').dispatchEvent({confirm})")
        assert tab.see("messages.length") == 0


def test_a_reply_without_text_is_a_turn(bundle: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may end its reply at once."""
    with listening(bundle) as server:
        made = server.service._parts

        def silent(*given: Any, **named: Any) -> Iterator[dict[str, Any]]:
            for part in made(*given, **named):
                for choice in part["choices"]:
                    choice["delta"]["content"] = ""
                yield part

        monkeypatch.setattr(server.service, "_parts", silent)
        opened(tab, server.url)
        short(tab, 3)
        say(tab, "Hello", OVER)
        assert tab.see("messages.map(one => one.content).join('|')") == "Hello|"
        assert tab.see("document.getElementById('prompt').value") == ""


def test_what_a_model_writes_is_text(bundle: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markup in a reply, a message or an error is shown as it is."""
    evil = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    with listening(bundle) as server:
        made = server.service._parts

        def writing(*given: Any, **named: Any) -> Iterator[dict[str, Any]]:
            for part in made(*given, **named):
                for choice in part["choices"]:
                    choice["delta"]["content"] = evil
                yield part

        monkeypatch.setattr(server.service, "_parts", writing)
        monkeypatch.setattr(server.service, "name", evil)
        opened(tab, server.url)
        short(tab, 3)
        say(tab, evil, "running === null && messages.length === 2")
        assert texts(tab, ".user .said") == [evil]
        assert evil in tab.see(f"{REPLY}.textContent")
        assert tab.see("document.querySelectorAll('#chat img, #chat script, header img').length") == 0
        assert tab.see("document.title") != "run"


def test_errors_are_said_in_plain_words(bundle: Path, tab: Tab) -> None:
    with listening(bundle, key="k1") as server:
        tab.open(server.url)
        tab.until("document.getElementById('model').textContent.includes('API key')")
        assert texts(tab, "#status") == texts(tab, "#model")
        tab.size(400, 800)  # it is read to its end
        assert tab.see("(one => one.scrollWidth <= one.clientWidth)(document.getElementById('model'))")
        say(tab, "Hello", "document.querySelector('.wrong') !== null")
        assert texts(tab, ".wrong") == [
            "This server wants an API key. Write it under Settings and try again."
        ]
        assert tab.see("document.getElementById('prompt').value") == "Hello"
        tab.see("document.getElementById('key').focus()")
        for key, words in (
            ("€", "The API key has a character that no key has."),
            ("k2", "The API key is wrong."),
        ):
            say(tab, key, f"document.getElementById('model').textContent.startsWith({words!r})")
            tab.see("document.getElementById('key').value = ''")
        say(tab, " k1 ", "model !== null")
        short(tab, 3)
        tab.see("document.getElementById('prompt').focus()")
        tab.press("Enter")
        tab.until(FINISHED)
        tab.see("document.getElementById('prompt').value = 'a '.repeat(2000)")
        tab.press("Enter")
        tab.until("running === null && document.querySelectorAll('.wrong').length === 2")
        assert "longer than the model can read" in texts(tab, ".wrong")[1]
    tab.press("Enter")
    tab.until("document.querySelectorAll('.wrong').length === 3")
    assert texts(tab, ".wrong")[2] == "The server does not answer. Is edgespec serve still running?"
    assert all("Failed to load resource" in problem for problem in tab.problems)
    tab.problems.clear()


def test_a_server_without_a_drafter_says_so(bundle: Path, tab: Tab) -> None:
    with listening(bundle, draft=False) as server:
        opened(tab, server.url)
        assert texts(tab, "#speculative-help, #about") == ["This server runs without a drafter."] * 2
        assert tab.see("['speculative', 'rule', 'compare'].every(id => document.getElementById(id).disabled)")
        short(tab, 3)
        say(tab, "Hello")


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_cut_off(bundle: Path, tab: Tab, width: int) -> None:
    """No sideways scrolling, and room for the conversation, in both schemes; text and ground differ enough (WCAG 2, 4.5)."""
    contrast = """(() => {
        const light = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
        const ground = one => { for (; one; one = one.parentElement) {
            const seen = getComputedStyle(one).backgroundColor; if (!/, 0\\)$/.test(seen)) return seen; } };
        const found = [];
        for (const one of document.querySelectorAll('body *')) {
            const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
            if (!own || !one.offsetParent || one.closest('script, .skip, :disabled')) continue;
            const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
            found.push([(a + 0.05) / (b + 0.05), one.textContent.slice(0, 20)]);
        }
        return found.sort((x, y) => x[0] - y[0])[0];
    })()"""
    with listening(bundle) as server:
        for dark in (False, True):
            tab.size(width, 800, dark=dark)
            opened(tab, server.url)
            short(tab, 60)
            say(tab, "Hello")
            assert tab.see("document.documentElement.scrollWidth") <= width
            assert tab.see("document.getElementById('chat').clientHeight") >= 300
            worst, text = tab.see(contrast)
            assert worst >= 4.5, text
            paper = tab.see("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", paper))) < 300) is dark


@pytest.mark.parametrize(("width", "height"), [(400, 667), (844, 340), (683, 330)])
def test_a_low_window_has_room_for_the_conversation(bundle: Path, tab: Tab, width: int, height: int) -> None:
    """Also with open settings; the message box that is written in lies on the screen, and the conversation above it."""
    with listening(bundle) as server:
        tab.size(width, height)
        opened(tab, server.url)
        tab.see("document.getElementById('settings').open = true")
        short(tab, 3)
        say(tab, "Hello")
        top, bottom, below = tab.see(
            "['chat', 'chat', 'form'].map((id, at) => document.getElementById(id).getBoundingClientRect()[at ? 'bottom' : 'top'])"
        )
        assert bottom - max(0, top) >= 160
        assert below <= height + 1
        assert tab.see("document.documentElement.scrollWidth") <= width


def test_the_page_is_one_small_file_that_asks_nobody_else(bundle: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert not re.findall(r"(?:src|href|url|action)\s*[=(]\s*[\"']?(?:https?:)?//", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    with listening(bundle) as server:
        answer = httpx2.get(server.url)
    assert answer.content == text.encode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy


def test_every_control_has_a_name(bundle: Path, tab: Tab) -> None:
    with listening(bundle) as server:
        opened(tab, server.url)
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "textbox", "combobox", "switch", "spinbutton"}
        controls = [one for one in nodes if one.get("role", {}).get("value") in wanted]
        names = [one["name"]["value"] for one in controls]
        assert len(names) >= 7
        assert all(names)
        assert {"Send", "Speculation", "Acceptance rule"} <= set(names)

"""The page at `/`: what its files may hold, and what a browser shows of an answer that arrives."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import draftsmith.serving
from tests.helpers.browser import Browser, chromium
from tests.helpers.canned_server import Asked, CannedServer, Reply, events, json_reply

FOLDER = Path(draftsmith.serving.__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
TREE = {
    "tokens": [" that", " man", " is", " was", "\n", " a"], "parents": [-1, -1, 0, 0, 1, 2], "accepted": [0, 2],
}
TEXT = "It is known that is <b>so</b> é"


def chunk(text: str, tokens: list[dict[str, Any]], step: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "choices": [{"text": text}], "draftsmith": {"tokens": tokens, "step": step, "tokens_per_second": 41.5}, **more
    }


def token(text: str, source: str = "target", depth: int = 0) -> dict[str, Any]:
    return {"id": 1, "text": text, "source": source, "depth": depth}


def explained() -> list[Any]:
    """Three steps: the prompt's, one of a tree of six of which two stayed, one that drafted nothing."""
    return [
        chunk("It is known", [token("It is known")]),
        chunk(
            " that is <b>so</b>", [token(" that", "mlp", 1), token(" is", "ngram", 2), token(" <b>so</b>")],
            {"plan": "4,2", "drafted": 6, "accepted": 2, "tree": TREE, "why": "the last ten steps kept 1.8 guesses"},
        ),
        chunk(" é", [token(" é")], {"plan": "none", "drafted": 0, "accepted": 0, "tree": None}),
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
        "[DONE]",
    ]


def of_page(asked: Asked) -> Reply | None:
    """Answer for a file of the page, under a policy that allows nothing else; None for anything else."""
    file = FOLDER / (asked.path.removeprefix("/") or "index.html")
    if file.parent == FOLDER and file.is_file():
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Reply(file.read_bytes(), kind=KINDS[file.suffix], headers=headers)
    return json_reply({"data": [{"id": "demo-target"}]}) if asked.path == "/v1/models" else None


def writing(asked: Asked) -> Reply:
    return of_page(asked) or Reply(events(*explained()), kind="text/event-stream")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine, and the page is looked at in one")
    with Browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


Show = Callable[..., CannedServer]


@pytest.fixture
def show(browser: Browser) -> Iterator[Show]:
    """Serve the page with these answers, and open it."""
    started: list[CannedServer] = []

    def start(answer: Callable[[Asked], Reply] = writing, **screen: Any) -> CannedServer:
        started.append(CannedServer(answer).__enter__())
        browser.open(f"{started[-1].url}/", **screen)
        browser.until("!document.getElementById('model').textContent.includes('not known yet')")
        return started[-1]

    yield start
    browser.open("about:blank#done")
    for each in started:
        each.__exit__(None, None, None)


def text_of(browser: Browser, name: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{name}').textContent"))


def write(browser: Browser, button: str = "write") -> None:
    browser.evaluate(f"document.getElementById('{button}').click()")
    browser.until("document.getElementById('stop').disabled")
    browser.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def test_the_files_load_nothing_from_elsewhere_and_hold_no_code_in_line():
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", html)
    for path in FOLDER.iterdir():
        written = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", written), path.name
        markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|\.style\b"
        assert not re.search(markup, written), path.name
        kept = r"localStorage|sessionStorage|indexedDB|document\.cookie"
        assert not re.search(kept, written), "a key stays in memory"


def test_the_page_holds_all_that_its_script_asks_for():
    html = (FOLDER / "index.html").read_text()
    there = set(re.findall(r'\bid="([\w-]+)"', html))
    script = "".join(path.read_text() for path in FOLDER.glob("*.js"))
    assert set(re.findall(r'byId\("([\w-]+)"\)', script)) <= there
    assert set(re.findall(r'(?:for|labelledby|describedby)="([\w-]+)"', html)) <= there
    imported = set(re.findall(r'from "\./([\w.]+)"', script)) | set(re.findall(r'(?:src|href)="([\w.]+)"', html))
    assert imported == {path.name for path in FOLDER.iterdir()} - {"index.html"}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_what_is_written_can_be_read(scheme: int):
    """Contrast of at least 4.5 for words and 3 for lines that mean something (WCAG 2.2, 1.4.3 and 1.4.11)."""
    block = re.findall(r":root \{(.*?)\n\s*\}", (FOLDER / "style.css").read_text(), flags=re.S)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    needed = {"ink": 4.5, "soft": 4.5, "bad": 4.5, "accent": 4.5} | {f"by{at}": 3.0 for at in range(1, 7)}
    for ground in ("paper", "panel"):
        for name, least in needed.items():
            dark, light = sorted((luminance(colours[name]), luminance(colours[ground])))
            assert (light + 0.05) / (dark + 0.05) >= least, f"{name} on {ground}"


def test_no_two_drafters_differ_by_colour_alone():
    css = (FOLDER / "style.css").read_text()
    looks = [
        (re.search(r"decoration-style: (\w+)", rule)[1], "thickness" in rule)  # type: ignore[index]
        for rule in re.findall(r"^\.by\d \{(.*?)\}", css, flags=re.M)
    ]
    assert len(looks) == len(set(looks)) == 6


def test_an_answer_is_coloured_by_who_wrote_it(browser: Browser, show: Show):
    server = show()
    assert text_of(browser, "model") == "model: demo-target"
    write(browser)
    assert text_of(browser, "text") == TEXT
    assert browser.evaluate("document.querySelectorAll('#text b').length") == 0, "text is never markup"
    spans = browser.evaluate(
        "[...document.querySelectorAll('#text span')].map((s) => [s.textContent, s.className, s.title])"
    )
    assert [(text, "by1" in look, "by2" in look) for text, look, _ in spans] == [
        ("It is known", False, False), (" that", True, False), (" is", False, True), (" <b>so</b>", False, False),
        (" é", False, False),
    ]
    assert spans[1][2] == "drafted by mlp, depth 1" and spans[2][2] == "drafted by ngram, depth 2"
    assert "drafted by mlp" in text_of(browser, "legend") and "drafted by ngram" in text_of(browser, "legend")
    assert "ended bylength" in text_of(browser, "figures") and "tokens5" in text_of(browser, "figures")
    body = next(asked.body for asked in server.seen if asked.path == "/v1/completions")
    assert body["stream"] is body["explain"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "demo-target" and "speculation" not in body and "seed" not in body
    assert browser.complaints == []


def test_the_steps_are_drawn_and_counted(browser: Browser, show: Show):
    show()
    write(browser)
    assert text_of(browser, "which-number") == "2 of 2"
    assert "own" in text_of(browser, "tree-caption") and "not to draft" in text_of(browser, "chose")
    browser.evaluate(
        "{ const slider = document.getElementById('which-step'); slider.value = 1;"
        " slider.dispatchEvent(new Event('input')); }"
    )
    assert browser.evaluate("document.querySelectorAll('#tree rect.node').length") == 6
    assert browser.evaluate("document.querySelectorAll('#tree rect.kept').length") == 2
    assert "2 of 6 guesses accepted (✓): ␣that ␣is" in text_of(browser, "tree-caption")
    assert "4,2: the last ten steps kept 1.8 guesses." in text_of(browser, "chose")
    bars = browser.evaluate("document.querySelector('#depths svg').getAttribute('aria-label')")
    assert "depth 1: 50 %, depth 2: 50 %, depth 3: 0 %" in bars, "two steps, one of which kept two"
    rows = browser.evaluate(
        "[...document.querySelectorAll('#plans tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert [row[:3] for row in rows] == [["4,2", "1", "3.00"], ["none", "1", "1.00"]]
    assert browser.complaints == []


def test_a_tree_that_makes_no_sense_is_left_out(browser: Browser, show: Show):
    """Parents behind their children, lists of unlike lengths, nothing at all."""
    unordered = {"tokens": ["a", "b"], "parents": [1, -1], "accepted": []}
    odd = [unordered, {"tokens": ["a"], "parents": []}, {}, {"accepted": 1}]
    steps = [chunk("x", [token("x")], {"drafted": 3, "accepted": 1, "tree": tree}) for tree in odd]
    steps += [chunk("x", [token("x")], {}), {"choices": [{"text": "x"}], "draftsmith": {}}, {"choices": []}, {}]
    show(lambda asked: of_page(asked) or Reply(events(*steps, "[DONE]")))
    write(browser)
    assert text_of(browser, "trouble") == "" and browser.evaluate("document.querySelector('#tree svg')") is None
    assert browser.complaints == []


def test_a_server_that_explains_nothing_shows_its_text(browser: Browser, show: Show):
    plain = [{"choices": [{"text": text}]} for text in ("Once ", "upon\r\n", "<i>")]
    show(lambda asked: of_page(asked) or Reply(events(*plain, "[DONE]")))
    write(browser)
    assert text_of(browser, "text") == "Once upon\r\n<i>"
    assert browser.evaluate("document.getElementById('steps').hidden") and browser.complaints == []


@pytest.mark.parametrize("together", [False, True])
def test_a_race_says_that_texts_are_equal(browser: Browser, show: Show, together: bool):
    server = show()
    browser.evaluate(f"document.getElementById('together').checked = {str(together).lower()}")
    write(browser, "race")
    bodies = [one.body for one in server.seen if one.path == "/v1/completions"]
    assert [body["max_tokens"] for body in bodies] == [1, 120, 120], "the prompt is read before anybody is measured"
    asked = [body.get("speculation") for body in bodies[1:]]
    assert sorted(map(str, asked)) == ["None", "{'enabled': False}"]
    if not together:
        assert asked[0] == {"enabled": False}, "one after the other, plain first"
        assert text_of(browser, "verdict").startswith("With drafting: 1.00 × as fast.")
    assert text_of(browser, "plain-text") == text_of(browser, "drafted-text") == TEXT
    assert "Both texts are equal." in text_of(browser, "verdict")
    note = "share the machine, so both are slower" if together else "One after the other, because they would share"
    assert note in text_of(browser, "race-note")


def test_a_race_says_where_texts_part(browser: Browser, show: Show):
    def unlike(asked: Asked) -> Reply:
        page = of_page(asked)
        if page is not None:
            return page
        text = "éab" if "speculation" in asked.body else "éax"
        return Reply(events({"choices": [{"text": text}]}, "[DONE]"))

    show(unlike)
    write(browser, "race")
    assert "The texts differ from character 3 on." in text_of(browser, "verdict")


def test_a_conversation_goes_on_from_what_was_said(browser: Browser, show: Show):
    def chatting(asked: Asked) -> Reply:
        return of_page(asked) or Reply(events({"choices": [{"delta": {"content": "Fine."}}]}, "[DONE]"))

    server = show(chatting)
    browser.evaluate("document.querySelector('[value=chat]').click()")
    for said in ("How are you?", "And now?"):
        browser.evaluate(f"document.getElementById('prompt').value = '{said}'")
        write(browser)
    assert [message["content"] for message in server.seen[-1].body["messages"]] == ["How are you?", "Fine.", "And now?"]
    assert text_of(browser, "turns") == "youHow are you?modelFine.youAnd now?" and text_of(browser, "text") == "Fine."
    assert browser.evaluate("document.getElementById('prompt').value") == ""
    browser.evaluate("document.getElementById('forget').click()")
    browser.evaluate("document.getElementById('prompt').value = 'Anew'")
    write(browser)
    assert [message["content"] for message in server.seen[-1].body["messages"]] == ["Anew"]
    assert text_of(browser, "turns") == "youAnew"


def test_a_key_is_sent_and_kept_nowhere(browser: Browser, show: Show):
    server = show()
    browser.evaluate("document.getElementById('key').value = 'sk-1'")
    write(browser)
    assert server.seen[-1].headers["Authorization"] == "Bearer sk-1"
    assert browser.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    before = len(server.seen)
    browser.evaluate("document.getElementById('key').value = ''")
    write(browser)
    assert "Authorization" not in server.seen[-1].headers and len(server.seen) > before


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (json_reply({"error": {"message": "no"}}, 401), "another API key"),
        (json_reply({"error": {"message": "max_tokens is too large"}}, 400), "answered 400: max_tokens is too large"),
        (Reply(events({"choices": [{"text": "a"}]}, {"error": {"message": "no memory"}})), "gave up: no memory"),
        (Reply(b"data: {broken\n\n"), "no chunk of an answer"),
        (Reply(events({"choices": [{"text": "a"}]})), "The answer broke off before its end."),
    ],
)
def test_what_goes_wrong_is_one_sentence(browser: Browser, show: Show, reply: Reply, said: str):
    show(lambda asked: of_page(asked) or reply)
    write(browser)
    told = text_of(browser, "trouble")
    assert told and said in told
    assert browser.evaluate("document.querySelector('#trouble').getAttribute('role')") == "alert"


def test_who_wrote_a_token_is_told_to_a_click_and_to_arrow_keys(browser: Browser, show: Show):
    show()
    write(browser)
    browser.evaluate("document.querySelectorAll('#text span')[2].click()")
    assert text_of(browser, "who") == "“is”: drafted by ngram, depth 2."
    browser.evaluate("document.getElementById('text').focus()")
    browser.press("ArrowLeft", 37)
    assert text_of(browser, "who") == "“that”: drafted by mlp, depth 1."
    browser.press("Home", 36)
    browser.press("ArrowLeft", 37)
    assert text_of(browser, "who") == "“It is known”: the model's own."
    write(browser, "race")
    assert "drafted by mlp" in browser.evaluate("document.getElementById('legend').innerText"), "seen in a race too"


def test_it_is_used_by_keyboard_alone(browser: Browser, show: Show):
    """Ctrl + Enter writes; Esc stops a text that does not come."""
    waiting = threading.Event()

    def stalled(asked: Asked) -> Reply:
        def pieces() -> Iterator[bytes]:
            yield from events({"choices": [{"text": "Once"}]})
            waiting.wait(30)

        return of_page(asked) or Reply(pieces())

    show(stalled)
    try:
        browser.evaluate("document.getElementById('prompt').focus()")
        browser.press("Enter", 13, modifiers=2)
        browser.until("document.getElementById('text').textContent === 'Once'")
        browser.press("Escape", 27)
        browser.until("document.getElementById('stop').disabled")
    finally:
        waiting.set()
    assert text_of(browser, "said").startswith("Stopped") and text_of(browser, "text") == "Once"
    reachable = "[...document.querySelectorAll('button, input, textarea')].every((e) => e.tabIndex >= 0)"
    assert browser.evaluate(reachable)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser: Browser, show: Show, scheme: str):
    show(width=360, height=740, scheme=scheme)
    write(browser)
    write(browser, "race")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")

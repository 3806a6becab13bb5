"""What the page makes of an answer: Markdown, formulas and code, hostile or not; thoughts; tokens; what it
took; two beside each other."""
import re

import httpx
import pytest
from selenium.webdriver import Keys
from test_browser import piece

MARKDOWN = (r"""# Title

A [link](https://example.org "t"), `code`, **bold**, *thin*, ~~gone~~, $E = mc^2$ and \(a_1\), it costs $5 and $10.

* one
  1. two
* [x] done

| a | b |
|:--|--:|
| 1 | 2 |

> said

$$
\frac{1}{2}
$$

```python
def f(): return "x"
```
""")   # noqa: E501

def test_markdown(page):
    """All of it becomes elements, formulas and colours too; while it grows, blocks that are whole stay the
    same elements"""
    page.told(piece(MARKDOWN, "stop"))
    page.until(lambda: len(page.all(".said math")) == 3)
    inside = lambda css: [o.text for o in page.all(f".assistant .said {css}")]
    assert (inside("h1") == ["Title"] and inside("strong") == ["bold"] and inside("em") == ["thin"]
            and inside("del") == ["gone"] and inside("ol li") == ["two"])
    assert (inside("th") == ["a", "b"] and inside("td") == ["1", "2"] and inside("blockquote") == ["said"]
            and inside(".hljs-keyword")[0] == "def")
    [link] = page.all(".said a")
    assert (link.get_attribute("href") == "https://example.org/" and "noopener" in link.get_attribute("rel")
            and "$5 and $10" in page.last())
    kept = (page.js(
        """(async () => { const {render} = await import('./webui/markdown.js'), place = document.createElement('div')
        render('one\\n\\ntwo **t', place); const first = place.children[0], second = place.children[1]
        render('one\\n\\ntwo **three**', place)
        return [first === place.children[0], second === place.children[1], place.children.length, place.querySelector('strong').textContent] })()"""))   # noqa: E501
    assert kept == [True, False, 2, "three"]
    page.quiet()

HOSTILE = (
    (
        (
            (
                (
                    (
                        (
                            (
                                (
                                    (
                                        (
                                            (
                                                (
                                                    (
                                                        (
                                                            (
                                                                (
                                                                    (
                                                                        (
                                                                            (
                                                                                (
                                                                                    (
                                                                                        (
                                                                                            (
                                                                                                (
                                                                                                    (
                                                                                                        (
                                                                                                            (
                                                                                                                (r"""<img src=x onerror="window.harm=1"><script>window.harm=2</script><svg onload="window.harm=3"><iframe srcdoc="<script>parent.harm=4</script>">
<style>body{display:none}</style><a href="javascript:window.harm=5">x</a><details open ontoggle="window.harm=6"><form action="https://example.org"><button>y</button></form>

[a](javascript:window.harm=7) [b](data:text/html,<script>window.harm=8</script>) [c](JaVaScRiPt:window.harm=9 "t") ![d](https://example.org/spy.png) <javascript:window.harm=10>
[e](<javascript:window.harm=11>) [f]: javascript:window.harm=12

<math><mtext><table><mglyph><style><img src=x onerror=window.harm=13></style></mglyph></table></mtext></math>

$\href{javascript:window.harm=14}{x}$ $\includegraphics{https://example.org/y.png}$ $\htmlClass{a}{\htmlData{x=y}{z}}$

```html"><img src=x onerror=window.harm=15>
<img src=x onerror=window.harm=16>
```

| <img src=x onerror=window.harm=17> |
|--|
| `<script>window.harm=18</script>` |

<noscript><p title="</noscript><img src=x onerror=window.harm=19>"> &lt;script&gt;window.harm=20&lt;/script&gt; <input autofocus onfocus=window.harm=21>
""")))))))))))))))))))))))))))))   # noqa: E501

@pytest.mark.parametrize("cut", [False, True])
def test_hostile_markup_stays_text(page, cut):
    """Nothing that a model writes runs, loads or leads astray, whole or as it grows, nor as a question, as a
    title or in a list"""
    parts = re.split(r"(?<=[<>\"\n ])", HOSTILE) if cut else [HOSTILE]
    page.told("".join(map(piece, parts)) + piece("", "stop"), question=HOSTILE.replace("\n", " "))
    page.driver.execute_async_script("setTimeout(arguments[0], 200)")
    assert page.js("window.harm ?? 0") == 0
    found = (page.js("""[...document.querySelectorAll('#said *, #found *')].map(o => [o.tagName.toLowerCase(),
        [...o.attributes].filter(a => a.name.startsWith('on') || /^\\s*(javascript|data):/i.test(a.value)).length])"""))   # noqa: E501
    assert (not {o for o, _ in found} & {"img", "script", "svg", "iframe", "style", "form", "object", "embed",
                                         "noscript", "mglyph"} and not any(n for _, n in found))
    assert ({o.get_attribute("href") for o in page.all(".said a") if o.get_attribute("href")}
            <= {"https://example.org/spy.png"})
    page.quiet()

def test_what_cannot_be_read_is_shown_as_it_is(page):
    for text in (">"*20_000 + " deep", "["*3_000 + " open", "**"*5_000 + " stars", "$"*3_000 + " dollars"):
        page.told(piece(text, "stop"))
        page.until(lambda: text.split()[1] in page.last())
        page("reset").click()
    page.quiet()

def test_thoughts(page):
    "They are folded, and can be switched off and on where the model knows that"
    page("tab-settings").click()
    page.until(lambda: page.all("#settings #thinking"))
    for thinking, folded in (("medium", 1), ("none", 0)):
        page.js("(o => { o.value = arguments[1]; o.dispatchEvent(new Event('change')) })(arguments[0])",
                page.all("#thinking select")[0], thinking)
        page("text").click()
        page.ask("What is 21 + 13?")
        page.answered()
        folds = page.all(".thought")
        assert len(folds) == folded
        if folded:
            assert (folds[0].get_attribute("open") is None and folds[0].text.startswith("Thought for")
                    and "of thinking" in page.all(".bill")[0].text.replace("\u00a0", " "))
            folds[0].find_element("tag name", "summary").click()
            assert "20 + 10 = 30" in folds[0].text and page.last().strip() == "34"
        page("reset").click()
    page.quiet()

def test_images_are_refused(page):
    (page.driver.execute_script(
        """const given = new DataTransfer(); given.items.add(new File(['x'], 'a.png', {type: 'image/png'}))
        document.getElementById('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: given, bubbles: true, cancelable: true}))"""))   # noqa: E501
    assert "images cannot be sent" in page("trouble").text
    page.quiet()

def test_tokens_and_a_branch_from_one(page):
    "Each token with its probability; what else might have come, and an answer that goes on from there"
    page("tab-settings").click()
    page.all("#settings .check")[0].click()
    page("text").click()
    page.ask("What is a radix cache?")
    page.answered()
    said = page.last().strip()
    page.press("Tokens")
    spans = page.all(".tokens span")
    assert (
        (
            (
                (
                    ("".join(page.js("[...document.querySelectorAll('.tokens span')].map(o => "
                                     "o.textContent)")).strip().startswith(said) and len(spans) > 5)))))
    assert all(0 <= float(o) <= 1
               for o in page.js("[...document.querySelectorAll('.tokens span')].map(o => "
                                "o.style.getPropertyValue('--p'))"))
    spans[2].click()
    rows = page.all(".alternatives li")
    assert len(rows) >= 5 and len(page.all(".alternatives .mine")) == 1 and "%" in rows[0].text
    page.all(".tokens")[0].send_keys(Keys.ARROW_RIGHT)
    assert page.all(".tokens .chosen")[0].text == spans[3].text
    before = "".join(page.js("[...document.querySelectorAll('.tokens span')].slice(0, 3).map(o => "
                             "o.textContent)")).strip()
    other = page.js(
        "[...document.querySelectorAll('.alternatives li:has(button) code')][0].textContent").replace("␣",
            " ").replace("⏎", "\n")
    page.all(".alternatives button")[0].click()
    page.until(lambda: page.all(".assistant .turns"))
    page.answered()
    assert (page.last().strip().startswith(before + other.rstrip())
            and page.all(".assistant .turns")[0].text == "‹2/2›")
    page.quiet()

def test_the_way_of_a_request(page, server):
    "Queue, chunks and steps, what came from the cache, and tokens a second: as the server has measured them"
    page.driver.execute_script("const real = fetch; window.rids = []; window.fetch = window.plain = (url, o) "
                               "=> { if (String(url).startsWith('requests/')) rids.push(url); return "
                               "real(url, o) }")
    page.ask("What is a radix cache? " + "Tell me about pages. "*8)
    page.answered()
    page.ask("And a lock?")
    page.answered(2)
    way = httpx.get(f"{server.url}/{page.js('rids')[-1]}").json()
    bill = page.all(".bill")[1].text.replace("\u00a0", " ")
    rate = (way["output_tokens"] - 1)/(way["end"] - way["first_token"])
    assert (f"prompt of {way['prompt_tokens']}, {way['cached_tokens']} cached" in bill
            and way["cached_tokens"] > 0)
    assert abs(float(re.search(r"([\d,]+) tok/s", bill)[1].replace(",", "")) - rate) <= 1
    page.press("Details")
    text = page.all(".way")[0].text
    assert ("Queue" in text and f"{way['prompt_tokens'] - way['cached_tokens']} of {way['prompt_tokens']} "
                                "tokens" in text and f"up to step {way['last_step']}" in text)
    page.press("Show the prompt and what came from the cache")
    page.until(lambda: page.all(".prompt-text"))
    cached = page.all("mark")[0].text
    count = httpx.post(server.url + "/tokenize",
                       json=dict(prompt=cached, add_special_tokens=False)).json()["count"]
    assert (abs(count - way["cached_tokens"]) <= 1 and "And a lock?" in page.all(".prompt-text")[0].text
            and "And a lock?" not in cached)
    page.quiet()

def test_the_way_is_drawn_while_it_runs(page):
    page.keep(way="document.querySelector('.running .now')?.textContent ?? ''",
              bars="document.querySelectorAll('.running .now i').length")
    page.ask("Hello", tokens=1900)
    page.until(lambda: any("Queue" in o["way"] and "Answer" in o["way"] and o["bars"] >= 2
                           for o in page.js("kept")))
    page("stop").click()
    page.answered()
    assert not page.all(".now")
    page.quiet()

def test_one_look_at_a_time(page):
    """A server that is slow to say how far a request is gets no second question meanwhile: a browser has few
    connections, and Stop needs one"""
    page.driver.execute_script("""const real = fetch; let now = 0; window.looks = window.most = 0
        window.fetch = window.plain = async (url, o) => {
            if (!String(url).startsWith('requests/')) return real(url, o)
            looks += 1
            most = Math.max(most, now += 1)
            await new Promise(done => setTimeout(done, 1200))
            try { return await real(url, o) } finally { now -= 1 }
        }""")
    page.ask("Hello", tokens=1900)
    page.until(lambda: page.js("looks") >= 2)
    assert page.js("most") == 1   # up to the end, at which there is a last look
    page("stop").click()
    page.answered()
    page.quiet()

def test_a_request_that_waits_is_seen_and_stopped(page, server):
    "Before its first token, too"
    with httpx.Client(base_url=server.url) as client:
        client.post("/pause_generation", json={}).raise_for_status()
        page.ask("Hello")
        page.until(lambda: "Queue" in page.js("document.querySelector('.running .now')?.textContent ?? ''")
                   and page("brief").text == "1 waiting")
        page("stop").click()
        client.post("/continue_generation", json={}).raise_for_status()
    page.answered(0)
    assert not page.all(".running")
    page.quiet()

def test_two_beside_each_other(page):
    "With settings of their own; one of them is gone on with"
    page("tab-settings").click()
    page.all("#settings .check")[1].click()
    page.fill("max_tokens", "5")
    page.press("Answer B")
    page.fill("max_tokens", "9")
    page("text").click()
    page.ask("What is a radix cache?")
    page.answered(2)
    a, b = page.all(".pair .turn")
    assert ([o.find_element("class name", "note").text for o in (a, b)] == ["Answer A", "Answer B"]
            and "chosen" in a.get_attribute("class"))
    assert (a.location["y"] == b.location["y"] and "5 tokens" in a.find_element("class name", "bill").text
            and "9 tokens" in b.find_element("class name", "bill").text)
    page.open()
    page.press("Go on with this")
    page("tab-settings").click()
    page.all("#settings .check")[1].click()
    page("text").click()
    page.ask("And a lock?")
    page.answered(3)
    page.press("Details")
    page.press("Show the prompt and what came from the cache")
    page.until(lambda: page.all(".prompt-text"))
    longer = page.all(".pair .said")[1].text.strip()
    page.until(lambda: longer in page.all(".prompt-text")[0].text)
    page.quiet()

"The page at `/` in Chromium, as people use it: type, read along, stop, watch, on a desk and on a phone."
import json, re

import httpx
import pytest
from desk import ENGINE, Page
from selenium.webdriver import Keys

from minisgl_lit import serve


def piece(text, reason=None):
    "A chunk of a stream"
    return ("data: " + json.dumps(dict(choices=[dict(delta=dict(content=text), finish_reason=reason)]))
            + "\n\n")

def info(server): return httpx.get(server.url + "/get_server_info").json()


def test_an_answer_grows(page):
    "Keys alone: the field has the focus, Enter sends; the text comes in pieces, and in the end what it took"
    page.type("Count", Keys.SHIFT, Keys.ENTER)   # a line break, and nothing is sent
    assert page.js("document.activeElement.id") == "text" and not page.all(".turn")
    page.keep(text="last()")
    page.ask(Keys.NULL, "from 3 to 9", tokens=150)
    page.answered()
    pieces = [o for o in dict.fromkeys(o["text"] for o in page.js("kept")) if o]
    assert len(pieces) > 1 and all(b.startswith(a) for a, b in zip(pieces, pieces[1:]))
    assert page.all(".user .said")[0].text == "Count\nfrom 3 to 9"
    assert "150 tokens" in page.all(".bill")[0].text and "token limit" in page.all(".bill")[0].text
    page.ask("And now from 5 to 9")   # the conversation goes on, and the focus was kept
    page.answered(2)
    assert "cached" in page.all(".bill")[1].text
    page("reset").click()
    assert not page.all(".turn") and page("empty").is_displayed()
    page.quiet()


def test_a_stream_that_breaks_off_says_so(page):
    "and what has come stays"
    page.told(piece("half an ans"))
    assert page("trouble").text == "The answer broke off." and page.last() == "half an ans"
    page.told(piece("so far") + 'data: {"error": {"message": "the engine broke"}}\n\n')
    assert page("trouble").text == "the engine broke" and page.last() == "so far"
    page.quiet()


@pytest.mark.parametrize("how", ["button", "key", "other chat"])
def test_stop(page, server, how):
    "The answer ends where it is, the engine is told, and the page can be asked again"
    made = info(server)["generated_tokens"]
    page.ask("Hello", tokens=1900)
    page.until(lambda: len(page.last()) > 20)
    if how == "key": page.type(Keys.ESCAPE)
    else: page("stop" if how == "button" else "reset").click()
    if how == "other chat":   # there it goes on
        assert not page.all(".turn") and page("send").is_displayed()
        page.ask("Hi")
        page.answered()
        page.press("Hello", "#found")
        assert page.all(".running") and page("stop").is_displayed()
        page("stop").click()
    page.until(lambda: info(server)["running"] == 0)
    assert info(server)["generated_tokens"] - made < 1900
    page.answered()
    assert "stopped; it cost" in page.all(".bill")[0].text.replace("\u00a0", " ") and len(page.last()) > 20
    page("text").click()
    page.ask("Hello", tokens=20)   # after much that means little it would say as much again
    page.answered(2)
    alone = httpx.post(server.url + "/tokenize",
                       json=dict(messages=[dict(role="user", content="Hello")])).json()["count"]
    prompt = int(re.search(r"prompt of ([\d,]+)", page.all(".bill")[-1].text)[1].replace(",", ""))
    assert prompt > alone   # it knows what was said before
    page.quiet()


def test_the_live_view_moves(page, server):
    "Its numbers are the scheduler's, and it draws what happens"
    blank = page.picture()
    page.keep(running="$('running')", rate="$('rate')", held="$('held')", brief="$('brief')")
    page.ask("Hello", tokens=400)
    page.until(lambda: any(o["running"] == "1" and o["rate"] != "0" and o["held"] != "0"
                           for o in page.js("kept")))
    assert all(o["brief"] == "1 running" for o in page.js("kept") if o["running"] == "1")
    page.until(lambda: page.picture() != blank)
    page.until(lambda: page.all(".bill"))
    page.until(lambda: page.number("running") == page.number("held") == 0)
    pages = info(server)["pages"]
    assert ({o: page.number(o) for o in ("held", "protected", "evictable", "free")}
            == {o: pages[o] for o in pages if o != "total"})
    assert page("tree").text.startswith(f"{pages['evictable']} pages")
    page("look").click()   # it can be put away
    assert not page("side").is_displayed()
    page.quiet()


def test_guesses_that_came_true(browser):
    "In the bill of an answer that repeats itself, and in another shade among the batches, with a legend"
    with serve(**ENGINE, speculation="ngram") as server:
        page = Page(browser, server.url)
        assert not page("guessed").is_displayed()
        page.ask("one two three one two three one two three", tokens=300)
        page.until(lambda: page("guessed").is_displayed())
        page.answered()
        bill = page.all(".bill")[0].text.replace("\u00a0", " ")
        n = re.search(r"^300 tokens, (\d+) of them guessed", bill)
        metrics = httpx.get(server.url + "/metrics").text
        told = re.search(r"^minisgl:accepted_tokens_total.* (\d+)", metrics, re.M)
        assert 0 < int(n[1]) == int(told[1]) < 300
        page.quiet()

def test_sampling_and_errors(page):
    "What is asked for is sent; what is wrong is said in a sentence, and the question is given back"
    page("tab-settings").click()
    page.all("[name=top_p]")[0].send_keys("3")
    page("text").click()
    page.ask("Hello")
    page.until(lambda: "top_p must be" in page("trouble").text)
    assert page("text").get_attribute("value") == "Hello" and not page.all(".turn")
    page.all("[name=top_p]")[0].clear()
    for name, value in dict(temperature=1, top_p=.9, top_k=20, max_tokens=5, seed=3).items():
        page.all(f"[name={name}]")[0].send_keys(str(value))
    page("system").send_keys("Be brief.")
    page("text").click()
    answers = []
    for _ in range(2):
        page.ask(Keys.CONTROL, "a", Keys.NULL, "What is a page?")
        page.answered()
        assert page("trouble").text == "" and "5 tokens" in page.all(".bill")[0].text
        answers.append(page.last())
        page("reset").click()
    assert answers[0] == answers[1]
    page.quiet("400 (Bad Request)")   # browsers log what was refused


def test_a_server_with_a_key(browser):
    "It asks for the key; with it all works, and it is forgotten with the tab"
    with serve(**ENGINE, api_key="open sesame") as locked:
        page = Page(browser, locked.url, ready=lambda o: o("key").is_displayed())
        page.type("open", Keys.ENTER)
        page.until(lambda: "not the key" in page("key-note").text and page("key").is_displayed())
        page("key").clear()
        page("key").send_keys("open sesame", Keys.ENTER)
        page.until(lambda: page("model").text == "embedded")
        page.ask("Hello")
        page.until(lambda: page.all(".bill"))
        assert page.js("!JSON.stringify(localStorage).includes('sesame')") and not page("key").is_displayed()
        page.quiet("401 (Unauthorized)")
    page.until(lambda: "not connected" in page("brief").text)
    page.type("Hello", Keys.ENTER)
    page.until(lambda: "cannot be reached" in page("trouble").text)


@pytest.mark.parametrize("width", [360, 768])
def test_phone(page, server, width):
    "No scrolling sideways, whatever is open; one thing at a time"
    page.size(width, 740, mobile=True)
    page.driver.get(server.url)
    page.until(lambda: "idle" in page("brief").text)
    narrow = lambda: page.js("document.documentElement.scrollWidth") <= width == page.js("innerWidth")
    assert narrow() and not page("side").is_displayed()
    page.ask("What is a very-very-long-word" + "-and-longer"*20 + "?", tokens=300)
    page.until(lambda: page.last() and "running" in page("brief").text)
    assert narrow()
    page("look").click()
    assert narrow() and page("side").is_displayed() and not page("text").is_displayed()
    page.all("#side .close")[0].click()
    page("list").click()
    assert narrow() and page("talks").is_displayed() and not page("text").is_displayed()
    page.all("#talks .close")[0].click()
    page.until(lambda: page.all(".bill"))
    assert narrow() and page("text").is_displayed()
    page.quiet()


def test_light_and_dark(page):
    "It follows the reader; text stands out from its ground in both"
    grounds = []
    for light in (True, False):
        page.look(light)
        page.until(lambda: page.js("document.documentElement.dataset.theme")
                   == ("light" if light else "dark"))
        ground, ink, soft = (page.js(f"getComputedStyle(document.querySelector('{css}')).{what}")
                             for css, what in
                             (("body", "backgroundColor"), ("body", "color"), ("#keys", "color")))
        assert contrast(ground, ink) > 7 and contrast(ground, soft) > 4.5
        grounds.append(luminance(ground))
    assert grounds[0] > .8 and grounds[1] < .1

def luminance(rgb):
    linear = [c/12.92 if c <= .03928 else ((c + .055)/1.055)**2.4
              for c in (int(o)/255 for o in re.findall(r"\d+", rgb))]
    return sum(a*b for a, b in zip((.2126, .7152, .0722), linear))

def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + .05) / (low + .05)

"The page at `/` in Chromium, as people use it: type, read along, stop, watch, on a desk and on a phone."
import base64, json, os, re, shutil, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from minisgl_lit import serve

ENGINE = dict(port=0, num_pages=512, max_running_req=16, log_interval=0,
              attention="torch")   # slow enough to be watched and stopped: with its own kernels the longest answer takes a second
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-default-apps", "--disable-dev-shm-usage", "--window-size=1280,820"]

@pytest.fixture(scope="module")
def server():
    with serve(**ENGINE) as s: yield s

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = os.environ.get("CHROMIUM") or shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"): options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()

class Page:
    "The page, and what people do with it"
    def __init__(self, driver, url, ready=lambda page: page("model").text and page("running").text != "–"):
        self.driver = driver
        self.look(light=True)
        self.size(1280, 820)
        driver.get("about:blank")
        driver.get_log("browser")   # what others have left there
        driver.get(url)
        self.until(lambda: ready(self))

    def __call__(self, id): return self.driver.find_element(By.ID, id)
    def all(self, css): return self.driver.find_elements(By.CSS_SELECTOR, css)
    def js(self, code): return self.driver.execute_script(f"return {code}")
    def until(self, true, seconds=20): return WebDriverWait(self.driver, seconds, .05).until(lambda _: true())
    def type(self, *keys): self.driver.switch_to.active_element.send_keys(*keys)
    def number(self, id): return float(self(id).text.replace(",", "").replace("–", "0"))
    def picture(self): return self.js("document.getElementById('timeline').toDataURL()")
    def cdp(self, command, **words): self.driver.execute_cdp_cmd(f"Emulation.{command}", words)
    def look(self, light): self.cdp("setEmulatedMedia", features=[dict(name="prefers-color-scheme", value="light" if light else "dark")])
    def size(self, width, height, mobile=False): self.cdp("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def last(self):
        "What the last answer says so far"
        return self.js("[...document.querySelectorAll('.assistant .said')].at(-1)?.textContent ?? ''")

    def keep(self, **what):
        "From now on note what these expressions say, all at once, each time the page changes"
        self.driver.execute_script("""window.kept = []; const $ = id => document.getElementById(id).textContent
            const last = () => [...document.querySelectorAll('.assistant .said')].at(-1)?.textContent ?? ''
            new MutationObserver(() => kept.push({%s})).observe(document.body, {childList: true, characterData: true, subtree: true})
            """ % ", ".join(f"{name}: {code}" for name, code in what.items()))

    def quiet(self, *expected):
        "The console has nothing to complain about since the page was opened, but this"
        assert not [m for o in self.driver.get_log("browser") if o["level"] != "DEBUG" and not any(e in (m := o["message"]) for e in expected)]

@pytest.fixture
def page(browser, server): return Page(browser, server.url)

def ask(page, *keys, tokens=None):
    "Type a question into what has the focus; the small model says little, so an answer may be made to go on"
    more = f"{{ignore_eos: true, max_tokens: {tokens}}}" if tokens else "{}"
    page.driver.execute_script("""window.plain ??= fetch; window.fetch = (url, o) => plain(url,
        o?.body ? {...o, body: JSON.stringify({...JSON.parse(o.body), ...%s})} : o)""" % more)
    page.type(*keys, Keys.ENTER)

def info(server): return httpx.get(server.url + "/get_server_info").json()


def test_an_answer_grows(page):
    "Keys alone: the field has the focus, Enter sends; the text comes in pieces, and in the end what it took"
    page.type("Count", Keys.SHIFT, Keys.ENTER)   # a line break, and nothing is sent
    assert page.js("document.activeElement.id") == "text" and not page.all(".turn")
    page.keep(text="last()")
    ask(page, Keys.NULL, "from 3 to 9", tokens=150)
    page.until(lambda: page.all(".bill"))
    pieces = [o for o in dict.fromkeys(o["text"] for o in page.js("kept")) if o]
    assert len(pieces) > 1 and all(b.startswith(a) for a, b in zip(pieces, pieces[1:]))
    assert page.all(".user .said")[0].text == "Count\nfrom 3 to 9"
    assert "150 tokens" in page.all(".bill")[0].text and "token limit" in page.all(".bill")[0].text
    ask(page, "And now from 5 to 9")   # the conversation goes on, and the focus was kept
    page.until(lambda: len(page.all(".bill")) == 2)
    assert "cached" in page.all(".bill")[1].text
    page("reset").click()
    assert not page.all(".turn") and page("empty").is_displayed()
    page.quiet()


def test_what_comes_is_text(page):
    "Whatever a model writes stays text: no elements of its own, only code and bold; and a stream that breaks off says so"
    piece = lambda text, reason=None: "data: " + json.dumps(dict(choices=[dict(delta=dict(content=text), finish_reason=reason)])) + "\n\n"
    def told(stream):
        page.driver.execute_script("window.plain ??= fetch; window.fetch = (url, o) => o?.body ? Promise.resolve(new Response(arguments[0])) : plain(url, o)", stream)
        page.type("<b>Hello</b>", Keys.ENTER)
        page.until(page("send").is_displayed)
    told(piece("<img src=x onerror=alert(1)> is **bo") + piece("ld** and `a < b`:\n```py\nx = '<i>'\n``` fin", "stop") + "data: [DONE]\n\n")
    assert not page.all(".said img, .said i") and page.all(".user .said")[0].text == "<b>Hello</b>"
    assert [o.text for o in page.all(".assistant b, .assistant code")] == ["bold", "a < b", "x = '<i>'"]
    assert page.last().startswith("<img src=x onerror=alert(1)> is bold and") and page.last().endswith(" fin")
    told(piece("half an ans"))
    assert page("trouble").text == "The answer broke off." and page.last() == "half an ans"
    told(piece("so far") + 'data: {"error": {"message": "the engine broke"}}\n\n')
    assert page("trouble").text == "the engine broke" and page.last() == "so far"
    page.quiet()


@pytest.mark.parametrize("how", ["button", "key", "reset"])
def test_stop(page, server, how):
    "The answer ends where it is, the engine is told, and the page can be asked again"
    made = info(server)["generated_tokens"]
    ask(page, "Hello", tokens=1900)
    page.until(lambda: len(page.last()) > 20)
    if how == "key": page.type(Keys.ESCAPE)
    else: page("stop" if how == "button" else "reset").click()
    page.until(lambda: info(server)["running"] == 0)
    assert info(server)["generated_tokens"] - made < 1900
    page.until(page("send").is_displayed)
    if how == "reset": assert not page.all(".turn")
    else: assert "stopped" in page.all(".bill")[0].text and len(page.last()) > 20
    ask(page, "Hello")
    page.until(lambda: page.all(".bill") and "tokens" in page.all(".bill")[-1].text)
    alone = httpx.post(server.url + "/tokenize", json=dict(messages=[dict(role="user", content="Hello")])).json()["count"]
    prompt = int(re.search(r"prompt of (\d+)", page.all(".bill")[-1].text)[1])
    assert prompt == alone if how == "reset" else prompt > alone   # a new chat knows nothing of what was said before
    page.quiet()


def test_the_live_view_moves(page, server):
    "Its numbers are the scheduler's, and it draws what happens"
    blank = page.picture()
    page.keep(running="$('running')", rate="$('rate')", held="$('held')", brief="$('brief')")
    ask(page, "Hello", tokens=400)
    page.until(lambda: any(o["running"] == "1" and o["rate"] != "0" and o["held"] != "0" for o in page.js("kept")))
    assert all(o["brief"] == "1 running" for o in page.js("kept") if o["running"] == "1")
    page.until(lambda: page.picture() != blank)
    page.until(lambda: page.all(".bill"))
    page.until(lambda: page.number("running") == page.number("held") == 0)
    pages = info(server)["pages"]
    assert {o: page.number(o) for o in ("held", "protected", "evictable", "free")} == {o: pages[o] for o in pages if o != "total"}
    assert page("tree").text.startswith(f"{pages['evictable']} pages")
    page("look").click()   # it can be put away
    assert not page("side").is_displayed()
    page.quiet()


def test_sampling_and_errors(page):
    "What is asked for is sent; what is wrong is said in a sentence, and the question is given back"
    page.all("[name=top_p]")[0].send_keys("3")
    page("text").click()
    ask(page, "Hello")
    page.until(lambda: "top_p must be" in page("trouble").text)
    assert page("text").get_attribute("value") == "Hello" and not page.all(".turn")
    page.all("[name=top_p]")[0].clear()
    for name, value in dict(temperature=1, top_p=.9, top_k=20, max_tokens=5, seed=3).items(): page.all(f"[name={name}]")[0].send_keys(str(value))
    page("system").send_keys("Be brief.")
    page("text").click()
    answers = []
    for _ in range(2):
        ask(page, Keys.CONTROL, "a", Keys.NULL, "What is a page?")
        page.until(lambda: page.all(".bill"))
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
        ask(page, "Hello")
        page.until(lambda: page.all(".bill"))
        assert page.js("localStorage.length") == 0 and not page("key").is_displayed()
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
    ask(page, "What is a very-very-long-word" + "-and-longer"*20 + "?", tokens=300)
    page.until(lambda: page.last() and "running" in page("brief").text)
    assert narrow()
    page("look").click()
    assert narrow() and page("side").is_displayed() and not page("text").is_displayed()
    page("look").click()
    page.until(lambda: page.all(".bill"))
    assert narrow() and page("text").is_displayed()
    page.quiet()


def test_light_and_dark(page):
    "It follows the reader; text stands out from its ground in both"
    grounds = []
    for light in (True, False):
        page.look(light)
        ground, ink, soft = (page.js(f"getComputedStyle(document.querySelector('{css}')).{what}") for css, what in
                             (("body", "backgroundColor"), ("body", "color"), ("#keys", "color")))
        assert contrast(ground, ink) > 7 and contrast(ground, soft) > 4.5
        grounds.append(luminance(ground))
    assert grounds[0] > .8 and grounds[1] < .1

def luminance(rgb):
    linear = [c/12.92 if c <= .03928 else ((c + .055)/1.055)**2.4 for c in (int(o)/255 for o in re.findall(r"\d+", rgb))]
    return sum(a*b for a, b in zip((.2126, .7152, .0722), linear))

def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + .05) / (low + .05)


@pytest.mark.skipif("TST_SCREENSHOT" not in os.environ, reason="make screenshot")
def test_screenshot(page, server):
    "A busy moment, for the docs: not a test, but it needs the same things; with the letters of the book, for a server has few"
    page.driver.execute_cdp_cmd("Page.setBypassCSP", dict(enabled=True))
    page.driver.get(server.url)
    letters = base64.b64encode((Path(__file__).parents[2] / "docs/_static/vendor/inter-normal.woff2").read_bytes()).decode()
    page.driver.execute_async_script("""const [letters, done] = arguments
        new FontFace('Inter', `url(data:font/woff2;base64,${letters})`, {weight: '100 900'}).load().then(o => { document.fonts.add(o); done() })""", letters)
    page.size(1280, 760)
    text = "The pages of a tree are shared by requests that begin alike. "
    def other(i):
        time.sleep(i*.3)
        wishes = dict(max_tokens=80 + 30*i, ignore_eos=True, temperature=1)
        httpx.post(server.url + "/generate", json=dict(text=text*(1 + i % 4), sampling_params=wishes), timeout=60)
    ask(page, "What is a radix cache?")
    page.until(lambda: len(page.all(".bill")) == 1)
    with ThreadPoolExecutor(14) as pool:
        for i in range(14): pool.submit(other, i)
        time.sleep(4)
        ask(page, "What is a scheduler?")
        page.until(lambda: len(page.all(".bill")) == 2)
        ask(page, "And what does a page hold?")
        page.until(lambda: len(page.last()) > 20)
        file = Path(os.environ["TST_SCREENSHOT"])
        file.parent.mkdir(exist_ok=True)
        assert page.driver.save_screenshot(str(file.resolve())) and file.stat().st_size < 150_000

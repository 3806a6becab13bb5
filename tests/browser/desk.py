"A browser and a server for all tests of this folder, and what people do with the page."
import os, shutil

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from minisgl_lit import serve

# slow enough to be watched and stopped: with its own kernels the longest answer takes a second
ENGINE = dict(port=0, num_pages=512, max_running_req=16, log_interval=0,
              attention="torch")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--no-proxy-server", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-default-apps",
         "--disable-dev-shm-usage", "--window-size=1280,820"]

@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serve(**ENGINE, batch_folder=str(tmp_path_factory.mktemp("kept"))) as s: yield s

@pytest.fixture(scope="session")
def downloads(tmp_path_factory): return tmp_path_factory.mktemp("downloads")

@pytest.fixture(scope="session")
def browser(tmp_path_factory, downloads):
    options = ChromeOptions()
    options.binary_location = os.environ.get("CHROMIUM") or shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"): options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", dict(behavior="allow", downloadPath=str(downloads)))
    yield driver
    driver.quit()

class Page:
    "The page, and what people do with it"
    def __init__(self, driver, url, ready=lambda page: page.met() and page("running").text != "–"):
        self.driver, self.url, self.ready = driver, url, ready
        self.look(light=True)
        self.size(1280, 820)
        driver.get("about:blank")
        # what others have left there
        driver.execute_cdp_cmd("Storage.clearDataForOrigin", dict(origin=url, storageTypes="all"))
        driver.get_log("browser")
        self.open()

    def open(self):
        self.driver.get(self.url)
        self.until(lambda: self.ready(self))

    def met(self): return bool(self.all("#suggestions li"))   # it knows which model this is

    def __call__(self, id): return self.driver.find_element(By.ID, id)
    def all(self, css): return self.driver.find_elements(By.CSS_SELECTOR, css)
    def js(self, code, *given): return self.driver.execute_script(f"return {code}", *given)
    def until(self, true, seconds=60, message=""):
        "What it gives once it gives something; what was drawn anew meanwhile is looked for again"
        return WebDriverWait(self.driver, seconds, .05,
            [NoSuchElementException, StaleElementReferenceException]).until(lambda _: true(), message)

    def type(self, *keys): self.driver.switch_to.active_element.send_keys(*keys)
    def number(self, id): return float(self(id).text.replace(",", "").replace("–", "0"))
    def picture(self): return self.js("document.getElementById('timeline').toDataURL()")
    def cdp(self, command, **words): self.driver.execute_cdp_cmd(f"Emulation.{command}", words)
    def look(self, light):
        self.cdp("setEmulatedMedia",
                 features=[dict(name="prefers-color-scheme", value="light" if light else "dark")])
    def size(self, width, height, mobile=False):
        self.cdp("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def press(self, name, within="body"):
        "Press the last visible button with this name"
        def pressed():
            found = [o for o in self.all(f":is({within}) :is(button, summary)") if o.text == name
                     and o.is_displayed()]
            if found:
                self.js("arguments[0].scrollIntoView({block: 'center'})", found[-1])
                found[-1].click()
            return bool(found)
        self.until(pressed, message=f"no button {name!r} in {within}")

    def fill(self, name, value):
        "A field of the settings"
        (self.js(
            """(([o, value]) => {
                o.value = value
                o.dispatchEvent(new Event(o.tagName === 'SELECT' ? 'change' : 'input'))
            })(arguments)""",
                self.all(f"#settings [name={name}], #settings #{name}")[0], value))

    def last(self):
        "What the last answer says so far"
        return self.js("[...document.querySelectorAll('.assistant .said')].at(-1)?.textContent ?? ''")

    def answered(self, n=1):
        "So many answers are there, and none is being written"
        self.until(lambda: len(self.all(".bill")) >= n and not self.all(".running")
                   and self("send").is_displayed())

    def keep(self, **what):
        "From now on note what these expressions say, all at once, each time the page changes"
        (self.driver.execute_script(
            """window.kept = []; const $ = id => document.getElementById(id).textContent
            const last = () => [...document.querySelectorAll('.assistant .said')].at(-1)?.textContent ?? ''
            new MutationObserver(() => kept.push({%s})).observe(document.body, {childList: true, characterData: true, subtree: true})
            """ % ", ".join(f"{name}: {code}" for name, code in what.items())))   # noqa: E501

    def quiet(self, *expected):
        """The console has nothing to complain about since the page was opened, but this; and that a request,
        looked for too soon, was not known yet"""
        expected += "/requests/chatcmpl-",
        assert not [m for o in self.driver.get_log("browser") if o["level"] != "DEBUG"
                    and not any(e in (m := o["message"]) for e in expected)]

    def focus(self): return self.js("document.activeElement.id || document.activeElement.textContent")

    def ask(self, *keys, tokens=None):
        """Type a question into what has the focus; the small model says little, so an answer may be made to
        go on"""
        more = f"{{ignore_eos: true, max_tokens: {tokens}}}" if tokens else "{}"
        (self.driver.execute_script("""window.plain ??= fetch; window.fetch = (url, o) => plain(url,
            String(url).endsWith('completions') ? {...o, body: JSON.stringify({...JSON.parse(o.body), ...%s})} : o)""" % more))   # noqa: E501
        self.type(*keys, Keys.ENTER)

    def told(self, stream, question="Hello"):
        "Ask, and get this stream for an answer"
        self.driver.execute_script(
            """window.plain ??= fetch; window.fetch = (url, o) => String(url).endsWith('completions')
            ? Promise.resolve(new Response(arguments[0])) : plain(url, o)""", stream)
        self.js("document.getElementById('text').value = arguments[0]", question)
        self("text").send_keys(Keys.ENTER)
        self.until(self("send").is_displayed)

@pytest.fixture
def page(browser, server): return Page(browser, server.url)

"""The pictures of the page in README and guides, made anew by each run; `make screenshot` puts them into
docs/images."""
import base64, os, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
MOST = 200_000   # bytes of a picture

@pytest.fixture
def pictured(page, tmp_path):
    "The page with the letters of the book, for a server has few; and where a picture of it goes"
    page.driver.execute_cdp_cmd("Page.setBypassCSP", dict(enabled=True))
    page.open()
    letters = base64.b64encode((ROOT/"docs/_static/vendor/inter-normal.woff2").read_bytes()).decode()
    (page.driver.execute_async_script("""const [letters, done] = arguments
        new FontFace('Inter', `url(data:font/woff2;base64,${letters})`, {weight: '100 900'}).load().then(o => { document.fonts.add(o); done() })""", letters))   # noqa: E501
    page.size(1280, 800)
    def keep(name):
        file = Path(os.environ.get("TST_SCREENSHOT", tmp_path)).resolve()/name
        assert page.driver.save_screenshot(str(file)) and file.stat().st_size < MOST
    yield page, keep
    page.driver.execute_cdp_cmd("Page.setBypassCSP", dict(enabled=False))

def load(server, seconds):
    "Others that ask, for so long; what they ask begins alike"
    text = "The pages of a tree are shared by requests that begin alike. "
    def other(i):
        time.sleep(i*seconds/14)
        wishes = dict(max_tokens=40 + 8*i, ignore_eos=True, temperature=1)
        httpx.post(server.url + "/generate", json=dict(text=text*(1 + i % 4), sampling_params=wishes),
                   timeout=60)
    pool = ThreadPoolExecutor(14)
    for i in range(14): pool.submit(other, i)
    return pool

def test_a_busy_moment(pictured, server):
    page, keep = pictured
    for asked in ("What is a page table?", "Count from 3 to 9"):
        page.ask(asked)
        page.answered()
        page("reset").click()
    page.ask("What is a radix cache?")
    page.answered()
    pool = load(server, 3)
    page.ask("Explain chunked prefill")
    page.answered(2)
    page.press("Details")
    time.sleep(1)
    page.js("document.getElementById('log').scrollTo(0, 1e6)")
    keep("page.png")
    pool.shutdown()

def test_tokens(pictured):
    page, keep = pictured
    page("tab-settings").click()
    page.all("#settings .check")[0].click()
    page.fill("temperature", "0.9")
    page.fill("seed", "5")
    page("text").click()
    page.ask("Explain continuous batching")
    page.answered()
    page.press("Tokens")
    page.until(lambda: page.all(".tokens span"))
    least = page.js("(o => o.indexOf(Math.min(...o)))([...document.querySelectorAll('.tokens span')].map(o "
                    "=> Number(o.style.getPropertyValue('--p'))))")
    page.all(".tokens span")[least].click()
    keep("page-tokens.png")

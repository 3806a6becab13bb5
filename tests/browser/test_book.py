"""The built site (`make docs`) in Chromium: home, a chapter, a film that needs no kernel, search; on a desk,
on a phone, in the dark."""
import functools, re, subprocess, sys, threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
sys.path.insert(0, str(Path(__file__).resolve().parents[2]/"docs"))
from desk import Page
from search import unnumbered
from searched import QUERIES
from selenium.webdriver.common.by import By

from minisgl_lit.tools.svg import player
from minisgl_lit.tools.widgets import Recorder
from test_viz import live, server as toy_server

BUILT = Path(__file__).resolve().parents[2]/"docs/_build/html"

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope="module")
def site():
    assert (BUILT/"index.html").exists(), "first build it: make docs"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=BUILT))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()

@pytest.fixture
def visit(browser, site):
    return lambda path: Page(browser, site + path,
                             ready=lambda page: page.js("document.readyState") == "complete")

def text(page): return page.driver.find_element(By.TAG_NAME, "article").text

def test_home_leads_everywhere(visit):
    page = visit("index.html")
    assert "Two commands" in text(page) and "make serve" in text(page)
    links = [o.get_attribute("href") for o in page.all(".sidebar-tree a")]
    for place in ("guides/index", "guides/coming-from", "made/cli", "made/benchmarks", "nbs/core/02_request",
                  "nbs/tools/widgets", "made/path", "made/core", "made/ring-experiments", "made/ring-server",
                  "server-path", "design", "glossary", "changelog", "contributing"):
        assert any(place + ".html" in o for o in links), place

@pytest.mark.parametrize("path", ["index.html", "nbs/core/12_kv_cache.radix.html", "nbs/tools/widgets.html",
                                  "made/cli.html", "guides/tune.html", "glossary.html"])
@pytest.mark.parametrize("width, height", [(390, 800), (1280, 820)], ids=["phone", "desk"])
def test_nothing_sticks_out(visit, path, width, height):
    page = visit(path)
    page.size(width, height, mobile=width < 500)
    page.until(lambda: page.js("document.documentElement.scrollWidth") <= width)

BEYOND = ("""
const [pages, width, done] = arguments, bad = {}
async function put(path, text) {   // what another page says, in this one; its diagrams are drawn anew
    const article = new DOMParser().parseFromString(text, 'text/html').querySelector('article')
    document.head.querySelector('base')?.remove()
    document.head.prepend(Object.assign(document.createElement('base'), {href: path}))
    document.querySelector('article').replaceWith(document.adoptNode(article))
    await MathJax.typesetPromise([document.querySelector('article')])
    await Promise.all([...document.images].map(o => { o.loading = 'eager'; return o.decode().catch(() => null) }))
    last = null
    await draw()
}
function* shown(e) {   // all within, but not what can be scrolled and what is in it
    for (const o of e.children)
        if (getComputedStyle(o).overflowX === 'visible' && !o.matches('svg, mjx-container')) {
            yield o
            yield* shown(o)
        }
}
function beyond() {
    const article = document.querySelector('article'), found = new Set()
    for (const e of shown(article))
        if (e.getBoundingClientRect().right > width + 2) found.add(e.tagName + ' ' + e.className)
    for (const o of article.querySelectorAll('img')) if (!o.naturalWidth) found.add('no picture ' + o.src)
    for (const o of article.querySelectorAll('.math')) if (!o.querySelector('mjx-container')) found.add('no formula')
    for (const o of article.querySelectorAll('pre.mermaid')) if (!o.querySelector('svg')) found.add('no diagram')
    return [...found]
}
(async () => {
    for (const [path, text] of pages) {
        if (text) await put(path, text)
        const found = beyond()
        if (found.length) bad[path] = found
    }
    done(bad)
})().catch(e => done({error: String(e)}))""")   # noqa: E501

def article(text):
    "What a page says beside its menu; code without its colours, which are most of its tags"
    said = text[text.index("<article"):text.index("</article>") + len("</article>")]
    return re.sub(r"(?s)<pre>.*?</pre>", lambda m: re.sub(r"</?span[^>]*>", "", m[0]), said)

# what fits on a phone, fits
@pytest.mark.parametrize("width",
    [pytest.param(390, id="phone"), pytest.param(1280, id="desk", marks=pytest.mark.long)])
def test_every_page_fits(visit, site, width):
    """Nothing reaches beyond the page, but in a box of its own that can be scrolled. What is drawn by no more
    than its diagrams and formulas is put into a page that is there"""
    texts = {o.relative_to(BUILT).as_posix(): o.read_text()
             for o in BUILT.rglob("*.html") if "_static" not in o.parts}
    texts = {path: text for path, text in texts.items() if 'http-equiv="refresh"' not in text}
    listings = sorted((o for o in texts if o.startswith("src/")), key=lambda o: len(texts[o]))
    for path in listings[:-3]: del texts[path]   # each is one box
    whole = {path for path, text in texts.items() if '<script type="application/vnd.jupyter' in text}
    page = visit("nbs/server/router.html")   # it has diagrams and formulas
    page.size(width, 820, mobile=width < 500)
    page.driver.set_script_timeout(300)
    put, bad = [(site + o, article(texts[o])) for o in sorted(texts.keys() - whole)], {}
    for i in range(0, len(put), 40): bad |= page.driver.execute_async_script(BEYOND, put[i:i + 40], width)
    for path in sorted(whole):
        page.driver.get(site + path)
        bad |= page.driver.execute_async_script(BEYOND, [(path, None)], width)
    assert len(texts) > 200 and not bad

def test_a_chapter_goes_on_to_the_next(visit):
    page = visit("nbs/core/12_kv_cache.radix.html")
    assert "Who may share a page" in text(page)
    on = page.all("a.next-page")[0]
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", on)
    on.click()
    page.until(lambda: "core/13_kv_cache.namespaces" in page.driver.current_url)

def test_next_stands_where_the_text_ends(visit):
    """Above the reference, and at the foot of the page; on the server path it leads along that path, and says
    what else is next"""
    page = visit("nbs/server/sse.html")
    ways = page.all(".onward a")
    assert [o.get_attribute("href").rpartition("/nbs/")[2] for o in ways] == ["server/protocol.html",
        "server/fields.html"]
    assert [o.text for o in page.all(".onward strong")] == ["Next on the server path:", "Next in Server:"]
    assert page.js(
        "document.querySelector('.onward').compareDocumentPosition(document.getElementById('reference')) "
                   "& Node.DOCUMENT_POSITION_FOLLOWING")
    assert (page.all("a.next-page")[0].get_attribute("href").endswith("server/protocol.html")
            and page.all("a.prev-page")[0].get_attribute("href").endswith("server-path.html"))

@pytest.fixture
def searched(visit):
    page = visit("search.html")
    page.until(lambda: page.js("Search._index !== null && typeof Rank === 'object'"))
    return lambda words: page.js(
        "Search._performSearch(...Search._parseQuery(arguments[0])).slice(-3).reverse().map(o "
                                 "=> o[0])", words)

def test_search_finds_what_engineers_type(searched):
    "Each of these words, also those of other engines, has its page among the first three"
    found = {words: [unnumbered(o) for o in searched(words)] for words in QUERIES}
    assert not {words: found[words] for words, places in QUERIES.items()
                if not {*found[words]} & {*places.split()}}

def test_search_shows_what_it_finds(visit):
    """The first result is a link with the words around it; a name of the package leads to its entry; nonsense
    finds nothing"""
    page = visit(f"search.html?q={quote('radix attention')}")
    page.until(lambda: page.all("#search-results li a") and page.all("#search-results li .context"))
    assert "kv_cache.radix.html" in page.all("#search-results li a")[0].get_attribute("href")
    page = visit("search.html?q=qqxyzzy")
    page.until(lambda: "Search Results" in page.driver.find_element(By.ID, "search-results").text)
    assert not page.all("#search-results li")
    page = visit(f"search.html?q={quote('CacheManager')}")
    page.until(lambda: [o for o in page.all("#search-results li a")
                        if "#minisgl_lit.core.kv_cache.manager.CacheManager" in o.get_attribute("href")])

def test_the_menu_is_the_map(visit):
    """The core by its parts, then groups by topic: all fold; those of the open chapter are open, and it is in
    view"""
    page = visit("nbs/core/12_kv_cache.radix.html")
    visible = [o.text for o in page.all(".sidebar-tree a.reference.internal") if o.is_displayed()]
    assert (visible.index("The core") < visible.index("1 Where the KV lives")
            < visible.index("12 radix cache") < visible.index("2 Scheduling") < visible.index("Experiments")
            < visible.index("Kernels") < visible.index("Server"))
    assert not any(o.startswith(("18 ", "2 request")) for o in visible) and "router" not in visible
    assert page.all(".sidebar-tree .current-page > .reference")[0].text == "12 radix cache"
    page = visit("nbs/server/cluster.html")
    page.until(lambda: page.js("(([o]) => o.top >= 0 && o.bottom <= "
                               "innerHeight)([document.querySelector('.sidebar-tree .current-page > "
                               ".reference').getBoundingClientRect()])"))
    assert page.all(".sidebar-tree .current-page > .reference")[0].text == "Ray Serve"

@pytest.mark.parametrize("old, new",
    [("made/part-8", "made/ring-server"), ("nbs/53c_server.router", "nbs/server/router")])
def test_old_addresses_lead_on(visit, old, new):
    page = visit(f"{old}.html")
    page.until(lambda: page.driver.current_url.endswith(f"{new}.html"))

def test_code_wraps_on_a_phone(visit):
    "A listing hides nothing to the right, and the picture of the first page is as large as its text needs"
    page = visit("nbs/core/12_kv_cache.radix.html")
    page.size(390, 800, mobile=True)
    page.until(lambda: page.js("[...document.querySelectorAll('div.cell_input pre')].filter(o => "
                               "o.offsetParent).every(o => o.scrollWidth <= o.clientWidth + 1)"))
    page = visit("index.html")
    page.size(390, 800, mobile=True)
    page.until(lambda: page.js("document.querySelector('article img').getBoundingClientRect().width") > 600)

def test_the_home_page_shows_the_page_at_work(visit):
    "on three screens"
    page = visit("index.html")
    assert page.js("document.querySelector('article img').naturalWidth") > 1000
    assert page.js("document.querySelector('article').getBoundingClientRect().height") <= 3 * 820

def test_checks_are_folded(visit):
    page = visit("nbs/tools/drawing.html")
    fold = next(o for o in page.all("details.hide") if re.search(r"\d+ checks", o.text))
    assert "test_eq" not in fold.text
    page.driver.execute_script("arguments[0].open = true", fold)
    page.until(lambda: "test_eq" in fold.text)

def test_dark(visit):
    def brightness(page):
        return sum(map(int,
            page.js("getComputedStyle(document.body).backgroundColor").strip("rgba()").split(",")[:3]))
    page = visit("nbs/core/12_kv_cache.radix.html")
    assert brightness(page) > 600
    page.look(light=False)
    page.until(lambda: brightness(page) < 200)

LOOK = ("[...document.querySelector('.lit-run').querySelectorAll('[data-step]')].map(o => "
        "getComputedStyle(o).visibility + o.classList).join()")

def test_a_film_moves_without_a_kernel(visit):
    page = visit("nbs/tools/widgets.html")
    slider, before = page.all(".lit-run input[type=range]")[0], page.js(LOOK)
    page.driver.execute_script("const o = arguments[0]; o.value = o.min; o.dispatchEvent(new Event('input', "
                               "{bubbles: true}))", slider)
    page.until(lambda: page.js(LOOK) != before)

@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_diagrams_can_be_read(visit, width):
    "One that is too wide from left to right is drawn from top to bottom"
    page = visit("nbs/server/serve.html")
    page.size(width, 820, mobile=width < 500)
    page.driver.refresh()
    scale = ("(() => { const o = document.querySelector('.mermaid svg'); return o && "
             "o.getBoundingClientRect().width / o.viewBox.baseVal.width })()")
    page.until(lambda: (page.js(scale) or 0) > .65)

def test_the_slider_needs_no_kernel(tmp_path):
    """In a browser with nothing but the file: the first step is chosen, and all of it is marked and nothing
    else"""
    s = toy_server()
    with Recorder(s) as run: live(s, [(5, 0, 4, 3), (5, 2, 4, 3)])
    page = tmp_path/'film.html'
    page.write_text('<meta charset=utf8>' + player(run)
                    + '<pre id=told></pre><script>const o = document.querySelector("input"); o.value = 1; '
                    'o.dispatchEvent(new Event("input")); told.textContent = '
                    '[...document.querySelectorAll(".now")].map(o => o.dataset.step).join("|") + '
                    '";" + [...document.querySelectorAll(".frames > *")].filter(o => '
                    'getComputedStyle(o).visibility == "visible").length</script>')
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--no-proxy-server',
             '--disable-background-networking', f'--user-data-dir={tmp_path}/profile']
    dom = subprocess.run(['chromium', *flags, '--dump-dom', page.as_uri()], capture_output=True, text=True,
                         timeout=60).stdout
    marks, visible = re.search(r'<pre id="told">(.*?)</pre>', dom)[1].split(';')
    assert len(marks.split('|')) == 4 and all('1' in o.split() for o in marks.split('|')) and visible == '2'

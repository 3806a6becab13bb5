"The menu of models, where a server has several: of a table that loads them, and of adapters on a phone."
import json, shutil

import httpx
import pytest
from desk import ENGINE, Page
from selenium.webdriver import Keys
from test_browser import piece
from test_desk import serious

from minisgl_lit import serve
from minisgl_lit.formats.hub import embedded_path

@pytest.fixture(scope="module")
def table(tmp_path_factory):
    "One that can be talked with, one that makes embeddings, and one that cannot be loaded"
    folder = tmp_path_factory.mktemp("models")
    for name in ("broken", "embed"): shutil.copytree(embedded_path(), folder/name)
    (folder/"embed"/"modules.json").write_text("[]")
    (folder/"broken"/"config.json").write_text("{}")
    path = folder/"models.json"
    models = dict(broken=str(folder/"broken"), embed=str(folder/"embed"), chat="embedded")
    path.write_text(json.dumps(dict(models=models, default="chat")))
    return str(path)

def menu(page):
    "What the menu offers, and what is chosen"
    return [o.text.strip() for o in page.all("#models option")], page("models").get_attribute("value")

def test_a_table_of_models(browser, table):
    """It offers those that talk, begins with the default, says what is loaded, says it while one waits, too;
    a load that fails is a sentence; the choice stays, and the conversation goes on"""
    with serve(**ENGINE, models=table) as server:
        page = Page(browser, server.url, ready=lambda page: page.met() and page("brief").text != "connecting")
        assert menu(page) == (["broken (not loaded)", "chat (not loaded)"], "chat")
        assert page("brief").text == "not loaded" and not page("model").is_displayed()
        assert page.all("#settings #thinking")   # its template was read, though it is not loaded
        page.keep(now="document.querySelector('.running .now')?.textContent ?? ''")
        page.ask("What is a page?")
        page.answered()
        said = [o["now"] for o in page.js("kept")]
        assert any("model 'chat' is loading" in o for o in said)
        assert page.all(".bill")[0].text.replace("\u00a0", " ").startswith("chat · ")
        page.until(lambda: page("running").text != "–" and "idle" in page("brief").text)
        assert menu(page)[0] == ["broken (not loaded)", "chat"]
        page.type(Keys.ALT, "m")
        page.type("b")   # keys alone
        page.until(lambda: page("brief").text == "not loaded" and page("running").text == "–")
        page("text").click()
        page.ask("And a lock?")
        page.until(lambda: "model 'broken' could not be loaded: " in page("trouble").text)
        assert page("text").get_attribute("value") == "And a lock?" and len(page.all(".turn")) == 2
        page.open()
        assert menu(page) == (["broken (failed)", "chat"], "broken")
        page.type(Keys.ALT, "m")
        page.type("c")
        page.until(lambda: "idle" in page("brief").text)
        page("text").click()
        page.type(Keys.ENTER)   # what could not be asked
        page.answered(2)
        assert "cached" in page.all(".bill")[1].text
        page.press("Details")
        page.press("Show the prompt and what came from the cache")
        page.until(lambda: page.all(".prompt-text"))
        assert "And a lock?" in page.all(".prompt-text")[0].text
        httpx.post(server.url + "/models/unload", json=dict(model="chat")).raise_for_status()
        page.until(lambda: page("brief").text == "not loaded")
        assert menu(page) == (["broken (failed)", "chat (not loaded)"], "chat")
        page.quiet("400 (Bad Request)")

# in the page before its own programs: a server with two adapters
ADAPTERS = """const plain = fetch; window.asked = []
    window.fetch = async (url, o) => {
        asked.push([String(url), o?.body ? JSON.parse(o.body).model : null])
        if (String(url).endsWith('completions')) return new Response(%s)
        if (String(url) !== 'v1/models') return plain(url, o)
        const {data: [base]} = await (await plain(url, o)).json()
        return Response.json({data: [base, {id: 'sql', parent: base.id}, {id: 'a poet of a very-long-name-indeed', parent: base.id}]})
    }""" % json.dumps(piece("Yes", "stop"))   # noqa: E501

def test_adapters(page):
    "They stand under their base, and are named by requests; all can read and use the menu, on a phone, too"
    assert not page("models").is_displayed() and page("model").text == "embedded"   # one model: no menu
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=ADAPTERS))
    page.size(360, 740, mobile=True)
    page.driver.get(page.url)
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    page.until(lambda: page("models").is_displayed() and page.met())
    [group] = page.all("#models optgroup")
    assert group.get_attribute("label") == "embedded and its adapters"
    assert menu(page) == (["embedded", "sql", "a poet of a very-long-name-indeed"], "embedded")
    assert not serious(page) and page.js("document.documentElement.scrollWidth") <= 360
    assert page("models").size["width"] > 100
    page("models").send_keys("a")
    page("text").send_keys("Hello", Keys.ENTER)
    page.until(lambda: page.last() == "Yes")
    asked = dict(page.js("asked"))
    assert asked["v1/chat/completions"] == "a poet of a very-long-name-indeed"
    info = "get_server_info?model=a%20poet%20of%20a%20very-long-name-indeed"
    page.until(lambda: info in dict(page.js("asked")))
    page.quiet()

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
    "Two that can be talked with, of which the second is the default, and one that makes embeddings"
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(embedded_path(), folder/"embed")
    (folder/"embed"/"modules.json").write_text("[]")
    path = folder/"models.json"
    models = {"another": "embedded", "embed": str(folder/"embed"), "chat": "embedded"}
    path.write_text(json.dumps(dict(models=models, default="chat")))
    return str(path)

def menu(page):
    "What the menu offers, and what is chosen"
    return [o.text.strip() for o in page.all("#models option")], page("models").get_attribute("value")

def test_a_table_of_models(browser, table, monkeypatch):
    """It offers those that talk, begins with the default, says what is loaded, says it while one waits, too;
    the choice stays, and what the page knows is of the model that is chosen"""
    monkeypatch.setattr("minisgl_lit.server.model_switch._TELL", .05)   # a load may take less than a second
    with serve(**ENGINE, models=table) as server:
        page = Page(browser, server.url, ready=lambda page: page.met() and page("brief").text != "connecting")
        assert menu(page) == (["another (not loaded)", "chat (not loaded)"], "chat")
        assert page("brief").text == "not loaded" and not page("model").is_displayed()
        assert page.all("#settings #thinking")   # its template was read, though it is not loaded
        page.keep(now="document.querySelector('.running .now')?.textContent ?? ''")
        page.ask("What is a page?")
        page.answered()
        assert any("model 'chat' is loading" in o["now"] for o in page.js("kept"))
        assert page.all(".bill")[0].text.replace("\u00a0", " ").startswith("chat · ")
        page.until(lambda: page("running").text != "–" and "idle" in page("brief").text)
        assert menu(page)[0] == ["another (not loaded)", "chat"]
        page.type(Keys.ALT, "m")   # keys alone
        page.type("a")
        page.until(lambda: page("brief").text == "not loaded" and page("running").text == "–")
        page.open()
        assert menu(page) == (["another (not loaded)", "chat"], "another")
        page.press("Details")
        page.press("Show the prompt and what came from the cache")
        page.until(lambda: page.all(".prompt-text"))   # of the model that has answered: the other stays away
        assert "What is a page?" in page.all(".prompt-text")[0].text
        assert menu(page)[0][0] == "another (not loaded)"
        page.type(Keys.ALT, "m")
        page.type("c")
        page.until(lambda: "idle" in page("brief").text)
        httpx.post(server.url + "/models/unload", json=dict(model="chat")).raise_for_status()
        page.until(lambda: page("brief").text == "not loaded")
        assert menu(page) == (["another (not loaded)", "chat (not loaded)"], "chat")
        page.quiet()

# in the page before its own programs: a server with two adapters, and a model that cannot be loaded
ADAPTERS = """const plain = fetch; window.asked = []
    const sentence = "model 'broken' could not be loaded: it has no weights"
    const broken = `: model 'broken' is loading\\n\\ndata: ${JSON.stringify({error: {message: sentence}})}\\n\\n`
    window.fetch = async (url, o) => {
        const {model} = o?.body ? JSON.parse(o.body) : {}
        asked.push([String(url), model])
        if (String(url).endsWith('completions')) return new Response(model === 'broken' ? broken : %s)
        if (String(url) !== 'v1/models') return plain(url, o)
        const {data: [base]} = await (await plain(url, o)).json()
        return Response.json({data: [base, {id: 'sql', parent: base.id}, {id: 'a poet of a very-long-name-indeed', parent: base.id},
            {id: 'broken', status: {value: 'unloaded', error: 'it has no weights'}}]})
    }""" % json.dumps(piece("Yes", "stop"))   # noqa: E501

def test_adapters(page):
    """They stand under their base, and are named by requests; a load that fails is a sentence, and the
    conversation goes on with another model; all can read and use the menu, on a phone, too"""
    assert not page("models").is_displayed() and page("model").text == "embedded"   # one model: no menu
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=ADAPTERS))
    page.size(360, 740, mobile=True)
    page.driver.get(page.url)
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    page.until(lambda: page("models").is_displayed() and page.met())
    [group] = page.all("#models optgroup")
    assert group.get_attribute("label") == "embedded and its adapters"
    names = ["embedded", "sql", "a poet of a very-long-name-indeed"]
    assert menu(page) == ([*names, "broken (failed)"], "embedded")
    assert not serious(page) and page.js("document.documentElement.scrollWidth") <= 360
    assert page("models").size["width"] > 100
    page("models").send_keys("a")
    page("text").send_keys("Hello", Keys.ENTER)
    page.until(lambda: page.last() == "Yes")
    page("models").send_keys("b")
    page("text").send_keys("And now?", Keys.ENTER)
    page.until(lambda: page("trouble").text == "model 'broken' could not be loaded: it has no weights")
    assert page("text").get_attribute("value") == "And now?" and len(page.all(".turn")) == 2
    page("models").send_keys("s")
    page("text").send_keys(Keys.ENTER)
    page.until(lambda: len(page.all(".turn")) == 4 and page.last() == "Yes")
    said = [model for url, model in page.js("asked") if url.endswith("completions")]
    assert said == [names[2], "broken", "sql"]
    page.until(lambda: "idle" in page("brief").text)
    about = {url.partition("?model=")[2] for url, _ in page.js("asked") if url.startswith("get_server_info")}
    assert about == {"embedded"}   # questions are about a model, which adapters share
    page.quiet("tokenizer_info", "api/show")

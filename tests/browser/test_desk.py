"Settings, keys, panels and suggestions; and the page for screen readers, in all its states."
import json
from pathlib import Path

import pytest
from selenium.webdriver import Keys
from test_answers import MARKDOWN
from test_browser import piece

AXE = Path(__file__).parent/"vendor"/"axe.js"
GLOSSARY = Path(__file__).parents[2]/"minisgl_lit/formats/embedded_data/text/glossary.json"

def test_settings_are_sent_kept_and_named(page):
    """All that was filled in arrives at the server, in its own kinds; after a reload it is there; presets
    bring it back"""
    page("tab-settings").click()
    given = dict(temperature=("0.5", .5), top_k=("7", 7), stop=("one\ntwo", ["one", "two"]),
                 stop_token_ids=("3, 4", [3, 4]), ignore_eos=("no", False),
                 logit_bias=('{"5": -1}', {"5": -1}), seed=("9", 9), priority=("-1", -1),
                 extra_key=("mine", "mine"), regex=("[a-z ]+", "[a-z ]+"), max_tokens=("4", 4))
    for name, (text, _) in given.items(): page.fill(name, text)
    page.driver.execute_script("window.plain ??= fetch; window.bodies = []; window.fetch = (url, o) => { if "
                               "(o?.body) bodies.push(JSON.parse(o.body)); return plain(url, o) }")
    page("text").send_keys("Hello", Keys.ENTER)
    page.answered()
    body = page.js("bodies[0]")
    assert {k: body[k] for k in given} == {k: v for k, (_, v) in given.items()} and not page("trouble").text
    page.press("Save", "#settings")
    page.all("dialog input")[0].send_keys("my own")
    page.press("Save", "dialog")
    page.open()
    page("tab-settings").click()
    value = lambda name: page.all(f"#settings [name={name}]")[0].get_attribute("value")
    choose = lambda name: page.js("(o => { o.value = arguments[1]; o.dispatchEvent(new Event('change')) "
                                  "})(arguments[0])", page.all("#settings .presets select")[0], name)
    assert value("temperature") == "0.5"
    choose("exact")
    assert (value("temperature"), value("top_k")) == ("0", "")
    choose("my own")
    assert (value("temperature"), value("top_k")) == ("0.5", "7")
    page.quiet()

# in the page before its own programs: the server has more parameters, and the bodies that it is sent are
# noted
MORE_PARAMETERS = ("""window.bodies = []
    const plain = fetch, more = {no_repeat: 'No token comes twice', seed: 'known', n: 'no field'}
    window.fetch = async (url, o) => {
        if (String(url).endsWith('completions')) { bodies.push(JSON.parse(o.body)); return new Response(%s) }
        const response = await plain(url, o)
        return String(url).endsWith('get_model_info') ? new Response(JSON.stringify({...await response.json(), sampling_parameters: more})) : response
    }""")   # noqa: E501

@pytest.fixture
def page_of_another(page):
    "The page of a server that has parameters which the page does not know"
    source = MORE_PARAMETERS % json.dumps(piece("Yes", "stop"))
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=source))
    page.open()
    yield page
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

def test_a_parameter_that_the_page_does_not_know(page_of_another):
    """The server names it; it has a field with its help, and is sent as what stands there: a number, a text,
    a list"""
    page = page_of_another
    page.until(lambda: page.all("[name=no_repeat]"))
    page("tab-settings").click()
    page.fill("no_repeat", "[1, true]")
    assert page.all("[name=no_repeat]")[0].get_attribute("title") == "No token comes twice"
    assert [len(page.all(f"[name={o}]")) for o in ("seed", "n")] == [1, 0]
    page("text").send_keys("Hello", Keys.ENTER)
    page.until(lambda: page.last() == "Yes")
    assert page.js("bodies[0].no_repeat") == [1, True] and "seed" not in page.js("bodies[0]")
    page.quiet()

def test_an_answer_of_a_schema(page):
    page("tab-settings").click()
    page.fill("json_schema", "{oops")
    page("text").send_keys("Are pages locked?", Keys.ENTER)
    page.until(lambda: "json_schema must be JSON" in page("trouble").text)
    page.fill("json_schema", '{"enum": ["yes", "no"]}')
    page("text").send_keys(Keys.ENTER)
    page.answered()
    assert page.last().strip() in ('"yes"', '"no"')
    page.quiet()

def test_the_embedded_model_knows_what_is_suggested(page):
    "Each suggestion is answered right"
    by_name = {o["term"]: o for o in json.loads(GLOSSARY.read_text())}
    right = {"What is a radix cache?": by_name["radix cache"]["what"],
             "Count from 3 to 9": "3, 4, 5, 6, 7, 8, 9",
             "Explain continuous batching": "{what} {why}".format(**by_name["continuous batching"])}
    assert [o.text for o in page.all("#suggestions button")] == [*right]
    for i, (asked, said) in enumerate(right.items()):
        page.all("#suggestions button")[i].click()
        page.answered()
        assert page.last().strip() == said, asked
        page("reset").click()
    page.quiet()

def test_other_models_get_general_suggestions(page, browser):
    added = (browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument",
                                    dict(source="""const plain = fetch
        window.fetch = async (url, o) => String(url) === 'get_model_info' ? Response.json({served_model_name: 'other', model_path: '/models/other'}) : plain(url, o)""")))   # noqa: E501
    page.open()
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", dict(identifier=added["identifier"]))
    suggested = [o.text for o in page.all("#suggestions button")]
    assert len(suggested) == 3 and not any("cache" in o or "batch" in o for o in suggested)

def test_keys(page):
    page.type(Keys.ESCAPE)
    page("log").click()
    page.type("?")
    assert "Alt + N" in page.all("dialog")[0].text
    page.press("Close", "dialog")
    page.until(lambda: not page.all("dialog"))
    page("log").click()
    page.type("/")
    assert page.js("document.activeElement.id") == "text" and page("text").get_attribute("value") == ""
    page.type(Keys.ALT, "s")
    assert page("settings").is_displayed() and not page("live").is_displayed()
    page.type(Keys.ALT, "e")
    assert page("live").is_displayed()
    page.type(Keys.ARROW_RIGHT)
    assert page("settings").is_displayed()
    page.quiet()

def test_typing_is_never_lost(page):
    "Whatever was pressed last: what had the focus may be gone, and then the message has it"
    page.all("#suggestions button")[1].click()
    assert page.focus() == "text"
    page.answered()
    page.press("Again")
    assert page.focus() == "text"
    page.until(lambda: page.all(".assistant .turns"))
    page.answered()
    page.press("‹", ".assistant")
    assert page.focus() == "›"   # the other way: there is no branch before this one
    menu = page("menu").find_element("tag name", "summary")
    menu.click()
    page("log").click()   # beside it: it closes
    assert not page("rename").is_displayed()
    menu.click()
    page("rename").click()
    page.press("Rename", "dialog")
    page.until(lambda: page.focus() == "text")
    page.quiet()

def test_images_are_refused(page):
    "in a sentence, which is gone when one types on"
    (page.driver.execute_script(
        """const given = new DataTransfer(); given.items.add(new File(['x'], 'a.png', {type: 'image/png'}))
        document.getElementById('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: given, bubbles: true, cancelable: true}))"""))   # noqa: E501
    assert "reads text only" in page("trouble").text
    page.type("x")
    assert page("trouble").text == ""

def test_the_theme_can_be_chosen(page):
    ground = lambda: page.js("getComputedStyle(document.body).backgroundColor")
    light = ground()
    page("tab-settings").click()
    page.fill("theme", "dark")
    dark = ground()
    assert light != dark
    page.open()
    assert ground() == dark
    page.look(light=False)
    page("tab-settings").click()
    page.fill("theme", "light")
    assert ground() == light
    page.quiet()

def serious(page):
    "What axe finds that keeps people from reading or using the page"
    if not page.js("!!window.axe"): page.driver.execute_script(AXE.read_text())
    found = page.driver.execute_async_script("axe.run({resultTypes: ['violations']}).then(o => "
                                             "arguments[0](o.violations))")
    return [(o["id"], o["nodes"][0]["html"][:200], o["nodes"][0]["failureSummary"][:300])
            for o in found if o["impact"] in ("serious", "critical")]

@pytest.mark.parametrize("light", [True, False], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_screen_readers(page, width, light):
    page.look(light)
    page.size(width, 820, mobile=width < 500)
    page.open()
    assert not serious(page)
    page.told(piece(MARKDOWN, "stop"))
    page.until(lambda: page.all(".said math"))
    page.press("Details")
    assert not serious(page)
    for name in ("list", "look"):
        if page(name).get_attribute("aria-expanded") == "false": page(name).click()
        assert not serious(page)
    page("tab-settings").click()
    page.press("More", "#settings")
    assert not serious(page)
    # no field is out of sight
    assert page.js("document.getElementById('side').scrollWidth <= "
                   "document.getElementById('side').clientWidth")

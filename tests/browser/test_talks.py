"Conversations on the page: kept, found, named, exported and imported; edited, branched, continued, deleted."
import json

from desk import Page
from selenium.webdriver import Keys

def questions(page): return [o.text for o in page.all(".user .said")]
def names(page): return [o.text for o in page.all("#found button")]
def more(page, name):
    "Something that can be done with the conversation"
    page("menu").find_element("tag name", "summary").click()
    page(name).click()
def say_yes(page, name, text=None):
    "Answer the page's question"
    field = page.all("dialog input")
    if text is not None: field[0].send_keys(Keys.CONTROL, "a", Keys.NULL, text)
    page.press(name, "dialog")
    page.until(lambda: not page.all("dialog"))

def test_a_reload_loses_nothing(page):
    "neither what was said, nor an answer in the middle, nor what is half typed, in each conversation its own"
    page.ask("What is a page?")
    page.answered()
    first = page.last()
    page.type("and half a thou")
    page.open()
    assert (questions(page), page.last(), page("text").get_attribute("value")) == (["What is a page?"], first,
        "and half a thou")
    page("reset").click()
    assert page("text").get_attribute("value") == ""
    page.ask("Hello", tokens=1900)
    page.until(lambda: len(page.last()) > 40)
    seen = page.last()[:40]
    page.open()
    assert page.last().startswith(seen) and "broke off" in page.all(".bill")[0].text.replace("\u00a0", " ")
    page.press("What is a page?", "#found")
    assert page("text").get_attribute("value") == "and half a thou"
    page.quiet()

def test_found_named_deleted(page):
    for o in ("What is a page?", "What is a lock?"):
        page("reset").click()
        page.ask(o)
        page.answered()
    assert names(page) == ["What is a lock?", "What is a page?"]
    more(page, "rename")
    say_yes(page, "Rename", "About <b>locks</b>")
    assert names(page)[0] == page("name").text == "About <b>locks</b>"
    page.type(Keys.ALT, "k")
    page.type("slots PAGE")   # in an answer, in any order
    assert names(page) == ["What is a page?"]
    page.type(Keys.CONTROL, "a", Keys.NULL, "nowhere")
    assert names(page) == [] and "these words" in page("none").text
    page.type(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    more(page, "delete")
    say_yes(page, "Cancel")
    assert len(names(page)) == 2
    more(page, "delete")
    say_yes(page, "Delete")
    page.open()
    assert names(page) == ["What is a page?"] and not page.all(".turn")
    page.quiet()

def test_exported_and_imported(page, browser, server, downloads):
    "What comes back is what went out, in another browser, too; a file that is none is refused in a sentence"
    page.ask("Explain: pages & locks")
    page.answered()
    said, file = page.last().strip(), lambda end: downloads/f"explain-pages-locks.{end}"
    more(page, "export-markdown")
    more(page, "export-json")
    page.until(lambda: file("md").exists() and file("json").exists())
    assert (file("md").read_text() == "# Explain: pages & locks\n\n## Question\n\nExplain: pages & "
                                      f"locks\n\n## Answer\n\n{said}\n")
    [talk] = json.loads(file("json").read_text())
    assert [o["role"] for o in talk["messages"]] == ["user", "assistant"]
    other = Page(browser, server.url)
    assert names(other) == []
    other("file").send_keys(str(file("json")))
    other.until(lambda: names(other) == ["Explain: pages & locks"])
    assert other.last().strip() == said
    talk["messages"][1]["parent"] = "nobody"
    for text, sentence in (("[1", "no JSON"), ("[{}]", "no conversation"), (json.dumps([talk]), "not sound")):
        file("json").write_text(text)
        other("file").send_keys(str(file("json")))
        other.until(lambda: sentence in other("trouble").text)
    other.quiet()

def test_branches(page):
    """A question edited, an answer asked anew: both stay, and one goes from one to the other, after a reload,
    too"""
    page.ask("What is a page?")
    page.answered()
    page.ask("What is a lock?")
    page.answered(2)
    page.press("Edit", ".turn:first-child")
    assert page("text").get_attribute("value") == "What is a page?" and page("editing").is_displayed()
    page.open()   # half an edit is kept, too
    page("text").send_keys(Keys.CONTROL, "a", Keys.NULL, "What is a slot?", Keys.ENTER)
    page.answered()
    assert questions(page) == ["What is a slot?"] and page.all(".turns")[0].text == "‹2/2›"
    page.press("Again")
    page.until(lambda: page.all(".assistant .turns"))
    page.answered()
    assert page.all(".assistant .turns")[0].text == "‹2/2›"
    page.open()
    page.press("‹", ".user")
    assert questions(page) == ["What is a page?", "What is a lock?"]
    page("text").send_keys(Keys.ARROW_UP)   # the last question, in an empty field
    assert page("text").get_attribute("value") == "What is a lock?"
    page("cancel").click()
    assert page("text").get_attribute("value") == "" and not page("editing").is_displayed()
    page.quiet()

def test_a_cut_answer_goes_on(page, server):
    "From where it was, and what it then says is the whole"
    page.ask("What is a radix cache?")
    page.answered()
    whole = page.last().strip()
    page("reset").click()
    page("tab-settings").click()
    page.fill("max_tokens", "6")
    page("text").click()
    page.ask("What is a radix cache?")
    page.answered()
    part = page.last().strip()
    assert ("token limit" in page.all(".bill")[0].text.replace("\u00a0", " ") and whole.startswith(part)
            and whole != part)
    page.fill("max_tokens", "")
    page.press("Continue")
    page.until(lambda: page.last().strip() == whole)
    page.answered()
    assert "Continue" not in page.all(".assistant .acts")[0].text
    page.quiet()

def test_copied_and_deleted(page, browser):
    browser.execute_cdp_cmd("Browser.grantPermissions",
                            dict(permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]))
    page.told('data: {"choices": [{"delta": {"content": "**one**\\n```py\\nx = 1\\n```"}, "finish_reason": '
              '"stop"}]}\n\n')
    page.driver.execute_script("window.copied = []; navigator.clipboard.writeText = async o => { "
                               "copied.push(o) }")
    page.press("Copy", ".assistant .acts")
    page.press("Copy", ".code-head")
    page.until(lambda: page.js("copied.length") == 2)
    assert [o.strip() for o in page.js("copied")] == ["**one**\n```py\nx = 1\n```", "x = 1"]
    page.press("Delete", ".assistant")
    say_yes(page, "Delete")
    assert questions(page) == ["Hello"] and not page.all(".assistant")
    page.press("Delete", ".user")
    say_yes(page, "Delete")
    assert page("empty").is_displayed()
    page.quiet()

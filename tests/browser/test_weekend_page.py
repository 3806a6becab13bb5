"The page on the weekend's engine: it asks what the server has, and hides the rest."
from threading import Thread

import pytest

from desk import Page
from minisgl_lit.testing.weekend_table import QUESTION, folder
from minisgl_lit.weekend.server import make_server

@pytest.fixture(scope="module")
def weekend():
    server = make_server(folder)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()

def test_a_chat_with_the_readers_engine(browser, weekend):
    page = Page(browser, weekend, ready=lambda page: page.met() and page("model").text == "weekend")
    page.type(QUESTION)
    page("send").click()
    page.answered()
    assert "radix tree" in page.last() and "tokens" in page.all(".bill")[0].text
    shown = {o.text for o in page.all("button, summary") if o.is_displayed()}
    assert ({"Again", "Delete"} <= shown
            and not {"Details", "Tokens", "Continue", "Engine", "More"} & shown), shown
    if not page("settings").is_displayed(): page("look").click()
    assert page("settings").is_displayed() and not page("live").is_displayed()
    assert {o.get_attribute("name") for o in page.all("#settings .wishes input")} == {"temperature", "top_p",
        "max_tokens", "seed"}
    page.fill("max_tokens", "3")   # what is offered works
    page("text").click()
    page.type("What is a page?")
    page("send").click()
    page.answered(2)
    assert "3 tokens" in page.all(".bill")[1].text and "token limit" in page.all(".bill")[1].text
    page.quiet("get_server_info")   # that it is missing is asked once

"""A page of another site, open in a browser on this machine, has nothing done by a server that asks for no
key, and reads nothing."""
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx, pytest

from desk import Page

CALLS = {   # what such a page may try, without asking the browser's leave and with it
    "pause": "fetch(URL + '/pause_generation', {method: 'POST', mode: 'no-cors'})",
    "pause by JSON": "fetch(URL + '/pause_generation', {method: 'POST', headers: {'Content-Type': "
                     "'application/json'}, body: '{}'})",
    "profile": "fetch(URL + '/start_profile', {method: 'POST', mode: 'no-cors', body: '{}'})",
    "upload": "(() => { const f = new FormData(); f.append('purpose', 'batch'); f.append('file', new "
              "Blob(['{}']), 'a.jsonl'); return fetch(URL + '/v1/files', {method: 'POST', mode: 'no-cors', "
              "body: f}); })()",
    "ask as text": "fetch(URL + '/v1/completions', {method: 'POST', headers: {'Content-Type': 'text/plain'}, "
                   "body: '{\"prompt\": \"a\", \"max_tokens\": 1}'})",
    "beacon": "Promise.resolve(navigator.sendBeacon(URL + '/pause_generation', '{}'))",
    "form": "new Promise(done => { const frame = document.createElement('iframe'); frame.name = 'f'; "
            "frame.onload = () => done(frame); document.body.append(frame); "
            "const form = document.createElement('form'); form.method = 'post'; form.target = 'f'; "
            "form.action = URL + '/pause_generation'; document.body.append(form); form.submit(); })",
    "read": "fetch(URL + '/get_server_info').then(r => r.text())"}

@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    "A page of a site on another port"
    folder = tmp_path_factory.mktemp("site")
    (folder/"index.html").write_text("<!doctype html><title>elsewhere</title><body>A harmless page.")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}/"
        site.shutdown()

@pytest.mark.parametrize("name", CALLS)
def test_a_page_of_another_site_gets_nothing(browser, server, elsewhere, name):
    Page(browser, elsewhere, ready=lambda page: page.js("document.readyState") == "complete")
    script = (f"const URL = {server.url!r}, done = arguments[0]; ({CALLS[name]}).then(r => done(['went', "
              "typeof r === 'string' ? r : String(r.status)]), e => done(['failed', String(e)]))")
    went, what = browser.execute_async_script(script)
    # an opaque answer has no status, a frame of another site no text
    assert went == "failed" or what in ("0", "undefined"), what
    with httpx.Client(base_url=server.url) as web:
        answer = web.post("/generate", json=dict(text="The page", sampling_params=dict(max_tokens=2)),
                          timeout=20)
        files, profile = web.get("/v1/files"), web.post("/stop_profile")
    assert answer.status_code == 200 and answer.json()["text"] is not None, "it was paused"
    assert files.json()["data"] == []
    assert "no profile is being recorded" in profile.text

def test_the_page_of_the_server_itself_may(browser, server):
    page = Page(browser, server.url)
    status = page.driver.execute_async_script("const done = arguments[0]; fetch('/generate', {method: "
                                              "'POST', headers: {'Content-Type': 'application/json'}, "
                                              "body: JSON.stringify({text: 'a', sampling_params: "
                                              "{max_tokens: 1}})}).then(r => done(r.status))")
    assert status == 200

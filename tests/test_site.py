"The site's own check (`docs/check_links.py`): a sound page passes, and each kind of trouble is named."
import sys
import pytest
from nbrun import root

sys.path.insert(0, str(root/"docs"))
from check_links import trouble

GOOD = '<html lang="en"><head><title>One</title></head><body>%s</body></html>'

def said(folder, body, page=GOOD, css=""):
    "What is said about a site of two pages and a style sheet"
    (folder/"_static").mkdir()
    (folder/"_static/a.css").write_text(css)
    (folder/"two.html").write_text(GOOD % '<h1 id="here">Two</h1>')
    (folder/"one.html").write_text(page % body)
    n, bad, faults = trouble(folder.resolve())
    assert n == 2
    return bad + faults

def test_a_sound_page(tmp_path):
    "Links to pages and anchors, pictures with words, void tags, rows that end themselves, links out that load nothing, glyphs that drawings share"
    body = ('<p>a<br>b <a href="two.html#here">there</a> <a href="#x">here</a> <a href="https://example.org">out</a></p><table><tr><td>1<td>2<tr><td>3</table><i id="x"></i>'
            '<img src="data:image/png;base64,AA" alt="dots"><svg><path id="g"/></svg><svg><path id="g"></path></svg>')
    assert said(tmp_path, body, css='a { src: url("a.css#x"); b: url(data:x) }') == []

@pytest.mark.parametrize("body, what", [
    ('<div><b>bold</div></b>', "</div> in line 1 closes nothing, or too early"),
    ('<p id="x"></p><p id="x"></p>', "id 'x' stands 2 times"),
    ('<img src="data:,">', "the picture in line 1 has no alt"),
    ('<a href="three.html">x</a>', "no three.html"),
    ('<a href="two.html#nowhere">x</a>', "no two.html#nowhere"),
    ('<a href="#nowhere">x</a>', "no #nowhere"),
    ('<script src="https://cdn.example.org/a.js"></script>', "loads https://cdn.example.org/a.js"),
    ('<link rel="stylesheet" href="//cdn.example.org/a.css">', "loads //cdn.example.org/a.css"),
    ('<img alt="" src="http://example.org/a.png">', "loads http://example.org/a.png")])
def test_trouble_is_named(tmp_path, body, what):
    assert f"one.html: {what}" in said(tmp_path, body)

@pytest.mark.parametrize("page, what", [
    ('<html><head><title>One</title></head><body>%s</body></html>', "there is no lang"),
    ('<html lang="en"><head></head><body>%s</body></html>', "there is no title"),
    ('<html lang="en"><head><title>One</title></head><body><div>%s</body></html>', "</body> in line 1 closes nothing, or too early")])
def test_a_page_needs(tmp_path, page, what):
    assert f"one.html: {what}" in said(tmp_path, "", page)

@pytest.mark.parametrize("css, what", [
    ("@import 'https://fonts.example.org/x';", "a.css: loads https://fonts.example.org/x"),
    ("a { src: url(//fonts.example.org/x.woff2) }", "a.css: loads //fonts.example.org/x.woff2"),
    ("a { src: url(x.woff2) }", "a.css: no x.woff2")])
def test_style_sheets(tmp_path, css, what):
    assert said(tmp_path, "", css=css) == [what]

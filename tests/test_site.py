"The makers of the site (`docs/`): links to definitions and to the glossary; and its check: a sound page passes, and each kind of trouble is named."
import ast, sys
import pytest
from nbrun import root

sys.path.insert(0, str(root/"docs"))
from chapters import Book
from check_links import trouble
from names import Names, Terms

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

CELLS = {"low": [("a1", "@dataclass\nclass Req:\n    table_idx: int\n    def run(self): self.done = 1"), ("a2", "row_c = r'''\nenum { WIDE = 4 };\nvoid turn(int ahead) {\n}\n'''"), ("a3", "def wait_for(n_steps): pass")],
         "high": [("b1", "def wait(limit):\n    here = limit\n"), ("b2", "from low import Req, row_c\nseen = 1\n"), ("b3", "@patch\ndef free(self: Req): pass")]}

def named(name, chapter="high", imported=()):
    names = Names("m.low.Settings")
    for k, cells in {**CELLS, "zero": [("z1", "class Settings:\n    page: int = 1")]}.items():
        for cell, src in cells: names.add(k, cell, ast.parse(src), f"m.{'low' if k == 'zero' else k}" if cell != "b1" else "")
    return names.find(chapter, name, {o: f"m.low.{o}" for o in imported})

@pytest.mark.parametrize("name, imported, cell", [
    ("wait", (), "b1"), ("seen", (), "b2"), ("limit", (), ""), ("here", (), ""),         # this chapter's own, but not what is inside of its tests
    ("table_idx", ("Req",), "a1"), ("done", ("Req",), "a1"), ("Req.run", ("Req",), "a1"), # members of what it imports
    ("ahead", ("row_c",), "a2"), ("WIDE", ("row_c",), "a2"), ("turn", ("row_c",), "a2"),  # and names of its C
    ("page", (), "z1"),                                                                   # what users set
    ("row_c", ("row_c",), "a2"), ("wait_for", (), "a3"), ("Req", (), "a1"),                                            # a compound name may come from anywhere
    ("run", (), ""), ("turn", (), ""), ("n_steps", (), ""), ("len", (), ""), ("x", (), ""), ("free.x", (), "")])
def test_where_a_name_is_defined(name, imported, cell): assert named(name, imported=imported) == cell

def test_parameters_of_the_package_are_defined_where_they_stand(): assert named("n_steps", chapter="low") == "a3"

def test_the_first_use_of_a_term_is_a_link():
    terms, seen = Terms("```{glossary}\nKV cache\n    A.\n\nrow\n    B.\n\ntoken\n    C.\n```"), set()
    assert terms.link("Tokens and a token; the KV cache, a row, a *row*, row-wise.", seen) == (
        "{term}`Tokens <token>` and a token; the {term}`KV cache <KV cache>`, a row, a *{term}`row <row>`*, row-wise.")
    assert seen == {"token", "KV cache", "row"} and terms.link("A token.", seen) == "A token."

def test_only_plain_text_is_linked(tmp_path):
    "Not in code, links, formulas, headings, and blocks of code"
    book = Book(tmp_path, "m", "```{glossary}\ntoken\n    A.\n```")
    plain = "`a token b` [a token](x.md) $token$ <b token>\n# token\n```\ntoken\n```"
    assert book.other(plain) == plain and "{term}" in book.other(plain + "\ntoken")

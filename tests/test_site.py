"""The makers of the site (`docs/`): links to definitions and to the glossary; and its check: a sound page
passes, and each kind of trouble is named."""
import argparse, ast, json, re, sys
import pytest
from hypothesis import given
from hypothesis import strategies as st
import gpu_check
from nbrun import notebooks, root
from searched import QUERIES

sys.path.insert(0, str(root/"docs"))
import contents, measured, redirects, search
from chapters import Book
from check_links import trouble
from furo.navigation import get_navigation_tree
from menu import Menu
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
    """Links to pages and anchors, pictures with words, void tags, rows that end themselves, links out that
    load nothing, glyphs that drawings share"""
    body = ('<p>a<br>b <a href="two.html#here">there</a> <a href="#x">here</a> <a '
            'href="https://example.org">out</a></p><table><tr><td>1<td>2<tr><td>3</table><i id="x"></i>'
            '<img src="data:image/png;base64,AA" alt="dots"><svg><path id="g"/></svg><svg><path '
            'id="g"></path></svg>')
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
    ('<html lang="en"><head><title>One</title></head><body><div>%s</body></html>',
     "</body> in line 1 closes nothing, or too early")])
def test_a_page_needs(tmp_path, page, what):
    assert f"one.html: {what}" in said(tmp_path, "", page)

@pytest.mark.parametrize("css, what", [
    ("@import 'https://fonts.example.org/x';", "a.css: loads https://fonts.example.org/x"),
    ("a { src: url(//fonts.example.org/x.woff2) }", "a.css: loads //fonts.example.org/x.woff2"),
    ("a { src: url(x.woff2) }", "a.css: no x.woff2")])
def test_style_sheets(tmp_path, css, what):
    assert said(tmp_path, "", css=css) == [what]

CELLS = {"low": [("a1", "@dataclass\nclass Req:\n    table_idx: int\n    def run(self): self.done = 1"),
                 ("a2", "row_c = r'''\nenum { WIDE = 4 };\nvoid turn(int ahead) {\n}\n'''"),
                 ("a3", "def wait_for(n_steps): pass")],
         "high": [("b1", "def wait(limit):\n    here = limit\n"),
             ("b2", "from low import Req, row_c\nseen = 1\n"), ("b3", "@patch\ndef free(self: Req): pass")]}

def named(name, chapter="high", imported=()):
    names = Names("m.low.Settings")
    for k, cells in {**CELLS, "zero": [("z1", "class Settings:\n    page: int = 1")]}.items():
        for cell, src in cells:
            names.add(k, cell, ast.parse(src), f"m.{'low' if k == 'zero' else k}" if cell != "b1" else "")
    return names.find(chapter, name, {o: f"m.low.{o}" for o in imported})

@pytest.mark.parametrize("name, imported, cell", [
    # this chapter's own, but not what is inside of its tests
    ("wait", (), "b1"), ("seen", (), "b2"), ("limit", (), ""), ("here", (), ""),
    # members of what it imports
    ("table_idx", ("Req",), "a1"), ("done", ("Req",), "a1"), ("Req.run", ("Req",), "a1"),
    ("ahead", ("row_c",), "a2"), ("WIDE", ("row_c",), "a2"), ("turn", ("row_c",), "a2"),  # and names of its C
    ("page", (), "z1"),                                                                   # what users set
    # a compound name may come from anywhere
    ("row_c", ("row_c",), "a2"), ("wait_for", (), "a3"), ("Req", (), "a1"),
    ("run", (), ""), ("turn", (), ""), ("n_steps", (), ""), ("len", (), ""), ("x", (), ""),
    ("free.x", (), "")])
def test_where_a_name_is_defined(name, imported, cell): assert named(name, imported=imported) == cell

def test_parameters_of_the_package_are_defined_where_they_stand():
    assert named("n_steps", chapter="low") == "a3"

def test_the_first_use_of_a_term_is_a_link():
    terms, seen = Terms("```{glossary}\nKV cache\n    A.\n\nrow\n    B.\n\ntoken\n    C.\n```"), set()
    assert terms.link("Tokens and a token; the KV cache, a row, a *row*, row-wise.", seen) == (
        "{term}`Tokens <token>` and a token; the {term}`KV cache <KV cache>`, a row, a *{term}`row <row>`*, "
        "row-wise.")
    assert seen == {"token", "KV cache", "row"} and terms.link("A token.", seen) == "A token."

def test_only_plain_text_is_linked(tmp_path):
    "Not in code, links, formulas, headings, and blocks of code"
    book = Book(tmp_path, "m", "```{glossary}\ntoken\n    A.\n```")
    plain = "`a token b` [a token](x.md) $token$ <b token>\n# token\n```\ntoken\n```"
    assert book.other(plain) == plain and "{term}" in book.other(plain + "\ntoken")

def test_names_of_other_programs_are_not_ours(tmp_path):
    "In a table of what is what, terms are linked in our columns; a term that the text links, nowhere"
    book = Book(tmp_path, "m", "```{glossary}\ntoken\n    A.\n```")
    table = "| what | here | vLLM |\n|---|---|---|\n| a | b | a token |"
    assert book.other(table) == table
    assert book.other(table.replace("b", "a token")).endswith("| a | a {term}`token <token>` | a token |")
    own = "One [token](x.md)\n\na token"
    assert book.other(own) == own

FIGURES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-9, 10**6), st.floats(0, 1e6),
                                 st.text("ab|`<*_ \n", max_size=9), st.lists(st.floats(0, 9), max_size=3)),
                       lambda of: st.dictionaries(st.text("ab_<|", min_size=1, max_size=9), of, max_size=4),
                       max_leaves=12)
REPORTS = st.dictionaries(st.sampled_from(["machine", "bench256", "kernels", "gone"]),
                          st.tuples(st.booleans(),
                                    st.dictionaries(st.sampled_from(["us", "share", "a_ms", "a_error",
                                        "note"]), FIGURES, max_size=4)))

def as_report(steps):
    return dict(ok=True, steps={k: dict(ok=ok, seconds=1., error=None if ok else "x | <y>", figures=figures)
                                for k, (ok, figures) in steps.items()})

def rows_of(text):
    "The tables of a page, each a list of rows, each the number of its cells"
    found = [[len(re.split(r"(?<!\\)\|", o)) for o in part.split("\n") if o.startswith("|")]
             for part in text.split("\n\n")]
    return [o for o in found if o]

@given(st.dictionaries(st.sampled_from(["2026-01-01", "2026-01-02", "2026-02-01"]), REPORTS, min_size=1))
def test_any_report_of_a_gpu_becomes_a_page(runs):
    "Each step has a section, of the newest run in which it did not fail, and no figure breaks a table"
    reports = {date: as_report(o) for date, o in runs.items()}
    for o in reports.values():    # what the first table reads must be as `gpu_check` writes it
        if "kernels" in o["steps"]: o["steps"]["kernels"]["figures"] = dict(a_error=.25, b_error='refused')
    text = measured.page(reports, {}, [], dict(machine="What there is", late="Last"))
    assert all(len(set(o)) == 1 and len(o) >= 2 for o in rows_of(text)), text
    assert (set(re.findall(r"(?m)^## (\w+)$", text)) == {k for o in runs.values() for k in o}
            and "* `late`: Last" in text)
    for name, (date, step) in measured.newest(reports).items():
        better = [d for d, o in runs.items() if name in o and (o[name][0], d) > (step["ok"], date)]
        assert not better and f"## {name}\n" in text

def test_the_page_of_a_gpu_says_what_its_json_says():
    """What people ask first, with the other engine beside it; what failed, with its note; and what has not
    run, by the names of the check"""
    text = measured.read(root/"docs")
    newest = json.loads(max((root/"docs/gpu/runs").glob("*.json")).read_text())["steps"]
    run, told = newest["bench256"]["figures"], json.loads((root/"docs/gpu/beside.json").read_text())
    assert (f"{run['overlap_greedy']['tokens_per_s']:,.0f} output tokens a second, "
            f"{100*run['share_of_limit']:.0f} % of the {run['limit_tokens_per_s']:,.0f}" in text)
    for o in told: assert " and ".join(f"{x:,}" for x in o["tokens_per_s"]) in text
    assert (f"{newest['parity']['figures']['float32_tokens']} tokens, all equal" in text
            and newest["tests"]["figures"]["pytest"] in text)
    for name in gpu_check.LIMITS: assert f"## {name}\n" in text or f"* `{name}`: " in text, name
    for path in (root/"docs/gpu").rglob("*.json"):
        assert not re.search(r"(?<![\w.])/(?:opt|usr|home|root|work)/|Linux-\d",
                             path.read_text()), f"{path.name} names a machine"

@pytest.mark.parametrize("name, x, words, value", [
    ("plan_us", 478.6, "plan [µs]", "478.6"), ("tokens_per_s", 22830.7, "tokens per second", "22,831"),
    ("share_of_limit", .638, "share of limit", "63.8 %"), ("attend_share", 1 / 3, "attend share", "33.3 %"),
    ("memory_read_gb_s", 4201.8, "memory read [GB/s]", "4,202"), ("us", .5, "[µs]", "0.5"),
    ("same", True, "same", "yes"), ("pairs", [[0, .5], [1, 2]], "pairs", "0 and 0.5, 1 and 2"),
    ("how", "a|b", "how", "a\\|b")])
def test_a_figure_is_read_with_its_unit(name, x, words, value):
    assert measured.words(name) == words and measured.value(name, x) == value

def test_figures_in_prose_are_those_that_were_measured():
    """README, guide and notes repeat a few; a newer JSON changes them, or this fails. And none says of what
    has run that it has not."""
    newest = json.loads(max((root/"docs/gpu/runs").glob("*.json")).read_text())["steps"]
    run = newest["bench256"]["figures"]
    rates = (f"{round(run['overlap_greedy']['tokens_per_s'], -1):,.0f}",
             f"{round(run['limit_tokens_per_s'], -2):,.0f}")
    for name in ("README.md", "docs/guides/gpu.md", "docs/design.md"):
        text = (root/name).read_text()
        for rate in rates: assert rate in text, f"{name} does not say {rate}"
    guide = (root/"docs/guides/gpu.md").read_text()
    for o in json.loads((root/"docs/gpu/beside.json").read_text()):
        assert all(f"{x:,}" in guide for x in o["tokens_per_s"])
    assert (f"{newest['parity']['figures']['float32_tokens']} greedy" in guide.replace("384 of ", "")
            and guide.index("gpu-measured.md") < guide.index("##"))
    for path in [root/"README.md", root/"CHANGELOG.md", *(root/"docs").glob("*.md"),
                 *(root/"docs/guides").glob("*.md"), *(root/"nbs").glob("*.ipynb")]:
        said = (re.search(
            r"(?i)(?:not|never)\s+(?:yet\s+)?(?:been\s+)?run\s+on\s+(?:an?|one)\s*(?:real\s+)?(?:GPU|one|yet)"
            r"|no\s+GPU\s+has\s+run", path.read_text(encoding="utf-8")))
        assert not said, f"{path.name}: {said[0]!r}"

def test_numbers_of_chapters_are_those_of_the_menu():
    "A link of a guide whose words are a number leads to the chapter of that number"
    links = [(path.name, *o) for path in (root/"docs").glob("**/*.md")
             for o in re.findall(r"\[(\d+)\]\(([^)\s]*?(\d+)_[^)\s]*)\)", path.read_text(encoding="utf-8"))]
    assert len(links) > 20 and not [o for o in links if int(o[1]) != int(o[3])]

def counterparts():
    "(the cells of a row that say theirs, the cell that says ours) in the tables of settings of the guide"
    settings = (root/"docs/guides/coming-from.md").read_text(encoding="utf-8").partition("## Settings")[
        2].partition("## What is different")[0]
    heads = []
    for line in settings.split("\n"):
        if not line.startswith("|"): heads = []
        elif line.startswith("|--"): continue
        elif not heads: heads = line.strip("| ").split(" | ")
        else:
            cells = line.strip("| ").split(" | ")
            assert len(cells) == len(heads), line
            yield [o for head, o in zip(heads, cells)
                   if head not in ("what", "here")], cells[heads.index("here")]

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

def test_flags_of_the_guide_exist():
    "Each that it calls ours is one of `serve`; those of other engines have ours beside them, or a reason"
    from minisgl_lit.cli import make_parser
    [commands] = [o for o in make_parser()._actions if isinstance(o, argparse._SubParsersAction)]
    parser = commands.choices["serve"]
    if fill := getattr(parser, "fill", None): fill(parser)
    known, rows = {*parser._option_string_actions}, [*counterparts()]
    named = {o for _, ours in rows for o in FLAG.findall(ours)}
    assert len(named) >= 40 and not named - known, named - known
    assert not [ours for _, ours in rows if not (FLAG.search(ours)
        or ours.startswith(("none, because ", "none, by decision")) or re.match(r"always|`HF_HOME`", ours))]
    theirs = {o for cells, _ in rows for cell in cells
              for o in re.findall(r"(?<![\w-])--?[a-z][\w-]*|OLLAMA_\w+", cell)}
    asked = (
        (
            (
                (
                    (
                        (
                            (
                                (
                                    (
                                        (
                                            (
                                                (
                                                    (
                                                        (
                                                            (
                                                                (
                                                                    (
                                                                        (
                                                                            (
                                                                                (
                                                                                    (
                                                                                        (
                                                                                            (
                                                                                                (
                                                                                                    (
                                                                                                        (
                                                                                                            (
                                                                                                                ("""--mem-fraction-static --gpu-memory-utilization --max-num-batched-tokens --max-num-seqs --enable-prefix-caching --chunked-prefill-size --tp --tensor-parallel-size --max-model-len
        --context-length --kv-cache-dtype --quantization --served-model-name --api-key -c -np -ngl -t -b -ub --enable-metrics --schedule-policy --disable-overlap-schedule --cuda-graph-bs
        OLLAMA_KEEP_ALIVE OLLAMA_NUM_PARALLEL OLLAMA_HOST"""))))))))))))))))))))))))))))   # noqa: E501
    assert not {*asked.split()} - theirs, {*asked.split()} - theirs

def test_the_search_counts_words(tmp_path):
    "Stems, also of the parts of a name; not addresses of links, nor imports, outputs, listings of modules"
    (tmp_path/"docs/src").mkdir(parents=True)
    (tmp_path/"docs/a.md").write_text("# Pages\nA [page](nowhere.md) has `page_size` slots, by "
                                      "`--page-size`; {term}`x <hidden>`.")
    (tmp_path/"docs/src/b.md").write_text("# b")
    source = ["from hidden import (\n", "    nowhere)\n", "import hidden\n", "paging = 1"]
    cell = dict(cell_type="code", source=source, outputs=[dict(text="spoken")], metadata={},
                execution_count=None)
    (tmp_path/"docs/c.ipynb").write_text(json.dumps(dict(cells=[cell])))
    found = search.index(tmp_path/"docs")
    assert (found["pages"] == ["a", "c"] and found["words"]["page"] == [0, 4, 1, 1]
            and found["words"]["page_size"] == [0, 2])
    assert (not {"nowher", "md", "hidden", "term", "spoken", "output", "b"} & {*found["words"]}
            and found["lengths"] == [13, 2])

def test_the_search_table_names_pages_that_exist():
    "Each phrase is given once to a page, and each page is there"
    pages = [*(f"nbs/{o.relative_to(root/'nbs').with_suffix('')}" for o in notebooks()),
             *(str(o.relative_to(root/"docs").with_suffix("")) for o in (root/"docs").glob("**/*.md"))]
    there = {search.unnumbered(o) for o in pages} | {"made/benchmarks"}
    assert not {*search.SAID} - there, {*search.SAID} - there
    assert not {o for places in QUERIES.values() for o in places.split()} - there and len(QUERIES) >= 35
    for place, phrases in search.SAID.items():
        assert len({*phrases.lower().split(", ")}) == len(phrases.split(", ")), place

def test_old_pages_of_the_map_lead_to_rings():
    "Those of its rows that were parts; and a page that is there keeps its address"
    known = {o.place for o in contents.rings(contents.parts(root/"nbs/index.ipynb"))}
    assert {f"made/ring-{o}" for o in redirects.rows.values()} <= known
    moved = dict(redirects.pages())
    assert (moved["made/part-8"] == "made/ring-server" and moved["made/part-10"] == "made/ring-experiments"
            and 'url=ring-server.html"' in redirects.page("made/part-8", "made/ring-server"))


def tree(inside: dict, page: str, level: int = 1) -> str:
    "A menu as Sphinx writes it on a page"
    def holds(o: dict) -> bool: return page in o or any(map(holds, o.values()))
    found = '<ul class="current">\n' if holds(inside) else "<ul>\n"
    for o, below in inside.items():
        on_the_way = " current" if o == page or holds(below) else ""
        link = (f'<a class="current reference internal" href="#">{o}</a>' if o == page
                else f'<a class="reference internal" href="{o}">{o}</a>')
        more = tree(below, page, level + 1) if below else ""
        found += f'<li class="toctree-l{level}{on_the_way}">{link}{more}</li>\n'
    return found + "</ul>\n"


@pytest.mark.parametrize("page", ["none", "a", "b", "c", "d", "e", "f"])
def test_the_menu_is_the_themes(page):
    "Made once for all pages, and marked"
    pages = [{"a": {}, "b": {"c": {}, "d": {"e": {}}}}, {"f": {}}]
    theirs, ours = ("".join(tree(o, p) for o in pages) for p in (page, "none"))
    assert Menu(get_navigation_tree(ours)).open_at(page) == get_navigation_tree(theirs)

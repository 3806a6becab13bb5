"""How a chapter reads: one sitting, results rather than assertions, predictions that are answered, pictures,
exercises that run; and the menu is the map.

What a new chapter must be like stands in CONTRIBUTING.md; these tests hold it.
"""
import json, os, re, sys
from functools import cache
import nbformat, pytest
from exercises import exercises, place, verdict
from nbrun import chapter, notebooks, root

sys.path.insert(0, str(root/"docs"))
import contents

nbs = root/"nbs"
book = contents.parts(nbs/"index.ipynb")
chapters = {c.stem: c for part in book for c in part.chapters}
weekend = [c.stem for c in chapters.values() if c.kind == "weekend"]
# `make done` asks of one
looked_at = [nb for nb in notebooks() if nb.stem != "index"
             and os.environ.get("TST_CHAPTER") in (None, chapter(nb))]
every = pytest.mark.parametrize("stem", [*map(chapter, looked_at)])

@cache
def prose_and_code(stem):
    "(type, source, outputs) of each cell"
    return [(c["cell_type"], "".join(c["source"]), c.get("outputs", []))
            for c in json.loads((nbs/f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]]

def prose(stem): return "\n\n".join(s for kind, s, _ in prose_and_code(stem) if kind == "markdown")

def test_the_map_has_every_chapter_in_its_order():
    def in_order(stems):
        return sorted(stems, key=lambda stem: re.search(r"(\d+)([a-z]?)_[^/]*$", stem).groups())
    assert (len(chapters) == sum(len(part.chapters) for part in book)
            and {*chapters} == {chapter(nb) for nb in notebooks() if nb.stem != "index"})
    evening, *rest = chapters
    assert (evening == "00_one_evening" and rest[:len(weekend)] == weekend == in_order(weekend)
            and len(weekend) == 10)
    command, *rest = rest[len(weekend):]
    assert command == "weekend/10a_main" and all(o.startswith("weekend/") for o in weekend)
    core = [o for o in rest if o.startswith("core/")]
    assert core == in_order(core) == [o for i, o in enumerate(core, 1)
        if o.startswith(f"core/{i:02}_")], "the core is numbered from 01 on, without letters"
    assert not [o for o in rest if o not in core
                and re.match(r"\d", o.rpartition("/")[2])], "only the core has numbers"

def listed(page): return re.findall(r"(?m)^(\S.*?) <(\S+)>$", page)

def test_the_menu_is_the_map():
    """docs/index.md includes the menu: the evening, the weekend, the core by its parts, the experiments, then
    the rings by folder; each chapter once"""
    menu = contents.menu(book)
    assert "made/menu.md" in (root/"docs/index.md").read_text(encoding="utf-8")
    around, parts = contents.rings(book), contents.core(book)
    assert [place for _, place in listed(menu)] == ["/nbs/00_one_evening", "/made/path", "/made/core",
        "/made/ring-experiments", "/server-path", *(f"/{r.place}" for r in around[1:]), "/made/c-sources"]
    assert [r.name for r in around] == ["Experiments", "Kernels", "Families", "Formats", "Distributed",
                                        "Text", "Runtime and Python API", "Server", "Tools and testing"]
    assert listed(contents.core_page(book, nbs)) == [(p.title, p.place.removeprefix("made/")) for p in parts]
    small = book[1].chapters
    assert ([c.stem for c in small] == [*weekend, "weekend/10a_main"]
            and listed(contents.path_page(book, nbs))
            == [(f"{c.number} {c.words}", f"../nbs/{c.stem}") for c in small])
    for part in [*parts, *around]:
        page = contents.part_page(part, nbs)
        assert page.startswith(f"# {part.title}\n")
        assert ({re.sub(" [ᶜᵐ]$", "", words) + place for words, place in listed(page)}
                == {f"{c.number} {c.words}".strip() + f"../nbs/{c.stem}" for c in part.chapters})
    assert sorted(c.stem for part in [*book[:2], *parts, *around] for c in part.chapters) == sorted(chapters)

def test_a_ring_is_a_folder():
    for ring in contents.rings(book):
        rooms = {c.stem.partition("/")[0] if "/" in c.stem else "" for c in ring.chapters}
        assert rooms <= {"Runtime and Python API": {"", "rules", "speculation", "adapters", "loop"},
            "Tools and testing": {"", "tools", "testing"}}.get(ring.name, {ring.name.lower()}), ring.name

def test_labels_say_their_topic():
    "None stands twice in a group of the menu, and none is a word that any chapter might have"
    empty = {"names", "answers", "fields", "blocks", "link", "driver", "others", "settings", "packed", "exp",
             "travel", "tasks", "updates", "library", "grouped", "arguments", "link", "vectors", "load"}
    for part in [*contents.core(book), *contents.rings(book)]:
        words = [c.words for c in part.chapters]
        assert len({*words}) == len(words), part.name
        if not part.number:
            assert not [o for o in words if o in empty
                        or o.startswith(("its ", "their ", "all of "))], part.name

ONWARD = contents.onward(book, contents.server_path(root/"docs"))

def way(start, n):
    "The n pages that follow one, first links first"
    pages = [start]
    while len(pages) <= n and pages[-1] in ONWARD: pages.append(ONWARD[pages[-1]][0][1])
    return pages[1:]

def test_next_follows_the_path():
    """From the evening through the weekend and the core to the experiments; on the server path; in each ring,
    to the ring behind it"""
    stems = lambda chapters: [f"nbs/{c.stem}" for c in chapters if c.kind != "module"]
    core = [o for part in contents.core(book) for o in stems(part.chapters)]
    first, *others = contents.rings(book)
    server = [f"nbs/{o}" for o in contents.server_path(root/"docs")]
    assert (way("nbs/00_one_evening", 12 + len(core)) == [*stems(book[1].chapters), "made/core", *core]
            and ONWARD[core[-1]] == [("Next", first.place), ("Or", "server-path")])
    assert way(first.place, len(first.path) + 1) == [*stems(first.chapters), others[0].place]
    assert (len(server) == 6 and way("server-path", 6) == server
            and {o.partition("/")[2].partition("/")[0] for o in server} == {"server"})
    hours = sum(contents.minutes(root/f"{o}.ipynb") for o in server) / 60
    assert f"in about {hours:.0f} hours" in (root/"docs/server-path.md").read_text(encoding="utf-8")
    for ring, after in zip(others, [*others[1:], None]):
        pages = [ring.place, *stems(ring.chapters), *([after.place] if after else [])]
        for a, b in zip(pages, pages[1:]): assert b in [to for _, to in ONWARD[a]], (a, b)
    assert (others[-1].path[-1].stem == chapter(nbs/f"{others[-1].path[-1].stem}.ipynb")
            and f"nbs/{others[-1].path[-1].stem}" not in ONWARD), "the last one leads nowhere"

MAP = """| part | chapters |
|---|---|
| **Start** | [one](00_one.ipynb) |
| **Small** | [a](weekend/01_a.ipynb) ★ · [b](weekend/02_b.ipynb) |
| **0 First** | [x](core/01_x.ipynb) · [toy](testing/toy.ipynb) ᵐ · [y](core/02_y.ipynb) ᶜ |
| **Kernels** | [process](process.ipynb) · [k](kernels/k.ipynb) ᵐ · [l](kernels/l.ipynb) |
| **Runtime and Python API** | [r](runtime.ipynb) |
| **Experiments** | [e](experiments/e.ipynb) |"""

@pytest.fixture
def small(tmp_path):
    "A map of its own, with modules"
    md, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    def save(stem, *cells):
        (tmp_path/"nbs"/stem).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=[*cells]), tmp_path/"nbs"/f"{stem}.ipynb")
    save("index", md(MAP))
    for stem in re.findall(r"\(([\w/]+)\.ipynb\)", MAP):
        example = [md("## Example"), code("two()")] if stem == "kernels/k" else []
        save(stem, md(f"# Of {stem}\n> What it gives."), code(f"#| default_exp {stem.replace('/', '.')}"),
             md("What it is for."), *example, code("#| export\ndef two(): return 2"), md("## Tests"),
             code("assert two() == 2"))
    (tmp_path/"docs").mkdir()
    (tmp_path/"docs/glossary.md").write_text("")
    (tmp_path/"docs/server-path.md").write_text("1. [S](nbs/runtime.ipynb): it serves.\n")
    return tmp_path

def test_a_module_is_on_no_path(small):
    """It is listed behind the chapters, without minutes, and Next goes past it; it leads up to its part or
    ring"""
    told = contents.parts(small/"nbs/index.ipynb")
    on = contents.onward(told, contents.server_path(small/"docs"))
    assert (on["nbs/core/01_x"] == [("Next", "nbs/core/02_y")]
            and on["nbs/testing/toy"] == [("Up", "made/part-0")]
            and on["nbs/kernels/k"] == [("Up", "made/ring-kernels")])
    [kernels] = [o for o in contents.rings(told) if o.name == "Kernels"]
    # the process has a ring of its own
    assert ([c.stem for c in kernels.path] == ["kernels/l"]
            and [c.stem for c in kernels.chapters] == ["kernels/k", "kernels/l"])
    page = contents.part_page(kernels, small/"nbs")
    assert re.sub(r"(?s)```.*```", "", page).split("\n\n")[1:5] == ["1 chapters, 0 hours to read them all.",
        "* [Of kernels/l](../nbs/kernels/l.ipynb) · 0 min<br>What it gives.", "## Modules",
        "Pages of purpose, functions and tests, to look things up in; no chapter needs them read."]
    assert ("* [Of kernels/k](../nbs/kernels/k.ipynb)<br>What it gives." in page
            and listed(page) == [("l", "../nbs/kernels/l"), ("k ᵐ", "../nbs/kernels/k")])

def test_the_page_of_a_module(small):
    """What it is for, its example, its reference, then its code, folded; a chapter has its text, what is
    next, and its reference"""
    from chapters import Book
    made = Book(small/"nbs", "pkg")
    def cells(stem): return nbformat.reads(made.page(small/f"nbs/{stem}.ipynb"), as_version=4).cells
    def heads(stem):
        return [re.sub(r"\s+", " ", c.source)[:24] for c in cells(stem) if not c.source.startswith("(cell-")]
    assert heads("kernels/k") == ["# Of kernels/k {.chapter", "What it is for.", "## Example", "two()",
        "## Reference :::{py:modu", "## Code and tests", "def two(): return 2", "## Tests",
        "assert two() == 2", "{.onward} **Up:** [](<.."]
    assert heads("kernels/l") == ["# Of kernels/l {.chapter", "What it is for.", "def two(): return 2",
        "## Tests", "assert two() == 2", "{.onward} **Next:** [](<", "## Reference :::{py:modu"]
    module, other = cells("kernels/k"), cells("kernels/l")
    assert ("Module · [`pkg.kernels.k`]" in module[0].source and "minutes" not in module[0].source
            and "Chapter of [Kernels](../../made/ring-kernels.md) · 0 minutes" in other[0].source)
    assert "[Server path, 1 of 1](../server-path.md) · 0 minutes" in cells("runtime")[0].source
    tags = lambda cells: [c.metadata.tags for c in cells if c.cell_type == "code"]
    assert tags(module) == [[], ["exported", "hide-input"], []] and tags(other) == [["exported"], []]

@every
def test_a_chapter_is_one_sitting(stem):
    if chapters[stem].kind == "module": return   # is looked up
    minutes, most = contents.minutes(nbs/f"{stem}.ipynb"), 45 if stem in [*weekend, "00_one_evening"] else 60
    assert minutes <= most, f"{minutes:.0f} minutes to read: fold what only proves, or split"

core = [o for o in chapters if o.startswith("core/")]

@pytest.mark.parametrize("stem", core)
def test_nothing_of_the_core_is_folded(stem):
    "What the core exports is shown, and so it counts"
    folded = [s for kind, s, _ in prose_and_code(stem) if kind == "code" and re.search(r"(?m)^#\| *export", s)
              and contents.HIDDEN.search(s)]
    assert not folded, "\n\n".join(folded)

def test_the_core_takes_thirty_hours():
    "All of it is shown; half of its chapters take 40 minutes or less"
    minutes = sorted(contents.minutes(nbs/f"{o}.ipynb") for o in core)
    assert sum(minutes) <= 30 * 60 and minutes[len(minutes) // 2] <= 40, (sum(minutes) / 60, minutes)

def begins(stem):
    "The code and the prose of a chapter's first shown cells"
    shown = [s for kind, s, _ in prose_and_code(stem) if kind == "markdown"
             or not re.search(r"#\| *(default_exp|export)", s)]
    return "\n".join(shown[:9])

@pytest.mark.parametrize("stem", core)
def test_a_chapter_of_the_core_begins_where_the_weekend_ends(stem):
    assert re.search(r"(?i)\bweekend\b", begins(stem)), "what cannot the weekend's version do?"

@every
def test_what_is_shown_shows(stem):
    "A cell that is not folded has at most three checks: what only proves is marked `#| checks`"
    crowded = [s for kind, s, _ in prose_and_code(stem) if kind == "code" and not contents.HIDDEN.search(s)
               and contents.checks(s) > 3]
    assert not crowded, ("more than three checks in a shown cell: show a value, and mark what only proves "
                         "`#| checks`\n" + "\n\n".join(crowded))

def unanswered(cells):
    "What is wrong with the predictions of a chapter, in words"
    open_, answers = {}, re.compile(r"\*\*(Predict|Answer)(?: (\d+))?\.\*\*")
    for kind, s, _ in cells:
        if kind == "code": open_ = dict.fromkeys(open_, True)   # something has run since
        for word, label in answers.findall(s) if kind == "markdown" else ():
            if word == "Predict":
                if label in open_: yield f"a second prediction {label} before the first is answered"
                open_[label] = False
            elif label not in open_: yield f"answer {label} to no prediction"
            elif not open_.pop(label): yield f"prediction {label} is answered before anything has run"
        if (kind == "markdown"
                and (said := re.search(r"(?i)\b(we|I) predict\b|\bour prediction\b|\bpredict before\b", s))):
            yield f"no mark: {said[0]}"
    yield from (f"prediction {label} is never answered" for label in open_)

@every
def test_every_prediction_is_answered(stem):
    wrong = [*unanswered(prose_and_code(stem))]
    assert chapters[stem].kind == "module" or not wrong, "\n".join(wrong)

@pytest.mark.parametrize("cells, wrong", [
    (["**Predict.** a", None, "**Answer.** b"], 0),
    (["**Predict 1.** a\n\n**Predict 2.** b", None, "**Answer 2.** b", "**Answer 1.** a"], 0),
    (["**Predict.** a", "**Answer.** b"], 1), (["**Predict.** a", None], 1), ([None, "**Answer.** b"], 1),
    (["**Predict.** a", None, "**Predict.** b", None, "**Answer.**"], 1),
    (["We predict a", None], 1)])
def test_unanswered_predictions_are_seen(cells, wrong):
    assert (len([*unanswered([("code", "x", []) if s is None else ("markdown", s, []) for s in cells])])
            == wrong)

def drawn(stem):
    "HTML of the pictures that stand in a chapter, and 'png' for each that is no HTML"
    for kind, s, outputs in prose_and_code(stem):
        if "```mermaid" in s and kind == "markdown": yield "mermaid"
        for o in outputs:
            html = "".join(o.get("data", {}).get("text/html", ""))
            if "<svg" in html: yield html
            if "image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}): yield "png"

@pytest.mark.parametrize("stem", weekend)
def test_a_chapter_of_the_weekend(stem):
    "It says what one can do after it, and shows live objects in a picture"
    assert re.search(r"After this chapter,? you can ",
                     prose(stem)[:1600]), "what can the reader do afterwards?"
    assert [html for html in drawn(stem) if html != "mermaid"], "no picture of a live object"
    assert len([*exercises(nbs/f"{stem}.ipynb")]) >= 2

def test_time_is_shown_by_sliders():
    sliders = {stem: n for stem in chapters if (n := sum('type="range"' in html for html in drawn(stem)))}
    assert sum(sliders.values()) >= 6, sliders

@every
def test_exercises_name_their_command_and_can_be_tried(stem):
    """Their edits fit the chapter, and what they quote stands there; whether it goes as they say is tried
    below"""
    path = nbs/f"{stem}.ipynb"
    nb = nbformat.read(path, as_version=4)
    assert "**Try it.**" not in prose(stem), "an exercise without a solution that is run"
    for exercise in exercises(path):
        assert f"make try NB={stem} EX={exercise.number}`" in exercise.task
        for old, new in exercise.edits:
            assert old != new
            place(nb, old)
        for quote in [*exercise.fails, *exercise.changes]: place(nb, quote)

def mark(exercise):
    "Those of the weekend path: `make exercises`, and in CI; the others are long"
    if exercise.chapter not in weekend: return pytest.mark.long
    return pytest.mark.skipif("TST_EXERCISES" not in os.environ and not os.environ.get("TST_LONG"),
                              reason="make exercises")

@pytest.mark.parametrize("exercise",
    [pytest.param(o, id=str(o), marks=mark(o)) for nb in looked_at for o in exercises(nb)])
def test_an_exercise_goes_as_its_solution_says(exercise):
    said, wrong = verdict(exercise)
    assert not wrong, f"{said}\n{wrong}"

@pytest.mark.parametrize("path", [o for o in notebooks() if "05a" not in o.stem], ids=chapter)
def test_what_is_drawn_is_shown(path):
    "A picture in the middle of a cell, or under an `if`, is computed and thrown away"
    for c in json.loads(path.read_text())["cells"]:
        code = "".join(c["source"])
        if c["cell_type"] == "code" and re.search(r"^(if .*: )?draw_rows\(", code, re.M):
            assert any({"text/html", "image/svg+xml"} & {*o.get("data", {})} for o in c["outputs"]), code

"""How a chapter reads: one sitting, results rather than assertions, predictions that are answered, pictures, exercises that run; and the menu is the map.

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
looked_at = [nb for nb in notebooks() if nb.stem != "index" and os.environ.get("TST_CHAPTER") in (None, chapter(nb))]   # `make done` asks of one
every = pytest.mark.parametrize("stem", [*map(chapter, looked_at)])

@cache
def prose_and_code(stem):
    "(type, source, outputs) of each cell"
    return [(c["cell_type"], "".join(c["source"]), c.get("outputs", [])) for c in json.loads((nbs/f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]]

def prose(stem): return "\n\n".join(s for kind, s, _ in prose_and_code(stem) if kind == "markdown")

def test_the_map_has_every_chapter_in_its_order():
    def in_order(stems): return sorted(stems, key=lambda stem: re.search(r"(\d+)([a-z]?)_[^/]*$", stem).groups())
    assert len(chapters) == sum(len(part.chapters) for part in book) and {*chapters} == {chapter(nb) for nb in notebooks() if nb.stem != "index"}
    evening, *rest = chapters
    assert evening == "00_one_evening" and rest[:len(weekend)] == weekend == in_order(weekend) and len(weekend) == 10
    command, *rest = rest[len(weekend):]
    assert command == "weekend/10a_main" and all(o.startswith("weekend/") for o in weekend)
    core = [o for o in rest if o.startswith("core/")]
    assert core == in_order(core) == [o for i, o in enumerate(core, 1) if o.startswith(f"core/{i:02}_")], "the core is numbered from 01 on, without letters"
    assert not [o for o in rest if o not in core and re.match(r"\d", o.rpartition("/")[2])], "only the core has numbers"

def test_the_menu_is_the_map():
    "docs/index.md lists the opening chapter and the parts; a part's page is made from the map, and lists its chapters"
    listed = re.findall(r"(?m)^(nbs/\S+|made/part-\d+)$", (root/"docs/index.md").read_text(encoding="utf-8"))
    opening, small, *parts = book
    assert listed == [f"nbs/{c.stem}" for c in opening.chapters] + [f"made/part-{p.number}" for p in parts] and [c.stem for c in small.chapters] == [*weekend, "weekend/10a_main"]
    page = contents.path_page(book, nbs)
    assert re.findall(r"(?m)^(\S+) .*<\.\./nbs/(\S+)>$", page) == [(c.number, c.stem) for c in small.chapters]
    for part in parts:
        page = contents.part_page(part, nbs)
        assert page.startswith(f"# {part.number} {part.name}\n")
        assert re.findall(r"(?m)^(.*?)(?: [★ᶜ])? <\.\./nbs/(\S+)>$", page) == [(f"{c.number} {c.words}".strip(), c.stem) for c in part.chapters]

@every
def test_a_chapter_is_one_sitting(stem):
    minutes, most = contents.minutes(nbs/f"{stem}.ipynb"), 45 if stem in [*weekend, "00_one_evening"] else 60
    assert minutes <= most, f"{minutes:.0f} minutes to read: fold what only proves, or split"

@every
def test_what_is_shown_shows(stem):
    "A cell that is not folded has at most three checks: what only proves is marked `#| checks`"
    crowded = [s for kind, s, _ in prose_and_code(stem) if kind == "code" and not contents.HIDDEN.search(s) and contents.checks(s) > 3]
    assert not crowded, "more than three checks in a shown cell: show a value, and mark what only proves `#| checks`\n" + "\n\n".join(crowded)

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
        if kind == "markdown" and (said := re.search(r"(?i)\b(we|I) predict\b|\bour prediction\b|\bpredict before\b", s)): yield f"no mark: {said[0]}"
    yield from (f"prediction {label} is never answered" for label in open_)

@every
def test_every_prediction_is_answered(stem):
    wrong = [*unanswered(prose_and_code(stem))]
    assert not wrong, "\n".join(wrong)

@pytest.mark.parametrize("cells, wrong", [
    (["**Predict.** a", None, "**Answer.** b"], 0), (["**Predict 1.** a\n\n**Predict 2.** b", None, "**Answer 2.** b", "**Answer 1.** a"], 0),
    (["**Predict.** a", "**Answer.** b"], 1), (["**Predict.** a", None], 1), ([None, "**Answer.** b"], 1), (["**Predict.** a", None, "**Predict.** b", None, "**Answer.**"], 1),
    (["We predict a", None], 1)])
def test_unanswered_predictions_are_seen(cells, wrong):
    assert len([*unanswered([("code", "x", []) if s is None else ("markdown", s, []) for s in cells])]) == wrong

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
    assert re.search(r"After this chapter,? you can ", prose(stem)[:1600]), "what can the reader do afterwards?"
    assert [html for html in drawn(stem) if html != "mermaid"], "no picture of a live object"
    assert len([*exercises(nbs/f"{stem}.ipynb")]) >= 2

def test_time_is_shown_by_sliders():
    sliders = {stem: n for stem in chapters if (n := sum('type="range"' in html for html in drawn(stem)))}
    assert sum(sliders.values()) >= 6, sliders

@every
def test_exercises_name_their_command_and_can_be_tried(stem):
    "Their edits fit the chapter, and what they quote stands there; whether it goes as they say is tried below"
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
    "Those of the weekend path: `make exercises`, which CI calls; the others are long"
    if exercise.chapter not in weekend: return pytest.mark.long
    return pytest.mark.skipif("TST_EXERCISES" not in os.environ and not os.environ.get("TST_LONG"), reason="make exercises")

@pytest.mark.parametrize("exercise", [pytest.param(o, id=str(o), marks=mark(o)) for nb in looked_at for o in exercises(nb)])
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

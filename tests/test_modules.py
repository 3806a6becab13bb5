"""The form of a documented module: a page of purpose, example, API and tests, on no reading path. What its
first cell calls **Purpose** is one."""
import re
import nbformat, pytest
from nbrun import chapter, directives, notebooks, prose_of

modules = {chapter(nb): nb for nb in notebooks()
           if any(o.startswith("# ") and "\n**Purpose.** " in o for o in prose_of(nb))}
every = pytest.mark.parametrize("stem", modules)

def cells(stem): return nbformat.read(modules[stem], as_version=4).cells
def plain(prose): return re.sub(r"(?s)```.*?```|(?m:^#.*$)|`[^`]*`", "", prose)

def test_there_are_modules(): assert len(modules) >= 21

@every
def test_it_begins_with_purpose_and_example(stem):
    """Title, promise and at most 120 words; then what a caller writes, with its output, before anything is
    exported"""
    shown = [c for c in cells(stem) if "hide" not in directives(c) and "default_exp" not in directives(c)]
    about = re.fullmatch(r"# .+\n> .+\n\n\*\*Purpose\.\*\* (.+)", shown[0].source)
    assert about and len(about[1].split()) <= 120
    at = next(i for i, c in enumerate(shown) if c.source.startswith("## Example"))
    assert not any(len(plain(c.source).split()) > 0 for c in shown[1:at] if c.cell_type == "markdown")
    assert shown[at + 1].cell_type == "code" and shown[at + 1].outputs
    assert not any({"export", "script"} & directives(c).keys() for c in shown[:at + 1])

@every
def test_it_asks_nothing(stem):
    """No questions, predictions or exercises; two sentences before code that is exported, and three lines of
    what is left out"""
    prose = [c.source for c in cells(stem) if c.cell_type == "markdown"]
    assert not [o for o in prose if "?" in plain(o)
                or re.search(r"\*\*(Predict|Answer|Exercise|To think about)", o)]
    for before, c in zip(cells(stem), cells(stem)[1:]):
        if before.cell_type == "markdown" and {"export", "script"} & directives(c).keys():
            assert len(re.findall(r"[.!](?=\s|$)", plain(before.source))) <= 2, before.source
    left = [o.partition("## What we left out\n")[2].strip().splitlines() for o in prose]
    assert all(len(o) <= 3 for o in left)

@every
def test_long_code_is_folded(stem):
    long = [c.source for c in cells(stem) if {"export", "script"} & directives(c).keys()
            and sum(not o.startswith("#|") for o in c.source.splitlines()) > 20]
    assert not [o for o in long if "#| code-fold: true" not in o]

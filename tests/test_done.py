"""`make done`: a chapter that `make check` would refuse is refused, in the same words, and one that fails
leaves package and notebook as they were."""
import subprocess, sys

import pytest
from copied import Copy
from done import all_or_nothing

STEM = "core/04_registry"
BAD = f'''
# %% [markdown]
# **Predict.** What will this print?

# %%
from minisgl_lit.core.engine.engine import Engine
assert 1
assert 2
assert 3
assert 4
print("{"a" * 100}")
'''
FAILS = """
# %%
#| export
def added_by_a_test() -> int:
    "One"
    return 1

# %%
print(added_by_a_test() // 0)
"""

def test_what_fails_changes_nothing(tmp_path):
    "A file that was changed, one that is new and one that is gone"
    for name in "abc": (tmp_path/name).write_text(name)
    def files(): return [*tmp_path.iterdir()]
    def change():
        (tmp_path/"a").write_text("other")
        (tmp_path/"b").unlink()
        (tmp_path/"new").write_text("new")
    with pytest.raises(SystemExit), all_or_nothing(files):
        change()
        raise SystemExit(1)
    assert {p.name: p.read_text() for p in files()} == dict(a="a", b="b", c="c")
    with all_or_nothing(files): change()
    assert {p.name: p.read_text() for p in files()} == dict(a="other", c="c", new="new")

@pytest.mark.long
def test_a_chapter_that_is_refused_leaves_all_as_it_was(tmp_path):
    "It reads ahead, and more; then a cell fails, after the export, and then it is as it was, and is done"
    copy = Copy(tmp_path)
    notebook = tmp_path/"nbs"/f"{STEM}.ipynb"
    text, module = notebook.with_suffix(".py"), tmp_path/"minisgl_lit"/"core"/"registry.py"
    subprocess.run([sys.executable, "-m", "jupytext", "--quiet", "--to", "py:percent", notebook, "-o", text],
                   check=True)
    good, before = text.read_text(), (notebook.read_bytes(), module.read_bytes())
    def done(more):
        text.write_text(good + more)
        return subprocess.run([sys.executable, tmp_path/"tests"/"done.py", STEM], cwd=tmp_path, env=copy.env,
                              capture_output=True, text=True)
    def sentences(more):
        refused = done(more)
        assert (refused.returncode == 1 and text.read_text() == good + more
                and (notebook.read_bytes(), module.read_bytes()) == before)
        return refused.stderr
    said = sentences(BAD)
    for sentence in ("imports minisgl_lit.core.engine.engine", "lines of more than 100 letters",
                     "more than three checks in a shown cell", "is never answered"):
        assert sentence in said, said
    assert "ZeroDivisionError" in sentences(FAILS)
    it = done("")
    assert (it.returncode == 0 and not text.exists()
            and (notebook.read_bytes(), module.read_bytes()) == before), it.stderr

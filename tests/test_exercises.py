"""What trying an exercise says: cells that fail or print otherwise, and the figures of its section, before
and after."""
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
import exercises
from exercises import Exercise, verdict

def chapter(budget, steps):
    def printed(text): return [new_output("stream", name="stdout", text=text)]
    cells = [new_markdown_cell("# A chapter\n## 1. Before"),
             new_code_cell("#| volatile\nprint(seconds)", outputs=printed(f"{steps / 10} s\n")),
             new_markdown_cell("## 2. Chunks"), new_code_cell(f"budget = {budget}"),
             new_code_cell("#| volatile\nserve()", outputs=printed(f"{steps} steps, 0.{steps} s\n"))]
    for i, c in enumerate(cells): c.id = f"cell{i}"
    return new_notebook(cells=cells)

def test_the_figures_of_its_section_are_shown_before_and_after(monkeypatch):
    monkeypatch.setattr(exercises, "attempt", lambda exercise: (chapter(64, 31), chapter(8, 197), {}, set()))
    said, wrong = verdict(Exercise("x", 1, "", [("budget = 64", "budget = 8")], [], []))
    assert not wrong and "- 31 steps, 0.31 s" in said and "+ 197 steps, 0.197 s" in said
    assert "1. Before" not in said, "another section's times say nothing of the edit"

def test_a_solution_that_is_wrong_is_told(monkeypatch):
    monkeypatch.setattr(exercises, "attempt", lambda exercise: (chapter(64, 31), chapter(8, 31), {}, set()))
    _, wrong = verdict(Exercise("x", 1, "", [("budget = 64", "budget = 8")], ["serve()"], []))
    assert wrong == "does not fail: serve()"

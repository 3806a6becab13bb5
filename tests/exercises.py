"""Exercises that cannot rot: apply the edit of a solution to a copy of its chapter, run it, and say which
cells fail.

    python tests/exercises.py core/12_kv_cache.radix       list the chapter's exercises
    python tests/exercises.py core/12_kv_cache.radix 2     try the second; fail if it goes otherwise than its
    solution says

In a chapter, `**Exercise 2.**` asks, and `<summary>Solution 2</summary>` answers: a ```diff (its `-` lines
stand in one cell, once), then `Fails:` with a line of each cell that will fail, in backticks, or `Nothing
fails.`; and, if it says so, `Prints otherwise:` with a line of each cell whose output will be another.
"""
import argparse, copy, re, sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbrun import _ansi, _key, cfg, chapter, directives, execute, notebooks, prose_of, root

@dataclass
class Exercise:
    chapter: str
    number: int
    task: str
    edits: list[tuple[str, str]]   # in the chapter's code, from, to
    fails: list[str]               # a line of each cell that fails
    changes: list[str]             # a line of each cell that prints something else

    def __str__(self): return f"{self.chapter}-{self.number}"

def hunks(diff):
    "(from, to) of each part of a diff; parts are divided by lines with @@"
    for part in re.split(r"(?m)^@@.*\n?", diff):
        lines = part.rstrip("\n").split("\n")
        if not part.strip(): continue
        old, new = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign, "")) for sign in "-+")
        yield old, new

def quotes(name, answer):
    "What stands in backticks behind a name, until the end of its paragraph"
    found = re.search(rf"(?s){name}:(.*?)(\n\n|\Z)", answer)
    return [two or one for two, one in re.findall(r"``\s?(.+?)\s?``|`([^`]+)`", found[1])] if found else []

def exercises(path):
    "All exercises of a chapter; `ValueError` if one has no solution that can be tried"
    prose = "\n\n".join(prose_of(path))
    tasks = {int(n): task for n, task in re.findall(r"(?s)\*\*Exercise (\d+)\.\*\*(.*?)(?=\n\n|\Z)", prose)}
    answers = {int(n): answer
               for n, answer in re.findall(r"(?s)<summary>Solution (\d+)</summary>(.*?)</details>", prose)}
    if tasks.keys() != answers.keys():
        raise ValueError(f"{path.name}: exercises {[*tasks]}, solutions {[*answers]}")
    for n, answer in answers.items():
        diff = re.search(r"(?s)```diff\n(.*?)```", answer)
        fails, changes = quotes("Fails", answer), quotes("Prints otherwise", answer)
        if not diff: raise ValueError(f"{path.name}: solution {n} has no diff")
        if not fails and "Nothing fails" not in answer:
            raise ValueError(f"{path.name}: solution {n} does not say what fails")
        yield Exercise(chapter(path), n, tasks[n].strip(), [*hunks(diff[1])], fails, changes)

def place(nb, quote, code=lambda c: c.source):
    "The one code cell in which some text stands once"
    found = [c for c in nb.cells if c.cell_type == "code" and quote in code(c)]
    if len(found) != 1 or code(found[0]).count(quote) != 1:
        raise ValueError(f"this stands in {len(found)} cells, and should stand once in one:\n{quote}")
    return found[0]

def attempt(exercise):
    """Try it: the notebook before and after, the errors of the cells that failed, and the ids of all that
    printed something else"""
    path = root/cfg["nbs_path"]/f"{exercise.chapter}.ipynb"
    nb = nbformat.read(path, as_version=4)
    before = copy.deepcopy(nb)
    for old, new in exercise.edits:
        cell = place(nb, old)
        cell.source = cell.source.replace(old, new)
    for c in nb.cells:
        d = directives(c)
        if d.get("eval", "").lower() == "false" or set(cfg["tst_flags"].split()) & d.keys():
            c.metadata.tags = ["skip-execution"]
    if error := execute(nb, path, timeout=600, allow_errors=True): raise RuntimeError(error)
    failed = {c.id: o for c in nb.cells if c.cell_type == "code"
              for o in c.outputs if o.output_type == "error"}
    changed = {a.id for a, b in zip(before.cells, nb.cells) if a.cell_type == "code" and a.id not in failed
               and "skip-execution" not in b.metadata.get("tags", []) and "machine" not in directives(a)
               and _key(a.outputs, v := "volatile" in directives(a)) != _key(b.outputs, v)}
    return before, nb, failed, changed

def failing_line(error):
    "The line of the cell at which it failed"
    marked = re.findall(r"(?m)^-+> *\d+ (.*)", _ansi.sub("", "\n".join(error.traceback)))
    return marked[0].strip() if marked else ""

def printed(cell):
    "What a cell shows as text"
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "")
                   for o in cell.outputs).splitlines()

def verdict(exercise):
    "(what happened, in words; what the solution says otherwise, or '')"
    nb, after, failed, changed = attempt(exercise)
    cells, heading, said = {}, "", []
    for c, new in zip(nb.cells, after.cells):
        if c.cell_type == "markdown": heading = next(reversed(re.findall(r"(?m)^#+ (.*)", c.source)), heading)
        cells[c.id] = c, new, heading
    def first(c):
        return next((line for line in c.source.splitlines() if line.strip() and not line.startswith("#")), "")
    for k, error in failed.items():
        why = " ".join(f"{error.ename}: {error.evalue}".split())
        said.append(f"  fails, under “{cells[k][2]}”: {failing_line(error)}\n      {why[:300]}")
    edited = {place(nb, old).id for old, _ in exercise.edits}
    sections = {cells[k][2] for k in edited}
    for k, (c, new, under) in cells.items():
        # its figures are what the exercise asks about
        is_timed = "volatile" in directives(c) and under in sections and k not in failed
        if k not in changed and not is_timed: continue
        was, now = printed(c), printed(new)
        what = (f"prints, under “{under}” (times change from run to run)" if is_timed
                else f"prints otherwise, under “{under}”")
        said.append(f"  {what}: {first(c)}")
        said += [f"      {sign} {line[:150]}" for sign, lines, others in (("-", was, now), ("+", now, was))
                 for line in lines if line not in others][:40]
        if was == now: said.append("      another picture" if k in changed else "      the same")
    wrong = []
    expected = {place(nb, quote).id: quote for quote in exercise.fails}
    wrong += [f"does not fail: {expected[k]}" for k in expected.keys() - failed.keys()]
    wrong += [f"fails, and the solution does not say so: {failing_line(failed[k])}"
              for k in failed.keys() - expected.keys()]
    wrong += [f"prints the same as before: {quote}"
              for quote in exercise.changes if place(nb, quote).id not in changed]
    return "\n".join(said or ["  nothing fails"]), "\n".join(wrong)

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("chapter", help="e.g. core/12_kv_cache.radix")
    ap.add_argument("number", nargs="?", type=int, help="which exercise")
    a = ap.parse_args()
    path = next((p for p in notebooks() if p.stem == Path(a.chapter).name.removesuffix(".ipynb")), None)
    if not path: sys.exit(f"no chapter {a.chapter}")
    found = {o.number: o for o in exercises(path)}
    if a.number is None:
        for o in found.values(): print(f"{o.number}. {' '.join(o.task.split())}")
        return
    if a.number not in found: sys.exit(f"{path.stem} has exercises {', '.join(map(str, found)) or 'none'}")
    exercise = found[a.number]
    print(f"{path.stem}, exercise {a.number}: running a copy of the chapter with the edit of its solution")
    for old, new in exercise.edits:
        print("".join(f"  - {line}\n" for line in old.splitlines())
              + "".join(f"  + {line}\n" for line in new.splitlines()), end="")
    said, wrong = verdict(exercise)
    print(said)
    if wrong: sys.exit(f"The solution says otherwise:\n{wrong}")
    print("as the solution says")

if __name__ == "__main__": main()

"""A program that is told in a chapter and is no part of the package: its cells are marked `#| script`.

    python tests/script.py tools/embedded main              call a function of the chapter
    python tests/script.py tools/sleeping_replicas report   the same"""
import sys
import nbformat
from nbrun import directives, root

def load(stem):
    "The names that a chapter's exported cells and those of its program define"
    cells = nbformat.read(root/"nbs"/f"{stem}.ipynb", as_version=4).cells
    names = {"__name__": stem.replace("/", ".")}
    for c in cells:
        if {"export", "script"} & directives(c).keys(): exec(compile(c.source, f"{stem}.ipynb, cell {c.id}", "exec"), names)
    return names

if __name__ == "__main__":
    stem, function, *args = sys.argv[1:]
    load(stem)[function](*args)

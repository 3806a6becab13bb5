"""A program that is told in chapters and is no part of the package: its cells are marked `#| script`.

    python tests/script.py tools/routing main chats ours 6 0              call a function of a chapter, with
    arguments
    python tests/script.py tools/embedded_tasks tools/embedded main       the program is told in two"""
import sys
import nbformat
from nbrun import directives, root

def load(*chapters):
    "The names that the exported cells of some chapters and those of their program define"
    names = {"__name__": "script"}
    for stem in chapters:
        for c in nbformat.read(root/"nbs"/f"{stem}.ipynb", as_version=4).cells:
            if {"export", "script"} & directives(c).keys():
                exec(compile(c.source, f"{stem}.ipynb, cell {c.id}", "exec"), names)
    return names

if __name__ == "__main__":
    n = next(i for i, o in enumerate(sys.argv) if i and "/" not in o)   # chapters stand in rooms
    load(*sys.argv[1:n])[sys.argv[n]](*sys.argv[n + 1:])

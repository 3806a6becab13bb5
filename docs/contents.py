"""The book's contents, as the map in nbs/index.ipynb says them: parts, their chapters in order, of which kind each is; and how long it takes to read.

The menu, the pages of the parts, and the line at the top of each chapter are made from it.
"""
import json, re
from dataclasses import dataclass
from pathlib import Path

KINDS = {"★": "weekend", "ᶜ": "C", "": "reference"}   # marks behind a link of the map
MARKS = {kind: f" {mark}" if mark else "" for mark, kind in KINDS.items()}
HIDDEN = re.compile(r"#\s*\|\s*(hide|checks|code-fold: *true)\b")   # what the page does not show at once
CHECKS = re.compile(r"\btest_\w+\(|\bassert\b|\bexpect_fail\(|\btest_fail\(")

@dataclass(frozen=True)
class Chapter:
    stem: str     # of its notebook: its place in nbs/, without the ending
    words: str    # in the map
    kind: str     # opening, weekend, C or reference

    @property
    def number(self):
        "Of an evening, a weekend or the core; the rest has none"
        found = re.match(r"\d+[a-z]?(?=_)", self.stem.rpartition("/")[2])
        return (found[0].removeprefix("0") or "0") if found else ""

@dataclass(frozen=True)
class Part:
    number: str   # "" for the opening one
    name: str
    chapters: tuple[Chapter, ...]

def cells(path):
    "(cell type, source) of a notebook"
    return [(c["cell_type"], "".join(c["source"])) for c in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]]

def parts(index):
    "The parts of the map"
    rows = re.findall(r"(?m)^\| \*\*(?:(\d+) )?([^*]+)\*\* \| (.*) \|$", "\n".join(s for kind, s in cells(index) if kind == "markdown"))
    link = re.compile(r"\[([^\]]+)\]\(([\w./]+)\.ipynb\)\s?([★ᶜ]?)")
    return [Part(number, name, tuple(Chapter(stem, words, KINDS[mark] if number or mark else "opening") for words, stem, mark in link.findall(links)))
            for number, name, links in rows]

def checks(source): return len(CHECKS.findall(source))

def code_lines(source): return [line for line in source.split("\n") if line.strip() and not re.match(r"#\s*\|", line)]

def minutes(path):
    "To read a chapter: words ÷ 180 + shown lines of code ÷ 8, what is folded left out"
    words = lines = 0
    for kind, s in cells(path):
        if kind == "markdown": words += len(re.findall(r"\w+", re.sub(r"(?s)<details>.*?</details>|```.*?```|(?<=\])\([^)\s]*\)", "", s)))
        elif kind == "code" and not HIDDEN.search(s): lines += len(code_lines(s))
    return words / 180 + lines / 8

def promise(path):
    "A chapter's title, and the line below it"
    first = next(s for kind, s in cells(path) if s.startswith("# ") and kind == "markdown")
    title, _, rest = first.partition("\n")
    said = re.search(r"(?m)^> (.*)", rest)
    return title[2:].strip(), said[1] if said else ""

def line(chapter, nbs):
    "A chapter in a list"
    path = nbs/f"{chapter.stem}.ipynb"
    title, said = promise(path)
    mark = "" if chapter.kind == "reference" else f" *{chapter.kind}* ·"
    return f"* {chapter.number} ".rstrip() + f" [{title}](../nbs/{chapter.stem}.ipynb) ·{mark} {minutes(path):.0f} min<br>{said}"

def tree(entries, *options):
    "A hidden toctree of (words, place)"
    return "\n".join(["```{toctree}", ":hidden:", *options, "", *(f"{words} <{place}>" for words, place in entries), "```"])

def part_page(part, nbs):
    "The page of a part: its chapters, with what each promises"
    total = sum(minutes(nbs/f"{c.stem}.ipynb") for c in part.chapters) / 60
    return "\n\n".join([f"# {part.number} {part.name}".replace("#  ", "# "), f"{len(part.chapters)} chapters, {total:.0f} hours to read them all.",
                        "\n".join(line(c, nbs) for c in part.chapters), tree([(f"{c.number} {c.words}".strip() + MARKS[c.kind], f"../nbs/{c.stem}") for c in part.chapters])]) + "\n"

def path_page(book, nbs):
    "The page of the weekend"
    weekend = next(part.chapters for part in book if part.chapters[0].kind == "weekend")
    total = sum(minutes(nbs/f"{c.stem}.ipynb") for c in weekend) / 60
    return f"""# An engine in a weekend

Ten chapters, {total:.0f} hours: one small engine that grows until it serves. Every line of it is on these pages, each problem is met before its answer, and the last chapter opens the chat page on the engine that you have built. An evening is enough for [the same way with lists](../nbs/00_one_evening.ipynb), which is also the best beginning.

{chr(10).join(line(c, nbs) for c in weekend)}

{tree([(f"{c.number} {c.words}", f"../nbs/{c.stem}") for c in weekend])}

Everything else is *reference*: the real engine, to be read where you need it. Chapters marked *C* hold listings of C, which are folded; [all of it](c-sources.md) stands on one page.
"""

def write(docs, nbs):
    "The pages made from the map; returns the menu of the book"
    book = parts(nbs/"index.ipynb")
    pages = {f"part-{p.number}.md": part_page(p, nbs) for p in book if p.number} | {"path.md": path_page(book, nbs)}
    for name, text in pages.items():
        place = docs/"made"/name
        place.parent.mkdir(exist_ok=True)
        if not place.exists() or place.read_text(encoding="utf-8") != text: place.write_text(text, encoding="utf-8")
    return [(f"{p.number} {p.name}", f"made/part-{p.number}") for p in book if p.number]

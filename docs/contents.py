"""The book's contents, as the map in nbs/index.ipynb says them: rows of chapters in order, of which kind each
is; and how long it takes to read.

Rows with a number are the parts of the core. All chapters outside of them are sorted into *rings* by their
folder, since the order of imports is not always that of topics. The menu, the pages of parts and rings, the
line at the top of each chapter and what follows it are made from it.
"""
import json, re
from dataclasses import dataclass
from pathlib import Path

# marks behind a link of the map; a module is on no reading path
KINDS = {"★": "weekend", "ᶜ": "C", "ᵐ": "module", "": "reference"}
MARKS = {kind: f" {mark}" if mark else "" for mark, kind in KINDS.items()}
HIDDEN = re.compile(r"#\s*\|\s*(hide|checks|code-fold: *true)\b")   # what the page does not show at once
ROOMS = {"kernels": "Kernels", "families": "Families", "formats": "Formats", "distributed": "Distributed",
         "text": "Text", "server": "Server", "experiments": "Experiments",
         **dict.fromkeys(["tools", "testing", "cli", "cli_arguments", "config_sources", "main"],
                         "Tools and testing")}
# what stands beside these folders, `rules`, `speculation`, `adapters` and `loop`
REST = "Runtime and Python API"
CHECKS = re.compile(r"\btest_\w+\(|\bassert\b|\bexpect_fail\(|\btest_fail\(")

@dataclass(frozen=True)
class Chapter:
    stem: str     # of its notebook: its place in nbs/, without the ending
    words: str    # in the map
    kind: str     # opening, weekend, C, module or reference

    @property
    def number(self):
        "Of an evening, a weekend or the core; the rest has none"
        found = re.match(r"\d+[a-z]?(?=_)", self.stem.rpartition("/")[2])
        return (found[0].removeprefix("0") or "0") if found else ""

@dataclass(frozen=True)
class Part:
    number: str   # only parts of the core have one
    name: str
    chapters: tuple[Chapter, ...]

    @property
    def title(self): return f"{self.number} {self.name}".strip()

    @property
    def place(self):
        "Of its page"
        return (f"made/part-{self.number}" if self.number
                else f"made/ring-{self.name.split()[0].strip(',').lower()}")

    @property
    def path(self):
        "Its chapters that are read one after the other"
        return [c for c in self.chapters if c.kind != "module"]

def cells(path):
    "(cell type, source) of a notebook"
    return [(c["cell_type"], "".join(c["source"]))
            for c in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]]

def parts(index):
    "The rows of the map"
    rows = re.findall(r"(?m)^\| \*\*(?:(\d+) )?([^*]+)\*\* \| (.*) \|$",
                      "\n".join(s for kind, s in cells(index) if kind == "markdown"))
    link = re.compile(r"\[([^\]]+)\]\(([\w./]+)\.ipynb\)\s?([★ᶜᵐ]?)")
    return [Part(number, name, tuple(Chapter(stem, words, KINDS[mark] if i > 1 or mark else "opening")
                                     for words, stem, mark in link.findall(links)))
            for i, (number, name, links) in enumerate(rows)]   # the first two are an evening and a weekend

def core(book): return [part for part in book if part.number]

def rings(book):
    "All chapters outside of the core, by their folder: the experiments, then the rows of the map"
    rest = [c for part in book[2:] if not part.number for c in part.chapters]
    names = sorted((part.name for part in book[2:] if not part.number),
                   key=lambda name: name != "Experiments")
    return [Part("", name, tuple(c for c in rest if ROOMS.get(c.stem.partition("/")[0], REST) == name))
            for name in names]

def server_path(docs):
    "The chapters of docs/server-path.md, in its order"
    return re.findall(r"(?m)^\d+\. .*?\]\(nbs/([\w/]+)\.ipynb\)",
                      (docs/"server-path.md").read_text(encoding="utf-8"))

def onward(book, server):
    """{page: [(words, page)]}: what may be read after each page, the way that it is on first. A module leads
    back to its part or ring. Pages are named by their place in the docs, without the ending."""
    opening, small, *_ = book
    parts, around = core(book), rings(book)
    def row(pages, words="Next"):
        for a, b in zip(pages, pages[1:]): on.setdefault(a, []).append((words, b))
    on = {}
    row([f"nbs/{o}" for o in server], "Next on the server path")
    row([*(f"nbs/{o}" for o in server[-1:]), "guides/deploy"], "After the server path")
    row(["server-path", *(f"nbs/{o}" for o in server[:1])])
    row([f"nbs/{c.stem}" for c in [*opening.path, *small.path]] + ["made/core"])
    row(["made/path", f"nbs/{small.path[0].stem}"])
    row(["made/core", *(f"nbs/{c.stem}" for part in parts for c in part.path), around[0].place])
    for part in parts: row([part.place, f"nbs/{part.path[0].stem}"])
    for ring, after in zip(around, [*around[1:], None]):
        row([ring.place, *(f"nbs/{c.stem}" for c in ring.path), *([after.place] if after else [])],
            f"Next in {ring.name}" if {c.stem for c in ring.path} & {*server} else "Next")
    row([f"nbs/{parts[-1].path[-1].stem}", "server-path"], "Or")
    for part in [*parts, *around]:
        for c in part.chapters:
            if c.kind == "module": on[f"nbs/{c.stem}"] = [("Up", part.place)]
    return on

def checks(source): return len(CHECKS.findall(source))

def code_lines(source):
    return [line for line in source.split("\n") if line.strip() and not re.match(r"#\s*\|", line)]

def minutes(path):
    "To read a chapter: words ÷ 180 + shown lines of code ÷ 8, what is folded left out"
    words = lines = 0
    for kind, s in cells(path):
        if kind == "markdown":
            words += len(re.findall(r"\w+",
                re.sub(r"(?s)<details>.*?</details>|```.*?```|(?<=\])\([^)\s]*\)", "", s)))
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
    about = [*([f"*{chapter.kind}*"] if chapter.kind in ("weekend", "C") else []),
             *([f"{minutes(path):.0f} min"] if chapter.kind != "module" else [])]
    return (" · ".join([f"* {chapter.number} ".rstrip() + f" [{title}](../nbs/{chapter.stem}.ipynb)", *about])
            + f"<br>{said}")

def tree(entries, *options):
    "A hidden toctree of (words, place)"
    return "\n".join(["```{toctree}", ":hidden:", *options, "",
                      *(f"{words} <{place}>" for words, place in entries), "```"])

def hours(chapters, nbs): return sum(minutes(nbs/f"{c.stem}.ipynb") for c in chapters) / 60

def part_page(part, nbs):
    "The page of a part or a ring: its chapters, with what each promises, then its modules"
    modules = [c for c in part.chapters if c.kind == "module"]
    listed = ["\n".join(line(c, nbs) for c in part.path)]
    if modules:
        listed += ["## Modules", "Pages of purpose, functions and tests, to look things up in; no chapter "
                                 "needs them read.", "\n".join(line(c, nbs) for c in modules)]
    return ("\n\n".join([f"# {part.title}", f"{len(part.path)} chapters, {hours(part.path, nbs):.0f} hours "
                                            "to "
                                           "read them all.", *listed,
                        tree([(f"{c.number} {c.words}".strip() + MARKS[c.kind], f"../nbs/{c.stem}")
                              for c in [*part.path, *modules]])]) + "\n")

def core_page(book, nbs):
    "The page of the core: its parts"
    def entry(part):
        return (f"* [{part.title}]({part.place.removeprefix('made/')}.md) · {hours(part.path, nbs):.0f} "
                "hours<br>" + " · ".join(f"[{c.words}](../nbs/{c.stem}.ipynb)" for c in part.path))
    return ("\n\n".join([
        "# The core",
        "The engine itself, from a request to its last token, for one machine and one kind of checkpoint. "
        "Read it in order: each chapter breaks what the weekend has, and mends it. Around it stand the "
        "rings: kernels, formats, other ranks, rules of text, the server.",
        "\n".join(map(entry, core(book))),
        tree([(part.title, part.place.removeprefix("made/")) for part in core(book)])]) + "\n")

def menu(book):
    "The first part of the site's menu, which docs/index.md includes"
    experiments, *others = [(ring.name, ring.place) for ring in rings(book)]
    first = [(book[0].chapters[0].words.capitalize(), f"nbs/{book[0].chapters[0].stem}"),
             ("An engine in a weekend", "made/path"), ("The core", "made/core"), experiments,
             ("The server path", "server-path")]
    groups = {"Start here": first, "Around the core": [*others, ("All of the C", "made/c-sources")]}
    return ("\n\n".join(tree([(words, f"/{place}") for words, place in entries], f":caption: {caption}")
                        for caption, entries in groups.items()) + "\n")

def path_page(book, nbs):
    "The page of the weekend"
    weekend = book[1].chapters
    total = hours(weekend, nbs)
    return (f"""# An engine in a weekend

Ten chapters, {total:.0f} hours: one small engine that grows until it serves. Every line of it is on these pages, each problem is met before its answer, and the last chapter opens the chat page on the engine that you have built. An evening is enough for [the same way with lists](../nbs/00_one_evening.ipynb), which is also the best beginning.

{chr(10).join(line(c, nbs) for c in weekend)}

{tree([(f"{c.number} {c.words}", f"../nbs/{c.stem}") for c in weekend])}

The real engine begins with [its core](core.md). Everything else is *reference*, to be read where you need it. Chapters marked *C* hold listings of C, which are folded; [all of it](c-sources.md) stands on one page.
""")   # noqa: E501

def write(docs, nbs):
    "The pages made from the map"
    book = parts(nbs/"index.ipynb")
    pages = {"path": path_page(book, nbs), "core": core_page(book, nbs), "menu": menu(book)}
    pages |= {part.place.removeprefix("made/"): part_page(part, nbs) for part in [*core(book), *rings(book)]}
    for name, text in pages.items():
        place = docs/"made"/f"{name}.md"
        place.parent.mkdir(exist_ok=True)
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            place.write_text(text, encoding="utf-8")
    for old in [*(docs/"made").glob("part-*.md"), *(docs/"made").glob("ring-*.md")]:
        if old.stem not in pages: old.unlink()   # of a map that has changed

"""Where each name of the book is defined: functions, classes, their fields, parameters and variables, in
Python and in the C that cells hold.

Reads source text only, as `chapters.py` does.
"""
import ast, builtins, keyword, re
from typing import NamedTuple

DEF, FIELD, METHOD, CONST, PARAM, LOCAL = range(6)   # what prose more likely means goes first
_pythons = {*keyword.kwlist, *vars(builtins)}
_funs = ast.FunctionDef, ast.AsyncFunctionDef
_c_type = r"(?:const |unsigned )*(?:i64|int|float|char|void|int8_t|int32_t|uint16_t|uint32_t|vf|vu|vi)\b[ *]*"
_c_defs = (re.compile(r"^(?:INLINE |static )?" + _c_type + r"(\w+)\(", re.M),
           re.compile(r"^#define (\w+)", re.M),
           re.compile(r"^\}? ?(?:typedef .*)?\b(\w+)(?: __attribute__.*)?;$", re.M))
_c_names = re.compile(_c_type + r"(\w+)((?:, ?\**\w+)*)")

def compound(name):
    "Whether a name is more than one English word in small letters, which may mean many things"
    return "_" in name or name != name.lower()

class Place(NamedTuple):
    "A definition: whether it is only in the chapter, of which kind, in which cell. What is less goes before."
    private: bool
    kind: int
    cell: str

def targets(node):
    "Names that an assignment, a loop or a `with` gives a value"
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]

def c_names(text):
    "(kind, name) of what C in a string defines"
    for body in re.findall(r"enum \{([^}]*)\}", text):
        yield from ((DEF, o) for o in re.findall(r"(\w+) =", body))
    for pattern in _c_defs: yield from ((DEF, o) for o in pattern.findall(text))
    for first, rest in _c_names.findall(text):
        yield from ((PARAM, o) for o in [first, *re.findall(r"\w+", rest)])

def c_sources(tree):
    "The strings of a cell that are C"
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            and ";\n" in n.value]

def _function(node):
    a = node.args
    for o in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
        if o and o.arg not in ("self", "cls"): yield PARAM, o.arg
    for n in ast.walk(node):
        if (isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)
                and n.value.id == "self"):
            yield FIELD, n.attr
        elif isinstance(n, _funs) and n is not node: yield LOCAL, n.name
    yield from ((LOCAL, o) for o in targets(node))

def py_names(tree):
    "(kind, name) of what a cell defines"
    for node in tree.body:
        if isinstance(node, _funs):
            yield DEF, node.name
            yield from _function(node)
        elif isinstance(node, ast.ClassDef):
            yield DEF, node.name
            for n in node.body:
                if isinstance(n, _funs):
                    yield METHOD, n.name
                    yield from _function(n)
                else: yield from ((FIELD, o) for o in targets(n))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            yield from ((CONST, o) for o in targets(node))
    for n in c_sources(tree): yield from c_names(n)

def members(node):
    """(owner, name) of what belongs to something else: a class's members, a patched method, the C of a
    constant"""
    if isinstance(node, ast.ClassDef):
        for n in node.body:
            yield from ((node.name, o) for o in ([n.name, *(o for kind, o in _function(n) if kind == FIELD)]
                if isinstance(n, _funs) else targets(n)))
    elif isinstance(node, _funs):
        if any(ast.unparse(d).startswith("patch") for d in node.decorator_list):
            yield ast.unparse(node.args.args[0].annotation), node.name
    else:
        yield from ((owner, o) for owner in targets(node) for text in c_sources(node)
                    for _, o in c_names(text))

class Names:
    """`here[chapter]`: all places of each name that its visible cells define; `members[thing]`: the cell of
    each member of a module, an exported class or C source, by its full name; `known`: the first cell that
    defines an exported name. Members of the classes in `everywhere` need not be imported to be meant: they
    are what users set."""
    def __init__(self, *everywhere):
        self.here, self.members, self.known, self.everywhere = {}, {}, {}, everywhere

    def add(self, chapter, cell, tree, full):
        "Read one cell; `full` is the module it goes to, or nothing"
        here = self.here.setdefault(chapter, {})
        for kind, name in py_names(tree):
            if full or kind < PARAM: here.setdefault(name, []).append(Place(not full, kind, cell))
        for node in tree.body if full else ():
            for name in [node.name] if isinstance(node, (*_funs, ast.ClassDef)) else targets(node):
                self.known.setdefault(name, cell)
                self.members.setdefault(full, {}).setdefault(name, cell)
            for owner, name in members(node):
                self.members.setdefault(f"{full}.{owner}", {}).setdefault(name, cell)
                if isinstance(node, ast.ClassDef): self.known.setdefault(name, cell)

    def find(self, chapter, name, imported):
        """The cell that defines what a chapter calls so; '' if nobody does, or another may be meant. A
        compound name is looked for in the whole book."""
        head, _, name = name.rpartition(".")
        if head and head != "self": return self.members.get(imported.get(head), {}).get(name, "")
        places = self.here.get(chapter, {}).get(name, [])
        place = min(places, key=lambda o: o[:2], default=None)
        if len(name) < 2 and not name.isupper() or name in _pythons and not (place and place.kind < CONST):
            return ""
        if place and place.kind < PARAM: return place.cell
        for full in [imported.get(name, "").rpartition(".")[0], *imported.values(), *self.everywhere]:
            if name in self.members.get(full, {}): return self.members[full][name]
        # a parameter of several may be any
        if place: return place.cell if len({o.cell for o in places}) == 1 else ""
        return self.known.get(name, "") if compound(name) else ""

class Terms:
    """The words of the glossary; `link` leads to it from where a page first uses each. A word of two senses
    must stand in italics."""
    two_senses = {"row", "stream", "limit", "host", "decode", "step", "page", "lock", "rank", "launch",
                  "duplicate", "policy", "give back", "recording", "team"}

    def __init__(self, glossary):
        blocks = re.findall(r"```\{glossary\}\n(.*?)```", glossary, re.S)
        terms = [o for block in blocks for o in re.findall(r"^[\w ]+$", block, re.M) if o[0] != " "]
        self._names = {o.lower(): o for o in terms}
        self.built = {}   # {notebook: the terms whose entry says "See" it}
        for names, entry in re.findall(r"(?m)^((?:[\w, ]+\n)+)((?:    .*\n?)+)", "\n".join(blocks)):
            for nb in re.findall(r"See \[[^\]]*\]\(nbs/([\w./]+\.ipynb)\)", entry):
                self.built.setdefault(nb, []).extend(names.strip().split("\n"))
        words = set(terms)
        plain, in_italics = self._any(words - self.two_senses), self._any(self.two_senses & words)
        self._word = re.compile(rf"(?<![\w-])(?:{plain}|(?<=\*)(?:{in_italics})(?=s?\*))s?(?![\w-])")

    def _any(self, words):
        "A pattern of some words, the longest first, with or without a capital letter"
        return ("|".join(o if o.isupper() else f"[{o[0]}{o[0].upper()}]{o[1:]}"
                         for o in sorted(words, key=len, reverse=True)) or "(?!)")

    def named(self, words):
        "The term that some words are, in the singular or plural; `None` if they are none"
        return self._names.get(words.lower()) or self._names.get(words.lower().removesuffix("s"))

    def link(self, text, seen):
        "Plain text with its first use of each term as a link; adds to `seen`"
        def one(m):
            term = self.named(m[0])
            if term in seen: return m[0]
            seen.add(term)
            return f"{{term}}`{m[0]} <{term}>`"
        return self._word.sub(one, text)

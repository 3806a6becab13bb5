"""Fold each `@patch` function of an exported module into the body of its class.

A chapter builds a class method by method, one question a cell, and several chapters may build one class; the
package shows whole classes, and imports at the top. `export.py` uses this on what `nbdev-export` has written;
a module without patches stays as it is.
"""
import ast, io, re, sys, tokenize
from typing import NamedTuple

functions = ast.FunctionDef, ast.AsyncFunctionDef
marker = re.compile(r"# %% \S+ #\w+$")

class TangleError(ValueError):
    "A patch that cannot be folded; the sentence names its cell."

class Patch(NamedTuple):
    """A patched function: its node, the lines it takes with what stands above it, its cell's marker, its text
    as a method."""
    node: ast.AST
    start: int
    end: int
    cell: str
    text: str

def patched(node):
    "The decorator that patches a function, or nothing"
    def name(d): return d.func if isinstance(d, ast.Call) else d
    if isinstance(node, functions):
        return next((d for d in node.decorator_list if getattr(name(d), "id", "") == "patch"), None)

def indented(text):
    "Four spaces more before each line, but not within strings; a docstring moves as a whole"
    inside, doc = set(), ast.get_docstring(ast.parse(text).body[0], clean=False)
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if (t.type == tokenize.STRING and t.start[0] < t.end[0]
                and ast.literal_eval(t.string if t.string[0] not in "fF" else "''") != doc):
            inside |= set(range(t.start[0] + 1, t.end[0] + 1))
    lines = text.splitlines(keepends=True)
    return "".join(o if i in inside or not o.strip() else "    " + o for i, o in enumerate(lines, 1))

def as_method(source, node, decorator):
    "The text of a function without what makes it a patch"
    me, how = node.args.args[0], {}
    if isinstance(decorator, ast.Call): how = {k.arg: k.value.value for k in decorator.keywords}
    instead = "@property\n" if how.get("as_prop") else "@classmethod\n" if how.get("cls_method") else ""
    method = source.replace("@" + ast.get_source_segment(source, decorator_of(source)) + "\n", instead, 1)
    method = re.sub(rf"(\b{me.arg}): *{re.escape(ast.unparse(me.annotation))}", r"\1", method, count=1)
    return quoted(method, ast.unparse(me.annotation))

def annotations(node):
    "Of all parameters, and of what is returned"
    a = node.args
    every = [o.annotation for o in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if o]
    return [o for o in [*every, node.returns] if o is not None]

def quoted(method, cls):
    "Annotations that name the class become strings: inside of it the name is not there yet"
    lines = method.splitlines(keepends=True)
    mine = [o for o in annotations(ast.parse(method).body[0])
            if any(isinstance(n, ast.Name) and n.id == cls for n in ast.walk(o))]
    for o in sorted(mine, key=lambda o: (o.lineno, o.col_offset), reverse=True):
        if o.lineno != o.end_lineno:
            raise TangleError(f"{cls}: write the annotation {ast.unparse(o)} in one line")
        line = lines[o.lineno - 1].encode()
        lines[o.lineno - 1] = (line[:o.col_offset] + f"'{ast.unparse(o)}'".encode()
                               + line[o.end_col_offset:]).decode()
    return "".join(lines)

def decorator_of(source): return patched(ast.parse(source).body[0])

def used_at_once(node):
    "Names that a signature needs when the function is defined"
    parts = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults),
             *annotations(node)]
    return {n.id for o in parts for n in ast.walk(o) if isinstance(n, ast.Name)} - {"patch",
        ast.unparse(node.args.args[0].annotation)}

def bound(node):
    "Names that a statement binds"
    if isinstance(node, (*functions, ast.ClassDef)): return [] if patched(node) else [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(a.asname or a.name).split(".")[0] for a in node.names]
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]

def find_patches(tree, lines):
    "{class: its patches}, in order"
    found, cell, cells = {}, "", {}
    for i, line in enumerate(lines):
        if marker.match(line): cell = line
        cells[i] = cell
    for node in tree.body:
        if not (decorator := patched(node)): continue
        start = min(d.lineno for d in node.decorator_list) - 1
        source = "".join(lines[start:node.end_lineno])
        while lines[start - 1].startswith("#") and not marker.match(lines[start - 1]): start -= 1
        comment = "".join(lines[start:min(d.lineno for d in node.decorator_list) - 1])
        text = comment + as_method(source, node, decorator)
        found.setdefault(ast.unparse(node.args.args[0].annotation),
                         []).append(Patch(node, start, node.end_lineno, cells[start], text))
    return found

def without_import(text):
    "The text without the import of `patch`, if nothing uses it any more"
    if re.search(r"@patch\b", text): return text
    text = text.replace("\n\nfrom fastcore.basics import patch\n\n", "\n\n")   # alone between two groups
    text = re.sub(r"^from fastcore\.basics import patch\n", "", text, flags=re.M)
    return re.sub(r"^(from fastcore\.basics import .*?)(?:, patch\b|\bpatch, )", r"\1", text, flags=re.M)

def tangle(text):
    "The text of a module with each patch in its class"
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    when = {name: n.lineno for n in reversed(tree.body) for name in bound(n)}
    found = find_patches(tree, lines)
    for name, patches in found.items():
        for p in patches:
            if name not in classes:
                raise TangleError(f"{p.cell.strip()}: {p.node.name} is patched into {name}, which this "
                                  "module does not define")
            late = sorted(o for o in used_at_once(p.node) if when.get(o, 0) > classes[name].lineno)
            if late:
                raise TangleError(f"{p.cell.strip()}: the signature of {name}.{p.node.name} uses "
                                  f"{', '.join(late)}, defined after the class; define it before")
    cut = {i for patches in found.values() for p in patches for i in range(p.start, p.end)}
    ends = {classes[name].end_lineno - 1: name for name in found}
    out = []
    for i, line in enumerate(lines):
        if i in cut:
            while out and not out[-1].strip(): out.pop()   # one empty line stays, behind the cut
        else: out.append(line)
        if i not in ends: continue
        cell = ""
        for p in found[ends[i]]:
            out += ["\n", *(["    " + p.cell] if p.cell != cell else []),
                    *indented(p.text).splitlines(keepends=True)]
            cell = p.cell
    return without_import("".join(without_bare_markers(out)).rstrip("\n") + "\n")

def is_import(node): return isinstance(node, (ast.Import, ast.ImportFrom))

def import_line(node, names):
    "An import statement of these names, in lines of at most 100 letters"
    if isinstance(node, ast.Import): return "".join(f"import {o}\n" for o in names)
    start = f"from {'.' * node.level}{node.module or ''} import "
    if len(start + ", ".join(names)) <= 100: return start + ", ".join(names) + "\n"
    lines = ["    "]
    for name in names:
        if len(lines[-1] + name) > 98: lines.append("    ")
        lines[-1] += name + ", "
    return start + "(\n" + "\n".join(o.rstrip() for o in lines).rstrip(",") + ")\n"

def with_imports_first(text):
    "The text with the imports of all chapters where those of the first are: of Python, of others, of ours"
    nodes, lines, said = [n for n in ast.parse(text).body if is_import(n)], text.splitlines(keepends=True), {}
    for n in nodes:
        key = (n.level, n.module) if isinstance(n, ast.ImportFrom) else (0, "import " + ast.unparse(n))
        names = said.setdefault(key, (n, []))[1]
        names += [o for o in map(ast.unparse, n.names) if o not in names]
    groups = {"python": "", "others": "", "ours": ""}
    for n, names in sorted(said.values(), key=lambda o: isinstance(o[0], ast.ImportFrom)):
        module = n.names[0].name if isinstance(n, ast.Import) else n.module or ""
        whose = ("ours" if getattr(n, "level", 0) else "python"
                 if module.split(".")[0] in sys.stdlib_module_names else "others")
        same = [ast.unparse(o) for o in n.names] == names
        groups[whose] += "".join(lines[n.lineno - 1:n.end_lineno]) if same else import_line(n, names)
    cut = {i for n in nodes for i in range(n.lineno - 1, n.end_lineno)}
    last = max(i for i in cut if i
               < next((k for k, o in enumerate(lines) if k > min(cut) and marker.match(o)), len(lines)))
    cut |= {i for i in range(min(cut), last) if not lines[i].strip()}   # between two groups
    block = "\n".join(filter(None, groups.values()))
    return "".join(without_bare_markers([o for i, o in enumerate([*lines[:last], block, *lines[last + 1:]])
                                         if i == last or i not in cut]))

def without_bare_markers(lines):
    "Leave out the markers of cells of which nothing is left at module level"
    bare = False
    for i, line in enumerate(lines):
        after = next((o for o in lines[i + 1:] if o.strip()), "")
        if bare and not line.strip(): continue   # the empty line behind one
        bare = bool(marker.match(line)) and (bool(marker.match(after)) or not after)
        if not bare: yield line

def tangle_file(path):
    text = path.read_text(encoding="utf-8")
    chapters = {o.split()[2] for o in text.splitlines() if marker.match(o)} - {"auto"}
    if len(chapters) > 1: text = with_imports_first(text)
    if len(chapters) > 1 or "@patch" in text: path.write_text(tangle(text), encoding="utf-8")

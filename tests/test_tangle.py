"""The export folds patches into their classes: what it writes is whole, and means what the chapter meant."""
import ast, asyncio, importlib, json, re, textwrap
import pytest
from nbrun import cfg, notebooks, root
from tangle import TangleError, tangle

def module(*cells):
    "A module as nbdev writes it: a marker before each cell"
    return "\n".join(f"# %% ../nbs/x.ipynb #{i:x}\n{textwrap.dedent(o).strip()}\n"
                     for i, o in enumerate(cells, 10))

TOP = """
    from dataclasses import dataclass
    from fastcore.basics import patch
    """
A = """
    class A:
        "A class."
        def __init__(self): self.n = 1
    """

def run(*cells):
    "The text that comes out, and the names that it defines"
    text = tangle(module(TOP, *cells))
    exec(compile(text, "x.py", "exec"), names := {"__name__": "x"})
    return text, names

def test_a_function_becomes_a_method():
    text, names = run(A, "@patch\ndef twice(self: A, m: int = 2) -> int:\n    'Times'\n    return self.n * m",
                      "x = A().twice()")
    assert names["x"] == 2 and "twice" not in names and "patch" not in text
    assert "    # %% ../nbs/x.ipynb #c\n    def twice(self, m: int = 2) -> int:\n        'Times'\n" in text
    assert text.count("# %% ../nbs/x.ipynb #c") == 1 and tangle(text) == text

def test_properties_class_methods_coroutines_and_other_decorators():
    text, names = run(A, """
        @patch(as_prop=True)
        def more(self: A) -> int: return self.n + 1

        @patch(cls_method=True)
        def of(cls: A, n: int) -> A:
            made = cls()
            made.n = n
            return made

        @patch
        async def later(self: A): return self.n
        """, """
        def plus(f): return lambda self: f(self) + 10
        """.strip() + "\n" + "class B:\n    pass", """
        # why it is there
        @patch
        @plus
        def high(self: B): return 1
        """)
    a = names["A"].of(5)
    assert (a.more, asyncio.run(a.later()), names["B"]().high()) == (6, 5, 11)
    assert "    # why it is there\n    @plus\n    def high(self): return 1\n" in text and "-> 'A':" in text

def test_a_string_over_several_lines_keeps_its_lines_and_a_docstring_moves():
    text, names = run(A, '''
        @patch
        def c(self: A) -> str:
            """Source.

            Of something.
            """
            return """int f() {
          return 1;
        }"""
        ''')
    assert names["A"]().c() == "int f() {\n  return 1;\n}"
    assert '        """Source.\n\n        Of something.\n        """\n' in text

def test_what_else_a_cell_holds_stays_where_it_was():
    text, names = run(A, "def helper(): return 3\n\n@patch\ndef three(self: A): return helper()\n\nother = 4")
    assert names["A"]().three() == 3 and names["other"] == 4
    assert text.index("def three") < text.index("def helper") < text.index("other = 4")

def test_a_signature_may_not_look_ahead():
    with pytest.raises(TangleError, match=r"x.ipynb #c: the signature of A.f uses Late, defined after the "
                                          r"class; define it before"):
        run(A, "class Late: pass\n\n@patch\ndef f(self: A, x: Late): pass")
    # a string is read later, a body too
    run(A, "class Late: pass\n\n@patch\ndef f(self: A, x: 'Late'): return Late")

def test_only_classes_of_the_module_can_be_patched():
    with pytest.raises(TangleError, match="f is patched into Other, which this module does not define"):
        run("from collections import Counter as Other", "@patch\ndef f(self: Other): pass")

def test_a_module_without_patches_is_left_alone():
    text = module("import os", "x = 1")
    assert tangle(text) == text

def patches():
    "(module, class, function) of every patch in the chapters"
    for nb in notebooks():
        cells, home = json.loads(nb.read_text(encoding="utf-8"))["cells"], None
        for source in ("".join(c["source"]) for c in cells if c["cell_type"] == "code"):
            if m := re.match(r"#\|\s*default_exp\s+(\S+)", source): home = m[1]
            if not re.match(r"#\|\s*export", source): continue
            for n in ast.parse(source).body:
                if (isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
                        and any(ast.unparse(d).startswith("patch") for d in n.decorator_list)):
                    yield home, ast.unparse(n.args.args[0].annotation), n.name

def test_no_patch_is_left_in_the_package():
    assert not [p for p in (root/cfg["lib_path"]).rglob("*.py") if p.name != "_modidx.py"
                and "@patch" in p.read_text()]

def test_nothing_that_a_patch_leaves_behind():
    "fastcore's `patch` leaves `f = None` in the module; a folded method leaves nothing"
    modules = {}
    for home, cls, name in patches():
        if home not in modules:
            try: modules[home] = importlib.import_module(f"{cfg['lib_path']}.{home}")
            except ImportError as e: pytest.skip(str(e))
        assert name in vars(getattr(modules[home], cls)), (home, cls, name)
        assert vars(modules[home]).get(name, 0) is not None, f"{home}.{name} is None"
    assert len(modules) > 20

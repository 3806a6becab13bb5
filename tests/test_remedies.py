"""Every command that an error, `doctor`, the README or a guide names, found in the strings of the package and
in the prose: each is one that can be typed. Blocks of code in the guides are run by test_guides.py; here is
what stands in sentences."""
import ast, re, shlex, subprocess, sys
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from minisgl_lit import cli

root = Path(__file__).resolve().parents[1]
settings = ConfigParser(delimiters=["="])
settings.read(root/"settings.ini", encoding="utf-8")
asked = {k.removesuffix("_requirements"): [*map(Requirement, v.split())]
         for k, v in settings["DEFAULT"].items() if k.endswith("requirements")}

PROGRAM = r"pip install|minisgl-lit|apt-get install"    # of sentences in the package
TYPED = rf"{PROGRAM}|make|source|ray|python -m"          # and of what guides mark as code

def strings(tree):
    "Each string of a module that is no docstring, with `…` where a value will be"
    nodes = [*ast.walk(tree)]
    hidden = {id(o.value) for o in nodes if isinstance(o, ast.Expr)}
    hidden |= {id(v) for o in nodes if isinstance(o, ast.JoinedStr) for v in ast.walk(o) if v is not o}
    for o in nodes:
        if id(o) in hidden: continue
        if isinstance(o, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in o.values)
        elif isinstance(o, ast.Constant) and isinstance(o.value, str): yield o.value

def commands_in(text, programs):
    "Those that a sentence names; each goes on to a mark that no command has outside its quotes"
    return [o.strip() for o in re.findall(rf"(?<![\w./-])((?:{programs}) (?:'[^']*'|[^;:,`'()\n])*)", text)]

named = {*()}   # (where, command)
for path in sorted((root/"minisgl_lit").rglob("*.py")):
    source = path.read_text(encoding="utf-8")
    for text in strings(ast.parse(source)) if re.search(PROGRAM, source) else ():
        named |= {(path.stem, o) for o in commands_in(text, PROGRAM)}
for page in [*sorted((root/"docs").rglob("*.md")), root/"README.md", root/"CONTRIBUTING.md"]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    named |= {(page.stem, o) for code in re.findall(r"`([^`]+)`", prose)
              for o in commands_in(code.replace("\n", " "), rf"^(?:{TYPED})")}

def parser_of(words):
    "The parser of our command, with its flags, and what is left of the words"
    parser = cli.make_parser()
    while words and words[0] in parser.names: parser, words = parser.names[words[0]], words[1:]
    if parser.fill: parser.fill(parser)
    return parser, words

def is_asked(wanted):
    "Whether a list of settings.ini asks for a package, in these versions if any are named"
    same = [o for reqs in asked.values() for o in reqs if o.name == wanted.name]
    return any(not wanted.specifier or o.specifier == wanted.specifier for o in same)

FOREIGN = {"ninja", "nvidia-cublas", "nvidia-curand"}   # compile FlashInfer's kernels; see the long test

def test_there_are_some():
    assert (len(named) > 30 and {"grammar", "doctor", "ray_engine", "widgets",
                                 "chat"} <= {where for where, _ in named})

@pytest.mark.parametrize("where, command", sorted(named))
def test_command(where, command):
    "It could be typed: a command and flags of ours, a target of make, a package by its name in a registry"
    program, *words = shlex.split(command)
    if program == "minisgl-lit":
        if words[0] in ("COMMAND", "…", "…:") or words[0].startswith("--"): return
        parser, rest = parser_of(words)
        assert parser.prog != "minisgl-lit", f"{words[0]} is no command"
        known = {o for a in parser._actions for o in a.option_strings}
        assert {o.split("=")[0] for o in rest if o.startswith("--")} <= known
    elif program == "make":
        if (target := words[0]).startswith("NB"): return
        assert re.search(rf"^{target}:", (root/"Makefile").read_text(), re.M), f"no target {target}"
    elif program == "pip":
        for o in [o for o in words[1:] if o != "-e"]:
            if o.startswith("."): assert o == "." or o[2:-1] in asked, f"no extra {o}"
            elif "…" in o: assert any(fits.startswith(o.split("…")[0]) for fits in FOREIGN)
            else:
                assert (Requirement(o).name in FOREIGN
                    or is_asked(Requirement(o))), f"{o} is in no list of settings.ini, or with other versions"
    elif program == "python": assert words[0] == "-m" and find_spec(words[1])
    elif program == "source":
        assert words[0] == ".venv/bin/activate" and ".venv/bin/python" in (root/"Makefile").read_text()
    else: assert program in ("apt-get", "ray")

def test_no_command_installs_this_package_from_a_registry():
    "It is in none: only a folder or a wheel of it can be installed"
    for where, command in named:
        if command.startswith("pip"): assert not re.search(r"minisgl[-_]lit", command), where

def test_flags_that_errors_name_exist():
    known = {o for a in cli.make_parser()._actions for o in a.option_strings}
    known |= {o for name in cli.make_parser().names for a in parser_of([name])[0]._actions
              for o in a.option_strings}
    known |= {o for name in cli.benchmarks for a in parser_of(["bench", name])[0]._actions
              for o in a.option_strings}
    foreign = ("compiler", "library", "doctor", "ray_engine", "tensor_parallel")   # call other programs
    for path in sorted((root/"minisgl_lit").rglob("*.py")):
        if path.stem in foreign: continue
        source = path.read_text(encoding="utf-8")
    for text in strings(ast.parse(source)) if re.search(PROGRAM, source) else ():
            if text.startswith("--"): continue   # an argument, no sentence
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w-])", text):
                assert flag in known, f"{path.stem}: {flag}"

@pytest.mark.long
@pytest.mark.parametrize("wanted",
    sorted({o for _, command in named if command.startswith("pip") for o in shlex.split(command)[2:]
            if not o.startswith(("-", ".")) and "…" not in o} | FOREIGN))
def test_the_registry_has_it(wanted):
    """What pip is told to install can be had; skipped by name where there is no registry, or none of this
    machine's kind"""
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "-q", wanted],
                          text=True, capture_output=True)
    if done.returncode: pytest.skip(f"{wanted}: {done.stderr.strip().splitlines()[-1][-200:]}")

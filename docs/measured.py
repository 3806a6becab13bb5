"""The page of what a GPU has measured: from the JSON that `tests/gpu_check` writes, kept in `gpu/runs/` by
date, with notes and other engines beside it."""
import ast, json, re
from pathlib import Path
from pages import table

UNITS = {"us": "µs", "ms": "ms", "s": "s", "gb_s": "GB/s", "tflop_s": "TFLOP/s", "gib": "GiB"}

def value(name, x):
    "A figure as it is read; its name says the unit"
    if isinstance(x, str) or x is None: return "–" if x is None else escape(x)
    if isinstance(x, list):
        return ", ".join(" and ".join(value(name, p) for p in o) if isinstance(o, list) else value(name, o)
                         for o in x)
    if isinstance(x, bool): return "yes" if x else "no"
    if name.endswith("share") or name.startswith("share"): return f"{100*x:.1f} %"
    if isinstance(x, int): return f"{x:,}" if abs(x) > 9999 else str(x)
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"

def cell(text): return " ".join(text.replace("|", "\\|").replace("`", "'").split())

def escape(text): return cell(text).replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")

def words(name):
    "A figure's name with its unit in brackets"
    name, per_s = re.subn(r"_per_s$", "", name)
    unit = (next((u for u in sorted(UNITS, key=len, reverse=True) if name.endswith(f"_{u}") or name == u),
                 None) if not per_s else None)
    if unit: name = f"{name.removesuffix(unit).rstrip('_')} [{UNITS[unit]}]"
    return escape((name + " per second" * per_s).replace("_", " ").strip())

def leaves(name, x):
    "A figure that is made of others, as rows (name, figures): one for each that holds plain ones only"
    plain = {k: v for k, v in x.items() if not isinstance(v, dict)}
    return (([(name, plain)] if plain else []) + [o for k, v in x.items() if isinstance(v, dict)
        for o in leaves(f"{name}_{k}", v)])

def tables(figures):
    """Plain figures in one table; then those that are made of others, beside their like. A long list stands
    alone."""
    plain = {k: v for k, v in figures.items() if not isinstance(v, dict)}
    made = [o for k, v in figures.items() if isinstance(v, dict) for o in leaves(k, v)]
    if plain: yield table(["figure", ""], [[words(k), value(k, v)] for k, v in plain.items()])
    alike = {}
    for name, o in made: alike.setdefault(tuple(o) if len(o) <= 9 else name, []).append((name, o))
    for keys, rows in alike.items():
        if isinstance(keys, str):
            yield f"{words(keys)}:\n\n" + table(["", ""],
                [[f"`{cell(k)}`", value(keys, v)] for k, v in rows[0][1].items()])
        else:
            yield table(["", *map(words, keys)],
                        [[words(name), *(value(name if k.isdigit() else k, v) for k, v in o.items())]
                         for name, o in rows])

def check_steps(source):
    "The steps that `tests/gpu_check` has, in order, and what each says of itself"
    tree = ast.parse(source)
    docs = {o.name: " ".join((ast.get_docstring(o) or "").split())
            for o in tree.body if isinstance(o, ast.FunctionDef)}
    [limits] = [o.value for o in tree.body if isinstance(o, ast.Assign)
                and ast.unparse(o.targets[0]) == "LIMITS"]
    return {o.arg: docs[o.arg] for o in limits.keywords}

def newest(runs):
    """Of each step the newest run that has it, by date and name; one that failed only if none did not. In the
    order of the newest run."""
    found = {}
    for date, told in sorted(runs.items(), reverse=True):
        for name, step in told["steps"].items():
            if name not in found or step["ok"] > found[name][1]["ok"]: found[name] = date, step
    return found

def of(found, step, name):
    "One figure, if it is there"
    return found.get(step, ("", dict(figures={})))[1]["figures"].get(name)

def headline(found, beside):
    "What people ask first"
    rows, run, limit = ([], of(found, "bench256", "overlap_greedy"),
                        of(found, "bench256", "limit_tokens_per_s"))
    if run:
        rows.append(["256 requests of 100 to 1,024 tokens in and out, greedy",
                     f"{run['tokens_per_s']:,.0f} output tokens a second"
                     + (f", {100*run['tokens_per_s']/limit:.0f} % of the {limit:,.0f} that this card could do"
                        if limit else "")])
    rows += [[f"the same by {o['engine']}", " and ".join(f"{x:,.0f}" for x in o["tokens_per_s"])]
             for o in beside]
    errors = [v for k, v in found.get("kernels", ("", dict(figures={})))[1]["figures"].items()
              if k.endswith("_error")]
    right = [o for o in errors if isinstance(o, float)]    # of a kernel that cannot be used it is a sentence
    if right:
        rows.append([f"{len(errors)} kernels against torch",
                     f"{'all' if right == errors else len(right)} agree; the largest error is "
                     f"{max(right):.2g} of a number above 1"])
    if tokens := of(found, "parity", "float32_tokens"):
        rows.append(["greedy, float32, against transformers", f"{tokens} tokens, all equal"])
    same = {k: v for k, v in found.get("equality", ("", dict(figures={})))[1]["figures"].items()
            if k.startswith("same_")}
    if same:
        rows.append(["graphs and overlap, on and off", "the same tokens" if min(same.values()) == 1
                     else f"{100*min(same.values()):.0f} % of the answers are the same"])
    if passed := of(found, "tests", "pytest"): rows.append(["tests that need a GPU", passed])
    return table(["asked", "measured"], rows) if rows else "Nothing has run yet."

def section(name, doc, date, step, notes):
    "A step: what it is, how it went, its figures"
    parts = [f"## {name}", doc, f"Run {date}, {step['seconds']:.0f} s with its start."]
    if not step["ok"]: parts.append(f"**Not as it should be:** {escape(step['error'])}")
    if note := notes.get(date, {}).get(name): parts.append(note)
    return "\n\n".join([*filter(None, parts), *tables(step["figures"])])

def page(runs, notes, beside, steps):
    "All of it"
    found = newest(runs)
    dates = {date for date, _ in found.values()}
    card = " ".join(str(of(found, "machine", o) or "") for o in ("gpu", "arch")).strip() or "a GPU"
    with_what = ", ".join(f"{what} {of(found, 'machine', key)}" for what, key in (("torch", "torch"),
        ("FlashInfer", "flashinfer"), ("Python", "python")) if of(found, "machine", key))
    missing = [f"* `{o}`: {doc}" for o, doc in steps.items() if o not in found]
    about = [f"* Run {date}: {o['package']}. {o.get('note', '')}".rstrip()
             for date, o in sorted(notes.items()) if date in dates and "package" in o]
    return ("\n\n".join([
        "# A GPU, measured",
        f"What `tests/gpu_check` found on one card, {card}, with {with_what or 'what was there'}. It proves "
        "and times the GPU engine step by step, each in a process of its own, and writes one JSON; "
        "this page is made from the newest of those in `docs/gpu/runs/`. [The guide](../guides/gpu.md) says "
        "how to use a GPU.",
        headline(found, beside), *("\n".join(o) for o in [about] if o),
        *(f"Beside ours: {o['engine']}, {o['how']}. {o['work']}, {o['output_tokens']:,} output tokens, on an "
          f"{o['card']}." for o in beside),
        *(["## What no card has run yet", "\n".join(missing)] if missing else []),
        *(section(name, steps.get(name, ""), date, step, notes) for name, (date, step) in found.items())])
            + "\n")

def read(docs):
    "The page, from what lies in docs/gpu and from the program's own source"
    runs = {o.stem: json.loads(o.read_text(encoding="utf-8")) for o in (docs/"gpu"/"runs").glob("*.json")}
    notes, beside = (json.loads((docs/"gpu"/name).read_text(encoding="utf-8"))
                     for name in ("notes.json", "beside.json"))
    return page(runs, notes, beside,
                check_steps((docs.parent/"tests"/"gpu_check.py").read_text(encoding="utf-8")))

if __name__ == "__main__": print(read(Path(__file__).parent))

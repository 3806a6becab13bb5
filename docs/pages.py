"""Pages made from what the project already says: the command line from its own parser, the benchmarks from
`peers.json`, a GPU's figures from `gpu/`, the served models from their registries."""
import argparse, json

def cell(text): return " ".join((text or "").replace("|", "\\|").split())

def table(head, rows): return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"]*len(head), *rows])

def flags(parser):
    "Options of a command, one row each, by group"
    for group in parser._action_groups:
        rows = []
        for a in group._group_actions:
            if isinstance(a, (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)):
                continue
            value = a.metavar or ("" if a.nargs == 0 else a.dest.upper())
            name = ", ".join(a.option_strings) or value
            rows.append([f"`{name}`" if not a.option_strings or not value else f"`{name} {value}`",
                         cell(a.help)])
        if rows: yield group.title, rows

def command(name, parser, depth, said):
    "The section of one command, and those of its own commands; rows in `said` stand on the page already"
    if fill := getattr(parser, "fill", None): fill(parser)
    parser.show_all()
    first, _, rest = (parser.description or "").partition("\n\n")
    parts = [f"{'#'*depth} minisgl-lit {name}", cell(first)]
    if rest.strip(): parts.append(cell(rest))
    if parser.epilog and "examples:" in parser.epilog:
        parts.append("```text\n" + "\n".join(o.strip() for o in parser.epilog.splitlines()[1:]) + "\n```")
    above = []
    for title, rows in flags(parser):
        if new := [o for o in rows if tuple(o) not in said]: parts.append(table([title, ""], new))
        above += [o[0].split(" ")[0].strip("`") for o in rows if tuple(o) in said]
        said |= {tuple(o) for o in rows}
    if above: parts.append("Also, as above: " + ", ".join(f"`{o}`" for o in above) + ".")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += [command(f"{name} {k}", p, depth + 1, said) for k, p in action.choices.items()]
    return "\n\n".join(parts)

def cli(parser):
    "The reference of the command line"
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    intro = ("# The command line\n\nMade from the program itself: `minisgl-lit COMMAND --help-all` says the "
             "same. A flag of the settings is a field of "
             "{py:obj}`EngineConfig <minisgl_lit.config.EngineConfig>` or {py:obj}`ServerConfig "
             "<minisgl_lit.server.config.ServerConfig>` with dashes, so `LLM(page_size=32)`, "
             "`serve(page_size=32)` and `--page-size 32` are one thing. With no command, the program serves.")
    said = set()
    return "\n\n".join([intro, *(command(name, p, 2, said) for name, p in commands.choices.items())]) + "\n"

def benchmarks(peers):
    "What was measured, and how to measure it again"
    engines = [k for k in next(iter(peers["workloads"].values()))
               if k not in ("requests", "limit", "peak_rss_mb", "command")]
    def rate(x): return "–" if x is None else f"{x:,.1f}" if x >= 10 else f"{x:.2f}"
    def share(o, e): return rate(o[e]) + (f" ({o[e]/o['limit']:.2f})" if o[e] and o["limit"] else "")
    rows = [[f"`{k}`: {o['requests']}", rate(o["limit"]), *(share(o, e) for e in engines)]
            for k, o in peers["workloads"].items()]
    commands = "\n".join(o["command"] for o in peers["workloads"].values() if o["command"])
    unit, start = cell(peers["unit"]), peers["start"]
    return (f"""# Benchmarks

A speed alone says little: it needs the machine, the work, and what would have been possible. So every benchmark here measures the machine's memory and arithmetic in the same run and prints the least time that prefill and decode could take in any engine. [The chapter on benchmarks](../nbs/tools/bench.ipynb) builds them, [limits](../nbs/tools/roofline.ipynb) says what they are measured against, and [load](../nbs/tools/load_generator.ipynb) sends a server requests as its callers do.

## Beside other engines

{unit[0].upper() + unit[1:]}. In brackets: the share of the limit.

{table(["workload", "limit", *engines], rows)}

* Model: {peers["model"]}.
* Machine: {peers["machine"]}.
* Date: {peers["date"]}.
* Start: `{start["command"]}` ends {" and ".join(map(str, start["seconds"]))} s after it was typed, {start["first"]} s the first time, with the weights in memory already.

## Measure it yourself

Ours, with the limits of your machine beside it. `CHECKPOINT` is a folder with a Qwen3-0.6B, or the hub's name of one.

```text
{commands}
```

What else there is:

```text
minisgl-lit bench --help                     # all of them, one line each
minisgl-lit bench scheduler                  # the scheduler's own time for a step
minisgl-lit bench serving --url http://127.0.0.1:1919 --rate 8
```

The last one asks any server that speaks OpenAI's API; so it can be pointed at another engine, with the same arrivals.

## Read them with care

A machine shared with other tenants runs at two speeds, a third apart, for seconds or minutes at a time. Measure the engines in turn, in one session, three times or more, and compare within a round. With another busy process on one of two cores, two threads that wait for each other can become many times slower, ours and those of other engines.
""")   # noqa: E501

def models(found):
    "What is served, as `minisgl-lit models --json` has it; the end of the guide which models"
    from minisgl_lit.tools.models import words
    def code(names): return ", ".join(f"`{o}`" for o in names)
    def where(values): return ", ".join(f"`{o}` ({' and '.join(on)})" for o, on in values.items())
    families = [[f"`{name}`", cell(words(o["differs"], [])), code(o["edits"])]
                for name, o in found["families"].items()]
    edits = [[f"`{name}`", cell(what)] for name, what in found["edits"].items()]
    rows = [[name.replace("_", " "), code(names)] for name, names in
            {**found["weights"], **found["positions"]}.items()]
    rows += [[f"`--{name.replace('_', '-')}`", where(values)] for name, values in found["settings"].items()]
    by = [[f"{device}: {what}", code(names)] for device, some in found["computed_by"].items()
          for what, names in some.items()]
    parts = {"Families": table(["architecture", "a Llama, but for", "edits while it loads"], families),
             "Edits": table(["edit", ""], edits), "Formats": table(["", ""], rows),
             "What computes": "Where all kernels are at hand; what there is not, torch computes.\n\n"
                              + table(["", "operations"], by)}
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items()) + "\n"

def write(docs, nbs):
    "Write them, if they changed"
    import measured    # which makes tables, too
    from minisgl_lit.cli import make_parser
    from minisgl_lit.tools.models import served
    peers = json.loads((nbs/"tools/peers.json").read_text(encoding="utf-8"))
    for name, text in {"cli.md": cli(make_parser()), "benchmarks.md": benchmarks(peers),
                       "gpu-measured.md": measured.read(docs), "models.md": models(served())}.items():
        path = docs/"made"/name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

"""Every block of the how-to guides is run, and what it prints must be what the guide shows.

`…` in a shown output stands for anything. Blocks of a page run in order, Python in one namespace, commands in
a folder where `./my-model` is a copy of the embedded checkpoint; `http://127.0.0.1:1919` becomes a server of
ours. A block whose first line is `# name.py` or the like is a file of that folder. What a page registers is
gone after it. Commands that cannot run here (`why_not`) are read instead: by the parser that would read them.
If there is no time, those of ours that end by themselves are called in this process, not by a shell.
"""
import contextlib, io, json, os, re, shlex, shutil, signal, subprocess, sys
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path
from urllib.request import urlopen

import pytest, warm, yaml

from minisgl_lit import cli, cluster, serve
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.config_sources import from_args
from minisgl_lit.core.registry import Registry
from minisgl_lit.formats.hub import embedded_path

root = Path(__file__).resolve().parents[1]
URL, guides = "http://127.0.0.1:1919", sorted((root/"docs"/"guides").glob("*.md"))

def blocks(page):
    "(language, text) of each fenced block"
    return re.findall(r"^```([^\s]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)

def commands(body):
    "(command, output shown) of each line that begins with `$ `; a command goes on after a backslash"
    said = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.M)
    return [(re.sub(r"\\\n *", "", command), shown.strip()) for command, shown in said]

def why_not(command):
    "What keeps a command from being run by a test; empty if nothing does"
    program, *words = shlex.split(command)
    if program in ("podman", "sudo", "journalctl", "pip", "ray", "serve"):
        return "it would change the machine"
    if any(o.startswith("Qwen/") for o in words): return "it would fetch a model"
    return ""

not_run = [(page.stem, command, why_not(command)) for page in guides
           for kind, body in blocks(page) if kind == "console"
           for command, _ in commands(body) if why_not(command)]

def read(command, config=ServerConfig):
    "A command line of ours as its parser reads it; a wrong one exits, or is a `ValueError`"
    args = cli.make_parser().parse_args(command[1:])
    return from_args(args.config if args.command == "bench" else config, args)

def shown(expected):
    "What an output must match; runs of blanks are one"
    lines = [re.sub(r" +", " ", o) for o in expected.splitlines()]
    return re.compile(r"(.|\n)*".join(r"\n".join(map(re.escape, lines)).split(re.escape("…"))))

def check(expected, output, what):
    said = re.sub(r" +", " ", output.strip())
    assert not expected or shown(expected.strip()).fullmatch(said), (
        f"{what}\nprinted\n{said}\nand not\n{expected}")

@pytest.fixture(scope="module")
def shared():
    with serve(port=0, num_pages=512, max_running_req=16) as server: yield server

@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(embedded_path(), tmp_path/"my-model")
    shutil.copy(root/"tests"/"data"/"embedded-Q4_K_M.gguf", tmp_path/"my-model.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)   # as if Python had been started there
    return tmp_path

@pytest.fixture
def registries():
    "All as they were, whatever a page adds"
    import minisgl_lit.runtime   # noqa: F401 (registers ours before a page does)
    known = {id(o): o for m in [*sys.modules.values()] if m.__name__.startswith("minisgl_lit")
             for o in vars(m).values() if isinstance(o, Registry)}
    for o in known.values(): o.knows("")   # imports what is announced, which registers only once
    before = [(o, {**o}) for o in known.values()]
    yield
    for o, things in before:
        o.clear()
        o.update(things)

def run_by_shell(command):
    "The exit code of a command, and what it prints"
    done = subprocess.run(command, shell=True, text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout + done.stderr

def run_here(command):
    "The same, without the seconds that a program of ours takes to start"
    program, *words = shlex.split(command)
    if program != "minisgl-lit" or {"|", ">", "&&", "&"} & {*words}: return run_by_shell(command)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try: code = cli.main(words)
        except SystemExit as e: code = e.code
    return code, out.getvalue() + err.getvalue()

class Page:
    "A guide while it is followed: its names, and the server that it has started, if any."
    def __init__(self, shared, by_shell):
        self.shared, self.url, self.server, self.names = shared, shared.url, None, {}
        self.by_shell, self.run = by_shell, run_by_shell if by_shell else run_here

    def python(self, source):
        "What it prints"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(source.replace(URL, self.url), self.names)
        return said.getvalue()

    def console(self, command, expected):
        if command == "minisgl-lit serve": said = f"{self.shared.model} is served on {URL}"
        elif "minisgl-lit serve" in command and " served on " in expected: said = self.start(command)
        else:
            # one that is refused, whoever has the usual port
            own = " --port 0" * ("minisgl-lit serve" in command)
            code, said = self.run(command.replace(URL, self.url) + own)
            assert code == 2 * expected.startswith("minisgl-lit "), f"{command}\n{said}"
        check(expected, said.replace(self.url, URL), command)

    def start(self, command):
        "A server that serves the rest of the page; its line"
        self.end()
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.by_shell: self.server = subprocess.Popen(f"exec env {command} --port 0", shell=True, **how)
        else:
            settings, words = command.split("minisgl-lit ")
            own = dict(o.split("=") for o in shlex.split(settings))
            self.server = warm.Popen([sys.executable, "-m", "minisgl_lit", *shlex.split(words),
                                      "--port", "0"], env=os.environ | own, **how)
        line = self.server.stdout.readline()
        self.url = line.split()[-1]
        return line

    def end(self):
        "Its server drains when it is told to, and leaves with code 0"
        if self.server is None: return
        self.server.send_signal(signal.SIGTERM)
        try: assert self.server.wait(60) == 0
        finally:
            self.server.kill()   # one that does not leave is no reason to wait for ever
            self.server.__exit__(None, None, None)

def follow(page, it):
    "All blocks of a page, in order"
    printed = None   # of the Python block just before
    for kind, body in blocks(page):
        if kind == "text" and printed is not None: check(body, printed, page.stem)
        file = re.match(r"# (\w+\.\w+)\n", body) if kind in ("python", "toml") else None
        if file: Path(file[1]).write_text(body)
        printed = it.python(body) if kind == "python" and not file else None
        if kind == "console":
            for command, expected in commands(body):
                if not why_not(command): it.console(command, expected)

@pytest.mark.parametrize("page", guides, ids=lambda o: o.stem)
def test_guide(page, folder, shared, registries, long):
    if "$ curl" in page.read_text() and not shutil.which("curl"): pytest.skip("there is no curl here")
    if page.stem == "notebooks": pytest.importorskip("ipywidgets", reason="the extra viz is not installed")
    if page.stem == "many-machines": pytest.importorskip("ray", reason="the extra ray is not installed")
    it = Page(shared, by_shell=long)
    try: follow(page, it)
    finally: it.end()

@pytest.mark.parametrize("page, command, reason", not_run, ids=[": ".join(o) for o in not_run])
def test_commands_that_are_only_read(page, command, reason):
    "Their flags are ours, with values that we accept"
    program, *words = shlex.split(command)
    if program == "minisgl-lit": read([program, *words])
    elif words[0] == "run": read(["minisgl-lit", "serve", *words[words.index("minisgl_lit") + 1:]])
    elif program == "pip":
        if extra := re.search(r"\[(\w+)\]", command):
            assert f"{extra[1]}_requirements" in (root/"settings.ini").read_text()
    elif program in ("ray", "serve"):
        pytest.importorskip("ray", reason="the extra ray is not installed")
        told = subprocess.run([Path(sys.executable).parent/program, words[0], "--help"], text=True,
                              capture_output=True)
        assert told.returncode == 0 and all(o in told.stdout for o in words if o.startswith("--"))
    else: assert "minisgl" in command

def test_every_block_is_of_a_kind_that_is_checked():
    kinds = {kind for page in guides for kind, _ in blocks(page)}
    assert kinds - {"{toctree}", "{include}"} == {"python", "console", "text", "toml", "ini", "nginx", "yaml"}

def one(name, kind): return next(body for k, body in blocks(root/"docs"/"guides"/name) if k == kind)

def test_unit_file():
    "systemd waits longer than the server drains, and starts what our parser understands"
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(one("deploy.md", "ini"))
    service = unit["Service"]
    config = read(["minisgl-lit", *shlex.split(service["ExecStart"])[1:]])
    assert config.api_key is None and "MINISGL_LIT_API_KEY=" in (root/"docs/guides/deploy.md").read_text()
    assert service["EnvironmentFile"] and int(service["TimeoutStopSec"]) > config.drain_seconds
    assert service["Environment"] == f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}"

def test_kubernetes(shared):
    "Its flags are ours, it waits longer than the server drains, and its probes ask for what is served"
    deployment, service = yaml.safe_load_all(one("deploy.md", "yaml"))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    config = read(["minisgl-lit", "serve", *container["args"]])
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds
    assert (container["env"][0]["name"] == "MINISGL_LIT_API_KEY"
            and container["ports"][0] == dict(name="http", containerPort=config.port))
    assert (service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
            == deployment["spec"]["template"]["metadata"]["labels"])
    for probe in "startupProbe", "livenessProbe":
        assert urlopen(shared.url + container[probe]["httpGet"]["path"]).status == 200
    *_, source = container["readinessProbe"]["exec"]["command"]
    asked = subprocess.run([sys.executable, "-c", source.replace(URL, shared.url)],
                           env=os.environ | dict(MINISGL_LIT_API_KEY="x"), timeout=60)
    assert asked.returncode == 0 and shared.url != URL in source

def test_files_for_ray_serve():
    """Their application, its settings, its deployments and its policy are ours; tests/test_ray_serve.py
    deploys the first"""
    file, scaled = (yaml.safe_load(o) for k, o in blocks(root/"docs/guides/many-machines.md") if k == "yaml")
    [application] = file["applications"]
    module, name = application["import_path"].split(":")
    assert (module, getattr(cluster, name)) == (cluster.__name__, cluster.app)
    assert cluster.config_of(cluster.deployment_settings(application["args"])).replicas == 2
    assert ([getattr(cluster, o["name"]) for o in application["deployments"]]
            == [cluster.Ingress, cluster.EngineReplica])
    policy = scaled["autoscaling_config"]["policy"]
    assert policy["policy_function"] == f"{cluster.__name__}:{cluster.ByWaitingTokens.__name__}"
    assert vars(cluster.ByWaitingTokens(**policy["policy_kwargs"])) == vars(cluster.ByWaitingTokens())

def test_proxy():
    text = one("deploy.md", "nginx")
    assert f"proxy_pass {URL};" in text and "proxy_buffering off;" in text
    assert (f"client_max_body_size {ServerConfig().max_body_mb}m;" in text
            and text.count("{") == text.count("}") == 1)

def test_scrape_config():
    job, = yaml.safe_load(one("monitor.md", "yaml"))["scrape_configs"]
    assert (job["metrics_path"] == "/metrics"
            and job["static_configs"][0]["targets"] == [URL.removeprefix("http://")])

def test_metrics_are_all_named_and_none_is_invented(shared):
    from prometheus_client.parser import text_string_to_metric_families
    told = {o.name + "_total" * (o.type == "counter"): o.type
            for o in text_string_to_metric_families(urlopen(shared.url + "/metrics").read().decode())}
    told.pop("minisgl:num_aborted_requests_created")   # when counting began, which the library adds
    for other in ("vllm:num_requests_running", "vllm:e2e_request_latency_seconds", "sglang:token_usage",
                  "process_cpu_seconds_total"):
        assert other in told
    told = {name: kind for name, kind in told.items() if name.startswith("minisgl:")}
    table = dict(re.findall(r"^\| `(minisgl:\w+)` \| (\w+) \|", (root/"docs/guides/monitor.md").read_text(),
                            re.M))
    assert table == told

def test_the_dashboard_shows_metrics_that_there_are(shared):
    told = urlopen(shared.url + "/metrics").read().decode()
    panels = json.loads((root/"docs"/"grafana.json").read_text())["panels"]
    used = {name for p in panels for t in p["targets"]
            for name in re.findall(r"(?:minisgl:|process_)\w+", t["expr"])}
    assert len(panels) == 9 and len(used) >= 14
    for name in used: assert f"\n{name}{{" in told or f"\n{name} " in told, name

def test_flags_and_defaults_in_the_prose():
    "Each flag that is named exists, and each default in a table is the default"
    known, defaults = (set(),
        {"--" + f.name.replace("_", "-"): str(f.default).lower() for f in fields(ServerConfig)})
    def flags(parser):
        if parser.fill: parser.fill(parser)
        known.update(o for a in parser._actions for o in a.option_strings)
        for o in parser.names.values(): flags(o)
    flags(cli.make_parser())
    for page in guides:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        if page.stem == "coming-from":   # other engines' flags stand behind ours: | what | here | ...
            prose = "\n".join(row.split(" | ")[1] if row.startswith("| ") else row
                              for row in prose.splitlines())
        for flag in re.findall(r"`(--[a-z-]+)", prose): assert flag in known, f"{page.stem}: {flag}"
        for flag, value in re.findall(r"^\| `(--[a-z-]+)` \| `([^`]+)` \|", prose, re.M):
            assert defaults[flag] == value, f"{page.stem}: {flag}"

def test_links_and_the_list_of_guides():
    for page in guides:
        for where in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            if where.startswith("../made/"): continue   # `make docs` makes it, and fails if it does not
            target = (root/where.removeprefix("../")) if where.startswith("../nbs/") else page.parent/where
            assert target.exists(), f"{page.stem}: {where}"
    listed = one("index.md", "{toctree}").split("\n\n")[1].split()
    assert sorted([*listed, "index"]) == [o.stem for o in guides]

def test_routes_in_the_prose(shared):
    "Each route that is named is served"
    # which a server of one model has not
    of_several = {"/models/load", "/models/unload", "/api/pull", "/api/copy", "/api/delete"}
    known = {"/", "/v1", *of_several, *json.load(urlopen(shared.url + "/openapi.json"))["paths"]}
    for page in guides:
        for route in re.findall(r"`(/[a-z0-9_/]*)`", page.read_text(encoding="utf-8")):
            assert route in known, f"{page.stem}: {route}"

# What README and CONTRIBUTING tell to type. (Their Python is the notebook `index`, which is run and compared
# like all others.)
told = [command for name in ("README.md", "CONTRIBUTING.md")
        for kind, body in blocks(root/name) if kind == "bash"
        for command in re.sub(r"\\\n *", "", re.sub(r" +#.*", "", body)).splitlines()]

def test_every_command_of_the_readme_is_checked():
    assert ({o.split()[0] for o in told} == {"make", "curl", "$EDITOR"}
            and {"make serve", "make test"} <= {*told})

@pytest.mark.parametrize("command", [o for o in told if o.startswith("make ")])
def test_make_knows(command):
    "Every target is there, and could be made"
    done = subprocess.run(shlex.split(command) + ["-n"], cwd=root, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout, done.stderr

def test_the_first_install_says_what_it_fetches(tmp_path):
    """In a checkout without .venv: a line before, and one for each large file, as pip names it; none of it on
    standard output"""
    for name in ("Makefile", "settings.ini", "setup.py"): shutil.copy(root/name, tmp_path)
    (tmp_path/".venv"/"bin").mkdir(parents=True)
    said = ["Looking in indexes: x", "Collecting torch",
        "  Downloading torch-2.13-cp311.whl.metadata (29 kB)", "Downloading torch-2.13-cp311.whl (899.8 MB)",
            "  Using cached numpy-2.whl (16.9 MB)", "Downloading idna-3.whl (71 kB)",
            "Successfully installed torch"]
    fake = tmp_path/".venv"/"bin"/"python"
    fake.write_text("#!/bin/sh\ncat <<'E'\n" + "\n".join(said) + "\nE\n")
    fake.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", ".venv/.core"], cwd=tmp_path, env=env, text=True, capture_output=True)
    first, *files = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, "") and "torch" in first and "README" in first
    assert files == ["  Downloading torch-2.13-cp311.whl, 899.8 MB", "  Using cached numpy-2.whl, 16.9 MB"]
    fake.write_text("#!/bin/sh\nexit 3\n")   # an install that fails is none
    (tmp_path/".venv"/".core").unlink()
    assert (subprocess.run(["make", ".venv/.core"], cwd=tmp_path, env=env, capture_output=True).returncode
            and not (tmp_path/".venv"/".core").exists())

@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl here")
@pytest.mark.parametrize("command", [o for o in told if o.startswith("curl ")])
def test_first_chat(command, shared):
    done = subprocess.run(command.replace(URL, shared.url), shell=True, text=True, capture_output=True,
                          timeout=60)
    answer, = json.loads(done.stdout)["choices"]
    assert answer["finish_reason"] == "stop" and "pages" in answer["message"]["content"]

@pytest.mark.skipif(not (root/".venv"/".core").exists(), reason="needs .venv, which make installs")
def test_make_serve():
    "The first command, as people type it: it serves, and Ctrl-C ends all of it"
    # as if no other make had started us
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    # what runs the tests is installed
    p = subprocess.Popen(["make", "-o", ".venv/.core", "serve", "PORT=0"], cwd=root, env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    with p:
        url = p.stdout.readline().split()[-1]
        assert (json.load(urlopen(url + "/v1/models"))["data"][0]["id"] == "embedded"
                and "<title>" in urlopen(url).read().decode())
        os.killpg(p.pid, signal.SIGINT)
        p.wait(60)
    with pytest.raises(OSError): urlopen(url)
    with pytest.raises(ProcessLookupError): os.killpg(p.pid, 0)

"""What those need who carry on: the container, the hooks before a commit, the workflows and templates of the
forge."""
import json, re, shlex, subprocess, threading
from configparser import ConfigParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest, yaml
from fnmatch import fnmatch

from minisgl_lit import cli
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.config_sources import from_args

root = Path(__file__).resolve().parents[1]
ini = ConfigParser(delimiters=["="])
ini.read(root/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

def tracked(): return subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True).split("\0")[:-1]
def targets(): return set(re.findall(r"^([a-z-]+):", (root/"Makefile").read_text(), re.M))
def load(path): return yaml.safe_load((root/path).read_text(encoding="utf-8"))

# the containers
FILES = "Containerfile", "Containerfile.cuda"
both = pytest.mark.parametrize("file", FILES)

def instructions(name="Containerfile"):
    "(instruction, the rest) of each, continued lines joined"
    text = re.sub(r"\\\n\s*", " ", (root/name).read_text())
    return [tuple(o.split(None, 1)) for o in text.splitlines() if o.strip() and not o.startswith("#")]

def argument(name, file=FILES[0]): return [o for i, o in instructions(file) if i == name]

def into_the_image():
    "What of the checkout the builder is given"
    allowed = [o[1:] for o in (root/".dockerignore").read_text().split("\n") if o.startswith("!")]
    return [o for o in tracked() if any(o == a or o.startswith(a + "/") for a in allowed)]

@both
def test_containerfile_has_only_instructions(file):
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    names = [i for i, _ in instructions(file)]
    assert {*names} <= known and next(i for i in names if i != "ARG") == "FROM"

def test_both_images_start_and_check_the_same():
    for name in ("ENTRYPOINT", "EXPOSE", "USER"): assert argument(name) == argument(name, FILES[1])
    assert ([o.split("CMD")[1] for f in FILES for o in argument("HEALTHCHECK", f)]
            == [argument("HEALTHCHECK")[0].split("CMD")[1]] * 2)

def test_extras_of_the_images_exist():
    for file in FILES:
        extras = [name for o in argument("RUN", file) for found in re.findall(r"\.whl\)\[([a-z,]+)\]", o)
                  for name in found.split(",")]
        assert all(f"{o}_requirements" in cfg for o in extras), extras

def test_image_has_the_python_of_the_settings():
    assert [o.split()[0] for o in argument("FROM")] == [f"python:{cfg['min_python']}-slim"]*2

@both
def test_what_is_copied_exists(file):
    given = into_the_image()
    for o in argument("COPY", file):
        *sources, _ = shlex.split(o)
        if sources[0] == "--from=build": continue
        for s in sources: assert any(g == s or g.startswith(s + "/") for g in given), s

def test_the_builder_is_given_the_whole_package_and_nothing_else():
    given = into_the_image()
    assert {o for o in tracked() if o.startswith("minisgl_lit/")} <= set(given)
    assert not any(fnmatch(o, p) for o in given for p in ("nbs/*", "tests/*", "docs/*", ".*"))
    assert (root/".dockerignore").read_text().split("\n")[1] == "*"

@both
def test_shell_lines_of_the_image_parse(file):
    for o in argument("RUN", file): subprocess.run(["bash", "-nc", o], check=True)

@both
def test_kernels_can_be_compiled_in_it_by_somebody_who_is_not_root(file):
    steps = instructions(file)
    runs = [i for i, o in enumerate(steps) if o[0] == "RUN" and " gcc " in o[1]]
    last_stage = max(i for i, o in enumerate(steps) if o[0] == "FROM")
    assert runs and runs[-1] > last_stage, "the compiler belongs into the image that runs"
    [user] = argument("USER", file)
    made = next(o for i, o in steps if i == "RUN" and "useradd" in o)
    assert user != "root" and any("useradd" in o and o.split()[-1] == user for o in made.split("&&"))
    assert steps.index(("USER", user)) > steps.index(("RUN", made))
    assert (f"install -d -o {user} -g {user} /home/{user}/.cache"
            in made), "a volume there belongs to who owns the folder"

def test_what_the_container_starts_is_understood():
    command = json.loads(argument("ENTRYPOINT")[0])
    scripts = dict(o.split(" = ") for o in cfg["console_scripts"].strip().split("\n"))
    assert command[0] in scripts
    args, unknown = cli.make_parser().parse_known_args([*command[1:], "--model", "/model"])
    config = from_args(ServerConfig, args)
    assert (not unknown
            and (config.host, config.port, config.model) == ("0.0.0.0", ServerConfig().port, "/model"))
    assert argument("EXPOSE") == [str(config.port)]

@pytest.mark.parametrize("status", [200, 503])
def test_who_is_not_healthy_fails_the_check(status):
    class Health(BaseHTTPRequestHandler):
        def log_message(self, *args): pass
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
    asked, port = [], str(ServerConfig().port)
    python, flag, code = json.loads(argument("HEALTHCHECK")[0].split("CMD")[1])
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        check = compile(code.replace(f":{port}/", f":{server.server_port}/"), "healthcheck", "exec")
        if status == 200: exec(check, {})
        else:
            with pytest.raises(HTTPError): exec(check, {})
        thread.join()
    assert (python, flag, asked) == ("python", "-c", ["/health"]) and f":{port}/" in code

# the hooks before a commit

def hooks(): return [h for o in load(".pre-commit-config.yaml")["repos"] for h in o["hooks"]]

def test_hooks_need_no_network():
    assert {o["repo"] for o in load(".pre-commit-config.yaml")["repos"]} == {"local"}
    assert {h["language"] for h in hooks()} == {"system"}

@pytest.mark.parametrize("hook", hooks(), ids=lambda h: h["id"])
def test_a_hook_runs_something_that_exists(hook):
    program, *rest = shlex.split(hook["entry"])
    assert set(hook) <= {"id", "name", "language", "entry", "files", "types", "pass_filenames"}
    if program == "make": assert rest[0] == "-s" and set(rest[1:]) <= targets()
    else: assert (root/program).exists()
    if "files" in hook: assert any(re.search(hook["files"], o) for o in tracked()), "it would never run"

def test_ruff_of_the_hook_finds_what_is_wrong(tmp_path):
    entry = next(shlex.split(h["entry"]) for h in hooks() if h["id"] == "ruff")
    (tmp_path/"bad.py").write_text("print(what)\n")
    def run(*files):
        return subprocess.run([*entry, *files], cwd=root, capture_output=True, text=True).returncode
    assert run(tmp_path/"bad.py") == 1 and run("tests/conftest.py", "minisgl_lit/core/request.py") == 0

# workflows and templates

def workflows(): return sorted((root/".github"/"workflows").glob("*.yml"))

def jobs(): return {name: job for o in workflows() for name, job in load(o)["jobs"].items()}

def test_workflows_say_when_and_what():
    for path in workflows():
        o = load(path)
        assert o[True].keys() <= {"push", "pull_request"}, "YAML takes a bare `on` for True"
        assert o["permissions"] == {"contents": "read"}, "each job asks for more itself"
        for job in o["jobs"].values():
            assert job["runs-on"] == "ubuntu-latest"
            for step in job["steps"]: assert ("uses" in step) != ("run" in step)
            for need in [job.get("needs")]: assert need is None or need in o["jobs"]

def test_ci_is_what_a_laptop_runs():
    runs = [s.get("run") for s in jobs()["ci"]["steps"]]
    assert ".ci/run" in runs and (root/".ci"/"run").stat().st_mode & 0o111
    assert any("safe.directory" in (o or "")
               for o in runs), "without it git says nothing, and CI finds the tree clean"

def test_only_what_was_checked_is_published():
    # these two only check
    published = {name: job for name, job in jobs().items() if name not in ("ci", "clients")}
    assert "make test-clients" in [step.get("run") for step in jobs()["clients"]["steps"]]
    assert set(published) == {"site", "release"}
    for job in published.values(): assert job["needs"] == "ci"
    assert published["site"]["if"] == "github.ref == 'refs/heads/main'"
    assert published["release"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert published["site"]["permissions"] == {"pages": "write", "id-token": "write"}
    assert published["release"]["permissions"] == {"contents": "write"}

def test_what_is_published_is_made_by_ci():
    made = {s["uses"].split("@")[0]: s["with"]["path"] for s in jobs()["ci"]["steps"] if "with" in s}
    assert made == {"actions/upload-pages-artifact": "docs/_build/html", "actions/upload-artifact": "dist/"}
    run, makefile = (root/".ci"/"run").read_text(), (root/"Makefile").read_text()
    assert "docs/_build/html" in run and "docs/_build/html" in makefile
    assert "make -s wheel" in run and "--outdir dist" in makefile

def test_ci_image_has_the_python_of_the_settings():
    assert jobs()["ci"]["container"] == f"python:{cfg['min_python']}"

def forms():
    return sorted(o for o in (root/".github"/"ISSUE_TEMPLATE").glob("*.yml") if o.name != "config.yml")

@pytest.mark.parametrize("path", forms(), ids=lambda o: o.stem)
def test_issue_forms_are_as_the_forge_wants_them(path):
    form = load(path)
    assert form.keys() == {"name", "description", "labels", "body"} and len(form["description"]) < 200
    assert len({o["id"] for o in form["body"]}) == len(form["body"])
    for o in form["body"]:
        assert o["type"] in ("input", "textarea") and o["attributes"]["label"]
        assert o["attributes"].keys() <= {"label", "description", "placeholder"} | ({"render"}
            if o["type"] == "textarea" else set())
    assert any(o.get("validations") == {"required": True} for o in form["body"])

def test_templates_name_what_exists():
    texts = [o.read_text() for o in (root/".github").rglob("*") if o.suffix in (".md", ".yml")]
    for name in {m for o in texts for m in re.findall(r"make ([a-z-]+)", o)}: assert name in targets(), name
    for name in {m for o in texts for m in re.findall(r"placeholder: ([\w/]+\d\d_[\w.]+)", o)}:
        assert (root/"nbs"/f"{name}.ipynb").exists(), name

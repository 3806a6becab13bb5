"""A copy of the project in which a contributor has changed something: its chapters are edited and exported as
`make done` does it."""
import filecmp, json, os, shutil, subprocess, sys
from pathlib import Path

from nbrun import root

class Copy:
    "The project in another folder."
    def __init__(self, folder: Path):
        self.folder, self.edited = folder, []   # chapters, to be exported
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "data", "_build", "_static",
                                          "images", "gpu", "src")
        for name in ("nbs", "minisgl_lit", "tests", "docs"):
            shutil.copytree(root/name, folder/name, ignore=left_out)
        for o in root.iterdir():
            if o.is_file() and not o.name.startswith("."): shutil.copy(o, folder)
        self.env = os.environ | {"PYTHONPATH": str(folder)}

    def edit(self, chapter: str, old: str, new: str) -> None:
        "Replace a text that stands in one cell of a chapter"
        file = self.folder/"nbs"/f"{chapter}.ipynb"
        nb = json.loads(file.read_text(encoding="utf-8"))
        [cell] = [c for c in nb["cells"] if old in "".join(c["source"])]
        assert "".join(cell["source"]).count(old) == 1, old
        cell["source"] = "".join(cell["source"]).replace(old, new).splitlines(keepends=True)
        self._save(file, nb)

    def write(self, chapter: str, *cells: str) -> None:
        "A new chapter of code cells"
        like = json.loads((self.folder/"nbs/core/04_registry.ipynb").read_text(encoding="utf-8"))
        made = [dict(cell_type="code", id=f"{i:08x}", metadata={}, source=o.splitlines(keepends=True),
                     execution_count=None, outputs=[]) for i, o in enumerate(cells)]
        self._save(self.folder/"nbs"/f"{chapter}.ipynb", like | dict(cells=made))

    def _save(self, file: Path, nb: dict) -> None:
        file.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if file not in self.edited: self.edited.append(file)

    def export(self) -> None:
        "The chapters that were changed"
        subprocess.run([sys.executable, self.folder/"tests/export.py", self.folder, *self.edited], check=True,
                       capture_output=True, env=self.env)

    def touched(self) -> set[str]:
        "Files that are not those of the project, beside the package, which is made of them"
        def differs(file):
            return not (root/file).exists() or not filecmp.cmp(root/file, self.folder/file, shallow=False)
        files = [p.relative_to(self.folder) for p in self.folder.rglob("*") if p.is_file()]
        return {o.as_posix() for o in files if o.parts[0] != "minisgl_lit" and "__pycache__" not in o.parts
                and differs(o)}

    def run(self, program: str):
        "What a program prints last, as JSON"
        done = subprocess.run([sys.executable, "-c", program], cwd=self.folder, env=self.env,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

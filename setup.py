"""Packaging. All metadata is in settings.ini; nothing to edit here."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import Distribution, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

root = Path(__file__).resolve().parent
kernels = root/"build"/"kernels"   # compiled beforehand (tests/ship_kernels.py), or nothing: then the wheel is for any machine
ini = ConfigParser(delimiters=["="])
ini.read(root/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

def lines(key): return [o.strip() for o in cfg.get(key, "").splitlines() if o.strip()]

class BuildWithKernels(build_py):
    "The package, and the kernels that were compiled for it; not what nbdev notes for itself."
    def find_package_modules(self, *args):
        return [o for o in super().find_package_modules(*args) if o[1] != "_modidx"]

    def run(self):
        super().run()
        target = Path(self.build_lib)/cfg["lib_path"]/"kernels"/"shipped"
        if not self.editable_mode and kernels.is_dir():
            self.mkpath(str(target))
            for library in kernels.glob("*.so"): self.copy_file(str(library), str(target/library.name))

class PlatformWheel(bdist_wheel):
    "For any Python 3, and for the machines that the kernels are for."
    def get_tag(self):
        if self.root_is_pure: return super().get_tag()
        return "py3", "none", (kernels/"PLATFORM").read_text()

class WithKernels(Distribution):
    "Not pure Python if there are kernels."
    def has_ext_modules(self): return kernels.is_dir()

extras = {k.removesuffix("_requirements"): lines(k) for k in cfg if k.endswith("_requirements")}
extras["dev"] += extras["viz"] + extras["docs"]
setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    long_description=(root/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"], license=cfg["license"], keywords=cfg["keywords"].split(),
    python_requires=f">={cfg['min_python']}",
    packages=find_namespace_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"],   # folders of data, too
                                     exclude=["*.__pycache__"]),
    include_package_data=True,
    install_requires=lines("requirements"), extras_require=extras,
    entry_points={"console_scripts": lines("console_scripts")},
    zip_safe=False, distclass=WithKernels,
    cmdclass=dict(build_py=BuildWithKernels, bdist_wheel=PlatformWheel),
)

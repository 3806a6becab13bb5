"""Compile the kernels for the processors that a wheel is for: `make wheel`, before the wheel is built.

    python tests/ship_kernels.py                     every level of this machine
    python tests/ship_kernels.py here                what this processor runs, kept for it or compiled now
    CC=aarch64-linux-gnu-gcc python tests/ship_kernels.py aarch64      for another machine

The libraries go to build/kernels, with PLATFORM, the wheel's tag; setup.py takes them from there.
"""
import importlib, os, pkgutil, platform, re, shutil, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import minisgl_lit
from minisgl_lit.kernels.compiler import (
    LEVELS, compile_c, levels_here, library_folder, shipped_name, target_here)
from minisgl_lit.kernels.plan import entries, parameters, team_c
from script import load

ship_libraries = load('kernels/compiler')['ship_libraries']
FOLDER = Path(__file__).resolve().parents[1]/'build'/'kernels'

def sources() -> list[str]:
    "Every text that some chapter has compiled, with the entries that `load_kernels` adds"
    names = [o.name for o in pkgutil.walk_packages(minisgl_lit.__path__, 'minisgl_lit.')
             if not o.name.endswith('__main__')]
    texts = {value for name in names for key, value in vars(importlib.import_module(name)).items()
             if key.endswith('_c') and key[0] != '_' and isinstance(value, str) and value.startswith(team_c)
             and parameters(value)}
    return [text + entries(text) for text in sorted(texts)]

def platform_tag(machine: str) -> str:
    "With the oldest C library that has all that the libraries use"
    versions = [int(o) for library in FOLDER.glob('*.so')
                for o in re.findall(rb'GLIBC_2\.(\d+)', library.read_bytes())]
    return f'manylinux_2_{max([17, *versions])}_{machine}'

def ship_kept(text: str, folder: Path) -> None:
    "The library that `load` has made, or makes, for this very processor"
    shutil.copy(compile_c(text, folder, *target_here()), FOLDER/shipped_name(text, levels_here()[0]))

def main(machine: str = platform.machine()) -> None:
    here = machine == 'here'
    if here: machine = platform.machine()
    if machine not in LEVELS:
        sys.exit(f'ship_kernels: no levels of {machine!r} are known, only those of {", ".join(LEVELS)}')
    levels = [o.name for o in (levels_here()[:1] if here else LEVELS[machine])]
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool, library_folder() as kept:
        jobs = [pool.submit(ship_kept, text, kept) if here else
                pool.submit(ship_libraries, text, machine, FOLDER, [level])
                for text in sources() for level in levels]
    for job in jobs: job.result()
    (FOLDER/'PLATFORM').write_text(tag := platform_tag(machine))
    made = [*FOLDER.glob('*.so')]
    print(f'{len(made)} libraries, {sum(o.stat().st_size for o in made) / 1e6:.1f} MB, for {tag}: '
          f'{", ".join(levels)}')

if __name__ == '__main__': main(*sys.argv[1:])

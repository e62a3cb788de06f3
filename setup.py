"""Builds the C++ kernels and names the packages; everything else about the distribution stands in pyproject.toml.

One source, three builds, chosen by the CPU at run time. Nothing links to an OpenMP library: GOMP_* resolve against the
one that torch loads, so that the process has one pool of threads.
"""

import platform
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ENGINE = Path("engine/pilotfish_engine")
KERNELS = ENGINE / "kernels" / "csrc"
DRAFTS = Path("examples/drafts")
NGRAM = ENGINE / "speculation" / "csrc" / "ngram.cpp"
BASE = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"]
FLAGS = [*BASE, "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"]
LEVELS = {"_cpu": [], "_cpu_v3": ["-march=x86-64-v3"], "_cpu_v4": ["-march=x86-64-v4"]}


class BuildApart(build_ext):
    """The builds of one source share object names, so each gets a folder of its own."""

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, f"{self.build_temp}/{ext.name}"
        super().build_extension(ext)
        self.build_temp = shared


def extension(name: str, sources: list[Path], flags: list[str]) -> Extension:
    headers = [str(header) for header in sorted(sources[0].parent.glob("*.h"))]
    return Extension(
        name, [str(source) for source in sources], depends=headers, extra_compile_args=flags, language="c++"
    )


sources = sorted(KERNELS.glob("*.cpp"))
levels = LEVELS if platform.machine() in ("x86_64", "AMD64") else {"_cpu": []}
modules = [extension(f"pilotfish_engine.kernels.{name}", sources, FLAGS + flags) for name, flags in levels.items()]
if NGRAM.exists():
    modules.append(extension("pilotfish_engine.speculation._ngram", [NGRAM], BASE))
packages = {name: f"{root}/{name.replace('.', '/')}" for root in ("engine", "operator") for name in find_packages(root)}
if DRAFTS.exists():  # an operator's image has no use for it
    packages["pilotfish_drafts"] = str(DRAFTS)
setup(
    packages=list(packages),
    package_dir={name: folder for name, folder in packages.items() if "." not in name},
    package_data={
        "": ["py.typed", "*.cpp"],
        "pilotfish_drafts": ["*/*", "*/training/*"],
        "pilotfish_operator.simulate": ["machines/*.json"],
    },
    ext_modules=modules,
    cmdclass={"build_ext": BuildApart},
)

"""Builds the stand-in for CUDA and NCCL that fits the torch of this environment, into lib/hollow of the environment.

.cache/hollow/bin/python tests/hollow/build.py

It needs g++. The headers of CUDA come with torch's wheels, and those in crt/ with that of triton.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
LIB = Path(sys.prefix, "lib/hollow")
SITE = Path(sysconfig.get_path("purelib"))
TORCH = SITE / "torch"
CUDA_INCLUDES = (SITE / "nvidia/cu13/include", SITE / "triton/backends/nvidia/include")
RUNTIME = ("runtime", "races", "nvml", "nccl")
COMPILER = ("g++", "-std=c++20", "-fPIC", "-w")
STUBBED = re.compile(r"__cuda[A-Z]\w*|cuda[A-Z]\w*|cu[A-Z]\w*|nccl[A-Z]\w*|cupti[A-Z]\w*")
"""Names of entry points of the CUDA runtime, its driver, NCCL and CUPTI. cuBLAS and the like have longer prefixes."""


def symbols(library: Path, *flags: str) -> set[str]:
    lines = subprocess.run(["nm", *flags, library], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def stubs(objects: list[Path]) -> str:
    """C code: a function for each entry point that torch imports and our objects lack. It reports that it was called.

    Those of CUPTI do not: the profiler sees an empty device.
    """
    libraries = [*TORCH.glob("lib/*.so*"), *TORCH.glob("_C*.so")]
    imported = set().union(*(symbols(path, "-D", "--undefined-only") for path in libraries))
    defined = set().union(*(symbols(path, "--defined-only") for path in objects))
    missing = sorted(name for name in imported - defined if STUBBED.fullmatch(name))
    values = {name: "0" if name.startswith("cupti") else f'hollow_stub("{name}")' for name in missing}
    functions = [f"int {name}(void) {{ return {value}; }}" for name, value in values.items()]
    return "\n".join(["int hollow_stub(const char*);", *functions, ""])


def compile_(*arguments: str | Path) -> None:
    subprocess.run([*COMPILER, *arguments], check=True)


def main() -> None:
    target = LIB / "operators.so"
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__), TORCH / "version.py"]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    LIB.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in CUDA_INCLUDES]
    objects = [LIB / f"{name}.o" for name in RUNTIME]
    for name, path in zip(RUNTIME, objects, strict=True):
        compile_("-O2", "-c", *includes, HERE / f"{name}.cpp", "-o", path)
    (LIB / "stubs.c").write_text(stubs(objects))
    subprocess.run(["gcc", "-fPIC", "-w", "-c", LIB / "stubs.c", "-o", LIB / "stubs.o"], check=True)
    compile_("-shared", *objects, LIB / "stubs.o", "-o", LIB / "libhollow.so", "-ldl", "-lpthread", "-lrt")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):  # what torch and pynvml open by name
        link = LIB / name
        link.unlink(missing_ok=True)
        link.symlink_to("libhollow.so")
    of_torch = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include", f"-L{TORCH}/lib"]
    libraries = ["-ltorch_cpu", "-ltorch_cuda", "-ltorch", "-lc10", "-lc10_cuda"]
    compile_("-shared", *includes, *of_torch, HERE / "operators.cpp", "-o", target, *libraries)


if __name__ == "__main__":
    main()

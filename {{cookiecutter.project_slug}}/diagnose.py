"""Where does the time go, and which setting would help? Takes the same arguments as train.py, and those below.

python diagnose.py
torchrun --standalone --nproc-per-node=gpu diagnose.py
"""

import argparse
import sys

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import exit_with_message


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and the arguments that train.py takes."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    text = "target seconds of each measurement (default: 0.3)"
    add("--seconds", type=float, default=0.3, metavar="S", help=text)
    add("--json", action="store_true", help="print the numbers as JSON; everything else goes to stderr")
    text = "write a profile of N steps to run.folder, for https://ui.perfetto.dev"
    add("--trace", type=int, default=0, metavar="N", help=text)
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake is reported at once
    args, train_argv = parse(sys.argv[1:])
    with exit_with_message():
        config = load_config(train_argv)

import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from fastgpu.diagnose import result
from fastgpu.diagnose.bench import Bench
from fastgpu.diagnose.verdict import judge
from fastgpu.process.config import Config
from fastgpu.process.world import World, init_distributed


def diagnose(cfg: Config, world: World, args: argparse.Namespace) -> dict[str, object]:
    """Measure, print the verdict, and return all numbers as JSON values."""
    bench = Bench(cfg, world, args.seconds)
    measured = bench.measure()
    verdict = world.broadcast(judge(measured, cfg.data.echo))
    if verdict.free_echo and verdict.cause != "COPY":  # the loop waits for rows to be read or decoded
        verdict = world.broadcast(judge(measured, cfg.data.echo, readers=bench.try_readers()))
    title = f"{world}, {bench.describe()}"
    world.print_once(f"\n{result.table(title, measured, verdict)}")
    if args.trace > 0:
        path = Path(cfg.run.folder) / "trace.json"
        bench.trace(args.trace, path)
        world.print_once(f"profile of {args.trace} steps: {path}, for https://ui.perfetto.dev")
    return {"config": bench.parts.config.flat(), **result.as_json(title, measured, verdict)}


if __name__ == "__main__":
    with exit_with_message(), init_distributed(config.dist, deterministic=config.run.deterministic) as world:
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            numbers = diagnose(config, world, args)
        if args.json:
            world.print_once(json.dumps(numbers, indent=2))

"""Where does the time go, and which setting would help? Takes the same arguments as train.py, and these:

--seconds S      longest time of a measurement (default 0.3), but at least one step or two pools; up to seven in a round
--json           print the numbers as JSON; everything else goes to stderr
--trace N        write a profile of N steps to run.folder, for https://ui.perfetto.dev

python diagnose.py
torchrun --standalone --nproc-per-node=gpu diagnose.py
"""

import argparse
import sys

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError, exit_with_message


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags above, and the arguments that train.py takes. Raises UserError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--trace", type=int, default=0)
    try:
        args, train_argv = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"command line: {error}; see --help") from None
    if not 0 < args.seconds < 3600:
        raise UserError(f"--seconds is {args.seconds:g}; it should be above 0 and below an hour")
    if args.trace < 0:
        raise UserError(f"--trace is {args.trace}; it should be a number of steps")
    return args, train_argv


if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake is reported at once
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit(0)
    with exit_with_message():
        args, train_argv = parse(sys.argv[1:])
        config = load_config(train_argv)

import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import train
from fastgpu.diagnose import result
from fastgpu.diagnose.bench import Bench
from fastgpu.diagnose.verdict import Options, judge
from fastgpu.process.config import Config
from fastgpu.process.world import World, init_distributed


def diagnose(cfg: Config, world: World, args: argparse.Namespace) -> dict[str, object]:
    """Measure, print the verdict, and return all numbers as JSON values."""
    with world.together():
        preflight = result.look(cfg.data, world)
    world.print_once("\n".join(preflight))
    bench = Bench(train, cfg, world, args.seconds)
    measured = bench.measure()
    options = Options(cfg.data.echo, n_rows=len(bench.parts.train_rows))
    verdict = world.broadcast(judge(measured, options))
    if verdict.cause in ("READ", "DECODE"):
        verdict = world.broadcast(judge(measured, options._replace(readers=bench.try_readers())))
    world.print_once(f"\n{result.table(bench.title, measured, verdict)}")
    if args.trace:
        path = Path(cfg.run.folder) / "trace.json"
        bench.trace(args.trace, path)
        world.print_once(f"profile of {args.trace} steps: {path}, for https://ui.perfetto.dev")
    return {"config": bench.parts.config.flat(), **result.as_json(bench.title, measured, verdict, preflight)}


if __name__ == "__main__":
    with exit_with_message(), init_distributed(config.dist) as world:
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            numbers = diagnose(config, world, args)
        if args.json:
            world.print_once(json.dumps(numbers, indent=2))

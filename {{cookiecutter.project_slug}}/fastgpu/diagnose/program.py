"""Measures the training of a config, and suggests a change."""

from pathlib import Path

from fastgpu.diagnose import result
from fastgpu.diagnose.bench import Bench
from fastgpu.diagnose.command import Diagnose, Program
from fastgpu.diagnose.verdict import judge
from fastgpu.process.config import Config
from fastgpu.process.world import World


def diagnose(train: Program, config: Config, world: World, asked: Diagnose) -> dict[str, object]:
    """Measure, print the verdict, and return all numbers as JSON values."""
    bench = Bench(train, config, world, asked.seconds)
    measured = bench.measure()
    verdict = world.broadcast(judge(measured, config.data.echo))
    if verdict.free_echo and verdict.cause != "COPY":  # the loop waits for rows to be read or decoded
        verdict = world.broadcast(judge(measured, config.data.echo, readers=bench.try_readers()))
    title = f"{world}, {bench.describe()}"
    world.print_once(f"\n{result.table(title, measured, verdict)}")
    if asked.trace > 0:
        path = Path(config.run.folder) / "trace.json"
        bench.trace(asked.trace, path)
        world.print_once(f"profile of {asked.trace} steps: {path}, for https://ui.perfetto.dev")
    return {"config": bench.parts.config.flat(), **result.as_json(title, measured, verdict)}

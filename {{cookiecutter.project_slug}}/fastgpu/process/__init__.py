"""The process: launch, config, process group, machine, signals, files.

launch.py         what torchrun set; errors and warnings for a person; the exit code
config.py         the settings: one class for each section of config.yaml
config_loader.py  config.yaml and the command line become one checked Config
yaml_text.py      YAML with the line of each key
seeds.py          seeds of random generators, derived from the seed of the run
project.py        the folder of the project
commands.py       command lines as dataclasses
machine.py        the CPUs and the memory that this process may use
world.py          the process group: device, rank, collectives, errors raised on all ranks
signals.py        signals that stop a run, on all ranks after the same step
files.py          atomic writes, and one writer for each folder
content.py        the format of a file, recognized from its first bytes
tools.py          functions that the tools beside train.py share
"""

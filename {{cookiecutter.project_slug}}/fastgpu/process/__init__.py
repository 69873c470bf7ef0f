"""The process: its launch, its config, its process group, its machine, and how it ends.

launch.py         the values that torchrun set; errors and warnings for a person; the exit code
config.py         the settings: one class for each section of config.yaml
config_loader.py  config.yaml and the command line become one checked Config
machine.py        the CPUs and the memory that this process may use
world.py          the process group: device, rank, collectives, an error of one rank on every rank
signals.py        being asked to stop, and all ranks stopping at one step
files.py          files that are complete or absent, and one writer for each folder
"""

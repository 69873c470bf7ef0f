"""One training run, from its folder to its last checkpoint.

run          a run as the training loop uses it: its position, checkpoints and log
folder       the folder of a run, and whether it belongs to the run that is asked for
record       run.json, config.yaml and the lines that are printed: what it is trained with
checkpoint   saving and resuming: complete or absent, verified when read
model_files  the model to use, without the training data
"""

"""One training run, from its folder to its last checkpoint.

run          a run as the training loop uses it: its position, checkpoints and log
folder       the folder of a run, and whether it belongs to the run that is asked for
record       run.json and config.yaml: what it was trained with
agreement    signals to any rank, on which all ranks act at the same step
losses       the losses of the steps, which stay on the device until there is a report
checkpoint   saving and resuming: complete or absent, verified when read
model_files  the model to use, without the training data
describe     the lines that are printed when a run starts
"""

"""What happens to a batch on the device: augmentation, step, optimizer, evaluation.

augment.py   augmentation of images
step.py      precision, parts of a batch, learning rate, and the state that a checkpoint keeps
optim.py     the optimizer that the config asks for
apex.py      the fused kernels and the old DDP of NVIDIA Apex, if it is installed
parallel.py  what the ranks share: gradients, running statistics, and seeds that differ
evaluate.py  metrics over validation rows, exact for any number of ranks
ranking.py   Recall@k and NDCG@k of recommendations
"""

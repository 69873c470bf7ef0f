"""What convert.py is made of: other data into HDF5 files that are read fastest, and a look at the files one has.

Training does not import this room. If you do not need it, delete it together with convert.py and tests/fastgpu/convert.
A project for images has no files for recommenders, and the other way round: commands_*.py are found in the folder.

    command_line             the sub-commands and the flags that they share
    commands_files           arrays, repack, info, verify
    commands_images          images, cifar10, celeba, synthetic --kind images
    commands_recsys          movielens, arrays --held-out, synthetic --kind interactions
    array_files              NumPy files and sparse matrices as a source of rows
    image_files              folders and CSV lists of image files as a source of rows
    cifar_celeba             CIFAR-10 and CelebA as they are published
    movielens                MovieLens as it is published
    interactions             users and their items, with users held out for validation and test
    synthetic_images         made-up images
    synthetic_interactions   made-up users and items
    skipping                 what --on-error skip leaves out
    writing                  sources of rows -> files
    writer                   one file, or the shards of one
    columns                  one field of the rows in a file: blocks, checksums, compression
    statistics               mean and standard deviation of images
    signals                  Ctrl-C and SIGTERM
"""

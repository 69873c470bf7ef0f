"""Image files as convert.py and predict.py read them. Training, which reads HDF5 files, needs none.

folders.py       the image files in a folder
pixels.py        image file -> upright RGB pixels of one size
"""

from fastgpu.imagefiles.folders import list_images
from fastgpu.imagefiles.pixels import read_image, read_preprocessing

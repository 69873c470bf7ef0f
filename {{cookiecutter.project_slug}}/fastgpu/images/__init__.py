"""Images: reader threads decode JPEG, PNG or WebP bytes, and batches are augmented on the device.

decode.py        one encoded image: the pixels of any crop, resized
crops.py         the crop of an image, random or at the centre, and how images were prepared
column.py        the codec that turns a column of encoded images into a column of pixels
augment.py       random augmentation of a batch on the device
checks.py        checks that a network can be trained on the images and labels of a source
"""

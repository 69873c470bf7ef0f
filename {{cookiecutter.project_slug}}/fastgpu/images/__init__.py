"""Images: decoded from JPEG, PNG or WebP bytes by the reader threads, and augmented in batches on the device.

decode.py        one encoded image: the pixels of any part of it, resized
parts.py         which part of an image a row shows, and how it is prepared
column.py        a column of pixels, made of a column of encoded images
augment.py       random augmentation of a batch on the device
checks.py        whether a source has images and labels that a network can be trained on
"""

import io

import h5py
import numpy as np
from harness import ALONE
from PIL import Image

from fastgpu.diagnose.bench import Bench
from fastgpu.process.config import Config, Data


def test_encoded_images_have_the_size_of_the_first_epoch(tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 120, 3), np.uint8)).save(file, "JPEG")
    data = file.getvalue()
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as rows:
        rows["images/indptr"] = len(data) * np.arange(65)
        rows["images/values"] = np.frombuffer(data * 64, np.uint8)
        rows["images"].attrs["codec"] = "jpeg"
        rows["labels"] = np.arange(64) % 4
    fields = {"images": "images", "labels": "labels"}
    settings = {"image_size": {0: 20, 5: 28}, "min_crop_scale": 0.3, "batch_size": 32}
    config = Config(
        workload="images",
        data=Data(train=str(path), val=str(path), fields=fields, **settings),
        model={"width": 4},
        dist={"device": "cpu"},
    )
    bench = Bench(config, ALONE, 0.001)
    assert bench.loop.batch["images"].shape == (32, 3, 20, 20)  # the size of the first epoch
    assert bench.title.endswith(", images of 20 pixels as in the first epoch (later: data.image_size=28)")
